"""The specification of the page operations, in plain torch: slow, obvious, computed in float64.

Every other implementation has these signatures and is tested against this file. Shapes: B sequences of the batch,
S rows of the sequence tables, Hq query heads, Hk kv heads (Hq = Hk * G), D head size, P pages per head.
Slot i of a head lives in page `tables[row, head, i // slots]` at position `i % slots`; see `kernels.layout`.
"""

from __future__ import annotations

import torch

from kernels.checks import check_decode, check_pool, check_span, check_tables, check_vectors
from kernels.layout import TILE, PageLayout


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
) -> tuple[torch.Tensor, torch.Tensor]:
    """One query token per sequence against its paged keys and values.

    q [B,Hq,D]; tables int32[S,Hk,P]; starts int32[S]; lengths int32[S,Hk]; rows int32[B]; sinks f32[Hq] or None.
    Sequence b uses row r = rows[b]; kv head h covers slots starts[r] <= i < lengths[r,h], at least one. Pages
    wholly before `starts` and table entries past the length are never read. A positive softcap c turns a scaled
    logit x into c * tanh(x / c). Sinks add exp(sink) to the softmax denominator only.
    Returns out [B,Hq,D] in q's dtype and lse f32[B,Hq]: the natural log of the sum of exp(logit), sinks left out.
    """
    check_pool(pool, layout)
    check_tables(tables, lengths, rows, q.shape[0])
    check_decode(q, layout, tables, starts, sinks)
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
            out[b, queries] = torch.exp(logits - total[:, None]) @ v
            lse[b, queries] = log_sum
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
