"""Layers of blocks as computed to layers at rest and back: C++ where it can be built, torch elsewhere.

The torch version is the specification (`kv_tiers/at_rest.py` has the format). `chosen` is the one place that says who
does it in this process. Half precision is always torch's.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
import xxhash
from torch import Tensor

from kernels import lossy, ops
from kernels.lossy import Encoded, Shape
from kv_tiers.at_rest import GROUP, AtRest, groups_of, part_bytes
from kv_tiers.block_copy import BlockViews, flat_bytes
from kv_tiers.block_layout import CHECKSUM_BYTES, BlockLayout

_E4M3_MAX = 448.0
_LEVELS = {AtRest.INT8: 255.0, AtRest.INT4: 15.0}
_FP8_PADDING = 4


class LayerCodec(Protocol):
    """All layers of blocks of one layout. `encoded` is the layout at rest; checksums are u64 [blocks, layers]."""

    name: str

    def encode(
        self,
        sources: BlockViews,
        targets: BlockViews,
        encoded: BlockLayout,
        wanted: bytes,
        checksums: bytearray,
    ) -> list[Encoded]:
        """Encode blocks whose layers have the `wanted` checksums; `checksums` become those of what was made."""
        ...

    def decode(
        self, sources: BlockViews, targets: BlockViews, encoded: BlockLayout, checksums: bytearray
    ) -> None:
        """Decode blocks that were verified and that nobody changes; `checksums` become those of what was made."""
        ...


class TorchCodec:
    """A layer of a block at a time, with torch and xxhash."""

    name = "torch"

    def encode(
        self,
        sources: BlockViews,
        targets: BlockViews,
        encoded: BlockLayout,
        wanted: bytes,
        checksums: bytearray,
    ) -> list[Encoded]:
        row = CHECKSUM_BYTES * len(encoded.layers)
        outcomes = []
        for index, (source, target) in enumerate(zip(sources, targets, strict=True)):
            span = slice(index * row, (index + 1) * row)
            outcome, made = _encode_block(source, target, encoded, wanted[span])
            outcomes.append(outcome)
            if outcome is Encoded.DONE:
                checksums[span] = made
        return outcomes

    def decode(
        self, sources: BlockViews, targets: BlockViews, encoded: BlockLayout, checksums: bytearray
    ) -> None:
        made = bytearray()
        for source, target in zip(sources, targets, strict=True):
            for layer in _layers(encoded):
                rows = decode_rows(torch.frombuffer(source[layer.at_rest], dtype=torch.uint8), encoded, layer)
                content = _bytes_of(rows)
                target[layer.exact] = content
                made += _checksum(content)
        checksums[:] = made


class NativeCodec:
    """One pass over memory per block, without the GIL."""

    name = "native"

    def __init__(self, native: lossy.NativeLossy) -> None:
        self._native = native
        self._torch = TorchCodec()

    def encode(
        self,
        sources: BlockViews,
        targets: BlockViews,
        encoded: BlockLayout,
        wanted: bytes,
        checksums: bytearray,
    ) -> list[Encoded]:
        if encoded.dtype is torch.float16:
            return self._torch.encode(sources, targets, encoded, wanted, checksums)
        shape = _shape(encoded)
        return self._native.encode(sources.addresses, targets.addresses, shape, wanted, checksums)

    def decode(
        self, sources: BlockViews, targets: BlockViews, encoded: BlockLayout, checksums: bytearray
    ) -> None:
        if encoded.dtype is torch.float16:
            return self._torch.decode(sources, targets, encoded, checksums)
        return self._native.decode(sources.addresses, targets.addresses, _shape(encoded), checksums)


@functools.cache
def chosen() -> LayerCodec:
    """Who encodes and decodes in this process. The first call may build (a few seconds)."""
    if sys.byteorder == "little" and ops.implementation() == "native":
        return NativeCodec(lossy.load())
    return TorchCodec()


class Layer(NamedTuple):
    """One layer: its kv heads and head dim, and where it lies in a block as computed, and at rest."""

    heads: int
    dim: int
    exact: slice
    at_rest: slice


def encode_rows(rows: Tensor, codec: AtRest) -> Tensor | None:
    """Rows [Hk, 2 (K, V), T, D] as they lie at rest, u8 [layer bytes]; None if they are not all finite."""
    x = rows.float()
    parts = [_encode_part(x[:, which], codec, rows.dtype, keys=which == 0) for which in (0, 1)]
    if any(part is None for part in parts):
        return None
    return torch.cat([part for part in parts if part is not None], dim=1).flatten()


def decode_rows(at_rest: Tensor, encoded: BlockLayout, layer: Layer) -> Tensor:
    """A layer at rest, u8 [layer bytes], as rows [Hk, 2, T, D]."""
    codec, dtype, tokens = encoded.codec, encoded.dtype, encoded.block_tokens
    size = functools.partial(part_bytes, codec, tokens=tokens, dim=layer.dim, width=dtype.itemsize)
    keys, values = at_rest.view(layer.heads, -1).split([size(keys=True), size(keys=False)], dim=1)
    shape = (layer.heads, tokens, layer.dim)
    made = [_decode_part(part, codec, dtype, shape, keys=part is keys) for part in (keys, values)]
    most = torch.finfo(dtype).max
    return torch.stack(made, dim=1).clamp(-most, most).to(dtype)


def _encode_part(x: Tensor, codec: AtRest, dtype: torch.dtype, *, keys: bool) -> Tensor | None:
    """x [Hk, T, D] fp32 → u8 [Hk, part bytes]."""
    heads, tokens, dim = x.shape
    if not bool(x.isfinite().all()):
        return None
    if codec is AtRest.FP8:
        scale = x.abs().amax((1, 2)) / _E4M3_MAX
        scale = torch.where(scale == 0, 1.0, scale)
        scaled = (x / scale[:, None, None]).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)
        zeros = scale.new_zeros(heads, _FP8_PADDING, dtype=torch.uint8)
        pieces = [_as_bytes(scale), zeros, _as_bytes(scaled)]
    else:
        axis, size = _groups(codec, dim, keys=keys)
        scales: list[Tensor] = []
        lows: list[Tensor] = []
        codes: list[Tensor] = []
        for group in x.split(size, dim=axis):
            low, high = group.amin(axis, keepdim=True), group.amax(axis, keepdim=True)
            scale = _rounded_up((high - low) / _LEVELS[codec], dtype)
            by = torch.where(scale == 0, 1.0, scale.float())
            codes.append(((group - low) / by).round().clamp(0, _LEVELS[codec]).to(torch.uint8))
            scales.append(scale)
            lows.append(low.to(dtype))
        if not all(bool(scale.isfinite().all()) for scale in scales):
            return None
        packed = torch.cat(codes, dim=axis).reshape(heads, -1)
        packed = packed if codec is AtRest.INT8 else _nibbles(packed)
        pieces = [_as_bytes(torch.cat(scales, dim=axis)), _as_bytes(torch.cat(lows, dim=axis)), packed]
    size = part_bytes(codec, keys=keys, tokens=tokens, dim=dim, width=dtype.itemsize)
    part = torch.cat(pieces, dim=1)
    return torch.nn.functional.pad(part, (0, size - part.shape[1]))


def _decode_part(
    part: Tensor, codec: AtRest, dtype: torch.dtype, shape: tuple[int, int, int], *, keys: bool
) -> Tensor:
    """u8 [Hk, part bytes] → fp32 [Hk, T, D]."""
    heads, tokens, dim = shape
    if codec is AtRest.FP8:
        scale = part[:, :4].contiguous().view(torch.float32)
        codes = part[:, 8 : 8 + tokens * dim].contiguous().view(torch.float8_e4m3fn)
        return codes.float().view(shape) * scale[:, :, None]
    axis, size = _groups(codec, dim, keys=keys)
    groups = (groups_of(tokens), dim) if axis == 1 else (tokens, -(-dim // size))
    nbytes = groups[0] * groups[1] * dtype.itemsize
    scales, lows = (
        part[:, at : at + nbytes].contiguous().view(dtype).float().view(heads, *groups) for at in (0, nbytes)
    )
    packed = part[:, 2 * nbytes :]
    codes = packed if codec is AtRest.INT8 else torch.stack((packed & 15, packed >> 4), dim=2).flatten(1)
    codes = codes[:, : tokens * dim].float().view(shape)
    scales, lows = (
        each.repeat_interleave(size, dim=axis).narrow(axis, 0, shape[axis]) for each in (scales, lows)
    )
    return codes * scales + lows


def _groups(codec: AtRest, dim: int, *, keys: bool) -> tuple[int, int]:
    """The axis of [Hk, T, D] that groups lie along, and how many of its elements they have."""
    if codec is AtRest.INT8:
        return 2, dim
    return (1, GROUP) if keys else (2, GROUP)


def _rounded_up(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The next number of that dtype that is not below."""
    near = scale.to(dtype)
    if dtype is torch.float32:
        return near
    return torch.where(near.float() < scale, (near.view(torch.int16) + 1).view(dtype), near)


def _nibbles(codes: Tensor) -> Tensor:
    """u8 [Hk, n] of 0..15 → [Hk, (n + 1) / 2], the first of two in the low bits."""
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[:, ::2] | codes[:, 1::2] << 4


def _as_bytes(numbers: Tensor) -> Tensor:
    return numbers.reshape(numbers.shape[0], -1).contiguous().view(torch.uint8)


def _encode_block(
    source: memoryview, target: memoryview, encoded: BlockLayout, wanted: bytes
) -> tuple[Encoded, bytes]:
    made = bytearray()
    for layer in _layers(encoded):
        content = bytearray(source[layer.exact])  # verified and used, whatever the slot becomes
        if _checksum(content) != wanted[len(made) : len(made) + CHECKSUM_BYTES]:
            return Encoded.NOT_WHOLE, b""
        rows = torch.frombuffer(content, dtype=encoded.dtype)
        at_rest = encode_rows(rows.view(layer.heads, 2, encoded.block_tokens, layer.dim), encoded.codec)
        if at_rest is None:
            return Encoded.NOT_FINITE, b""
        target[layer.at_rest] = _bytes_of(at_rest)
        made += _checksum(_bytes_of(at_rest))
    return Encoded.DONE, bytes(made)


@functools.lru_cache(maxsize=64)
def _layers(encoded: BlockLayout) -> tuple[Layer, ...]:
    return tuple(_each_layer(encoded))


def _each_layer(encoded: BlockLayout) -> Iterator[Layer]:
    exact = encoded.kept_as(AtRest.EXACT)
    for index, (heads, dim) in enumerate(encoded.layers):
        spans = [
            slice(layout.layer_offset(index), layout.layer_offset(index) + layout.layer_bytes(index))
            for layout in (exact, encoded)
        ]
        yield Layer(heads, dim, *spans)


@functools.lru_cache(maxsize=64)
def _shape(encoded: BlockLayout) -> Shape:
    rows = [(layer.heads, layer.dim, layer.exact.start, layer.at_rest.start) for layer in _layers(encoded)]
    return Shape.of(encoded.codec, encoded.dtype.itemsize, encoded.block_tokens, rows)


def _bytes_of(numbers: Tensor) -> memoryview:
    return flat_bytes(numbers.contiguous().view(-1).view(torch.uint8).numpy())


def _checksum(content: memoryview | bytearray) -> bytes:
    return xxhash.xxh3_64_intdigest(content).to_bytes(CHECKSUM_BYTES, "little")
