"""Named arrays inside a snapshot: what a decode rule carries from prefill to decode and from move to move.

A directory (count, then name, dtype, shape of each, by name) and the values behind it, each from a 64-byte boundary,
little endian. A reader trusts nothing: names, dtypes and shapes are checked against the bytes that are there.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping

import torch
from torch import Tensor

_DTYPES = {0: torch.float32, 1: torch.int32, 2: torch.uint8, 3: torch.bfloat16}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_NAME = re.compile("[a-z_]{1,16}")
_MAX_DIMS = 6
_MAX_ARRAYS = 64
_COUNT = struct.Struct("<Q")
# name, dtype, number of dimensions, sizes
_ENTRY = struct.Struct(f"<16sBB6x{_MAX_DIMS}Q")
_ALIGN = 64


class ArraysError(ValueError):
    """The bytes are no arrays of ours."""


def arrays_bytes(arrays: Mapping[str, Tensor]) -> int:
    """Bytes that `write_arrays` fills; none for no arrays."""
    return _offsets(arrays)[1] if arrays else 0


def write_arrays(arrays: Mapping[str, Tensor], buffer: Tensor) -> None:
    """Fill `buffer` (uint8 [arrays_bytes(arrays)], 64-byte aligned). AssertionError for what cannot be carried."""
    if not arrays:
        return
    offsets, end = _offsets(arrays)
    assert buffer.numel() == end
    assert len(arrays) <= _MAX_ARRAYS, "more arrays than a snapshot carries"
    buffer.zero_()
    raw = [_COUNT.pack(len(arrays))]
    for name, offset in offsets.items():
        array = arrays[name]
        assert _NAME.fullmatch(name) and array.dtype in _CODES and array.dim() <= _MAX_DIMS, (
            f"array {name!r}: {array.dtype} {tuple(array.shape)} cannot be carried"
        )
        sizes = [*array.shape, *[0] * (_MAX_DIMS - array.dim())]
        raw.append(_ENTRY.pack(name.encode(), _CODES[array.dtype], array.dim(), *sizes))
        place = buffer[offset : offset + array.nbytes].view(array.dtype)
        place.copy_(array.detach().reshape(-1))
    head = b"".join(raw)
    buffer[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)


def read_arrays(buffer: Tensor) -> dict[str, Tensor]:
    """Copies of the arrays that `write_arrays` put into `buffer` (uint8 [n]); raises `ArraysError`."""
    if not buffer.numel():
        return {}
    if buffer.numel() < _COUNT.size:
        raise ArraysError("snapshot arrays are cut short")
    (count,) = _COUNT.unpack(buffer[: _COUNT.size].numpy().tobytes())
    if not 0 < count <= _MAX_ARRAYS or _COUNT.size + count * _ENTRY.size > buffer.numel():
        raise ArraysError("snapshot arrays are cut short")
    directory = buffer[_COUNT.size : _COUNT.size + count * _ENTRY.size].numpy().tobytes()
    at = _aligned(_COUNT.size + len(directory))
    found: dict[str, Tensor] = {}
    for raw, code, dims, *sizes in _ENTRY.iter_unpack(directory):
        name = raw.rstrip(b"\0").decode("ascii", "replace")
        if not _NAME.fullmatch(name) or code not in _DTYPES or dims > _MAX_DIMS or any(sizes[dims:]):
            raise ArraysError("snapshot array of an unknown kind")
        if found and name <= next(reversed(found)):
            raise ArraysError("snapshot arrays are not in order of their names")
        shape, dtype = sizes[:dims], _DTYPES[code]
        # Each factor by itself too: a huge dimension beside an empty one is no shape.
        if max(shape, default=0) > buffer.numel() or at + math.prod(shape) * dtype.itemsize > buffer.numel():
            raise ArraysError("snapshot arrays are cut short")
        stop = at + math.prod(shape) * dtype.itemsize
        found[name] = buffer[at:stop].clone().view(dtype).view(shape)
        at = _aligned(stop)
    if at != _aligned(buffer.numel()):
        raise ArraysError("snapshot arrays do not fill their place")
    return found


def _offsets(arrays: Mapping[str, Tensor]) -> tuple[dict[str, int], int]:
    """Where the values of each array begin, by ascending name, and where the last one ends."""
    at = end = _COUNT.size + len(arrays) * _ENTRY.size
    offsets = {}
    for name in sorted(arrays):
        at = _aligned(end)
        offsets[name] = at
        end = at + arrays[name].nbytes
    return offsets, end


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
