"""What tiers over slots in memory share: the two phases of `get` and `put` around copying bytes."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kv_tiers.books import SlotBooks
from kv_tiers.keys import BlockKey
from kv_tiers.over_books import OverBooks
from kv_tiers.tier import Entry, Fetched, Stored


class BookedTier(OverBooks, ABC):
    """`Tier` over `SlotBooks`; a subclass moves the bytes. Cold: nothing outlives the process.

    New blocks compete with old ones: what the policy ranks lowest gets NO_ROOM. Not started or closed: AssertionError.
    """

    name: str

    def __init__(self, books: SlotBooks) -> None:
        super().__init__(books)
        self.slot_bytes = books.slot_bytes
        self._started = False
        self._calls = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @abstractmethod
    async def _load(self, entries: Sequence[Entry], into: Sequence[memoryview]) -> list[bool]:
        """Copy slots into buffers; of each, whether the copy is that block, whole. No buffer is touched afterwards."""

    @abstractmethod
    async def _store(self, entries: Sequence[Entry], blocks: Sequence[memoryview]) -> None:
        """Copy buffers into slots. No slot is touched afterwards."""

    async def start(self) -> None:
        assert not self._started, "started before"
        self._started = True

    async def get(self, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> list[Fetched]:
        assert len(keys) == len(into) and all(len(buffer) == self.slot_bytes for buffer in into)
        answers = [Fetched.MISS] * len(keys)
        with self._call():
            there = [index for index, key in enumerate(keys) if self._books.holds(key)]
            lease = self._books.prepare_scattered([keys[index] for index in there], self.name)
            hits = 0
            try:
                whole = await self._load(lease.entries, [into[index] for index in there])
                for index, entry, good in zip(there, lease.entries, whole, strict=True):
                    answers[index] = Fetched.HIT if good else Fetched.CORRUPT
                    if not good:
                        self._drop_exactly(entry)
                hits = sum(whole)
            finally:
                self._unread += len(there) - hits
                self._books.complete_read(lease.id)
        return answers

    async def put(
        self, keys: Sequence[BlockKey], blocks: Sequence[memoryview], *, tenant: str | None = None
    ) -> list[Stored]:
        assert len(keys) == len(blocks) and all(len(block) == self.slot_bytes for block in blocks)
        first = dict(zip(reversed(keys), reversed(blocks), strict=True))
        with self._call():
            lease = self._books.reserve(keys, self.name, tenant=tenant, bypass=True)
            written: list[BlockKey] = []
            try:
                await self._store(lease.entries, [first[entry.key] for entry in lease.entries])
                written = [entry.key for entry in lease.entries]
            finally:
                visible = set(self._books.complete_write(lease.id, written))
        answers = dict.fromkeys(lease.no_room, Stored.NO_ROOM)
        # A `clear` meanwhile: not here, and nobody's success.
        overtaken = {entry.key for entry in lease.entries} - visible
        answers.update(dict.fromkeys(overtaken, Stored.FAILED))
        stored: list[Stored] = []
        for key in keys:
            if key in visible:
                visible.discard(key)  # named twice, the second is present
                stored.append(Stored.STORED)
            else:
                stored.append(answers.get(key, Stored.PRESENT))
        return stored

    async def drop(self, keys: Sequence[BlockKey]) -> int:
        with self._call():
            return self._books.drop(keys)

    async def clear(self) -> None:
        with self._call():
            self._books.clear()

    def check(self) -> None:
        self._books.check()
        if not self._calls:
            stats = self._books.stats()
            assert (stats.read_leases, stats.write_leases, stats.writing, stats.condemned) == (0, 0, 0, 0)

    async def close(self) -> None:
        self._started = False
        await self._idle.wait()

    def _drop_exactly(self, entry: Entry) -> None:
        """Drop the block that was read, but none that was stored under its key meanwhile."""
        if self._books.holds(entry.key) and self._books.offset_of(entry.key) == entry.offset:
            self._books.drop([entry.key])

    @contextmanager
    def _call(self) -> Iterator[None]:
        assert self._started, f"the {self.name} tier is not started, or closed"
        self._calls += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()
