"""SnapKV (arXiv 2404.14469), in the project's reading of it: ALGORITHMS.md sections 2.3 and 3.1."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.select import pool_scores
from kernels.window import window_scores
from policies.policy import LayerView, Needs, Policy


class SnapKV(Policy):
    """Keeps what the last `window` queries of the prompt attend to, and its neighbourhood.

    Per kv head: attention averaged over the window, then reduced over the query group (`group`) and pooled over
    positions (`kernel`, `pool`), or the other way round (`order`). Differs from the published code in selecting and
    storing per kv head (a group's worth of memory less), in protecting the first `sinks` tokens, in observing the
    queries before the chat template's tail, and in a stated tie rule.
    """

    needs = Needs.LAST_QUERIES

    def score(self, layer: LayerView) -> Tensor:
        """float32 [Hk, N]: pooled attention mass before the window, plain mass inside it, zeros in the tail."""
        recipe = self.recipe
        queries, keys = layer.window(self.window, recipe.tail)
        out = layer.keys.new_zeros(layer.kv_heads, layer.tokens, dtype=torch.float32)
        rows, end = queries.shape[1], keys.shape[1]
        if rows == 0:
            return out
        pool_first = recipe.order == "pool_reduce"
        scores = window_scores(
            queries,
            keys,
            layer.scale,
            softcap=layer.softcap,
            sinks=layer.sinks,
            group_reduce="none" if pool_first else "max" if recipe.group == "max" else "mean",
        )
        # The window's own mass must not leak into its neighbours: they would win by position alone.
        prefix = end - rows
        scores[:, :prefix] = pool_scores(scores[:, :prefix], recipe.kernel, recipe.pool)
        if pool_first:
            grouped = scores.view(layer.kv_heads, -1, end)
            scores = grouped.amax(1) if recipe.group == "max" else grouped.mean(1)
        out[:, :end] = scores
        return out
