"""Selection: which tokens of a finished prompt every kv head keeps, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.plan import PromptPlan
from engine.report import SelectionReport
from engine.workspace import Workspace
from policies.policy import LayerView, Selection
from policies.report import budget_entropy, kept_mass


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


@dataclass(frozen=True)
class Survivors:
    """What a prompt leaves: the survivors of every layer, what its decode rule starts from, and the numbers."""

    layers: Sequence[LayerSurvivors]
    arrays: dict[str, Tensor]
    report: SelectionReport


@torch.inference_mode()
def select_survivors(workspace: Workspace, plan: PromptPlan) -> Survivors:
    """Apply a plan to a filled workspace. Raises whatever its policy, or an observer of it, raises.

    Windowed layers keep exactly the tokens that a later query can still see; the policy acts on the others. A layer
    whose budget holds the prompt is kept whole. Where the recipe's decode rule evicts, every scored layer lists its
    positions, whole ones too.
    """
    tokens, rule = plan.tokens, plan.rule
    # The next query (position `tokens`) sees the last window-1 of a windowed layer.
    chosen = [
        LayerSurvivors(
            layer.kv_heads, 0 if layer.window is None else max(0, tokens - layer.window + 1), tokens, None
        )
        for layer in workspace.spec.layers
    ]
    masses: list[Tensor] = []
    arrays: list[dict[str, Tensor]] = []
    for place, index in enumerate(plan.scored):
        if not plan.cut(place) and not rule.evicts:
            continue
        view = layer_view(workspace, plan, place)
        selection = plan.policy.select(view) if plan.cut(place) else _everything(view)
        chosen[index] = _listed(selection, tokens)
        if plan.report and plan.cut(place):
            # Of the tail's queries too: what follows reads the prompt as they do.
            masses.append(kept_mass(view.window_mass(plan.reported_queries, 0), selection))
        arrays.append(rule.prompt_arrays(view, selection) if plan.noted else {})
    counts = tuple(
        tuple(chosen[index].count(head) for head in range(chosen[index].kv_heads)) for index in plan.scored
    )
    start = {}
    if rule.evicts and plan.scored:
        heads = workspace.spec.max_kv_heads
        start = rule.prompt_state(arrays, _padded(counts, heads), tokens, plan.scored)
    entropy = min(1.0, budget_entropy([count for row in counts for count in row]))  # rounds to above 1
    report = SelectionReport(plan.scored, plan.budgets, counts, entropy, _shares(plan, masses))
    return Survivors(chosen, start, report)


def layer_view(workspace: Workspace, plan: PromptPlan, place: int) -> LayerView:
    """Scored layer number `place` of a filled workspace, as the policy sees it. Raises what its observer raised."""
    index = plan.scored[place]
    layer = workspace.spec.layers[index]
    watch = workspace.watches.get(index)
    return LayerView(
        index=index,
        keys=workspace.keys[index],
        values=workspace.values[index],
        queries=None if watch is None else watch.last(plan.queries(place)),
        scale=layer.scale,
        softcap=layer.softcap,
        sinks=layer.sinks,
        budget=plan.budgets[place],
        rotation=layer.rotation,
        output_weight=layer.output_weight,
        observed=None if watch is None else watch.observed(),
    )


def _everything(view: LayerView) -> Selection:
    heads, tokens = view.kv_heads, view.tokens
    rows = torch.arange(tokens, device=view.keys.device).expand(heads, -1)
    return Selection(rows, torch.full((heads,), tokens, device=rows.device))


def _listed(selection: Selection, tokens: int) -> LayerSurvivors:
    """A selection as it is packed. Per-head budgets are read back to the host here."""
    rows = selection.indices.to(torch.int32)
    heads, longest = rows.shape
    counts = selection.counts.tolist() if selection.ragged else [longest] * heads
    return LayerSurvivors(
        heads, 0, tokens, tuple(row[:count] for row, count in zip(rows, counts, strict=True))
    )


def _padded(counts: Sequence[Sequence[int]], heads: int) -> NDArray[np.int32]:
    """int32 [L, heads]: heads that a layer does not have keep nothing."""
    return np.array([[*row, *[0] * (heads - len(row))] for row in counts], np.int32)


def _shares(plan: PromptPlan, masses: Sequence[Tensor]) -> tuple[float, ...] | None:
    """Kept mass of every scored layer; whole ones keep all of it, which needs no measuring."""
    if not (plan.report or plan.whole):
        return None
    measured = iter(torch.stack(list(masses)).tolist() if masses else [])
    return tuple(next(measured) if plan.cut(place) else 1.0 for place in range(len(plan.scored)))
