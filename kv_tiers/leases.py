"""Open leases of a tier's books, and how a long one is made of pieces or cut into them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain as joined

from kv_tiers.keys import BlockKey
from kv_tiers.slots import SlotBlock
from kv_tiers.tier import UnknownLease


@dataclass(frozen=True, slots=True)
class Lease:
    """`chain` is a writer's keys in order, for recency; `blocks` those the lease holds, in that order too.

    `copying`: of the blocks' bytes alone.
    """

    owner: str
    chain: tuple[BlockKey, ...]
    blocks: tuple[SlotBlock, ...]
    writing: bool
    copying: bool = False


class Leases:
    """Leases by number. A number is never given twice."""

    def __init__(self) -> None:
        self._open: dict[int, Lease] = {}
        self._next = 1

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._open.values())

    def open(self, lease: Lease) -> int:
        """→ its number."""
        number = self._next
        self._next += 1
        self._open[number] = lease
        return number

    def of(self, number: int, *, writing: bool) -> Lease:
        """An open one of that kind; UnknownLease."""
        lease = self._open.get(number)
        if lease is None or lease.writing != writing:
            raise UnknownLease(number)
        return lease

    def close(self, number: int, *, writing: bool) -> Lease:
        """It is over; UnknownLease."""
        lease = self.of(number, writing=writing)
        del self._open[number]
        return lease

    def close_writer(self, number: int, written: Iterable[BlockKey]) -> Lease:
        """A writer is done. UnknownLease; ValueError (and no change) where it has no slot for one of `written`."""
        lease = self.of(number, writing=True)
        foreign = set(written) - {block.key for block in lease.blocks}
        if foreign:
            raise ValueError(f"lease {number} has no slot for {sorted(foreign)}")
        return self.close(number, writing=True)

    def owned_by(self, owner: str) -> dict[int, Lease]:
        """All of an owner."""
        return {number: lease for number, lease in self._open.items() if lease.owner == owner}

    def join(self, numbers: Sequence[int]) -> int:
        """One writer in place of several (at least one) of one owner whose chains follow one another.

        UnknownLease, and no change, where one of them is over.
        """
        parts = [self.of(number, writing=True) for number in numbers]
        for number in numbers:
            del self._open[number]
        return self.open(
            Lease(
                parts[0].owner,
                tuple(joined.from_iterable(part.chain for part in parts)),
                tuple(joined.from_iterable(part.blocks for part in parts)),
                writing=True,
            )
        )

    def part(self, number: int, written: Sequence[BlockKey], size: int) -> list[tuple[int, list[BlockKey]]]:
        """Writers of at most `size` keys each in place of one, the chain's tail first, each with its part of `written`.

        As `close_writer`.
        """
        lease = self.close_writer(number, written)
        commit = set(written)
        left = list(lease.blocks)
        parts: list[tuple[int, list[BlockKey]]] = []
        for end in range(len(lease.chain), 0, -size):
            keys = lease.chain[max(0, end - size) : end]
            named = set(keys)
            blocks: list[SlotBlock] = []
            while left and left[-1].key in named:
                blocks.append(left.pop())
            blocks.reverse()
            part = self.open(Lease(lease.owner, keys, tuple(blocks), writing=True))
            parts.append((part, [block.key for block in blocks if block.key in commit]))
        assert not left, "a lease's blocks are of its chain, in its order"
        return parts
