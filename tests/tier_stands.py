"""The tiers that the contract suite and the state machine run over. Add yours to `STANDS`."""

from __future__ import annotations

import asyncio
import functools
import mmap
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import ClassVar, Self, TypeVar

import pytest
import torch
from nvme_stand import FaultyEngine, io_error, nbytes_for
from redis_server import shared_server

from kv_tiers.block import BlockLayout, write_block
from kv_tiers.books import SlotBooks
from kv_tiers.cpu import CpuTier
from kv_tiers.keys import BlockKey, Fingerprint, block_keys
from kv_tiers.memory import MemoryTier
from kv_tiers.nvme import NvmeTier
from kv_tiers.nvme_io import FileEngine
from kv_tiers.packing import FRAME_BYTES
from kv_tiers.redis import RedisTier
from kv_tiers.redis_values import charge_of, largest_frame, value_name
from kv_tiers.slab import Slab
from kv_tiers.tier import Fetched, Stored, Tier

Answer = TypeVar("Answer")

FINGERPRINT = Fingerprint(bytes(32))
LAYOUT = BlockLayout(layers=((2, 8), (1, 4)), dtype=torch.float32, block_tokens=4)
SLOT_BYTES = 4096  # more than a block, and whole pages
KEYS = block_keys(FINGERPRINT, range(1000), 4)


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Stand(ABC):
    """One tier of exactly `slots` slots of SLOT_BYTES, in `folder` if it needs one; `async with` starts and closes it.

    `options`: `policy`, `clock`, `ttl_s`, `tenant_share`, as in `SlotBooks`.
    """

    name: ClassVar[str]
    warm: ClassVar[bool] = False
    """Whether `reopen` finds what was there."""
    breakable: ClassVar[bool] = False
    """Whether the medium can fail: `break_` and `mend`."""

    def __init__(self, slots: int, folder: Path, **options: object) -> None:
        self.slots = slots
        self.folder = folder
        self.options = options
        self.tier: Tier

    @abstractmethod
    async def make(self) -> Tier:
        """A tier over this stand's medium, not started."""

    @abstractmethod
    async def corrupt(self, key: BlockKey) -> None:
        """Flip a bit of the payload of a visible block, where it lies."""

    async def end(self) -> None:  # noqa: B027 - most media need no end
        """Remove the medium."""

    async def break_(self) -> None:
        """From now on the medium fails at every read and write."""
        raise NotImplementedError

    async def mend(self) -> None:
        """The medium works again, and the tier has had the time to notice (its breaker's pause is over)."""
        raise NotImplementedError

    async def reopen(self) -> None:
        """What a restart of the process does; cold tiers start empty."""
        await self.tier.close()
        self.tier = await self.make()
        await self.tier.start()

    async def __aenter__(self) -> Self:
        self.tier = await self.make()
        await self.tier.start()
        assert self.tier.stats().capacity == self.slots and self.tier.slot_bytes == SLOT_BYTES
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.tier.close()
        await self.end()


class MemoryStand(Stand):
    name = "memory"

    async def make(self) -> Tier:
        self.books = SlotBooks(self.slots, SLOT_BYTES, **self.options)
        return MemoryTier(self.books)

    async def corrupt(self, key: BlockKey) -> None:
        offset = self.books.offset_of(key)
        content = bytearray(self.tier.contents[offset])
        content[LAYOUT.header_bytes] ^= 1
        self.tier.contents[offset] = bytes(content)


class RedisStand(Stand):
    name = "redis"
    warm = True
    breakable = True

    async def make(self) -> Tier:
        self.server = shared_server()
        if not hasattr(self, "tier"):
            with self.server.client() as client:
                client.flushall()
        return RedisTier(
            self.server.url,
            self.slots * charge_of(largest_frame(SLOT_BYTES)),
            SLOT_BYTES,
            breaker_pause_s=0.1,
            **self.options,
        )

    async def corrupt(self, key: BlockKey) -> None:
        place = FRAME_BYTES + LAYOUT.header_bytes
        with self.server.client() as client:
            found = client.getrange(value_name(key), place, place)
            client.setrange(value_name(key), place, bytes([found[0] ^ 1]))

    async def break_(self) -> None:
        self.server.kill()

    async def mend(self) -> None:
        self.server.start()
        await asyncio.sleep(0.15)


class NvmeStand(Stand):
    name = "nvme"
    warm = True
    breakable = True

    async def make(self) -> Tier:
        self.path = self.folder / f"{id(self)}.kvnvme"
        return NvmeTier(
            self.path,
            nbytes_for(self.slots),
            SLOT_BYTES,
            breaker_pause_s=0.05,
            wrap=self.wrap,
            **self.options,
        )

    def wrap(self, engine: FileEngine) -> FileEngine:
        self.engine = FaultyEngine(engine)
        return self.engine

    async def corrupt(self, key: BlockKey) -> None:
        place = self.path.read_bytes().index(_content(key, FINGERPRINT)) + LAYOUT.header_bytes
        with self.path.open("r+b") as file:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 1]))

    async def break_(self) -> None:
        self.engine.fault = io_error

    async def mend(self) -> None:
        del self.engine.fault
        await asyncio.sleep(0.06)


class CpuStand(Stand):
    name = "cpu"

    async def make(self) -> Tier:
        await self.end()
        self.stack = ExitStack()
        self.slab = self.stack.enter_context(
            Slab.create(self.folder / f"{id(self)}.kvslab", self.slots * SLOT_BYTES)
        )
        self.books = SlotBooks(self.slots, SLOT_BYTES, **self.options)
        return CpuTier(self.slab, self.books)

    async def corrupt(self, key: BlockKey) -> None:
        self.slab.view(self.books.offset_of(key) + LAYOUT.header_bytes, 1)[0] ^= 1

    async def end(self) -> None:
        if hasattr(self, "stack"):
            self.stack.close()


STANDS: list[type[Stand]] = [MemoryStand, CpuStand, NvmeStand, RedisStand]


def stand_fixture(stands: Sequence[type[Stand]]) -> object:
    """A fixture: `await open_stand(slots, **options)` is a running stand of each kind; at the end all are `at_rest`."""

    @pytest.fixture(params=stands, ids=[stand.name for stand in stands])
    async def open_stand(request, tmp_path):
        opened: list[Stand] = []
        async with AsyncExitStack() as stack:

            async def build(slots, **options):
                opened.append(await stack.enter_async_context(request.param(slots, tmp_path, **options)))
                return opened[-1]

            yield build
            for stand in opened:
                await at_rest(stand.tier)

    return open_stand


async def at_rest(tier: Tier) -> None:
    """Nothing is under way; what the tier says it has is exactly what it has."""
    tier.check()
    listed = tier.manifest().keys
    assert len(set(listed)) == len(listed) == tier.stats().visible <= tier.stats().capacity
    assert set(visible(tier)) <= set(listed)
    assert await get(tier, listed) == [Fetched.HIT] * len(listed)
    stats = tier.stats()
    assert (stats.writing, stats.condemned, stats.read_leases, stats.write_leases) == (0, 0, 0, 0)
    assert stats.free == stats.capacity - stats.visible


async def begun(call: Coroutine[object, object, Answer]) -> asyncio.Task[Answer]:
    """A task of `call` that has run up to its first wait and is not done."""
    task = asyncio.ensure_future(call)
    await asyncio.sleep(0)
    assert not task.done(), "the call ended before anything could come in between"
    return task


def buffer(content: bytes = b"") -> memoryview:
    """A page-aligned buffer of a slot's size that starts with `content`."""
    view = memoryview(mmap.mmap(-1, SLOT_BYTES))
    view[: len(content)] = content
    return view


def buffers(count: int) -> list[memoryview]:
    """So many empty ones."""
    return [buffer() for _ in range(count)]


def block(key: BlockKey, fingerprint: Fingerprint = FINGERPRINT) -> memoryview:
    """The block of `key` in a buffer of its own; its values are the key's own."""
    return buffer(_content(key, fingerprint))


@functools.cache
def _content(key: BlockKey, fingerprint: Fingerprint) -> bytes:
    view = bytearray(LAYOUT.nbytes)
    generator = torch.Generator().manual_seed(int.from_bytes(key.digest[:7], "little"))
    rows = [torch.rand(heads, 4, dim, generator=generator) for heads, dim in LAYOUT.layers]
    write_block(view, LAYOUT, fingerprint, key, rows, rows)
    return bytes(view)


async def put(tier: Tier, keys: Sequence[BlockKey], tenant: str | None = None) -> list[Stored]:
    """Store each key's own block."""
    return await tier.put(keys, [block(key) for key in keys], tenant=tenant)


async def get(tier: Tier, keys: Sequence[BlockKey]) -> list[Fetched]:
    """Ask for blocks; every hit is compared with the key's own block, byte by byte."""
    into = buffers(len(keys))
    answers = await tier.get(keys, into)
    for key, answer, found in zip(keys, answers, into, strict=True):
        assert answer is not Fetched.HIT or found[: LAYOUT.nbytes] == block(key)[: LAYOUT.nbytes]
    return answers


def visible(tier: Tier, keys: Iterable[BlockKey] = KEYS) -> list[BlockKey]:
    """Those of `keys` that the tier says it has."""
    return [key for key in keys if tier.longest_run([key])]
