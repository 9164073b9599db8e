"""What every tier of full blocks promises, what replicas see of a node's tiers, and the records both answer with.

Two interfaces. A replica copies between its tensors and memory it maps, at the offsets of a lease, so moving data is
two-phase (`BlockStore`): `prepare_*` reserves and pins, `complete_*` commits or rolls back. A node's tiers hand
blocks up and down between each other as whole buffers (`Tier`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from kv_tiers.at_rest import AtRest
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
    """What a replica uses of its node's tiers: a bounded store of blocks by key, in memory it can map.

    Keys of one call are one chain, first block first. A block is visible from its `complete_write` until it is
    evicted, dropped or cleared. A slot that a lease names changes hands only after that lease has ended. Calls may
    wait where tiers below are asked; they never raise for KV that is lost.
    """

    def prepare_read(self, keys: Sequence[BlockKey], owner: str, *, worth_s: float = 0.0) -> ReadLease:
        """Pin the longest leading run that is visible. The lease must be completed, also an empty one.

        `worth_s`: seconds that computing the KV of all these keys would take. What lies in slower tiers or on other
        nodes is fetched first where that is estimated to take less, for so long at most.
        """
        ...

    def complete_read(self, lease_id: int) -> None:
        """Unpin; the blocks become the most recently used, the head of the chain last. UnknownLease."""
        ...

    def prepare_write(self, keys: Sequence[BlockKey], owner: str, *, tenant: str | None = None) -> WriteLease:
        """A request had these keys: give slots to those that are neither visible nor being written, evicting as needed.

        The slots are charged to `tenant`'s quota. The lease must be completed, also an empty one.
        """
        ...

    def complete_write(self, lease_id: int, written: Sequence[BlockKey]) -> tuple[BlockKey, ...]:
        """Make the lease's `written` keys visible, free the slots of the rest; returns what became visible.

        Less than `written` after a `clear` in between. UnknownLease; ValueError (and no change) for a foreign
        key.
        """
        ...

    def drop(self, keys: Sequence[BlockKey]) -> int:
        """Make blocks invisible at once, also in the tiers below (a reader found them corrupt); returns how many."""
        ...


class Fetched(Enum):
    """What became of one block that was asked for. All but HIT leave the buffer's bytes undefined."""

    HIT = "here, whole: key and every checksum compared"
    MISS = "not here"
    CORRUPT = "here, but not that block or not whole: dropped"
    FAILED = "not answered, or too late: the tier is slow, gone or broken"


class Stored(Enum):
    """What became of one block that was handed down."""

    STORED = "visible"
    PRESENT = "here already, or somebody is writing it"
    NO_ROOM = "everything else is worth more, is pinned, or the tenant is at its quota"
    FAILED = "not written: the tier is slow, full, gone or broken"


def one_each(keys: Sequence[BlockKey], answers: Mapping[BlockKey, Stored]) -> list[Stored]:
    """Answers of a `put` by place, from those by key: a key that was handed down again is PRESENT by then."""
    told: set[BlockKey] = set()
    stored = []
    for key in keys:
        again = key in told and answers[key] is Stored.STORED
        stored.append(Stored.PRESENT if again else answers[key])
        told.add(key)
    return stored


class Tier(Protocol):
    """A bounded store of blocks by key, all of one slot size: memory, CPU slab, NVMe, Redis.

    One event loop calls it; methods that are not coroutines return at once. Calls are batches. Buffers are flat,
    page-aligned where the tier needs that, `slot_bytes` long and the caller's; nobody changes them during a call. A
    block is visible from the end of its `put` until it is evicted, dropped, expired or cleared; a `put` or process
    that dies half-way leaves none, also in a tier that outlives the process. Nothing raises for KV that is lost or for
    a tier that misbehaves: deadlines and breakers are the tier's own. Cancelling a call leaves the tier whole; the
    caller may reuse its buffers when the cancelled call has returned.
    """

    name: str
    """"memory", "cpu", "nvme", "redis": how gauges and the directory call it."""

    slot_bytes: int

    at_rest: AtRest
    """How blocks lie there. All but EXACT are put by exact keys, and visible under lossy ones (`keys.kept_as`) only."""

    @property
    def left_alone(self) -> bool:
        """Whether it is asked only now and then, for it has not answered: its breaker is open."""
        ...

    async def start(self) -> None:
        """Open the medium and find what an earlier process left there whole; the rest of it is removed."""
        ...

    def accessed(self, chain: Sequence[BlockKey]) -> None:
        """A request had this chain, for the eviction policy."""
        ...

    def longest_run(self, keys: Sequence[BlockKey]) -> int:
        """How many leading keys are visible, as far as is known here. A mere look."""
        ...

    async def get(self, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> list[Fetched]:
        """Copy blocks into buffers and verify them, each for itself; one answer per key. Corrupt ones are dropped."""
        ...

    async def put(
        self, keys: Sequence[BlockKey], blocks: Sequence[memoryview], *, tenant: str | None = None
    ) -> list[Stored]:
        """Keep copies, evicting as needed; one answer per key. Keys are in an order in which heads precede tails."""
        ...

    async def drop(self, keys: Sequence[BlockKey]) -> int:
        """Make blocks invisible at once; returns how many were visible."""
        ...

    def pin(self, keys: Sequence[BlockKey]) -> int:
        """Keep visible keys from eviction and expiry until `unpin`; how many leading ones (a tier bounds its pins)."""
        ...

    def unpin(self, keys: Sequence[BlockKey]) -> int:
        """End pins; how many there were."""
        ...

    def expire(self) -> int:
        """Hide what has not been used for the tier's time to live; returns how many."""
        ...

    async def clear(self) -> None:
        """Make everything invisible, also what is being written."""
        ...

    def drain_changes(self) -> Changes:
        """The net change of visibility since the last `drain_changes` or `manifest`."""
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

    async def close(self) -> None:
        """Finish or abandon what is under way and let go of the medium; a warm tier keeps its contents."""
        ...
