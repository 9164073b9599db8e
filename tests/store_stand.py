"""A store on virtual time: tiers of bytes in dictionaries that can be slow, wrong and gone, a directory, a peer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from benchmarks.tiers_sim_loop import VirtualLoop, run
from kv_tiers import store_fetch, store_spill
from kv_tiers.at_rest import AtRest
from kv_tiers.books import SlotBooks
from kv_tiers.directory import DirectoryState, Located, Place
from kv_tiers.keys import BlockKey
from kv_tiers.store import TieredStore
from kv_tiers.store_ports import joined, parted
from kv_tiers.tier import Changes, Fetched, Manifest, ReadLease, Stored, TierStats
from policies.tiering.speed import Speed, Speeds

__all__ = [
    "SLOT",
    "DictTier",
    "Directory",
    "Memory",
    "Neighbour",
    "Stand",
    "VirtualLoop",
    "Worth",
    "content",
    "key",
    "keys",
    "run",
    "small_pieces",
]

SLOT = 64


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """For whoever imports it: loads and writes are of two blocks each."""
    monkeypatch.setattr(store_fetch, "PIECE_BYTES", 2 * SLOT)
    monkeypatch.setattr(store_spill, "BATCH_BYTES", 2 * SLOT)


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(4, "big") * 8)


def keys(*numbers: int) -> list[BlockKey]:
    return [key(number) for number in numbers]


def content(of: BlockKey) -> bytes:
    return (of.digest * (SLOT // 32 + 1))[:SLOT]


class Memory:
    def __init__(self, slots: int) -> None:
        self.data = bytearray(slots * SLOT)

    def view(self, offset: int, nbytes: int) -> memoryview:
        return memoryview(self.data)[offset : offset + nbytes]


class DictTier:
    """A `Tier` in a dictionary. Faults: `wrong` keys' answers, `seconds` per call and block, `open` holds calls back.

    `shy`: it does not know what it has, as Redis does not know what other nodes put there.
    """

    slot_bytes = SLOT
    at_rest = AtRest.EXACT
    left_alone = False

    def __init__(self, name: str, slots: int = 64, *, shy: bool = False) -> None:
        self.name = name
        self.books = SlotBooks(slots, SLOT, clock=lambda: asyncio.get_running_loop().time())
        self.blocks: dict[BlockKey, bytes] = {}
        self.wrong: dict[BlockKey, Fetched] = {}
        self.refusal: Stored | None = None
        self.seconds_per_call = self.seconds_per_block = 0.0
        self.open = asyncio.Event()
        self.open.set()
        self.shy = shy
        self.gets: list[list[BlockKey]] = []
        self.puts: list[list[BlockKey]] = []
        self.tenants: dict[BlockKey, str | None] = {}

    def fill(self, keys: Sequence[BlockKey]) -> None:
        lease = self.books.reserve(keys, "test")
        self.books.complete_write(lease.id, [entry.key for entry in lease.entries])
        self.blocks |= {entry.key: content(entry.key) for entry in lease.entries}

    async def start(self) -> None: ...

    def accessed(self, chain: Sequence[BlockKey]) -> None:
        self.books.accessed(chain)

    def longest_run(self, keys: Sequence[BlockKey]) -> int:
        return 0 if self.shy else self.books.longest_run(keys)

    async def get(self, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> list[Fetched]:
        self.gets.append(list(keys))
        for view in into:
            view[:] = b"\xee" * SLOT  # whoever is served less than a hit must not see this
        await asyncio.sleep(self.seconds_per_call + self.seconds_per_block * len(keys))
        await self.open.wait()
        answers = []
        for key, view in zip(keys, into, strict=True):
            answer = self.wrong.get(key) or (Fetched.HIT if self.books.holds(key) else Fetched.MISS)
            if answer is Fetched.HIT:
                view[:] = self.blocks[key]
            answers.append(answer)
        return answers

    async def put(
        self, keys: Sequence[BlockKey], blocks: Sequence[memoryview], *, tenant: str | None = None
    ) -> list[Stored]:
        self.puts.append(list(keys))
        if self.refusal is not None:
            return [self.refusal] * len(keys)
        lease = self.books.reserve(keys, "put", tenant=tenant)
        await asyncio.sleep(self.seconds_per_call + self.seconds_per_block * len(keys))
        await self.open.wait()
        for key, block in zip(keys, blocks, strict=True):
            assert bytes(block) == content(key), "written down under a key that is not its own"
            self.blocks[key] = bytes(block)
            self.tenants[key] = tenant
        self.books.complete_write(lease.id, [entry.key for entry in lease.entries])
        return [Stored.NO_ROOM if key in lease.no_room else Stored.STORED for key in keys]

    async def drop(self, keys: Sequence[BlockKey]) -> int:
        return self.books.drop(keys)

    def pin(self, keys: Sequence[BlockKey]) -> int:
        return self.books.pin(keys)

    def unpin(self, keys: Sequence[BlockKey]) -> int:
        return self.books.unpin(keys)

    def expire(self) -> int:
        return self.books.expire()

    async def clear(self) -> None:
        self.books.clear()

    def drain_changes(self) -> Changes:
        return self.books.drain_changes()

    def manifest(self) -> Manifest:
        return self.books.manifest()

    def stats(self) -> TierStats:
        return self.books.stats()

    def check(self) -> None:
        self.books.check()

    async def close(self) -> None: ...


class Directory:
    """`DirectoryPort` over the real state."""

    def __init__(self) -> None:
        self.state = DirectoryState(lease_s=1e9, epoch=1)
        self.state.renew_shared(Place("", "redis"), 1, 0.0)
        self.located = 0
        self.forgotten: list[tuple[Place, list[BlockKey]]] = []

    def know(self, place: Place, keys: Sequence[BlockKey]) -> None:
        if place.node:
            self.state.register(place, 1, 0.0)
            self.state.resync(place, 1, 1, joined(keys), True, True)
        else:
            self.state.announce_shared(place, 1, joined(keys), b"")

    async def locate(self, keys: bytes) -> Located:
        self.located += 1
        return self.state.locate(keys)

    async def forget(self, place: Place, keys: bytes) -> int:
        self.forgotten.append((place, parted(keys)))
        return self.state.forget(place, keys)

    async def copies(self, keys: bytes) -> bytes:
        return self.state.copies(keys)


class Neighbour:
    """`Peer`: another node's slab, as a `DictTier`."""

    def __init__(self, memory: Memory) -> None:
        self.tier = DictTier("cpu")
        self.memory = memory

    async def get(self, keys: Sequence[BlockKey], offsets: Sequence[int]) -> list[Fetched]:
        return await self.tier.get(keys, [self.memory.view(offset, SLOT) for offset in offsets])


class Worth:
    """`Admission`: everything but `unworthy`."""

    def __init__(self) -> None:
        self.unworthy: set[BlockKey] = set()
        self.requests: list[tuple[BlockKey, ...]] = []

    def accessed(self, chain: Sequence[BlockKey], now: float) -> None:
        self.requests.append(tuple(chain))

    def worth(self, keys: Sequence[BlockKey], now: float) -> list[bool]:
        return [key not in self.unworthy for key in keys]


class Stand:
    """One node's store and everything around it. Make it inside `run`."""

    def __init__(
        self, slots: int = 16, *tiers: DictTier, at_once: bool = False, speeds: Speeds | None = None
    ) -> None:
        loop = asyncio.get_running_loop()
        self.books = SlotBooks(slots, SLOT, clock=loop.time)
        self.memory = Memory(slots)
        self.directory = Directory()
        self.neighbour = Neighbour(self.memory)
        self.admission = Worth()
        fast = Speed(1e-3, 1e9)
        self.store = TieredStore(
            self.books,
            self.memory,
            tiers,
            node="a",
            directory=self.directory,
            peers={"b": self.neighbour}.get,
            admission=self.admission,
            speeds=speeds or Speeds(dict.fromkeys(("nvme", "redis", "peer"), fast)),
            clock=loop.time,
            at_once=at_once,
        )
        self.store.start()

    async def write(self, keys: Sequence[BlockKey], tenant: str | None = None) -> int:
        """As a replica does; → blocks written."""
        lease = await self.store.prepare_write(keys, "replica", tenant=tenant)
        for entry in lease.entries:
            self.memory.view(entry.offset, SLOT)[:] = content(entry.key)
        return len(await self.store.complete_write(lease.id, [entry.key for entry in lease.entries]))

    def verify(self, lease: ReadLease) -> int:
        """How many blocks a lease has; all of them are whole."""
        for entry in lease.entries:
            found = bytes(self.memory.view(entry.offset, SLOT))
            assert found == content(entry.key), f"{entry.key} is not whole"
        return len(lease.entries)

    async def read(self, keys: Sequence[BlockKey], worth_s: float = 0.0) -> int:
        """As a replica does; → leading blocks found."""
        lease = await self.store.prepare_read(keys, "replica", worth_s=worth_s)
        try:
            found = self.verify(lease)
            await asyncio.sleep(0.001)
            assert self.verify(lease) == found, "changed while it was held"
            return found
        finally:
            self.store.complete_read(lease.id)

    async def rest(self) -> None:
        """Wait until all is done, and assert that nobody holds anything."""
        await self.store.settle()
        await self.store.write_down()
        self.store.check()
        stats = self.books.stats()
        assert (stats.read_leases, stats.write_leases, stats.condemned, stats.writing) == (0, 0, 0, 0)
        assert self.store.stats().lent == self.store.stats().queued == 0

    async def close(self) -> None:
        await self.rest()
        await self.store.close()
