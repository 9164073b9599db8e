"""Prefix reuse: full KV blocks of finished prompts go to a tier, and a later prompt with the same beginning loads them.

Blocks hold full prompt KV as computed, whatever the recipe: every recipe shares them, and a second question over the
same document selects anew. A block that is gone, corrupt or foreign is a miss and is recomputed, counted.

A request may let lossy blocks stand in where no exact one is known (`kv_tiers/lossy.py`). Then neither they nor what is
computed behind them is kept: only what is exact goes under exact keys.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.arrival import Arrival
from engine.model import ModelSpec
from engine.request import GenerationRequest
from engine.workspace import Workspace
from kv_tiers.at_rest import AtRest
from kv_tiers.block import BlockFault, BlockHeader, open_block, read_layer_run, write_run
from kv_tiers.block_copy import BlockViews
from kv_tiers.keys import BlockKey, block_keys, is_exact, lossy_key
from kv_tiers.tier import BlockMemory, BlockStore, Entry, ReadLease


@dataclass
class PrefixCounters:
    """Totals: tokens asked for and found, and those of them in lossy blocks; blocks found unusable (dropped and
    recomputed), blocks written, loads that were given up because they took too long.
    """

    tokens_asked: int = 0
    tokens_found: int = 0
    tokens_lossy: int = 0
    blocks_corrupt: int = 0
    blocks_written: int = 0
    loads_late: int = 0


@dataclass(frozen=True)
class FoundRun:
    """Known leading blocks under an open lease: their bytes and verified headers. `fill` ends the lease.

    `faulty`: the block behind them that has no right header, if that is what ended the run.
    """

    lease: int
    views: Sequence[memoryview]
    headers: Sequence[BlockHeader]
    keys: Sequence[BlockKey]
    faulty: BlockKey | None

    @property
    def blocks(self) -> int:
        return len(self.views)

    @property
    def exact(self) -> int:
        """Leading blocks that are as computed."""
        return next((at for at, key in enumerate(self.keys[: self.blocks]) if not is_exact(key)), self.blocks)


class PrefixCache:
    """A tier of blocks and the memory they lie in, for one model. Calls block: use a worker thread.

    `owner` names this replica in the tier's leases, so that a dead one's are reclaimed.
    """

    def __init__(
        self,
        spec: ModelSpec,
        tier: BlockStore,
        slab: BlockMemory,
        owner: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock`: monotonic seconds."""
        self.spec = spec
        self.tier = tier
        self.slab = slab
        self.owner = owner
        self._clock = clock
        self.counters = PrefixCounters()

    def keys(self, prompt: Sequence[int], tenant: str | None) -> list[BlockKey]:
        """Keys of the prompt's full blocks, first block first."""
        return block_keys(self.spec.fingerprint, prompt, self.spec.blocks.block_tokens, tenant=tenant)

    def load(
        self,
        workspace: Workspace,
        keys: Sequence[BlockKey],
        limit: int,
        worth_s: float = 0.0,
        at_rest: AtRest = AtRest.EXACT,
    ) -> int:
        """Load the longest known run of blocks in the first `limit` tokens; → tokens loaded (`workspace.filled`)."""
        found = self.open(keys, limit, worth_s, at_rest)
        if found is None:
            return 0
        arrival = Arrival(found.blocks, len(self.spec.layers), worth_s)
        self.fill(found, workspace, arrival)
        if arrival.blocks > found.exact:
            workspace.exact = found.exact * self.spec.blocks.block_tokens
        workspace.filled = arrival.blocks * self.spec.blocks.block_tokens
        return workspace.filled

    def open(
        self,
        keys: Sequence[BlockKey],
        limit: int,
        worth_s: float = 0.0,
        at_rest: AtRest = AtRest.EXACT,
    ) -> FoundRun | None:
        """Hold the longest known run of blocks in the first `limit` tokens; None where there is none.

        `worth_s`: seconds that computing those tokens would take; a store looks no longer than that. `at_rest`: the
        codec of lossy blocks that may go on where no exact one is known.
        """
        wanted = keys[: limit // self.spec.blocks.block_tokens]
        self.counters.tokens_asked += limit
        if not wanted:
            return None
        began = self._clock()
        found = self._read(wanted, worth_s)
        if at_rest is not AtRest.EXACT and found.blocks < len(wanted):
            left_s = max(0.0, worth_s - (self._clock() - began))
            found = self._extended(found, wanted, left_s, at_rest)
        if found.blocks:
            return found
        self.tier.complete_read(found.lease)
        self._drop(found.faulty)
        return None

    def fill(self, found: FoundRun, workspace: Workspace, arrival: Arrival) -> None:
        """Verify and copy an open run into the start of a workspace, layer by layer, and end its lease.

        `arrival` hears of every layer; it may be stopped, which ends the copying with the layer. Only what has come
        whole counts as found.
        """
        blocks, faulty = self.spec.blocks, found.faulty
        try:
            for layer in range(len(self.spec.layers)):
                wanted = arrival.blocks
                if not wanted:
                    break
                span = slice(0, wanted * blocks.block_tokens)
                keys, values = workspace.keys[layer][:, span], workspace.values[layer][:, span]
                good = read_layer_run(
                    found.views[:wanted], blocks, found.headers[:wanted], layer, keys, values
                )
                if good < wanted:
                    faulty = found.keys[good]
                arrival.landed(layer, good)
        finally:
            arrival.end()
            if arrival.complete:
                self.counters.tokens_found += arrival.blocks * blocks.block_tokens
                self.counters.tokens_lossy += max(0, arrival.blocks - found.exact) * blocks.block_tokens
            self.counters.loads_late += arrival.late
            self.tier.complete_read(found.lease)
        self._drop(faulty)

    def store(self, workspace: Workspace, keys: Sequence[BlockKey], tenant: str | None = None) -> int:
        """Write the workspace's full exact blocks that the tier does not have yet; → blocks written.

        Never waits for room: what does not fit is not kept. The workspace must be filled and must not change.
        """
        keys = keys[: workspace.exact // self.spec.blocks.block_tokens]
        lease = self.tier.prepare_write(keys, self.owner, tenant=tenant)
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

    def _extended(
        self, exact: FoundRun, wanted: Sequence[BlockKey], worth_s: float, at_rest: AtRest
    ) -> FoundRun:
        """An exact run with the lossy blocks behind it, if there are any; it is held until they are found."""
        rest = [lossy_key(key, at_rest) for key in wanted[exact.blocks :]]
        try:
            longer = self._read([*wanted[: exact.blocks], *rest], worth_s)
        except BaseException:
            self.tier.complete_read(exact.lease)
            raise
        better, other = (longer, exact) if longer.blocks > exact.blocks else (exact, longer)
        self.tier.complete_read(other.lease)
        self._drop(other.faulty)
        return better

    def _read(self, keys: Sequence[BlockKey], worth_s: float) -> FoundRun:
        """What a tier has of a chain, under a lease."""
        lease = self.tier.prepare_read(keys, self.owner, worth_s=worth_s)
        try:
            return self._verified(lease)
        except BaseException:
            self.tier.complete_read(lease.id)
            raise

    def _verified(self, lease: ReadLease) -> FoundRun:
        """The leading blocks of a lease whose headers are right."""
        blocks = self.spec.blocks
        views, headers = [], []
        faulty: BlockKey | None = None
        for entry in lease.entries:
            view = self.slab.view(entry.offset, blocks.nbytes)
            header = open_block(view, blocks, self.spec.fingerprint, entry.key)
            if isinstance(header, BlockFault):
                faulty = entry.key
                break
            views.append(view)
            headers.append(header)
        return FoundRun(lease.id, BlockViews(views), headers, [entry.key for entry in lease.entries], faulty)

    def _drop(self, faulty: BlockKey | None) -> None:
        if faulty is not None:
            self.counters.blocks_corrupt += 1
            self.tier.drop([faulty])

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


class PrefixLoad:
    """One prompt's load beside its computation: `run` in a thread that may block, `stop` from anywhere.

    `run` first asks what is known. Then `workspace.filled` and `workspace.arrival` say what will come, the engine may
    have the prompt, and the rest of `run` copies. `keys` are those of the prompt's full blocks.
    """

    def __init__(
        self,
        prefix: PrefixCache,
        request: GenerationRequest,
        workspace: Workspace,
        limit: int,
        worth_s: float,
    ) -> None:
        """`limit`: leading tokens that may be loaded; `worth_s`: seconds that computing them would take."""
        self.keys: list[BlockKey] = []
        self._prefix, self._request, self._workspace = prefix, request, workspace
        self._limit, self._worth_s = limit, worth_s
        self._arrival: Arrival | None = None
        self._stopped = False

    def run(self, opened: Callable[[], None]) -> None:
        """Load; `opened` is called as soon as it is known how much will come. Raises what the tier raises."""
        prefix, workspace = self._prefix, self._workspace
        self.keys = prefix.keys(self._request.prompt, self._request.tenant)
        found = prefix.open(self.keys, self._limit, self._worth_s, self._request.at_rest)
        if found is None:
            return
        arrival = self._arrival = Arrival(found.blocks, len(prefix.spec.layers), self._worth_s)
        if self._stopped:
            arrival.stop()
        else:
            workspace.arrival = arrival
            if found.exact < found.blocks:
                workspace.exact = found.exact * prefix.spec.blocks.block_tokens
            workspace.filled = found.blocks * prefix.spec.blocks.block_tokens
            opened()
        prefix.fill(found, workspace, arrival)

    def stop(self) -> None:
        """The prompt is not wanted any more; `run` returns soon, and writes nothing from then on."""
        self._stopped = True
        if self._arrival is not None:
            self._arrival.stop()


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
