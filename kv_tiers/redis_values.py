"""How a block lies in Redis: names of its values, their sizes, and what they cost there.

A block is one frame (`kv_tiers/packing.py`). Up to `VALUE_BYTES` of it are the value of `kvtide:b1:<hex of the key>`;
what is longer follows in parts `{kvtide:b1:<hex>}:1`, `:2` ... (the braces put them on the same node of a cluster). A
full part lies just under an allocator class: at exactly a power of two a fifth would be wasted. Parts are written
first, with a short time to live of their own, and the value that names the block last: half a block is a miss, and
what a dying writer leaves goes by itself.
"""

from __future__ import annotations

import re

from kv_tiers.keys import BlockKey
from kv_tiers.packing import FRAME_BYTES

PREFIX = "kvtide:b1:"
PATTERN = f"*{PREFIX}*"
VALUE_BYTES = (1 << 20) - 64
"""The longest value: 1 MiB with room for the server's string header."""

UNCOMMITTED_S = 60
"""How long parts live whose block was never completed."""

KEY_BYTES = 256
"""What a key costs beside its value: entry, name, object, both hash tables' buckets, an expiry; rounded up."""

_STRING_BYTES = 12  # string header, final zero, and the line end that is received with a large value
_SMALLEST_CLASS = 16
_NAME = re.compile(rb"kvtide:b1:([0-9a-f]{64})\Z")
_PART_NAME = re.compile(rb"\{kvtide:b1:([0-9a-f]{64})\}:([1-9][0-9]{0,4})\Z")


def value_name(key: BlockKey) -> bytes:
    """Name of the value that stands for the block."""
    return f"{PREFIX}{key.digest.hex()}".encode()


def part_name(key: BlockKey, part: int) -> bytes:
    """Name of a further part, from 1."""
    return f"{{{PREFIX}{key.digest.hex()}}}:{part}".encode()


def part_names(key: BlockKey, frame_bytes: int) -> list[bytes]:
    """Names of the further parts of a frame of that length."""
    return [part_name(key, part) for part in range(1, parts_of(frame_bytes))]


def read_name(name: bytes) -> tuple[BlockKey, int] | None:
    """Whose value this is and which part of it (0: the first); None for a key that is not ours."""
    if match := _NAME.match(name):
        return BlockKey(bytes.fromhex(match[1].decode())), 0
    if match := _PART_NAME.match(name):
        return BlockKey(bytes.fromhex(match[1].decode())), int(match[2])
    return None


def parts_of(frame_bytes: int) -> int:
    """How many values hold a frame."""
    return max(1, -(-frame_bytes // VALUE_BYTES))


def charge_of(frame_bytes: int) -> int:
    """Bytes of Redis memory that a frame takes, metadata included."""
    full, rest = divmod(frame_bytes, VALUE_BYTES)
    charge = full * (allocator_class(VALUE_BYTES + _STRING_BYTES) + KEY_BYTES)
    return charge + (allocator_class(rest + _STRING_BYTES) + KEY_BYTES if rest else 0)


def allocator_class(nbytes: int) -> int:
    """What jemalloc gives for a request: four sizes per doubling."""
    if nbytes <= _SMALLEST_CLASS:
        return _SMALLEST_CLASS
    step = max(_SMALLEST_CLASS, 1 << ((nbytes - 1).bit_length() - 3))
    return -(-nbytes // step) * step


def largest_frame(slot_bytes: int) -> int:
    """Of a block that fills its slot; packing only makes it smaller."""
    return FRAME_BYTES + slot_bytes
