"""The operations of `kernels.ops` for machines without a C++ compiler, in plain torch.

Pages are gathered into dense rows and the query heads of a group share one matrix product. Sequences are
computed one by one, so that a result never depends on what else is in the batch.
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
from kernels.reference import UNOBSERVED, copy_page, gather, gather_heads, read_pages, reduce_group

__all__ = [
    "add_seen",
    "append",
    "column_sums",
    "copy_page",
    "gather",
    "gather_heads",
    "keep_highest",
    "lowest_slots",
    "move_slots",
    "paged_decode_attention",
    "scatter",
    "scatter_heads",
]


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
    """See `kernels.reference.paged_decode_attention`. Computed in fp32 throughout."""
    check_pool(pool, layout)
    check_tables(tables, lengths, rows, q.shape[0])
    check_decode(q, layout, tables, starts, sinks)
    check_mass(mass, reduce, q.shape[0], tables.shape[1])
    kv_heads = tables.shape[1]
    out = torch.empty(q.shape, dtype=q.dtype)
    lse = torch.empty(q.shape[:2], dtype=torch.float32)
    grouped_sinks = None if sinks is None else sinks.view(kv_heads, -1)
    for b, row in enumerate(rows.tolist()):
        start, stops = int(starts[row]), lengths[row]
        longest = int(stops.max())
        assert 0 <= start < int(stops.min()), f"row {row}: a head has no slot in [{start}, length)"
        assert longest <= tables.shape[2] * layout.slots, f"row {row}: slots leave the page table"
        first = start // layout.slots
        k, v, valid = _dense(pool, layout, tables[row], first, stops, start)
        logits = q[b].float().unflatten(0, (kv_heads, -1)) @ k.transpose(1, 2) * scale
        if softcap > 0.0:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits.masked_fill(~valid[:, None], -torch.inf)
        top = logits.amax(dim=-1, keepdim=True)
        if grouped_sinks is not None:
            top = torch.maximum(top, grouped_sinks[..., None])
        # Dividing at the end keeps fp32 exact: subtracting a logsumexp would round every weight the same way.
        weights = torch.exp(logits - top)
        total = weights.sum(dim=-1, keepdim=True)
        lse[b] = (top + torch.log(total)).flatten()
        if grouped_sinks is not None:
            total = total + torch.exp(grouped_sinks[..., None] - top)
        out[b] = (weights @ v / total).flatten(0, 1)
        if mass is not None and reduce is not None and reduce[b] != UNOBSERVED:
            assert longest <= mass.shape[2], f"row {row}: {longest} slots, mass holds {mass.shape[2]}"
            found = reduce_group(weights / total, int(reduce[b]))
            for head, stop in enumerate(stops.tolist()):
                skipped = first * layout.slots
                mass[b, head, start:stop] = found[head, start - skipped : stop - skipped]
    return out, lse


def _dense(
    pool: torch.Tensor, layout: PageLayout, tables: torch.Tensor, first: int, stops: torch.Tensor, start: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values f32[Hk,N,D] of pages `first` onwards of tables [Hk,P], and which count: bool[Hk,N]."""
    last = -(-int(stops.max()) // layout.slots)
    pages = tables[:, first:last]
    used = torch.arange(first, last) * layout.slots < stops[:, None]
    pages = torch.where(used, pages, pages[:, :1])
    assert int(pages.min()) >= 0 and int(pages.max()) < pool.shape[0], "page outside the pool"
    keys, values = (rows.flatten(1, 2).float() for rows in read_pages(pool, layout, pages))
    slots = torch.arange(first * layout.slots, last * layout.slots)
    valid = (slots >= start) & (slots < stops[:, None])
    # Unused slots hold anything, NaN included, and 0 * NaN is NaN.
    values[:, : start - first * layout.slots] = 0
    for head, stop in enumerate(stops.tolist()):
        values[head, stop - first * layout.slots :] = 0
    return keys, values, valid


def append(
    pool: torch.Tensor,
    layout: PageLayout,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    rows: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> None:
    """See `kernels.reference.append`."""
    check_pool(pool, layout)
    check_tables(tables, lengths, rows, k.shape[0])
    check_vectors(k, v, layout, (rows.shape[0], tables.shape[1]))
    chosen = rows.long()
    slots = lengths[chosen].long()
    assert bool(((slots >= 0) & (slots < tables.shape[2] * layout.slots)).all()), (
        "no page for an appended slot"
    )
    pages = tables[chosen].gather(2, (slots // layout.slots)[..., None])[..., 0]
    _write(pool, layout, pages.flatten(), (slots % layout.slots).flatten(), k.flatten(0, 1), v.flatten(0, 1))


def scatter(
    pool: torch.Tensor,
    layout: PageLayout,
    pages: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first_slot: int = 0,
) -> None:
    """See `kernels.reference.scatter`."""
    scatter_heads(pool, layout, pages[None], k[None], v[None], first_slot)


def scatter_heads(
    pool: torch.Tensor,
    layout: PageLayout,
    tables: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first_slot: int = 0,
) -> None:
    """See `kernels.reference.scatter_heads`."""
    check_pool(pool, layout)
    count = k.shape[1]
    check_span(tables, layout, first_slot, first_slot + count)
    check_vectors(k, v, layout, (tables.shape[0], count))
    slots = torch.arange(first_slot, first_slot + count)
    pages = tables[:, slots // layout.slots]
    positions = (slots % layout.slots).expand(tables.shape[0], count)
    _write(pool, layout, pages.flatten(), positions.flatten(), k.flatten(0, 1), v.flatten(0, 1))


def _write(
    pool: torch.Tensor,
    layout: PageLayout,
    pages: torch.Tensor,
    positions: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> None:
    """Write vectors k and v [m,D] to slot positions[m] of pages[m]."""
    if not pages.numel():
        return
    assert int(pages.min()) >= 0 and int(pages.max()) < pool.shape[0], "page outside the pool"
    padding = (0, layout.padded_dim - layout.head_dim)
    k, v = torch.nn.functional.pad(k, padding), torch.nn.functional.pad(v, padding)
    data = pool[:, : layout.tiles * layout.tile_bytes].view(layout.dtype)
    data = data.unflatten(1, (layout.tiles, 2, TILE * layout.padded_dim))
    page, tile, token = pages.long(), positions // TILE, positions % TILE
    if layout.dtype is torch.bfloat16:
        keys = data[:, :, 0].unflatten(2, (layout.padded_dim // 2, TILE, 2))
        values = data[:, :, 1].unflatten(2, (TILE // 2, layout.padded_dim, 2))
        keys[page, tile, :, token] = k.unflatten(1, (-1, 2))
        values[page, tile, token // 2, :, token % 2] = v
    else:
        data[:, :, 0].unflatten(2, (layout.padded_dim, TILE))[page, tile, :, token] = k
        data[:, :, 1].unflatten(2, (TILE, layout.padded_dim))[page, tile, token] = v


_COLUMNS = 128
"""Keys of one product in `column_sums`: few enough that little work above the diagonal is done in vain."""


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
    """See `kernels.reference.column_sums`. Computed in fp32 throughout."""
    check_columns(q, k, lse, start, out)
    kv_heads, stop = k.shape[0], start + q.shape[1]
    queries = q.float().unflatten(0, (kv_heads, -1))
    log_sums = lse.unflatten(0, (kv_heads, -1)).unsqueeze(-1)
    positions = torch.arange(stop)
    group = queries.shape[1]
    for head in range(kv_heads):
        for first in range(0, stop, _COLUMNS):
            last = min(stop, first + _COLUMNS)
            above = max(0, first - start)  # rows that see none of these keys
            rows = queries[head, :, above:]
            logits = (rows.reshape(-1, q.shape[2]) @ k[head, first:last].float().T).view(
                group, -1, last - first
            )
            logits *= scale
            if softcap > 0.0:
                logits = torch.tanh(logits.div_(softcap)).mul_(softcap)
            weights = logits.sub_(log_sums[head, :, above:]).exp_()
            weights.masked_fill_(positions[first:last] > positions[start + above :, None], 0.0)
            out[head, first:last] += weights.sum(dim=(0, 1)) / group


def move_slots(pool: torch.Tensor, layout: PageLayout, tables: torch.Tensor, sources: torch.Tensor) -> None:
    """See `kernels.reference.move_slots`."""
    check_moves(sources, tables)
    slots = torch.arange(sources.shape[1])
    head, slot = torch.nonzero((sources >= 0) & (sources != slots), as_tuple=True)
    if not len(head):
        return
    source = sources[head, slot]
    old, new = tables[head, source // layout.slots], tables[head, slot // layout.slots]
    data = pool[:, : layout.tiles * layout.tile_bytes].view(layout.dtype)
    data = data.unflatten(1, (layout.tiles, 2, TILE * layout.padded_dim))
    assert int(old.min()) >= 0 and int(old.max()) < pool.shape[0], "page outside the pool"
    at = old.long(), source % layout.slots // TILE
    token = source % TILE
    if layout.dtype is torch.bfloat16:
        keys = data[:, :, 0].unflatten(2, (layout.padded_dim // 2, TILE, 2))[(*at, slice(None), token)]
        values = data[:, :, 1].unflatten(2, (TILE // 2, layout.padded_dim, 2))
        values = values[(*at, token // 2, slice(None), token % 2)]
    else:
        keys = data[:, :, 0].unflatten(2, (layout.padded_dim, TILE))[(*at, slice(None), token)]
        values = data[:, :, 1].unflatten(2, (TILE, layout.padded_dim))[(*at, token)]
    dim = layout.head_dim
    _write(pool, layout, new, slot % layout.slots, keys.flatten(1)[:, :dim], values[:, :dim])


def add_seen(sums: torch.Tensor, seen: torch.Tensor, lengths: torch.Tensor) -> None:
    """See `kernels.reference.add_seen`."""
    check_seen(sums, seen, lengths)
    longest = int(lengths.max())
    assert int(lengths.min()) >= 0 and longest <= min(sums.shape[2], seen.shape[2]), f"{longest} slots"
    used = torch.arange(longest) < lengths.unsqueeze(-1)
    sums[..., :longest] += torch.where(used, seen[..., :longest], 0.0)


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
    """See `kernels.reference.lowest_slots`."""
    check_lowest(score, positions, kept, lengths, recent)
    longest = int(lengths.max())
    most = positions.shape[2] if score is None else min(positions.shape[2], score.shape[2])
    assert int(lengths.min()) >= 0 and longest <= most, f"{longest} slots"
    if not longest:
        return torch.full(lengths.shape, -1)
    positions, kept = positions[..., :longest], kept[..., :longest]
    stays = kept | (positions < 0)
    if score is None:
        values = torch.zeros(positions.shape)
    elif seen:
        queries = (now + 1 - positions).clamp_(min=1, max=seen)
        values = score[..., :longest] / queries.float()  # dividing by integers is twenty times slower
    else:
        values = score[..., :longest].clone()
    values.masked_fill_(values.isnan(), -torch.inf).masked_fill_(stays, torch.inf)
    if recent is not None:
        values.masked_fill_(positions > now - recent.unsqueeze(-1), torch.inf)
    stays |= values > values.amin(-1, keepdim=True)
    nobody = torch.iinfo(torch.int32).max
    oldest, slots = positions.masked_fill(stays, nobody).min(-1)
    return torch.where(oldest < nobody, slots, -1)


def keep_highest(values: torch.Tensor, positions: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """See `kernels.reference.keep_highest`."""
    check_highest(values, positions, counts)
    held = positions >= 0
    assert int(counts.min()) >= 0 and bool((counts <= held.sum(-1)).all()), "more than there are tokens"
    newest_first = positions.argsort(dim=-1, descending=True)
    ordered = values.masked_fill(~held, -torch.inf).gather(-1, newest_first)
    # Empty slots come last in the first order, and stay last among equals.
    by_value = ordered.sort(dim=-1, descending=True, stable=True).indices
    stays = torch.arange(values.shape[-1]) < counts.unsqueeze(-1)
    return torch.zeros_like(held).scatter_(-1, newest_first.gather(-1, by_value), stays)
