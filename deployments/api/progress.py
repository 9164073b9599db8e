"""Whether a backend's events make whole choices, so that no stream ends silently or with a gap. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from deployments.api.errors import BrokenStream
from engine.request import Event, GenerationRequest, PromptEvent, TokenEvent


class Progress:
    """Follows one request's events; `accept` and `end` raise `BrokenStream` for what cannot be an answer."""

    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._opened = False
        self._next = [0] * request.sampling.n
        self._open = set(range(request.sampling.n))

    @property
    def finished(self) -> bool:
        """Every choice said why it ended."""
        return not self._open

    def accept(self, events: Sequence[Event]) -> None:
        """Check the next events of the stream."""
        for event in events:
            if isinstance(event, PromptEvent):
                self._accept_prompt(event)
            else:
                self._accept_token(event)

    def end(self) -> None:
        """The stream ended."""
        if self._open:
            raise BrokenStream(f"stream ended with unfinished choices {sorted(self._open)}")

    def _accept_prompt(self, event: PromptEvent) -> None:
        if self._opened:
            raise BrokenStream("second prompt event")
        self._opened = True
        if self._request.prompt_logprobs is not None:
            given = event.prompt_logprobs
            if given is None or len(given) != len(self._request.prompt):
                raise BrokenStream("prompt log-probabilities were asked for and are missing")

    def _accept_token(self, event: TokenEvent) -> None:
        if not self._opened:
            raise BrokenStream("token before the prompt event")
        if event.choice not in self._open:
            raise BrokenStream(f"token for choice {event.choice}, which is unknown or finished")
        if event.index != self._next[event.choice]:
            raise BrokenStream(f"choice {event.choice}: token {event.index}, not {self._next[event.choice]}")
        if self._request.sampling.logprobs is not None and event.logprob is None:
            raise BrokenStream("log-probabilities were asked for and are missing")
        self._next[event.choice] += 1
        if event.finish_reason is not None:
            self._open.remove(event.choice)
