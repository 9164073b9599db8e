"""What a prompt-selection policy is: one scoring idea inside mechanics that all policies share.

A method of the literature is a scorer (a subclass of `Policy`) with a budget rule and a protected set, and those two
are the recipe's business: any scorer goes with any of them. Source: ALGORITHMS.md sections 2.1 and 2.3.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from kernels.rotary import Rotation
from kernels.select import allocate_heads, select_topk
from kernels.window import window_scores
from policies.critical import criticality
from policies.recipe import STRUCTURE_SHARE, Recipe
from policies.recipe_checks import Range, share


class Needs(Enum):
    """What a policy must be shown of a layer besides its keys and values; prefill plans its work by it."""

    KEYS = auto()
    """Keys alone: any cached prefix can be used as it is."""

    LAST_QUERIES = auto()
    """Also the queries of the last `Policy.window` + tail prompt tokens: those are always computed."""

    ALL_QUERIES = auto()
    """Also the queries of every prompt token: cached tokens issue none, so the whole prompt is computed."""


@dataclass(frozen=True)
class ObservedLayer:
    """What an observer is told of the full-attention layer that it will watch, before the prompt runs.

    tokens: N, the prompt's length; scale, softcap (0.0 for none), sinks ([Hq], or None) and rotation as in `LayerView`.
    """

    kv_heads: int
    query_heads: int
    head_dim: int
    tokens: int
    scale: float
    softcap: float = 0.0
    sinks: Tensor | None = None
    rotation: Rotation | None = None


class Observer(Protocol):
    """Sees every query of one layer of one prompt while it is computed, so that nobody has to keep them all."""

    def add(self, queries: Tensor, keys: Tensor, lse: Tensor, start: int) -> None:
        """Take in the next piece of the prompt; pieces come in ascending order and leave no gap.

        queries: [Hq, T, D] after RoPE, positions start … start+T-1; keys: [Hk, start+T, D] after RoPE, everything
        that they saw; lse: float32 [Hq, T], log-sum-exp of each query's logits, attention sinks included. The tensors
        are the caller's and change after the call.
        """

    def result(self) -> object:
        """What it found, for `LayerView.observed`; called once, after the last piece."""


@dataclass(frozen=True)
class LayerView:
    """One full-attention layer of one prompt of N tokens, as a policy sees it.

    index: cache layer; keys, values: [Hk, N, D], keys after RoPE, any float dtype; queries: [Hq, Q, D] after RoPE, of
    the last Q tokens, Q at least what `Policy.queries_wanted(N)` says, None where nobody asked for any; scale, softcap
    (0.0 for none) and sinks ([Hq], in the softmax denominator only) as in the layer's attention.
    budget: tokens to keep per kv head, protected ones included; rotation: the layer's RoPE, None where it is not known;
    output_weight: [hidden, Hq * D], what the layer multiplies its heads' outputs by, None where it is not known;
    observed: the result of this policy's observer. The tensors belong to the caller and are only read.
    """

    index: int
    keys: Tensor
    values: Tensor
    queries: Tensor | None
    scale: float
    softcap: float = 0.0
    sinks: Tensor | None = None
    budget: int = field(kw_only=True)
    rotation: Rotation | None = None
    output_weight: Tensor | None = None
    observed: object | None = None

    @property
    def kv_heads(self) -> int:
        """Hk: key/value heads of the layer."""
        return self.keys.shape[0]

    @property
    def tokens(self) -> int:
        """N: tokens of the prompt."""
        return self.keys.shape[1]

    def window(self, tokens: int, tail: int) -> tuple[Tensor, Tensor]:
        """Queries [Hq, W', D] of the `tokens` prompt tokens before the last `tail`, and the keys up to their end.

        W' is below `tokens` where the prompt is shorter; the last query is that of the last key.
        """
        assert self.queries is not None, "this layer was given no queries"
        end = max(0, self.tokens - tail)
        rows = min(tokens, end)
        last = self.queries.shape[1] - (self.tokens - end)
        assert last >= rows, (
            f"{self.queries.shape[1]} queries do not cover {rows} and the {self.tokens - end} behind"
        )
        return self.queries[:, last - rows : last], self.keys[:, :end]

    def window_mass(self, tokens: int, tail: int) -> Tensor:
        """float32 [Hk, N]: attention that `window`'s queries give each key, summed over them, mean over the group."""
        queries, keys = self.window(tokens, tail)
        mass = self.keys.new_zeros(self.kv_heads, self.tokens, dtype=torch.float32)
        rows = queries.shape[1]
        if rows:
            seen = window_scores(queries, keys, self.scale, softcap=self.softcap, sinks=self.sinks)
            mass[:, : keys.shape[1]] = seen.mul_(rows)
        return mass


@dataclass(frozen=True)
class Selection:
    """Survivors of one layer, on the device of its keys.

    indices: int64 [Hk, Bmax], ascending prompt positions per kv head; counts: int64 [Hk], how many of a row
    are survivors. `ragged` False means that every row is full (a host-side fact: no need to look at
    `counts`); otherwise a row ends in padding of the value N, which is no position.
    """

    indices: Tensor
    counts: Tensor
    ragged: bool = False

    def head(self, kv_head: int) -> Tensor:
        """int64 [count]: survivors of one head. Reads a count back to the host where rows are ragged."""
        row = self.indices[kv_head]
        return row[: int(self.counts[kv_head])] if self.ragged else row


class Policy(ABC):
    """Chooses which prompt tokens of a layer survive. Pure and stateless: one instance serves every request.

    A new method overrides `score`. It may also narrow or widen the other decisions, each with its own hook: `keep`
    (how many per head), `protected` (tokens above any score) and `observer` (for methods that need every query).
    `select` is fixed. All of it is batched tensor work without host synchronisation, except that budgets per head cost
    one.
    """

    needs: ClassVar[Needs]

    options: ClassVar[tuple[str, ...]] = ()
    """Recipe fields that a policy named by import path reads beyond those that all evicting policies share."""

    same_for_all_heads: ClassVar[bool] = False
    """Whether the scores of all kv heads of a layer are equal, so that all keep one set."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    @property
    def window(self) -> int:
        """Prompt tokens before the tail whose queries `score` reads (0 if it reads none), before clipping to N."""
        return self.recipe.window if self.needs is Needs.LAST_QUERIES else 0

    @property
    def one_set(self) -> bool:
        """Whether all kv heads of a layer keep the same tokens under this recipe."""
        return self.same_for_all_heads and not self.recipe.critical

    @property
    def needs_rotation(self) -> bool:
        """Whether `LayerView.rotation` must be known: a layer without it cannot be scored."""
        return False

    @property
    def needs_output_weight(self) -> bool:
        """Whether `LayerView.output_weight` must be known: a layer without it cannot be scored."""
        return self.recipe.critical

    def queries_wanted(self, n: int) -> int:
        """How many last queries a `LayerView` of an `n`-token prompt must carry at least."""
        if self.needs is Needs.LAST_QUERIES:
            return min(n, self.window + self.recipe.tail)
        observed = type(self).observer is not Policy.observer
        return n if self.needs is Needs.ALL_QUERIES and not observed else 0

    def observer(self, layer: ObservedLayer) -> Observer | None:
        """Who watches the layer while the prompt is computed, for policies that need all queries; None for nobody."""
        return None

    @abstractmethod
    def score(self, layer: LayerView) -> Tensor:
        """float32 or float64 [Hk, N], higher means keep; called only where something must go.

        What it says about protected positions does not matter.
        """

    def keep(self, layer: LayerView, scores: Tensor) -> int | Tensor:
        """Tokens to keep per kv head, protected ones included: one number, or int64 [Hk].

        A number may still be moved between the heads by the recipe ("ada"); a tensor is final.
        """
        return layer.budget

    def protected(self, layer: LayerView) -> Tensor:
        """Tokens that survive whatever they score, bool [N], never more than the layer's budget.

        What the recipe protects: sinks, spans, the tail and the most recent tokens, the window where it is kept.
        """
        ranges = self.recipe.protected_ranges(layer.tokens, layer.budget)
        return range_mask(ranges, layer.tokens, layer.keys.device)

    def select(self, layer: LayerView) -> Selection:
        """Survivors of the layer. A prompt within budget comes back whole, with identity indices.

        Raises ValueError where `score` returned anything but what it promises.
        """
        recipe, n, device = self.recipe, layer.tokens, layer.keys.device
        if layer.budget >= n:
            return _uniform(torch.arange(n, device=device).expand(layer.kv_heads, -1).contiguous())
        scores = self.score(layer)
        if scores.shape != (layer.kv_heads, n) or scores.dtype not in (torch.float32, torch.float64):
            got = f"{scores.dtype} {tuple(scores.shape)}"
            raise ValueError(f"policy {recipe.policy!r} scores {got}, want float32 ({layer.kv_heads}, {n})")
        protected = self.protected(layer)
        if recipe.critical:
            scores = criticality(layer, scores, protected, recipe.critical_share)
        if recipe.structure:
            structure = range_mask(recipe.structure, n, device)
            protected = protected | _best_structure(scores, structure, protected, layer.budget)
        keep = self.keep(layer, scores)
        if isinstance(keep, int) and recipe.heads == "ada" and not self.one_set:
            # A decode rule goes on from tokens: it takes a head without any for one that is not there.
            floor = max(_ada_floor(recipe.alpha, keep), int(recipe.decode.evicts))
            keep = allocate_heads(scores, keep, protected, floor)
        indices = select_topk(scores, keep, protected)
        return Selection(indices, keep, ragged=True) if isinstance(keep, Tensor) else _uniform(indices)


def range_mask(ranges: Iterable[Range], n: int, device: torch.device) -> Tensor:
    """bool [n]: positions in any of the half-open `ranges`, which may reach beyond either end."""
    mask = torch.zeros(n, dtype=torch.bool)
    for start, stop in ranges:
        mask[max(0, start) : max(0, stop)] = True
    # From pageable memory the driver takes its copy before it returns: waiting for the device would gain nothing.
    return mask.to(device, non_blocking=True)


def _ada_floor(alpha: float, budget: int) -> int:
    """Tokens of each head that no other head's scores can take away: kvpress's rule (ALGORITHMS.md 4.2)."""
    return max(share(alpha, budget), 1 if alpha > 0 else 0)


def _best_structure(scores: Tensor, structure: Tensor, protected: Tensor, budget: int) -> Tensor:
    """bool [Hk, N]: the best scored structural tokens of each head, as many as their share and `budget` allow."""
    candidates = structure & ~protected
    room = (budget - protected.sum(-1, keepdim=True)).clamp(0, share(STRUCTURE_SHARE, budget))
    lowest = torch.finfo(scores.dtype).min
    ranked = scores.nan_to_num(nan=lowest).clamp(min=lowest).masked_fill(~candidates, -torch.inf)
    # Reversed, a stable descending sort puts the higher position first among equal scores.
    order = ranked.flip(-1).argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(scores.shape[-1], device=scores.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(-1, order, places).flip(-1)
    return candidates & (rank < room)


def _uniform(indices: Tensor) -> Selection:
    heads, kept = indices.shape
    return Selection(indices, torch.full((heads,), kept, device=indices.device))
