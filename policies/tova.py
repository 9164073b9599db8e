"""TOVA (arXiv 2401.06104): ALGORITHMS.md section 8.2."""

from __future__ import annotations

from torch import Tensor

from policies.policy import LayerView, Needs, Policy


class Tova(Policy):
    """Keeps what the last query attends to: one set for all heads, by the mean over all of them."""

    needs = Needs.LAST_QUERIES
    same_for_all_heads = True

    def score(self, layer: LayerView) -> Tensor:
        """float32 [Hk, N]: attention of the observed queries (one by default), mean over all heads of the layer."""
        return layer.window_mass(self.window, self.recipe.tail).mean(0).expand(layer.kv_heads, -1)
