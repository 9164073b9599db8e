"""When to stop asking a tier that does not answer, and when to try it again."""

from __future__ import annotations


class Breaker:
    """Open after `failures` failures in a row; from then on one try per `pause_s` seconds, until one succeeds.

    Pure: `now` (seconds, any monotonic clock) is passed in. Calls that were let through at the same time may report
    in any order. A try that never reports costs nothing: the next one is due `pause_s` later all the same.
    """

    def __init__(self, failures: int, pause_s: float) -> None:
        if failures < 1 or pause_s <= 0:
            raise ValueError(
                f"a breaker opens after 1 failure or more, for a while, not {failures} and {pause_s} s"
            )
        self._failures = failures
        self._pause_s = pause_s
        self._in_a_row = 0
        self._next_try = 0.0

    @property
    def is_open(self) -> bool:
        """Whether calls are refused, but for the one try per pause."""
        return self._in_a_row >= self._failures

    def allow(self, now: float) -> bool:
        """Whether to make the call. True while closed; open, it is True once per pause: that call is the try."""
        if not self.is_open:
            return True
        if now < self._next_try:
            return False
        self._next_try = now + self._pause_s
        return True

    def succeeded(self) -> None:
        """A call was answered: closed again."""
        self._in_a_row = 0

    def answers(self) -> None:
        """Something smaller than a call was answered: closed again, but the next failure opens it at once."""
        self._in_a_row = min(self._in_a_row, self._failures - 1)

    def failed(self, now: float) -> None:
        """A call was not answered, or too late."""
        self._in_a_row += 1
        if self.is_open:
            self._next_try = now + self._pause_s
