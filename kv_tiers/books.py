"""A tier's books: which block lies in which of its slots, who holds it, what goes next.

Bookkeeping only, for any medium: the CPU slab (replicas copy bytes through their own mapping of it, see
`kv_tiers/slab.py` and `kv_tiers/block.py`), the NVMe slab, Redis.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from kv_tiers.expiry import LastUses
from kv_tiers.keys import BlockKey
from kv_tiers.leases import Lease, Leases
from kv_tiers.quotas import Quotas
from kv_tiers.slots import SlotBlock, SlotState, SlotTable
from kv_tiers.tier import Changes, Entry, Manifest, ReadLease, Reclaimed, TierStats, WriteLease
from policies.tiering import EvictionPolicy, Lru


@dataclass(slots=True)
class _Counters:
    read: int = 0
    written: int = 0
    evicted: int = 0
    dropped: int = 0
    rolled_back: int = 0
    refused: int = 0


class SlotBooks:
    """A `BlockStore` over `slots` slots of `slot_bytes` each; slot i starts at byte i * slot_bytes of the medium.

    `policy` ranks what may go (None: least recently used), `clock` gives seconds that never go back. Visible blocks
    that nobody used for `ttl_s` leave with `expire`. A tenant has at most `tenant_share` of the slots: beyond, it loses
    its own blocks first (nobody's blocks, tenant None, have no such bound). Pins keep at most `pin_share` of the slots.
    Everything takes constant time per block that is named or evicted, amortised, but for what the policy takes.
    """

    def __init__(
        self,
        slots: int,
        slot_bytes: int,
        *,
        policy: EvictionPolicy[BlockKey] | None = None,
        clock: Callable[[], float] = time.monotonic,
        ttl_s: float | None = None,
        tenant_share: float = 1.0,
        pin_share: float = 0.5,
    ) -> None:
        if slots < 1 or slot_bytes < 1:
            raise ValueError(f"a tier needs slots and bytes in them, not {slots} of {slot_bytes}")
        if not 0 <= pin_share <= 1:
            raise ValueError(f"the share of pinned slots lies in [0, 1], not {pin_share}")
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._clock = clock
        self._quotas = Quotas(slots, Lru() if policy is None else policy, tenant_share)
        self._table = SlotTable(slots, self._quotas, LastUses(ttl_s), clock)
        self._pinned = 0
        self._most_pinned = int(pin_share * slots)
        self._leases = Leases()
        self._counters = _Counters()

    @classmethod
    def fitting(cls, nbytes: int, slot_bytes: int) -> SlotBooks:
        """As many slots as a slab of `nbytes` has room for; ValueError if that is none."""
        if nbytes < slot_bytes:
            raise ValueError(f"{nbytes} bytes hold no block of {slot_bytes}")
        return cls(nbytes // slot_bytes, slot_bytes)

    def holds(self, key: BlockKey) -> bool:
        """Whether `key` is visible."""
        return key in self._table.visible

    def offset_of(self, key: BlockKey) -> int:
        """Where the visible `key` starts, in bytes. KeyError for any other."""
        return self._table.visible[key].slot * self.slot_bytes

    def longest_run(self, keys: Sequence[BlockKey]) -> int:
        """How many leading keys are visible."""
        for run, key in enumerate(keys):
            if key not in self._table.visible:
                return run
        return len(keys)

    def accessed(self, chain: Sequence[BlockKey]) -> None:
        """A request had this chain: for the policy. `prepare_write` says it itself."""
        tenants: set[str | None] = set()
        if self._quotas.bounded:
            visible = self._table.visible
            tenants = {visible[key].tenant for key in chain if key in visible}
        self._quotas.accessed(chain, tenants, self._clock())

    def prepare_read(self, keys: Sequence[BlockKey], owner: str, *, worth_s: float = 0.0) -> ReadLease:
        """Hold the longest leading run."""
        return self.prepare_scattered(keys[: self.longest_run(keys)], owner)

    def prepare_scattered(self, keys: Sequence[BlockKey], owner: str) -> ReadLease:
        """Hold every visible one of `keys`, past holes too: for callers who take each block for itself."""
        blocks = tuple(self._table.visible[key] for key in keys if key in self._table.visible)
        for block in blocks:
            self._table.hold(block)
        lease_id = self._leases.open(Lease(owner, (), blocks, writing=False))
        return ReadLease(lease_id, self._entries(blocks))

    def prepare_copy(self, keys: Sequence[BlockKey], owner: str) -> ReadLease:
        """As `prepare_scattered`, but no use of the blocks: they go as before, and only their slots are held.

        For copies to a tier below. What was evicted meanwhile is copied all the same.
        """
        blocks = tuple(self._table.visible[key] for key in keys if key in self._table.visible)
        for block in blocks:
            self._table.hold_bytes(block)
        lease_id = self._leases.open(Lease(owner, (), blocks, writing=False, copying=True))
        return ReadLease(lease_id, self._entries(blocks))

    def complete_read(self, lease_id: int) -> None:
        """Let go."""
        lease = self._leases.close(lease_id, writing=False)
        self._counters.read += 0 if lease.copying else len(lease.blocks)
        self._let_go(lease)

    def prepare_write(self, keys: Sequence[BlockKey], owner: str, *, tenant: str | None = None) -> WriteLease:
        """A request had this chain: give out slots, head of the chain first."""
        self.accessed(keys)
        return self.reserve(keys, owner, tenant=tenant)

    def reserve(
        self,
        keys: Sequence[BlockKey],
        owner: str,
        *,
        tenant: str | None = None,
        bypass: bool = False,
        spare: Collection[BlockKey] = (),
    ) -> WriteLease:
        """`prepare_write` without a request.

        New keys get room as long as anything can go that is neither held nor pinned nor one of `keys`. With `bypass`
        they compete with all that can go, one of `keys` or not, and those that the policy ranks lowest get `no_room`.
        Nothing in `spare` goes: the whole chain, where `keys` are a piece of it.
        """
        chain = tuple(keys)
        take = self._table.compete if bypass else self._table.make_room
        promised = {key for key in chain if key in self._table.writing}
        begun, evicted, refused = take(chain, tenant, spare)
        self._counters.evicted += evicted
        self._counters.refused += refused
        present: list[BlockKey] = []
        being_written: list[BlockKey] = []
        no_room: list[BlockKey] = []
        for key in chain:
            if key in self._table.visible:
                present.append(key)
            elif key in promised:
                being_written.append(key)
            elif key in begun:
                promised.add(key)  # its first place is an entry
            else:
                no_room.append(key)
        blocks = tuple(begun.values())
        lease_id = self._leases.open(Lease(owner, chain, blocks, writing=True))
        return WriteLease(
            lease_id, self._entries(blocks), tuple(present), tuple(being_written), tuple(no_room)
        )

    def complete_write(self, lease_id: int, written: Sequence[BlockKey]) -> tuple[BlockKey, ...]:
        """Commit `written`, roll back the rest, and make the whole chain most recently used, its head last."""
        commit = set(written)
        lease = self._leases.close_writer(lease_id, commit)
        now = self._clock()
        committed: dict[BlockKey, SlotBlock] = {}
        for block in lease.blocks:
            if block.state is SlotState.WRITING and block.key in commit:
                self._table.commit(block)
                committed[block.key] = block
            else:
                if block.state is SlotState.WRITING:
                    self._table.condemn(block)
                self._table.let_go(block, now)
                self._counters.rolled_back += 1
        self._counters.written += len(committed)
        unsettled = dict(committed)
        for key in reversed(lease.chain):
            if key in unsettled:
                self._table.let_go(unsettled.pop(key), now)
            else:
                self._table.touch(key, now)
        return tuple(committed)

    def join(self, leases: Sequence[WriteLease]) -> WriteLease:
        """One write lease in place of those of the pieces of a chain. UnknownLease (no change) if one is over."""
        joined = WriteLease(
            0,
            tuple(entry for lease in leases for entry in lease.entries),
            tuple(key for lease in leases for key in lease.present),
            tuple(key for lease in leases for key in lease.being_written),
            tuple(key for lease in leases for key in lease.no_room),
        )
        return replace(joined, id=self._leases.join([lease.id for lease in leases]))

    def part(self, lease_id: int, written: Sequence[BlockKey], size: int) -> list[tuple[int, list[BlockKey]]]:
        """Write leases of at most `size` keys in place of one, tail first, each with its part of `written`.

        To be completed one after the other. Errors as of `complete_write`.
        """
        return self._leases.part(lease_id, written, size)

    def drop(self, keys: Sequence[BlockKey]) -> int:
        """Hide blocks at once, pinned ones too; a held slot is freed with its last lease."""
        dropped = [key for key in dict.fromkeys(keys) if key in self._table.visible]
        self._hide(dropped)
        self._counters.dropped += len(dropped)
        return len(dropped)

    def revoke(self, keys: Iterable[BlockKey]) -> int:
        """What is being written of these keys will never be visible; how many."""
        blocks = [self._table.writing[key] for key in dict.fromkeys(keys) if key in self._table.writing]
        for block in blocks:
            self._table.condemn(block)
        return len(blocks)

    def evict(self, count: int) -> tuple[BlockKey, ...]:
        """Give up the next victims now; fewer than `count` where no more can go."""
        victims = self.coldest(count)
        self._hide(victims)
        self._counters.evicted += len(victims)
        return victims

    def coldest(self, count: int) -> tuple[BlockKey, ...]:
        """The next victims, least worth first, protected ones last. They stay."""
        return tuple(self._quotas.all.lowest(count, self._clock()))

    def protect(self, keys: Sequence[BlockKey]) -> None:
        """Make visible keys victims only when nothing unprotected can go; ends with `unprotect` or with the block."""
        for key in keys:
            if (block := self._table.visible.get(key)) is not None:
                for ranking in self._quotas.rankings(block.tenant):
                    ranking.protect(key)

    def unprotect(self, keys: Sequence[BlockKey]) -> None:
        """End protection, where there is any."""
        for key in keys:
            if (block := self._table.visible.get(key)) is not None:
                for ranking in self._quotas.rankings(block.tenant):
                    ranking.unprotect(key)

    def pin(self, keys: Sequence[BlockKey]) -> int:
        """Keep visible keys from eviction and expiry: how many leading ones, as far as the pins' share goes.

        A key's pins add up and take one slot of the share. They end with `unpin`, or with the block (drop, clear).
        """
        for done, key in enumerate(keys):
            block = self._table.visible.get(key)
            if block is None or (not block.pins and self._pinned >= self._most_pinned):
                return done
            self._pinned += not block.pins
            self._table.pin(block)
        return len(keys)

    def unpin(self, keys: Sequence[BlockKey]) -> int:
        """End one pin of each key; how many there were."""
        ended = 0
        for key in keys:
            block = self._table.visible.get(key)
            if block is not None and block.pins:
                self._table.unpin(block, self._clock())
                self._pinned -= not block.pins
                ended += 1
        return ended

    def expire(self) -> int:
        """Hide visible keys, neither held nor pinned, whose last use (written, read) is longer ago than `ttl_s`."""
        gone = self._table.expired()
        self._hide(gone)
        self._counters.evicted += len(gone)
        return len(gone)

    def adopt(self, pairs: Sequence[tuple[BlockKey, int]], tenant: str | None = None) -> int:
        """Make what an earlier process left visible: (key, slot index), least worth first; returns how many.

        Skips keys and slots that are taken, and slots that are not there. Their time to live starts now.
        """
        return sum(self._table.adopt(key, slot, tenant) for key, slot in pairs)

    def tell_gone(self, gone: Callable[[BlockKey], None]) -> None:
        """From now on `gone` hears of every block that becomes invisible, whatever the reason, at once."""
        self._table.gone = gone

    def tenants(self) -> dict[str | None, int]:
        """Used slots by the tenant that is charged for them."""
        return self._quotas.charged()

    def release_owner(self, owner: str) -> Reclaimed:
        """End the leases of a dead owner."""
        read_blocks = written_blocks = 0
        owned = self._leases.owned_by(owner)
        for lease_id, lease in owned.items():
            if lease.writing:
                written_blocks += len(lease.blocks)
                self.complete_write(lease_id, ())
            else:
                read_blocks += len(lease.blocks)
                self._leases.close(lease_id, writing=False)
                self._let_go(lease)
        return Reclaimed(len(owned), read_blocks, written_blocks)

    def clear(self) -> None:
        """Hide everything, with all pins, and condemn what is being written."""
        self._hide(list(self._table.visible))
        self.revoke(list(self._table.writing))

    def drain_changes(self) -> Changes:
        """The net change since the last message."""
        return self._table.journal.drain()

    def manifest(self) -> Manifest:
        """All visible keys."""
        return Manifest(self._table.journal.drain().seq, tuple(self._table.visible))

    def stats(self) -> TierStats:
        """Gauges and counters. `pinned`: held by readers or by `pin`; what expired counts as evicted."""
        free, visible, writing = len(self._table.free), len(self._table.visible), len(self._table.writing)
        leases = list(self._leases)
        readers = sum(1 for lease in leases if not lease.writing)
        return TierStats(
            capacity=self.slots,
            free=free,
            visible=visible,
            pinned=len(self._table.kept),
            writing=writing,
            condemned=self.slots - free - visible - writing,
            read_leases=readers,
            write_leases=len(leases) - readers,
            blocks_read=self._counters.read,
            blocks_written=self._counters.written,
            blocks_evicted=self._counters.evicted,
            blocks_dropped=self._counters.dropped,
            blocks_rolled_back=self._counters.rolled_back,
            blocks_refused=self._counters.refused,
        )

    def check(self) -> None:
        """Assert that every slot has one owner, every hold a lease, and that all else agrees with that."""
        leases = list(self._leases)
        self._table.check(
            [lease.blocks for lease in leases if not lease.copying],
            [lease.blocks for lease in leases if lease.copying],
        )
        pinned = sum(1 for block in self._table.visible.values() if block.pins)
        assert pinned == self._pinned <= self._most_pinned

    def _entries(self, blocks: Sequence[SlotBlock]) -> tuple[Entry, ...]:
        return tuple(Entry(block.key, block.slot * self.slot_bytes) for block in blocks)

    def _let_go(self, lease: Lease) -> None:
        """End a reader's holds, tail first, so that the head of the chain ends up most recent."""
        now = self._clock()
        for block in reversed(lease.blocks):
            if lease.copying:
                self._table.let_bytes_go(block)
            else:
                self._table.let_go(block, now)

    def _hide(self, keys: Sequence[BlockKey]) -> None:
        self._pinned -= sum(1 for key in keys if self._table.visible[key].pins)
        self._table.hide(keys)
