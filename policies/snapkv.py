"""SnapKV (arXiv 2404.14469), in the project's reading of it: ALGORITHMS.md sections 2.3 and 3.1."""

from __future__ import annotations

import torch

from kernels.select import pool_scores
from kernels.window import window_scores
from policies.policy import LayerView, Needs, Policy


class SnapKV(Policy):
    """Keeps what the last `window` queries of the prompt attend to, and its neighbourhood.

    Per kv head: mean attention over the window and the head's query group, then pooling over positions.
    Differs from the published code in selecting and storing per kv head (a group's worth of memory less), in
    protecting the first `sinks` tokens, and in a stated tie rule.
    """

    needs = Needs.LAST_QUERIES

    def score(self, layer: LayerView) -> torch.Tensor:
        """float32 [Hk, N]: pooled attention mass before the window, plain mass inside it."""
        assert layer.queries is not None
        scores = window_scores(
            layer.queries,
            layer.keys,
            layer.scale,
            softcap=layer.softcap,
            sinks=layer.sinks,
        )
        # The window's own mass must not leak into its neighbours: they would win by position alone.
        prefix = layer.tokens - layer.queries.shape[1]
        scores[:, :prefix] = pool_scores(scores[:, :prefix], self.recipe.kernel, self.recipe.pool)
        return scores
