"""Decode rules once more, stupid and slow: numpy, float64, one head at a time, every attention row remembered.

Beside it `DenseRun`, which drives the real rules as the engine does, over plain arrays in place of pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.rotary import Rotation
from policies.decoding import Change, DecodeRule, LayerKeys, get_rule
from policies.policy import LayerView, Selection
from policies.recipe import Recipe, make_recipe

Array = NDArray[np.float64]


class Trace(NamedTuple):
    """Queries [L, Hq, P, D], keys and values [L, Hk, P, D] of P tokens, after RoPE; `sinks` [Hq] or None."""

    q: Array
    k: Array
    v: Array
    scale: float
    softcap: float = 0.0
    sinks: Array | None = None

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.k.shape[1]

    def row(self, layer: int, head: int, position: int, held: Sequence[int]) -> Array:
        """Attention [G, len(held)] of the group's queries at `position` over the tokens `held`."""
        queries = self.q[layer, head * self.group : (head + 1) * self.group, position]
        logits = queries @ self.k[layer, head, list(held)].T * self.scale
        if self.softcap:
            logits = self.softcap * np.tanh(logits / self.softcap)
        total = np.exp(logits).sum(1, keepdims=True)
        if self.sinks is not None:
            total = total + np.exp(self.sinks[head * self.group : (head + 1) * self.group, None])
        return np.exp(logits) / total


def random_trace(
    seed: int, tokens: int, layers: int = 2, kv_heads: int = 2, group: int = 3, **more: float | bool
) -> Trace:
    rng = np.random.default_rng(seed)

    def numbers(*shape: int) -> Array:
        return rng.standard_normal(shape, dtype=np.float32).astype(np.float64)

    heads = kv_heads * group
    return Trace(
        2 * numbers(layers, heads, tokens, 8), numbers(layers, kv_heads, tokens, 8),
        numbers(layers, kv_heads, tokens, 8), 8**-0.5, float(more.get("softcap", 0.0)),
        numbers(heads) if more.get("sinks") else None,
    )  # fmt: skip


@dataclass
class Head:
    """One head of the simulation: tokens held, and each row seen as {position: (group mean, group max)}."""

    held: list[int]
    cap: int
    rows: list[tuple[int, dict[int, tuple[float, float]]]] = field(default_factory=list)


class Simulation:
    """What `recipe.decode` evicts from a prompt of n tokens whose survivors are given, ascending, per (layer, head)."""

    def __init__(self, trace: Trace, recipe: Recipe, n: int, survivors: dict[tuple[int, int], list[int]]):
        self.trace, self.rule, self.n, self.now = trace, recipe.decode, n, n - 1
        self.recipe = recipe
        self.safe = set(range(min(n, recipe.decode.sinks or 0)))
        for start, stop in recipe.spans:
            self.safe |= set(range(start, min(stop, n)))
        self.heads = {}
        for at, kept in survivors.items():
            whole = all(len(survivors[at[0], h]) == n for h in range(trace.k.shape[1]))
            cap = self.rule.budget or (max(n, recipe.budget) if whole else len(kept))
            head = Head(list(kept), max(cap, len(self.safe)))
            for position in range(0 if self.rule.rule in ("h2o", "scissorhands") else n - 1, n):
                head.rows.append((position, self._row(at, position, list(range(position + 1)))))
            self.heads[at] = head
        self.shared = {
            layer: len({tuple(h.held) for (other, _), h in self.heads.items() if other == layer}) == 1
            for layer, _ in survivors
        }
        self._evict(True)

    def step(self) -> None:
        self.now += 1
        for at, head in self.heads.items():
            head.held.append(self.now)
            head.rows.append((self.now, self._row(at, self.now, head.held)))
        self._evict(False)

    def _row(self, at: tuple[int, int], position: int, held: list[int]) -> dict[int, tuple[float, float]]:
        attention = self.trace.row(*at, position, held)
        pairs = zip(attention.mean(0), attention.max(0), strict=True)
        return {token: (float(mean), float(most)) for token, (mean, most) in zip(held, pairs, strict=True)}

    def _evict(self, first: bool) -> None:
        every = 1
        if self.rule.rule in ("h2o", "snapkv") and not first:
            every = self.rule.every
        # TOVA's heads look at each other's rows: decide for all, then evict.
        drops = {}
        for at, head in self.heads.items():
            over = len(head.held) - head.cap
            if over < every:
                continue
            if self.rule.rule == "scissorhands":
                over = max(over, self.rule.every or max(1, head.cap // 2))
                stay = min(head.cap, len(self.safe) + self.rule.recent_tokens(head.cap))
                over = min(over, len(head.held) - stay)
            over = min(over, len(head.held) - len(self.safe))
            drops[at] = self._ranked(at, head)[:over]
        for at, gone in drops.items():
            self.heads[at].held = [token for token in self.heads[at].held if token not in gone]

    def _ranked(self, at: tuple[int, int], head: Head) -> list[int]:
        """Tokens in the order in which they would leave."""
        score = getattr(self, f"_{self.rule.rule}")(at, head)
        recent = 0
        if self.rule.rule in ("h2o", "scissorhands"):
            recent = self.rule.recent_tokens(head.cap)
        elif self.rule.rule == "snapkv":
            recent = self.rule.window
        free = [token for token in head.held if token not in self.safe]
        return sorted(
            free, key=lambda t: (t > self.now - recent, score.get(t, 0) if t <= self.now - recent else 0, t)
        )

    def _streaming_llm(self, at: tuple[int, int], head: Head) -> dict[int, float]:
        return {token: token for token in head.held}

    _sliding_window = _streaming_llm

    def _tova(self, at: tuple[int, int], head: Head) -> dict[int, float]:
        if not self.shared[at[0]]:
            return {token: mean for token, (mean, _) in head.rows[-1][1].items()}
        others = [h.rows[-1][1] for (layer, _), h in self.heads.items() if layer == at[0]]
        return {token: float(np.mean([row[token][0] for row in others])) for token in head.held}

    def _h2o(self, at: tuple[int, int], head: Head) -> dict[int, float]:
        first = 0 if self.recipe.policy == "h2o" else self.n - 32
        rows = [row for position, row in head.rows if position >= first]
        score = {}
        for token in head.held:
            seen = [row[token][0] for row in rows if token in row]
            score[token] = sum(seen) / (max(1, len(seen)) if self.rule.normalize == "visible_count" else 1)
        return score

    def _scissorhands(self, at: tuple[int, int], head: Head) -> dict[int, tuple[int, float]]:
        rows = [row for position, row in head.rows if position > self.now - self.rule.window]
        score = {}
        for token in head.held:
            low, mass = 0, 0.0
            for row in rows:
                if token not in row:
                    continue
                values = [most for _, most in row.values()]
                limit = 1 / len(row if self.rule.threshold == "uniform" else head.held)
                if isinstance(self.rule.threshold, float):
                    limit = float(np.quantile(values, self.rule.threshold))
                low += row[token][1] < limit
                mass += row[token][1]
            score[token] = (-low, mass)
        return score

    def _snapkv(self, at: tuple[int, int], head: Head) -> dict[int, float]:
        score = np.zeros(len(head.held))
        window = range(max(0, self.now + 1 - self.rule.window), self.now + 1)
        for position in window:
            seen = [i for i, token in enumerate(head.held) if token <= position]
            if seen:
                score[seen] += self.trace.row(*at, position, [head.held[i] for i in seen]).mean(0) / len(
                    window
                )
        reach = self.rule.kernel // 2
        padded = np.pad(score, reach)
        pieces = np.lib.stride_tricks.sliding_window_view(padded, self.rule.kernel)
        pooled = pieces.mean(1) if self.rule.pool == "avg" else pieces.max(1)
        return dict(zip(head.held, pooled.tolist(), strict=True))


class DenseRun:
    """A rule at work on a trace, with keys and values in arrays [L, Hk, C, D], slot for slot as the engine has them.

    survivors: ascending positions per (layer, head), everything where None. rotation: slot mode; the trace's keys and
    queries are then those before RoPE.
    """

    def __init__(
        self,
        recipe: Recipe,
        trace: Trace,
        n: int,
        survivors: dict[tuple[int, int], list[int]] | None = None,
        rotation: Rotation | None = None,
    ):
        self.rule: DecodeRule = get_rule(recipe)
        self.trace, self.n, self.rotation = trace, n, rotation
        self.q, self.k, self.v = (torch.from_numpy(np.ascontiguousarray(x, np.float32)) for x in trace[:3])
        layers, heads = self.k.shape[:2]
        kept = survivors or {(la, h): list(range(n)) for la in range(layers) for h in range(heads)}
        counts = np.array([[len(kept[la, h]) for h in range(heads)] for la in range(layers)], np.int32)
        parts = [self._prompt_arrays(la, [kept[la, h] for h in range(heads)]) for la in range(layers)]
        arrays = self.rule.prompt_state(parts, counts, n, range(layers))
        positions = torch.full((layers, heads, int(counts.max())), -1, dtype=torch.int32)
        for (layer, head), tokens in kept.items():
            positions[layer, head, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        self.state = self.rule.open(positions, counts, n, arrays)
        self.state.check()
        self.slots_k, self.slots_v = (self._fill(x) for x in (self.k, self.v))
        self._apply(
            self.rule.settle(self.state, self._layer_keys() if self.rule.wants_keys(self.state) else None)
        )

    def _prompt_arrays(self, layer: int, kept: list[list[int]]) -> dict[str, torch.Tensor]:
        queries, n = self.rule.prompt_queries(self.n), self.n
        observed = None
        if self.rule.prompt_all_queries:
            observed = torch.stack([self._column_sums(layer, head) for head in range(len(kept))])
        view = LayerView(
            layer, self.k[layer, :, :n], self.v[layer, :, :n],
            self.q[layer, :, n - queries : n] if queries else None, self.trace.scale, self.trace.softcap,
            None if self.trace.sinks is None else torch.from_numpy(self.trace.sinks).float(),
            budget=n, observed=observed,
        )  # fmt: skip
        longest = max(map(len, kept))
        indices = torch.tensor([tokens + [n] * (longest - len(tokens)) for tokens in kept])
        counts = torch.tensor([len(tokens) for tokens in kept])
        return self.rule.prompt_arrays(
            view, Selection(indices, counts, ragged=bool((counts < longest).any()))
        )

    def _column_sums(self, layer: int, head: int) -> torch.Tensor:
        """f32 [n]: what each prompt token got from all, group mean."""
        rows = np.zeros((self.n, self.n))
        for position in range(self.n):
            rows[position, : position + 1] = self.trace.row(layer, head, position, range(position + 1)).mean(
                0
            )
        return torch.from_numpy(rows.sum(0)).float()

    def _fill(self, given: torch.Tensor) -> torch.Tensor:
        """The trace's rows of the state's positions; NaN in empty slots."""
        places = self.state.positions.long().clamp(min=0).unsqueeze(-1).expand(-1, -1, -1, given.shape[-1])
        rows = given.gather(2, places)
        return torch.where((self.state.positions >= 0).unsqueeze(-1), rows, torch.nan)

    def _layer_keys(self) -> list[LayerKeys]:
        sinks = None if self.trace.sinks is None else torch.from_numpy(self.trace.sinks).float()
        return [LayerKeys(keys, self.trace.scale, self.trace.softcap, sinks) for keys in self.slots_k]

    def _apply(self, change: Change) -> None:
        index = self.state.apply(change)
        if index is not None:
            places = index.clamp(min=0).unsqueeze(-1).expand(*index.shape, self.k.shape[-1])
            self.slots_k, self.slots_v = (x.gather(2, places) for x in (self.slots_k, self.slots_v))
        for slots in (self.slots_k, self.slots_v):
            slots[self.state.positions < 0] = torch.nan
        self.state.check()

    def step(self) -> torch.Tensor:
        """One token: f32 [L, Hq, D], its attention outputs."""
        state, position = self.state, self.state.position + 1
        slot = state.write.long()[..., None, None].expand(-1, -1, 1, self.k.shape[-1])
        self.slots_k.scatter_(2, slot, self.k[:, :, position : position + 1])
        self.slots_v.scatter_(2, slot, self.v[:, :, position : position + 1])
        visible, clock = state.visible, state.clock
        if self.rule.query_window:
            for layer in range(len(self.k)):
                self.rule.keep_query(state, layer, self.q[layer, :, position])
        state.advance()
        assert torch.equal(state.lengths, visible)
        probabilities, out = self._attend(position, clock)
        reduced = probabilities.mean(2) if self.rule.reduce == 1 else probabilities.amax(2)
        if self.rule.reduce:
            inside = torch.arange(reduced.shape[-1]) < visible.unsqueeze(-1)
            self.rule.observe(state, torch.where(inside, reduced, torch.nan))
        self._apply(self.rule.evict(state, self._layer_keys() if self.rule.wants_keys(state) else None))
        return out

    def _attend(self, position: int, clock: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Probabilities f32 [L, Hk, G, C] and outputs f32 [L, Hq, D], computed in double."""
        held = self.state.positions >= 0
        keys, query = self.slots_k, self.q[:, :, position]
        if self.rotation is not None:
            frames = self.state.frames if self.rule.slot_positions else self.state.positions
            keys = self.rotation.rotate(keys, frames.clamp(min=0))
            at = clock if self.rule.slot_positions else position
            query = self.rotation.rotate(query.unsqueeze(-2), torch.tensor([at])).squeeze(-2)
        mask = held.numpy()[:, :, None]
        keys, values = (
            np.where(mask.swapaxes(2, 3), x.numpy(), 0).astype(np.float64) for x in (keys, self.slots_v)
        )
        grouped = query.numpy().astype(np.float64).reshape(len(keys), keys.shape[1], -1, keys.shape[-1])
        logits = grouped @ keys.swapaxes(2, 3) * self.trace.scale
        if self.trace.softcap:
            logits = self.trace.softcap * np.tanh(logits / self.trace.softcap)
        weights = np.where(mask, np.exp(logits), 0)
        total = weights.sum(-1, keepdims=True)
        if self.trace.sinks is not None:
            total = total + np.exp(self.trace.sinks).reshape(1, keys.shape[1], -1, 1)
        # Heads that a narrower layer lacks see nothing.
        probabilities = weights / np.where(total > 0, total, 1)
        out = (probabilities @ values).reshape(query.shape)
        return torch.from_numpy(probabilities).float(), torch.from_numpy(out).float()

    def held(self, layer: int, head: int) -> list[int]:
        """Positions cached, ascending."""
        positions = self.state.positions[layer, head]
        return sorted(positions[positions >= 0].tolist())


def decode_recipe(rule: str, policy: str = "full", **more: object) -> Recipe:
    """A recipe whose prompt stays whole unless told otherwise, with `rule` and its fields from `more["decode"]`."""
    decode = {"rule": rule, **more.pop("decode", {})}
    return make_recipe(policy=policy, decode=decode, **more)
