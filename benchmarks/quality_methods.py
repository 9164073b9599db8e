"""The methods that are compared: names, the recipe fields behind them, and the budgets each is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from policies.named import choose_recipe
from policies.recipe import Recipe
from policies.spans import PromptMap

BUDGETS = (0.5, 0.25, 0.125, 0.0625)
"""Share of the prompt's tokens that every kv head keeps."""

METHODS: Mapping[str, Mapping[str, object]] = {
    "snapkv": {"policy": "snapkv"},
    "snapkv kernel 5": {"policy": "snapkv", "kernel": 5},
    "snapkv ada": {"policy": "snapkv", "heads": "ada"},
    "snapkv pyramid": {"policy": "snapkv", "layers": "pyramid"},
    "snapkv critical": {"policy": "snapkv", "critical": True},
    "snapkv:paper": {"recipe": "snapkv:paper"},
    "snapkv:kvpress": {"recipe": "snapkv:kvpress"},
    "h2o": {"policy": "h2o"},
    "scissorhands": {"policy": "scissorhands"},
    "tova": {"policy": "tova"},
    "expected_attention": {"policy": "expected_attention"},
    "expected_attention ada": {"policy": "expected_attention", "heads": "ada", "epsilon": 0.01},
    "keydiff": {"policy": "keydiff"},
    "knorm": {"policy": "knorm"},
    "streaming_llm": {"policy": "streaming_llm"},
    "sliding_window": {"policy": "sliding_window"},
    "random": {"policy": "random"},
}

PRESETS = ("summarize", "qa", "code", "chat")
"""Named recipes for tasks: measured at their own budgets."""

FULL = "full"


@dataclass(frozen=True)
class Method:
    """One line of the table: `budget` is the share of the prompt, None where the recipe's own is used."""

    name: str
    fields: Mapping[str, object]
    budget: float | None

    def recipe(self, tokens: int) -> Recipe:
        """On a prompt of `tokens` tokens without spans."""
        given = dict(self.fields) if self.budget is None else {**self.fields, "budget": self.budget}
        return choose_recipe(given, PromptMap(tokens, {}))


def methods(names: tuple[str, ...] = (), budgets: tuple[float, ...] = BUDGETS) -> list[Method]:
    """All methods at all budgets and the presets at their own, or those of `names`; not the full cache."""
    wanted = names or (*METHODS, *PRESETS)
    found = [Method(name, METHODS[name], budget) for name in wanted if name in METHODS for budget in budgets]
    return found + [Method(name, {"recipe": name}, None) for name in wanted if name in PRESETS]


FULL_METHOD = Method(FULL, {"policy": "full"}, None)
