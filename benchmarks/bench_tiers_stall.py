"""How long a node agent's event loop serves nobody while the blocks of a long prompt are written and read.

    python -m benchmarks.bench_tiers_stall [--tokens 100000] [--slots 40000] [--rounds 3]

A store with two tiers below its slab, all full, `tier_policy=reuse` and `admission=auto`. A prompt's blocks are
reserved, committed, held, let go of, and chosen for the write-down, as requests of a replica do it; beside that a task
notes how long each turn of the loop takes, in CPU time of this process, for the machine may be busy. Bytes are not
moved: that is done by threads. The baseline, in the same run: the same in one piece. Further rows: what one call of
each listener takes, which is the least that the loop can be kept.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.result import print_result
from deployments.node_garbage import OldObjects
from kv_tiers import store_spill, store_write
from kv_tiers.books import SlotBooks
from kv_tiers.directory import Located
from kv_tiers.keys import BlockKey
from kv_tiers.memory import MemoryTier
from kv_tiers.store import TieredStore
from policies.tiering import make_admission, make_policy
from policies.tiering.speed import Speeds

BLOCK_TOKENS = 16
SLOT_BYTES = 64
"""Of a slot here: no bytes are looked at."""

_FILL = 500  # blocks of the prompts that fill the tiers
_BATCH = 22  # blocks of 360 KiB that one write of the write-down has
_WORTH_S = 5.0
_TARGET_MS = 20.0


class NoDirectory:
    """`DirectoryPort` that knows nothing."""

    async def locate(self, keys: bytes) -> Located:
        return Located(0, ())

    async def forget(self, place: Any, keys: bytes) -> int:
        return 0

    async def copies(self, keys: bytes) -> bytes:
        return b""


class Slab:
    """`BlockMemory` of the same few bytes everywhere."""

    def view(self, offset: int, nbytes: int) -> memoryview:
        return memoryview(bytearray(nbytes))


def chain(name: object, blocks: int) -> list[BlockKey]:
    """A prompt's keys."""
    return [BlockKey(hashlib.sha256(f"{name}/{number}".encode()).digest()) for number in range(blocks)]


class Watch:
    """The longest turn of the loop so far, CPU seconds."""

    def __init__(self) -> None:
        self.longest = 0.0

    async def run(self) -> None:
        """Note every turn, for ever."""
        last = time.process_time()
        while True:
            await asyncio.sleep(0)
            now = time.process_time()
            self.longest = max(self.longest, now - last)
            last = now


@asynccontextmanager
async def watched(longest: dict[str, float], phase: str) -> AsyncIterator[None]:
    """Notes the longest turn inside under that name."""
    watch = Watch()
    task = asyncio.create_task(watch.run())
    await asyncio.sleep(0)
    try:
        yield
    finally:
        await asyncio.sleep(0)
        task.cancel()
        longest[phase] = max(longest.get(phase, 0.0), watch.longest)


class Bench:
    """A store whose tiers are full. Make it in a running loop."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        clock = asyncio.get_running_loop().time

        def books(blocks: int) -> SlotBooks:
            return SlotBooks(blocks, SLOT_BYTES, policy=make_policy("reuse", blocks), clock=clock)

        self.books = books(slots)
        self.lower = [MemoryTier(books(2 * slots)) for _ in range(2)]
        for name, tier in zip(("nvme", "redis"), self.lower, strict=True):
            tier.name = name
        self.admission = make_admission("auto", 5 * slots)
        self.clock = clock
        self.store = TieredStore(
            self.books,
            Slab(),
            self.lower,
            node="a",
            directory=NoDirectory(),
            peers=lambda node: None,
            admission=self.admission,
            speeds=Speeds(),
            clock=clock,
        )

    async def fill(self) -> None:
        """With short prompts, until blocks have been evicted everywhere."""
        for tier in self.lower:
            await tier.start()
        self.store.start()
        for number in range(3 * self.slots // _FILL):
            await self.write(chain(("fill", number), _FILL))
            await asyncio.sleep(0)
        await self.store.write_down()

    async def write(self, keys: Sequence[BlockKey]) -> None:
        """As a replica does."""
        lease = await self.store.prepare_write(keys, "replica")
        await self.store.complete_write(lease.id, [entry.key for entry in lease.entries])

    async def request(self, keys: Sequence[BlockKey], longest: dict[str, float]) -> None:
        """One prompt's calls, each watched."""
        async with watched(longest, "prepare_write"):
            lease = await self.store.prepare_write(keys, "replica")
        async with watched(longest, "complete_write"):
            await self.store.complete_write(lease.id, [entry.key for entry in lease.entries])
        async with watched(longest, "prepare_read"):
            read = await self.store.prepare_read(keys, "replica", worth_s=_WORTH_S)
        assert len(read.entries) == len(keys)
        async with watched(longest, "complete_read"):
            self.store.complete_read(read.id)
        async with watched(longest, "write-down"):
            await asyncio.sleep(0.3)
            await self.store.write_down()

    def listeners(self, keys: Sequence[BlockKey]) -> dict[str, float]:
        """CPU seconds of the calls that cannot be cut."""

        def timed(work: Callable[[], object]) -> float:
            began = time.process_time()
            work()
            return time.process_time() - began

        return {
            "slab's policy": timed(lambda: self.books.accessed(keys)),
            "lower tier's policy": timed(lambda: self.lower[0].accessed(keys)),
            "admission": timed(lambda: self.admission.accessed(keys, self.clock())),
        }


async def measure(
    blocks: int, slots: int, rounds: int, piece: int
) -> tuple[dict[str, float], dict[str, float]]:
    """→ longest turns by phase, new prompts and known ones together; CPU seconds by listener."""
    store_write.PIECE = piece
    store_spill.BATCH_BYTES = _BATCH * SLOT_BYTES
    bench, old = Bench(slots), OldObjects()
    await bench.fill()
    longest: dict[str, float] = {}
    for name in (*range(rounds), *range(rounds)):
        old.set_aside()
        await bench.request(chain(name, blocks), longest)
    listeners = bench.listeners(chain("listened to", blocks))
    await bench.store.close()
    gc.unfreeze()
    return longest, listeners


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--slots", type=int, default=40_000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    blocks, piece = args.tokens // BLOCK_TOKENS, store_write.PIECE
    whole, _ = asyncio.run(measure(blocks, args.slots, args.rounds, 1 << 40))
    pieces, listeners = asyncio.run(measure(blocks, args.slots, args.rounds, piece))
    print(f"{'longest turn of the loop, CPU ms':<34}{'in pieces':>10}{'whole':>8}   {blocks} blocks")
    figures: dict[str, float] = {}
    for phase, seconds in pieces.items():
        print(f"{phase:<34}{1000 * seconds:>10.1f}{1000 * whole[phase]:>8.1f}")
        figures[f"{phase.replace('-', '_')}_ms"] = round(1000 * seconds, 1)
        figures[f"{phase.replace('-', '_')}_whole_ms"] = round(1000 * whole[phase], 1)
    for listener, seconds in listeners.items():
        print(f"{listener:<34}{1000 * seconds:>10.1f}")
    figures["longest_ms"] = round(1000 * max(pieces.values()), 1)
    print_result(
        "tiers_stall",
        f"a prompt of {args.tokens} tokens, {args.slots} slots, two full tiers below, reuse and auto, CPU time",
        "the same in one piece, same run",
        figures,
        {"longest_ms": {"at_most": _TARGET_MS}},
    )


if __name__ == "__main__":
    main()
