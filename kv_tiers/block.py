"""One block as bytes: the only layout of full prompt KV at rest and on the wire. FINAL (format version 1).

    header | layer 0 | layer 1 | ... | zero padding to a multiple of 64 bytes
    layer  = kv head 0 | kv head 1 | ...
    head   = K[T, D] | V[T, D], elements little-endian, no padding between (as computed; `kv_tiers/at_rest.py` has what
             lossy codecs put in their place)

Layers come first and heads inside them, so a layer, or a range of heads of a layer, is one contiguous read.
The header describes the block completely (layer table, head range, dtype) and carries the xxh3-64 of every
layer, so a load can be verified layer by layer; the header's own xxh3-64 stands in its last eight bytes.

Header, little-endian: magic 8s, version u16, dtype u8, codec u8 (`AtRest`; 0: as computed), header bytes u32, payload
bytes u64, block tokens u32, layers u32, fingerprint 32s, key 32s; then per layer first head, kv heads, head
dim (u32 each); then per layer the checksum (u64); zeros up to a multiple of 64 less 8; checksum of all that
(u64).

A reader copies first and verifies the copy: a slot that is overwritten during the read cannot slip through,
and the caller's tensors only ever receive verified bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import torch
import xxhash

from kv_tiers import block_copy
from kv_tiers.at_rest import AtRest
from kv_tiers.block_copy import BlockViews, Buffer, check_rows, flat_bytes
from kv_tiers.block_layout import ALIGN as ALIGN
from kv_tiers.block_layout import (
    CHECKSUM_BYTES,
    DTYPES,
    FIELDS_BYTES,
    MAX_LAYERS,
    PREFIX,
    TABLE_ROW,
    header_bytes,
)
from kv_tiers.block_layout import FORMAT_VERSION as FORMAT_VERSION
from kv_tiers.block_layout import MAGIC as MAGIC
from kv_tiers.block_layout import BlockLayout as BlockLayout
from kv_tiers.keys import DIGEST_BYTES, BlockKey, Fingerprint

_CODECS = frozenset(int(codec) for codec in AtRest)


class BlockFault(Enum):
    """Why bytes are not the block that was asked for. Each is a miss, never an error."""

    NOT_A_BLOCK = "no block starts here"
    VERSION = "another format version"
    CORRUPT = "the header does not match its checksum, or its fields contradict each other"
    FINGERPRINT = "written for another model, dtype, layout, RoPE regime or adapter"
    KEY = "another block"
    CODEC = "encoded otherwise at rest"
    LAYOUT = "another dtype, block size or layer table"
    HEAD_RANGE = "other kv heads of the same layers"


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
        return self.raw[FIELDS_BYTES : FIELDS_BYTES + DIGEST_BYTES]

    @property
    def key(self) -> bytes:
        return self.raw[PREFIX.size - DIGEST_BYTES : PREFIX.size]

    @property
    def checksums(self) -> bytes:
        layers = len(self.layout.layers)
        start = PREFIX.size + TABLE_ROW.size * layers
        return self.raw[start : start + CHECKSUM_BYTES * layers]


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
    assert layout.codec is AtRest.EXACT, "blocks are written as computed"
    targets = BlockViews([_flat(buf, layout) for buf in bufs])
    for target in targets:
        target[: len(MAGIC)] = bytes(len(MAGIC))
    row = CHECKSUM_BYTES * len(layout.layers)
    checksums = bytearray(row * len(targets))
    copies = block_copy.chosen()
    for layer, (k, v) in enumerate(zip(keys, values, strict=True)):
        check_rows(k, layout.places[layer], layout.dtype, len(targets))
        check_rows(v, layout.places[layer], layout.dtype, len(targets))
        copies.write_run(targets, layout.places[layer], checksums, k, v)
    for index, (target, key) in enumerate(zip(targets, block_keys, strict=True)):
        seal_block(target, layout, fingerprint, key, checksums[index * row : (index + 1) * row])


def seal_block(
    target: memoryview,
    layout: BlockLayout,
    fingerprint: Fingerprint,
    key: BlockKey,
    checksums: bytes | bytearray,
) -> None:
    """Make a block of a buffer that has its layers, with these checksums, and no magic yet; zeros up to its end."""
    end = layout.header_bytes + layout.payload_bytes
    target[end:] = bytes(len(target) - end)
    header = _encode_header(layout, fingerprint, key, checksums)
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
    if len(view) < PREFIX.size or view[: len(MAGIC)] != MAGIC:
        return BlockFault.NOT_A_BLOCK
    _, version, dtype, codec, size, payload, tokens, layers, _, _ = PREFIX.unpack_from(view)
    if version != FORMAT_VERSION:
        return BlockFault.VERSION
    if layers > MAX_LAYERS or size > len(view) or size != header_bytes(layers):
        return BlockFault.CORRUPT
    raw = bytes(view[:size])  # from here on only this copy: the slot may change under us
    if not _is_sealed(raw):
        return BlockFault.CORRUPT
    # Verified, so the fields are unpacked again from the copy.
    magic, version, dtype, codec, size, payload, tokens, layers, _, _ = PREFIX.unpack_from(raw)
    if magic != MAGIC or version != FORMAT_VERSION or size != len(raw) or size != header_bytes(layers):
        return BlockFault.CORRUPT
    layout = _decode_layout(dtype, codec, tokens, raw[PREFIX.size : PREFIX.size + TABLE_ROW.size * layers])
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
    rest = PREFIX.size + len(table)
    expected = b"".join((front, fingerprint.digest, key.digest, table))
    if len(view) >= layout.nbytes and raw[:rest] == expected and _is_sealed(raw):
        checksums = raw[rest : rest + CHECKSUM_BYTES * len(layout.layers)]
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
    if found.codec is not layout.codec:
        return BlockFault.CODEC
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
    body = body.ljust(layout.header_bytes - CHECKSUM_BYTES, b"\0")
    return body + xxhash.xxh3_64_intdigest(body).to_bytes(CHECKSUM_BYTES, "little")


def _is_sealed(raw: bytes) -> bool:
    """Whether a whole header has its checksum."""
    return xxhash.xxh3_64_intdigest(raw[:-CHECKSUM_BYTES]) == int.from_bytes(raw[-CHECKSUM_BYTES:], "little")


@functools.lru_cache(maxsize=64)
def _decode_layout(dtype: int, codec: int, block_tokens: int, table: bytes) -> BlockLayout | BlockFault:
    """Cached, since all blocks of a model carry the same table."""
    if dtype not in DTYPES:
        return BlockFault.CORRUPT
    if codec not in _CODECS:
        return BlockFault.CODEC
    rows = list(TABLE_ROW.iter_unpack(table))
    try:
        return BlockLayout(
            layers=tuple((heads, dim) for _, heads, dim in rows),
            dtype=DTYPES[dtype],
            block_tokens=block_tokens,
            first_heads=tuple(first for first, _, _ in rows),
            codec=AtRest(codec),
        )
    except ValueError:
        return BlockFault.CORRUPT
