"""Prefix reuse: full KV blocks of finished prompts go to a tier, and a later prompt with the same beginning loads them.

Blocks hold full prompt KV as computed, whatever the recipe: every recipe shares them, and a second question over the
same document selects anew. A block that is gone, corrupt or foreign is a miss and is recomputed, counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.model import ModelSpec
from engine.workspace import Workspace
from kv_tiers.block import BlockFault, BlockHeader, open_block, read_layer_run, write_run
from kv_tiers.keys import BlockKey, block_keys
from kv_tiers.tier import BlockMemory, BlockStore, Entry


@dataclass
class PrefixCounters:
    """Totals: tokens asked for and found, blocks found unusable (dropped and recomputed), blocks written."""

    tokens_asked: int = 0
    tokens_found: int = 0
    blocks_corrupt: int = 0
    blocks_written: int = 0


class PrefixCache:
    """A tier of blocks and the memory they lie in, for one model. Calls block: use a worker thread.

    `owner` names this replica in the tier's leases, so that a dead one's are reclaimed.
    """

    def __init__(self, spec: ModelSpec, tier: BlockStore, slab: BlockMemory, owner: str) -> None:
        self.spec = spec
        self.tier = tier
        self.slab = slab
        self.owner = owner
        self.counters = PrefixCounters()

    def keys(self, prompt: Sequence[int], tenant: str | None) -> list[BlockKey]:
        """Keys of the prompt's full blocks, first block first."""
        return block_keys(self.spec.fingerprint, prompt, self.spec.blocks.block_tokens, tenant=tenant)

    def load(self, workspace: Workspace, keys: Sequence[BlockKey], limit: int) -> int:
        """Load the longest known run of blocks in the first `limit` tokens; → tokens loaded (`workspace.filled`)."""
        size = self.spec.blocks.block_tokens
        wanted = keys[: limit // size]
        self.counters.tokens_asked += limit
        if not wanted:
            return 0
        lease = self.tier.prepare_read(wanted, self.owner)
        try:
            good = self._copy_in(workspace, lease.entries)
        finally:
            self.tier.complete_read(lease.id)
        if good < len(lease.entries):
            self.counters.blocks_corrupt += 1
            self.tier.drop([lease.entries[good].key])
        workspace.filled = good * size
        self.counters.tokens_found += workspace.filled
        return workspace.filled

    def store(self, workspace: Workspace, keys: Sequence[BlockKey]) -> int:
        """Write the workspace's full blocks that the tier does not have yet; → blocks written.

        Never waits for room: what does not fit is not kept. The workspace must be filled and must not change.
        """
        lease = self.tier.prepare_write(keys, self.owner)
        written: list[BlockKey] = []
        try:
            index = {key: place for place, key in enumerate(keys)}
            for run in _consecutive(lease.entries, index):
                self._copy_out(workspace, run, index[run[0].key])
                written.extend(entry.key for entry in run)
        finally:
            self.tier.complete_write(lease.id, written)
        self.counters.blocks_written += len(written)
        return len(written)

    def _copy_in(self, workspace: Workspace, entries: Sequence[Entry]) -> int:
        """Verify and copy blocks into the start of a workspace, layer by layer; → leading blocks that are whole."""
        blocks = self.spec.blocks
        views, headers = [], []
        for entry in entries:
            view = self.slab.view(entry.offset, blocks.nbytes)
            header = open_block(view, blocks, self.spec.fingerprint, entry.key)
            if isinstance(header, BlockFault):
                break
            views.append(view)
            headers.append(header)
        return self._copy_layers(workspace, views, headers)

    def _copy_layers(
        self, workspace: Workspace, views: Sequence[memoryview], headers: Sequence[BlockHeader]
    ) -> int:
        good = len(views)
        for layer in range(len(self.spec.layers)):
            if not good:
                break
            span = slice(0, good * self.spec.blocks.block_tokens)
            keys, values = workspace.keys[layer][:, span], workspace.values[layer][:, span]
            good = read_layer_run(views[:good], self.spec.blocks, headers[:good], layer, keys, values)
        return good

    def _copy_out(self, workspace: Workspace, run: Sequence[Entry], first: int) -> None:
        blocks = self.spec.blocks
        span = slice(first * blocks.block_tokens, (first + len(run)) * blocks.block_tokens)
        write_run(
            [self.slab.view(entry.offset, blocks.nbytes) for entry in run],
            blocks,
            self.spec.fingerprint,
            [entry.key for entry in run],
            [keys[:, span] for keys in workspace.keys],
            [values[:, span] for values in workspace.values],
        )


def _consecutive(entries: Sequence[Entry], index: dict[BlockKey, int]) -> list[list[Entry]]:
    """Entries in prompt order, split where blocks between them are not to be written."""
    runs: list[list[Entry]] = []
    last = -2
    for entry in sorted(entries, key=lambda entry: index[entry.key]):
        if index[entry.key] != last + 1:
            runs.append([])
        runs[-1].append(entry)
        last = index[entry.key]
    return runs
