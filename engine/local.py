"""Prefill and decode in one process and one thread: `kvtide generate`, and the engine's own tests.

The same parts as in the service, joined without transfer: survivors go from the workspace into a packed snapshot in
host memory and from there into pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from engine.batch import DecodeEngine
from engine.model import Model
from engine.pool import PagePool
from engine.prefill import PrefillDone, PrefillEngine, PrefillFailed, PrefillJob
from engine.prefix import PrefixCache
from engine.request import Event, GenerationRequest, PromptEvent, TokenEvent
from engine.sequence import Choice
from engine.text import TokenPieces


@dataclass
class Completion:
    """All events of one request, gathered: per choice its text and token ids."""

    prompt: PromptEvent
    choices: int
    texts: list[str] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    events: list[TokenEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.texts = [""] * self.choices
        self.tokens = [[] for _ in range(self.choices)]

    def take(self, event: TokenEvent) -> None:
        assert event.index == len(self.tokens[event.choice]), "a gap or a repeat"
        self.events.append(event)
        self.texts[event.choice] += event.text
        self.tokens[event.choice].append(event.token_id)


def prompt_event(done: PrefillDone, shipped_bytes: int) -> PromptEvent:
    """What the prompt cost, from a finished prefill."""
    job = done.job
    wanted = job.request.prompt_logprobs is not None
    return PromptEvent(
        prompt_tokens=len(job.request.prompt),
        cached_tokens=job.cached,
        kept_tokens=done.layout.kept_tokens,
        payload_bytes=done.layout.payload_bytes,
        shipped_bytes=shipped_bytes,
        recipe_id=job.request.recipe.recipe_id,
        prompt_logprobs=tuple(job.prompt_logprobs) if wanted else None,
        report=done.report,
        lossy_tokens=job.lossy,
    )


class LocalEngine:
    """Serves requests in one process. Not thread-safe."""

    def __init__(
        self,
        model: Model,
        pieces: TokenPieces,
        pool: PagePool,
        *,
        chunk_tokens: int = 1024,
        prefix: PrefixCache | None = None,
    ) -> None:
        self.model = model
        self.pieces = pieces
        self.prefix = prefix
        self.prefill = PrefillEngine(model, chunk_tokens=chunk_tokens)
        self.decode = DecodeEngine(model, pool)

    def stream(self, requests: Sequence[GenerationRequest]) -> Iterator[tuple[str, list[Event]]]:
        """Run requests together; yields (request id, events) as they come. Raises `GenerationFailed`.

        An error, or leaving the iterator before its end, ends everything that runs in this engine.
        """
        try:
            for request in requests:
                self.start(request)
            while self.prefill.queued or not self.decode.idle:
                for done in self.prefill.step():
                    if isinstance(done, PrefillFailed):
                        raise done.error
                    yield done.job.request.request_id, self._join(done)
                for result in self.decode.step():
                    if result.error is not None:
                        raise result.error
                    yield result.request_id, list(result.events)
        finally:
            self.prefill.fail_all()
            self.decode.fail_all()

    def generate(self, requests: Sequence[GenerationRequest]) -> dict[str, Completion]:
        """Run requests together to their end."""
        found: dict[str, Completion] = {}
        choices = {request.request_id: request.sampling.n for request in requests}
        for request_id, events in self.stream(requests):
            for event in events:
                if isinstance(event, PromptEvent):
                    found[request_id] = Completion(event, choices[request_id])
                else:
                    found[request_id].take(event)
        return found

    def start(self, request: GenerationRequest) -> None:
        """Load what is known of the prompt and queue the rest."""
        workspace = self.prefill.open_workspace(request)
        cached = 0
        if self.prefix is not None:
            limit = len(request.prompt) - self.prefill.must_compute(request)
            keys, worth_s = (
                self.prefix.keys(request.prompt, request.tenant),
                self.prefill.seconds_for(0, limit),
            )
            cached = self.prefix.load(workspace, keys, limit, worth_s, request.at_rest)
        self.prefill.add(PrefillJob(request, workspace, cached))

    def _join(self, done: PrefillDone) -> list[Event]:
        request = done.job.request
        choices = [
            Choice(request, index, self.pieces, self.model.spec.end_tokens)
            for index in range(request.sampling.n)
        ]
        events: list[Event] = [prompt_event(done, 0)]
        events += [choice.accept(first) for choice, first in zip(choices, done.first, strict=True)]
        if any(choice.finish_reason is None for choice in choices):
            buffer = torch.empty(done.layout.nbytes, dtype=torch.uint8)
            done.pack(buffer)
            self.decode.add(choices, done.layout, buffer)
        if self.prefix is not None:
            keys = self.prefix.keys(request.prompt, request.tenant)
            self.prefix.store(done.job.workspace, keys, request.tenant)
        return events
