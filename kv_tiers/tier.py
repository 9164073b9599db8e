"""What every tier of full blocks promises, and the records it answers with.

A tier keeps books; it moves no bytes. Callers copy between their tensors and the tier's medium at the offsets
of a lease, so moving data is two-phase: `prepare_*` reserves and pins, `complete_*` commits or rolls back.
All calls take batches, return at once and never wait for room. One thread (or one actor) calls a tier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kv_tiers.keys import BlockKey


class UnknownLease(KeyError):
    """The lease was never given, is completed already, or was reclaimed from its dead owner."""

    def __str__(self) -> str:
        return f"no open lease {self.args[0]}: completed before, or reclaimed from its owner"


class Entry(NamedTuple):
    """A block's place in the tier's medium; `offset` in bytes."""

    key: BlockKey
    offset: int


@dataclass(frozen=True)
class ReadLease:
    """`entries`: the longest leading run of the keys asked for that is here, pinned until completed."""

    id: int
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class WriteLease:
    """What became of each key asked for: every one is in exactly one of the four.

    `entries` got a slot to write into. `present` are here already, `being_written` are promised by an open
    lease (maybe this one, for a key named twice); both are somebody's success, not an error. `no_room`:
    everything else is pinned.
    """

    id: int
    entries: tuple[Entry, ...]
    present: tuple[BlockKey, ...]
    being_written: tuple[BlockKey, ...]
    no_room: tuple[BlockKey, ...]


@dataclass(frozen=True)
class Changes:
    """Net change of the visible blocks since the last message. A key is in at most one of the two.

    `seq` numbers the messages that say something, from 1; an empty one repeats the number of the last.
    """

    seq: int
    added: tuple[BlockKey, ...]
    removed: tuple[BlockKey, ...]


@dataclass(frozen=True)
class Manifest:
    """Every visible block, as of message `seq`: what a directory needs after a gap."""

    seq: int
    keys: tuple[BlockKey, ...]


@dataclass(frozen=True)
class Reclaimed:
    """What a dead owner had held: open leases, and blocks pinned by its reads or half-written."""

    leases: int
    read_blocks: int
    written_blocks: int


@dataclass(frozen=True)
class TierStats:
    """Gauges in blocks (`capacity` = `free` + `visible` + `writing` + `condemned`), open leases, counters.

    `pinned`: visible and held by readers. `condemned`: invisible for good, its slot held by a reader or
    writer still.
    """

    capacity: int
    free: int
    visible: int
    pinned: int
    writing: int
    condemned: int
    read_leases: int
    write_leases: int
    blocks_read: int
    blocks_written: int
    blocks_evicted: int
    blocks_dropped: int
    blocks_rolled_back: int
    blocks_refused: int


class BlockMemory(Protocol):
    """The bytes that a tier's offsets refer to."""

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Writable bytes [offset, offset + nbytes), not copied."""
        ...


class BlockStore(Protocol):
    """The part of a tier that a replica uses: bounded store of blocks by key.

    Keys of one call are one chain, first block first. A block is visible from its `complete_write` until it is
    evicted, dropped or cleared. Eviction takes the least recently used block that nobody holds, of one request the
    tail first. A slot that a lease names changes hands only after that lease has ended.
    """

    def prepare_read(self, keys: Sequence[BlockKey], owner: str) -> ReadLease:
        """Pin the longest leading run that is visible. The lease must be completed, also an empty one."""
        ...

    def complete_read(self, lease_id: int) -> None:
        """Unpin; the blocks become the most recently used, the head of the chain last. UnknownLease."""
        ...

    def prepare_write(self, keys: Sequence[BlockKey], owner: str) -> WriteLease:
        """Give slots to keys that are neither visible nor being written, evicting as needed.

        Blocks of the same request are not evicted for one another. The lease must be completed, also an empty
        one.
        """
        ...

    def complete_write(self, lease_id: int, written: Sequence[BlockKey]) -> tuple[BlockKey, ...]:
        """Make the lease's `written` keys visible, free the slots of the rest; returns what became visible.

        Less than `written` after a `clear` in between. UnknownLease; ValueError (and no change) for a foreign
        key.
        """
        ...

    def drop(self, keys: Sequence[BlockKey]) -> int:
        """Make visible blocks invisible at once (a reader found them corrupt); returns how many."""
        ...


class Tier(BlockStore, Protocol):
    """A whole tier: what its owner needs beside what replicas use."""

    def longest_run(self, keys: Sequence[BlockKey]) -> int:
        """How many leading keys are visible. A mere look: pins nothing, makes nothing recent."""
        ...

    def release_owner(self, owner: str) -> Reclaimed:
        """End every lease of an owner that is proven dead: reads unpin, writes roll back."""
        ...

    def clear(self) -> None:
        """Make everything invisible, also what open leases are writing. They stay to be completed."""
        ...

    def drain_changes(self) -> Changes:
        """The net change since the last `drain_changes` or `manifest`."""
        ...

    def manifest(self) -> Manifest:
        """All visible keys; takes the place of the next `drain_changes`."""
        ...

    def stats(self) -> TierStats:
        """Gauges and counters."""
        ...

    def check(self) -> None:
        """Assert every invariant. For tests and idle moments."""
        ...
