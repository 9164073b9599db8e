"""A scorer of your own: keep the tokens whose values are large where the last queries look.

Put this file on the Python path of the service and name it in a recipe by its import path:

    from policies import load_policy, make_recipe

    recipe = make_recipe(policy=load_policy("value_norm:ValueNorm"), budget=512, window=16)

Budgets, protected tokens, sharing between heads and decode rules come with the recipe; only `score` is yours.
"""

from __future__ import annotations

from torch import Tensor

from policies import LayerView, Needs, Policy


class ValueNorm(Policy):
    """Scores a token by the attention that the observed window pays it, times the norm of its value."""

    needs = Needs.LAST_QUERIES
    options = ("window",)

    def score(self, layer: LayerView) -> Tensor:
        """float32 [Hk, N]: attention times ‖v‖; higher means keep."""
        attention = layer.window_mass(self.window, self.recipe.tail)
        return attention * layer.values.float().norm(dim=-1)
