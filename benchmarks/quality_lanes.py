"""Decoding many packed prompts side by side, one token each per step: the engine's own step over the page pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.quality_document import Packed
from engine.decode import decode_step
from engine.eviction import RowEviction, open_eviction
from engine.model import Model
from engine.pool import PagePool, pool_page_bytes
from engine.restore import restore


@dataclass(eq=False)
class Lane:
    """One sequence in the pool; `position` is that of its next input."""

    row: int
    position: int
    eviction: RowEviction | None


class Lanes:
    """A page pool and what runs in it. Greedy and teacher-forced only."""

    def __init__(self, model: Model, memory_bytes: int, rows: int) -> None:
        spec = model.spec
        self.model = model
        self.pool = PagePool(spec, memory_bytes // pool_page_bytes(spec), rows, spec.context_length)

    @contextmanager
    def opened(self, prompts: Sequence[Packed]) -> Iterator[list[Lane]]:
        """A lane of every prompt; closed at the end."""
        lanes: list[Lane] = []
        try:
            lanes.extend(self._open(prompt) for prompt in prompts)
            yield lanes
        finally:
            for lane in lanes:
                self.pool.close(lane.row)

    @contextmanager
    def copied(self, lanes: Sequence[Lane], copies: int) -> Iterator[list[Lane]]:
        """Each of `lanes` followed by copies of it, `copies` together; the new ones are closed at the end."""
        made: list[Lane] = []
        forks: list[Lane] = []
        try:
            for lane in lanes:
                made.append(lane)
                for _ in range(copies - 1):
                    forks.append(self._fork(lane))
                    made.append(forks[-1])
            yield made
        finally:
            for lane in forks:
                self.pool.close(lane.row)

    def room(self, prompt: Packed, more: int) -> int:
        """Pages that one lane of `prompt` can need while it grows by `more` tokens."""
        return self.pool.pages_at(prompt.layout.meta.counts, more)

    def step(self, lanes: Sequence[Lane], tokens: Sequence[int]) -> Tensor:
        """Feed one token to each; → logits [lanes, vocab]."""
        logits = decode_step(
            self.model,
            self.pool,
            [lane.row for lane in lanes],
            tokens,
            [lane.position for lane in lanes],
            [lane.eviction for lane in lanes],
        )
        for lane in lanes:
            lane.position += 1
        return logits

    def feed(self, lanes: Sequence[Lane], ids: Sequence[int]) -> Tensor:
        """Feed the same tokens (at least one) to all; → logits [lanes, vocab] after the last."""
        for token in ids:
            logits = self.step(lanes, [token] * len(lanes))
        return logits

    def greedy(self, lanes: Sequence[Lane], logits: Tensor, count: int) -> list[list[int]]:
        """`count` likeliest tokens of every lane, the first of them from `logits` [lanes, vocab]."""
        texts: list[list[int]] = [[] for _ in lanes]
        for left in range(count - 1, -1, -1):
            chosen = logits.argmax(-1).tolist()
            for text, token in zip(texts, chosen, strict=True):
                text.append(token)
            if left:
                logits = self.step(lanes, chosen)
        return texts

    def _open(self, prompt: Packed) -> Lane:
        layout, buffer = prompt.layout, prompt.buffer
        eviction = open_eviction(self.pool.spec, prompt.recipe, layout, buffer)
        row = restore(self.pool, layout, buffer, eviction)
        return Lane(row, layout.meta.prompt_tokens, eviction)

    def _fork(self, lane: Lane) -> Lane:
        row = self.pool.fork(lane.row)
        return Lane(row, lane.position, None if lane.eviction is None else lane.eviction.fork(row))


def log_probabilities(logits: Tensor) -> Tensor:
    """fp32, over the last dim."""
    return torch.log_softmax(logits.float(), -1)
