"""Cheap checks of shapes, strides and dtypes that every implementation runs before it touches memory.

Callers are our own engine, so a violation is our mistake: an AssertionError, never a corrupted page.
"""

from __future__ import annotations

import torch

from kernels.layout import PageLayout


def check_pool(pool: torch.Tensor, layout: PageLayout) -> None:
    """The pool is a row-contiguous CPU byte matrix [num_pages, page_bytes]."""
    assert pool.dtype is torch.uint8 and pool.is_cpu, "pool must be a uint8 tensor on the CPU"
    assert pool.dim() == 2 and pool.shape[1] == layout.page_bytes, (
        f"pool is {tuple(pool.shape)}, want {layout}"
    )
    assert pool.is_contiguous(), "pool rows must be contiguous"


def check_tables(tables: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor, batch: int) -> None:
    """tables int32[S,Hk,P] and lengths int32[S,Hk] (last dim contiguous), rows int32[batch]."""
    assert tables.dtype is torch.int32 and lengths.dtype is torch.int32 and rows.dtype is torch.int32
    assert tables.dim() == 3 and tables.stride(2) == 1, "tables must be [S,Hk,P] with contiguous pages"
    assert lengths.shape == tables.shape[:2] and lengths.stride(1) == 1, "lengths must be [S,Hk]"
    assert rows.shape == (batch,) and rows.is_contiguous(), "rows must be [B]"


def check_decode(
    q: torch.Tensor,
    layout: PageLayout,
    tables: torch.Tensor,
    starts: torch.Tensor,
    sinks: torch.Tensor | None,
) -> None:
    """q [B,Hq,D] in the layout's dtype, whole groups of query heads, starts int32[S], sinks f32[Hq]."""
    assert q.dtype is layout.dtype and q.is_cpu, f"q is {q.dtype}, pages hold {layout.dtype}"
    _, heads, dim = q.shape
    assert dim == layout.head_dim and q.stride(2) == 1, f"q has head size {dim}, pages hold {layout.head_dim}"
    assert heads % tables.shape[1] == 0, f"{heads} query heads do not divide over {tables.shape[1]} kv heads"
    assert starts.dtype is torch.int32 and starts.shape == tables.shape[:1], "starts must be int32[S]"
    if sinks is not None:
        assert sinks.dtype is torch.float32 and sinks.shape == (heads,) and sinks.is_contiguous()


def check_mass(mass: torch.Tensor | None, reduce: torch.Tensor | None, batch: int, kv_heads: int) -> None:
    """Both or neither: mass f32[batch,Hk,M], its last dim contiguous, and reduce int32[batch]."""
    if mass is None or reduce is None:
        assert mass is None and reduce is None, "mass and reduce come together"
        return
    assert mass.dtype is torch.float32 and mass.is_cpu and mass.dim() == 3, "mass must be f32[B,Hk,M]"
    assert mass.shape[:2] == (batch, kv_heads), f"mass is {tuple(mass.shape)}, want [{batch},{kv_heads},M]"
    assert mass.stride(2) == 1, "slots of mass must be contiguous"
    assert reduce.dtype is torch.int32 and reduce.shape == (batch,) and reduce.is_contiguous(), (
        "reduce must be int32[B]"
    )


def check_vectors(k: torch.Tensor, v: torch.Tensor, layout: PageLayout, lead: tuple[int, ...]) -> None:
    """k and v [*lead, D] in the layout's dtype, each vector contiguous."""
    shape = (*lead, layout.head_dim)
    assert k.shape == shape and v.shape == shape, f"k {tuple(k.shape)} and v {tuple(v.shape)} must be {shape}"
    assert k.dtype is layout.dtype and v.dtype is layout.dtype, f"k, v must be {layout.dtype}"
    assert k.stride(-1) == 1 and v.stride(-1) == 1, "k and v rows must be contiguous"


def check_span(tables: torch.Tensor, layout: PageLayout, start: int, stop: int) -> None:
    """Slots [start, stop) lie inside page lists int32[Hk,P]."""
    assert tables.dtype is torch.int32 and tables.dim() == 2 and tables.stride(1) == 1
    assert 0 <= start <= stop <= tables.shape[1] * layout.slots, (
        f"slots [{start}, {stop}) leave the page list"
    )


def check_columns(q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, start: int, out: torch.Tensor) -> None:
    """q [Hq,T,D], k [Hk,>=start+T,D] of one dtype, lse f32[Hq,T] (any strides), out f32[Hk,>=start+T]."""
    assert q.dim() == 3 and k.dim() == 3 and q.shape[2] == k.shape[2], "want q [Hq,T,D] and k [Hk,N,D]"
    assert q.dtype is k.dtype and q.dtype in (torch.float32, torch.bfloat16), f"q {q.dtype}, k {k.dtype}"
    assert q.is_cpu and k.is_cpu and q.stride(2) == 1 and k.stride(2) == 1, "q and k rows must be contiguous"
    heads, count, _ = q.shape
    kv_heads, stop = k.shape[0], start + count
    assert heads % kv_heads == 0, f"{heads} query heads do not divide over {kv_heads} kv heads"
    assert 0 <= start <= stop <= k.shape[1], f"queries [{start}, {stop}) of {k.shape[1]} keys"
    assert lse.dtype is torch.float32 and lse.shape == (heads, count) and lse.is_cpu, "lse must be f32[Hq,T]"
    assert out.dtype is torch.float32 and out.dim() == 2 and out.shape[0] == kv_heads and out.stride(1) == 1
    assert stop <= out.shape[1], f"keys [0, {stop}) of a column for {out.shape[1]}"


def check_moves(sources: torch.Tensor, tables: torch.Tensor) -> None:
    """sources int64[Hk,n] for page lists int32[Hk,P]; the last dim of both contiguous."""
    assert tables.dtype is torch.int32 and tables.dim() == 2 and tables.stride(1) == 1
    assert sources.dtype is torch.int64 and sources.dim() == 2 and sources.is_cpu, (
        "sources must be int64[Hk,n]"
    )
    assert sources.shape[0] == tables.shape[0], f"{sources.shape[0]} heads move, {tables.shape[0]} have pages"
    assert sources.stride(1) == 1 or sources.shape[1] < 2, "the sources of a head must be contiguous"


def check_seen(sums: torch.Tensor, seen: torch.Tensor, lengths: torch.Tensor) -> None:
    """sums and seen f32[L,Hk,.], their last dim contiguous, lengths int32[L,Hk]."""
    for rows in (sums, seen):
        assert rows.dtype is torch.float32 and rows.is_cpu and rows.dim() == 3, "want f32[L,Hk,C]"
        assert rows.shape[:2] == lengths.shape, f"{tuple(rows.shape)} rows, {tuple(lengths.shape)} lengths"
        assert rows.stride(2) == 1 or rows.shape[2] < 2, "the slots of a head must be contiguous"
    _check_counts(lengths)


def check_lowest(
    score: torch.Tensor | None,
    positions: torch.Tensor,
    kept: torch.Tensor,
    lengths: torch.Tensor,
    recent: torch.Tensor | None,
) -> None:
    """positions int32[L,Hk,C], kept bool of that shape, score f32[L,Hk,.], lengths and recent int32[L,Hk]."""
    assert positions.dtype is torch.int32 and positions.dim() == 3 and positions.is_contiguous()
    assert kept.dtype is torch.bool and kept.shape == positions.shape and kept.is_contiguous()
    assert lengths.shape == positions.shape[:2], f"lengths are {tuple(lengths.shape)}"
    _check_counts(lengths)
    if recent is not None:
        assert recent.shape == lengths.shape
        _check_counts(recent)
    if score is not None:
        assert score.dtype is torch.float32 and score.is_cpu and score.shape[:2] == lengths.shape
        assert score.stride(2) == 1 or score.shape[2] < 2, "the slots of a head must be contiguous"


def check_highest(values: torch.Tensor, positions: torch.Tensor, counts: torch.Tensor) -> None:
    """values f64[L,Hk,C] and positions int32 of that shape, both contiguous; counts int32[L,Hk]."""
    assert values.dtype is torch.float64 and values.dim() == 3 and values.is_contiguous() and values.is_cpu
    assert positions.dtype is torch.int32 and positions.shape == values.shape and positions.is_contiguous()
    assert counts.shape == values.shape[:2], f"counts are {tuple(counts.shape)}"
    _check_counts(counts)


def _check_counts(counts: torch.Tensor) -> None:
    assert counts.dtype is torch.int32 and counts.is_cpu and counts.is_contiguous(), (
        "counts must be int32[L,Hk]"
    )
