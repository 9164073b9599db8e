"""When blocks of a kind are used again: hazards by age, learned online, and what they say a block is worth."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from math import exp

_PER_OCTAVE = 2
_FIRST_S = 0.125
_OCTAVES = 20

STARTS: tuple[float, ...] = (
    0.0,
    *(_FIRST_S * 2 ** (step / _PER_OCTAVE) for step in range(_OCTAVES * _PER_OCTAVE)),
)
"""Where each bin of ages begins, seconds: 0, 0.125, 0.177, … about a day."""

ENDS: tuple[float, ...] = (*STARTS[1:], 2 * STARTS[-1])
WIDTHS: tuple[float, ...] = tuple(end - start for start, end in zip(STARTS, ENDS, strict=True))
BINS = len(STARTS)

_PRIOR_REUSE = 0.02
"""Before anything is known: this chance of reuse in each bin, which ranks blocks as LRU does."""

_TRUST_ROOT, _TRUST_LEVEL, _TRUST_SHAPE = 1.0, 4.0, 1.0
"""How many reuses must be seen to believe a curve as much as what it starts from: the root's bins, the level of a kind
against the next coarser kind, its bins."""

_SPREAD_ROOT, _SPREAD, _SPREAD_DECAY = 2, 1, 0.7
"""A bin also learns from so many neighbours on either side, the less the farther."""

_LEARN_EVERY = 32
"""Requests between two estimates."""


def bin_of(age: float) -> int:
    """The bin of an age in seconds."""
    return min(BINS - 1, max(0, bisect_right(STARTS, age) - 1))


class Curve:
    """Counts of one kind by age bin. Time in a bin is linear in the clock, so blocks that sit there cost nothing."""

    __slots__ = ("coarser", "events", "index", "learned_at", "offset", "rates", "weight")

    def __init__(self, coarser: Curve | None) -> None:
        self.coarser = coarser
        self.events = [0.0] * BINS
        self.weight = [0.0] * BINS  # of blocks in the bin now
        self.offset = [0.0] * BINS  # time at risk is offset + weight * now
        self.rates: list[float] = []
        self.index: list[float] = []
        self.learned_at = -_LEARN_EVERY

    def enter(self, age_bin: int, weight: float, time: float) -> None:
        """Blocks of `weight` come into a bin."""
        curve: Curve | None = self
        while curve is not None:
            curve.offset[age_bin] -= weight * time
            curve.weight[age_bin] += weight
            curve = curve.coarser

    def leave(self, age_bin: int, weight: float, time: float) -> None:
        """Blocks of `weight` go: older, used again, of another kind or forgotten."""
        self.enter(age_bin, -weight, time)

    def reused(self, age_bin: int, weight: float) -> None:
        """Blocks of `weight` were used again at an age of that bin."""
        curve: Curve | None = self
        while curve is not None:
            curve.events[age_bin] += weight
            curve = curve.coarser


class Curves:
    """All curves. A kind is a path of classes from coarse to fine; a fine one starts from the one above it."""

    def __init__(self) -> None:
        self._curves: dict[Hashable, Curve] = {}
        self._requests = 0
        self._now = 0.0
        self._runs, self._run_weight = 1.0, 1.0

    def tick(self, now: float) -> None:
        """A request came."""
        self._requests += 1
        self._now = now

    def of(self, path: Sequence[Hashable]) -> Curve:
        """The curve of a kind. The number of kinds is the caller's to bound."""
        curve: Curve | None = None
        for depth in range(len(path) + 1):
            name = tuple(path[:depth])
            found = self._curves.get(name)
            if found is None:
                found = self._curves[name] = Curve(curve)
            curve = found
        assert curve is not None
        return curve

    def saw_run(self, weight: float) -> None:
        """Blocks of `weight` were used again together: one event as far as trust is concerned."""
        self._runs += 1
        self._run_weight += weight

    def index(self, curve: Curve) -> list[float]:
        """By age bin: the most reuse per second of residence that blocks of that age can give (Gittins)."""
        self._learn(curve)
        return curve.index

    def chance(self, curve: Curve, age: float, horizon: float) -> float:
        """Chance of reuse between `age` and `horizon`, seconds, for blocks not used until `age`."""
        self._learn(curve)
        expected = 0.0
        for age_bin in range(bin_of(age), BINS):
            if STARTS[age_bin] >= horizon:
                break
            seconds = min(ENDS[age_bin], horizon) - max(STARTS[age_bin], age)
            expected += curve.rates[age_bin] * max(0.0, seconds)
        return 1.0 - exp(-expected)

    def _learn(self, curve: Curve) -> None:
        if self._requests - curve.learned_at < _LEARN_EVERY and curve.rates:
            return
        curve.learned_at = self._requests
        unit = self._run_weight / self._runs
        at_risk = [
            max(0.0, offset + weight * self._now)
            for offset, weight in zip(curve.offset, curve.weight, strict=True)
        ]
        if curve.coarser is None:
            start = [_PRIOR_REUSE / width for width in WIDTHS]
            trust = _TRUST_ROOT * unit
            spread = _SPREAD_ROOT
        else:
            self._learn(curve.coarser)
            above = curve.coarser.rates
            foreseen = sum(time * rate for time, rate in zip(at_risk, above, strict=True))
            level = (sum(curve.events) + _TRUST_LEVEL * unit) / (foreseen + _TRUST_LEVEL * unit)
            start = [level * rate for rate in above]
            trust = _TRUST_SHAPE * unit
            spread = _SPREAD
        curve.rates = _corrected(start, curve.events, at_risk, trust, spread)
        curve.index = _gittins(curve.rates)


def _corrected(
    start: Sequence[float], events: Sequence[float], at_risk: Sequence[float], trust: float, spread: int
) -> list[float]:
    """`start` times what was seen over what it foresaw, neighbouring bins taken together."""
    foreseen = [time * rate for time, rate in zip(at_risk, start, strict=True)]
    rates = []
    for age_bin, rate in enumerate(start):
        seen = expected = trust
        for other in range(max(0, age_bin - spread), min(BINS, age_bin + spread + 1)):
            share = _SPREAD_DECAY ** abs(other - age_bin)
            seen += share * events[other]
            expected += share * foreseen[other]
        rates.append(rate * seen / expected)
    return rates


def _gittins(rates: Sequence[float]) -> list[float]:
    """For each bin the best ratio, over all later ends, of chance of reuse to expected seconds until reuse or end.

    From the last bin back: a bin joins those behind it as long as they are worth more than it is alone.
    """
    index = [0.0] * BINS
    joined: list[tuple[float, float, float, float]] = []
    for age_bin in range(BINS - 1, -1, -1):
        survives = exp(-rates[age_bin] * WIDTHS[age_bin])
        reused = 1.0 - survives
        seconds = reused / rates[age_bin]
        while joined and joined[-1][0] * seconds >= reused:
            _, more, longer, survive_too = joined.pop()
            reused += survives * more
            seconds += survives * longer
            survives *= survive_too
        index[age_bin] = reused / seconds
        joined.append((index[age_bin], reused, seconds, survives))
    return index
