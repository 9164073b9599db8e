"""The simplest tier: blocks as bytes objects in a dict."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kv_tiers.booked import BookedTier
from kv_tiers.books import SlotBooks
from kv_tiers.tier import Entry
from kv_tiers.verify import verify_block


class MemoryTier(BookedTier):
    """`Tier` to compare others with. Every call lets others run in its middle, so that what may overlap does."""

    name = "memory"

    def __init__(self, books: SlotBooks) -> None:
        super().__init__(books)
        self.contents: dict[int, bytes] = {}
        """By offset; of slots that are free too, until they are used again."""

    async def _load(self, entries: Sequence[Entry], into: Sequence[memoryview]) -> list[bool]:
        await asyncio.sleep(0)
        for entry, buffer in zip(entries, into, strict=True):
            buffer[:] = self.contents[entry.offset]
        return [verify_block(buffer, entry.key) is None for entry, buffer in zip(entries, into, strict=True)]

    async def _store(self, entries: Sequence[Entry], blocks: Sequence[memoryview]) -> None:
        await asyncio.sleep(0)
        for entry, block in zip(entries, blocks, strict=True):
            self.contents[entry.offset] = bytes(block)
