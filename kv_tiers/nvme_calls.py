"""Blocking work of an event loop's calls: in threads, under a deadline, and never abandoned half-way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

_T = TypeVar("_T")

Stop: TypeAlias = Callable[[], bool]
"""Whether to begin nothing more."""


@dataclass(frozen=True)
class Deadline:
    """A call of n bytes may take `base_s` + n / `bytes_per_s` seconds."""

    base_s: float = 2.0
    bytes_per_s: float = 100e6

    def of(self, nbytes: int) -> float:
        """Seconds."""
        return self.base_s + nbytes / self.bytes_per_s


@dataclass(frozen=True)
class Ended(Generic[_T]):
    """What the work returned, None if it was skipped. `late`: not before its deadline. `cancelled`: its caller was."""

    value: _T | None
    late: bool
    cancelled: bool

    def resume(self) -> None:
        """The cancellation that had to wait."""
        if self.cancelled:
            raise asyncio.CancelledError


class WorkerCalls:
    """Runs work in `threads` threads. Used by one event loop."""

    def __init__(self, threads: int, name: str, deadline: Deadline) -> None:
        self._deadline = deadline
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._stops: set[threading.Event] = set()
        self._open = 0
        self._quiet = asyncio.Event()
        self._quiet.set()

    @property
    def open(self) -> int:
        """How many calls are under way."""
        return self._open

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around a whole call, with what it does before and after its work: `finish` waits for that too."""
        self._open += 1
        self._quiet.clear()
        try:
            yield
        finally:
            self._open -= 1
            if not self._open:
                self._quiet.set()

    async def run(
        self, work: Callable[[Stop], _T], nbytes: int, late: Callable[[], None], *, may_skip: bool = False
    ) -> Ended[_T]:
        """Run `work(stop)` to its end, however long that takes, also when the caller is cancelled.

        `stop()` is true from the deadline on, when `late` is called, and after a cancellation or `finish`. `may_skip`:
        what no thread has taken up at the deadline, since all of them hang, is not run at all.
        """
        loop = asyncio.get_running_loop()
        stop = threading.Event()
        is_late = cancelled = False

        def too_late() -> None:
            nonlocal is_late
            is_late = True
            stop.set()
            if may_skip:
                submitted.cancel()  # in vain once it runs
            late()

        self._stops.add(stop)
        submitted = self._pool.submit(work, stop.is_set)
        timer = loop.call_later(self._deadline.of(nbytes), too_late)
        future = asyncio.wrap_future(submitted)
        while not future.done():
            try:
                await asyncio.wait((future,))
            except asyncio.CancelledError:
                cancelled = True
                stop.set()
        timer.cancel()
        self._stops.discard(stop)
        return Ended(None if future.cancelled() else future.result(), is_late, cancelled)

    async def finish(self) -> bool:
        """Stop what is under way; whether all of it ended in time."""
        for stop in self._stops:
            stop.set()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._quiet.wait(), self._deadline.base_s)
        return not self._open

    def close(self) -> None:
        """Threads end with their work."""
        self._pool.shutdown(wait=False)
