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
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import NamedTuple

import torch
import xxhash

from kv_tiers import block_copy
from kv_tiers.block_copy import BlockViews, Buffer, LayerPlace, Parts, check_rows, flat_bytes
from kv_tiers.keys import DIGEST_BYTES, BlockKey, Fingerprint

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
_FIELDS_BYTES = 32  # before the fingerprint


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
    def parts(self) -> Parts:
        """Offsets and sizes of the layers."""
        sizes = [self.layer_bytes(layer) for layer in range(len(self.layers))]
        return Parts.of(self._layer_offsets, sizes)

    @functools.cached_property
    def places(self) -> tuple[LayerPlace, ...]:
        """Where each layer lies."""
        return tuple(
            LayerPlace(
                layer, self.layer_offset(layer), self.layer_bytes(layer), heads, self.block_tokens, dim
            )
            for layer, (heads, dim) in enumerate(self.layers)
        )

    @functools.cached_property
    def _header_ends(self) -> tuple[bytes, bytes]:
        """What stands in a header before the fingerprint, and between key and checksums."""
        rows = zip(self.first_heads, self.layers, strict=True)
        table = b"".join(_TABLE_ROW.pack(first, heads, dim) for first, (heads, dim) in rows)
        code, sizes = _DTYPE_CODES[self.dtype], (self.header_bytes, self.payload_bytes)
        fields = (FORMAT_VERSION, code, _CODEC_AS_COMPUTED, *sizes, self.block_tokens, len(self.layers))
        return _PREFIX.pack(MAGIC, *fields, b"", b"")[:_FIELDS_BYTES], table

    @functools.cached_property
    def _layer_offsets(self) -> tuple[int, ...]:
        sizes = (self.layer_bytes(layer) for layer in range(len(self.layers) - 1))
        return tuple(accumulate(sizes, initial=self.header_bytes))

    def _head_bytes(self, layer: int) -> int:
        return 2 * self.block_tokens * self.layers[layer][1] * self.dtype.itemsize


class BlockHeader(NamedTuple):
    """What a block's header says. `checksums`: the xxh3-64 of each layer's bytes, as they stand there (u64)."""

    fingerprint: Fingerprint
    key: BlockKey
    layout: BlockLayout
    checksums: bytes


class SealedHeader(NamedTuple):
    """A verified private copy of a header, for those who do not need names for all of it."""

    raw: bytes
    layout: BlockLayout

    @property
    def fingerprint(self) -> bytes:
        return self.raw[_FIELDS_BYTES : _FIELDS_BYTES + DIGEST_BYTES]

    @property
    def key(self) -> bytes:
        return self.raw[_PREFIX.size - DIGEST_BYTES : _PREFIX.size]

    @property
    def checksums(self) -> bytes:
        layers = len(self.layout.layers)
        start = _PREFIX.size + _TABLE_ROW.size * layers
        return self.raw[start : start + _CHECKSUM_BYTES * layers]


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
    targets = BlockViews([_flat(buf, layout) for buf in bufs])
    for target in targets:
        target[: len(MAGIC)] = bytes(len(MAGIC))
    row = _CHECKSUM_BYTES * len(layout.layers)
    checksums = bytearray(row * len(targets))
    copies = block_copy.chosen()
    for layer, (k, v) in enumerate(zip(keys, values, strict=True)):
        check_rows(k, layout.places[layer], layout.dtype, len(targets))
        check_rows(v, layout.places[layer], layout.dtype, len(targets))
        copies.write_run(targets, layout.places[layer], checksums, k, v)
    padding = bytes(layout.nbytes - layout.header_bytes - layout.payload_bytes)
    for index, (target, key) in enumerate(zip(targets, block_keys, strict=True)):
        target[layout.nbytes - len(padding) :] = padding
        header = _encode_header(layout, fingerprint, key, checksums[index * row : (index + 1) * row])
        # The magic goes last, so that a reader who sees it sees the rest.
        target[len(MAGIC) : layout.header_bytes] = header[len(MAGIC) :]
        target[: len(MAGIC)] = MAGIC


def read_header(buf: Buffer) -> BlockHeader | BlockFault:
    """Decode a header that may be anything at all; only lengths that fit `buf` are followed."""
    sealed = read_sealed_header(flat_bytes(buf))
    if isinstance(sealed, BlockFault):
        return sealed
    return BlockHeader(Fingerprint(sealed.fingerprint), BlockKey(sealed.key), sealed.layout, sealed.checksums)


def read_sealed_header(view: memoryview) -> SealedHeader | BlockFault:
    """As `read_header`, for half the price."""
    if len(view) < _PREFIX.size or view[: len(MAGIC)] != MAGIC:
        return BlockFault.NOT_A_BLOCK
    _, version, dtype, codec, header_bytes, payload, tokens, layers, _, _ = _PREFIX.unpack_from(view)
    if version != FORMAT_VERSION:
        return BlockFault.VERSION
    if layers > _MAX_LAYERS or header_bytes > len(view) or header_bytes != _header_bytes(layers):
        return BlockFault.CORRUPT
    raw = bytes(view[:header_bytes])  # from here on only this copy: the slot may change under us
    if not _is_sealed(raw):
        return BlockFault.CORRUPT
    # Verified, so the fields are unpacked again from the copy.
    magic, version, dtype, codec, size, payload, tokens, layers, _, _ = _PREFIX.unpack_from(raw)
    if magic != MAGIC or version != FORMAT_VERSION or codec != _CODEC_AS_COMPUTED:
        return BlockFault.CORRUPT
    if size != header_bytes or size != _header_bytes(layers):
        return BlockFault.CORRUPT
    layout = _decode_layout(dtype, tokens, raw[_PREFIX.size : _PREFIX.size + _TABLE_ROW.size * layers])
    if isinstance(layout, BlockFault):
        return layout
    if layout.payload_bytes != payload or layout.nbytes > len(view):
        return BlockFault.CORRUPT
    return SealedHeader(raw, layout)


def open_block(
    buf: Buffer, layout: BlockLayout, fingerprint: Fingerprint, key: BlockKey
) -> BlockHeader | BlockFault:
    """The header, if `buf` holds exactly this block; otherwise why not. No payload byte is read."""
    view = flat_bytes(buf)
    raw = bytes(view[: layout.header_bytes])
    front, table = layout._header_ends
    rest = _PREFIX.size + len(table)
    expected = b"".join((front, fingerprint.digest, key.digest, table))
    if len(view) >= layout.nbytes and raw[:rest] == expected and _is_sealed(raw):
        checksums = raw[rest : rest + _CHECKSUM_BYTES * len(layout.layers)]
        return BlockHeader(fingerprint, key, layout, checksums)
    return _why_not(view, layout, fingerprint, key)


def _why_not(
    view: memoryview, layout: BlockLayout, fingerprint: Fingerprint, key: BlockKey
) -> BlockHeader | BlockFault:
    """What is wrong with a block that was not as expected. It may have become what is expected meanwhile."""
    header = read_header(view)
    if isinstance(header, BlockFault):
        return header
    if header.fingerprint != fingerprint:
        return BlockFault.FINGERPRINT
    if header.key != key:
        return BlockFault.KEY
    found = header.layout
    if found == layout:
        return header
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
    place = layout.places[layer]
    check_rows(k_out, place, layout.dtype, len(bufs))
    check_rows(v_out, place, layout.dtype, len(bufs))
    views = bufs if isinstance(bufs, BlockViews) else BlockViews(bufs)
    foreign = (
        index
        for index, header in enumerate(headers)
        if header.layout is not layout and header.layout != layout
    )
    count = next(foreign, len(headers))
    if not count:
        return 0
    assert views.shortest >= layout.nbytes, f"{views.shortest} bytes for blocks of {layout.nbytes}"
    checksums = b"".join([header.checksums for header in headers[:count]])
    return block_copy.chosen().read_run(views[:count], place, checksums, k_out, v_out)


def _flat(buf: Buffer, layout: BlockLayout) -> memoryview:
    view = flat_bytes(buf)
    assert len(view) == layout.nbytes, f"slot of {len(view)} bytes for blocks of {layout.nbytes}"
    return view


def _encode_header(
    layout: BlockLayout, fingerprint: Fingerprint, key: BlockKey, checksums: bytes | bytearray
) -> bytes:
    front, table = layout._header_ends
    body = b"".join((front, fingerprint.digest, key.digest, table, checksums))
    body = body.ljust(layout.header_bytes - _CHECKSUM_BYTES, b"\0")
    return body + xxhash.xxh3_64_intdigest(body).to_bytes(_CHECKSUM_BYTES, "little")


def _is_sealed(raw: bytes) -> bool:
    """Whether a whole header has its checksum."""
    return xxhash.xxh3_64_intdigest(raw[:-_CHECKSUM_BYTES]) == int.from_bytes(
        raw[-_CHECKSUM_BYTES:], "little"
    )


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
