"""How fast and how big the directory is: in process, and as an actor on a local Ray.

    python -m benchmarks.bench_directory [--quick] [--blocks 1000000 10000000] [--rounds 5]

Look-ups ask for chains of 512 blocks, of which two nodes hold the first half and one the rest; a figure is the best of
the rounds, for the machine may be busy with others. Bytes are what the process grows by, over the number of blocks.
`longest` is the longest single call in CPU time, which holds up all others: a part of a manifest, or a step of the
sweep after a node's death. The refill is what follows a restart: register, then the manifest in parts, until the last
is known.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import ray

from benchmarks.result import Bound, print_result
from deployments.directory import DirectoryClient, directory_actor
from kv_tiers.directory import DirectoryState, Outcome, Place
from kv_tiers.keys import DIGEST_BYTES
from kv_tiers.shards import PART_KEYS, parts

CHAIN = 512
FIRST, SECOND = Place("node-1", "cpu"), Place("node-2", "cpu")
MILLION = 1_000_000
TARGETS: dict[str, Bound] = {
    "lookups_per_s": {"at_least": 500_000},
    "bytes_per_block": {"at_most": 200},
    "actor_lookups_per_s": {"at_least": 100_000},
    "actor_refill_s_per_million": {"at_most": 10},
}
TEN_MILLION_TARGET: dict[str, Bound] = {"rss_gb_at_10m": {"at_most": 2}}


def rss() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Longest:
    """The longest of many calls, in seconds of this thread: a busy machine does not count."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def time(self, call: Callable[[], object]) -> float:
        """Wall seconds that this call took."""
        begin, worked = time.perf_counter(), time.thread_time()
        call()
        self.seconds = max(self.seconds, time.thread_time() - worked)
        return time.perf_counter() - begin


def in_process(blocks: int, rounds: int) -> dict[str, float]:
    """Fill a directory from one node's manifest, look up, then let the node die and be swept."""
    before = rss()
    directory = DirectoryState(lease_s=3600.0, epoch=1)
    directory.register(FIRST, 1, 0.0)
    directory.register(SECOND, 1, 0.0)
    count = -(-blocks // PART_KEYS)
    sample: list[bytes] = []
    filling, step = Longest(), 0.0
    for part in range(count):
        keys = os.urandom(min(PART_KEYS, blocks - part * PART_KEYS) * DIGEST_BYTES)
        first, last = part == 0, part == count - 1
        step += filling.time(partial(directory.resync, FIRST, 1, 1, keys, first, last))
        if part % max(count // 16, 1) == 0:
            sample += [
                keys[at : at + CHAIN * DIGEST_BYTES] for at in range(0, len(keys), CHAIN * DIGEST_BYTES)
            ]
    for at, chain in enumerate(sample):
        directory.announce(SECOND, 1, at + 1, chain[: len(chain) // 2], b"")
    grown = rss() - before
    looked_up = sum(len(chain) for chain in sample) // DIGEST_BYTES
    best = min(Longest().time(lambda: [directory.locate(chain) for chain in sample]) for _ in range(rounds))
    assert all(directory.locate(chain).run * DIGEST_BYTES == len(chain) for chain in sample)
    dying, sweeping, now = Longest(), Longest(), 1.0
    dying.time(lambda: directory.register(FIRST, 2, 1.0))
    assert directory.stats(1.0).keys <= looked_up
    while directory.stats(1.0).unswept:
        now += 0.25
        sweeping.time(partial(directory.expire, now))
    return {
        "blocks": blocks,
        "filled_per_s": blocks / step,
        "bytes_per_block": grown / blocks,
        "rss_gb": rss_peak() / 1e9,
        "lookups_per_s": looked_up / best,
        "longest_part_ms": filling.seconds * 1e3,
        "death_ms": dying.seconds * 1e3,
        "longest_sweep_ms": sweeping.seconds * 1e3,
    }


def rss_peak() -> int:
    """Most bytes that this process ever had in memory."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


async def keep_alive(client: DirectoryClient) -> None:
    """As the node's agent does."""
    while True:
        assert await client.heartbeat(FIRST.node, 1) is Outcome.OK
        await asyncio.sleep(1.0)


async def through_an_actor(blocks: int, rounds: int) -> dict[str, float]:
    """The same through the client and one real actor; batches of one chain, eight under way at a time."""
    ray.init(num_cpus=1, include_dashboard=False, logging_level="ERROR", configure_logging=False)
    try:
        client = DirectoryClient("bench-directory")
        manifest = os.urandom(blocks * DIGEST_BYTES)
        chains = [
            manifest[at : at + CHAIN * DIGEST_BYTES] for at in range(0, len(manifest), CHAIN * DIGEST_BYTES)
        ]
        async with asyncio.timeout(120):
            while await client.register(SECOND, 1) is not Outcome.OK:
                await asyncio.sleep(0.1)
        begin = time.perf_counter()
        assert await client.register(FIRST, 1, "bench") is Outcome.OK
        for part in parts(manifest):
            assert await client.resync(FIRST, 1, 1, *part) is Outcome.OK
        refill = time.perf_counter() - begin
        assert (await client.stats()).keys == blocks
        living = asyncio.create_task(keep_alive(client))
        asked = chains[: 400 * 8]
        best = float("inf")
        for _ in range(rounds):
            pending = iter(asked)

            async def ask() -> int:
                return sum([(await client.locate(chain)).run for chain in pending])  # noqa: B023

            begin = time.perf_counter()
            found = sum(await asyncio.gather(*(ask() for _ in range(8))))
            best = min(best, time.perf_counter() - begin)
            assert found * DIGEST_BYTES == sum(map(len, asked)), "a miss"
        living.cancel()
        ray.kill(directory_actor("bench-directory"))
    finally:
        ray.shutdown()
    return {
        "actor_refill_s_per_million": refill * MILLION / blocks,
        "actor_lookups_per_s": sum(map(len, asked)) / DIGEST_BYTES / best,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, nargs="+", default=[MILLION, 10 * MILLION], metavar="N")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one million blocks only")
    args = parser.parse_args()

    sizes = [MILLION] if args.quick else args.blocks
    columns = {
        "blocks": "blocks",
        "filled_per_s": "filled/s",
        "bytes_per_block": "bytes each",
        "rss_gb": "GB at most",
        "lookups_per_s": "look-ups/s",
        "longest_part_ms": "longest part, ms",
        "death_ms": "death, ms",
        "longest_sweep_ms": "longest sweep, ms",
    }
    print("in process:")
    print("".join(f"{name:>19}" for name in columns.values()))
    rows = []
    for blocks in sizes:
        rows.append(in_process(blocks, args.rounds))
        print("".join(f"{rows[-1][name]:19,.2f}" for name in columns), flush=True)
    figures = {name: value for name, value in rows[-1].items() if name != "rss_gb"}
    targets = dict(TARGETS)
    figures["lookups_per_s"] = min(row["lookups_per_s"] for row in rows)
    figures["bytes_per_block"] = max(row["bytes_per_block"] for row in rows)
    if rows[-1]["blocks"] == 10 * MILLION:
        figures["rss_gb_at_10m"] = rows[-1]["rss_gb"]
        targets |= TEN_MILLION_TARGET
    actor = asyncio.run(through_an_actor(MILLION, args.rounds))
    print(
        f"as an actor: {actor['actor_lookups_per_s']:,.0f} look-ups/s in batches of {CHAIN}, "
        f"refill of a million blocks {actor['actor_refill_s_per_million']:.2f} s"
    )
    print_result(
        "directory",
        f"one shard, chains of {CHAIN}, manifests in parts of {PART_KEYS}, {os.cpu_count()} CPUs",
        "none: the targets are absolute",
        figures | actor,
        targets,
    )


if __name__ == "__main__":
    main()
