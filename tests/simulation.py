"""The prompt-selection methods as ALGORITHMS.md words them, in float64 numpy, one token at a time: stupid and slow.

Nothing here knows of our kernels or policies. Scores are [Hk, N]; the last `tail` queries are not observed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Array = np.ndarray


@dataclass(frozen=True)
class Prompt:
    """float64: queries [Hq, N, D] and keys [Hk, N, D] after RoPE, values [Hk, N, D], attention sinks [Hq] or None."""

    q: Array
    k: Array
    v: Array
    scale: float
    softcap: float = 0.0
    sinks: Array | None = None
    inv_freq: Array | None = None

    @property
    def n(self) -> int:
        return self.k.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.k.shape[0]

    @property
    def group(self) -> int:
        return self.q.shape[0] // self.kv_heads

    def row(self, head: int, i: int) -> Array:
        """Causal attention [N] of query i of a query head; zeros beyond i."""
        logits = self.k[head // self.group, : i + 1] @ self.q[head, i] * self.scale
        if self.softcap:
            logits = self.softcap * np.tanh(logits / self.softcap)
        top = logits.max()
        weights = np.exp(logits - top)
        total = weights.sum() + (0.0 if self.sinks is None else np.exp(self.sinks[head] - top))
        return np.concatenate([weights / total, np.zeros(self.n - i - 1)])

    def heads_of(self, kv_head: int) -> range:
        return range(kv_head * self.group, (kv_head + 1) * self.group)

    def observed(self, window: int, tail: int) -> range:
        """Positions of the last `window` queries before the tail."""
        end = max(0, self.n - tail)
        return range(max(0, end - window), end)


def snapkv(
    prompt: Prompt,
    window: int,
    tail: int,
    kernel: int,
    pool: str,
    group: str = "mean",
    order: str = "reduce_pool",
) -> Array:
    rows = prompt.observed(window, tail)
    scores = np.zeros((prompt.kv_heads, prompt.n))

    def pooled(mass: Array) -> Array:
        out = mass.copy()
        for j in range(rows.start):
            near = mass[max(0, j - kernel // 2) : min(rows.start, j + kernel // 2 + 1)]
            out[j] = near.max() if pool == "max" else near.sum() / kernel
        return out

    reduce = np.max if group == "max" else np.mean
    for h in range(prompt.kv_heads):
        masses = (
            [sum(prompt.row(g, i) for i in rows) / len(rows) for g in prompt.heads_of(h)] if len(rows) else []
        )
        if not masses:
            continue
        if order == "pool_reduce":
            scores[h] = reduce([pooled(mass) for mass in masses], axis=0)
        else:
            scores[h] = pooled(reduce(masses, axis=0))
    return scores


def column_sums(prompt: Prompt) -> Array:
    """Attention that every key has received from all queries, group mean."""
    sums = np.zeros((prompt.kv_heads, prompt.n))
    for h in range(prompt.kv_heads):
        for g in prompt.heads_of(h):
            for i in range(prompt.n):
                sums[h] += prompt.row(g, i) / prompt.group
    return sums


def h2o(prompt: Prompt, normalize: str) -> Array:
    sums = column_sums(prompt)
    if normalize == "visible_count":
        for j in range(prompt.n):
            sums[:, j] /= prompt.n - j
    return sums


def scissorhands(prompt: Prompt, window: int, tail: int, threshold: str | float) -> Array:
    rows = prompt.observed(window, tail)
    scores = np.zeros((prompt.kv_heads, prompt.n))
    for h in range(prompt.kv_heads):
        for i in rows:
            best = np.max([prompt.row(g, i) for g in prompt.heads_of(h)], axis=0)
            seen = best[: i + 1]
            limit = 1 / (i + 1) if threshold == "uniform" else np.quantile(seen, threshold)
            scores[h, : i + 1] -= seen < limit
            scores[h] += best / (len(rows) + 1)
    return scores


def tova(prompt: Prompt, window: int, tail: int) -> Array:
    rows = prompt.observed(window, tail)
    heads = range(len(prompt.q))
    mass = sum((prompt.row(g, i) for g in heads for i in rows), np.zeros(prompt.n))
    return np.tile(mass / len(heads), (prompt.kv_heads, 1))


def rotation(inv_freq: Array, dim: int, position: int) -> Array:
    """[D, D], rotates a column vector; pairs (i, i + R/2), dims beyond R stay."""
    half = len(inv_freq)
    matrix = np.eye(dim)
    for i, frequency in enumerate(inv_freq):
        cos, sin = math.cos(position * frequency), math.sin(position * frequency)
        matrix[i, i], matrix[i, i + half] = cos, -sin
        matrix[i + half, i], matrix[i + half, i + half] = sin, cos
    return matrix


def expected_attention(
    prompt: Prompt, sinks: int, future: int, epsilon: float, covariance: bool, value_norm: bool
) -> Array:
    n, dim = prompt.n, prompt.k.shape[2]
    assert prompt.inv_freq is not None
    turns = [rotation(prompt.inv_freq, dim, position) for position in range(n + future)]
    mean_turn = np.mean(turns[n:], axis=0)
    scores = np.zeros((prompt.kv_heads, n))
    for h in range(prompt.kv_heads):
        for g in prompt.heads_of(h):
            plain = np.array([turns[i].T @ prompt.q[g, i] for i in range(sinks, n)])
            mean = plain.mean(axis=0)
            centred = plain - mean
            spread = mean_turn @ (centred.T @ centred / len(plain)) @ mean_turn.T
            logits = np.array([key @ (mean_turn @ mean) * prompt.scale for key in prompt.k[h, sinks:]])
            if covariance:
                logits += [key @ spread @ key * prompt.scale**2 / 2 for key in prompt.k[h, sinks:]]
            top = logits.max()
            weights = np.exp(logits - top)
            extra = 0.0 if prompt.sinks is None else np.exp(prompt.sinks[g] - top)
            scores[h, sinks:] += weights / (weights.sum() + extra) / prompt.group
        if value_norm:
            scores[h] = (scores[h] + epsilon) * [math.sqrt(v @ v) for v in prompt.v[h]]
    scores[:, :sinks] = scores[:, sinks:].max() + 1
    return scores


def keydiff(prompt: Prompt) -> Array:
    scores = np.zeros((prompt.kv_heads, prompt.n))
    for h, keys in enumerate(prompt.k):
        unit = np.array([key / math.sqrt(key @ key) for key in keys])
        anchor = unit.mean(axis=0)
        scores[h] = [-(key @ anchor) / math.sqrt(anchor @ anchor) for key in unit]
    return scores


def knorm(prompt: Prompt) -> Array:
    return np.array([[-math.sqrt(key @ key) for key in keys] for keys in prompt.k])


def latest(prompt: Prompt) -> Array:
    """StreamingLLM and sliding window: the later, the better."""
    return np.tile(np.arange(prompt.n, dtype=np.float64), (prompt.kv_heads, 1))


def random_scores(prompt: Prompt, seed: int, layer: int) -> Array:
    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D % 2**32
        x ^= x >> 15
        x = x * 0x846CA68B % 2**32
        return x ^ (x >> 16)

    key = mix(mix(mix(seed % 2**32) ^ seed // 2**32) ^ layer)
    heads = range(prompt.kv_heads)
    return np.array([[mix(mix(key ^ h) ^ j) / 2**32 for j in range(prompt.n)] for h in heads])


def output_norms(prompt: Prompt, weight: Array) -> Array:
    """Group mean of the 1-norm of W_O v, [Hk, N]; weight [hidden, Hq * D]."""
    dim = prompt.v.shape[2]
    norms = np.zeros((prompt.kv_heads, prompt.n))
    for h in range(prompt.kv_heads):
        for g in prompt.heads_of(h):
            part = weight[:, g * dim : (g + 1) * dim]
            norms[h] += [np.abs(part @ v).sum() / prompt.group for v in prompt.v[h]]
    return norms


def critical(scores: Array, norms: Array, protected: set[int], budget: int, share: float) -> Array:
    """CriticalKV's second score; what its first stage keeps scores infinity."""
    free = [j for j in range(scores.shape[1]) if j not in protected]
    weighed = (scores - np.minimum(scores[:, free].min(axis=1, keepdims=True), 0) + 1e-4) * norms
    for h, row in enumerate(scores):
        weighed[h, best(row, int(budget * share + 1e-9), protected)] = math.inf
    return weighed


def protected_tokens(n: int, *, sinks: int, at_end: int, spans: Sequence[tuple[int, int]] = ()) -> set[int]:
    wanted = {*range(sinks), *range(n - at_end, n), *(j for start, stop in spans for j in range(start, stop))}
    return {j for j in wanted if 0 <= j < n}


def best(scores: Array, keep: int, protected: set[int]) -> list[int]:
    """The `keep` best positions of one head: protected first, then by score, then the later one; ascending."""
    order = sorted(range(len(scores)), key=lambda j: (j in protected, scores[j], j), reverse=True)
    return sorted(order[:keep])


def with_structure(
    scores: Array, protected: set[int], structure: Sequence[tuple[int, int]], budget: int
) -> set[int]:
    """One head's protected tokens with its best structural ones: at most 15 % of the budget, never above it."""
    named = {j for start, stop in structure for j in range(start, min(stop, len(scores)))} - protected
    room = max(0, min(budget * 15 // 100, budget - len(protected)))
    return protected | set(sorted(named, key=lambda j: (scores[j], j), reverse=True)[:room])


def ada_counts(scores: Array, protected: Sequence[set[int]], budget: int, alpha: float) -> list[int]:
    """Ada-KV as kvpress words it: a head's best are safe, of all others the lowest over all heads leave."""
    heads, n = scores.shape
    floor = max(int(budget * alpha + 1e-9), int(alpha > 0))
    safe = [protected[h] | set(best(scores[h], floor, protected[h])) for h in range(heads)]
    open_ = [(scores[h, j], h, j) for h in range(heads) for j in range(n) if j not in safe[h]]
    counts = [n] * heads
    for _, h, _ in sorted(open_)[: heads * (n - budget)]:
        counts[h] -= 1
    return counts
