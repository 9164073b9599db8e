"""What both kinds of answers share: the envelope, the usage, and the base that is fed batches of events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from math import isnan

from deployments.api.card import ModelCard
from deployments.api.plan import Plan
from engine.report import SelectionReport
from engine.request import Event, PromptEvent, TokenEvent

Json = dict[str, object]


class UsageTally:
    """Token counts of one answer over all its prompts and choices. A prompt counts once whatever `n` is.

    `warnings` are what the user should know of the recipe; `report` whether they asked what selection did; `lossy`
    whether lossy blocks might stand in.
    """

    def __init__(self, warnings: Sequence[str] = (), report: bool = False, lossy: bool = False) -> None:
        self.warnings = warnings
        self.report = report
        self.lossy = lossy
        self.reports: list[SelectionReport] = []
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.lossy_tokens = 0
        self.kept_tokens = 0
        self.payload_bytes = 0
        self.shipped_bytes = 0
        self.completion_tokens = 0
        self.recipe_id = ""

    def add(self, event: Event) -> None:
        """Count one event."""
        if isinstance(event, TokenEvent):
            self.completion_tokens += 1
            return
        self.prompt_tokens += event.prompt_tokens
        self.cached_tokens += event.cached_tokens
        self.lossy_tokens += event.lossy_tokens
        self.kept_tokens += event.kept_tokens
        self.payload_bytes += event.payload_bytes
        self.shipped_bytes += event.shipped_bytes
        self.recipe_id = event.recipe_id
        if self.report and event.report is not None:
            self.reports.append(event.report)

    def as_json(self) -> Json:
        """OpenAI's usage object plus `kv`: what the recipe kept, what was shipped (bytes), and how many of the cached
        tokens were decoded from lossy blocks, where that was allowed.
        """
        kv: Json = {
            "recipe": self.recipe_id,
            "prompt_tokens": self.prompt_tokens,
            "kept_tokens": self.kept_tokens,
            "payload_bytes": self.payload_bytes,
            "shipped_bytes": self.shipped_bytes,
        }
        if self.lossy:
            kv["lossy_tokens"] = self.lossy_tokens
        if self.warnings:
            kv["warnings"] = list(self.warnings)
        if self.reports:
            kv["report"] = report_json(self.reports)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "kv": kv,
        }


def report_json(reports: Sequence[SelectionReport]) -> Json:
    """What selection did, as means over a request's prompts; layers are those that the policy acts on.

    `kept_mass` is a layer's share of the attention of the prompt's last queries that survivors hold, null where no
    attention was observed; `kept_tokens_per_layer` are per kv head, means where heads keep different numbers.
    """
    masses = [report.kept_mass for report in reports if report.kept_mass is not None]
    per_layer = [_mean([_known(mass) for mass in layer]) for layer in zip(*masses, strict=True)]
    kept = [[sum(counts) / len(counts) for counts in report.counts] for report in reports]
    return {
        "kept_mass": _mean(per_layer),
        "kept_mass_per_layer": per_layer or None,
        "budget_entropy": _mean([report.entropy for report in reports]),
        "kept_tokens_per_layer": [_mean(list(layer)) for layer in zip(*kept, strict=True)],
        "layers": list(reports[0].layers),
    }


def _known(mass: float) -> float | None:
    return None if isnan(mass) else mass


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(sum(known) / len(known), 6) if known else None


class Answer(ABC):
    """Words one answer. Feed it every batch through `chunks` (streaming) or `collect` (whole), never both.

    Subclasses write four small pieces; the base groups events by choice, counts usage and adds the envelope.
    """

    whole_object: str
    chunk_object: str

    def __init__(self, card: ModelCard, plan: Plan, created: int) -> None:
        self.card = card
        self.plan = plan
        recipes = [request.recipe for request in plan.requests]
        warnings = dict.fromkeys(told for recipe in recipes for told in recipe.warnings)
        lossy = any(request.at_rest for request in plan.requests)
        self.usage = UsageTally(tuple(warnings), plan.report, lossy)
        self._created = created

    def chunks(self, prompt: int, events: Sequence[Event]) -> list[Json]:
        """The stream's chunks for one batch of prompt `prompt`; may be none while text is held back."""
        made: list[Json] = []
        for opening in self._count(events):
            for choice in range(self.plan.n):
                made += self._opening(self._index(prompt, choice), prompt, opening)
        for choice, tokens in _by_choice(events).items():
            made += self._delta(self._index(prompt, choice), tokens)
        return [self._chunk([choice_chunk]) for choice_chunk in made]

    def usage_chunk(self) -> Json:
        """The last chunk of a stream whose client asked for usage."""
        return {**self._chunk([]), "usage": self.usage.as_json()}

    def collect(self, prompt: int, events: Sequence[Event]) -> None:
        """Keep one batch for `body`."""
        for opening in self._count(events):
            for choice in range(self.plan.n):
                self._keep_opening(self._index(prompt, choice), prompt, opening)
        for choice, tokens in _by_choice(events).items():
            self._keep(self._index(prompt, choice), tokens)

    def body(self) -> Json:
        """The whole answer; every choice has finished."""
        choices = [self._choice(index) for index in range(self.plan.n * len(self.plan.requests))]
        return {**self._envelope(self.whole_object), "choices": choices, "usage": self.usage.as_json()}

    @abstractmethod
    def _opening(self, index: int, prompt: int, event: PromptEvent) -> list[Json]:
        """What a stream says for a choice before its first token."""

    @abstractmethod
    def _delta(self, index: int, tokens: list[TokenEvent]) -> list[Json]:
        """What a stream says for some tokens of one choice."""

    @abstractmethod
    def _keep_opening(self, index: int, prompt: int, event: PromptEvent) -> None:
        """Start a choice of a whole answer."""

    @abstractmethod
    def _keep(self, index: int, tokens: list[TokenEvent]) -> None:
        """Add tokens to a choice of a whole answer."""

    @abstractmethod
    def _choice(self, index: int) -> Json:
        """A finished choice of a whole answer."""

    def _index(self, prompt: int, choice: int) -> int:
        return prompt * self.plan.n + choice

    def _count(self, events: Sequence[Event]) -> list[PromptEvent]:
        for event in events:
            self.usage.add(event)
        return [event for event in events if isinstance(event, PromptEvent)]

    def _chunk(self, choices: list[Json]) -> Json:
        chunk: Json = {**self._envelope(self.chunk_object), "choices": choices}
        if self.plan.include_usage:
            chunk["usage"] = None
        return chunk

    def _envelope(self, kind: str) -> Json:
        return {
            "id": self.plan.answer_id,
            "object": kind,
            "created": self._created,
            "model": self.card.names[0],
            "system_fingerprint": self.card.fingerprint or None,
        }


def _by_choice(events: Iterable[Event]) -> dict[int, list[TokenEvent]]:
    grouped: dict[int, list[TokenEvent]] = {}
    for event in events:
        if isinstance(event, TokenEvent):
            grouped.setdefault(event.choice, []).append(event)
    return grouped
