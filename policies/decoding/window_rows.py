"""Thresholds on rows of attention that differ from row to row or from sum to sum: the two readings beside 1/t."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from policies.policy import LayerView

_BLOCK_ROWS = 32


def low_below(queries: Tensor, layer: LayerView, weights: Tensor, limits: Tensor) -> Tensor:
    """How often the last W queries [Hq, W, D] gave a key they saw less than `limits` f32 [Hk, R], group maximum.

    weights: f32 [Hk, R, W], rows that count for each of the R results. Returns f32 [Hk, R, N].
    """
    kv_heads, n = layer.kv_heads, layer.tokens
    window, dim = queries.shape[1:]
    grouped = queries.float().view(kv_heads, -1, window, dim)
    sinks = None if layer.sinks is None else layer.sinks.float().view(kv_heads, -1, 1, 1)
    places = torch.arange(n, device=queries.device)
    out = torch.zeros(kv_heads, weights.shape[1], n, device=queries.device)
    for head in range(kv_heads):
        keys = layer.keys[head].float().t()
        for start in range(0, window, _BLOCK_ROWS):
            part = slice(start, min(start + _BLOCK_ROWS, window))
            logits = grouped[head, :, part] @ keys * layer.scale
            if layer.softcap:
                logits = torch.tanh(logits / layer.softcap) * layer.softcap
            seen = places <= places[n - window :][part].unsqueeze(1)
            logits = logits.masked_fill(~seen, float("-inf"))
            attention = torch.softmax(logits, -1)
            if sinks is not None:
                attention *= torch.sigmoid(logits.logsumexp(-1, keepdim=True) - sinks[head])
            strongest = attention.amax(0)
            for result, limit in enumerate(limits[head]):
                out[head, result] += weights[head, result, part] @ ((strongest < limit) & seen).float()
    return out


def quantile_of_rows(rows: Tensor, held: Tensor, counts: NDArray[np.int32], share: float) -> Tensor:
    """f32 [L, Hk]: the `share` quantile of each row f32 [L, Hk, C] over its `held` slots, `counts` [L, Hk] of them.

    Linear between neighbours, as `kernels.window.window_low_counts` has it for the prompt's rows.
    """
    ordered = rows.masked_fill(~held, float("inf")).sort(dim=-1).values
    place = share * np.maximum(counts - 1, 0).astype(np.float64)
    lower = np.floor(place).astype(np.int64)
    upper = np.minimum(lower + 1, np.maximum(counts - 1, 0))
    between = torch.from_numpy((place - lower).astype(np.float32)).to(rows.device)
    index = torch.from_numpy(np.stack([lower, upper], -1)).to(rows.device)
    below, above = ordered.gather(-1, index).unbind(-1)
    return torch.lerp(below, above, between)
