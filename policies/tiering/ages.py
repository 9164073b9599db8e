"""Ages of blocks in bins, and what hazards by age make a block worth."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import exp, expm1

_PER_OCTAVE = 2
_FIRST_S = 1.0
_OCTAVES = 17

STARTS: tuple[float, ...] = (
    0.0,
    *(_FIRST_S * 2 ** (step / _PER_OCTAVE) for step in range(_OCTAVES * _PER_OCTAVE)),
)
"""Where each bin of ages begins, seconds: 0, 1, 1.41, 2, … about a day.

The first is as wide as that because little is ever seen of ages below a second, and a chance guessed for a very short
time would be an enormous hazard.
"""

ENDS: tuple[float, ...] = (*STARTS[1:], 2 * STARTS[-1])
WIDTHS: tuple[float, ...] = tuple(end - start for start, end in zip(STARTS, ENDS, strict=True))
BINS = len(STARTS)

PRIOR_REUSE = 0.02
"""Before anything is known: this chance of reuse in each bin, which ranks blocks as LRU does."""


def bin_of(age: float) -> int:
    """The bin of an age in seconds."""
    return min(BINS - 1, max(0, bisect_right(STARTS, age) - 1))


def chance(rates: Sequence[float], age: float, horizon: float) -> float:
    """Chance of reuse between `age` and `horizon`, seconds, of blocks not used until `age`; hazards per second."""
    expected = 0.0
    for age_bin in range(bin_of(age), BINS):
        if STARTS[age_bin] >= horizon:
            break
        seconds = min(ENDS[age_bin], horizon) - max(STARTS[age_bin], age)
        expected += rates[age_bin] * max(0.0, seconds)
    return -expm1(-expected)


def gittins(rates: Sequence[float]) -> list[float]:
    """For each bin the best ratio, over all later ends, of chance of reuse to expected seconds until reuse or end.

    From the last bin back: a bin joins those behind it as long as they are worth more than it is alone.
    """
    index = [0.0] * BINS
    joined: list[tuple[float, float, float, float]] = []
    for age_bin in range(BINS - 1, -1, -1):
        survives = exp(-rates[age_bin] * WIDTHS[age_bin])
        reused = -expm1(-rates[age_bin] * WIDTHS[age_bin])
        seconds = reused / rates[age_bin]
        while joined and joined[-1][0] * seconds >= reused:
            _, more, longer, survive_too = joined.pop()
            reused += survives * more
            seconds += survives * longer
            survives *= survive_too
        index[age_bin] = reused / seconds
        joined.append((index[age_bin], reused, seconds, survives))
    return index


class Counts:
    """Reuses and time at risk of blocks of one kind, by age bin.

    Time in a bin is linear in the clock, so blocks that sit there cost nothing.
    """

    __slots__ = ("events", "index", "offset", "rates", "weight")

    def __init__(self) -> None:
        self.events = [0.0] * BINS
        self.weight = [0.0] * BINS  # of blocks in the bin now
        self.offset = [0.0] * BINS  # time at risk is offset + weight * now
        self.rates: list[float] = []
        self.index: list[float] = []

    def enter(self, age_bin: int, weight: float, time: float) -> None:
        """Blocks of `weight` come into a bin."""
        self.offset[age_bin] -= weight * time
        self.weight[age_bin] += weight

    def leave(self, age_bin: int, weight: float, time: float) -> None:
        """Blocks of `weight` go: older, used again, of another kind or forgotten."""
        self.enter(age_bin, -weight, time)

    def reused(self, age_bin: int, weight: float) -> None:
        """Blocks of `weight` were used again at an age of that bin."""
        self.events[age_bin] += weight

    def at_risk(self, now: float) -> list[float]:
        """Time at risk until `now`, weight times seconds, by bin."""
        return [
            max(0.0, offset + weight * now) for offset, weight in zip(self.offset, self.weight, strict=True)
        ]

    def fade(self, keep: float, now: float) -> None:
        """Let what was seen until `now` count as `keep` of itself."""
        self.events = [keep * events for events in self.events]
        self.offset = [
            keep * seen - weight * now for seen, weight in zip(self.at_risk(now), self.weight, strict=True)
        ]
