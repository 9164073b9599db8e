"""The staging arena: one block of memory, registered with the transport once, cut into leases.

Packed survivors wait here at the source until they are pulled and land here at the destination. One region
keeps the transport's metadata small (each further region adds about 45 bytes). A lease
is `nbytes` of payload and behind it, at the next multiple of 64, a 64-byte seal (see `ticket.Ticket.seal`);
leases start at multiples of 4096.
"""

from __future__ import annotations

import bisect
import mmap
import threading
from contextlib import suppress
from enum import Enum

import torch
import xxhash

from kv_tiers.transfer.ticket import SEAL_BYTES

ALIGNMENT = 4096


def payload_checksum(buffer: torch.Tensor) -> int:
    """xxh3_64 of a contiguous uint8 CPU tensor, as tickets carry it. Releases the GIL; 15 to 35 GB/s."""
    return xxhash.xxh3_64_intdigest(buffer.numpy().data)


def seal_offset(nbytes: int) -> int:
    """Where the seal of a buffer of `nbytes` starts, counted from the buffer's start. Part of the wire
    format.
    """
    return -(-nbytes // SEAL_BYTES) * SEAL_BYTES


def lease_bytes(nbytes: int) -> int:
    """Arena bytes that a lease of `nbytes` takes: payload, seal, rounded up to ALIGNMENT."""
    return -(-(seal_offset(nbytes) + SEAL_BYTES) // ALIGNMENT) * ALIGNMENT


class FreeList:
    """First-fit allocator over [0, size) with coalescing: pure, not thread safe.

    First fit keeps using low addresses, so memory that was touched once stays in use and the rest stays
    untouched.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._starts: list[int] = [0] if size else []
        self._sizes: list[int] = [size] if size else []

    @property
    def free_bytes(self) -> int:
        """Sum of all holes."""
        return sum(self._sizes)

    def take(self, nbytes: int) -> int | None:
        """The lowest offset with room for `nbytes` (> 0), now taken; None when no hole is large enough."""
        assert nbytes > 0
        for index, size in enumerate(self._sizes):
            if size < nbytes:
                continue
            offset = self._starts[index]
            if size == nbytes:
                del self._starts[index], self._sizes[index]
            else:
                self._starts[index] += nbytes
                self._sizes[index] -= nbytes
            return offset
        return None

    def give(self, offset: int, nbytes: int) -> None:
        """Give back what `take` returned; merges with both neighbours."""
        index = bisect.bisect_left(self._starts, offset)
        assert offset >= 0 and offset + nbytes <= self.size
        assert index == len(self._starts) or offset + nbytes <= self._starts[index], "given back twice"
        assert index == 0 or self._starts[index - 1] + self._sizes[index - 1] <= offset, "given back twice"
        self._starts.insert(index, offset)
        self._sizes.insert(index, nbytes)
        for left in (index, index - 1):
            if (
                0 <= left < len(self._starts) - 1
                and self._starts[left] + self._sizes[left] == self._starts[left + 1]
            ):
                self._sizes[left] += self._sizes[left + 1]
                del self._starts[left + 1], self._sizes[left + 1]

    def check(self) -> None:
        """Holes are ascending, not empty, inside the range, and never touch each other."""
        end = -1
        for start, size in zip(self._starts, self._sizes, strict=True):
            assert size > 0 and start > end, "holes overlap or touch"
            end = start + size
        assert end <= self.size


class LeaseState(Enum):
    """Who may write to a lease's memory."""

    HELD = "held"  # its holder
    PUBLISHED = "published"  # nobody: readers elsewhere may be reading
    QUARANTINED = "quarantined"  # the transport, perhaps: a transfer into it was given up while under way
    RELEASED = "released"  # whoever leases it next


class StagingLease:
    """A piece of the arena. The holder owns `buffer` until `release()` or until the lease is published.

    After publication the endpoint owns it and releases it when the ticket ends. Any thread may release; once.
    """

    def __init__(self, arena: StagingArena, offset: int, nbytes: int) -> None:
        self.arena = arena
        self.offset = offset
        self.nbytes = nbytes
        self.state = LeaseState.HELD

    @property
    def buffer(self) -> torch.Tensor:
        """uint8 view [nbytes] of the arena, not initialised; dead after release."""
        assert self.state is not LeaseState.RELEASED, "buffer of a released lease"
        return self.arena.memory[self.offset : self.offset + self.nbytes]

    @property
    def seal(self) -> torch.Tensor:
        """uint8 view [64] behind the payload."""
        start = self.offset + seal_offset(self.nbytes)
        return self.arena.memory[start : start + SEAL_BYTES]

    def write_seal(self, seal: bytes) -> None:
        """Make the payload valid for readers that expect `seal`."""
        assert len(seal) == SEAL_BYTES
        self.seal.copy_(torch.frombuffer(bytearray(seal), dtype=torch.uint8))

    def read_seal(self) -> bytes:
        """The 64 bytes behind the payload now."""
        return self.seal.numpy().tobytes()

    def release(self) -> None:
        """Give the memory back. The seal is wiped first: a reader that is still at work sees that it came
        too late.
        """
        assert self.state in (LeaseState.HELD, LeaseState.QUARANTINED), (
            f"release of a {self.state.value} lease"
        )
        self.seal.zero_()
        self.arena._give(self)


class StagingArena:
    """`size` bytes (rounded up to 4096) of page-aligned, lazily touched CPU memory. Thread safe.

    `memory` is uint8 [size]; it lives as long as anything refers to it.
    """

    def __init__(self, size: int) -> None:
        if size < ALIGNMENT:
            raise ValueError(f"a staging arena needs at least {ALIGNMENT} bytes, got {size}")
        self.size = -(-size // ALIGNMENT) * ALIGNMENT
        region = mmap.mmap(-1, self.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # Huge pages: the first pull into untouched memory otherwise pays one fault for every 4 KB.
            with suppress(OSError):  # a kernel without them: only speed differs
                region.madvise(mmap.MADV_HUGEPAGE)
        self.memory = torch.frombuffer(region, dtype=torch.uint8)
        assert self.memory.data_ptr() % ALIGNMENT == 0
        self._lock = threading.Lock()
        self._holes = FreeList(self.size)
        self._live: dict[int, StagingLease] = {}

    @property
    def capacity(self) -> int:
        """The largest payload that an empty arena can hold, bytes."""
        return self.size - SEAL_BYTES

    @property
    def used_bytes(self) -> int:
        """Arena bytes under lease, seals and rounding included."""
        with self._lock:
            return self.size - self._holes.free_bytes

    def reserve(self, nbytes: int) -> StagingLease | None:
        """A lease of `nbytes`, or None when there is no room now. ValueError when there never can be."""
        if not 0 < nbytes <= self.capacity:
            raise ValueError(f"cannot stage {nbytes} bytes: the staging arena holds 1 to {self.capacity}")
        with self._lock:
            offset = self._holes.take(lease_bytes(nbytes))
            if offset is None:
                return None
            lease = StagingLease(self, offset, nbytes)
            self._live[offset] = lease
            return lease

    def _give(self, lease: StagingLease) -> None:
        with self._lock:
            assert self._live.pop(lease.offset, None) is lease, (
                "release of a lease of another arena, or twice"
            )
            lease.state = LeaseState.RELEASED
            self._holes.give(lease.offset, lease_bytes(lease.nbytes))

    def live(self, state: LeaseState) -> list[StagingLease]:
        """Leases in `state`, for gauges and checks."""
        with self._lock:
            return [lease for lease in self._live.values() if lease.state is state]

    def check(self) -> None:
        """Holes and leases are disjoint and together fill the arena."""
        with self._lock:
            self._holes.check()
            leased, end = 0, 0
            for offset in sorted(self._live):
                lease = self._live[offset]
                assert offset == lease.offset >= end and lease.state is not LeaseState.RELEASED, (
                    "leases overlap"
                )
                end = offset + lease_bytes(lease.nbytes)
                leased += end - offset
            assert end <= self.size and leased + self._holes.free_bytes == self.size, "bytes lost"
