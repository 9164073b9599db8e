"""How fast each source of blocks is, as measured: what decides between loading and computing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

LEARNING = 0.2
"""Weight of a new measurement; those before it keep the rest."""

FORGETTING_S = 60.0
"""After so long without a measurement, half of what was learnt is forgotten: a slow source gets another try."""

_GUESSES = (1 << 16, 16 << 20)
"""Sizes in bytes at which the prior, scaled to what was measured, stands in for sizes that were not."""

_GUESS_WEIGHT = 0.02


class Speed(NamedTuple):
    """A load of n bytes takes `latency_s` + n / `bytes_per_s`."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, nbytes: float) -> float:
        """Time of one load."""
        return self.latency_s + nbytes / self.bytes_per_s


UNKNOWN = Speed(1e-3, 2e9)

PRIORS: Mapping[str, Speed] = MappingProxyType(
    {
        "nvme": Speed(0.5e-3, 4e9),
        "redis": Speed(1e-3, 2e9),
        "peer": Speed(2e-3, 5e9),
        "peer+nvme": Speed(3e-3, 3e9),
    }
)
"""Believed until measured, by the name's part before a colon: what good hardware does. A source that is believed too
slow would never be tried, and so never be measured; one believed too fast costs a try, which its worth bounds.
"""


class Computing:
    """What computing KV takes, from what requests say of it: the mean request's blocks and seconds, lately.

    What is read of a block saves its computing and costs its load. A load's latency counts once per request, so prices
    are those of a whole one.
    """

    def __init__(self) -> None:
        self._blocks = self._seconds = 0.0

    def heard(self, blocks: int, seconds: float) -> None:
        """A request has so many blocks, and computing them would take so long; 0 or no end: it cannot tell."""
        if blocks < 1 or not 0 < seconds < math.inf:
            return
        weight = LEARNING if self._blocks else 1.0
        self._blocks += weight * (blocks - self._blocks)
        self._seconds += weight * (seconds - self._seconds)

    def dearer_than(self, load: Callable[[float], float]) -> bool:
        """Whether computing the mean request takes longer than loading it; `load(blocks)` → seconds.

        True as long as nobody has told.
        """
        return not self._blocks or self._seconds > load(self._blocks)


@dataclass(slots=True)
class _Learnt:
    """Decayed sums over loads of n bytes that took t seconds, each weighed by 1/t²; as of `when`.

    `ratio`: mean logarithm of measured over prior time.
    """

    ratio: float = 0.0
    weight: float = 0.0
    w: float = 0.0
    wn: float = 0.0
    wnn: float = 0.0
    wt: float = 0.0
    wnt: float = 0.0
    when: float = 0.0

    def add(self, nbytes: float, seconds: float, share: float) -> None:
        """One load, of which `share` counts."""
        w = share / seconds**2
        self.w += w
        self.wn += w * nbytes
        self.wnn += w * nbytes * nbytes
        self.wt += w * seconds
        self.wnt += w * nbytes * seconds


class Speeds:
    """Measured speed per source name ("nvme", "peer:node-b"). Pure: `now` is seconds of the caller's one clock.

    Latency and time per byte are those that fit the latest loads best (least squares of relative errors).
    """

    def __init__(self, priors: Mapping[str, Speed] = PRIORS) -> None:
        self._priors = priors
        self._learnt: dict[str, _Learnt] = {}

    def of(self, source: str, now: float) -> Speed:
        """What is believed of a source now."""
        prior = self._prior(source)
        learnt = self._learnt.get(source)
        if learnt is None:
            return prior
        measured = _fit(learnt, prior)
        kept = 0.5 ** (max(0.0, now - learnt.when) / FORGETTING_S)
        return Speed(
            prior.latency_s ** (1 - kept) * measured.latency_s**kept,
            prior.bytes_per_s ** (1 - kept) * measured.bytes_per_s**kept,
        )

    def estimate(self, source: str, nbytes: float, now: float) -> float:
        """Seconds that a load of `nbytes` would take."""
        return self.of(source, now).seconds(nbytes)

    def observe(self, source: str, nbytes: int, seconds: float, now: float) -> None:
        """A load took so long; one that failed counts as well, with the bytes that were asked for."""
        seconds = max(seconds, 1e-9)
        old = self._learnt.get(source, _Learnt(when=now))
        left = (1 - LEARNING) * 0.5 ** (max(0.0, now - old.when) / FORGETTING_S)
        surprise = math.log(seconds / self._prior(source).seconds(nbytes))
        weight = left * old.weight + LEARNING
        ratio = (left * old.weight * old.ratio + LEARNING * surprise) / weight
        new = _Learnt(
            ratio, weight, left * old.w, left * old.wn, left * old.wnn, left * old.wt, left * old.wnt, now
        )
        new.add(nbytes, seconds, LEARNING)
        self._learnt[source] = new

    def _prior(self, source: str) -> Speed:
        return self._priors.get(source.partition(":")[0], UNKNOWN)


def _fit(learnt: _Learnt, prior: Speed) -> Speed:
    """Least squares with the scaled prior as two faint measurements more; never without latency or for nothing."""
    scale = math.exp(learnt.ratio)
    sums = replace(learnt)
    for nbytes in _GUESSES:
        sums.add(nbytes, scale * prior.seconds(nbytes), _GUESS_WEIGHT * learnt.weight)
    determinant = sums.w * sums.wnn - sums.wn**2
    latency = (sums.wnn * sums.wt - sums.wn * sums.wnt) / determinant
    per_byte = (sums.w * sums.wnt - sums.wn * sums.wt) / determinant
    # A fit through the origin, or a flat one, where the best has a negative part.
    if latency <= 0:
        latency, per_byte = 1e-6, sums.wnt / sums.wnn
    elif per_byte <= 0:
        latency, per_byte = sums.wt / sums.w, 1e-12
    return Speed(latency, 1 / per_byte)
