"""Decisions, pure: which tokens of a prompt survive. Values in, values out."""

from __future__ import annotations

from policies.full import Full
from policies.policy import LayerView, Needs, Policy, Selection
from policies.recipe import Recipe, RecipeError, make_recipe
from policies.snapkv import SnapKV

POLICIES: dict[str, type[Policy]] = {"full": Full, "snapkv": SnapKV}


def get_policy(recipe: Recipe) -> Policy:
    """The policy that a recipe names, set up with it."""
    return POLICIES[recipe.policy](recipe)


__all__ = [
    "POLICIES",
    "Full",
    "LayerView",
    "Needs",
    "Policy",
    "Recipe",
    "RecipeError",
    "Selection",
    "SnapKV",
    "get_policy",
    "make_recipe",
]
