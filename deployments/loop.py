"""A thread that runs an engine: step while there is work, sleep while there is none, report what happened."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

Result = TypeVar("Result")
_log = logging.getLogger("kvtide.engine")


class EngineLoop(Generic[Result]):
    """Calls `step` in one thread for as long as `busy` says so; `wake` after giving it work.

    `deliver` receives each step's results, `fail` an exception that a step raised; both are called in the thread. An
    engine whose step raised lost its requests (`fail` says so to them) but may serve new ones; after
    `FAILURES_IN_A_ROW` such steps it is `broken`, for a health check to see. A `fail` that raises ends the
    thread. `idle_check` is called in the thread when it runs out of work, at most every `CHECK_EVERY_S` seconds; with
    its first AssertionError the engine is `broken`, too.
    """

    FAILURES_IN_A_ROW = 3
    CHECK_EVERY_S = 30.0

    def __init__(
        self,
        name: str,
        step: Callable[[], list[Result]],
        busy: Callable[[], bool],
        deliver: Callable[[list[Result]], None],
        fail: Callable[[Exception], None],
        threads: int,
        idle_check: Callable[[], None] = lambda: None,
    ) -> None:
        self._step, self._busy, self._deliver, self._fail = step, busy, deliver, fail
        self._idle_check, self._check_due = idle_check, time.monotonic()
        self._unsound = False
        self._threads = threads
        self._condition = threading.Condition()
        self._stopping = False
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether work given to the engine will be done, or reported as failed."""
        return self._thread.is_alive()

    @property
    def broken(self) -> bool:
        """Whether the engine cannot be trusted any more."""
        return self._unsound or self._failures >= self.FAILURES_IN_A_ROW or not self.alive

    def wake(self) -> None:
        """There may be something to do."""
        with self._condition:
            self._condition.notify()

    def stop(self) -> None:
        """End the thread after the running step and wait for it."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        self._thread.join()

    def _run(self) -> None:
        torch.set_num_threads(self._threads)  # OpenMP keeps this per calling thread
        while True:
            if not self._busy():
                self._check_if_due()
            with self._condition:
                while not self._stopping and not self._busy():
                    self._condition.wait()
                if self._stopping:
                    return
            try:
                results = self._step()
            except Exception as error:  # noqa: BLE001 - whatever it was, its requests must hear of it
                self._failures += 1
                _log.exception("a step failed (%d in a row)", self._failures)
                self._fail(error)
                continue
            if results:  # a step with nothing to do, as after a failure, proves nothing
                self._failures = 0
                self._deliver(results)

    def _check_if_due(self) -> None:
        if time.monotonic() < self._check_due:
            return
        self._check_due = time.monotonic() + self.CHECK_EVERY_S
        try:
            self._idle_check()
        except AssertionError:
            self._unsound = True
            _log.exception("the idle engine's books are wrong")
