"""What is promised to others for a time: leases of other nodes on our slab, and pins of users."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kv_tiers.books import SlotBooks
from kv_tiers.keys import BlockKey
from kv_tiers.store_ports import Loan
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


class Pinning(Protocol):
    """What pins need of a tier."""

    def pin(self, keys: Sequence[BlockKey]) -> int:
        """Keep visible keys from eviction and expiry until `unpin`; how many leading ones."""
        ...

    def unpin(self, keys: Sequence[BlockKey]) -> int:
        """End pins; how many there were."""
        ...


@dataclass(frozen=True)
class _Pin:
    """A user's pin: per tier the leading keys that were pinned there."""

    pinned: dict[str, tuple[BlockKey, ...]]
    end: float | None


class Pins:
    """Pins of users, counted, over all tiers of a node."""

    def __init__(self, tiers: Callable[[], Mapping[str, Pinning]], clock: Callable[[], float]) -> None:
        """`tiers`: by name, as there are now."""
        self._tiers = tiers
        self._clock = clock
        self._pins: dict[tuple[BlockKey, ...], list[_Pin]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._pins.values()))

    def pin(self, keys: Sequence[BlockKey], ttl_s: float | None) -> dict[str, int]:
        """Pin leading blocks wherever they are, for `ttl_s` at most; → per tier how many."""
        counts = {name: tier.pin(keys) for name, tier in self._tiers().items()}
        if any(counts.values()):
            end = None if ttl_s is None else self._clock() + ttl_s
            pinned = {name: tuple(keys[:count]) for name, count in counts.items() if count}
            self._pins.setdefault(tuple(keys), []).append(_Pin(pinned, end))
        return counts

    def unpin(self, keys: Sequence[BlockKey]) -> dict[str, int]:
        """End the oldest pin of exactly this chain; → per tier how many blocks that were."""
        counts = dict.fromkeys(self._tiers(), 0)
        pins = self._pins.get(tuple(keys))
        if pins:
            counts |= self._end(pins.pop(0))
            if not pins:
                del self._pins[tuple(keys)]
        return counts

    def expire(self) -> int:
        """End pins whose time is over; how many."""
        now = self._clock()
        over = 0
        for chain, pins in list(self._pins.items()):
            for pin in [pin for pin in pins if pin.end is not None and pin.end <= now]:
                pins.remove(pin)
                self._end(pin)
                over += 1
            if not pins:
                del self._pins[chain]
        return over

    def forget(self, tier: str, keys: Collection[BlockKey] | None = None) -> None:
        """These blocks (None: all) left a tier, and their pins with them: ending ours must not end another's."""
        for pins in self._pins.values():
            for pin in pins:
                if tier in pin.pinned:
                    left = () if keys is None else tuple(key for key in pin.pinned[tier] if key not in keys)
                    pin.pinned[tier] = left

    def _end(self, pin: _Pin) -> dict[str, int]:
        tiers = self._tiers()
        return {name: tiers[name].unpin(keys) for name, keys in pin.pinned.items() if name in tiers}
