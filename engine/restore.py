"""Snapshots in and out of the page pool: scatter packed survivors into pages, gather pages back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.eviction import RowEviction
from engine.pool import PagePool
from engine.rows import read_layer
from engine.snapshot import SnapshotLayout, SnapshotMeta
from kernels import ops


def restore(
    pool: PagePool, layout: SnapshotLayout, buffer: Tensor, eviction: RowEviction | None = None
) -> int:
    """Open a row and fill it from a packed snapshot. Raises `OutOfPages` with nothing changed.

    A windowed layer's slot is its token's position, so that attention over it is cut into the same splits, and gives
    the same bits, however often the sequence moves. `eviction` is the snapshot's (`open_eviction`), and is bound to the
    row: of a prompt beyond its caps only what stays is written.
    """
    windowed = np.array([layer.window is not None for layer in pool.spec.layers])
    firsts = np.where(windowed, layout.meta.firsts, 0)
    if eviction is not None and eviction.rewrites:
        firsts = pool.early_slots(firsts)
    counts = layout.meta.counts if eviction is None else eviction.counts(layout.meta.counts)
    row = pool.open(counts, firsts)
    try:
        starts = pool.first_slots(row)
        for index in range(len(pool.spec.layers)):
            pages, memory, pool_layout = pool.pages(row, index), pool.memory, pool.layouts[index]
            start = int(starts[index])
            placed = None if eviction is None else eviction.placed(index, layout, buffer)
            if placed is None and layout.even(index):
                k, v = layout.layer(buffer, index)
                ops.scatter_heads(memory, pool_layout, pages, k, v, start)
                continue
            for head in range(len(pages)):
                k, v = layout.head(buffer, index, head) if placed is None else placed[head]
                ops.scatter(memory, pool_layout, pages[head], k, v, start)
        pool.see_window(np.array([row]))
        if eviction is not None:
            eviction.bind(pool, row)
    except BaseException:
        pool.close(row)
        raise
    return row


def take_snapshot(
    pool: PagePool,
    row: int,
    meta: SnapshotMeta,
    tokens: Sequence[int],
    eviction: RowEviction | None = None,
) -> tuple[SnapshotLayout, Tensor]:
    """Pack a running row; `meta` is what it was restored from, `tokens` prompt and generated ids so far.

    The last token's KV is not in the cache yet (it is the next step's input), so positions run to len(tokens)-2. With
    `eviction` slots are packed as they lie, holes too, and the rule's state goes with them.
    """
    counts, starts = pool.counts(row), pool.first_slots(row)
    kept = counts - np.where(np.arange(counts.shape[1])[None] < _heads(pool)[:, None], starts[:, None], 0)
    firsts, positions = _grow(pool, meta, kept, len(tokens) - 1, eviction)
    arrays: dict[str, Tensor] = {}
    if eviction is not None:
        kept, arrays = eviction.counts(kept), eviction.export()
    grown = SnapshotMeta(
        meta.prompt_tokens, np.asarray(tokens, np.uint32), meta.recipe_id, kept, firsts, positions, arrays
    )
    layout = SnapshotLayout(pool.spec, grown)
    buffer = torch.empty(layout.nbytes, dtype=torch.uint8)
    layout.write_metadata(buffer)
    for index in range(len(pool.spec.layers)):
        order = None if eviction is None else eviction.slot_order(index)
        if order is not None:
            _pack_in_order(pool, row, index, order, layout, buffer)
            continue
        pages, memory, pool_layout = pool.pages(row, index), pool.memory, pool.layouts[index]
        start = int(starts[index])
        if layout.even(index):
            k, v = layout.layer(buffer, index)
            ops.gather_heads(memory, pool_layout, pages, start, int(counts[index, 0]), k, v)
            continue
        for head in range(len(pages)):
            k, v = layout.head(buffer, index, head)
            ops.gather(memory, pool_layout, pages[head], start, int(counts[index, head]), k, v)
    return layout, buffer


def _pack_in_order(
    pool: PagePool, row: int, index: int, order: Tensor, layout: SnapshotLayout, buffer: Tensor
) -> None:
    """Pack one layer whose survivors have not moved together yet: `order` int64 [Hk, C] says where each lies."""
    keys, values = read_layer(pool, row, index)
    for head in range(len(keys)):
        k, v = layout.head(buffer, index, head)
        places = order[head, : len(k)]
        torch.index_select(keys[head], 0, places, out=k)
        torch.index_select(values[head], 0, places, out=v)


def _heads(pool: PagePool) -> NDArray[np.int64]:
    return np.array([layer.kv_heads for layer in pool.spec.layers])


def _grow(
    pool: PagePool,
    meta: SnapshotMeta,
    kept: NDArray[np.int32],
    cached: int,
    eviction: RowEviction | None,
) -> tuple[NDArray[np.int64], dict[tuple[int, int], NDArray[np.int32]]]:
    """Positions of a row that has the KV of tokens up to position `cached` - 1.

    The eviction knows those of its layers; in the others decoded tokens were appended in order.
    """
    firsts = meta.firsts.copy()
    positions = {} if eviction is None else eviction.positions()
    for index, layer in enumerate(pool.spec.layers):
        if (index, 0) in positions:
            continue
        if firsts[index] >= 0:
            firsts[index] = cached - int(kept[index, 0])
            continue
        for head in range(layer.kv_heads):
            old = meta.positions[index, head]
            new = np.arange(cached - (int(kept[index, head]) - len(old)), cached, dtype=np.int32)
            positions[index, head] = np.concatenate([old, new])
    return firsts, positions
