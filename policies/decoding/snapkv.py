"""SnapKV (arXiv 2404.14469) again and again while decoding, as kvpress' DecodingPress does it: ALGORITHMS.md 2.4."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from kernels.select import pool_scores
from policies.decoding.rule import DecodeRule, LayerKeys
from policies.decoding.state import Change, DecodeState
from policies.policy import LayerView, Selection


class SnapKV(DecodeRule):
    """Every `every` tokens, back to the cap: keeps what the newest `window` queries attend to, and its neighbourhood.

    The score of a cached token is its mean causal softmax attention over those queries and over their group, pooled
    over its neighbours in the cache; the newest `window` tokens stay. The queries may reach back into the prompt.
    """

    in_order: ClassVar[bool] = True  # neighbours in the cache stay neighbours

    @property
    def query_window(self) -> int:
        assert self.decode.window is not None
        return self.decode.window

    @property
    def every(self) -> int:
        assert self.decode.every is not None
        return self.decode.every

    def prompt_queries(self, n: int) -> int:
        return min(n, self.query_window)

    def prompt_arrays(self, layer: LayerView, selection: Selection) -> dict[str, Tensor]:
        """`queries` [Hq, W, D] in the model's dtype: the prompt's last queries, position p at place p mod W.

        `query_heads` int32 [1]: Hq, which layers need not share.
        """
        window = self.query_window
        given, _ = layer.window(window, tail=0)
        rows = given.shape[1]
        ring = given.new_zeros(given.shape[0], window, given.shape[2])
        ring[:, torch.arange(layer.tokens - rows, layer.tokens, device=ring.device) % window] = given
        return {"queries": ring, "query_heads": torch.tensor([len(ring)], dtype=torch.int32)}

    def carried(self, n: int, running: bool) -> dict[str, tuple[torch.dtype | None, int]]:
        return {"queries": (None, 4), "query_heads": (torch.int32, 2)}

    def extra_names(self) -> tuple[str, ...]:
        return ("queries", "query_heads")

    def _prepare(self, state: DecodeState) -> None:
        state.derived["recent"] = torch.full_like(state.lengths, self.query_window)

    def keep_query(self, state: DecodeState, layer: int, query: Tensor) -> None:
        heads, dim = query.shape
        state.extra["queries"][layer, :heads, (state.position + 1) % self.query_window, :dim] = query

    def wants_keys(self, state: DecodeState) -> bool:
        grown = self.every if state.settled else 1
        return bool(((state.counts >= state.caps + grown) & state.heads_on_host).any())

    def evict(self, state: DecodeState, keys: Sequence[LayerKeys] | None = None) -> Change:
        return self._evict_together(state, keys)

    def _score(self, state: DecodeState, keys: Sequence[LayerKeys] | None) -> Tensor:
        assert keys is not None and len(keys) == len(state.counts), (
            "SnapKV scores the cached keys of every layer"
        )
        # Waits for the device, as the gathering of keys does.
        score = torch.zeros(state.positions.shape, dtype=torch.float32, device=state.positions.device)
        rows = min(self.query_window, state.position + 1)
        at = torch.arange(state.position + 1 - rows, state.position + 1, device=score.device)
        query_heads = state.extra["query_heads"][:, 0].tolist()
        for number, layer in enumerate(keys):
            heads, slots, dim = layer.keys.shape
            queries = state.extra["queries"][number, : query_heads[number], :, :dim][
                :, at % self.query_window
            ]
            grouped = queries.float().view(heads, -1, rows, dim)
            positions = state.positions[number, :heads, :slots]
            score[number, :heads, :slots] = _mean_attention(grouped, at, positions, layer)
        kernel, pool = self.decode.kernel, self.decode.pool
        assert kernel is not None and pool is not None
        return pool_scores(score, kernel, pool)


def _mean_attention(queries: Tensor, at: Tensor, positions: Tensor, layer: LayerKeys) -> Tensor:
    """f32 [Hk, C]: mean attention of queries f32 [Hk, G, W, D] at positions `at` over keys at `positions` [Hk, C]."""
    out = torch.zeros(positions.shape, dtype=torch.float32, device=positions.device)
    for head, keys in enumerate(layer.keys):
        # Undefined keys may hold anything, NaN too.
        held = positions[head] >= 0
        logits = queries[head] @ torch.where(held.unsqueeze(1), keys.float(), 0.0).t() * layer.scale
        if layer.softcap:
            logits = torch.tanh(logits / layer.softcap) * layer.softcap
        seen = held & (positions[head] <= at.unsqueeze(1))
        logits.masked_fill_(~seen, float("-inf"))
        attention = torch.softmax(
            logits, -1
        ).nan_to_num_()  # a query may see none of the tokens that are left
        if layer.sinks is not None:
            sinks = layer.sinks.float().view(len(layer.keys), -1)[head].view(-1, 1, 1)
            attention *= torch.sigmoid(logits.logsumexp(-1, keepdim=True) - sinks)
        out[head] = attention.mean((0, 1))
    return out
