"""Links that take simulated time, and tiers behind them that keep books and no bytes."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Callable, Iterable, Sequence

from kv_tiers.booked import BookedTier
from kv_tiers.books import SlotBooks
from kv_tiers.keys import BlockKey
from kv_tiers.tier import Entry, Fetched
from policies.tiering.speed import Speed

Arrived = Callable[[str, Iterable[BlockKey]], None]
"""Is told which blocks a tier has delivered: (the tier's name, keys)."""


class Link:
    """One direction of a wire or disk. Transfers follow one another; the latency of one is not in the next's way."""

    def __init__(self, speed: Speed) -> None:
        self._speed = speed
        self._free_at = 0.0
        self.nbytes = 0

    async def carry(self, nbytes: int) -> None:
        """Return when the bytes have arrived. Cancelled, they go all the same."""
        if not nbytes:
            return
        now = asyncio.get_running_loop().time()
        self._free_at = max(now, self._free_at) + nbytes / self._speed.bytes_per_s
        self.nbytes += nbytes
        await asyncio.sleep(self._free_at + self._speed.latency_s - now)


class NoBytes:
    """`BlockMemory` of any size that takes none: every view is of the same pages, which nobody touches."""

    def __init__(self, slot_bytes: int) -> None:
        self._view = memoryview(mmap.mmap(-1, slot_bytes))

    def view(self, offset: int, nbytes: int) -> memoryview:
        return self._view[:nbytes]


class Copies:
    """Blocks written to a medium, and how many of these writes somebody read."""

    def __init__(self) -> None:
        self.written = self.useful = 0
        self._fresh: set[BlockKey] = set()

    def wrote(self, keys: Sequence[BlockKey]) -> None:
        """New copies; an earlier one of the same block that nobody read stays in vain."""
        self.written += len(keys)
        self._fresh.update(keys)

    def read(self, keys: Iterable[BlockKey]) -> None:
        """Copies were read."""
        for key in keys:
            if key in self._fresh:
                self._fresh.discard(key)
                self.useful += 1

    @property
    def unread(self) -> int:
        """Writes that nobody has read so far."""
        return self.written - self.useful


class SimNvme(BookedTier):
    """`Tier` of one node."""

    name = "nvme"

    def __init__(self, books: SlotBooks, reads: Link, writes: Link, arrived: Arrived) -> None:
        super().__init__(books)
        self._arrived = arrived
        self._reads = reads
        self._writes = writes
        self.copies = Copies()

    async def _load(self, entries: Sequence[Entry], into: Sequence[memoryview]) -> list[bool]:
        await self._reads.carry(len(entries) * self.slot_bytes)
        keys = [entry.key for entry in entries]
        self.copies.read(keys)
        self._arrived(self.name, keys)
        return [True] * len(entries)

    async def _store(self, entries: Sequence[Entry], blocks: Sequence[memoryview]) -> None:
        await self._writes.carry(len(entries) * self.slot_bytes)
        self.copies.wrote([entry.key for entry in entries])


class RedisServer:
    """What all nodes share: contents and the two directions of its link."""

    def __init__(self, speed: Speed) -> None:
        self.contents: set[BlockKey] = set()
        self.reads = Link(speed)
        self.writes = Link(speed)
        self.copies = Copies()


class SimRedis(BookedTier):
    """`Tier` of one node in the shared server, as `RedisBlocks` is: the node's books bound what it has put there.

    `get` finds other nodes' blocks too; `put` sends nothing that is there. Who evicts a block takes it from all.
    """

    name = "redis"

    def __init__(self, books: SlotBooks, server: RedisServer, arrived: Arrived) -> None:
        super().__init__(books)
        self._arrived = arrived
        self._server = server
        self._by_offset: dict[int, BlockKey] = {}

    async def get(self, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> list[Fetched]:
        found = {key for key in keys if key in self._server.contents}
        with self._call():
            self._books.drop([key for key in keys if key not in found])
            lease = self._books.prepare_scattered(keys, self.name)
            try:
                await self._server.reads.carry(len(found) * self.slot_bytes)
            finally:
                self._books.complete_read(lease.id)
        self._server.copies.read(found)
        self._arrived(self.name, found)
        return [Fetched.HIT if key in found else Fetched.MISS for key in keys]

    async def _load(self, entries: Sequence[Entry], into: Sequence[memoryview]) -> list[bool]:
        raise AssertionError("blocks are got whether they are in the books or not")

    async def _store(self, entries: Sequence[Entry], blocks: Sequence[memoryview]) -> None:
        contents = self._server.contents
        for key, offset in entries:
            gone = self._by_offset.get(offset)
            if gone is not None and not self._books.holds(gone):
                contents.discard(gone)
            self._by_offset[offset] = key
        absent = [entry.key for entry in entries if entry.key not in contents]
        await self._server.writes.carry(len(absent) * self.slot_bytes)
        self._server.copies.wrote(absent)
        contents.update(entry.key for entry in entries)
