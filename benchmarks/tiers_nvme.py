"""The NVMe tier against fio: GB/s of verified reads and committed writes, on the same file system in the same run.

Regime: O_DIRECT, whole slots of one size in random order, batches of `BATCH` blocks from one event loop, tier full, so
that every write evicts; the better of fio with io_uring and with libaio, queue depth 32, random offsets, same block
size and bytes. Runs alternate and medians count. `python -m benchmarks.tiers_nvme [folder]`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.result import print_result
from kv_tiers.block import BlockLayout, write_run
from kv_tiers.keys import BlockKey, Fingerprint, block_keys
from kv_tiers.nvme import NvmeTier
from kv_tiers.nvme_engines import EngineChoice
from kv_tiers.nvme_index import PAGE
from kv_tiers.tier import Fetched, Stored

BATCH = 128
LAYOUTS = (
    BlockLayout(layers=((3, 64),) * 30, dtype=torch.bfloat16),  # SmolLM2-135M: 372,736 bytes
    BlockLayout(layers=((8, 128),) * 31, dtype=torch.bfloat16),  # about 2 MB
)
_FIO_ENGINES = ("io_uring", "libaio")


class Blocks(NamedTuple):
    """Whole blocks of two chains in one arena, and room to read one chain into."""

    keys: tuple[list[BlockKey], list[BlockKey]]
    buffers: tuple[list[memoryview], list[memoryview]]
    into: list[memoryview]
    memory: tuple[int, int]


def measure_nvme(
    folder: Path | str,
    *,
    layouts: Sequence[BlockLayout] = LAYOUTS,
    nbytes: int = 256 << 20,
    runs: int = 3,
    engine: EngineChoice = "auto",
) -> dict[str, float]:
    """GB/s and ratios for each layout, medians of `runs`: `{slot bytes}_{get,put,fio_read,fio_write,...}`.

    Needs about `nbytes` of disk twice and of memory three times. FileNotFoundError: fio is not installed.
    """
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(dir=folder, prefix="kvtide-bench-") as scratch:
        for layout in layouts:
            slot_bytes = -(-layout.nbytes // PAGE) * PAGE
            blocks = _make_blocks(layout, slot_bytes, max(1, nbytes // slot_bytes))
            found = asyncio.run(_alternate(Path(scratch), blocks, slot_bytes, runs, engine))
            medians = {name: statistics.median(values) for name, values in found.items()}
            medians["get_ratio"] = medians["get"] / medians["fio_read"]
            medians["put_ratio"] = medians["put"] / medians["fio_write"]
            figures |= {f"{slot_bytes}_{name}": round(value, 3) for name, value in medians.items()}
    return figures


async def _alternate(
    folder: Path, blocks: Blocks, slot_bytes: int, runs: int, engine: EngineChoice
) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"fio_write": [], "put": [], "fio_read": [], "get": []}
    count = len(blocks.into)
    order = np.random.default_rng(0).permutation(count).tolist()
    tier = NvmeTier(
        folder / "tier.kvnvme",
        2 * PAGE + PAGE * (count // 32) + count * slot_bytes,
        slot_bytes,
        engine=engine,
        memory=blocks.memory,
    )
    await tier.start()
    assert tier.direct, "this file system refuses O_DIRECT: there is nothing to compare"
    # First writes make a file's extents, first reads the buffers' pages: not what is measured here.
    await _put(tier, blocks, 1, order)
    await _get(tier, blocks, 1, order)
    await _fio(folder, "randwrite", slot_bytes, count)
    for run in range(runs):
        found["fio_write"].append(await _fio(folder, "randwrite", slot_bytes, count))
        found["put"].append(await _put(tier, blocks, run % 2, order))
        found["fio_read"].append(await _fio(folder, "randread", slot_bytes, count))
        found["get"].append(await _get(tier, blocks, run % 2, order))
    await tier.close()
    tier.path.unlink()
    (folder / "fio").unlink()
    return found


async def _put(tier: NvmeTier, blocks: Blocks, chain: int, order: Sequence[int]) -> float:
    start = time.perf_counter()
    for at in range(0, len(order), BATCH):
        chosen = order[at : at + BATCH]
        stored = await tier.put(
            [blocks.keys[chain][index] for index in chosen],
            [blocks.buffers[chain][index] for index in chosen],
        )
        assert set(stored) == {Stored.STORED}
    return len(order) * tier.slot_bytes / (time.perf_counter() - start) / 1e9


async def _get(tier: NvmeTier, blocks: Blocks, chain: int, order: Sequence[int]) -> float:
    backwards = order[::-1]
    start = time.perf_counter()
    for at in range(0, len(order), BATCH):
        chosen = backwards[at : at + BATCH]
        fetched = await tier.get(
            [blocks.keys[chain][index] for index in chosen], [blocks.into[index] for index in chosen]
        )
        assert set(fetched) == {Fetched.HIT}
    seconds = time.perf_counter() - start
    assert blocks.into[0] == blocks.buffers[chain][0] and blocks.into[-1] == blocks.buffers[chain][-1]
    return len(order) * tier.slot_bytes / seconds / 1e9


async def _fio(folder: Path, motion: str, slot_bytes: int, count: int) -> float:
    """GB/s of fio over a file of as many blocks, each once: the best of its asynchronous engines that work here."""
    found: list[float] = []
    for engine in _FIO_ENGINES:
        words = [
            "fio",
            "--name=ceiling",
            f"--filename={folder / 'fio'}",
            f"--rw={motion}",
            f"--bs={slot_bytes}",
            f"--size={slot_bytes * count}",
            f"--ioengine={engine}",
            "--iomem=mmapshared",  # as a slab is; faster than fio's own choice
            "--iodepth=32",
            "--direct=1",
            "--output-format=json",
        ]
        done = await asyncio.to_thread(subprocess.run, words, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
            side = job["write" if "write" in motion else "read"]
            found.append(float(side["io_bytes"]) / float(side["runtime"]) / 1e6)  # runtime in ms
    if not found:
        raise RuntimeError(f"fio failed: {done.stderr.strip()}")
    return max(found)


def _make_blocks(layout: BlockLayout, slot_bytes: int, count: int) -> Blocks:
    arena = memoryview(mmap.mmap(-1, 3 * count * slot_bytes))
    slots = [arena[at : at + slot_bytes] for at in range(0, len(arena), slot_bytes)]
    fingerprint = Fingerprint(bytes(32))
    torch.manual_seed(0)
    tokens = layout.block_tokens
    tensors = [torch.randn(heads, tokens, dim).to(layout.dtype) for heads, dim in layout.layers]
    chains = []
    for chain in range(2):
        keys = block_keys(fingerprint, np.full(count * tokens, chain), tokens)
        for key, slot in zip(keys, slots[chain * count : (chain + 1) * count], strict=True):
            write_run([slot[: layout.nbytes]], layout, fingerprint, [key], tensors, tensors)
        chains.append(keys)
    address = int(np.frombuffer(arena, dtype=np.uint8).ctypes.data)
    return Blocks(
        (chains[0], chains[1]),
        (slots[:count], slots[count : 2 * count]),
        slots[2 * count :],
        (address, len(arena)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="NVMe tier against fio")
    parser.add_argument("folder", nargs="?", default=".", help="on the disk to be measured")
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--engine", choices=("auto", "nixl", "threads"), default="auto")
    args = parser.parse_args()
    if shutil.which("fio") is None:
        raise SystemExit("fio is not installed: the ceiling cannot be measured")
    figures = measure_nvme(args.folder, nbytes=args.mib << 20, runs=args.runs, engine=args.engine)
    print(f"{'slot bytes':>10} {'':>5} {'tier GB/s':>10} {'fio GB/s':>10} {'ratio':>6}")
    for slot_bytes in dict.fromkeys(name.partition("_")[0] for name in figures):
        for ours, theirs in (("get", "fio_read"), ("put", "fio_write")):
            values = [figures[f"{slot_bytes}_{name}"] for name in (ours, theirs, f"{ours}_ratio")]
            print(f"{slot_bytes:>10} {ours:>5} {values[0]:>10.2f} {values[1]:>10.2f} {values[2]:>6.2f}")
    print_result(
        "tiers_nvme",
        regime=f"O_DIRECT, batches of {BATCH}, {args.mib} MiB, median of {args.runs} alternating runs",
        baseline="fio, queue depth 32, same block size",
        figures=figures,
        targets={name: {"at_least": 0.8} for name in figures if name.endswith("get_ratio")},
    )


if __name__ == "__main__":
    main()
