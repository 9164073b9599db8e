"""What the HTTP edge needs from whatever serves the model."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from engine.request import Event, GenerationRequest


@dataclass(frozen=True)
class Readiness:
    """Whether a request sent now would be served, and what each part says about itself."""

    ready: bool
    detail: dict[str, str] = field(default_factory=dict)


class Backend(Protocol):
    """Runs requests. All methods are called on the gateway's event loop, many at a time."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[list[Event], None]:
        """Batches of events of one request, as an async generator (`async def` with `yield`).

        The first event is a `PromptEvent`; then come the choices' `TokenEvent`s, each choice's indices
        contiguous from 0 and its last one with a finish reason. Raises types of `engine.errors`
        (`InvalidRequest`, `Overloaded`, ...); anything else becomes a 500. Closing or cancelling the
        generator releases everything behind it. It is not read ahead of the client by more than a bounded
        number of events.
        """
        ...

    async def ready(self) -> Readiness:
        """Readiness now; a call that raises or outlasts `probe_timeout_s` counts as not ready."""
        ...

    async def stats(self) -> Mapping[str, Mapping[str, float]]:
        """Source (a replica's name) to gauge name to value; names are listed in `metrics.GAUGES`."""
        ...
