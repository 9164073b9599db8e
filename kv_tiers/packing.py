"""Blocks as frames: raw, or losslessly packed (byte shuffle, then zstd) for tiers whose room is dearer than time.

    frame = header (32 bytes) | body

Header, little-endian: magic 4s, version u8, codec u8 (0: raw, 1: shuffled zstd), element width u8, zero u8, raw bytes
u32, body bytes u32, xxh3-64 of the body u64 (0 for raw: the block in it carries its own checksums), xxh3-64 of the
fields before u64. A reader follows no length that the header's checksum does not cover and the reader's buffer does
not hold.

The byte shuffle puts the first bytes of all elements together, then the second ones: the exponents of neighbouring
bf16 numbers are alike, their mantissas are noise.
"""

from __future__ import annotations

import struct
import threading
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, TypeAlias

import numpy as np
import xxhash
import zstandard

from kv_tiers.block import Buffer, flat_bytes

Bytes: TypeAlias = bytes | bytearray | memoryview

FRAME_BYTES = 32
MAX_RAW_BYTES = 1 << 30

_MAGIC = b"kvfr"
_VERSION = 1
_FIELDS = struct.Struct("<4sBBBBIIQ")
_CHECKSUM = struct.Struct("<Q")
_WIDTHS = (1, 2, 4, 8)
_ZSTD_LEVEL = 1


class Codec(IntEnum):
    """How a frame's body holds the block."""

    RAW = 0
    SHUFFLED_ZSTD = 1


_CODECS = frozenset(int(codec) for codec in Codec)


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """A verified header. `raw_bytes`: the block's; `body_bytes`: the body's, never more than `raw_bytes`."""

    codec: Codec
    width: int
    raw_bytes: int
    body_bytes: int
    checksum: int


class Frame(NamedTuple):
    """What to send: 32 bytes of header, and a body that is the caller's own block where it stays raw."""

    header: bytes
    body: memoryview

    @property
    def nbytes(self) -> int:
        """Header and body."""
        return FRAME_BYTES + len(self.body)


def raw_frame(block: Buffer) -> Frame:
    """The block as it is; nothing is copied. ValueError for more than `MAX_RAW_BYTES`."""
    body = _bounded(block)
    return Frame(_encode(FrameHeader(Codec.RAW, 1, len(body), len(body), 0)), body)


def packed_frame(block: Buffer, width: int) -> Frame:
    """The block packed as elements of `width` bytes (1, 2, 4, 8), or raw where that does not make it smaller."""
    if width not in _WIDTHS:
        raise ValueError(f"elements are {', '.join(map(str, _WIDTHS))} bytes wide, not {width}")
    body = _bounded(block)
    packed = _compressor().compress(_shuffled(body, width).data)
    if len(packed) >= len(body):
        return raw_frame(block)
    header = FrameHeader(Codec.SHUFFLED_ZSTD, width, len(body), len(packed), xxhash.xxh3_64_intdigest(packed))
    return Frame(_encode(header), memoryview(packed))


def read_frame_header(head: Bytes) -> FrameHeader | None:
    """The header that `head` starts with; None if there is none, or one whose fields contradict each other."""
    raw = bytes(memoryview(head)[:FRAME_BYTES])
    if len(raw) < FRAME_BYTES:
        return None
    magic, version, codec, width, zero, raw_bytes, body_bytes, checksum = _FIELDS.unpack_from(raw)
    if magic != _MAGIC or version != _VERSION or zero:
        return None
    if xxhash.xxh3_64_intdigest(raw[: _FIELDS.size]) != _CHECKSUM.unpack_from(raw, _FIELDS.size)[0]:
        return None
    if codec not in _CODECS or width not in _WIDTHS or not body_bytes <= raw_bytes <= MAX_RAW_BYTES:
        return None
    if codec == Codec.RAW and body_bytes != raw_bytes:
        return None
    return FrameHeader(Codec(codec), width, raw_bytes, body_bytes, checksum)


def unpack_body(header: FrameHeader, body: Bytes, into: memoryview) -> bool:
    """Restore the block into the start of `into`. False, and nothing of use in it: not whole, or too big."""
    packed = memoryview(body)
    if len(packed) != header.body_bytes or header.raw_bytes > len(into):
        return False
    if header.codec is Codec.RAW:
        into[: header.raw_bytes] = packed
        return True
    if xxhash.xxh3_64_intdigest(packed) != header.checksum:
        return False
    try:
        # zstd allocates what its own header promises, so that is compared first.
        if zstandard.frame_content_size(packed) != header.raw_bytes:
            return False
        shuffled = _decompressor().decompress(packed, allow_extra_data=False)
    except zstandard.ZstdError:
        return False
    _unshuffle(shuffled, header.width, into[: header.raw_bytes])
    return True


def _bounded(block: Buffer) -> memoryview:
    body = flat_bytes(block)
    if len(body) > MAX_RAW_BYTES:
        raise ValueError(f"a frame holds at most {MAX_RAW_BYTES} bytes, not {len(body)}")
    return body


def _encode(header: FrameHeader) -> bytes:
    fields = _FIELDS.pack(
        _MAGIC,
        _VERSION,
        header.codec,
        header.width,
        0,
        header.raw_bytes,
        header.body_bytes,
        header.checksum,
    )
    return fields + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))


def _shuffled(body: memoryview, width: int) -> np.ndarray:
    """Plane by plane; a remainder shorter than an element stays at the end."""
    source = np.frombuffer(body, dtype=np.uint8)
    whole = len(source) // width * width
    planes = np.empty(len(source), dtype=np.uint8)
    planes[:whole].reshape(width, -1)[:] = source[:whole].reshape(-1, width).T
    planes[whole:] = source[whole:]
    return planes


def _unshuffle(planes: bytes, width: int, into: memoryview) -> None:
    source = np.frombuffer(planes, dtype=np.uint8)
    target = np.frombuffer(into, dtype=np.uint8)
    whole = len(source) // width * width
    target[:whole].reshape(-1, width)[:] = source[:whole].reshape(width, -1).T
    target[whole:] = source[whole:]


class _Contexts(threading.local):
    """zstd contexts cost more than small blocks, and serve one thread at a time."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL)
        self.decompressor = zstandard.ZstdDecompressor()


_contexts = _Contexts()


def _compressor() -> zstandard.ZstdCompressor:
    return _contexts.compressor


def _decompressor() -> zstandard.ZstdDecompressor:
    return _contexts.decompressor
