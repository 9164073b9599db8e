"""What decode keeps of one request on its way: its attempts, and the events between engine and consumer."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from engine.request import Event, GenerationRequest


class EventStream:
    """Events of one request on their way to its generator.

    Holds at most `n` x `max_tokens` of them. A consumer that stays away is the gateway's to cut off (its own buffer is
    bounded, and it closes the generator after `slow_reader_timeout_s`); pausing here would hold pages for it.
    """

    def __init__(self) -> None:
        self._arrived = asyncio.Event()
        self._events: list[Event] = []
        self._error: BaseException | None = None

    def put(self, events: Sequence[Event], error: BaseException | None = None) -> None:
        self._events.extend(events)
        self._error = self._error or error
        self._arrived.set()

    def follow(self, work: asyncio.Task[None]) -> None:
        """Report it when `work` fails."""
        work.add_done_callback(
            lambda done: (
                None if done.cancelled() or done.exception() is None else self.put((), done.exception())
            )
        )

    async def take(self) -> list[Event]:
        """All events that have come since the last call, at least one; raises what was reported once they are taken."""
        await self._arrived.wait()
        events, self._events = self._events, []
        if events:
            if self._error is None:
                self._arrived.clear()
            return events
        assert self._error is not None, "woken for nothing"
        raise self._error


class Journey:
    """Attempts of one request and the deadline of its first token."""

    def __init__(self, request: GenerationRequest, attempts: int, deadline: float) -> None:
        self.request = request
        self.deadline = deadline
        self.used = 0
        self._attempts = attempts

    @property
    def attempts_left(self) -> int:
        return self._attempts - self.used

    def next_attempt(self) -> GenerationRequest:
        """The request under the next attempt number, which revokes what earlier ones left behind."""
        self.used += 1
        return replace(self.request, attempt=self.request.attempt + self.used - 1)
