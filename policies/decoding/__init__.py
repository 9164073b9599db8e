"""What leaves the cache while a sequence is generated, pure: state, rules, and the way from a recipe to its rule."""

from __future__ import annotations

from policies.decoding.grow import Grow
from policies.decoding.h2o import H2O
from policies.decoding.rule import DecodeRule, LayerKeys
from policies.decoding.scissorhands import Scissorhands
from policies.decoding.snapkv import SnapKV
from policies.decoding.state import Change, Compact, DecodeState, Victims
from policies.decoding.streaming import Streaming
from policies.decoding.tova import TOVA
from policies.recipe import Recipe

RULES: dict[str, type[DecodeRule]] = {
    "grow": Grow,
    "h2o": H2O,
    "scissorhands": Scissorhands,
    "streaming_llm": Streaming,
    "sliding_window": Streaming,
    "tova": TOVA,
    "snapkv": SnapKV,
}


def get_rule(recipe: Recipe) -> DecodeRule:
    """The rule that a recipe names, set up with it."""
    return RULES[recipe.decode.rule](recipe)


__all__ = [
    "RULES",
    "Change",
    "Compact",
    "DecodeRule",
    "DecodeState",
    "LayerKeys",
    "Victims",
    "get_rule",
]
