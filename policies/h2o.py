"""H2O (arXiv 2306.14048), the paper's rule per kv head: ALGORITHMS.md section 3.2.

The published code has four readings of it, some of which look into the future; this is the causal one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.ops import column_sums
from policies.policy import LayerView, Needs, ObservedLayer, Observer, Policy


class H2O(Policy):
    """Keeps the heavy hitters: tokens that all queries together gave the most attention, beside the most recent.

    `normalize` "visible_count" divides a token's sum by the number of queries that could see it; "none" is the
    paper's plain sum, which favours the first tokens because they collect the most terms.
    """

    needs = Needs.ALL_QUERIES

    def observer(self, layer: ObservedLayer) -> Observer:
        return ColumnSums(layer)

    def score(self, layer: LayerView) -> Tensor:
        """float32 [Hk, N]: attention received, group mean, in sum or per query that could see the token."""
        sums = layer.observed
        assert isinstance(sums, Tensor), "h2o scores what its observer has seen"
        if self.recipe.normalize == "none":
            return sums
        return sums / torch.arange(layer.tokens, 0, -1, dtype=torch.float32, device=sums.device)


class ColumnSums:
    """Sums the columns of a prompt's attention matrix while its pieces are computed."""

    def __init__(self, layer: ObservedLayer) -> None:
        self._layer = layer
        self._sums: Tensor | None = None

    def add(self, queries: Tensor, keys: Tensor, lse: Tensor, start: int) -> None:
        layer = self._layer
        if self._sums is None:
            self._sums = keys.new_zeros(layer.kv_heads, layer.tokens, dtype=torch.float32)
        column_sums(queries, keys, lse, layer.scale, start, self._sums, softcap=layer.softcap)

    def result(self) -> Tensor:
        """float32 [Hk, N]: attention received from every query of the prompt, group mean."""
        assert self._sums is not None, "the prompt had no queries"
        return self._sums
