"""Bytes of KV blocks in C++: hashed (XXH3, 64 bits, seed 0), or moved and hashed on the way, one pass over memory.

Works on addresses: whoever calls keeps the memory alive and answers for the sizes. Part of the library of
`kernels.native`; calls release the GIL, run on the calling thread and allocate nothing but a buffer of one layer or
header, once per thread. What runs without a compiler is the caller's business: it needs a checksum from elsewhere.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple, TypeAlias

from kernels import build, signatures


class RowsAt(NamedTuple):
    """Where rows [heads, tokens, dim] of K or V lie: address, and strides of heads and tokens in bytes."""

    address: int
    head: int
    token: int


class LayerAt(NamedTuple):
    """A layer of blocks: its number, and where it lies, in bytes from a block's start: heads × (K [tokens, row bytes],
    V likewise).
    """

    layer: int
    offset: int
    heads: int
    tokens: int
    row_bytes: int


Addresses: TypeAlias = "ctypes.Array[ctypes.c_uint64]"
"""Where blocks start."""
Sizes: TypeAlias = "ctypes.Array[ctypes.c_int64]"
"""Offsets or sizes, in bytes."""

DIGEST_BYTES = 32
"""Of a block's key."""


class Found(IntEnum):
    """What a block turned out to be: not whole or of another key; whole; of another form, so that nothing is known."""

    BAD = 0
    GOOD = 1
    OTHER_FORM = 2


class Parts(NamedTuple):
    """What carries checksums in a block: offsets from its start and sizes, in bytes, ascending."""

    offsets: Sizes
    sizes: Sizes

    @classmethod
    def of(cls, offsets: Sequence[int], sizes: Sequence[int]) -> Parts:
        array = ctypes.c_int64 * len(offsets)
        return cls(array(*offsets), array(*sizes))


class _FormAt(ctypes.Structure):
    """`Form` of blocks.cpp."""

    _fields_ = (
        ("like", ctypes.c_char_p),
        *((name, ctypes.c_int64) for name in ("nbytes", "header_bytes", "front", "table", "sums")),
        *((name, ctypes.c_void_p) for name in ("offsets", "sizes")),
        ("parts", ctypes.c_int64),
    )


@dataclass(frozen=True)
class BlockForm:
    """What blocks of one layout have in common: `nbytes`, and a header of `header_bytes`, of which [0, front) and
    [table, sums) are as in `like`. The key lies before `table`, the parts' checksums (u64) start at `sums`, and the
    header's last 8 bytes are its own checksum.
    """

    like: bytes
    nbytes: int
    header_bytes: int
    front: int
    table: int
    sums: int
    parts: Parts

    @functools.cached_property
    def at(self) -> _FormAt:
        """The same for C++."""
        offsets, sizes = self.parts
        numbers = (self.nbytes, self.header_bytes, self.front, self.table, self.sums)
        addresses = (ctypes.addressof(offsets), ctypes.addressof(sizes))
        return _FormAt(self.like, *numbers, *addresses, len(offsets))


class NativeBlocks:
    """The operations of one built library. Checksums are u64, little-endian as the machine must be."""

    def __init__(self, path: Path) -> None:
        """OSError: the file does not load on this machine."""
        self._library = ctypes.CDLL(str(path))
        self._xxh3 = self._function("kvtide_xxh3", signatures.XXH3, ctypes.c_uint64)
        self._copy = self._function("kvtide_copy", signatures.COPY)
        self._check = self._function("kvtide_check_blocks", signatures.CHECK_BLOCKS)
        self._read = self._function("kvtide_read_run", signatures.BLOCK_RUN, ctypes.c_int64)
        self._write = self._function("kvtide_write_run", signatures.BLOCK_RUN)

    def _function(
        self, name: str, argtypes: Sequence[type], restype: type = ctypes.c_int
    ) -> ctypes._CFuncPtr:  # type: ignore[name-defined]
        function = self._library[name]
        function.argtypes = argtypes
        function.restype = restype
        return function

    def xxh3(self, address: int, nbytes: int) -> int:
        """As `xxhash.xxh3_64_intdigest`."""
        return int(self._xxh3(address, nbytes))

    def copy(self, sources: Addresses, targets: Addresses, nbytes: int) -> None:
        """Copy pieces of that size, none of which overlap."""
        assert len(sources) == len(targets)
        self._copy(sources, targets, len(sources), nbytes)

    def check(
        self, sources: Addresses, targets: Addresses | None, sizes: Sizes, form: BlockForm, keys: bytes
    ) -> bytes:
        """Of each block what was `Found`; its key is 32 of the bytes of `keys`.

        With targets, whole buffers (`sizes`) are copied there on the way, and it is the copies that are checked; of
        what is not whole, some bytes or none.
        """
        count = len(sources)
        assert len(keys) == DIGEST_BYTES * count and len(sizes) == count and len(form.parts.offsets)
        assert targets is None or len(targets) == count
        found = (ctypes.c_uint8 * count)()
        if self._check(sources, targets, sizes, count, keys, found, ctypes.byref(form.at)):
            raise MemoryError("no memory for the header of a block")
        return bytes(found)

    def read_run(self, slots: Addresses, place: LayerAt, checksums: bytes, k: RowsAt, v: RowsAt) -> int:
        """Copy a layer of n consecutive blocks into rows [heads, n * tokens, dim], each as soon as it is verified.

        `checksums` of all layers of all blocks [n, layers]. → Leading blocks that were good; nothing of the others is
        written.
        """
        layers = _layers(slots, place, len(checksums))
        good = int(self._read(slots, len(slots), *place[1:], checksums, place.layer, layers, *k, *v))
        if good < 0:
            raise MemoryError("no memory for one layer of a block")
        return good

    def write_run(self, slots: Addresses, place: LayerAt, checksums: bytearray, k: RowsAt, v: RowsAt) -> None:
        """Copy rows [heads, n * tokens, dim] into a layer of n consecutive blocks, and set its `checksums`."""
        layers = _layers(slots, place, len(checksums))
        found = (ctypes.c_uint8 * len(checksums)).from_buffer(checksums)
        if self._write(slots, len(slots), *place[1:], found, place.layer, layers, *k, *v):
            raise MemoryError("no memory for one layer of a block")


def load(extra_flags: tuple[str, ...] = ()) -> NativeBlocks:
    """As `kernels.native.load`, whose library it is."""
    path = build.library(extra_flags)
    try:
        return NativeBlocks(path)
    except OSError as error:
        raise build.BuildFailed(f"{path} does not load: {error}; delete it to build it again") from error


def _layers(slots: Addresses, place: LayerAt, checksum_bytes: int) -> int:
    """Layers per block, as `checksum_bytes` of all blocks have it."""
    layers, rest = divmod(checksum_bytes, 8 * max(1, len(slots)))
    assert not rest and (place.layer < layers or not slots), "checksums of other blocks"
    return layers
