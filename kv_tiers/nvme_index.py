"""Which block lies in which slot of an NVMe tier's file: one record per slot, in checksummed pages.

    superblock (1 page) | index pages | slots

Superblock, little-endian: magic 8s, version u32, codec u32 (`AtRest`, of the blocks in the slots), slot bytes u64,
slots u64, salt u64, xxh3-64 of all that.
Index page: 73 records and the xxh3-64 of them, seeded with salt + page number. Record: key 32s, tenant u64 (0: none),
generation u64 (0: the slot is void), xxh3-64 of all that, seeded with salt + slot. A record of another file or slot
is never taken for one's own. A page of zeros is void throughout, as a new file is.

A record that a torn page still holds whole is as good as any: it was written before or after, never in between,
and a slot's bytes change only while its record on disk is void. The rest of such a page is dropped.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import xxhash

from kv_tiers.at_rest import AtRest
from kv_tiers.keys import DIGEST_BYTES, BlockKey
from kv_tiers.nvme_io import FileEngine, FileSpan, Motion

PAGE = 4096
VERSION = 1
_MAGIC = b"kvtideNV"
_SUPERBLOCK = struct.Struct("<8sIIQQQ")
_RECORD = np.dtype([("key", "u1", (DIGEST_BYTES,)), ("tenant", "<u8"), ("generation", "<u8"), ("sum", "<u8")])
_BODY = struct.Struct("<32sQQ")
_PER_PAGE = (PAGE - 8) // _RECORD.itemsize
_RUN_PAGES = 256
_U64 = 2**64 - 1


@dataclass(frozen=True)
class Geometry:
    """Where what lies in the file, in bytes, and how its blocks are encoded."""

    slots: int
    slot_bytes: int
    at_rest: AtRest = AtRest.EXACT

    @classmethod
    def within(cls, nbytes: int, slot_bytes: int, at_rest: AtRest = AtRest.EXACT) -> Geometry:
        """As many slots as fit with their metadata; ValueError if that is none, or not a whole number of pages each."""
        if slot_bytes < PAGE or slot_bytes % PAGE:
            raise ValueError(f"slots are a multiple of {PAGE} bytes long, not {slot_bytes}")
        slots = max(0, (nbytes - PAGE) * _PER_PAGE // (slot_bytes * _PER_PAGE + PAGE))
        while cls(slots + 1, slot_bytes).nbytes <= nbytes:
            slots += 1
        while slots and cls(slots, slot_bytes).nbytes > nbytes:
            slots -= 1
        if not slots:
            raise ValueError(f"{nbytes} bytes hold no block of {slot_bytes} beside {2 * PAGE} of metadata")
        return cls(slots, slot_bytes, at_rest)

    @property
    def pages(self) -> int:
        """Index pages."""
        return -(-self.slots // _PER_PAGE)

    @property
    def data(self) -> int:
        """Where slot 0 starts."""
        return PAGE * (1 + self.pages)

    @property
    def nbytes(self) -> int:
        """The whole file."""
        return self.data + self.slots * self.slot_bytes

    def superblock(self, salt: int) -> bytes:
        """The first page."""
        body = _SUPERBLOCK.pack(_MAGIC, VERSION, self.at_rest, self.slot_bytes, self.slots, salt)
        return (body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")).ljust(PAGE, b"\0")

    def salt_of(self, page: bytes) -> int | None:
        """The salt of a superblock that says exactly this shape, codec and version."""
        if len(page) < _SUPERBLOCK.size:
            return None
        salt = int(_SUPERBLOCK.unpack_from(page)[-1])
        return salt if page == self.superblock(salt) else None


class Placed(NamedTuple):
    """A block in its slot. `tenant`: a number that stands for the name; 0 for none."""

    slot: int
    key: BlockKey
    tenant: int


class Found(NamedTuple):
    """What a file's index says: blocks, least recent first; `dropped` records were there but not whole."""

    placed: list[Placed]
    last_generation: int
    dropped: int


class SlotIndex:
    """The index in memory and on disk. Any thread; one page is never written twice at the same time.

    Memory says what is to be; where a write of it failed, the page is written again with its slots' next change.
    """

    def __init__(self, geometry: Geometry, salt: int) -> None:
        self.geometry = geometry
        self._salt = salt
        self._image = memoryview(mmap.mmap(-1, geometry.pages * PAGE))
        self._bytes = np.frombuffer(self._image, dtype=np.uint8).reshape(geometry.pages, PAGE)
        self._records = self._bytes[:, : _PER_PAGE * _RECORD.itemsize].view(_RECORD)  # [pages, records]
        self._behind: set[int] = set()  # pages that the disk may hold otherwise
        self._turn = threading.Lock()
        self._overtaken = 0  # batches up to this generation were begun before the last clear

    def load(self, fd: int, whole_slots: int) -> Found:
        """Read the file's index in one pass; what lies beyond the first `whole_slots` slots is void. OSError."""
        _read_all(fd, PAGE, self._image)
        dropped = sum(self._mend(page) for page in self._suspects())
        generations = np.ascontiguousarray(self._records["generation"]).reshape(-1)
        used = np.flatnonzero(generations)
        beyond = used[used >= whole_slots]
        self._void(int(slot) for slot in beyond)
        used = used[used < whole_slots]
        used = used[np.argsort(generations[used], kind="stable")]
        chosen = self._records[used // _PER_PAGE, used % _PER_PAGE]
        digests = chosen["key"].tobytes()
        placed = {
            digests[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES]: (slot, tenant)
            for at, (slot, tenant) in enumerate(zip(used.tolist(), chosen["tenant"].tolist(), strict=True))
        }
        return Found(
            [Placed(slot, BlockKey(digest), tenant) for digest, (slot, tenant) in placed.items()],
            int(generations.max(initial=0)),
            dropped + len(beyond),
        )

    def blank(self, engine: FileEngine, slots: Sequence[int], stop: Callable[[], bool]) -> OSError | None:
        """Before slots are written: make sure that the disk has no record of them."""
        with self._turn:
            touched = self._void(slots)
            touched |= {slot // _PER_PAGE for slot in slots} & self._behind
            return self._write(engine, touched, stop)

    def commit(
        self, engine: FileEngine, placed: Sequence[Placed], generation: int, stop: Callable[[], bool]
    ) -> OSError | None:
        """After slots were written: record their blocks, head of the chain first, which becomes the most recent.

        `generation` is the first of as many that are this batch's own. If it was not recorded, or everything was
        cleared since the batch began, it may or may not be found after a crash: whole either way.
        """
        with self._turn:
            if generation <= self._overtaken:
                return None
            touched: set[int] = set()
            for at, (slot, key, tenant) in enumerate(placed):
                body = _BODY.pack(key.digest, tenant, generation + len(placed) - 1 - at)
                start = self._start(slot)
                self._image[start : start + _BODY.size] = body
                total = xxhash.xxh3_64_intdigest(body, seed=self._seed(slot))
                self._image[start + _BODY.size : start + _RECORD.itemsize] = total.to_bytes(8, "little")
                touched.add(slot // _PER_PAGE)
            return self._write(engine, touched, stop)

    def retract(self, engine: FileEngine, gone: Iterable[tuple[int, BlockKey]], upto: int) -> OSError | None:
        """Void the records of blocks that are gone, unless the slot has a newer one than generation `upto`."""
        with self._turn:
            touched = self._void(
                slot
                for slot, key in gone
                if self.key_of(slot) == key and self._records[divmod(slot, _PER_PAGE)]["generation"] <= upto
            )
            return self._write(engine, touched, _never)

    def retract_all(self, engine: FileEngine, upto: int, spare: Sequence[int] = ()) -> OSError | None:
        """Void every record up to that generation but those of the slots to spare; try again what failed before."""
        with self._turn:
            self._overtaken = max(self._overtaken, upto)
            old = (self._records["generation"] != 0) & (self._records["generation"] <= upto)
            flat = old.reshape(-1)
            flat[list(spare)] = False
            touched = self._void(int(slot) for slot in np.flatnonzero(flat))
            return self._write(engine, touched | self._behind, _never)

    def overtake(self, upto: int) -> None:
        """Batches up to that generation are not to be recorded any more."""
        self._overtaken = max(self._overtaken, upto)

    def key_of(self, slot: int) -> BlockKey | None:
        """The block of a slot's record; None: void."""
        record = self._records[divmod(slot, _PER_PAGE)]
        return BlockKey(record["key"].tobytes()) if record["generation"] else None

    def _seed(self, number: int) -> int:
        return (self._salt + number) & _U64

    def _start(self, slot: int) -> int:
        page, at = divmod(slot, _PER_PAGE)
        return page * PAGE + at * _RECORD.itemsize

    def _sum(self, page: int) -> bytes:
        body = self._image[page * PAGE : (page + 1) * PAGE - 8]
        return xxhash.xxh3_64_intdigest(body, seed=self._seed(page)).to_bytes(8, "little")

    def _suspects(self) -> list[int]:
        """Pages that are neither whole nor empty."""
        return [
            page
            for page in np.flatnonzero(self._bytes.any(axis=1)).tolist()
            if self._image[(page + 1) * PAGE - 8 : (page + 1) * PAGE] != self._sum(page)
        ]

    def _mend(self, page: int) -> int:
        """Void what is not whole in a page; returns how many."""
        first = page * _PER_PAGE
        dropped = 0
        for slot in range(first, min(first + _PER_PAGE, self.geometry.slots)):
            start = self._start(slot)
            raw = bytes(self._image[start : start + _RECORD.itemsize])
            total = xxhash.xxh3_64_intdigest(raw[: _BODY.size], seed=self._seed(slot))
            if any(raw) and int.from_bytes(raw[_BODY.size :], "little") != total:
                self._void([slot])
                dropped += 1
        self._behind.add(page)
        return dropped

    def _void(self, slots: Iterable[int]) -> set[int]:
        touched: set[int] = set()
        for slot in slots:
            record = divmod(slot, _PER_PAGE)
            if self._records[record]["generation"]:
                touched.add(record[0])
            start = self._start(slot)
            self._image[start : start + _RECORD.itemsize] = bytes(_RECORD.itemsize)
        self._behind |= touched
        return touched

    def _write(self, engine: FileEngine, pages: set[int], stop: Callable[[], bool]) -> OSError | None:
        """Write pages; the first error, if there was any."""
        if not pages:
            return None
        self._behind |= pages
        for page in pages:
            self._image[(page + 1) * PAGE - 8 : (page + 1) * PAGE] = self._sum(page)
        runs = list(_runs(sorted(pages)))
        spans = [
            FileSpan(PAGE * (1 + run.start), self._image[PAGE * run.start : PAGE * run.stop]) for run in runs
        ]
        errors: list[OSError] = []

        def ended(index: int, error: OSError | None) -> None:
            if error is None:
                self._behind.difference_update(runs[index])
            else:
                errors.append(error)

        engine.run(Motion.WRITE, spans, ended, stop)
        return errors[0] if errors else None


def _never() -> bool:
    return False


def _runs(pages: Sequence[int]) -> Iterator[range]:
    """Sorted page numbers as ranges of neighbours."""
    start = 0
    for at in range(1, len(pages) + 1):
        if at == len(pages) or pages[at] != pages[at - 1] + 1 or at - start == _RUN_PAGES:
            yield range(pages[start], pages[at - 1] + 1)
            start = at


def _read_all(fd: int, offset: int, image: memoryview, step: int = 8 << 20) -> None:
    at = 0
    while at < len(image):
        read = os.preadv(fd, [image[at : at + step]], offset + at)
        if read == 0:
            return  # the file ends here: void
        at += read
