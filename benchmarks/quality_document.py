"""One document's full KV and all its queries, from which any recipe's survivors follow without reading it again.

A service computes a prompt under one recipe. A benchmark wants dozens of recipes of the same prompt: here it is read
once, every query is kept beside keys and values, and each recipe goes through the engine's own plan, selection and
snapshot (`engine/plan.py`, `engine/survivors.py`, `engine/snapshot.py`), with its observer shown the same pieces.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.model import Model
from engine.plan import PromptPlan, plan_prompt
from engine.report import SelectionReport
from engine.request import GenerationRequest, SamplingParams
from engine.snapshot import SnapshotLayout, pack_prompt, prompt_meta
from engine.survivors import select_survivors
from engine.workspace import PrefillPort, Workspace
from policies.policy import ObservedLayer, Policy
from policies.recipe import Recipe

_CHUNK = 1024


class _Recorder:
    """In place of a `QueryWatch`: keeps every query [Hq, N, D] of a layer and its log-sum-exp [Hq, N]."""

    failure = None

    def __init__(self, heads: int, tokens: int, head_dim: int, dtype: torch.dtype) -> None:
        self.queries = torch.empty(heads, tokens, head_dim, dtype=dtype)
        self.lse = torch.empty(heads, tokens)
        self.cuts: list[int] = []

    def keep(self, reader: int, query: Tensor, start: int) -> None:
        assert reader == 0, "models whose layers share KV are not measured here"

    def observe(self, query: Tensor, keys: Tensor, lse: Tensor, start: int) -> None:
        stop = start + query.shape[1]
        self.queries[:, start:stop], self.lse[:, start:stop] = query, lse
        self.cuts = [cut for cut in self.cuts if cut <= start] + [stop]

    def pieces(self, tokens: int) -> Iterator[tuple[int, int]]:
        """[start, stop) of the pieces in which the first `tokens` were computed."""
        start = 0
        for stop in (cut for cut in self.cuts if cut <= tokens):
            yield start, stop
            start = stop


class _Played:
    """What a layer's watch says once a prompt is filled, from the recording of its queries."""

    failure = None

    def __init__(self, text: Text, layer: int) -> None:
        self._text = text
        self._layer = layer

    def last(self, count: int) -> Tensor | None:
        n, queries = self._text.tokens, self._text.recorders[self._layer].queries
        return queries[:, n - count : n] if count else None

    def observed(self) -> object | None:
        return self._text.observed(self._layer)


class Packed(NamedTuple):
    """A prompt's snapshot under one recipe; `select_s`: seconds that selection took, observers not counted."""

    recipe: Recipe
    layout: SnapshotLayout
    buffer: Tensor
    report: SelectionReport
    select_s: float


class Text(Workspace):
    """The first `tokens` of a document as a filled workspace: what selection reads. Shares the document's memory."""

    def __init__(self, document: Document, tokens: int) -> None:
        self.spec = document.spec
        self.ids = tuple(document.ids[:tokens])
        self.tokens = self.filled = tokens
        self.recorders: Mapping[int, _Recorder] = document.recorders
        self.keys = [keys[:, :tokens] for keys in document.keys]
        self.values = [values[:, :tokens] for values in document.values]
        self.watches = {index: _Played(self, index) for index in self.recorders}  # type: ignore[assignment]
        self.observer_s = 0.0
        self._seen: dict[tuple[object, ...], object] = {}
        self._policy: Policy | None = None

    def plan(self, recipe: Recipe) -> PromptPlan:
        """What the engine would plan for this prompt under `recipe`."""
        return plan_prompt(self.spec, GenerationRequest("bench", self.ids, SamplingParams(), recipe))

    def pack(self, recipe: Recipe) -> Packed:
        """The snapshot that prefill would ship under `recipe`."""
        plan = self.plan(recipe)
        self._policy = plan.policy
        for place, index in enumerate(plan.scored):
            if plan.observed(place):
                self.observed(index)
        began = time.perf_counter()
        survivors = select_survivors(self, plan)
        took = time.perf_counter() - began
        meta = prompt_meta(self.spec, self.ids, recipe.recipe_id, survivors.layers, survivors.arrays)
        layout = SnapshotLayout(self.spec, meta)
        buffer = torch.empty(layout.nbytes, dtype=torch.uint8)
        pack_prompt(layout, buffer, self, survivors.layers)
        return Packed(recipe, layout, buffer, survivors.report, took)

    def observed(self, layer: int) -> object | None:
        """What the present policy's observer makes of the recorded queries; asked once per kind of observer.

        The seconds that observers were busy add up in `observer_s`.
        """
        assert self._policy is not None
        recipe, spec = self._policy.recipe, self.spec.layers[layer]
        key = (type(self._policy), recipe.sinks, layer)
        if key not in self._seen:
            observer = self._policy.observer(
                ObservedLayer(
                    kv_heads=spec.kv_heads,
                    query_heads=spec.query_heads,
                    head_dim=spec.head_dim,
                    tokens=self.tokens,
                    scale=spec.scale,
                    softcap=spec.softcap,
                    sinks=spec.sinks,
                    rotation=spec.rotation,
                )
            )
            if observer is None:
                return None
            recorder, keys = self.recorders[layer], self.keys[layer]
            began = time.perf_counter()
            with torch.inference_mode():
                for start, stop in recorder.pieces(self.tokens):
                    cut = slice(start, stop)
                    rows, lse = recorder.queries[:, cut].contiguous(), recorder.lse[:, cut].contiguous()
                    observer.add(rows, keys[:, :stop], lse, start)
                self._seen[key] = observer.result()
            self.observer_s += time.perf_counter() - began
        return self._seen[key]


class Document(Workspace):
    """A token sequence that is read once and can be gone on from at any earlier point.

    Its KV is a cold prefill's up to where pieces of attention end (rounding): they end at multiples of 256 tokens, and
    wherever a `read` ended.
    """

    def __init__(self, model: Model, most_tokens: int) -> None:
        spec = model.spec
        self.recorders = {
            index: _Recorder(layer.query_heads, most_tokens, layer.head_dim, spec.dtype)
            for index, layer in enumerate(spec.layers)
            if layer.window is None
        }
        super().__init__(spec, most_tokens, self.recorders)  # type: ignore[arg-type]
        self.model = model
        self.ids: list[int] = []
        self.logits: dict[int, Tensor] = {}

    def read(self, ids: Sequence[int]) -> Text:
        """Append `ids` (at least one); → the document up to here. `logits` of its end are noted by its length."""
        assert ids and len(self.ids) + len(ids) <= self.tokens
        for at in range(0, len(ids), _CHUNK):
            part = list(ids[at : at + _CHUNK])
            start = len(self.ids)
            port = PrefillPort([(self, start, len(part))])
            positions = range(start, start + len(part))
            found = self.model.forward(part, positions, port, [len(part) - 1])
            self.ids.extend(part)
            self.filled = len(self.ids)
        self.logits[self.filled] = found[0].float()
        return Text(self, self.filled)

    def back_to(self, text: Text) -> None:
        """Forget what was read after `text`."""
        assert tuple(self.ids[: text.tokens]) == text.ids
        del self.ids[text.tokens :]
        self.filled = text.tokens
