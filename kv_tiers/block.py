"""One block as bytes: the only layout of full prompt KV at rest and on the wire. FINAL (format version 1).

    header | layer 0 | layer 1 | ... | zero padding to a multiple of 64 bytes
    layer  = kv head 0 | kv head 1 | ...
    head   = K[T, D] | V[T, D], elements little-endian, no padding between

Layers come first and heads inside them, so a layer, or a range of heads of a layer, is one contiguous read.
The header describes the block completely (layer table, head range, dtype) and carries the xxh3-64 of every
layer, so a load can be verified layer by layer; the header's own xxh3-64 stands in its last eight bytes.

Header, little-endian: magic 8s, version u16, dtype u8, codec u8 (0: as computed), header bytes u32, payload
bytes u64, block tokens u32, layers u32, fingerprint 32s, key 32s; then per layer first head, kv heads, head
dim (u32 each); then per layer the checksum (u64); zeros up to a multiple of 64 less 8; checksum of all that
(u64).

A reader copies first and verifies the copy: a slot that is overwritten during the read cannot slip through,
and the caller's tensors only ever receive verified bytes.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate
from typing import TypeAlias

import numpy as np
import torch
import xxhash

from kv_tiers.keys import BlockKey, Fingerprint

MAGIC = b"kvtideBK"
FORMAT_VERSION = 1
ALIGN = 64

_PREFIX = struct.Struct("<8sHBBIQII32s32s")
_TABLE_ROW = struct.Struct("<3I")
_CODEC_AS_COMPUTED = 0
_DTYPE_CODES = {torch.float16: 1, torch.bfloat16: 2, torch.float32: 3}
_DTYPES = {code: dtype for dtype, code in _DTYPE_CODES.items()}
_MAX_LAYERS = 4096
_MAX_DIMENSION = 1 << 20
_CHECKSUM_BYTES = 8
# Staging per step of a run: small enough to stay in a core's cache between copying, checking and scattering.
_SCRATCH_BYTES = 512 * 1024

Buffer: TypeAlias = memoryview | bytearray | np.ndarray
"""Flat writable bytes: a slab view, a bytearray or a uint8 array."""


class BlockFault(Enum):
    """Why bytes are not the block that was asked for. Each is a miss, never an error."""

    NOT_A_BLOCK = "no block starts here"
    VERSION = "another format version"
    CORRUPT = "the header does not match its checksum, or its fields contradict each other"
    FINGERPRINT = "written for another model, dtype, layout, RoPE regime or adapter"
    KEY = "another block"
    LAYOUT = "another dtype, block size or layer table"
    HEAD_RANGE = "other kv heads of the same layers"


@dataclass(frozen=True)
class BlockLayout:
    """Sizes and offsets (bytes from the block's start) of a block.

    `layers[l]` is (kv heads in this block, head dim); `first_heads[l]` the first of them in the model's own
    numbering (empty: all zero), so that a tensor-parallel rank's blocks say which heads they hold. ValueError
    for impossible sizes.
    """

    layers: tuple[tuple[int, int], ...]
    dtype: torch.dtype
    block_tokens: int = 16
    first_heads: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPE_CODES:
            raise ValueError(f"blocks hold {', '.join(map(str, _DTYPE_CODES))}, not {self.dtype}")
        if not 1 <= len(self.layers) <= _MAX_LAYERS:
            raise ValueError(f"a block has 1 to {_MAX_LAYERS} layers, not {len(self.layers)}")
        sizes = [self.block_tokens, *(size for layer in self.layers for size in layer)]
        if not all(1 <= size <= _MAX_DIMENSION for size in sizes):
            raise ValueError(f"tokens, kv heads and head dim lie in 1..{_MAX_DIMENSION}: {sizes}")
        if not self.first_heads:
            object.__setattr__(self, "first_heads", (0,) * len(self.layers))
        if len(self.first_heads) != len(self.layers):
            raise ValueError(f"{len(self.first_heads)} first heads for {len(self.layers)} layers")
        if not all(0 <= head <= _MAX_DIMENSION for head in self.first_heads):
            raise ValueError(f"first heads lie in 0..{_MAX_DIMENSION}: {self.first_heads}")

    @functools.cached_property
    def header_bytes(self) -> int:
        """Where the payload starts; a multiple of 64."""
        return _header_bytes(len(self.layers))

    @functools.cached_property
    def payload_bytes(self) -> int:
        """All layers, without header and padding."""
        return sum(self.layer_bytes(layer) for layer in range(len(self.layers)))

    @functools.cached_property
    def nbytes(self) -> int:
        """Header, payload and padding: the size of a slot; a multiple of 64."""
        return _round_up(self.header_bytes + self.payload_bytes)

    @functools.cached_property
    def layout_id(self) -> str:
        """Readable name of everything here that changes bytes; the `layout` of a `Fingerprint`."""
        runs: list[list[int]] = []  # [count, kv heads, head dim, first head]
        for (heads, dim), first in zip(self.layers, self.first_heads, strict=True):
            if runs and runs[-1][1:] == [heads, dim, first]:
                runs[-1][0] += 1
            else:
                runs.append([1, heads, dim, first])
        table = ",".join(f"{count}*{heads}x{dim}+{first}" for count, heads, dim, first in runs)
        dtype = str(self.dtype).removeprefix("torch.")
        return f"kvblock{FORMAT_VERSION}:{dtype}:t{self.block_tokens}:{table}"

    def layer_bytes(self, layer: int) -> int:
        """Bytes of one layer: K and V of all its heads."""
        return self.layers[layer][0] * self._head_bytes(layer)

    def layer_offset(self, layer: int) -> int:
        """Where a layer starts."""
        return self._layer_offsets[layer]

    def head_offset(self, layer: int, head: int) -> int:
        """Where head `head` (counted within this block) of a layer starts: K[T, D], then V[T, D]."""
        assert 0 <= head < self.layers[layer][0]
        return self._layer_offsets[layer] + head * self._head_bytes(layer)

    @functools.cached_property
    def _layer_offsets(self) -> tuple[int, ...]:
        sizes = (self.layer_bytes(layer) for layer in range(len(self.layers) - 1))
        return tuple(accumulate(sizes, initial=self.header_bytes))

    def _head_bytes(self, layer: int) -> int:
        return 2 * self.block_tokens * self.layers[layer][1] * self.dtype.itemsize

    def _layer_shape(self, layer: int) -> tuple[int, int, int, int]:
        heads, dim = self.layers[layer]
        return (heads, 2, self.block_tokens, dim)


@dataclass(frozen=True)
class BlockHeader:
    """A verified private copy of a block's header. `checksums[l]` is the xxh3-64 of layer l's bytes."""

    fingerprint: Fingerprint
    key: BlockKey
    layout: BlockLayout
    checksums: tuple[int, ...]


def write_block(
    buf: Buffer,
    layout: BlockLayout,
    fingerprint: Fingerprint,
    key: BlockKey,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
) -> None:
    """Fill `buf` (`layout.nbytes` long) from `keys[l]`, `values[l]` [Hk, T, D]."""
    write_run([buf], layout, fingerprint, [key], keys, values)


def write_run(
    bufs: Sequence[Buffer],
    layout: BlockLayout,
    fingerprint: Fingerprint,
    block_keys: Sequence[BlockKey],
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
) -> None:
    """Write n consecutive blocks; `keys[l]` and `values[l]` are [Hk, n * T, D], any strides.

    Old headers are voided first and new ones written last: a write that dies half-way leaves no block.
    """
    assert len(bufs) == len(block_keys) and len(keys) == len(values) == len(layout.layers)
    targets = [_flat(buf, layout) for buf in bufs]
    for target in targets:
        target[: len(MAGIC)] = bytes(len(MAGIC))
    checksums: list[list[int]] = [[] for _ in targets]
    for layer in range(len(layout.layers)):
        _write_layer(targets, layout, layer, keys[layer], values[layer], checksums)
    padding = bytes(layout.nbytes - layout.header_bytes - layout.payload_bytes)
    for target, key, sums in zip(targets, block_keys, checksums, strict=True):
        target[layout.nbytes - len(padding) :] = padding
        header = _encode_header(layout, fingerprint, key, sums)
        # The magic goes last, so that a reader who sees it sees the rest.
        target[len(MAGIC) : layout.header_bytes] = header[len(MAGIC) :]
        target[: len(MAGIC)] = MAGIC


def read_header(buf: Buffer) -> BlockHeader | BlockFault:
    """Decode a header that may be anything at all; only lengths that fit `buf` are followed."""
    view = flat_bytes(buf)
    if len(view) < _PREFIX.size or view[: len(MAGIC)] != MAGIC:
        return BlockFault.NOT_A_BLOCK
    _, version, dtype, codec, header_bytes, payload, tokens, layers, _, _ = _PREFIX.unpack_from(view)
    if version != FORMAT_VERSION:
        return BlockFault.VERSION
    if layers > _MAX_LAYERS or header_bytes > len(view) or header_bytes != _header_bytes(layers):
        return BlockFault.CORRUPT
    raw = bytes(view[:header_bytes])  # from here on only this copy: the slot may change under us
    if xxhash.xxh3_64_intdigest(raw[:-_CHECKSUM_BYTES]) != int.from_bytes(raw[-_CHECKSUM_BYTES:], "little"):
        return BlockFault.CORRUPT
    # Verified, so the fields are unpacked again from the copy.
    magic, version, dtype, codec, size, payload, tokens, layers, digest, own = _PREFIX.unpack_from(raw)
    if magic != MAGIC or version != FORMAT_VERSION or size != header_bytes or codec != _CODEC_AS_COMPUTED:
        return BlockFault.CORRUPT
    table_end = _PREFIX.size + _TABLE_ROW.size * layers
    layout = _decode_layout(dtype, tokens, raw[_PREFIX.size : table_end])
    if isinstance(layout, BlockFault):
        return layout
    if layout.payload_bytes != payload or layout.nbytes > len(view):
        return BlockFault.CORRUPT
    checksums = struct.unpack_from(f"<{layers}Q", raw, table_end)
    return BlockHeader(Fingerprint(digest), BlockKey(own), layout, checksums)


def open_block(
    buf: Buffer, layout: BlockLayout, fingerprint: Fingerprint, key: BlockKey
) -> BlockHeader | BlockFault:
    """The header, if `buf` holds exactly this block; otherwise why not. No payload byte is read."""
    header = read_header(buf)
    if isinstance(header, BlockFault):
        return header
    if header.fingerprint != fingerprint:
        return BlockFault.FINGERPRINT
    if header.key != key:
        return BlockFault.KEY
    if header.layout == layout:
        # The caller's own object, so that comparing again for every layer is an identity check.
        return replace(header, layout=layout)
    found = header.layout
    same_heads = found.first_heads == layout.first_heads and (
        [heads for heads, _ in found.layers] == [heads for heads, _ in layout.layers]
    )
    return BlockFault.LAYOUT if same_heads else BlockFault.HEAD_RANGE


def read_layer(
    buf: Buffer,
    layout: BlockLayout,
    header: BlockHeader,
    layer: int,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
) -> bool:
    """Copy one layer into `k_out`, `v_out` [Hk, T, D]. False: checksum mismatch, and nothing copied."""
    return read_layer_run([buf], layout, [header], layer, k_out, v_out) == 1


def read_layer_run(
    bufs: Sequence[Buffer],
    layout: BlockLayout,
    headers: Sequence[BlockHeader],
    layer: int,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
) -> int:
    """Copy one layer of n consecutive blocks into `k_out` and `v_out` [Hk, n * T, D] (any strides).

    Returns how many leading blocks were verified and copied; what lies behind them in the outputs is
    untouched.
    """
    assert len(bufs) == len(headers)
    _check_rows(k_out, layout, layer, len(bufs))
    _check_rows(v_out, layout, layer, len(bufs))
    tokens, offset, size = layout.block_tokens, layout.layer_offset(layer), layout.layer_bytes(layer)
    heads, dim = layout.layers[layer]
    step = max(1, min(len(bufs), _SCRATCH_BYTES // size))
    scratch, rows = _scratch(step, size)
    for start in range(0, len(bufs), step):
        count = min(step, len(bufs) - start)
        good = 0
        while good < count and headers[start + good].layout == layout:
            row = rows[good]
            row[:] = flat_bytes(bufs[start + good])[offset : offset + size]
            if xxhash.xxh3_64_intdigest(row) != headers[start + good].checksums[layer]:
                break
            good += 1
        if good:
            packed = scratch[:good].view(layout.dtype).view(good, *layout._layer_shape(layer))
            span = slice(start * tokens, (start + good) * tokens)
            k_out[:, span].view(heads, good, tokens, dim).copy_(packed[:, :, 0].transpose(0, 1))
            v_out[:, span].view(heads, good, tokens, dim).copy_(packed[:, :, 1].transpose(0, 1))
        if good < count:
            return start + good
    return len(bufs)


def _write_layer(
    targets: Sequence[memoryview],
    layout: BlockLayout,
    layer: int,
    k: torch.Tensor,
    v: torch.Tensor,
    checksums: list[list[int]],
) -> None:
    """Pack one layer of all targets. Checksums are of the bytes we made, not of what the slab then holds."""
    _check_rows(k, layout, layer, len(targets))
    _check_rows(v, layout, layer, len(targets))
    tokens, offset, size = layout.block_tokens, layout.layer_offset(layer), layout.layer_bytes(layer)
    heads, dim = layout.layers[layer]
    step = max(1, min(len(targets), _SCRATCH_BYTES // size))
    scratch, rows = _scratch(step, size)
    for start in range(0, len(targets), step):
        count = min(step, len(targets) - start)
        packed = scratch[:count].view(layout.dtype).view(count, *layout._layer_shape(layer))
        span = slice(start * tokens, (start + count) * tokens)
        packed[:, :, 0].copy_(k[:, span].view(heads, count, tokens, dim).transpose(0, 1))
        packed[:, :, 1].copy_(v[:, span].view(heads, count, tokens, dim).transpose(0, 1))
        for index in range(count):
            targets[start + index][offset : offset + size] = rows[index]
            checksums[start + index].append(xxhash.xxh3_64_intdigest(rows[index]))


def _scratch(rows: int, size: int) -> tuple[torch.Tensor, list[memoryview]]:
    scratch = torch.empty((rows, size), dtype=torch.uint8)
    return scratch, [memoryview(row) for row in scratch.numpy()]


def _check_rows(rows: torch.Tensor, layout: BlockLayout, layer: int, blocks: int) -> None:
    heads, dim = layout.layers[layer]
    expected = (heads, blocks * layout.block_tokens, dim)
    assert rows.shape == expected, f"layer {layer}: {tuple(rows.shape)}, expected {expected}"
    assert rows.dtype == layout.dtype, f"layer {layer}: {rows.dtype}, expected {layout.dtype}"


def flat_bytes(buf: Buffer) -> memoryview:
    """The buffer's bytes, not copied."""
    return memoryview(buf.data if isinstance(buf, np.ndarray) else buf).cast("B")


def _flat(buf: Buffer, layout: BlockLayout) -> memoryview:
    view = flat_bytes(buf)
    assert len(view) == layout.nbytes, f"slot of {len(view)} bytes for blocks of {layout.nbytes}"
    return view


def _encode_header(
    layout: BlockLayout, fingerprint: Fingerprint, key: BlockKey, checksums: Sequence[int]
) -> bytes:
    body = bytearray(layout.header_bytes - _CHECKSUM_BYTES)
    _PREFIX.pack_into(
        body,
        0,
        MAGIC,
        FORMAT_VERSION,
        _DTYPE_CODES[layout.dtype],
        _CODEC_AS_COMPUTED,
        layout.header_bytes,
        layout.payload_bytes,
        layout.block_tokens,
        len(layout.layers),
        fingerprint.digest,
        key.digest,
    )
    table = [
        number
        for (heads, dim), first in zip(layout.layers, layout.first_heads, strict=True)
        for number in (first, heads, dim)
    ]
    struct.pack_into(f"<{len(table)}I", body, _PREFIX.size, *table)
    struct.pack_into(f"<{len(checksums)}Q", body, _PREFIX.size + 4 * len(table), *checksums)
    return bytes(body) + xxhash.xxh3_64_intdigest(body).to_bytes(_CHECKSUM_BYTES, "little")


@functools.lru_cache(maxsize=64)
def _decode_layout(dtype: int, block_tokens: int, table: bytes) -> BlockLayout | BlockFault:
    """Cached, since all blocks of a model carry the same table."""
    if dtype not in _DTYPES:
        return BlockFault.CORRUPT
    rows = list(_TABLE_ROW.iter_unpack(table))
    try:
        return BlockLayout(
            layers=tuple((heads, dim) for _, heads, dim in rows),
            dtype=_DTYPES[dtype],
            block_tokens=block_tokens,
            first_heads=tuple(first for first, _, _ in rows),
        )
    except ValueError:
        return BlockFault.CORRUPT


def _header_bytes(layers: int) -> int:
    return _round_up(_PREFIX.size + layers * (_TABLE_ROW.size + _CHECKSUM_BYTES) + _CHECKSUM_BYTES)


def _round_up(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
