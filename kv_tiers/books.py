"""The CPU tier's books: which block lies in which slot of the node's slab, who holds it, what goes next.

Bookkeeping only. Replicas copy bytes through their own mapping of the slab (`kv_tiers/slab.py`,
`kv_tiers/block.py`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from kv_tiers.keys import BlockKey
from kv_tiers.tier import (
    Changes,
    Entry,
    Manifest,
    ReadLease,
    Reclaimed,
    TierStats,
    UnknownLease,
    WriteLease,
)


class _State(Enum):
    WRITING = "writing"
    VISIBLE = "visible"
    CONDEMNED = "condemned"


@dataclass(eq=False, slots=True)
class _Block:
    """A used slot. `holds` counts the leases on it; a writer's is one of them."""

    key: BlockKey
    slot: int
    state: _State
    holds: int


@dataclass(frozen=True, slots=True)
class _Lease:
    """`chain` is the request's keys in order, for recency; `blocks` those the lease holds."""

    owner: str
    chain: tuple[BlockKey, ...]
    blocks: tuple[_Block, ...]
    writing: bool


@dataclass(slots=True)
class _Counters:
    read: int = 0
    written: int = 0
    evicted: int = 0
    dropped: int = 0
    rolled_back: int = 0
    refused: int = 0


@dataclass(slots=True)
class _Journal:
    """Net change of visibility since the last message; dicts for their order."""

    seq: int = 0
    added: dict[BlockKey, None] = field(default_factory=dict)
    removed: dict[BlockKey, None] = field(default_factory=dict)

    def appeared(self, key: BlockKey) -> None:
        if key in self.removed:
            del self.removed[key]
        else:
            self.added[key] = None

    def vanished(self, key: BlockKey) -> None:
        if key in self.added:
            del self.added[key]
        else:
            self.removed[key] = None

    def drain(self) -> Changes:
        if self.added or self.removed:
            self.seq += 1
        changes = Changes(self.seq, tuple(self.added), tuple(self.removed))
        self.added.clear()
        self.removed.clear()
        return changes


class SlotBooks:
    """A `Tier` over `slots` slots of `slot_bytes` each; slot i starts at byte i * slot_bytes of the slab."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        if slots < 1 or slot_bytes < 1:
            raise ValueError(f"a tier needs slots and bytes in them, not {slots} of {slot_bytes}")
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._free = list(range(slots - 1, -1, -1))
        self._visible: dict[BlockKey, _Block] = {}
        self._writing: dict[BlockKey, _Block] = {}
        self._idle: OrderedDict[BlockKey, _Block] = OrderedDict()  # visible and not held, least recent first
        self._leases: dict[int, _Lease] = {}
        self._next_lease = 1
        self._journal = _Journal()
        self._counters = _Counters()

    @classmethod
    def fitting(cls, nbytes: int, slot_bytes: int) -> SlotBooks:
        """As many slots as a slab of `nbytes` has room for; ValueError if that is none."""
        if nbytes < slot_bytes:
            raise ValueError(f"{nbytes} bytes hold no block of {slot_bytes}")
        return cls(nbytes // slot_bytes, slot_bytes)

    def longest_run(self, keys: Sequence[BlockKey]) -> int:
        """How many leading keys are visible."""
        for run, key in enumerate(keys):
            if key not in self._visible:
                return run
        return len(keys)

    def prepare_read(self, keys: Sequence[BlockKey], owner: str, *, worth_s: float = 0.0) -> ReadLease:
        """Pin the longest leading run."""
        chain = tuple(keys[: self.longest_run(keys)])
        blocks = tuple(self._visible[key] for key in chain)
        for block in blocks:
            block.holds += 1
            self._idle.pop(block.key, None)
        lease_id = self._open(_Lease(owner, chain, blocks, writing=False))
        return ReadLease(lease_id, self._entries(blocks))

    def complete_read(self, lease_id: int) -> None:
        """Unpin."""
        lease = self._close(lease_id, writing=False)
        self._counters.read += len(lease.blocks)
        self._release(lease)

    def prepare_write(self, keys: Sequence[BlockKey], owner: str, *, tenant: str | None = None) -> WriteLease:
        """Give out slots, head of the chain first."""
        chain = tuple(keys)
        self._touch(chain)
        request = set(chain)
        blocks: list[_Block] = []
        present: list[BlockKey] = []
        being_written: list[BlockKey] = []
        no_room: list[BlockKey] = []
        for key in chain:
            if key in self._visible:
                present.append(key)
            elif key in self._writing:
                being_written.append(key)
            elif self._free or self._evict_one(request):
                block = _Block(key, self._free.pop(), _State.WRITING, holds=1)
                self._writing[key] = block
                blocks.append(block)
            else:
                no_room.append(key)
        self._counters.refused += len(no_room)
        lease_id = self._open(_Lease(owner, chain, tuple(blocks), writing=True))
        entries = self._entries(blocks)
        return WriteLease(lease_id, entries, tuple(present), tuple(being_written), tuple(no_room))

    def complete_write(self, lease_id: int, written: Sequence[BlockKey]) -> tuple[BlockKey, ...]:
        """Commit `written`, roll back the rest."""
        lease = self._lease(lease_id, writing=True)
        commit = set(written)
        foreign = commit - {block.key for block in lease.blocks}
        if foreign:
            raise ValueError(f"lease {lease_id} has no slot for {sorted(foreign)}")
        self._close(lease_id, writing=True)
        committed: list[BlockKey] = []
        for block in lease.blocks:
            if block.state is _State.WRITING and block.key in commit:
                del self._writing[block.key]
                self._visible[block.key] = block
                block.state = _State.VISIBLE
                self._journal.appeared(block.key)
                committed.append(block.key)
            else:
                self._roll_back(block)
        self._counters.written += len(committed)
        self._release(lease)
        self._touch(lease.chain)
        return tuple(committed)

    def drop(self, keys: Sequence[BlockKey]) -> int:
        """Hide blocks at once; a held slot is freed with its last lease."""
        dropped = [key for key in dict.fromkeys(keys) if key in self._visible]
        for key in dropped:
            self._hide(key)
        self._counters.dropped += len(dropped)
        return len(dropped)

    def release_owner(self, owner: str) -> Reclaimed:
        """End the leases of a dead owner."""
        read_blocks = written_blocks = 0
        ids = [lease_id for lease_id, lease in self._leases.items() if lease.owner == owner]
        for lease_id in ids:
            lease = self._leases[lease_id]
            if lease.writing:
                written_blocks += len(lease.blocks)
                self.complete_write(lease_id, ())
            else:
                read_blocks += len(lease.blocks)
                self._close(lease_id, writing=False)
                self._release(lease)
        return Reclaimed(len(ids), read_blocks, written_blocks)

    def clear(self) -> None:
        """Hide everything and condemn what is being written."""
        for key in list(self._visible):
            self._hide(key)
        for block in self._writing.values():
            block.state = _State.CONDEMNED
        self._writing.clear()

    def drain_changes(self) -> Changes:
        """The net change since the last message."""
        return self._journal.drain()

    def manifest(self) -> Manifest:
        """All visible keys."""
        return Manifest(self._journal.drain().seq, tuple(self._visible))

    def stats(self) -> TierStats:
        """Gauges and counters."""
        used = self.slots - len(self._free)
        readers = sum(1 for lease in self._leases.values() if not lease.writing)
        return TierStats(
            capacity=self.slots,
            free=len(self._free),
            visible=len(self._visible),
            pinned=len(self._visible) - len(self._idle),
            writing=len(self._writing),
            condemned=used - len(self._visible) - len(self._writing),
            read_leases=readers,
            write_leases=len(self._leases) - readers,
            blocks_read=self._counters.read,
            blocks_written=self._counters.written,
            blocks_evicted=self._counters.evicted,
            blocks_dropped=self._counters.dropped,
            blocks_rolled_back=self._counters.rolled_back,
            blocks_refused=self._counters.refused,
        )

    def check(self) -> None:
        """Assert that every slot has one owner and every hold a lease."""
        holds: dict[_Block, int] = {}
        for lease in self._leases.values():
            for block in lease.blocks:
                holds[block] = holds.get(block, 0) + 1
        blocks = {*holds, *self._visible.values(), *self._writing.values()}
        assert sorted([*self._free, *(block.slot for block in blocks)]) == list(range(self.slots))
        for block in blocks:
            assert block.holds == holds.get(block, 0)
            assert (self._visible.get(block.key) is block) == (block.state is _State.VISIBLE)
            assert (self._writing.get(block.key) is block) == (block.state is _State.WRITING)
        assert not self._visible.keys() & self._writing.keys()
        assert all(block.holds == 1 for block in self._writing.values())
        idle = {key for key, block in self._visible.items() if block.holds == 0}
        assert self._idle.keys() == idle
        assert self._journal.added.keys() <= self._visible.keys()
        assert not self._journal.removed.keys() & self._visible.keys()

    def _open(self, lease: _Lease) -> int:
        lease_id = self._next_lease
        self._next_lease += 1
        self._leases[lease_id] = lease
        return lease_id

    def _lease(self, lease_id: int, *, writing: bool) -> _Lease:
        lease = self._leases.get(lease_id)
        if lease is None or lease.writing != writing:
            raise UnknownLease(lease_id)
        return lease

    def _close(self, lease_id: int, *, writing: bool) -> _Lease:
        lease = self._lease(lease_id, writing=writing)
        del self._leases[lease_id]
        return lease

    def _entries(self, blocks: Sequence[_Block]) -> tuple[Entry, ...]:
        return tuple(Entry(block.key, block.slot * self.slot_bytes) for block in blocks)

    def _release(self, lease: _Lease) -> None:
        """Give up the lease's holds, tail first, so that the head of the chain ends up most recent."""
        for block in reversed(lease.blocks):
            block.holds -= 1
            if block.holds == 0:
                self._settle(block)

    def _settle(self, block: _Block) -> None:
        """Nobody holds the block any more: it is evictable, or its slot is free."""
        if block.state is _State.VISIBLE:
            self._idle[block.key] = block
        else:
            assert block.state is _State.CONDEMNED
            self._free.append(block.slot)

    def _roll_back(self, block: _Block) -> None:
        if block.state is _State.WRITING:
            del self._writing[block.key]
            block.state = _State.CONDEMNED
        self._counters.rolled_back += 1

    def _hide(self, key: BlockKey) -> None:
        block = self._visible.pop(key)
        block.state = _State.CONDEMNED
        self._journal.vanished(key)
        if self._idle.pop(key, None) is not None:
            self._settle(block)

    def _touch(self, chain: Sequence[BlockKey]) -> None:
        """Make the chain's idle blocks most recent, its head last."""
        for key in reversed(chain):
            if key in self._idle:
                self._idle.move_to_end(key)

    def _evict_one(self, spare: set[BlockKey]) -> bool:
        """Free the least recently used slot. The request's own were just touched, so they come last."""
        victim = next(iter(self._idle), None)
        if victim is None or victim in spare:
            return False
        self._hide(victim)
        self._counters.evicted += 1
        return True
