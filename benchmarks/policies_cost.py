"""What selection and decode rules cost: seconds of one prompt's selection per method, and of decode steps per rule."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from benchmarks.quality_document import Packed, Text
from benchmarks.quality_lanes import Lanes
from engine.model import Model
from engine.prefill import PrefillEngine, PrefillJob, run_to_end
from engine.request import GenerationRequest, SamplingParams
from policies.recipe import Recipe, make_recipe

SELECTION_BUDGET = 1024

SELECTORS: Mapping[str, Mapping[str, object]] = {
    "snapkv": {"policy": "snapkv"},
    "snapkv ada": {"policy": "snapkv", "heads": "ada"},
    "snapkv critical": {"policy": "snapkv", "critical": True},
    "h2o": {"policy": "h2o"},
    "scissorhands": {"policy": "scissorhands"},
    "tova": {"policy": "tova"},
    "expected_attention": {"policy": "expected_attention"},
    "keydiff": {"policy": "keydiff"},
    "knorm": {"policy": "knorm"},
    "streaming_llm": {"policy": "streaming_llm"},
    "random": {"policy": "random"},
}


@dataclass(frozen=True)
class Selecting:
    """Seconds: choosing survivors, at the end of the prompt; and observers, while it was computed."""

    select_s: float
    observer_s: float

    @property
    def all_s(self) -> float:
        return self.select_s + self.observer_s


class Prefill(NamedTuple):
    """Wall and processor seconds."""

    wall_s: float
    cpu_s: float


def measure_selection(text: Text, rounds: int) -> dict[str, Selecting]:
    """Every method on one prompt's recorded queries, medians of `rounds`; observers run once."""
    budget = min(SELECTION_BUDGET, text.tokens // 4)
    found = {}
    for name, fields in SELECTORS.items():
        recipe = make_recipe(**fields, budget=budget)
        before = text.observer_s
        text.pack(recipe)  # also warms up
        observer_s = text.observer_s - before
        seconds = [text.pack(recipe).select_s for _ in range(rounds)]
        found[name] = Selecting(statistics.median(seconds), observer_s)
    return found


def prefill(model: Model, ids: Sequence[int], recipe: Recipe) -> Prefill:
    """One prompt through the prefill engine, selection included."""
    engine = PrefillEngine(model)
    request = GenerationRequest("bench", tuple(ids), SamplingParams(temperature=0.0), recipe)
    began, cpu_began = time.perf_counter(), time.process_time()
    engine.add(PrefillJob(request, engine.open_workspace(request)))
    for _ in run_to_end(engine):
        pass
    return Prefill(time.perf_counter() - began, time.process_time() - cpu_began)


def column_sum_share(model: Model, tokens: int) -> float:
    """FLOPs of H2O's second pass over those of the prompt: ALGORITHMS.md 2.5, for this model.

    The prompt: 2 N per weight of its linear layers (of the last one for one row only) and both halves of causal
    attention, q·k and p·v, 2 · N²/2 · D each per query head. The second pass is one such half.
    """
    network = model.network
    head = network.get_output_embeddings()
    weights = sum(
        module.weight.numel()
        for module in network.modules()
        if isinstance(module, nn.Linear) and module is not head
    )
    half = sum(tokens**2 * layer.query_heads * layer.head_dim * layer.readers for layer in model.spec.layers)
    return half / (2 * tokens * weights + 2 * head.weight.numel() + 2 * half)


def decode_recipes(budget: int) -> dict[str, Recipe]:
    """Rows of `budget` slots each: one that only grows, and rules that are shown the attention of every step."""
    cut = {"policy": "streaming_llm", "budget": budget}
    return {
        "grow": make_recipe(**cut),
        "h2o": make_recipe(**cut, decode={"rule": "h2o"}),
        "h2o, every 16": make_recipe(**cut, decode={"rule": "h2o", "every": 16}),
        "tova": make_recipe(**cut, decode="tova"),
        "scissorhands": make_recipe(**cut, decode="scissorhands"),
        "snapkv": make_recipe(**cut, decode="snapkv"),
        "streaming_llm": make_recipe(**cut, decode="streaming_llm"),
    }


class Steps(NamedTuple):
    """Seconds of a step, median; and medians of the ratio to the step of the first kind in the same turn."""

    step_s: float
    ratio: float
    cpu_ratio: float


def measure_steps(lanes: Lanes, packed: Mapping[str, Packed], batch: int, turns: int) -> dict[str, Steps]:
    """`batch` rows of every kind, all in the pool at once, one step of each kind in turn: a busy machine hits all."""
    wall: dict[str, list[float]] = {name: [] for name in packed}
    cpu: dict[str, list[float]] = {name: [] for name in packed}
    # Opened one by one: copies would share pages, and pay for parting from each other.
    with lanes.opened([prompt for prompt in packed.values() for _ in range(batch)]) as opened:
        rows = {name: opened[at * batch : (at + 1) * batch] for at, name in enumerate(packed)}
        for each in rows.values():
            lanes.feed(each, [1, 2])
        for turn in range(turns):
            for name, each in rows.items():
                began, cpu_began = time.perf_counter(), time.process_time()
                lanes.step(each, [turn + 3] * batch)
                wall[name].append(time.perf_counter() - began)
                cpu[name].append(time.process_time() - cpu_began)
    return {
        name: Steps(statistics.median(wall[name]), _median_ratio(wall, name), _median_ratio(cpu, name))
        for name in packed
    }


def _median_ratio(seconds: Mapping[str, Sequence[float]], name: str) -> float:
    first = next(iter(seconds.values()))
    return statistics.median(own / plain for own, plain in zip(seconds[name], first, strict=True))
