"""What the tests of the Redis tier share: blocks of any layout, tiers that are closed again, a slow proxy."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress

import torch

from kv_tiers.block import BlockLayout, write_block
from kv_tiers.keys import Fingerprint, block_keys
from kv_tiers.redis import RedisTier
from kv_tiers.redis_values import charge_of, largest_frame

FINGERPRINT = Fingerprint(bytes(32))
LAYOUT = BlockLayout(layers=((2, 32),) * 4, dtype=torch.bfloat16, block_tokens=16)  # 16 KiB and its header
LARGE = BlockLayout(layers=((8, 128),) * 40, dtype=torch.bfloat16, block_tokens=16)  # 2.5 MiB: three values
_BURST = 1 << 22  # what is read at once is held back together
KEYS = block_keys(FINGERPRINT, range(16 * 400), 16)


def slot_bytes(layout=LAYOUT):
    return -(-layout.nbytes // 4096) * 4096


def block(key, layout=LAYOUT, fingerprint=FINGERPRINT, padded=None):
    """The block of `key`; its values are the key's own."""
    generator = torch.Generator().manual_seed(int.from_bytes(key.digest[:7], "little"))
    view = bytearray(padded or slot_bytes(layout))
    rows = [
        torch.randn(2, heads, layout.block_tokens, dim, generator=generator).to(layout.dtype)
        for heads, dim in layout.layers
    ]
    keys, values = [row[0] for row in rows], [row[1] for row in rows]
    write_block(memoryview(view)[: layout.nbytes], layout, fingerprint, key, keys, values)
    return memoryview(view)


def buffers(count, layout=LAYOUT):
    return [memoryview(bytearray(slot_bytes(layout))) for _ in range(count)]


def room(blocks, layout=LAYOUT):
    """Bytes that so many blocks take."""
    return blocks * charge_of(largest_frame(layout.nbytes))


@asynccontextmanager
async def running(url, blocks=8, layout=LAYOUT, **options):
    """A tier for `blocks` blocks at `url`, with short times."""
    times = {"block_bytes": layout.nbytes, "deadline_s": 2.0, "breaker_pause_s": 0.1, "watch_s": 0.1}
    tier = RedisTier(url, room(blocks, layout), slot_bytes(layout), **{**times, **options})
    await tier.start()
    try:
        yield tier
        tier.check()
    finally:
        await tier.close()


async def put(tier, keys, layout=LAYOUT, **options):
    return await tier.put(keys, [block(key, layout) for key in keys], **options)


async def get(tier, keys, layout=LAYOUT):
    """Every hit is compared with the key's own block."""
    into = buffers(len(keys), layout)
    answers = await tier.get(keys, into)
    for key, answer, found in zip(keys, answers, into, strict=True):
        if answer.name == "HIT":
            assert found[: layout.nbytes] == block(key, layout)[: layout.nbytes]
    return answers


async def until(condition, seconds=5.0):
    """Wait for what happens in the background."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def proxy(server, path, delay_s=0.0):
    """A unix socket in front of the server's, which holds every answer back for `delay_s`; yields its URL."""

    async def carry(reader, writer, wait_s):
        try:
            while data := await reader.read(_BURST):
                await asyncio.sleep(wait_s)
                writer.write(data)
                await writer.drain()
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def serve(reader, writer):
        behind_reader, behind_writer = await asyncio.open_unix_connection(server.socket, limit=_BURST)
        with suppress(asyncio.CancelledError):
            await asyncio.gather(carry(reader, behind_writer, 0), carry(behind_reader, writer, delay_s))

    front = await asyncio.start_unix_server(serve, path, limit=_BURST)
    try:
        yield f"unix://{path}"
    finally:
        front.close()
