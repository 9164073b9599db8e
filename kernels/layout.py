"""How one kv head's tokens lie inside a page of the decode pool.

A page is a row of bytes made of consecutive tiles; a tile holds TILE tokens, first their keys, then their values:

    bf16   K [padded_dim / 2 pairs of dims][16 tokens][2]     V [8 pairs of tokens][padded_dim][2]
    fp32   K [padded_dim][16 tokens]                          V [16 tokens][padded_dim]

With that order a kernel needs no horizontal sums for the logits and no conversion for the values: every vector
load of K covers 16 tokens, every vector load of V 16 dims. `padded_dim` is the head size rounded up to 16; the
padding of every written token is zero. Nothing outside `kernels/` may rely on any of this but the sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

TILE = 16
_ROW_ALIGNMENT = 64
_DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class PageLayout:
    """Sizes of one page format. Build it with `page_layout`, which checks them.

    head_dim: elements of one key (and of one value); padded_dim: the same rounded up to a multiple of 16.
    page_bytes: bytes of a pool row; tile_bytes: bytes of 16 tokens' K and V; slots: tokens that fit in a page.
    """

    head_dim: int
    dtype: torch.dtype
    page_bytes: int
    slots: int
    padded_dim: int
    tile_bytes: int

    @property
    def tiles(self) -> int:
        """Tiles in a page."""
        return self.slots // TILE


def _padded_dim(head_dim: int) -> int:
    return -(-head_dim // 16) * 16


def min_page_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one tile (K and V of 16 tokens): the smallest page that holds this format.

    ValueError: a head size below 1, or a dtype other than bfloat16 and float32.
    """
    if head_dim < 1:
        raise ValueError(f"head_dim must be at least 1, got {head_dim}")
    if dtype not in _DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, _DTYPES))}, got {dtype}")
    return 2 * TILE * _padded_dim(head_dim) * dtype.itemsize


def page_layout(head_dim: int, dtype: torch.dtype, page_bytes: int) -> PageLayout:
    """The format of pages of `page_bytes` bytes for one head size and dtype.

    ValueError: when not even one tile fits, rows would not be 64-byte aligned, or `min_page_bytes` refuses.
    """
    tile_bytes = min_page_bytes(head_dim, dtype)
    if page_bytes < tile_bytes:
        raise ValueError(
            f"page_bytes must be at least {tile_bytes} for head_dim {head_dim} in {dtype}, got {page_bytes}"
        )
    if page_bytes % _ROW_ALIGNMENT:
        raise ValueError(f"page_bytes must be a multiple of {_ROW_ALIGNMENT}, got {page_bytes}")
    return PageLayout(
        head_dim=head_dim,
        dtype=dtype,
        page_bytes=page_bytes,
        slots=TILE * (page_bytes // tile_bytes),
        padded_dim=_padded_dim(head_dim),
        tile_bytes=tile_bytes,
    )
