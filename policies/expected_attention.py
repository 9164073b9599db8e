"""Expected Attention (arXiv 2510.00636): ALGORITHMS.md section 8.2, the reading of kvpress 0.5.5."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from policies.policy import LayerView, Needs, ObservedLayer, Observer, Policy
from policies.recipe import Recipe


class QueryStatistics(NamedTuple):
    """Queries before RoPE, per query head: float64 mean [Hq, D] and covariance about it [Hq, D, D]."""

    mean: Tensor
    covariance: Tensor


class ExpectedAttention(Policy):
    """Keeps what future queries are expected to attend to, if they are like those of the prompt.

    The prompt's un-rotated queries after the first `sinks` are taken for a Gaussian, turned by the mean rotation of
    the next `future` positions; a key's expected weight is the softmax over keys of the log of E[exp(q·k)], averaged
    over the group; (weight + `epsilon`) times the value's norm is its score (`value_norm` False: the weight alone).
    `covariance` False takes the mean query alone. Differs from kvpress in using the layer's own scale and
    attention sinks; a softcap is not modelled, its expectation has no closed form.
    """

    needs = Needs.ALL_QUERIES

    @property
    def needs_rotation(self) -> bool:
        return True

    def observer(self, layer: ObservedLayer) -> Observer:
        return QueryMoments(layer, self.recipe)

    def score(self, layer: LayerView) -> Tensor:
        """float32 [Hk, N]; the first `sinks` tokens score one more than the layer's best."""
        assert isinstance(layer.observed, QueryStatistics), "scores what its observer has seen"
        if layer.rotation is None:
            raise ValueError(
                f"expected attention needs the rotary embedding of layer {layer.index}: it is not known"
            )
        turn = layer.rotation.mean_matrix(layer.tokens, self.recipe.future).double()
        mean = (layer.observed.mean @ turn.t()).float()
        covariance = (turn @ layer.observed.covariance @ turn.t()).float() if self.recipe.covariance else None
        first = min(self.recipe.sinks, layer.tokens)
        group = mean.shape[0] // layer.kv_heads
        out = layer.keys.new_zeros(layer.kv_heads, layer.tokens, dtype=torch.float32)
        for head in range(layer.kv_heads):
            keys = layer.keys[head, first:].float()
            for query in range(head * group, (head + 1) * group):
                logits = (keys @ mean[query]).mul_(layer.scale)
                if covariance is not None:
                    logits += ((keys @ covariance[query]) * keys).sum(-1).mul_(0.5 * layer.scale**2)
                total = logits.logsumexp(-1)
                if layer.sinks is not None:
                    total = torch.logaddexp(total, layer.sinks[query].float())
                out[head, first:] += torch.exp(logits - total)
        out /= group
        if self.recipe.value_norm:
            out = (out + self.recipe.epsilon) * layer.values.float().norm(dim=-1)
        if first:
            out[:, :first] = out[:, first:].amax() + 1
        return out


class QueryMoments:
    """First and second moments of a prompt's queries, un-rotated, the first `sinks` tokens left out."""

    def __init__(self, layer: ObservedLayer, recipe: Recipe) -> None:
        self._layer = layer
        self._first = recipe.sinks
        self._sum: Tensor | None = None
        self._outer: Tensor | None = None

    def add(self, queries: Tensor, keys: Tensor, lse: Tensor, start: int) -> None:
        layer = self._layer
        if layer.rotation is None:
            raise ValueError("expected attention needs the layer's rotary embedding, which is not known")
        if self._sum is None or self._outer is None:
            # float64, because outer products about zero lose what the mean is large against.
            shape = (layer.query_heads, layer.head_dim)
            self._sum = queries.new_zeros(shape, dtype=torch.float64)
            self._outer = queries.new_zeros((*shape, layer.head_dim), dtype=torch.float64)
        skip = min(max(0, self._first - start), queries.shape[1])
        positions = torch.arange(start + skip, start + queries.shape[1], device=queries.device)
        plain = layer.rotation.rotate(queries[:, skip:].float(), -positions).double()
        self._sum += plain.sum(1)
        self._outer += plain.transpose(1, 2) @ plain

    def result(self) -> QueryStatistics:
        assert self._sum is not None and self._outer is not None, "the prompt had no queries"
        count = max(1, self._layer.tokens - self._first)
        mean = self._sum / count
        return QueryStatistics(mean, self._outer / count - mean.unsqueeze(-1) * mean.unsqueeze(-2))
