"""Selection: which tokens of a finished prompt every kv head keeps, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.workspace import Workspace
from policies import get_policy
from policies.policy import LayerView
from policies.recipe import Recipe


@dataclass(frozen=True)
class LayerSurvivors:
    """What one layer keeps of `tokens` prompt tokens.

    Either the range `first` … tokens-1 for every head (`positions` None), or `positions[h]`, ascending int32 [n_h].
    """

    kv_heads: int
    first: int
    tokens: int
    positions: tuple[Tensor, ...] | None

    def count(self, head: int) -> int:
        return self.tokens - self.first if self.positions is None else len(self.positions[head])


def select_survivors(workspace: Workspace, recipe: Recipe) -> list[LayerSurvivors]:
    """Apply a recipe to a filled workspace.

    Windowed layers keep exactly the tokens that a later query can still see; policies act on the others. A prompt that
    fits the budget is kept whole.
    """
    spec, tokens = workspace.spec, workspace.tokens
    policy = get_policy(recipe)
    chosen = []
    for index, layer in enumerate(spec.layers):
        if layer.window is not None:
            # The next query (position `tokens`) sees the last window-1 of them.
            chosen.append(LayerSurvivors(layer.kv_heads, max(0, tokens - layer.window + 1), tokens, None))
        elif policy.keeps_all(tokens):
            chosen.append(LayerSurvivors(layer.kv_heads, 0, tokens, None))
        else:
            selection = policy.select(
                LayerView(
                    index=index,
                    keys=workspace.keys[index],
                    values=workspace.values[index],
                    queries=workspace.queries[index],
                    scale=layer.scale,
                    softcap=layer.softcap,
                    sinks=layer.sinks,
                )
            )
            rows = tuple(selection.head(head).to(torch.int32) for head in range(layer.kv_heads))
            chosen.append(LayerSurvivors(layer.kv_heads, 0, tokens, rows))
    return chosen


def query_window(recipe: Recipe, tokens: int) -> int:
    """How many last queries a prefill must keep for this recipe (0 where nothing will be scored)."""
    policy = get_policy(recipe)
    return 0 if policy.keeps_all(tokens) else policy.queries_wanted(tokens)
