"""The CPU tier against memcpy: GB/s of verified reads and of writes with checksums, one thread each, in one run.

Regime: blocks of SmolLM2-135M (372,736 bytes) in a slab, everything touched before; a whole prompt's blocks per call.
`get` and `put`: `CpuTier`, slab to buffers and back. `load` and `store`: `PrefixCache`, slab to a workspace, layer by
layer, and back. Books included. Baseline: one memcpy of the same bytes from the same memory to the same memory (in
pieces of one layer's K or V where that is how it lies). Runs alternate and medians count; ratios are medians of ratios
of neighbours, since other work on the machine slows both. `cpu_ratio` compares processor time, which leaves out waiting
for a core. `python -m benchmarks.tiers_slab [folder]`.
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.result import print_result
from engine.model import ModelSpec
from engine.prefix import PrefixCache
from engine.probe import LayerSpec
from engine.workspace import Workspace
from kv_tiers.block import BlockLayout
from kv_tiers.books import SlotBooks
from kv_tiers.cpu import CpuTier
from kv_tiers.keys import Fingerprint
from kv_tiers.slab import Slab
from kv_tiers.tier import Fetched, Stored

PAGE = 4096
BLOCKS = 436  # 161 MB
TARGETS = {"get_ratio": {"at_least": 0.7}, "load_ratio": {"at_least": 0.7}}
_COPIES = {"get": "memcpy_get", "put": "memcpy_put", "load": "memcpy_load", "store": "memcpy_store"}


class Spent(NamedTuple):
    """Seconds: of the clock, and of the process's threads together."""

    wall: float
    cpu: float


class Stand:
    """A slab full of blocks, a workspace with the same KV, and buffers; each method moves all of it once."""

    def __init__(self, folder: Path, blocks: int) -> None:
        layout = BlockLayout(layers=((3, 64),) * 30, dtype=torch.bfloat16)
        layers = tuple(LayerSpec(9, 3, 64, 0.125, None, 0.0, None) for _ in layout.layers)
        fingerprint = Fingerprint(bytes(range(32)))
        spec = ModelSpec(layers, layout.dtype, 100, 1 << 20, frozenset(), layout, fingerprint)
        slot = -(-layout.nbytes // PAGE) * PAGE
        self.slab = Slab.create(folder / "bench.kvslab", blocks * slot)
        self.slab.unlink()  # the memory stays until `close`
        self.books = SlotBooks(blocks, slot, pin_share=1.0)
        self.cache = PrefixCache(spec, self.books, self.slab, "bench")
        self.tier = CpuTier(self.slab, self.books)
        self.space = Workspace(spec, blocks * layout.block_tokens)
        for rows in (*self.space.keys, *self.space.values):
            rows.copy_(torch.randn(rows.shape))
        self.keys = self.cache.keys(range(blocks * layout.block_tokens), None)
        self.arena = mmap.mmap(-1, blocks * slot)
        whole = memoryview(self.arena)
        self.buffers = [whole[at : at + slot] for at in range(0, blocks * slot, slot)]
        self.payload = blocks * layout.payload_bytes
        self.all = {"slab": self.slab.view(0, blocks * slot), "buffers": whole}

    async def store(self) -> None:
        self.books.clear()
        assert self.cache.store(self.space, self.keys) == len(self.keys)

    async def load(self) -> None:
        assert self.cache.load(self.space, self.keys, self.space.tokens) == self.space.tokens

    async def get(self) -> None:
        assert set(await self.tier.get(self.keys, self.buffers)) == {Fetched.HIT}

    async def put(self) -> None:
        self.books.clear()
        assert set(await self.tier.put(self.keys, self.buffers)) == {Stored.STORED}

    async def memcpy_get(self) -> None:
        np.copyto(np.frombuffer(self.all["buffers"], np.uint8), np.frombuffer(self.all["slab"], np.uint8))

    async def memcpy_put(self) -> None:
        np.copyto(np.frombuffer(self.all["slab"], np.uint8), np.frombuffer(self.all["buffers"], np.uint8))

    async def memcpy_load(self) -> None:
        for slab, rows in self._pieces():
            rows.copy_(slab)

    async def memcpy_store(self) -> None:
        for slab, rows in self._pieces():
            slab.copy_(rows)

    def _pieces(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Parts of the slab, and the workspace's tensors of the same size, as bytes."""
        slab, at, pieces = torch.frombuffer(self.all["slab"], dtype=torch.uint8), 0, []
        for rows in (*self.space.keys, *self.space.values):
            flat = rows.view(torch.uint8).view(-1)
            pieces.append((slab[at : at + len(flat)], flat))
            at += len(flat)
        return pieces


def measure_slab(
    folder: Path | str | None = None, *, blocks: int = BLOCKS, runs: int = 9
) -> dict[str, float]:
    """GB/s of each case and its memcpy, and ratios: `get`, `memcpy_get`, `get_ratio`, ... Needs 0.5 GB of memory.

    `folder`: where the slab lies; by default /dev/shm, as in service.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory(dir=folder or "/dev/shm", prefix="kvtide-bench-") as scratch:
            seconds, nbytes = asyncio.run(_alternate(Path(scratch), blocks, runs))
    finally:
        torch.set_num_threads(threads)
    figures: dict[str, float] = {}
    for name, copy in _COPIES.items():
        pairs = list(zip(seconds[copy], seconds[name], strict=True))
        for each in (name, copy):
            figures[each] = nbytes / statistics.median(spent.wall for spent in seconds[each]) / 1e9
        figures[f"{name}_ratio"] = statistics.median(base.wall / own.wall for base, own in pairs)
        figures[f"{name}_cpu_ratio"] = statistics.median(base.cpu / own.cpu for base, own in pairs)
    return {name: round(value, 3) for name, value in figures.items()}


async def _alternate(folder: Path, blocks: int, runs: int) -> tuple[dict[str, list[Spent]], int]:
    stand = Stand(folder, blocks)
    await stand.tier.start()
    found: dict[str, list[Spent]] = {name: [] for pair in _COPIES.items() for name in pair}
    await stand.store()
    await stand.get()
    for _ in range(runs):
        for pair in _COPIES.items():
            # The memcpy first: what it spoils, the other one makes good.
            for name in reversed(pair):
                found[name].append(await _spent(getattr(stand, name)))
    await stand.tier.close()
    return found, stand.payload


async def _spent(work: Callable[[], Awaitable[None]]) -> Spent:
    wall, cpu = time.perf_counter(), time.process_time()
    await work()
    return Spent(time.perf_counter() - wall, time.process_time() - cpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", help="where the slab lies (default: /dev/shm)")
    parser.add_argument("--runs", type=int, default=9)
    options = parser.parse_args()
    figures = measure_slab(options.folder, runs=options.runs)
    print(f"{'GB/s':8s}{'tier':>10s}{'memcpy':>10s}{'ratio':>10s}{'cpu_ratio':>10s}")
    for name, copy in _COPIES.items():
        row = (figures[name], figures[copy], figures[f"{name}_ratio"], figures[f"{name}_cpu_ratio"])
        print(f"{name:8s}" + "".join(f"{value:10.2f}" for value in row))
    regime = f"{BLOCKS} blocks of SmolLM2, one thread, slab in shared memory"
    print_result("tiers_slab", regime, "memcpy of the same bytes", figures, TARGETS)


if __name__ == "__main__":
    main()
