"""The specification of the operations in `kernels.ops`, in plain torch: slow, obvious, computed in float64.

Every other implementation has these signatures and is tested against this file. Shapes: B sequences of the batch,
S rows of the sequence tables, Hq query heads, Hk kv heads (Hq = Hk * G), D head size, P pages per head.
Slot i of a head lives in page `tables[row, head, i // slots]` at position `i % slots`; see `kernels.layout`.
"""

from __future__ import annotations

import torch

from kernels.checks import (
    check_columns,
    check_decode,
    check_mass,
    check_pool,
    check_span,
    check_tables,
    check_vectors,
)
from kernels.layout import TILE, PageLayout

UNOBSERVED, GROUP_MEAN, GROUP_MAX = 0, 1, 2  # codes of `reduce` in paged_decode_attention


def _tiles(pool: torch.Tensor, layout: PageLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Writable views of all keys and values in token order, no copy.

    fp32: both [pages, tiles, 16, padded_dim]. bf16: keys [pages, tiles, 16, padded_dim / 2] as int32, a word for a
    pair of dims, and values [pages, tiles, 8, 2, padded_dim].
    """
    data = pool[:, : layout.tiles * layout.tile_bytes].unflatten(1, (layout.tiles, 2, layout.tile_bytes // 2))
    if layout.dtype is torch.bfloat16:
        keys = data[:, :, 0].view(torch.int32).unflatten(2, (layout.padded_dim // 2, TILE))
        values = data[:, :, 1].view(layout.dtype).unflatten(2, (TILE // 2, layout.padded_dim, 2))
        return keys.transpose(2, 3), values.transpose(3, 4)
    keys = data[:, :, 0].view(layout.dtype).unflatten(2, (layout.padded_dim, TILE))
    return keys.transpose(2, 3), data[:, :, 1].view(layout.dtype).unflatten(2, (TILE, layout.padded_dim))


def read_pages(
    pool: torch.Tensor, layout: PageLayout, pages: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of the pages' keys and values, each [..., slots, D] for int tensor pages[...], in slot order."""
    keys, values = _tiles(pool.index_select(0, pages.reshape(-1)), layout)
    shape = (*pages.shape, layout.slots, layout.padded_dim)
    keys = keys.contiguous().view(layout.dtype).view(shape)
    return keys[..., : layout.head_dim], values.reshape(shape)[..., : layout.head_dim]


def _write_slot(
    pool: torch.Tensor, layout: PageLayout, page: int, position: int, k: torch.Tensor, v: torch.Tensor
) -> None:
    assert 0 <= page < pool.shape[0], f"page {page} is outside the pool"
    padded = torch.zeros(2, layout.padded_dim, dtype=layout.dtype)
    padded[0, : layout.head_dim], padded[1, : layout.head_dim] = k, v
    keys, values = _tiles(pool[page : page + 1], layout)
    tile, token = divmod(position, TILE)
    if layout.dtype is torch.bfloat16:
        keys[0, tile, token] = padded[0].view(torch.int32)
        values[0, tile, token // 2, token % 2] = padded[1]
    else:
        keys[0, tile, token], values[0, tile, token] = padded[0], padded[1]


def reduce_group(weights: torch.Tensor, reduce: int) -> torch.Tensor:
    """Probabilities [...,G,N] over the query heads of a group: [...,N], GROUP_MEAN or GROUP_MAX."""
    assert reduce in (GROUP_MEAN, GROUP_MAX), f"unknown reduce code {reduce}"
    return weights.mean(dim=-2) if reduce == GROUP_MEAN else weights.amax(dim=-2)


def paged_decode_attention(
    q: torch.Tensor,
    pool: torch.Tensor,
    layout: PageLayout,
    tables: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    rows: torch.Tensor,
    scale: float,
    *,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    mass: torch.Tensor | None = None,
    reduce: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One query token per sequence against its paged keys and values.

    q [B,Hq,D]; tables int32[S,Hk,P]; starts int32[S]; lengths int32[S,Hk]; rows int32[B]; sinks f32[Hq] or None.
    Sequence b uses row r = rows[b]; kv head h covers slots starts[r] <= i < lengths[r,h], at least one. Pages
    wholly before `starts` and table entries past the length are never read. A positive softcap c turns a scaled
    logit x into c * tanh(x / c). Sinks add exp(sink) to the softmax denominator only.
    mass f32[B,Hk,M] and reduce int32[B], both or neither: where reduce[b] is GROUP_MEAN or GROUP_MAX, mass[b,h,i]
    becomes the softmax probability, sinks in the denominator, of slot i of the row, starts <= i < lengths, as the
    mean or the largest over the head's query heads; M is at least the longest such length. Every other entry, and
    all of sequences whose reduce[b] is UNOBSERVED, stays as it was. Observing changes no bit of the results.
    Returns out [B,Hq,D] in q's dtype and lse f32[B,Hq]: the natural log of the sum of exp(logit), sinks left out.
    """
    check_pool(pool, layout)
    check_tables(tables, lengths, rows, q.shape[0])
    check_decode(q, layout, tables, starts, sinks)
    check_mass(mass, reduce, q.shape[0], tables.shape[1])
    out = torch.empty(q.shape, dtype=torch.float64)
    lse = torch.empty(q.shape[:2], dtype=torch.float64)
    group = q.shape[1] // tables.shape[1]
    for b, row in enumerate(rows.tolist()):
        for head in range(tables.shape[1]):
            start, stop = int(starts[row]), int(lengths[row, head])
            assert 0 <= start < stop <= tables.shape[2] * layout.slots, f"row {row}: slots [{start}, {stop})"
            first = start // layout.slots
            pages = tables[row, head, first : -(-stop // layout.slots)]
            assert int(pages.min()) >= 0 and int(pages.max()) < pool.shape[0], (
                f"row {row}: page outside the pool"
            )
            keys, values = read_pages(pool, layout, pages)
            span = slice(start - first * layout.slots, stop - first * layout.slots)
            k, v = keys.flatten(0, 1)[span].double(), values.flatten(0, 1)[span].double()
            queries = slice(head * group, (head + 1) * group)
            logits = q[b, queries].double() @ k.T * scale
            if softcap > 0.0:
                logits = softcap * torch.tanh(logits / softcap)
            log_sum = torch.logsumexp(logits, dim=-1)
            total = log_sum if sinks is None else torch.logaddexp(log_sum, sinks[queries].double())
            weights = torch.exp(logits - total[:, None])
            out[b, queries] = weights @ v
            lse[b, queries] = log_sum
            if mass is not None and reduce is not None and reduce[b] != UNOBSERVED:
                assert stop <= mass.shape[2], f"row {row}: {stop} slots, mass holds {mass.shape[2]}"
                mass[b, head, start:stop] = reduce_group(weights, int(reduce[b]))
    return out.to(q.dtype), lse.float()


def append(
    pool: torch.Tensor,
    layout: PageLayout,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    rows: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> None:
    """Write one token, k and v [B,Hk,D], at slot lengths[rows[b], h] of every head.

    The page that holds this slot is already in `tables`; `lengths` is not changed.
    """
    check_pool(pool, layout)
    check_tables(tables, lengths, rows, k.shape[0])
    check_vectors(k, v, layout, (rows.shape[0], tables.shape[1]))
    for b, row in enumerate(rows.tolist()):
        for head in range(tables.shape[1]):
            index, position = divmod(int(lengths[row, head]), layout.slots)
            assert 0 <= index < tables.shape[2], f"row {row}: no page for slot {int(lengths[row, head])}"
            _write_slot(pool, layout, int(tables[row, head, index]), position, k[b, head], v[b, head])


def scatter(
    pool: torch.Tensor,
    layout: PageLayout,
    pages: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first_slot: int = 0,
) -> None:
    """Write canonical rows k and v [n,D] to slots first_slot .. first_slot + n of one head's pages int32[p]."""
    scatter_heads(pool, layout, pages[None], k[None], v[None], first_slot)


def scatter_heads(
    pool: torch.Tensor,
    layout: PageLayout,
    tables: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first_slot: int = 0,
) -> None:
    """`scatter` for every head at once: tables int32[Hk,P], k and v [Hk,n,D]."""
    check_pool(pool, layout)
    heads, count = k.shape[:2]
    check_span(tables, layout, first_slot, first_slot + count)
    check_vectors(k, v, layout, (tables.shape[0], count))
    for head in range(heads):
        for i in range(count):
            index, position = divmod(first_slot + i, layout.slots)
            _write_slot(pool, layout, int(tables[head, index]), position, k[head, i], v[head, i])


def gather(
    pool: torch.Tensor,
    layout: PageLayout,
    pages: torch.Tensor,
    start: int,
    stop: int,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
) -> None:
    """Read slots start .. stop of one head's pages int32[p] into canonical rows k_out and v_out [stop-start,D]."""
    gather_heads(pool, layout, pages[None], start, stop, k_out[None], v_out[None])


def gather_heads(
    pool: torch.Tensor,
    layout: PageLayout,
    tables: torch.Tensor,
    start: int,
    stop: int,
    k_out: torch.Tensor,
    v_out: torch.Tensor,
) -> None:
    """`gather` for every head at once: tables int32[Hk,P], k_out and v_out [Hk,stop-start,D]."""
    check_pool(pool, layout)
    check_span(tables, layout, start, stop)
    check_vectors(k_out, v_out, layout, (tables.shape[0], stop - start))
    if start == stop:
        return
    first = start // layout.slots
    pages = tables[:, first : -(-stop // layout.slots)]
    assert int(pages.min()) >= 0 and int(pages.max()) < pool.shape[0], "page outside the pool"
    keys, values = read_pages(pool, layout, pages)
    span = slice(start - first * layout.slots, stop - first * layout.slots)
    k_out.copy_(keys.flatten(1, 2)[:, span])
    v_out.copy_(values.flatten(1, 2)[:, span])


def copy_page(pool: torch.Tensor, src: int, dst: int) -> None:
    """Copy every byte of page src onto page dst."""
    assert 0 <= src < pool.shape[0] and 0 <= dst < pool.shape[0], f"pages {src}, {dst} of {pool.shape[0]}"
    pool[dst] = pool[src]


def column_sums(
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    start: int,
    out: torch.Tensor,
    *,
    softcap: float = 0.0,
) -> None:
    """Add to `out` the causal attention that each key gets from T more queries of a prompt.

    q [Hq,T,D], queries at positions start .. start + T - 1; k [Hk,N,D], keys at positions 0 .. N - 1 in q's dtype,
    N >= start + T; lse f32[Hq,T], the natural log of each query's softmax denominator, attention sinks included;
    out f32[Hk,M], M >= start + T. out[h,j] += the mean over the query heads of kv head h of the sum over rows at
    positions i >= j of exp(logit - lse); later entries stay as they were. Logits and softcap as in
    `paged_decode_attention`. Adding a prompt piece by piece gives the column sums of its whole causal attention.
    """
    check_columns(q, k, lse, start, out)
    kv_heads, stop = k.shape[0], start + q.shape[1]
    future = torch.arange(stop) > torch.arange(start, stop)[:, None]
    for head in range(kv_heads):
        queries, log_sums = (rows.unflatten(0, (kv_heads, -1))[head].double() for rows in (q, lse))
        logits = queries @ k[head, :stop].double().T * scale
        if softcap > 0.0:
            logits = softcap * torch.tanh(logits / softcap)
        weights = torch.exp(logits - log_sums[..., None]).masked_fill(future, 0.0)
        out[head, :stop] += weights.sum(dim=1).mean(dim=0)
