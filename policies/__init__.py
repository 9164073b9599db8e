"""Decisions, pure: which tokens of a prompt survive. Values in, values out."""

from __future__ import annotations

import inspect
from importlib import import_module

from policies.expected_attention import ExpectedAttention
from policies.full import Full
from policies.h2o import H2O
from policies.keydiff import KeyDiff
from policies.knorm import Knorm
from policies.policy import LayerView, Needs, ObservedLayer, Observer, Policy, Selection
from policies.random_baseline import Random
from policies.recipe import Recipe, RecipeError, make_recipe, register_options
from policies.scissorhands import Scissorhands
from policies.snapkv import SnapKV
from policies.streaming_llm import SlidingWindow, StreamingLLM
from policies.tova import Tova

POLICIES: dict[str, type[Policy]] = {
    "full": Full,
    "snapkv": SnapKV,
    "h2o": H2O,
    "scissorhands": Scissorhands,
    "tova": Tova,
    "expected_attention": ExpectedAttention,
    "keydiff": KeyDiff,
    "knorm": Knorm,
    "streaming_llm": StreamingLLM,
    "sliding_window": SlidingWindow,
    "random": Random,
}


def get_policy(recipe: Recipe) -> Policy:
    """The policy that a recipe names, set up with it.

    A recipe may have been made in another process, which had loaded its policy by import path: so do we, then.
    """
    if recipe.policy not in POLICIES:
        load_policy(recipe.policy)
    return POLICIES[recipe.policy](recipe)


def load_policy(path: str) -> str:
    """Register the policy class at "package.module:Class" under that very name, which it returns, for recipes to name.

    The class attribute `options` names the recipe fields that it reads beside those of every evicting policy. Imports
    the module: never call it with what a client sent. Loading twice is fine. Raises `RecipeError` about the field
    "policy" where the path names no such class.
    """
    if path in POLICIES:
        return path
    valid = f'{", ".join(POLICIES)}, or "package.module:Class" of a policy that can be imported'
    module, _, name = path.partition(":")
    if not module or not name:
        raise RecipeError("policy", f"unknown policy {path!r}", valid)
    try:
        found = getattr(import_module(module), name)
    except Exception as error:  # whatever the module does while it is imported
        problem = f"{path!r} cannot be loaded: {type(error).__name__}: {error}"
        raise RecipeError("policy", problem, valid) from error
    if not (isinstance(found, type) and issubclass(found, Policy)) or inspect.isabstract(found):
        raise RecipeError("policy", f"{path!r} is no class that implements policies.Policy", valid)
    if not isinstance(getattr(found, "needs", None), Needs):
        raise RecipeError("policy", f"{path!r} does not say what it `needs`", valid)
    try:
        register_options(path, found.options)
    except ValueError as error:
        raise RecipeError("policy", str(error), valid) from error
    POLICIES[path] = found
    return path


__all__ = [
    "H2O",
    "POLICIES",
    "ExpectedAttention",
    "Full",
    "KeyDiff",
    "Knorm",
    "LayerView",
    "Needs",
    "ObservedLayer",
    "Observer",
    "Policy",
    "Random",
    "Recipe",
    "RecipeError",
    "Scissorhands",
    "Selection",
    "SlidingWindow",
    "SnapKV",
    "StreamingLLM",
    "Tova",
    "get_policy",
    "load_policy",
    "make_recipe",
]
