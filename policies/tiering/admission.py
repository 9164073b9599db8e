"""What is worth writing to a slower tier: most blocks that leave a fast one are never asked for again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from math import log2
from typing import Generic, Protocol, TypeVar

from policies.tiering.policy import Key
from policies.tiering.visits import Visits

Asked = TypeVar("Asked", bound=Hashable, contravariant=True)

_WASTE_KEPT = 0.36
"""Of the writes that are never read, `Learned` lets through this share: what promises least is refused until then."""

_LEAST_FILLED = 0.01
"""Share of the capacity that has to be known before its filling is extrapolated."""

_PER_OCTAVE = 64
_LOWEST = 2.0**-16
_LEVELS = 16 * _PER_OCTAVE + 1
_HALF_LIFE, _HALF_LIFE_SEEN = 2.0, 0.25
"""The half-life of what was seen at the door: that multiple of the capacity, or of all that was seen so far."""


class Admission(Protocol[Asked]):
    """Which blocks to write down. Pure and deterministic; one thread; no clock but `now` (seconds)."""

    def accessed(self, chain: Sequence[Asked], now: float) -> None:
        """A request had these blocks, first block first; said once per request, before anything is asked of them."""
        ...

    def worth(self, keys: Sequence[Asked], now: float) -> list[bool]:
        """Of blocks that are about to leave the fast tier and are in no slower one: whether to write each of them."""
        ...


class Always(Generic[Key]):
    """`Admission` of everything."""

    def accessed(self, chain: Sequence[Key], now: float) -> None:
        pass

    def worth(self, keys: Sequence[Key], now: float) -> list[bool]:
        return [True] * len(keys)


class Never(Generic[Key]):
    """`Admission` of nothing: the slower tiers only give what they have."""

    def accessed(self, chain: Sequence[Key], now: float) -> None:
        pass

    def worth(self, keys: Sequence[Key], now: float) -> list[bool]:
        return [False] * len(keys)


class SecondUse(Generic[Key]):
    """`Admission` of what a second request had within the last 8 x `capacity` blocks asked for."""

    def __init__(self, capacity: int) -> None:
        self._most = 8 * capacity
        self._again: OrderedDict[Key, bool] = OrderedDict()

    def accessed(self, chain: Sequence[Key], now: float) -> None:
        for key in reversed(dict.fromkeys(chain)):
            self._again[key] = key in self._again
            self._again.move_to_end(key)
        while len(self._again) > self._most:
            self._again.popitem(last=False)

    def worth(self, keys: Sequence[Key], now: float) -> list[bool]:
        return [self._again.get(key, False) for key in keys]


class Learned(Generic[Key]):
    """`Admission` by the learned chance that a block is asked for again while the slower tiers would still have it.

    That chance depends on the block's age, its session's turn, pace and growth, and on whether the session went on
    without it. A read saves the same compute for every block and a write costs the same, so what is refused is what has
    the lowest chance; how much of it, follows from the share of useless writes that is to remain (`_WASTE_KEPT`).
    """

    def __init__(self, capacity: int) -> None:
        """`capacity` of the slower tiers in blocks; so many keys are remembered."""
        self._capacity = capacity
        self._visits: Visits[Key] = Visits(capacity)
        self._useless = [0.0] * _LEVELS
        """Expected useless writes by level of chance, of all that was asked for so far; older ones count less."""
        self._unit = 1.0  # what one write counts in it now
        self._seen = 0

    def accessed(self, chain: Sequence[Key], now: float) -> None:
        self._visits.visit(list(dict.fromkeys(chain)), now)

    def worth(self, keys: Sequence[Key], now: float) -> list[bool]:
        chances = [self._chance(key) for key in keys]
        for chance in chances:
            self._useless[_level(chance)] += (1.0 - chance) * self._unit
            self._seen += 1
            self._unit *= 2.0 ** (1.0 / min(_HALF_LIFE * self._capacity, 1.0 + _HALF_LIFE_SEEN * self._seen))
        if self._unit > 2.0**64:
            self._useless = [useless / self._unit for useless in self._useless]
            self._unit = 1.0
        lowest = self._lowest_level()
        return [_level(chance) >= lowest for chance in chances]

    def _chance(self, key: Key) -> float:
        chance = self._visits.chance(key, self._horizon_s())
        return 0.0 if chance is None else chance

    def _horizon_s(self) -> float:
        """How long the slower tiers would keep a block, seconds: as long as keys are remembered here.

        While there is room left nobody has been forgotten; then so long as it would take to fill it at this pace.
        Taking the age of the oldest instead would give younger chances ever longer horizons, so that all of them
        exceed those that were seen before.
        """
        filled = len(self._visits.nodes) / self._capacity
        return self._visits.memory_s() / min(1.0, max(filled, _LEAST_FILLED))

    def _lowest_level(self) -> int:
        """The lowest level whose blocks are written."""
        left = _WASTE_KEPT * sum(self._useless)
        for level in range(_LEVELS - 1, -1, -1):
            left -= self._useless[level]
            if left < 0:
                return level + (-left > self._useless[level] / 2)
        return 0


def _level(chance: float) -> int:
    return max(0, _LEVELS - 1 + int(_PER_OCTAVE * log2(max(chance, _LOWEST)) - 1e-9))
