"""One decode step over pages: append each sequence's newest token, attend, return logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention import AttentionCall
from engine.model import Model
from engine.pool import PagePool
from kernels import ops


class DecodePort:
    """Attention port of one decode step: token b belongs to pool row rows[b]."""

    def __init__(self, pool: PagePool, rows: NDArray[np.int64]) -> None:
        self._pool = pool
        self._rows = torch.from_numpy(rows.astype(np.int32))
        # The new token is appended before it is attended to, so attention sees one slot more than the pool counts.
        self._lengths = pool.lengths.clone()
        self._lengths[rows] += 1

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        pool, layer = self._pool, call.layer
        heads = key.shape[0]
        layout = pool.layouts[layer]
        tables = pool.tables[:, layer, :heads]
        ops.append(
            pool.memory, layout, tables, pool.lengths[:, layer, :heads], self._rows,
            key.transpose(0, 1).contiguous(), value.transpose(0, 1).contiguous(),
        )  # fmt: skip
        out, _lse = ops.paged_decode_attention(
            query.transpose(0, 1).contiguous(), pool.memory, layout, tables, pool.starts[:, layer],
            self._lengths[:, layer, :heads], self._rows, call.scale, softcap=call.softcap, sinks=call.sinks,
        )  # fmt: skip
        return out


def decode_step(
    model: Model, pool: PagePool, rows: Sequence[int], tokens: Sequence[int], positions: Sequence[int]
) -> Tensor:
    """Append tokens[b] at positions[b] to row rows[b] and return logits [B, vocab].

    Raises `OutOfPages` before anything ran. Results of a row do not depend on the other rows.
    """
    index = np.asarray(rows, np.int64)
    pool.reserve_slot(index)
    logits = model.forward(tokens, positions, DecodePort(pool, index), range(len(rows)))
    pool.advance(index)
    return logits
