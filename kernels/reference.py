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
    check_highest,
    check_lowest,
    check_mass,
    check_moves,
    check_pool,
    check_seen,
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


def move_slots(pool: torch.Tensor, layout: PageLayout, tables: torch.Tensor, sources: torch.Tensor) -> None:
    """Let slot i of every head hold what slot sources[h,i] held; -1 and i itself: it stays as it is.

    tables int32[Hk,P] page lists; sources int64[Hk,n], n slots at most. No slot may be read after it was written, the
    slots of a head being done in ascending order: a source is never before its slot, or is not written at all.
    """
    check_moves(sources, tables)
    for head, moves in enumerate(sources.tolist()):
        for slot, source in enumerate(moves):
            if source not in (-1, slot):
                k, v = torch.empty(2, 1, layout.head_dim, dtype=layout.dtype)
                gather(pool, layout, tables[head], source, source + 1, k, v)
                scatter(pool, layout, tables[head], k, v, slot)


def add_seen(sums: torch.Tensor, seen: torch.Tensor, lengths: torch.Tensor) -> None:
    """Add to sums f32[L,Hk,C] what `seen` f32[L,Hk,>= longest] says of the first lengths[l,h] slots of each head.

    Both may be strided; lengths int32[L,Hk], at most C. Other slots of `seen` may hold anything, those of `sums` stay.
    """
    check_seen(sums, seen, lengths)
    for at, length in enumerate(lengths.flatten().tolist()):
        layer, head = divmod(at, lengths.shape[1])
        assert 0 <= length <= min(sums.shape[2], seen.shape[2]), f"{length} slots"
        sums[layer, head, :length] += seen[layer, head, :length]


def lowest_slots(
    score: torch.Tensor | None,
    positions: torch.Tensor,
    kept: torch.Tensor,
    lengths: torch.Tensor,
    now: int,
    *,
    recent: torch.Tensor | None = None,
    seen: int = 0,
) -> torch.Tensor:
    """int64 [L,Hk]: the slot of each head whose token is the first to leave, -1 where none may.

    positions int32[L,Hk,C]: of the token in each slot, -1 where it is empty, as it is from lengths int32[L,Hk] on;
    kept bool[L,Hk,C]: never leave. The lowest of score f32[L,Hk,>= longest] leaves first (strided; None: all are
    equal), of equal ones the lowest position. NaN counts as the lowest. Tokens whose position is above now -
    recent[l,h] (int32[L,Hk]) leave after all others, the oldest first. seen > 0: a score is divided first, in fp32,
    by the number of the last `seen` queries, the newest at position `now`, that could see the token: now + 1 -
    position, 1 at least.
    """
    check_lowest(score, positions, kept, lengths, recent)
    out = torch.full(lengths.shape, -1, dtype=torch.int64)
    for at, length in enumerate(lengths.flatten().tolist()):
        layer, head = divmod(at, lengths.shape[1])
        assert 0 <= length <= positions.shape[2], f"{length} slots"
        candidates = []
        for slot, position in enumerate(positions[layer, head, :length].tolist()):
            if position < 0 or kept[layer, head, slot]:
                continue
            value = torch.tensor(0.0) if score is None else score[layer, head, slot]
            if seen:
                value = value / torch.tensor(float(min(max(now + 1 - position, 1), seen)))
            value = value.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
            if recent is not None and position > now - int(recent[layer, head]):
                value = torch.tensor(torch.inf)
            candidates.append((float(value), position, slot))
        if candidates:
            out[layer, head] = min(candidates)[2]
    return out


def keep_highest(values: torch.Tensor, positions: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """bool [L,Hk,C]: the counts[l,h] slots of each head with the highest of values f64[L,Hk,C], no NaN among them.

    positions int32[L,Hk,C]: of the token in each slot, -1 where it is empty and never kept. Of equal values the highest
    position is kept. counts int32[L,Hk], no more than a head has tokens.
    """
    check_highest(values, positions, counts)
    out = torch.zeros(values.shape, dtype=torch.bool)
    for at, count in enumerate(counts.flatten().tolist()):
        layer, head = divmod(at, counts.shape[1])
        held = torch.nonzero(positions[layer, head] >= 0)[:, 0].tolist()
        assert 0 <= count <= len(held), f"{count} of {len(held)} tokens"
        best = sorted((float(values[layer, head, i]), int(positions[layer, head, i]), i) for i in held)
        out[layer, head, [i for _, _, i in best[len(best) - count :]]] = True
    return out
