"""What is promised to others for a time: leases of other nodes on our slab, pins of users, and loads that wait."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Protocol

from kv_tiers.books import SlotBooks
from kv_tiers.keys import BlockKey
from kv_tiers.store_ports import Loan, PinRefused
from kv_tiers.tier import ReadLease

LOAN_S = 15.0
"""Longest that a reader on another node may take: its own deadline is shorter."""

OWNER = "store:loan:"


class Loans:
    """Read leases that other nodes hold. A borrower that died is not noticed; its time ends."""

    def __init__(self, books: SlotBooks, clock: Callable[[], float]) -> None:
        self._books = books
        self._clock = clock
        self._ends: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def take(self, lease: ReadLease, *, more: bool) -> Loan:
        """Lend what a fresh read lease holds. `more`: the key behind is known here as well."""
        self._ends[lease.id] = self._clock() + LOAN_S
        return Loan(lease.id, tuple(entry.offset for entry in lease.entries), LOAN_S, more)

    def give_back(self, loan: int) -> bool:
        """The borrower has read; False for a loan that is over."""
        if self._ends.pop(loan, None) is None:
            return False
        self._books.complete_read(loan)
        return True

    def expire(self) -> int:
        """End the loans whose time is over; how many."""
        now = self._clock()
        over = [loan for loan, end in self._ends.items() if end <= now]
        for loan in over:
            self.give_back(loan)
        return len(over)

    def end_all(self) -> None:
        """Take everything back."""
        for loan in list(self._ends):
            self.give_back(loan)


class Holds:
    """Loads that do not begin while several nodes obey one command: what has left one would come back from another.

    Whoever gave the command and died is not noticed; a hold's time ends.
    """

    def __init__(
        self,
        bar: Callable[[Collection[BlockKey] | None], AbstractContextManager[None]],
        clock: Callable[[], float],
    ) -> None:
        """Inside `bar`, none of its keys (None: nothing) is loaded."""
        self._bar = bar
        self._clock = clock
        self._open: dict[str, tuple[ExitStack, float]] = {}

    def begin(self, name: str, keys: Collection[BlockKey] | None, seconds: float) -> None:
        """Until `end` of that name, or for so long."""
        self.end(name)
        barred = ExitStack()
        barred.enter_context(self._bar(keys))
        self._open[name] = barred, self._clock() + seconds

    def end(self, name: str) -> None:
        """Nothing for a name that holds nothing."""
        if name in self._open:
            self._open.pop(name)[0].close()

    def expire(self) -> None:
        """End those whose time is over."""
        now = self._clock()
        for name in [name for name, (_, end) in self._open.items() if end <= now]:
            self.end(name)


class Pinning(Protocol):
    """What pins need of a tier."""

    def pin(self, keys: Sequence[BlockKey]) -> int:
        """Keep visible keys from eviction and expiry until `unpin`; how many leading ones."""
        ...

    def unpin(self, keys: Sequence[BlockKey]) -> int:
        """End pins; how many there were."""
        ...


@dataclass(frozen=True, eq=False)
class _Pin:
    """A user's pin: per tier the leading keys that were pinned there."""

    pinned: dict[str, tuple[BlockKey, ...]]
    end: float | None


class Pins:
    """Pins of users, counted, over all tiers of a node."""

    def __init__(
        self,
        tiers: Callable[[], Mapping[str, Pinning]],
        runs: Callable[[Sequence[BlockKey]], Mapping[str, int]],
        most: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        """`tiers`: by name, as there are now; `runs`: how many leading keys each has.

        `most`: keys that open pins may name together, one as often as it is pinned.
        """
        self._tiers = tiers
        self._runs = runs
        self._most = most
        self._clock = clock
        self._named = 0
        self._pins: dict[tuple[BlockKey, ...], list[_Pin]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._pins.values()))

    def pin(self, keys: Sequence[BlockKey], ttl_s: float | None) -> dict[str, int] | PinRefused:
        """Pin leading blocks wherever they are, for `ttl_s` at most; → per tier how many.

        Refused where the tiers' bounds leave no tier that would keep all it has of them.
        """
        most = self._most()
        if self._named + len(keys) > most:
            return PinRefused(
                f"{len(self)} open pins name {self._named} blocks, and with {len(keys)} more they would exceed {most}: "
                "unpin some, or give pins a ttl_s"
            )
        tiers, runs = self._tiers(), self._runs(keys)
        counts = {name: tier.pin(keys) for name, tier in tiers.items()}
        cut = [name for name, count in counts.items() if count < runs[name]]
        if cut and not any(count for name, count in counts.items() if name not in cut):
            for name, count in counts.items():
                tiers[name].unpin(keys[:count])
            room = ", ".join(f"{name} has room for {counts[name]} of {runs[name]} blocks" for name in cut)
            return PinRefused(f"pins take at most half of a tier: {room}")
        if any(counts.values()):
            end = None if ttl_s is None else self._clock() + ttl_s
            pinned = {name: tuple(keys[:count]) for name, count in counts.items() if count}
            self._pins.setdefault(tuple(keys), []).append(_Pin(pinned, end))
            self._named += len(keys)
        return counts

    def unpin(self, keys: Sequence[BlockKey]) -> dict[str, int]:
        """End the oldest pin of exactly this chain; → per tier how many blocks that were."""
        counts = dict.fromkeys(self._tiers(), 0)
        pins = self._pins.get(tuple(keys))
        if pins:
            counts |= self._end(pins[0])
            self._remove(tuple(keys), pins[0])
        return counts

    def expire(self) -> int:
        """End pins whose time is over; how many."""
        now = self._clock()
        over = 0
        for chain, pins in list(self._pins.items()):
            for pin in [pin for pin in pins if pin.end is not None and pin.end <= now]:
                self._end(pin)
                self._remove(chain, pin)
                over += 1
        return over

    def forget(self, tier: str, keys: Collection[BlockKey] | None = None) -> None:
        """These blocks (None: all) left a tier, and their pins with them: ending ours must not end another's."""
        for chain, pins in list(self._pins.items()):
            for pin in list(pins):
                if tier in pin.pinned:
                    left = () if keys is None else tuple(key for key in pin.pinned[tier] if key not in keys)
                    pin.pinned[tier] = left
                if not any(pin.pinned.values()):
                    self._remove(chain, pin)

    def check(self) -> None:
        """What is bounded is counted right."""
        assert self._named == sum(len(chain) * len(pins) for chain, pins in self._pins.items())

    def _remove(self, chain: tuple[BlockKey, ...], pin: _Pin) -> None:
        self._named -= len(chain)
        pins = self._pins[chain]
        pins.remove(pin)
        if not pins:
            del self._pins[chain]

    def _end(self, pin: _Pin) -> dict[str, int]:
        tiers = self._tiers()
        return {name: tiers[name].unpin(keys) for name, keys in pin.pinned.items() if name in tiers}
