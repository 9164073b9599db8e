"""An event loop on virtual time: what sleeps for an hour of it is back at once, in the right order."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class _Instant(selectors.DefaultSelector):
    """Does not wait: lets the loop's clock jump."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("everybody waits for something that never comes")
            self.loop.now += max(timeout, 0)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only in sleeps, and then at once. RuntimeError when nothing can happen any more.

    Threads and sockets of others are not waited for.
    """

    def __init__(self) -> None:
        self.now = 1000.0
        selector = _Instant()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now


def run(work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
    """Run on virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work())
