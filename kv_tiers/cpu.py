"""The CPU tier as whole buffers: blocks in the slots of a slab, copied by threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from kv_tiers.block_copy import BlockViews, chosen
from kv_tiers.booked import BookedTier
from kv_tiers.books import SlotBooks
from kv_tiers.tier import BlockMemory, Entry
from kv_tiers.verify import copy_whole_blocks

_T = TypeVar("_T")


class CpuTier(BookedTier):
    """`Tier` over `memory`, which has the books' slots from offset 0. The memory stays the caller's.

    Bytes are copied and verified in a thread, so that neither keeps the event loop waiting; a cancelled call returns
    when its thread has let go of its buffers.
    """

    name = "cpu"

    def __init__(self, memory: BlockMemory, books: SlotBooks) -> None:
        super().__init__(books)
        self._memory = memory

    async def _load(self, entries: Sequence[Entry], into: Sequence[memoryview]) -> list[bool]:
        def copy() -> list[bool]:
            slots = [self._memory.view(entry.offset, self.slot_bytes) for entry in entries]
            return copy_whole_blocks(slots, into, [entry.key for entry in entries])

        return await in_thread(copy) if entries else []

    async def _store(self, entries: Sequence[Entry], blocks: Sequence[memoryview]) -> None:
        def copy() -> None:
            slots = [self._memory.view(entry.offset, self.slot_bytes) for entry in entries]
            chosen().copy(BlockViews(blocks), BlockViews(slots))

        if entries:
            await in_thread(copy)


async def in_thread(work: Callable[[], _T]) -> _T:
    """What `work` returns, from a thread. A cancelled caller waits for its end too."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([task])
        raise
