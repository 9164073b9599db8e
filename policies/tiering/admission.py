"""What is worth writing to a slower tier. (Provisional: helper A replaces this file.)"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Generic, Protocol, TypeVar

from policies.tiering.policy import Key


Asked = TypeVar("Asked", bound=Hashable, contravariant=True)


class Admission(Protocol[Asked]):
    """Says which blocks that are about to leave the CPU tier are worth a write. Pure; `now` in seconds."""

    def accessed(self, chain: Sequence[Asked], now: float) -> None:
        """A request with these blocks arrived, as `EvictionPolicy.accessed`."""
        ...

    def worth(self, keys: Sequence[Asked], now: float) -> list[bool]:
        """Of each block, whether to write it down."""
        ...


class Constant(Generic[Key]):
    """Everything, or nothing."""

    def __init__(self, answer: bool) -> None:
        self._answer = answer

    def accessed(self, chain: Sequence[Key], now: float) -> None:
        """Nothing to learn."""

    def worth(self, keys: Sequence[Key], now: float) -> list[bool]:
        return [self._answer] * len(keys)


class SecondUse(Generic[Key]):
    """What was used twice, as far as `capacity` keys are remembered."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._uses: OrderedDict[Key, int] = OrderedDict()

    def accessed(self, chain: Sequence[Key], now: float) -> None:
        for key in chain:
            self._uses[key] = self._uses.pop(key, 0) + 1
        while len(self._uses) > self._capacity:
            self._uses.popitem(last=False)

    def worth(self, keys: Sequence[Key], now: float) -> list[bool]:
        return [self._uses.get(key, 0) > 1 for key in keys]
