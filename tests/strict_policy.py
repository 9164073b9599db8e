"""An eviction policy that asserts that its tier keeps to the protocol."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from policies.tiering import EvictionPolicy
from policies.tiering.policy import Key


class StrictPolicy:
    """Wraps a policy: calls fit each key's state, nothing is called during an iteration, time does not go back."""

    def __init__(self, policy: EvictionPolicy[Key]) -> None:
        self._policy = policy
        self._resident: set[Key] = set()
        self._held: set[Key] = set()
        self._iterating = False
        self._now = float("-inf")

    def accessed(self, chain: Sequence[Key], now: float) -> None:
        self._called(now)
        self._policy.accessed(chain, now)

    def add(self, key: Key, now: float) -> None:
        self._called(now)
        assert key not in self._resident | self._held
        self._resident.add(key)
        self._policy.add(key, now)

    def hold(self, key: Key) -> None:
        self._called()
        self._resident.remove(key)
        self._held.add(key)
        self._policy.hold(key)

    def release(self, key: Key, now: float) -> None:
        self._called(now)
        self._held.remove(key)
        self._resident.add(key)
        self._policy.release(key, now)

    def remove(self, key: Key) -> None:
        self._called()
        assert key in self._resident | self._held
        self._resident.discard(key)
        self._held.discard(key)
        self._policy.remove(key)

    def victims(self, now: float) -> Iterator[Key]:
        self._called(now)
        self._iterating = True
        try:
            for key in self._policy.victims(now):
                assert key in self._resident
                yield key
        finally:
            self._iterating = False

    def _called(self, now: float | None = None) -> None:
        assert not self._iterating
        if now is not None:
            assert now >= self._now
            self._now = now
