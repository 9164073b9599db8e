"""One node's tiers as one store: the CPU slab that replicas map, and what lies below it and on other nodes.

Plain asyncio on one event loop: no Ray, no threads of its own, time only from the injected clock, and bytes are never
touched here, only passed on as views; so the same code runs in a simulator, over tiers that hold no bytes.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext

from kv_tiers.at_rest import AtRest
from kv_tiers.books import SlotBooks
from kv_tiers.directory import Place
from kv_tiers.keys import BlockKey, is_exact, is_kept_as, kept_as
from kv_tiers.store_fetch import Fetches
from kv_tiers.store_lend import Holds, Loans, Pinning, Pins
from kv_tiers.store_plan import Finder
from kv_tiers.store_ports import CPU, Cleared, DirectoryPort, Journal, Loan, Peer, PinRefused, StoreStats
from kv_tiers.store_spill import Spill
from kv_tiers.store_write import Listener, Writes
from kv_tiers.tier import BlockMemory, ReadLease, Reclaimed, Tier, WriteLease
from policies.tiering import Admission
from policies.tiering.speed import Computing, Speeds

_LOSSY = tuple(codec for codec in AtRest if codec is not AtRest.EXACT)


class TieredStore:
    """`BlockStore` in coroutines for the replicas of a node, and its commands for users and other nodes.

    A read first takes what is in the slab, then loads from below or from another node as long as that is faster than
    computing; a write goes to the slab, and from there down, behind everybody's back. Nothing raises for KV that is
    lost. `start` before use; `sweep` every second or so.
    """

    def __init__(
        self,
        books: SlotBooks,
        memory: BlockMemory,
        lower: Sequence[Tier],
        *,
        node: str,
        directory: DirectoryPort,
        peers: Callable[[str], Peer | None],
        admission: Admission[BlockKey],
        speeds: Speeds,
        clock: Callable[[], float],
        at_once: bool = False,
        idle_share: Callable[[], float] = lambda: 1.0,
    ) -> None:
        """`lower`: started tiers, the fastest first; the store closes none of them. `clock`: the event loop's time.
        `at_once`: write down everything that is written.
        """
        self._books = books
        self._lower = list(lower)
        self._codecs: set[AtRest] = set()  # of all tiers that there were, and blocks that were asked for
        self._note_codecs()
        self._admission = admission
        self._clock = clock
        self._speeds = speeds
        self._computing = Computing()
        self._tenants = _Tenants(2 * books.slots)
        self._finder = Finder(node, books, memory, self._lower, directory, peers)
        self._fetches = Fetches(books, self._finder, directory, speeds, clock, self._tenants.of)
        self._spill = Spill(
            books,
            memory,
            self._lower,
            directory,
            admission,
            clock,
            at_once=at_once,
            idle_share=idle_share,
            tenant_of=self._tenants.of,
            pays=self._pays,
        )
        self._writes = Writes(books, self._listeners, self._spill.visible)
        self._loans = Loans(books, clock)
        self._holds = Holds(self._fetches.barred, clock)
        self._pins = Pins(self._pinning, self._runs, self._slots, clock)
        self._asked = self._here = 0

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot, in every tier."""
        return self._books.slot_bytes

    @property
    def lower(self) -> tuple[Tier, ...]:
        """The tiers below the slab, the fastest first."""
        return tuple(self._lower)

    def start(self) -> asyncio.Task[None]:
        """Begin the write-down; → its task, which only fails by a mistake of ours. Needs a running event loop."""
        return self._spill.start()

    async def close(self) -> None:
        """End everything that is under way; tiers and memory stay their makers'."""
        await self._spill.close()
        await self._fetches.close()
        self._loans.end_all()

    def set_lower(self, lower: Sequence[Tier]) -> None:
        """Other tiers below from now on (one came back, or is handed to somebody else)."""
        self._lower[:] = lower
        self._note_codecs()
        if not lower:
            self._spill.give_up()
        self._spill.nudge()

    # What replicas use: `BlockStore`.

    async def prepare_read(
        self, keys: Sequence[BlockKey], owner: str, *, worth_s: float = 0.0, abroad: bool = True
    ) -> ReadLease:
        """Pin the longest leading run, after loading what is worth it. `abroad`: from other nodes as well."""
        run = self._books.longest_run(keys)
        if abroad:  # a request of this node
            counted = _counted_before(keys)
            if keys and is_exact(keys[-1]):  # a second look's worth is what the first has left of it
                self._computing.heard(len(keys), worth_s)
            self._asked += len(keys) - counted
            self._here += max(0, run - counted)
            self._note_lossy(keys)
        if run == len(keys) or worth_s <= 0:
            return self._books.prepare_read(keys, owner)
        async with self._fetches.brought(keys, worth_s, abroad=abroad):
            lease = self._books.prepare_read(keys, owner)
        self._spill.nudge()
        return lease

    def complete_read(self, lease_id: int) -> None:
        """Unpin. UnknownLease."""
        self._books.complete_read(lease_id)

    async def prepare_write(
        self, keys: Sequence[BlockKey], owner: str, *, tenant: str | None = None
    ) -> WriteLease:
        """A request had these keys: slots for those that are not here."""
        # The only tier is a pure cache: what it ranks lowest need not enter. Above others, what is new must pass.
        lease = await self._writes.prepare(keys, owner, tenant=tenant, bypass=not self._lower)
        for codec in (AtRest.EXACT, *self._codecs):
            self._tenants.remember((kept_as(entry.key, codec) for entry in lease.entries), tenant)
        self._spill.nudge()
        return lease

    async def complete_write(self, lease_id: int, written: Sequence[BlockKey]) -> tuple[BlockKey, ...]:
        """Make blocks visible; → those that became so. UnknownLease; ValueError for a foreign key."""
        return await self._writes.complete(lease_id, written)

    async def drop(self, keys: Sequence[BlockKey]) -> int:
        """Make blocks invisible in every tier; → how many were in the slab."""
        return (await self.evict(keys))[CPU]

    def release_owner(self, owner: str) -> Reclaimed:
        """End the leases of a dead owner."""
        return self._books.release_owner(owner)

    # What other nodes use.

    async def lend(self, keys: Sequence[BlockKey], borrower: str, *, worth_s: float = 0.0) -> Loan:
        """Pin the leading run for a reader on another node, loading from our own lower tiers what is worth it."""
        lease = await self.prepare_read(keys, borrower, worth_s=worth_s, abroad=False)
        behind = keys[len(lease.entries) :][:1]
        return self._loans.take(lease, more=any(tier.longest_run(behind) for tier in self._lower))

    def give_back(self, loan: int) -> bool:
        """The reader is done; False for a loan that is over already."""
        return self._loans.give_back(loan)

    # Commands of users.

    def pin(self, keys: Sequence[BlockKey], ttl_s: float | None = None) -> dict[str, int] | PinRefused:
        """Keep leading blocks in every tier that has them; → per tier how many. Counted, and bounded.

        A tier keeps pins in a share of its slots; all of them together name no more blocks than the tiers have slots.
        """
        return self._pins.pin(keys, ttl_s)

    def unpin(self, keys: Sequence[BlockKey]) -> dict[str, int]:
        """End one pin of this chain; → per tier how many blocks that were."""
        return self._pins.unpin(keys)

    async def prefetch(self, keys: Sequence[BlockKey]) -> int:
        """Load the longest run that anybody has, whatever it takes; → leading blocks in the slab then."""
        if not keys:
            return 0
        async with self._fetches.brought(keys, math.inf):
            run = self._books.longest_run(keys)
            self._books.accessed(
                keys[:run]
            )  # a policy that learns takes what no request had for worth nothing
            return run

    async def evict(
        self, keys: Sequence[BlockKey], tiers: Sequence[str] | None = None, *, keep: bool = False
    ) -> dict[str, int]:
        """Make blocks, and what was made of them, invisible in these tiers (None: in all); → per tier how many were.

        Whoever was loading or writing them into one of these tiers does so in vain; what stays in the slab may be
        written down again later. `keep`: what leaves the slab is written down first.
        """
        if keep:
            await self._spill.write_down(keys)
        counts, gone = {}, frozenset(keys)
        slab = _named(CPU, tiers)
        made = self._made(keys)
        with self._fetches.barred(gone | made) if slab else nullcontext():
            if slab:
                counts[CPU] = self._books.drop(keys)
                self._books.drop([*made])
                self._books.revoke([*keys, *made])
                self._pins.forget(CPU, gone)
            await self._spill.forget(gone, tiers, leaving=slab)
            for tier in self.lower:
                if _named(tier.name, tiers) and tier in self._lower:
                    self._pins.forget(tier.name, gone)
                    counts[tier.name] = await tier.drop(keys)
        return counts

    async def flush(self, tiers: Sequence[str] | None = None) -> dict[str, Cleared]:
        """Make everything in these tiers (None: in all) invisible; → what went, and what could not.

        Whoever was loading or writing something into one of them does so in vain.
        """
        cleared = {}
        slab = _named(CPU, tiers)
        with self._fetches.barred() if slab else nullcontext():
            if slab:
                cleared[CPU] = Cleared(self._books.stats().visible, 0)
                self._books.clear()
                self._pins.forget(CPU)
            await self._spill.forget(None, tiers, leaving=slab)
            for tier in self.lower:
                if _named(tier.name, tiers) and tier in self._lower:
                    before = tier.stats().visible
                    self._pins.forget(tier.name)
                    await tier.clear()
                    left = tier.stats().visible
                    cleared[tier.name] = Cleared(max(0, before - left), left)
        return cleared

    def hold(self, name: str, keys: Sequence[BlockKey] | None, seconds: float) -> None:
        """Load none of these (None: nothing) until `release` of that name, or for so long: an evict or flush on several
        nodes is under way.
        """
        barred = None if keys is None else frozenset(keys) | self._made(keys)
        self._holds.begin(name, barred, seconds)

    def release(self, name: str) -> None:
        """End a hold; nothing for one that is over."""
        self._holds.end(name)

    async def write_down(self) -> None:
        """Return when everything that is queued for the tiers below is there, or refused."""
        await self._spill.write_down()

    async def settle(self) -> None:
        """Return when no load is under way."""
        await self._fetches.settle()

    def holds(self, keys: Sequence[BlockKey]) -> dict[str, list[bool]]:
        """Per tier, which of these it has, in its own way, as far as is known here."""
        flags = {CPU: [self._books.holds(key) for key in keys]}
        for tier in self._lower:
            flags[tier.name] = [tier.longest_run([kept_as(key, tier.at_rest)]) == 1 for key in keys]
        return flags

    # For whoever runs the store.

    def journals(self) -> list[tuple[Place, Journal]]:
        """Every tier's messages for the directory, under its name there."""
        own: list[tuple[Place, Journal]] = [(self._finder.place_of(CPU), self._books)]
        return own + [(self._finder.place_of(tier.name), tier) for tier in self._lower]

    def sweep(self) -> None:
        """End what has had its time: loans, pins, blocks that nobody used for their time to live."""
        self._loans.expire()
        self._pins.expire()
        self._holds.expire()
        self._books.expire()
        for tier in self._lower:
            tier.expire()

    def stats(self) -> StoreStats:
        """Gauges and counters."""
        return StoreStats(
            tiers={CPU: self._books.stats(), **{tier.name: tier.stats() for tier in self._lower}},
            speeds={tier.name: self._speeds.of(tier.name, self._clock()) for tier in self._lower},
            sources=dict(self._fetches.counters),
            spill=self._spill.counters,
            asked=self._asked,
            here=self._here,
            late=self._fetches.late,
            unattended=self._fetches.unattended,
            queued=self._spill.queued,
            lent=len(self._loans),
            pinned=len(self._pins),
        )

    def check(self) -> None:
        """Assert every invariant. For tests and idle moments."""
        self._books.check()
        for tier in self._lower:
            tier.check()
        self._fetches.check()
        self._spill.check()
        self._pins.check()

    def _listeners(self) -> list[Listener]:
        """Who learns from requests, each to be told in a turn of its own."""
        below = [tier.accessed for tier in self._lower]
        return [self._books.accessed, *below, self._tell_admission, self._spill.accessed]

    def _tell_admission(self, chain: Sequence[BlockKey]) -> None:
        self._admission.accessed(chain, self._clock())

    def _made(self, keys: Iterable[BlockKey]) -> frozenset[BlockKey]:
        """Keys of the lossy blocks that there may be of these."""
        return frozenset(kept_as(key, codec) for codec in self._codecs for key in keys)

    def _note_codecs(self) -> None:
        self._codecs |= {tier.at_rest for tier in self._lower} - {AtRest.EXACT}

    def _note_lossy(self, chain: Sequence[BlockKey]) -> None:
        """A request reads lossy blocks, and will not write them: this is what policies learn from it."""
        if not chain or is_exact(chain[-1]):
            return
        # Another node's tier may have what none of ours knows.
        self._codecs |= {codec for codec in _LOSSY if is_kept_as(chain[-1], codec)}
        self._books.accessed(chain)
        for tier in self._lower:
            if tier.at_rest is not AtRest.EXACT:
                tier.accessed(chain)

    def _pays(self, tier: str) -> bool:
        """Whether blocks that are read from there come sooner than computed ones."""
        size, now = self._books.slot_bytes, self._clock()
        return self._computing.dearer_than(lambda blocks: self._speeds.estimate(tier, blocks * size, now))

    def _runs(self, keys: Sequence[BlockKey]) -> dict[str, int]:
        """Leading blocks in each tier."""
        runs = {CPU: self._books.longest_run(keys)}
        for tier in self._lower:
            runs[tier.name] = tier.longest_run([kept_as(key, tier.at_rest) for key in keys])
        return runs

    def _slots(self) -> int:
        """Of all tiers."""
        return self._books.slots + sum(tier.stats().capacity for tier in self._lower)

    def _pinning(self) -> Mapping[str, Pinning]:
        return {CPU: self._books, **{tier.name: tier for tier in self._lower}}


def _counted_before(chain: Sequence[BlockKey]) -> int:
    """Leading exact keys of a chain that goes on lossily: its request has asked for those alone already."""
    if not chain or is_exact(chain[-1]):
        return 0
    return next(at for at, key in enumerate(chain) if not is_exact(key))


def _named(name: str, tiers: Sequence[str] | None) -> bool:
    return tiers is None or name in tiers


class _Tenants:
    """Whose quota a block is charged to further down. Bounded: a block that is forgotten is nobody's."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._tenants: OrderedDict[BlockKey, str] = OrderedDict()

    def remember(self, keys: Iterable[BlockKey], tenant: str | None) -> None:
        if tenant is None:
            return
        for key in keys:
            self._tenants[key] = tenant
            self._tenants.move_to_end(key)
        while len(self._tenants) > self._capacity:
            self._tenants.popitem(last=False)

    def of(self, key: BlockKey) -> str | None:
        return self._tenants.get(key)
