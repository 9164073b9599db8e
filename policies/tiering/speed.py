"""How fast each source of blocks is, as measured: what decides between loading and computing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

LEARNING = 0.3
"""Share of a new measurement's (logarithmic) surprise that is believed."""

FORGETTING_S = 60.0
"""After so long without a measurement, half of what was learnt is forgotten: a slow source gets another try."""

_MOST_SURPRISE = math.log(64.0)


class Speed(NamedTuple):
    """A load of n bytes takes `latency_s` + n / `bytes_per_s`."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, nbytes: int) -> float:
        """Time of one load."""
        return self.latency_s + nbytes / self.bytes_per_s


CAUTIOUS = Speed(5e-3, 200e6)

PRIORS: Mapping[str, Speed] = MappingProxyType(
    {
        "nvme": Speed(1e-3, 800e6),
        "redis": Speed(2e-3, 300e6),
        "peer": Speed(5e-3, 800e6),
        "peer+nvme": Speed(10e-3, 400e6),
    }
)
"""Believed until measured, by the name's part before a colon: modest, so that a source is tried where it might pay."""


@dataclass(slots=True)
class _Learnt:
    """Logarithms of measured over believed: of the latency and of the time per byte; as of `when`."""

    latency: float = 0.0
    per_byte: float = 0.0
    when: float = 0.0


class Speeds:
    """Measured speed per source name ("nvme", "peer:node-b"). Pure: `now` is seconds of the caller's one clock.

    Each measurement's surprise, measured over expected time, goes to latency and to bandwidth in the shares that
    they had of the expected time: small loads teach latency, large ones bandwidth.
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
        kept = 0.5 ** (max(0.0, now - learnt.when) / FORGETTING_S)
        return Speed(
            prior.latency_s * math.exp(kept * learnt.latency),
            prior.bytes_per_s / math.exp(kept * learnt.per_byte),
        )

    def estimate(self, source: str, nbytes: int, now: float) -> float:
        """Seconds that a load of `nbytes` would take."""
        return self.of(source, now).seconds(nbytes)

    def observe(self, source: str, nbytes: int, seconds: float, now: float) -> None:
        """A load took so long; one that failed counts as well, with the bytes that were asked for."""
        prior = self._prior(source)
        believed = self.of(source, now)
        expected = believed.seconds(nbytes)
        surprise = math.log(max(seconds, 1e-9) / expected)
        surprise = LEARNING * min(max(surprise, -_MOST_SURPRISE), _MOST_SURPRISE)
        share = believed.latency_s / expected
        self._learnt[source] = _Learnt(
            math.log(believed.latency_s / prior.latency_s) + surprise * share,
            math.log(prior.bytes_per_s / believed.bytes_per_s) + surprise * (1.0 - share),
            now,
        )

    def _prior(self, source: str) -> Speed:
        return self._priors.get(source.partition(":")[0], CAUTIOUS)
