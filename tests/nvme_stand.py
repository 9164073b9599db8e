"""Small whole blocks in page-aligned memory, and engines that fail, hang or count, for tests of the NVMe tier."""

from __future__ import annotations

import errno
import functools
import mmap
import threading

import numpy as np
import torch

from kv_tiers.block import BlockLayout, write_block
from kv_tiers.keys import Fingerprint, block_keys
from kv_tiers.nvme import NvmeTier
from kv_tiers.nvme_io import Motion

LAYOUT = BlockLayout(layers=((1, 8), (2, 16)), dtype=torch.float32, block_tokens=4)
SLOT = 4096
FINGERPRINT = Fingerprint(bytes(32))
KEYS = block_keys(FINGERPRINT, range(4 * 200), 4)


def nbytes_for(slots):
    """Of a file with exactly so many slots."""
    return SLOT * (1 + -(-slots // 73) + slots)


@functools.cache
def block_bytes(key):
    """The one block of that key, `SLOT` bytes, different for every key."""
    slot = bytearray(SLOT)
    seed = int.from_bytes(key.digest[:4], "little")
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(heads, 4, dim, generator=generator) for heads, dim in LAYOUT.layers]
    write_block(memoryview(slot)[: LAYOUT.nbytes], LAYOUT, FINGERPRINT, key, tensors, tensors)
    return bytes(slot)


class Arena:
    """Page-aligned buffers, one after the other, registered as a whole."""

    def __init__(self, count):
        self.memory = memoryview(mmap.mmap(-1, count * SLOT))
        self.buffers = [self.memory[at : at + SLOT] for at in range(0, count * SLOT, SLOT)]
        self.place = (int(np.frombuffer(self.memory, dtype=np.uint8).ctypes.data), len(self.memory))

    def filled(self, keys):
        """The first buffers, holding the blocks of `keys`."""
        for key, buffer in zip(keys, self.buffers, strict=False):
            buffer[:] = block_bytes(key)
        return self.buffers[: len(keys)]

    def scratch(self, count):
        """As many buffers, none of which holds what the test will ask for."""
        for buffer in self.buffers[:count]:
            buffer[:] = b"\xee" * SLOT
        return self.buffers[:count]


class FaultyEngine:
    """`fault(motion, span)` gives the error a span is to end with, or None; `open` cleared: the device hangs."""

    name = "faulty"

    def __init__(self, inner):
        self.inner = inner
        self.open = threading.Event()
        self.open.set()
        self.begun = threading.Event()
        self.runs = []

    def fault(self, motion, span):
        return None

    def run(self, motion, spans, ended, stop):
        self.runs.append((motion, len(spans)))
        self.begun.set()
        assert self.open.wait(30)
        good = []
        for index, span in enumerate(spans):
            error = self.fault(motion, span)
            if error is None:
                good.append(index)
            else:
                ended(index, error)
        self.inner.run(motion, [spans[at] for at in good], lambda at, error: ended(good[at], error), stop)

    def close(self):
        self.inner.close()


def io_error(motion, span):
    """A device that does nothing any more."""
    return OSError(errno.EIO, "Input/output error")


def no_space(motion, span):
    """A device that takes no writes."""
    return OSError(errno.ENOSPC, "No space left on device") if motion is Motion.WRITE else None


class Clock:
    """Seconds, moved by hand."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


async def started(path, slots, **options):
    """A started tier of so many slots, and its faulty engine."""
    engines = []

    def wrap(inner):
        engines.append(FaultyEngine(inner))
        return engines[0]

    tier = NvmeTier(path, nbytes_for(slots), SLOT, wrap=wrap, **options)
    await tier.start()
    return tier, engines[0]
