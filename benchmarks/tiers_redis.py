"""The Redis tier's speed against a raw blocking socket that reads the same values, in the same run.

    python -m benchmarks.tiers_redis [--blocks 64] [--rounds 9] [--url unix:///path]

Regime: one client process and a redis-server of its own on the same machine, unix socket, blocks of SmolLM2-135M's
layout (0.37 MB) and of an 8B model's (2 MB), warm connections and touched buffers. `tier get` verifies every byte.
Baselines: one blocking socket that receives the very same values into the same buffers and looks at none of them, and
redis-py (asyncio, 2 tasks). All take turns; figures are medians over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import redis.asyncio
import torch

from benchmarks.result import Bound, print_result
from kv_tiers.block import BlockLayout, write_block
from kv_tiers.keys import BlockKey, Fingerprint, block_keys
from kv_tiers.packing import FRAME_BYTES
from kv_tiers.redis import RedisTier
from kv_tiers.redis_values import charge_of, largest_frame, part_names, value_name
from kv_tiers.tier import Fetched, Stored

TARGET_RAW_SHARE = 0.6
_FINGERPRINT = Fingerprint(bytes(32))
_LAYOUTS = {
    "smollm2": BlockLayout(layers=((3, 64),) * 30, dtype=torch.bfloat16, block_tokens=16),
    "8b": BlockLayout(layers=((8, 128),) * 32, dtype=torch.bfloat16, block_tokens=16),
}


@contextmanager
def redis_server() -> Iterator[str]:
    """A server of our own that keeps nothing; yields its URL."""
    folder = tempfile.mkdtemp(prefix="kvtide-bench-")
    path = Path(folder) / "redis.sock"
    command = ["redis-server", "--port", "0", "--unixsocket", str(path), "--dir", folder]
    server = subprocess.Popen(
        [*command, "--save", "", "--appendonly", "no"], stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        until = time.monotonic() + 10
        while not path.exists():
            if time.monotonic() > until:
                raise SystemExit("redis-server did not start")
            time.sleep(0.01)
        yield f"unix://{path}"
    finally:
        server.kill()
        server.wait()
        shutil.rmtree(folder, ignore_errors=True)


class RawReader:
    """GET of known lengths on one blocking socket, into given memory; nothing is checked."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)

    def read(self, names: Sequence[bytes], lengths: Sequence[int], into: memoryview) -> None:
        """One block's values one after the other into `into`, but for the frame's header."""
        at = -FRAME_BYTES
        for name, length in zip(names, lengths, strict=True):
            self._socket.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(name), name))
            self._receive(memoryview(bytearray(len(b"$%d\r\n" % length))))
            if at < 0:
                self._receive(memoryview(bytearray(FRAME_BYTES)))
            self._receive(into[max(at, 0) : at + length])
            self._receive(memoryview(bytearray(2)))
            at += length

    def _receive(self, target: memoryview) -> None:
        done = 0
        while done < len(target):
            done += self._socket.recv_into(target[done:])


def _blocks(layout: BlockLayout, slot_bytes: int, keys: Sequence[BlockKey]) -> list[memoryview]:
    generator = torch.Generator().manual_seed(0)
    blocks = []
    for key in keys:
        view = memoryview(mmap.mmap(-1, slot_bytes))
        rows = [
            torch.randn(2, heads, layout.block_tokens, dim, generator=generator).to(layout.dtype)
            for heads, dim in layout.layers
        ]
        block = view[: layout.nbytes]
        write_block(block, layout, _FINGERPRINT, key, [row[0] for row in rows], [row[1] for row in rows])
        blocks.append(view)
    return blocks


async def _measure(url: str, layout: BlockLayout, blocks: int, rounds: int) -> dict[str, float]:
    slot_bytes = -(-layout.nbytes // 4096) * 4096
    keys = block_keys(_FINGERPRINT, range(blocks * layout.block_tokens), layout.block_tokens)
    contents = _blocks(layout, slot_bytes, keys)
    into = [memoryview(mmap.mmap(-1, slot_bytes)) for _ in keys]
    for view in into:
        view[:] = bytes(slot_bytes)
    tier = RedisTier(url, 2 * blocks * charge_of(largest_frame(slot_bytes)), slot_bytes, deadline_s=10.0)
    client = redis.asyncio.Redis.from_url(url, protocol=2)
    raw = RawReader(url.removeprefix("unix://"))
    names = [[value_name(key), *part_names(key, largest_frame(layout.nbytes))] for key in keys]

    async def tier_put() -> None:
        assert set(await tier.put(keys, contents)) == {Stored.STORED}

    async def tier_get() -> None:
        assert set(await tier.get(keys, into)) == {Fetched.HIT}

    async def client_get() -> None:
        async def some(start: int) -> None:
            for group in names[start::2]:
                for name in group:
                    await client.get(name)

        await asyncio.gather(some(0), some(1))

    async def client_set() -> None:
        async def some(start: int) -> None:
            for group, block in zip(names[start::2], contents[start::2], strict=True):
                for part, name in enumerate(group):
                    await client.set(name + b"x", block[part << 20 : (part + 1) << 20])

        await asyncio.gather(some(0), some(1))

    async def raw_get() -> None:
        for group, sizes, view in zip(names, lengths, into, strict=True):
            raw.read(group, sizes, view)

    await tier.start()
    try:
        await tier_put()
        lengths = [[await client.strlen(name) for name in group] for group in names]
        calls: dict[str, Callable[[], Awaitable[None]]] = {
            "raw_get": raw_get,
            "tier_get": tier_get,
            "redis_py_get": client_get,
            "tier_put": tier_put,
            "redis_py_set": client_set,
        }
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for turn in range(rounds + 1):
            for name, call in calls.items():
                if name == "tier_put":
                    await tier.drop(keys)
                begin = time.perf_counter()
                await call()
                if turn:  # the first warms up
                    seconds[name].append(time.perf_counter() - begin)
        await tier.clear()
    finally:
        await tier.close()
        await client.aclose()
    total = blocks * layout.nbytes
    figures = {f"{name}_gb_s": total / statistics.median(times) / 1e9 for name, times in seconds.items()}
    figures["share_of_raw"] = figures["tier_get_gb_s"] / figures["raw_get_gb_s"]
    return figures


def measure_redis(*, blocks: int = 64, rounds: int = 9, url: str | None = None) -> dict[str, float]:
    """GB/s of the tier, redis-py and a raw reader, and the tier's share of the raw one; names end in the layout's."""
    figures: dict[str, float] = {}
    for name, layout in _LAYOUTS.items():
        count = max(4, blocks * _LAYOUTS["smollm2"].nbytes // layout.nbytes)
        if url is not None:
            found = asyncio.run(_measure(url, layout, count, rounds))
        else:
            with redis_server() as own:
                found = asyncio.run(_measure(own, layout, count, rounds))
        figures |= {f"{figure}_{name}": value for figure, value in found.items()}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=64, help="of SmolLM2's; as many bytes of larger ones")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--url", help="unix:// of a running server whose kvtide keys may go (default: one of its own)"
    )
    arguments = parser.parse_args()
    figures = measure_redis(blocks=arguments.blocks, rounds=arguments.rounds, url=arguments.url)
    for name, value in figures.items():
        print(f"{name:28} {value:8.2f}")
    targets: dict[str, Bound] = {f"share_of_raw_{name}": {"at_least": TARGET_RAW_SHARE} for name in _LAYOUTS}
    print_result(
        "tiers_redis",
        f"{arguments.blocks} blocks, {arguments.rounds} rounds, unix socket, one machine",
        "one blocking socket with recv_into, nothing verified",
        figures,
        targets,
    )


if __name__ == "__main__":
    main()
