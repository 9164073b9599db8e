"""Sizes, offsets and the fixed fields of a block (`kv_tiers/block.py` has the format), as computed or encoded."""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from kernels.blocks import BlockForm, Parts
from kv_tiers.at_rest import AtRest, part_bytes
from kv_tiers.block_copy import LayerPlace

MAGIC = b"kvtideBK"
FORMAT_VERSION = 1
ALIGN = 64

PREFIX = struct.Struct("<8sHBBIQII32s32s")
TABLE_ROW = struct.Struct("<3I")
CHECKSUM_BYTES = 8
FIELDS_BYTES = 32
"""Of a header, before the fingerprint."""
MAX_LAYERS = 4096
_DTYPE_CODES = {torch.float16: 1, torch.bfloat16: 2, torch.float32: 3}
DTYPES = {code: dtype for dtype, code in _DTYPE_CODES.items()}
_MAX_DIMENSION = 1 << 20


@dataclass(frozen=True)
class BlockLayout:
    """Sizes and offsets (bytes from the block's start) of a block.

    `layers[l]` is (kv heads in this block, head dim); `first_heads[l]` the first of them in the model's own
    numbering (empty: all zero), so that a tensor-parallel rank's blocks say which heads they hold. `dtype` is that of
    the KV as computed, whatever `codec` makes of it at rest. ValueError for impossible sizes.
    """

    layers: tuple[tuple[int, int], ...]
    dtype: torch.dtype
    block_tokens: int = 16
    first_heads: tuple[int, ...] = ()
    codec: AtRest = AtRest.EXACT

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPE_CODES:
            raise ValueError(f"blocks hold {', '.join(map(str, _DTYPE_CODES))}, not {self.dtype}")
        if not 1 <= len(self.layers) <= MAX_LAYERS:
            raise ValueError(f"a block has 1 to {MAX_LAYERS} layers, not {len(self.layers)}")
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
        return header_bytes(len(self.layers))

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
        codec = "" if self.codec is AtRest.EXACT else f":{self.codec.label}"
        return f"kvblock{FORMAT_VERSION}:{dtype}:t{self.block_tokens}:{table}{codec}"

    def kept_as(self, codec: AtRest) -> BlockLayout:
        """The same block at rest under a codec."""
        return self if codec is self.codec else replace(self, codec=codec)

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
    def form(self) -> BlockForm:
        """What all blocks of this layout have in common."""
        front, table = self._header_ends
        like = front.ljust(PREFIX.size, b"\0") + table
        return BlockForm(like, self.nbytes, self.header_bytes, len(front), PREFIX.size, len(like), self.parts)

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
        table = b"".join(TABLE_ROW.pack(first, heads, dim) for first, (heads, dim) in rows)
        code, sizes = _DTYPE_CODES[self.dtype], (self.header_bytes, self.payload_bytes)
        fields = (FORMAT_VERSION, code, self.codec, *sizes, self.block_tokens, len(self.layers))
        return PREFIX.pack(MAGIC, *fields, b"", b"")[:FIELDS_BYTES], table

    @functools.cached_property
    def _layer_offsets(self) -> tuple[int, ...]:
        sizes = (self.layer_bytes(layer) for layer in range(len(self.layers) - 1))
        return tuple(accumulate(sizes, initial=self.header_bytes))

    def _head_bytes(self, layer: int) -> int:
        tokens, dim, width = self.block_tokens, self.layers[layer][1], self.dtype.itemsize
        return sum(
            part_bytes(self.codec, keys=keys, tokens=tokens, dim=dim, width=width) for keys in (True, False)
        )


def header_bytes(layers: int) -> int:
    """Of a block of so many layers."""
    return _round_up(PREFIX.size + layers * (TABLE_ROW.size + CHECKSUM_BYTES) + CHECKSUM_BYTES)


def _round_up(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
