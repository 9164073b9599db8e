"""What computing prompt tokens costs on this machine, learned from the steps that ran."""

from __future__ import annotations

from collections.abc import Sequence

# Before anything was measured: slow enough that loading looks worth while.
_UNMEASURED_S_PER_TOKEN = 1e-3
# How much of what is known is kept while so many tokens are computed.
_KEPT, _PER_TOKENS = 0.95, 1024


class PrefillPace:
    """Seconds of a step ≈ a · tokens + b · (tokens that they attend to, summed), fitted by least squares.

    Older steps count less, by the tokens computed since: a stream of tiny steps, which cost more per token, does not
    wash out what long prompts taught. One thread calls `note`; any may ask.
    """

    def __init__(self) -> None:
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)
        self._fit = (_UNMEASURED_S_PER_TOKEN, 0.0)

    def note(self, runs: Sequence[tuple[int, int]], seconds: float) -> None:
        """A step computed these (first position, token count) in so many seconds."""
        tokens = float(sum(count for _, count in runs))
        pairs = sum(_pairs(start, start + count) for start, count in runs)
        if not tokens:
            return
        kept = _KEPT ** (tokens / _PER_TOKENS)
        new = (tokens * tokens, tokens * pairs, pairs * pairs, tokens * seconds, pairs * seconds)
        self._sums = tuple(kept * old + one for old, one in zip(self._sums, new, strict=True))
        self._fit = _solve(*self._sums)

    def seconds_for(self, start: int, stop: int) -> float:
        """Seconds that computing the prompt's tokens from position `start` up to `stop` would take."""
        linear, quadratic = self._fit
        return linear * (stop - start) + quadratic * _pairs(start, stop)


def _pairs(start: int, stop: int) -> float:
    return (stop * stop - start * start) / 2


def _solve(tt: float, tp: float, pp: float, ts: float, ps: float) -> tuple[float, float]:
    """Non-negative coefficients of least squares; steps of one kind only say nothing of the split: linear."""
    determinant = tt * pp - tp * tp
    if determinant > 1e-6 * tt * pp:
        linear, quadratic = (pp * ts - tp * ps) / determinant, (tt * ps - tp * ts) / determinant
        if linear >= 0 and quadratic >= 0:
            return linear, quadratic
        if linear < 0:
            return 0.0, ps / pp
    return ts / tt, 0.0
