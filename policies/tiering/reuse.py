"""The default policy: LRU until what was learned does better; then what promises least reuse goes first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import sqrt
from typing import Generic

from policies.tiering.policy import Key
from policies.tiering.shadows import LruShadow, ReuseShadow, Shadow

_BEHIND, _AHEAD = -1.5, 0.0
"""Standard deviations of the difference in hits at which the guard goes over to LRU, and back."""

_MEMORY = 64
"""The guard's memory, as a multiple of the capacity in blocks asked for: half of it is gone after so many."""


class Reuse(Generic[Key]):
    """`EvictionPolicy` that learns when blocks of which kind are used again (`regression.py`, `curves.py`).

    Two shadows of the tier see every request: one that follows what was learned, one that is LRU. The tier follows the
    second until the first gets more hits, and again when that has had fewer lately. First to go is what the shadow that
    is followed does not hold any more, or never did; then what it would give up next. Remembers at most
    (GHOSTS_PER_BLOCK + 2) x capacity keys that the tier does not hold, and fewer where that is more than MOST_GHOSTS.
    """

    def __init__(self, capacity: int) -> None:
        """`capacity` of the tier, in blocks."""
        if capacity < 1:
            raise ValueError(f"a tier holds blocks, not {capacity}")
        self.capacity = capacity
        self._learned: ReuseShadow[Key] = ReuseShadow(capacity)
        self._lru: LruShadow[Key] = LruShadow(capacity)
        self._followed: Shadow[Key] = self._lru
        self._lead = 0.0
        self._spread = 0.0
        self._resident: dict[Key, bool] = {}  # → held
        self._outcast: dict[Key, None] = {}  # resident, not held, not in the shadow that is followed

    @property
    def follows_lru(self) -> bool:
        """Whether the guard is at work."""
        return self._followed is self._lru

    @property
    def remembered(self) -> int:
        """Keys known to the learned shadow."""
        return self._learned.remembered

    def accessed(self, chain: Sequence[Key], now: float) -> None:
        chain = list(dict.fromkeys(chain))
        if not chain:
            return
        learned = self._learned.request(chain, now)
        lru = self._lru.request(chain, now)
        went = lru.went if self.follows_lru else learned.went
        if self._compare(learned.hits - lru.hits, len(chain)):
            self._outcast = {}
            for key in self._resident:
                self._sort(key)
            return
        for key in chain:
            self._outcast.pop(key, None)
        for key in went:
            self._sort(key)

    def add(self, key: Key, now: float) -> None:
        self._resident[key] = False
        self._sort(key)

    def hold(self, key: Key) -> None:
        self._resident[key] = True
        self._outcast.pop(key, None)

    def release(self, key: Key, now: float) -> None:
        self._resident[key] = False
        self._sort(key)

    def remove(self, key: Key) -> None:
        self._resident.pop(key, None)
        self._outcast.pop(key, None)

    def victims(self, now: float) -> Iterator[Key]:
        yield from self._outcast
        for key in self._followed.order():
            if self._resident.get(key, True) is False and key not in self._outcast:
                yield key

    def _sort(self, key: Key) -> None:
        if self._resident.get(key, True) is False and key not in self._followed:
            self._outcast[key] = None

    def _compare(self, lead: int, asked: int) -> bool:
        """Whether the tier follows the other shadow from now on."""
        keep = 0.5 ** (asked / (_MEMORY * self.capacity))
        self._lead = self._lead * keep + lead
        self._spread = self._spread * keep + lead * lead
        score = self._lead / sqrt(self._spread) if self._spread else 0.0
        if self.follows_lru and score > _AHEAD:
            self._followed = self._learned
        elif not self.follows_lru and score < _BEHIND:
            self._followed = self._lru
        else:
            return False
        return True
