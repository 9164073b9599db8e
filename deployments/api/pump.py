"""Runs the backend's streams of one HTTP request into one bounded buffer that the response reads."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

from deployments.api.backend import Backend
from deployments.api.errors import BackendFailed, BackendStalled, SlowReader
from deployments.api.progress import Progress
from engine.errors import KvtideError
from engine.request import Event, GenerationRequest

_log = logging.getLogger("kvtide.api")


class Batch(NamedTuple):
    """Some events of prompt `prompt`, never none."""

    prompt: int
    events: list[Event]


@dataclass(frozen=True)
class PumpLimits:
    """Events held for the reader, and time bounds in seconds."""

    buffer_events: int
    slow_reader_timeout_s: float
    first_timeout_s: float
    idle_timeout_s: float


class EventPump:
    """Async context manager and async iterator of `Batch`es.

    Inside it one task per request reads the backend. A task stops reading while `buffer_events` are held (one
    batch may overshoot), and gives up with `SlowReader` when that lasts `slow_reader_timeout_s`. The first
    failure of any task closes the others; the reader gets what was held, then the failure. Leaving the
    context closes every backend stream and waits for that. `observe` sees every batch as it arrives, however
    slow the reader.
    """

    def __init__(
        self,
        backend: Backend,
        requests: Sequence[GenerationRequest],
        limits: PumpLimits,
        observe: Callable[[int, list[Event]], None] = lambda prompt, events: None,
    ) -> None:
        self._backend = backend
        self._requests = requests
        self._limits = limits
        self._observe = observe
        self._held: deque[Batch] = deque()
        self._held_events = 0
        self._changed = asyncio.Condition()
        self._failure: KvtideError | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._running = 0

    async def __aenter__(self) -> EventPump:
        self._tasks = [asyncio.create_task(self._run(i, request)) for i, request in enumerate(self._requests)]
        self._running = len(self._tasks)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def readable(self, timeout_s: float) -> bool:
        """Whether `anext` answers at once (a batch, the end or the failure), waiting up to `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(self._has_news)
        except TimeoutError:
            return False
        return True

    def __aiter__(self) -> EventPump:
        return self

    async def __anext__(self) -> Batch:
        async with self._changed:
            await self._changed.wait_for(self._has_news)
            if self._held:
                batch = self._held.popleft()
                self._held_events -= len(batch.events)
                self._changed.notify_all()
                return batch
        if self._failure is not None:
            raise self._failure
        raise StopAsyncIteration

    def _has_news(self) -> bool:
        return bool(self._held) or self._failure is not None or not self._running

    def _has_room(self) -> bool:
        return self._held_events < self._limits.buffer_events

    def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _run(self, prompt: int, request: GenerationRequest) -> None:
        failure: KvtideError | None = None
        try:
            await self._copy(prompt, request)
        except KvtideError as raised:
            failure = raised
        except Exception as raised:  # noqa: BLE001 - other people's code: the client gets an error, always
            _log.exception("backend failed on request %s", request.request_id)
            failure = BackendFailed(str(raised))
        async with self._changed:
            self._running -= 1
            if failure is not None and self._failure is None:
                self._failure = failure
                for task in self._tasks:
                    if task is not asyncio.current_task():
                        task.cancel()
            self._changed.notify_all()

    async def _copy(self, prompt: int, request: GenerationRequest) -> None:
        progress = Progress(request)
        wait_s = self._limits.first_timeout_s
        async with aclosing(self._backend.generate(request)) as stream:
            while not progress.finished:
                try:
                    async with asyncio.timeout(wait_s) as bound:
                        events = await anext(stream)
                except StopAsyncIteration:
                    break
                except TimeoutError:
                    if not bound.expired():  # the backend's own
                        raise
                    raise BackendStalled(f"no events for {wait_s} s") from None
                if events:
                    progress.accept(events)
                    self._observe(prompt, events)
                    await self._put(Batch(prompt, events))
                    wait_s = self._limits.idle_timeout_s
        progress.end()

    async def _put(self, batch: Batch) -> None:
        try:
            async with asyncio.timeout(self._limits.slow_reader_timeout_s), self._changed:
                await self._changed.wait_for(self._has_room)
                self._held.append(batch)
                self._held_events += len(batch.events)
                self._changed.notify_all()
        except TimeoutError:
            raise SlowReader("the client's buffer stayed full") from None
