"""When blocks that sessions share are used again: hazards by age, each kind's starting from a coarser kind's."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from policies.tiering.ages import BINS, PRIOR_REUSE, WIDTHS, Counts, gittins

_TRUST_ROOT, _TRUST_LEVEL, _TRUST_SHAPE = 1.0, 4.0, 1.0
"""How many reuses must be seen to believe a curve as much as what it starts from: the root's bins, the level of a kind
against the next coarser kind, its bins."""

_SPREAD_ROOT, _SPREAD, _SPREAD_DECAY = 2, 1, 0.7
"""A bin also learns from so many neighbours on either side, the less the farther."""

_LEARN_EVERY = 32
"""Requests between two estimates."""


class Curve(Counts):
    """Counts of one kind, which count for the coarser kinds above it too."""

    __slots__ = ("_curves", "coarser", "learned_at")

    def __init__(self, curves: Curves, coarser: Curve | None) -> None:
        super().__init__()
        self._curves = curves
        self.coarser = coarser
        self.learned_at = -_LEARN_EVERY

    def enter(self, age_bin: int, weight: float, time: float) -> None:
        super().enter(age_bin, weight, time)
        if self.coarser is not None:
            self.coarser.enter(age_bin, weight, time)

    def reused(self, age_bin: int, weight: float) -> None:
        super().reused(age_bin, weight)
        if self.coarser is not None:
            self.coarser.reused(age_bin, weight)

    def learn(self) -> None:
        """Estimate `rates` and `index` if the last estimate is old."""
        self._curves.learn(self)

    def saw_run(self, weight: float) -> None:
        """Blocks of `weight` were used again together: one event as far as trust is concerned."""
        self._curves.saw_run(weight)


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
                found = self._curves[name] = Curve(self, curve)
            curve = found
        assert curve is not None
        return curve

    def saw_run(self, weight: float) -> None:
        """As `Curve.saw_run`."""
        self._runs += 1
        self._run_weight += weight

    def fade(self, keep: float) -> None:
        """As `Counts.fade`, for all."""
        for curve in self._curves.values():
            curve.fade(keep, self._now)

    def learn(self, curve: Curve) -> None:
        """As `Curve.learn`."""
        if self._requests - curve.learned_at < _LEARN_EVERY and curve.rates:
            return
        curve.learned_at = self._requests
        unit = self._run_weight / self._runs
        at_risk = curve.at_risk(self._now)
        if curve.coarser is None:
            start = [PRIOR_REUSE / width for width in WIDTHS]
            trust = _TRUST_ROOT * unit
            spread = _SPREAD_ROOT
        else:
            self.learn(curve.coarser)
            above = curve.coarser.rates
            foreseen = sum(time * rate for time, rate in zip(at_risk, above, strict=True))
            level = (sum(curve.events) + _TRUST_LEVEL * unit) / (foreseen + _TRUST_LEVEL * unit)
            start = [level * rate for rate in above]
            trust = _TRUST_SHAPE * unit
            spread = _SPREAD
        curve.rates = _corrected(start, curve.events, at_risk, trust, spread)
        curve.index = gittins(curve.rates)


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
