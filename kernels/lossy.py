"""Lossy codecs of KV blocks in C++: verified and encoded, or decoded, a block after the other.

Works on addresses, as `kernels.blocks` does: whoever calls keeps the memory alive and answers for the sizes. Calls
release the GIL, run on the calling thread and allocate nothing but a few buffers of one layer, once per thread. The
format and the specification are the caller's (`kv_tiers/at_rest.py`, `kv_tiers/lossy_codec.py`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from kernels import build, signatures
from kernels.blocks import Addresses, Sizes

WIDTHS = (2, 4)
"""Bytes per number: bf16, fp32."""


class Encoded(IntEnum):
    """What became of one block."""

    NOT_WHOLE = 0
    DONE = 1
    NOT_FINITE = 2


class Shape(NamedTuple):
    """Blocks of one codec: its number, bytes per number, tokens, and per layer (heads, dim, where it starts in a block
    as computed, where in an encoded one), flat.
    """

    codec: int
    width: int
    tokens: int
    layers: int
    table: Sizes

    @classmethod
    def of(cls, codec: int, width: int, tokens: int, rows: Sequence[tuple[int, int, int, int]]) -> Shape:
        flat = [number for row in rows for number in row]
        return cls(codec, width, tokens, len(rows), (ctypes.c_int64 * len(flat))(*flat))


class NativeLossy:
    """The operations of one built library. Checksums are u64 [blocks, layers], little-endian."""

    def __init__(self, path: Path) -> None:
        """OSError: the file does not load on this machine."""
        library = ctypes.CDLL(str(path))
        self._encode = _function(library, "kvtide_encode_blocks", signatures.ENCODE_BLOCKS)
        self._decode = _function(library, "kvtide_decode_blocks", signatures.DECODE_BLOCKS)

    def encode(
        self, sources: Addresses, targets: Addresses, shape: Shape, wanted: bytes, checksums: bytearray
    ) -> list[Encoded]:
        """Encode blocks whose layers have the `wanted` checksums; those of what was made are written."""
        assert len(sources) == len(targets) and shape.width in WIDTHS
        assert len(wanted) == len(checksums) == 8 * shape.layers * len(sources)
        outcomes = (ctypes.c_uint8 * len(sources))()
        made = (ctypes.c_uint8 * len(checksums)).from_buffer(checksums)
        self._check(self._encode(sources, targets, len(sources), *_given(shape), wanted, made, outcomes))
        return [Encoded(outcome) for outcome in outcomes]

    def decode(self, sources: Addresses, targets: Addresses, shape: Shape, checksums: bytearray) -> None:
        """Decode blocks that were verified; the checksums of what was made are written."""
        assert len(sources) == len(targets) and shape.width in WIDTHS
        assert len(checksums) == 8 * shape.layers * len(sources)
        made = (ctypes.c_uint8 * len(checksums)).from_buffer(checksums)
        self._check(self._decode(sources, targets, len(sources), *_given(shape), made))

    def _check(self, status: int) -> None:
        if status:
            raise MemoryError(f"blocks at rest: {signatures.STATUS[status]}")


def load(extra_flags: tuple[str, ...] = ()) -> NativeLossy:
    """As `kernels.native.load`, whose library it is."""
    path = build.library(extra_flags)
    try:
        return NativeLossy(path)
    except OSError as error:
        raise build.BuildFailed(f"{path} does not load: {error}; delete it to build it again") from error


def _function(library: ctypes.CDLL, name: str, argtypes: Sequence[type]) -> ctypes._CFuncPtr:  # type: ignore[name-defined]
    function = library[name]
    function.argtypes = argtypes
    return function


def _given(shape: Shape) -> tuple[int, int, int, Sizes, int]:
    return shape.codec, shape.width, shape.tokens, shape.table, shape.layers
