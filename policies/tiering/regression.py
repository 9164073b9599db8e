"""When blocks of one session are used again: one regression over all kinds, fitted to what was seen.

Piecewise exponential survival model (Friedman 1982): in each bin of ages, reuses are Poisson with mean hazard times
time at risk, and the logarithm of the hazard is linear in what `features.py` says of a kind. What was seen of one kind
so speaks for all that resemble it. Its weights are the most probable ones under a normal prior (Newton's method); a
kind that still differs is corrected by its own level.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from policies.tiering.ages import BINS, PRIOR_REUSE, WIDTHS, Counts
from policies.tiering.features import BASIS, BASIS_FEATURES, FEATURES, PRIOR_MEAN, Kind, features

Array = NDArray[np.float64]

_PRECISION = 8.0
"""Of the prior: a weight of 1 away from its mean costs as much as 4 reuses' worth of evidence."""

_BASIS_PRECISION, _BASIS_SMOOTHNESS = 1.0, 2.0
"""The same for the curve over ages that all kinds have in common, and for its neighbouring knots' difference."""

_LEVEL_TRUST = 50.0
"""How many reuses a kind must show to be believed as much as the regression."""

_FIRST_FITS, _GROWTH, _MOST_BETWEEN = 8, 1.03, 400
"""Fitted again after so many requests at first, when there were so many times more, after so many at the latest."""

_STEPS, _FIRST_STEPS, _FIRST_REQUESTS = 2, 5, 100
_LONGEST_STEP = 1.0
_LOG_LIMITS = -40.0, 3.0

_PIECE = 64

_WIDTHS = np.array(WIDTHS)
_LOG_PRIOR = np.log(PRIOR_REUSE / _WIDTHS)


class SessionCounts(Counts):
    """Counts of one kind."""

    __slots__ = ("_regression", "features")

    def __init__(self, regression: Regression, kind: Kind) -> None:
        super().__init__()
        self._regression = regression
        self.features = features(kind)

    def learn(self) -> None:
        """Nothing to do: `rates` and `index` are those of the last fit."""

    def saw_run(self, weight: float) -> None:
        """Blocks of `weight` were used again together: one event as far as evidence is concerned."""
        self._regression.saw_run(weight)


class Regression:
    """The kinds and what they have in common."""

    def __init__(self) -> None:
        self._kinds: dict[Kind, SessionCounts] = {}
        self._requests, self._fitted_at = 0, 0
        self._now = 0.0
        self._runs, self._run_weight = 1.0, 1.0
        self._mean = np.concatenate([np.zeros(BASIS_FEATURES), PRIOR_MEAN])
        self._weights = self._mean.copy()
        self._precision = _prior_precision()

    def of(self, kind: Kind) -> SessionCounts:
        """The counts of a kind. `features.py` bounds their number."""
        found = self._kinds.get(kind)
        if found is None:
            found = self._kinds[kind] = SessionCounts(self, kind)
            self._tell([found])
        return found

    def tick(self, now: float) -> bool:
        """A request came; → whether hazards were estimated anew."""
        self._now = now
        self._requests += 1
        due = max(self._fitted_at + _FIRST_FITS, int(self._fitted_at * _GROWTH))
        if self._requests < min(due, self._fitted_at + _MOST_BETWEEN):
            return False
        self._fitted_at = self._requests
        self._fit()
        return True

    def saw_run(self, weight: float) -> None:
        """As `SessionCounts.saw_run`."""
        self._runs += 1
        self._run_weight += weight

    def fade(self, keep: float) -> None:
        """As `Counts.fade`, for all."""
        for counts in self._kinds.values():
            counts.fade(keep, self._now)

    def _fit(self) -> None:
        kinds = list(self._kinds.values())
        if not kinds:
            return
        events, at_risk = self._seen(kinds)
        kind, age_bin = np.nonzero((at_risk > 0) | (events > 0))
        table = np.stack([counts.features for counts in kinds])
        design = np.hstack([BASIS[age_bin], table[kind, age_bin]])
        seen, time, prior = events[kind, age_bin], at_risk[kind, age_bin], _LOG_PRIOR[age_bin]
        for _ in range(_STEPS if self._requests > _FIRST_REQUESTS else _FIRST_STEPS):
            expected = time * np.exp(np.clip(prior + _dot(design, self._weights), *_LOG_LIMITS))
            slope = _dot(design.T, seen - expected) - _dot(self._precision, self._weights - self._mean)
            curvature = self._precision + _gram(design, expected)
            step = np.linalg.solve(curvature, slope)
            # Newton's step overshoots where the prior is far off.
            self._weights = self._weights + step / max(1.0, float(np.abs(step).max()) / _LONGEST_STEP)
        self._tell(kinds)

    def _seen(self, kinds: list[SessionCounts]) -> tuple[Array, Array]:
        """Reuses and seconds at risk, [kinds, BINS], in runs."""
        unit = self._run_weight / self._runs
        events = np.array([counts.events for counts in kinds]) / unit
        at_risk = np.array([counts.at_risk(self._now) for counts in kinds]) / unit
        return events, at_risk

    def _tell(self, kinds: list[SessionCounts]) -> None:
        """Write hazards and indices into the kinds."""
        table = np.stack([counts.features for counts in kinds])
        shared, own = np.split(self._weights, [BASIS_FEATURES])
        rates = np.exp(np.clip(_LOG_PRIOR + _dot(BASIS, shared) + _dot(table, own), *_LOG_LIMITS))
        events, at_risk = self._seen(kinds)
        foreseen = (at_risk * rates).sum(1)
        rates *= ((events.sum(1) + _LEVEL_TRUST) / (foreseen + _LEVEL_TRUST))[:, None]
        index = indices(rates)
        for counts, row, worth in zip(kinds, rates.tolist(), index.tolist(), strict=True):
            counts.rates, counts.index = row, worth


def _dot(table: Array, weights: Array) -> Array:
    """table @ weights by one thread: what follows a request must not wait until a second core is free."""
    return np.asarray(np.einsum("...d,d->...", table, weights))


def _gram(design: Array, weights: Array) -> Array:
    """design.T @ diag(weights) @ design. In pieces that are too small for BLAS to share them among threads."""
    rows = -len(design) % _PIECE
    padded = np.pad(design, ((0, rows), (0, 0))).reshape(-1, _PIECE, design.shape[1])
    scaled = padded * np.pad(weights, (0, rows)).reshape(-1, _PIECE, 1)
    return np.asarray(np.matmul(scaled.transpose(0, 2, 1), padded).sum(0))


def _prior_precision() -> Array:
    size = BASIS_FEATURES + FEATURES
    precision = np.eye(size) * _PRECISION
    difference = np.diff(np.eye(BASIS_FEATURES), axis=0)
    precision[:BASIS_FEATURES, :BASIS_FEATURES] = (
        _BASIS_PRECISION * np.eye(BASIS_FEATURES) + _BASIS_SMOOTHNESS * difference.T @ difference
    )
    return precision


def indices(rates: Array) -> Array:
    """`gittins` of many kinds at once: [kinds, BINS] → [kinds, BINS]. The best end is one of the bins'."""
    expected = rates * _WIDTHS
    inside = -np.expm1(-expected) / rates  # seconds until reuse or the bin's end
    index: Array = np.zeros_like(rates)
    for age_bin in range(BINS):
        foreseen = np.cumsum(expected[:, age_bin:], axis=1)
        before = np.hstack([np.ones((len(rates), 1)), np.exp(-foreseen[:, :-1])])
        seconds = np.cumsum(inside[:, age_bin:] * before, axis=1)
        index[:, age_bin] = (-np.expm1(-foreseen) / seconds).max(axis=1)
    return index
