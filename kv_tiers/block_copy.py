"""Blocks between buffers and tensors, with their checksums: in C++ where it can be built, in Python elsewhere.

Both do the same: bytes are copied first, and it is the copy that is verified, so that a slot which is overwritten
during the read cannot slip through; tensors only ever receive verified bytes. `chosen` is the one place that says who
does it in this process, and agrees with `kernels.ops`.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import sys
from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias, overload

import numpy as np
import torch
import xxhash

from kernels import blocks, ops
from kernels.blocks import BlockForm, Found

Buffer: TypeAlias = memoryview | bytearray | np.ndarray
"""Flat writable bytes: a slab view, a bytearray or a uint8 array."""

# Staging per step of a run: small enough to stay in a core's cache between copying, checking and scattering.
_SCRATCH_BYTES = 512 * 1024


class LayerPlace(NamedTuple):
    """A layer of a block: number, and where it lies, in bytes from the start: heads × (K [tokens, dim], V likewise)."""

    layer: int
    offset: int
    nbytes: int
    heads: int
    tokens: int
    dim: int


class BlockViews(Sequence[memoryview]):
    """The bytes of blocks, and where they lie: found once, though a run is read layer by layer."""

    def __init__(self, bufs: Sequence[Buffer]) -> None:
        self._views: Sequence[memoryview] = [flat_bytes(buf) for buf in bufs]
        self.addresses = _addresses([address_of(view) for view in self._views])

    @classmethod
    def within(cls, memory: memoryview, offsets: Sequence[int], nbytes: int) -> BlockViews:
        """Blocks of one size at offsets of one memory, for a fraction of the price."""
        start = address_of(memory)
        made = cls._of(_Slots(memory, offsets, nbytes), [start + offset for offset in offsets])
        made.sizes = (ctypes.c_int64 * len(offsets))(*[nbytes] * len(offsets))
        return made

    @classmethod
    def _of(cls, views: Sequence[memoryview], addresses: Sequence[int]) -> BlockViews:
        made = object.__new__(cls)
        made._views = views
        made.addresses = _addresses(addresses)
        return made

    @functools.cached_property
    def sizes(self) -> blocks.Sizes:
        """Bytes of each."""
        return (ctypes.c_int64 * len(self))(*map(len, self._views))

    @functools.cached_property
    def shortest(self) -> int:
        """Bytes of the shortest of them."""
        return min(map(len, self._views), default=0)

    def __len__(self) -> int:
        return len(self._views)

    @overload
    def __getitem__(self, index: int) -> memoryview: ...
    @overload
    def __getitem__(self, index: slice) -> BlockViews: ...
    def __getitem__(self, index: int | slice) -> memoryview | BlockViews:
        if isinstance(index, int):
            return self._views[index]
        start, stop, step = index.indices(len(self))
        return self if (start, stop, step) == (0, len(self), 1) else self.pick(range(start, stop, step))

    def pick(self, indexes: Sequence[int]) -> BlockViews:
        """Those, in that order."""
        if len(indexes) == len(self) and all(map(operator.eq, indexes, range(len(self)))):
            return self
        views = [self._views[index] for index in indexes]
        return self._of(views, [self.addresses[index] for index in indexes])


class _Slots(Sequence[memoryview]):
    """Views of one size, made when they are looked at."""

    def __init__(self, memory: memoryview, offsets: Sequence[int], nbytes: int) -> None:
        assert not offsets or 0 <= min(offsets) <= max(offsets) + nbytes <= len(memory)
        self._memory, self._offsets, self._nbytes = memory, offsets, nbytes

    def __len__(self) -> int:
        return len(self._offsets)

    @overload
    def __getitem__(self, index: int) -> memoryview: ...
    @overload
    def __getitem__(self, index: slice) -> _Slots: ...
    def __getitem__(self, index: int | slice) -> memoryview | _Slots:
        if isinstance(index, slice):
            return _Slots(self._memory, self._offsets[index], self._nbytes)
        return self._memory[self._offsets[index] : self._offsets[index] + self._nbytes]


class BlockCopy(Protocol):
    """Copying with checksums: xxh3-64 of each layer, [blocks, layers] in one piece, as headers have them (u64)."""

    name: str

    def copy(self, sources: BlockViews, targets: BlockViews) -> None:
        """Copy buffers of one size as they are, without keeping other threads from running."""
        ...

    def check(self, sources: BlockViews, targets: BlockViews | None, form: BlockForm, keys: bytes) -> bytes:
        """Of each block what was `Found`; its key is 32 of the bytes of `keys`.

        With targets, of the same sizes, the blocks are copied there, and it is the copies that are checked; of one that
        is not whole, some bytes or none.
        """
        ...

    def read_run(
        self, bufs: BlockViews, place: LayerPlace, checksums: bytes, k: torch.Tensor, v: torch.Tensor
    ) -> int:
        """Copy a layer of n blocks into k, v [Hk, n * T, D] up to the first that has not its checksum.

        → Blocks copied; what lies behind them in k and v is untouched.
        """
        ...

    def write_run(
        self, bufs: BlockViews, place: LayerPlace, checksums: bytearray, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Pack k, v [Hk, n * T, D] into a layer of n blocks; its `checksums` become those of the bytes we made, not of
        what the slab then holds.
        """
        ...


class PythonCopy:
    """Several passes over memory, with torch and xxhash."""

    name = "python"

    def copy(self, sources: BlockViews, targets: BlockViews) -> None:
        for source, target in zip(sources, targets, strict=True):
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))

    def check(self, sources: BlockViews, targets: BlockViews | None, form: BlockForm, keys: bytes) -> bytes:
        into: Sequence[memoryview | None] = [None] * len(sources) if targets is None else targets
        return bytes(
            self._check_block(source, target, form, _digest(keys, index))
            for index, (source, target) in enumerate(zip(sources, into, strict=True))
        )

    def _check_block(
        self, source: memoryview, target: memoryview | None, form: BlockForm, key: bytes
    ) -> Found:
        raw = bytes(source[: form.header_bytes])
        found = _look_at_header(raw, len(source), form, key)
        if found is not Found.GOOD:
            return found
        if target is None:
            return self._check_parts(raw, source, form.parts, form.sums)
        rest = slice(form.header_bytes, None)
        np.copyto(np.frombuffer(target[rest], np.uint8), np.frombuffer(source[rest], np.uint8))
        found = self._check_parts(raw, target, form.parts, form.sums)
        if found is Found.GOOD:
            target[: form.header_bytes] = raw
        return found

    def _check_parts(self, header: bytes, block: memoryview, parts: blocks.Parts, sums: int) -> Found:
        wanted = np.frombuffer(header, "<u8", len(parts.offsets), sums).tolist()
        digests = (
            xxhash.xxh3_64_intdigest(block[start : start + size])
            for start, size in zip(parts.offsets, parts.sizes, strict=True)
        )
        same = all(digest == expected for digest, expected in zip(digests, wanted, strict=True))
        return Found.GOOD if same else Found.BAD

    def read_run(
        self, bufs: BlockViews, place: LayerPlace, checksums: bytes, k: torch.Tensor, v: torch.Tensor
    ) -> int:
        wanted = _numbers(checksums, len(bufs))[:, place.layer].tolist()
        step = max(1, min(len(bufs), _SCRATCH_BYTES // place.nbytes))
        scratch, rows = _scratch(step, place.nbytes)
        for start in range(0, len(bufs), step):
            count = min(step, len(bufs) - start)
            good = 0
            while good < count:
                rows[good][:] = bufs[start + good][place.offset : place.offset + place.nbytes]
                if xxhash.xxh3_64_intdigest(rows[good]) != wanted[start + good]:
                    break
                good += 1
            if good:
                packed = _as_rows(scratch[:good], place, k.dtype)
                _span(k, place, start, good).copy_(packed[:, :, 0].transpose(0, 1))
                _span(v, place, start, good).copy_(packed[:, :, 1].transpose(0, 1))
            if good < count:
                return start + good
        return len(bufs)

    def write_run(
        self, bufs: BlockViews, place: LayerPlace, checksums: bytearray, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        found = _numbers(checksums, len(bufs))
        step = max(1, min(len(bufs), _SCRATCH_BYTES // place.nbytes))
        scratch, rows = _scratch(step, place.nbytes)
        for start in range(0, len(bufs), step):
            count = min(step, len(bufs) - start)
            packed = _as_rows(scratch[:count], place, k.dtype)
            packed[:, :, 0].copy_(_span(k, place, start, count).transpose(0, 1))
            packed[:, :, 1].copy_(_span(v, place, start, count).transpose(0, 1))
            for index in range(count):
                bufs[start + index][place.offset : place.offset + place.nbytes] = rows[index]
                found[start + index, place.layer] = xxhash.xxh3_64_intdigest(rows[index])


class NativeCopy:
    """One pass over memory, without the GIL. Tensors that are not rows in this machine's memory take the other way."""

    name = "native"

    def __init__(self, native: blocks.NativeBlocks) -> None:
        self._native = native
        self._python = PythonCopy()

    def copy(self, sources: BlockViews, targets: BlockViews) -> None:
        sizes = {len(view) for views in (sources, targets) for view in views}
        assert len(sizes) <= 1, f"buffers of {sorted(sizes)} bytes"
        self._native.copy(sources.addresses, targets.addresses, sources.shortest)

    def check(self, sources: BlockViews, targets: BlockViews | None, form: BlockForm, keys: bytes) -> bytes:
        into = None if targets is None else targets.addresses
        return self._native.check(sources.addresses, into, sources.sizes, form, keys)

    def read_run(
        self, bufs: BlockViews, place: LayerPlace, checksums: bytes, k: torch.Tensor, v: torch.Tensor
    ) -> int:
        if not (_rows_in_memory(k) and _rows_in_memory(v)):
            return self._python.read_run(bufs, place, checksums, k, v)
        layer = _layer_at(place, k)
        return self._native.read_run(bufs.addresses, layer, checksums, _rows_at(k), _rows_at(v))

    def write_run(
        self, bufs: BlockViews, place: LayerPlace, checksums: bytearray, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        if not (_rows_in_memory(k) and _rows_in_memory(v)):
            return self._python.write_run(bufs, place, checksums, k, v)
        layer = _layer_at(place, k)
        return self._native.write_run(bufs.addresses, layer, checksums, _rows_at(k), _rows_at(v))


@functools.cache
def chosen() -> BlockCopy:
    """Who copies blocks in this process. The first call may build (a few seconds)."""
    if sys.byteorder == "little" and ops.implementation() == "native":
        return NativeCopy(blocks.load())
    return PythonCopy()


def check_rows(rows: torch.Tensor, place: LayerPlace, dtype: torch.dtype, blocks: int) -> None:
    """AssertionError: not the K or V [Hk, blocks * T, D] of that layer."""
    expected = (place.heads, blocks * place.tokens, place.dim)
    assert rows.shape == expected, f"{tuple(rows.shape)}, expected {expected}"
    assert rows.dtype == dtype, f"{rows.dtype}, expected {dtype}"


def flat_bytes(buf: Buffer) -> memoryview:
    """The buffer's bytes, not copied."""
    return memoryview(buf.data if isinstance(buf, np.ndarray) else buf).cast("B")


def address_of(view: memoryview) -> int:
    """Where a buffer's bytes lie; it must be kept."""
    if view.readonly or not len(view):
        return int(np.frombuffer(view, np.uint8).ctypes.data) if len(view) else 0
    return ctypes.addressof(ctypes.c_char.from_buffer(view))  # several times faster than numpy


def _digest(keys: bytes, index: int) -> bytes:
    return keys[index * blocks.DIGEST_BYTES : (index + 1) * blocks.DIGEST_BYTES]


def _look_at_header(raw: bytes, nbytes: int, form: BlockForm, key: bytes) -> Found:
    """GOOD: the header of the block of that key, in a buffer of `nbytes`."""
    same = raw[: form.front] == form.like[: form.front]
    if nbytes < form.nbytes or not same or raw[form.table : form.sums] != form.like[form.table : form.sums]:
        return Found.OTHER_FORM
    sealed = xxhash.xxh3_64_intdigest(raw[:-8]) == int.from_bytes(raw[-8:], "little")
    named = raw[form.table - len(key) : form.table] == key
    return Found.GOOD if sealed and named else Found.BAD


def _addresses(found: Sequence[int]) -> blocks.Addresses:
    return (ctypes.c_uint64 * len(found))(*found)


def _numbers(checksums: bytes | bytearray, count: int) -> np.ndarray:
    """Checksums as u64[blocks, layers], the same memory."""
    return np.frombuffer(checksums, "<u8").reshape(count, -1)


def _rows_in_memory(rows: torch.Tensor) -> bool:
    return rows.device.type == "cpu" and (rows.stride(2) == 1 or rows.shape[2] == 1)


def _rows_at(rows: torch.Tensor) -> blocks.RowsAt:
    head, token, _ = rows.stride()
    return blocks.RowsAt(rows.data_ptr(), head * rows.itemsize, token * rows.itemsize)


def _layer_at(place: LayerPlace, rows: torch.Tensor) -> blocks.LayerAt:
    return blocks.LayerAt(place.layer, place.offset, place.heads, place.tokens, place.dim * rows.itemsize)


def _scratch(rows: int, size: int) -> tuple[torch.Tensor, list[memoryview]]:
    scratch = torch.empty((rows, size), dtype=torch.uint8)
    return scratch, [memoryview(row) for row in scratch.numpy()]


def _as_rows(scratch: torch.Tensor, place: LayerPlace, dtype: torch.dtype) -> torch.Tensor:
    """Packed layers as [n, Hk, 2, T, D]."""
    return scratch.view(dtype).view(len(scratch), place.heads, 2, place.tokens, place.dim)


def _span(rows: torch.Tensor, place: LayerPlace, start: int, count: int) -> torch.Tensor:
    """The rows of blocks start .. start + count as [Hk, n, T, D]."""
    span = rows[:, start * place.tokens : (start + count) * place.tokens]
    return span.view(place.heads, count, place.tokens, place.dim)
