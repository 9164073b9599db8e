"""Least recently used first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Generic

from policies.tiering.policy import Key


class Lru(Generic[Key]):
    """`EvictionPolicy`. A request touches its blocks from last to first, so that of one request the tail goes first."""

    def __init__(self) -> None:
        self._order: OrderedDict[Key, None] = OrderedDict()

    def accessed(self, chain: Sequence[Key], now: float) -> None:
        for key in reversed(chain):
            if key in self._order:
                self._order.move_to_end(key)

    def add(self, key: Key, now: float) -> None:
        self._order[key] = None

    def hold(self, key: Key) -> None:
        del self._order[key]

    def release(self, key: Key, now: float) -> None:
        self._order[key] = None

    def remove(self, key: Key) -> None:
        self._order.pop(key, None)

    def victims(self, now: float) -> Iterator[Key]:
        return iter(self._order)
