"""One decode step over pages: append each sequence's newest token, attend, let rules evict, return logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention import AttentionCall
from engine.eviction import RowEviction, StepWatch
from engine.model import Model
from engine.pool import PagePool
from kernels import ops


class DecodePort:
    """Attention port of one decode step: token b belongs to pool row rows[b]; `watch` sees what rules asked for."""

    def __init__(self, pool: PagePool, rows: NDArray[np.int64], watch: StepWatch | None = None) -> None:
        self._pool = pool
        self._watch = watch
        self._rows = torch.from_numpy(rows.astype(np.int32))
        # The new token is appended before it is attended to: one slot more than the pool counts, or a hole less.
        self._lengths = torch.maximum(pool.lengths, pool.write + 1)

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        pool, layer = self._pool, call.layer
        heads = key.shape[0]
        layout = pool.layouts[layer]
        tables = pool.tables[:, layer, :heads]
        if call.stored:
            ops.append(
                pool.memory, layout, tables, pool.write[:, layer, :heads], self._rows,
                key.transpose(0, 1).contiguous(), value.transpose(0, 1).contiguous(),
            )  # fmt: skip
        mass, reduce = (None, None) if self._watch is None else self._watch.mass(call)
        out, _lse = ops.paged_decode_attention(
            query.transpose(0, 1).contiguous(), pool.memory, layout, tables, pool.starts[:, layer],
            self._lengths[:, layer, :heads], self._rows, call.scale, softcap=call.softcap, sinks=call.sinks,
            mass=mass, reduce=reduce,
        )  # fmt: skip
        if self._watch is not None:
            self._watch.note(call, query)
        return out


def decode_step(
    model: Model,
    pool: PagePool,
    rows: Sequence[int],
    tokens: Sequence[int],
    positions: Sequence[int],
    evictions: Sequence[RowEviction | None] = (),
) -> Tensor:
    """Append tokens[b] at positions[b] to row rows[b], evict what its rule says, and return logits [B, vocab].

    `evictions`: per row its eviction, None where it only grows; empty where all do. Raises `OutOfPages` before anything
    ran. Results of a row do not depend on the other rows.
    """
    index = np.asarray(rows, np.int64)
    live = [(b, eviction) for b, eviction in enumerate(evictions) if eviction is not None]
    for _, eviction in live:
        eviction.settle(pool)
    pool.reserve_slot(index)
    if not live:
        logits = model.forward(tokens, positions, DecodePort(pool, index), range(len(rows)))
        pool.advance(index)
        return logits
    places = list(positions)
    for b, eviction in live:
        places[b] = eviction.begin_step(pool, positions[b])
    watch = StepWatch(pool, evictions)
    logits = model.forward(tokens, places, DecodePort(pool, index, watch), range(len(rows)))
    pool.advance(index)
    for b, eviction in live:
        eviction.end_step(pool, watch.seen(b))
    return logits
