"""The slots of a tier and the blocks in them: how a block comes, is held, becomes idle and goes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from kv_tiers.expiry import LastUses
from kv_tiers.journal import Journal
from kv_tiers.keys import BlockKey
from kv_tiers.quotas import Quotas


class SlotState(Enum):
    """Of a used slot."""

    WRITING = "writing"
    VISIBLE = "visible"
    CONDEMNED = "condemned"


@dataclass(eq=False, slots=True)
class SlotBlock:
    """A used slot. `holds` counts the leases on it; a writer's is one of them. `copies`: leases on its bytes alone."""

    key: BlockKey
    slot: int
    tenant: str | None
    state: SlotState
    holds: int = 0
    pins: int = 0
    copies: int = 0


class Room(NamedTuple):
    """What making room for new keys came to: those that got a slot, how many others went, how many got none."""

    begun: dict[BlockKey, SlotBlock]
    evicted: int
    refused: int


class SlotTable:
    """Every used slot's block, visible ones by key. A visible block that is neither held nor pinned is idle: it may go.

    Half-written and kept blocks are held in the rankings, idle ones are not; condemned ones have left them.
    """

    def __init__(self, slots: int, quotas: Quotas, last_uses: LastUses, clock: Callable[[], float]) -> None:
        self.slots = slots
        self.free = OrderedDict.fromkeys(range(slots))  # longest free first; any one can be taken out
        self.visible: dict[BlockKey, SlotBlock] = {}
        self.writing: dict[BlockKey, SlotBlock] = {}
        self.kept: set[BlockKey] = set()  # visible, and held or pinned
        self.quotas = quotas
        self.journal = Journal()
        self.gone: Callable[[BlockKey], None] | None = None  # hears of what is hidden
        self._last_uses = last_uses
        self._clock = clock

    def make_room(
        self, chain: Sequence[BlockKey], tenant: str | None, spare: Collection[BlockKey] = ()
    ) -> Room:
        """Begin the new keys of `chain` that can have a slot, head first; the rest of the chain is spared.

        `spare`, where it is not empty, is a longer chain that is spared instead. A tenant that would exceed its share
        loses its own blocks first.
        """
        now = self._clock()
        fresh = self._fresh(chain)
        spare = spare or set(chain)
        evicted = 0
        # Loops, for a block whose bytes are being copied goes without leaving its slot.
        while own := self.quotas.lowest_own(tenant, len(fresh) - self.quotas.room(tenant), now, spare):
            self.hide(own)
            evicted += len(own)
        wanted = max(0, min(len(fresh), self.quotas.room(tenant)))
        while others := self.quotas.all.lowest(wanted - len(self.free), now, spare):
            self.hide(others)
            evicted += len(others)
        granted = fresh[: min(wanted, len(self.free))]
        for key in reversed(granted):
            self._enter(key, tenant, now)
        return Room(self._begin(granted, tenant), evicted, len(fresh) - len(granted))

    def compete(
        self, chain: Sequence[BlockKey], tenant: str | None, spare: Collection[BlockKey] = ()
    ) -> Room:
        """As `make_room`, but new keys are ranked among all that may go, and the lowest of all give way.

        Visible keys in `spare` do not.
        """
        now = self._clock()
        fresh = self._fresh(chain)
        spare = set(spare).difference(fresh)
        outside, left = set(fresh), dict.fromkeys(fresh)
        for key in reversed(chain):
            if key in outside:
                outside.discard(key)
                self._enter(key, tenant, now)
            elif key in left:
                self._touch(key, tenant, now)
            else:
                self.touch(key, now)
        evicted = 0
        while lowest := self.quotas.lowest_own(tenant, -self.quotas.room(tenant), now, spare):
            evicted += self._give_up(lowest, left, tenant)
        while lowest := self.quotas.all.lowest(len(left) - len(self.free), now, spare):
            evicted += self._give_up(lowest, left, tenant)
        return Room(self._begin(left, tenant), evicted, len(fresh) - len(left))

    def commit(self, block: SlotBlock) -> None:
        """What was being written is visible, and held by its writer still."""
        del self.writing[block.key]
        self._appear(block)
        self.kept.add(block.key)

    def adopt(self, key: BlockKey, slot: int, tenant: str | None) -> bool:
        """Make a block that lies in `slot` visible and idle; False if key or slot is taken or there is no such slot."""
        if slot not in self.free or key in self.visible or key in self.writing:
            return False
        del self.free[slot]
        self._enter(key, tenant, self._clock())
        self._appear(SlotBlock(key, slot, tenant, SlotState.VISIBLE))
        return True

    def hold(self, block: SlotBlock) -> None:
        """One more lease on a visible block."""
        self._keep(block)
        block.holds += 1

    def let_go(self, block: SlotBlock, now: float) -> None:
        """One lease less: the block may be idle now, or its slot free."""
        block.holds -= 1
        if block.state is SlotState.VISIBLE:
            self._last_uses.used(block.key, now)
        self._settle(block, now)

    def hold_bytes(self, block: SlotBlock) -> None:
        """One more lease on a visible block's bytes: it may go, and is ranked as before, but its slot stays its own."""
        assert block.state is SlotState.VISIBLE
        block.copies += 1

    def let_bytes_go(self, block: SlotBlock) -> None:
        """One less. No use of the block."""
        block.copies -= 1
        if block.state is SlotState.CONDEMNED:
            self._settle(block, 0.0)

    def pin(self, block: SlotBlock) -> None:
        """One more pin on a visible block."""
        self._keep(block)
        block.pins += 1

    def unpin(self, block: SlotBlock, now: float) -> None:
        """One less."""
        block.pins -= 1
        self._settle(block, now)

    def touch(self, key: BlockKey, now: float) -> None:
        """As a hold that ends at once, if the key is idle."""
        if key in self.visible and key not in self.kept:
            self._touch(key, self.visible[key].tenant, now)

    def condemn(self, block: SlotBlock) -> None:
        """What is being written will never be visible; its writer still holds the slot."""
        assert block.state is SlotState.WRITING
        del self.writing[block.key]
        block.state = SlotState.CONDEMNED
        self._leave(block.key, block.tenant)

    def hide(self, keys: Iterable[BlockKey]) -> None:
        """Make visible keys invisible, with their pins; slots that nobody holds are free."""
        for key in keys:
            block = self.visible.pop(key)
            self.kept.discard(key)
            self._leave(key, block.tenant)
            self._last_uses.forget(key)
            self.journal.vanished(key)
            block.state, block.pins = SlotState.CONDEMNED, 0
            self._settle(block, 0.0)
            if self.gone is not None:
                self.gone(key)

    def expired(self) -> list[BlockKey]:
        """Idle keys whose time is over. The caller hides them."""
        return self._last_uses.expired(self._clock(), self.kept)

    def check(self, leased: Iterable[Sequence[SlotBlock]], copied: Iterable[Sequence[SlotBlock]]) -> None:
        """Assert that every slot has one owner and every hold a lease, and that rankings, charges and journal agree.

        `leased`, `copied`: the blocks of every lease of each kind.
        """
        holds: dict[SlotBlock, int] = {}
        for lease in leased:
            for block in lease:
                holds[block] = holds.get(block, 0) + 1
        copies: dict[SlotBlock, int] = {}
        for lease in copied:
            for block in lease:
                copies[block] = copies.get(block, 0) + 1
        blocks = {*holds, *copies, *self.visible.values(), *self.writing.values()}
        assert sorted([*self.free, *(block.slot for block in blocks)]) == list(range(self.slots))
        for block in blocks:
            assert (block.holds, block.copies) == (holds.get(block, 0), copies.get(block, 0))
            assert (self.visible.get(block.key) is block) == (block.state is SlotState.VISIBLE)
            assert (self.writing.get(block.key) is block) == (block.state is SlotState.WRITING)
            assert block.pins == 0 or block.state is SlotState.VISIBLE
        assert not self.visible.keys() & self.writing.keys()
        assert all(block.holds == 1 for block in self.writing.values())
        assert self.kept == {key for key, block in self.visible.items() if block.holds or block.pins}
        charged: dict[str | None, int] = {}
        for block in blocks:
            charged[block.tenant] = charged.get(block.tenant, 0) + 1
        idle = {key: block.tenant for key, block in self.visible.items() if key not in self.kept}
        self.quotas.check(idle, self.visible.keys() | self.writing.keys(), charged, self._clock())
        self._last_uses.check(self.visible, self.kept)
        self.journal.check(self.visible)

    def _fresh(self, chain: Sequence[BlockKey]) -> list[BlockKey]:
        return [key for key in dict.fromkeys(chain) if key not in self.visible and key not in self.writing]

    def _begin(self, keys: Collection[BlockKey], tenant: str | None) -> dict[BlockKey, SlotBlock]:
        """Give slots to keys that have entered the rankings."""
        begun: dict[BlockKey, SlotBlock] = {}
        for key in keys:
            for ranking in self.quotas.rankings(tenant):
                ranking.hold(key)
            slot, _ = self.free.popitem(last=False)
            begun[key] = self.writing[key] = SlotBlock(key, slot, tenant, SlotState.WRITING, holds=1)
        return begun

    def _give_up(self, keys: Iterable[BlockKey], left: dict[BlockKey, None], tenant: str | None) -> int:
        """Evict visible keys, refuse new ones (those in `left`); how many were evicted."""
        evicted = 0
        for key in keys:
            if key in left:
                del left[key]
                self._leave(key, tenant)
                self.quotas.refund(tenant)
            else:
                self.hide([key])
                evicted += 1
        return evicted

    def _appear(self, block: SlotBlock) -> None:
        self.visible[block.key] = block
        block.state = SlotState.VISIBLE
        self._last_uses.used(block.key, self._clock())
        self.journal.appeared(block.key)

    def _enter(self, key: BlockKey, tenant: str | None, now: float) -> None:
        self.quotas.charge(tenant)
        for ranking in self.quotas.rankings(tenant):
            ranking.add(key, now)

    def _leave(self, key: BlockKey, tenant: str | None) -> None:
        """The slot is still charged."""
        for ranking in self.quotas.rankings(tenant):
            ranking.remove(key)

    def _touch(self, key: BlockKey, tenant: str | None, now: float) -> None:
        for ranking in self.quotas.rankings(tenant):
            ranking.touch(key, now)

    def _keep(self, block: SlotBlock) -> None:
        assert block.state is SlotState.VISIBLE
        if block.key not in self.kept:
            self.kept.add(block.key)
            for ranking in self.quotas.rankings(block.tenant):
                ranking.hold(block.key)

    def _settle(self, block: SlotBlock, now: float) -> None:
        """If nobody holds or pins the block any more it is idle, or its slot is free."""
        if block.holds or block.pins:
            return
        if block.state is SlotState.VISIBLE:
            self.kept.discard(block.key)
            self._last_uses.idle(block.key)
            for ranking in self.quotas.rankings(block.tenant):
                ranking.release(block.key, now)
        elif not block.copies:
            assert block.state is SlotState.CONDEMNED
            self.free[block.slot] = None
            self.quotas.refund(block.tenant)
