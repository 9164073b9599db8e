"""What our blocks take in Redis, byte by byte: those in the books' slots, and those that are yet to be removed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kv_tiers.keys import BlockKey
from kv_tiers.redis_values import charge_of

MAX_OWED = 100_000


@dataclass(frozen=True, slots=True, eq=False)
class Charge:
    """One block's place in the books and its frame's length. Each write of a key makes a new one."""

    key: BlockKey
    slot: int
    frame_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of Redis memory."""
        return charge_of(self.frame_bytes)


class Charges:
    """`used` never exceeds `bound`: a block is charged before it is written.

    What is owed is not in `used`: whoever makes room by giving blocks up pays before he writes.
    """

    def __init__(self, bound: int, slots: int) -> None:
        self.bound = bound
        self.used = 0
        self._slots = slots
        self._by_key: dict[BlockKey, Charge] = {}
        self._by_slot: dict[int, Charge] = {}
        self._owed: dict[BlockKey, Charge] = {}

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._by_key

    def __iter__(self) -> Iterator[BlockKey]:
        return iter(self._by_key)

    def get(self, key: BlockKey) -> Charge | None:
        """The charge of a block that is in the books, or being written."""
        return self._by_key.get(key)

    def fits(self, frame_bytes: int) -> bool:
        """Whether there is room now."""
        return self.used + charge_of(frame_bytes) <= self.bound

    def add(self, key: BlockKey, slot: int, frame_bytes: int) -> None:
        """Charge a block whose frame fits."""
        assert key not in self._by_key and slot not in self._by_slot and self.fits(frame_bytes)
        charge = Charge(key, slot, frame_bytes)
        self._by_key[key] = self._by_slot[slot] = charge
        self.used += charge.nbytes

    def give_up(self, key: BlockKey) -> None:
        """The books have given the block up: its removal is owed. Nothing for a key that is not charged."""
        if (charge := self._discharge(key)) is not None:
            self._owed[key] = charge

    def forget(self, key: BlockKey) -> None:
        """The books have given the block up, and Redis has not got it."""
        self._discharge(key)

    def owe(self, key: BlockKey, frame_bytes: int = 0) -> None:
        """A block that is not charged may be in Redis, and shall not be. Forgotten when that is so of too many."""
        if key not in self._by_key and key not in self._owed and len(self._owed) < MAX_OWED:
            self._owed[key] = Charge(key, -1, frame_bytes)

    def owed(self) -> list[Charge]:
        """What is to be removed, oldest first."""
        return list(self._owed.values())

    def is_owed(self, key: BlockKey) -> bool:
        """Whether a block that may still be in Redis is to be removed."""
        return key in self._owed

    def paid(self, charges: Sequence[Charge]) -> None:
        """Those are not in Redis any more."""
        for charge in charges:
            if self._owed.get(charge.key) is charge:
                del self._owed[charge.key]

    def free_slots(self) -> Iterator[int]:
        """Slots that nobody is charged for."""
        return (slot for slot in range(self._slots) if slot not in self._by_slot)

    def check(self) -> None:
        """Assert that the sum is the sum."""
        total = sum(charge.nbytes for charge in self._by_key.values())
        assert self.used == total <= self.bound, f"{self.used} of {self.bound} bytes charged, sum {total}"
        assert {charge.key: charge for charge in self._by_slot.values()} == self._by_key

    def _discharge(self, key: BlockKey) -> Charge | None:
        charge = self._by_key.pop(key, None)
        if charge is not None:
            del self._by_slot[charge.slot]
            self.used -= charge.nbytes
        return charge
