"""The order in which a bounded tier gives up its blocks."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Protocol, TypeVar

Key = TypeVar("Key", bound=Hashable)


class EvictionPolicy(Protocol[Key]):
    """Which resident blocks are worth least. Pure and deterministic; one thread; no clock but `now` (seconds).

    A key is in one of three states: unknown (also: known from the past, a ghost), resident, or held (resident, but in
    use and not to be offered). What a policy remembers of unknown keys is bounded by a multiple of its capacity.
    """

    def accessed(self, chain: Sequence[Key], now: float) -> None:
        """A request with these blocks arrived: its prompt's full blocks, first block first, resident or not.

        Said once per request, before the `add` of what it brings.
        """
        ...

    def add(self, key: Key, now: float) -> None:
        """`key` became resident and may be given up. It was unknown."""
        ...

    def hold(self, key: Key) -> None:
        """A resident key is in use: not offered until `release`. It was not held."""
        ...

    def release(self, key: Key, now: float) -> None:
        """A held key may be offered again. Of one request the tail is released first."""
        ...

    def remove(self, key: Key) -> None:
        """A resident or held key is gone: evicted, dropped or expired."""
        ...

    def victims(self, now: float) -> Iterator[Key]:
        """Resident keys that are not held, least worth first. Lazy; abandoned when the tier has enough.

        Nothing else is called until the iteration is abandoned or over. The tier removes what it took then.
        """
        ...
