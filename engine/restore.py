"""Snapshots in and out of the page pool: scatter packed survivors into pages, gather pages back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.pool import PagePool
from engine.snapshot import SnapshotLayout, SnapshotMeta
from kernels import ops


def restore(pool: PagePool, layout: SnapshotLayout, buffer: Tensor) -> int:
    """Open a row and fill it from a packed snapshot. Raises `OutOfPages` with nothing changed.

    A windowed layer's slot is its token's position, so that attention over it is cut into the same splits, and gives
    the same bits, however often the sequence moves.
    """
    windowed = np.array([layer.window is not None for layer in pool.spec.layers])
    row = pool.open(layout.meta.counts, np.where(windowed, layout.meta.firsts, 0))
    try:
        starts = pool.first_slots(row)
        for index in range(len(pool.spec.layers)):
            pages, memory, pool_layout = pool.pages(row, index), pool.memory, pool.layouts[index]
            start = int(starts[index])
            if layout.even(index):
                k, v = layout.layer(buffer, index)
                ops.scatter_heads(memory, pool_layout, pages, k, v, start)
                continue
            for head in range(len(pages)):
                k, v = layout.head(buffer, index, head)
                ops.scatter(memory, pool_layout, pages[head], k, v, start)
        pool.see_window(np.array([row]))
    except BaseException:
        pool.close(row)
        raise
    return row


def take_snapshot(
    pool: PagePool, row: int, meta: SnapshotMeta, tokens: Sequence[int]
) -> tuple[SnapshotLayout, Tensor]:
    """Pack a running row; `meta` is what it was restored from, `tokens` prompt and generated ids so far.

    The last token's KV is not in the cache yet (it is the next step's input), so positions run to len(tokens)-2.
    """
    counts, starts = pool.counts(row), pool.first_slots(row)
    kept = counts - np.where(np.arange(counts.shape[1])[None] < _heads(pool)[:, None], starts[:, None], 0)
    grown = _grow(pool, meta, kept, len(tokens) - 1)
    layout = SnapshotLayout(pool.spec, grown_meta(meta, kept, *grown, tokens))
    buffer = torch.empty(layout.nbytes, dtype=torch.uint8)
    layout.write_metadata(buffer)
    for index in range(len(pool.spec.layers)):
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


def grown_meta(
    meta: SnapshotMeta,
    counts: NDArray[np.int32],
    firsts: NDArray[np.int64],
    positions: dict[tuple[int, int], NDArray[np.int32]],
    tokens: Sequence[int],
) -> SnapshotMeta:
    """`meta` after decoding went on: same prompt, recipe and selection point."""
    return SnapshotMeta(
        meta.prompt_tokens, np.asarray(tokens, np.uint32), meta.recipe_id, counts, firsts, positions
    )


def _heads(pool: PagePool) -> NDArray[np.int64]:
    return np.array([layer.kv_heads for layer in pool.spec.layers])


def _grow(
    pool: PagePool, meta: SnapshotMeta, kept: NDArray[np.int32], cached: int
) -> tuple[NDArray[np.int64], dict[tuple[int, int], NDArray[np.int32]]]:
    """Positions of a row whose decoded tokens were appended in order up to position `cached` - 1."""
    firsts = meta.firsts.copy()
    positions = {}
    for index, layer in enumerate(pool.spec.layers):
        if firsts[index] >= 0:
            firsts[index] = cached - int(kept[index, 0])
            continue
        for head in range(layer.kv_heads):
            old = meta.positions[index, head]
            new = np.arange(cached - (int(kept[index, head]) - len(old)), cached, dtype=np.int32)
            positions[index, head] = np.concatenate([old, new])
    return firsts, positions
