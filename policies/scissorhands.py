"""Scissorhands (arXiv 2305.17118), the paper's rule with what it leaves open fixed: ALGORITHMS.md section 3.6."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.window import window_low_counts
from policies.policy import LayerView, Needs, Policy


class Scissorhands(Policy):
    """Keeps the pivotal: tokens that seldom got less than their fair share of attention.

    Over the last `window` queries (the paper's history) a token's low-count is the number of queries that saw it and
    gave it less than `threshold`: "uniform" is 1 / (tokens that the query saw), a number the quantile of the query's
    own attention. The group's maximum decides. Low-counts are small integers, so ties are the rule: more attention
    wins, then the later position.
    """

    needs = Needs.LAST_QUERIES

    def score(self, layer: LayerView) -> Tensor:
        """float64 [Hk, N]: minus the low-count, plus less than one for the attention received."""
        queries, keys = layer.window(self.window, self.recipe.tail)
        out = layer.keys.new_zeros(layer.kv_heads, layer.tokens, dtype=torch.float64)
        rows = queries.shape[1]
        if rows == 0:
            return out
        low, mass = window_low_counts(
            queries,
            keys,
            layer.scale,
            queries.new_ones(layer.kv_heads, 1, rows, dtype=torch.float32),
            threshold="uniform" if self.recipe.threshold == "uniform" else float(self.recipe.threshold),
            softcap=layer.softcap,
            sinks=layer.sinks,
        )
        # No row gives a key more than 1, so the fraction cannot reach a whole count. float32 could not hold both.
        out[:, : keys.shape[1]] = mass[:, 0].double() / (rows + 1) - low[:, 0].double()
        return out
