"""Batches of paged sequences for the tests of decode attention, and the implementations they are given to."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from kernels import fallback, native
from kernels.layout import PageLayout, page_layout
from kernels.ops import Kernels

PORTABLE = ("-DKVTIDE_WIDTH=4",)
KV_HEADS = 2
LENGTHS = [[1, 15], [16, 17], [511, 512], [513, 1025], [33, 700], [64, 2049]]
# Largest error over the largest entry: fp32 exact to rounding, bf16 to one rounding of weights and result.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


@functools.cache
def implementation(name: str) -> Kernels:
    """The implementation under test."""
    if name == "torch":
        return fallback
    return native.load(PORTABLE if name == "portable" else ())


class Batch(NamedTuple):
    """Positional arguments of paged_decode_attention."""

    q: torch.Tensor
    pool: torch.Tensor
    layout: PageLayout
    tables: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    rows: torch.Tensor
    scale: float


@functools.cache
def make_batch(
    dtype: torch.dtype, head_dim: int, group: int, tiles: int = 3, started: bool = False, seed: int = 0
) -> Batch:
    """Ragged sequences on shuffled pages; everything outside a head's span is NaN or page -1."""
    random = torch.Generator().manual_seed(seed)
    tile_bytes = page_layout(head_dim, dtype, 1 << 20).tile_bytes
    layout = page_layout(head_dim, dtype, tiles * tile_bytes + 64)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    shortest = lengths.min(dim=1).values
    starts = (
        (shortest * torch.rand(len(LENGTHS), generator=random)).int()
        if started
        else torch.zeros_like(shortest)
    )
    pages = -(-int(lengths.max()) // layout.slots)
    count = lengths.numel() * pages
    pool = torch.full((count, layout.page_bytes), 255, dtype=torch.uint8)
    # A layer of a bigger table, as the engine holds it: strided, last dim contiguous.
    tables = torch.full((len(LENGTHS), 3, KV_HEADS, pages), -1, dtype=torch.int32)[:, 1]
    order = torch.randperm(count, generator=random).int().view(tables.shape)
    for row in range(len(LENGTHS)):
        first = int(starts[row])
        for head in range(KV_HEADS):
            stop = int(lengths[row, head])
            used = slice(first // layout.slots, -(-stop // layout.slots))
            tables[row, head, used] = order[row, head, used]
            k, v = torch.randn(2, stop - first, head_dim, generator=random).to(dtype)
            within = first - used.start * layout.slots
            fallback.scatter(pool, layout, tables[row, head, used], k, v, within)
    fused = torch.randn(len(LENGTHS), KV_HEADS * (group + 2), head_dim, generator=random).to(dtype)
    rows = torch.randperm(len(LENGTHS), generator=random).int()
    return Batch(fused[:, : KV_HEADS * group], pool, layout, tables, starts, lengths, rows, head_dim**-0.5)


def assert_close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    error = (found.double() - wanted.double()).abs().amax(dim=-1)
    assert bool((error <= tolerance * wanted.double().abs().amax(dim=-1).clamp(min=1e-3)).all()), float(
        error.max()
    )
