"""A process that dies at a chosen write of a chosen call of an NVMe tier, then one that looks at what is left.

`python nvme_crash.py FOLDER`: prints one JSON line per call, write and way of dying. Run by test_tiers_nvme_crash.py.
Forks, so that torch is imported once; the process that forks has one thread.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from pathlib import Path

from nvme_stand import KEYS, SLOT, Arena, block_bytes, nbytes_for

from kv_tiers.nvme import NvmeTier
from kv_tiers.nvme_io import FileSpan, Motion

SLOTS = 75  # two index pages
OLD, NEW = KEYS[:SLOTS], KEYS[SLOTS : SLOTS + 4]
CALLS = {
    "put": lambda tier, buffers: tier.put(NEW, buffers),
    "drop": lambda tier, buffers: tier.drop(OLD[::7]),
    "clear": lambda tier, buffers: tier.clear(),
    "close": lambda tier, buffers: tier.close(),
}
WAYS = ("before", "torn", "after")


class DyingEngine:
    """Writes one span after the other and dies at the given one: before it, in its middle or right after it."""

    name = "dying"

    def __init__(self, inner, at, way):
        self.inner = inner
        self.left = at
        self.way = way

    def run(self, motion, spans, ended, stop):
        for index, span in enumerate(spans):
            dying = motion is Motion.WRITE and self.left == 0
            self.left -= motion is Motion.WRITE
            if dying and self.way == "before":
                die()
            half = FileSpan(span.offset, span.buffer[: len(span.buffer) // 2])
            torn = dying and self.way == "torn"
            errors = []
            self.inner.run(motion, [half if torn else span], lambda _, error: errors.append(error), stop)  # noqa: B023
            if dying:
                die()
            ended(index, errors[0])

    def close(self):
        self.inner.close()


def die():
    os.kill(os.getpid(), signal.SIGKILL)


async def prepare(path):
    tier = NvmeTier(path, nbytes_for(SLOTS), SLOT)
    await tier.start()
    await tier.put(OLD, Arena(SLOTS).filled(OLD))
    await tier.close()


async def break_off(path, call, at, way):
    arena = Arena(len(NEW))
    tier = NvmeTier(path, nbytes_for(SLOTS), SLOT, wrap=lambda inner: DyingEngine(inner, at, way))
    await tier.start()
    if call == "close":
        await tier.drop([OLD[3]])
        tier.expire()
    await CALLS[call](tier, arena.filled(NEW))
    os._exit(0)  # the call makes fewer writes than that


async def look(path):
    tier = NvmeTier(path, nbytes_for(SLOTS), SLOT)
    await tier.start()
    tier.check()
    seen = set(tier.manifest().keys)
    arena = Arena(SLOTS + len(NEW))
    buffers = arena.scratch(SLOTS + len(NEW))
    answers = await tier.get(KEYS[: SLOTS + len(NEW)], buffers)
    hits = [key for key, answer in zip(KEYS, answers, strict=False) if answer.name == "HIT"]
    equal = all(buffers[KEYS.index(key)] == block_bytes(key) for key in hits)
    again = await tier.put(NEW, arena.filled(NEW))
    tier.check()
    found = {
        "old": [answer.name for answer in answers[:SLOTS]],
        "new": [answer.name for answer in answers[SLOTS:]],
        "equal": equal,
        "listed_are_served": seen == set(hits),
        "again": sorted({stored.name for stored in again}),
        "dropped_at_start": tier.faults.dropped_at_start,
        "recreated": tier.faults.recreated,
        "folder": os.listdir(path.parent),
        "size": path.stat().st_size,
    }
    await tier.close()
    return found


def in_child(work):
    """How a forked process that runs `work()` ended."""
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    return os.waitpid(child, 0)[1]


def main(folder):
    prepared = folder / "prepared"
    for key in [*OLD, *NEW]:
        block_bytes(key)  # once, not in every child
    in_child(lambda: asyncio.run(prepare(prepared)))
    for call in CALLS:
        for way in WAYS:
            for at in range(100):
                path = folder / f"{call}-{way}-{at}" / "tier.kvnvme"
                path.parent.mkdir()
                shutil.copy(prepared, path)
                status = in_child(lambda: asyncio.run(break_off(path, call, at, way)))  # noqa: B023
                if status == 0:
                    break  # every write of the call had its turn
                assert os.WTERMSIG(status) == signal.SIGKILL

                def report():
                    found = asyncio.run(look(path))  # noqa: B023
                    print(json.dumps({"call": call, "way": way, "at": at, **found}), flush=True)  # noqa: B023

                assert in_child(report) == 0


if __name__ == "__main__":
    main(Path(sys.argv[1]))
