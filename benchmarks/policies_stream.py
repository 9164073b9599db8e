"""An endless stream: real text through the decode engine's own step, its cache bounded, positions by slot.

Compared with what StreamingLLM stands in for: throwing the cache away and computing the window anew. For that a dense
forward over the sinks and the newest tokens, at positions 0, 1, 2, …, predicts the same tokens as the stream just did.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from benchmarks.quality_document import Document
from benchmarks.quality_lanes import Lanes, log_probabilities
from engine.model import Model
from engine.workspace import PrefillPort, Workspace
from policies.recipe import make_recipe

JUDGED = 64
"""Newest tokens whose surprise one recomputed window is compared by."""


@dataclass
class Stream:
    """nll: nats of every token; pages: used after every step; pairs: (streamed, recomputed) nats of every window."""

    budget: int
    sinks: int
    nll: list[float] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    pairs: list[tuple[float, float]] = field(default_factory=list)
    step_s: float = 0.0
    window_s: float = 0.0

    @property
    def nll_ratio(self) -> float:
        """Mean of the streamed tokens over mean of the same tokens in recomputed windows."""
        streamed, recomputed = zip(*self.pairs, strict=True)
        return sum(streamed) / sum(recomputed)

    @property
    def page_growth(self) -> int:
        """Pages that were ever used beyond those of the first step."""
        return max(self.pages) - self.pages[0]


def run_stream(
    model: Model, lanes: Lanes, ids: Sequence[int], budget: int, sinks: int, windows: int
) -> Stream:
    """Prefill `budget` tokens of `ids`, then feed the rest token by token; compare at `windows` points on the way."""
    recipe = make_recipe(
        policy="streaming_llm",
        budget=budget,
        sinks=sinks,
        decode={"rule": "streaming_llm", "budget": budget},
        positions="slot",
    )
    found = Stream(budget, sinks)
    document = Document(model, budget)
    text = document.read(ids[:budget])
    logits = document.logits[budget].unsqueeze(0)
    gap = (len(ids) - budget) // windows
    with lanes.opened([text.pack(recipe)]) as opened:
        for at in range(budget, len(ids)):
            found.nll.append(-float(log_probabilities(logits[0])[ids[at]]))
            if (at + 1 - budget) % gap == 0 and len(found.nll) >= JUDGED:
                began = time.perf_counter()
                anew = _recomputed(model, ids[: at + 1], budget, sinks)
                found.window_s += time.perf_counter() - began
                found.pairs.append((sum(found.nll[-JUDGED:]), anew))
            began = time.perf_counter()
            logits = lanes.step(opened, [ids[at]])
            found.step_s += time.perf_counter() - began
            found.pages.append(lanes.pool.use.used)
    return found


def _recomputed(model: Model, ids: Sequence[int], budget: int, sinks: int) -> float:
    """Nats of the last `JUDGED` of `ids`, each predicted from the sinks and the about `budget` tokens before it."""
    recent = budget - sinks + JUDGED // 2  # so that the mean of what they see is the stream's
    window = [*ids[:sinks], *ids[max(sinks, len(ids) - recent) :]]
    workspace = Workspace(model.spec, len(window) - 1)
    port = PrefillPort([(workspace, 0, len(window) - 1)])
    wanted = range(len(window) - 1 - JUDGED, len(window) - 1)
    logits = model.forward(window[:-1], range(len(window) - 1), port, wanted)
    following = torch.tensor(window[-JUDGED:]).unsqueeze(-1)
    return -float(log_probabilities(logits).gather(-1, following).sum())
