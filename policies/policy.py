"""What a prompt-selection policy is: one scoring idea inside mechanics that all policies share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum, auto
from typing import ClassVar

import torch

from kernels.select import select_topk
from policies.recipe import Recipe


class Needs(Enum):
    """What a policy must be shown of a layer besides its values; prefill plans its work by it."""

    KEYS = auto()
    """Keys alone: any cached prefix can be used as it is."""

    LAST_QUERIES = auto()
    """Also the queries of the last `Policy.window` prompt tokens: those are always computed."""

    ALL_QUERIES = auto()
    """Also the queries of every prompt token: cached tokens issue none, so the whole prompt is computed."""


@dataclass(frozen=True)
class LayerView:
    """One full-attention layer of one prompt of N tokens, as a policy sees it.

    index: layer number in the model; keys, values: [Hk, N, D], keys after RoPE, any float dtype;
    queries: [Hq, W', D] after RoPE, of the last W' tokens, W' as `Policy.queries_wanted(N)` says, None where
    that is 0; scale, softcap (0.0 for none) and sinks ([Hq], in the softmax denominator only)
    as in the layer's attention. The tensors belong to the caller and are only read.
    """

    index: int
    keys: torch.Tensor
    values: torch.Tensor
    queries: torch.Tensor | None
    scale: float
    softcap: float = 0.0
    sinks: torch.Tensor | None = None

    @property
    def kv_heads(self) -> int:
        """Hk: key/value heads of the layer."""
        return self.keys.shape[0]

    @property
    def tokens(self) -> int:
        """N: tokens of the prompt."""
        return self.keys.shape[1]


@dataclass(frozen=True)
class Selection:
    """Survivors of one layer, on the device of its keys.

    indices: int64 [Hk, Bmax], ascending prompt positions per kv head; counts: int64 [Hk], how many of a row
    are survivors. `ragged` False means that every row is full (a host-side fact: no need to look at
    `counts`); otherwise a row ends in padding of the value N, which is no position.
    """

    indices: torch.Tensor
    counts: torch.Tensor
    ragged: bool = False

    def head(self, kv_head: int) -> torch.Tensor:
        """int64 [count]: survivors of one head. Reads a count back to the host where rows are ragged."""
        row = self.indices[kv_head]
        return row[: int(self.counts[kv_head])] if self.ragged else row


class Policy(ABC):
    """Chooses which prompt tokens of a layer survive. Pure and stateless: one instance serves every request.

    A new method overrides `score`. It may also narrow or widen the other decisions, each with its own hook:
    `keep` (budget rules over layers and heads) and `protected` (tokens above any score). `select` is fixed.
    All of it is batched tensor work without host synchronisation, except that a per-head budget costs one.
    """

    needs: ClassVar[Needs]

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    @property
    def window(self) -> int:
        """Last prompt tokens whose queries `score` reads (0 if it reads none), before clipping to N."""
        return self.recipe.window if self.needs is Needs.LAST_QUERIES else 0

    def queries_wanted(self, n: int) -> int:
        """How many last queries a `LayerView` of an `n`-token prompt must carry."""
        return n if self.needs is Needs.ALL_QUERIES else min(self.window, n)

    def keeps_all(self, n: int) -> bool:
        """Whether an `n`-token prompt stays whole in every layer, so that nothing need be scored."""
        return self.recipe.budget_tokens(n) >= n

    @abstractmethod
    def score(self, layer: LayerView) -> torch.Tensor:
        """float32 [Hk, N], higher means keep; called only where something must go.

        What it says about protected positions does not matter.
        """

    def keep(self, layer: LayerView, scores: torch.Tensor) -> int | torch.Tensor:
        """Tokens to keep per kv head, protected ones included: one number, or int64 [Hk]."""
        return self.recipe.budget_tokens(layer.tokens)

    def protected(self, layer: LayerView) -> torch.Tensor:
        """Tokens that survive whatever they score, bool [N] or [Hk, N], never more than `keep`.

        Here: the recipe's first `sinks` and last `window` tokens.
        """
        position = torch.arange(layer.tokens, device=layer.keys.device)
        return (position < self.recipe.sinks) | (position >= layer.tokens - self.recipe.window)

    def select(self, layer: LayerView) -> Selection:
        """Survivors of the layer. A prompt within budget comes back whole, with identity indices."""
        if self.keeps_all(layer.tokens):
            everything = torch.arange(layer.tokens, device=layer.keys.device)
            return _uniform(everything.expand(layer.kv_heads, -1).contiguous())
        wanted = self.queries_wanted(layer.tokens)
        assert (0 if layer.queries is None else layer.queries.shape[1]) == wanted, "wrong number of queries"
        scores = self.score(layer)
        assert scores.shape == (layer.kv_heads, layer.tokens) and scores.dtype == torch.float32
        keep = self.keep(layer, scores)
        indices = select_topk(scores, keep, self.protected(layer))
        if isinstance(keep, torch.Tensor):
            return Selection(indices, keep, ragged=True)
        return _uniform(indices)


def _uniform(indices: torch.Tensor) -> Selection:
    heads, kept = indices.shape
    return Selection(indices, torch.full((heads,), kept, device=indices.device))
