"""The write-down: copies of blocks go from the CPU slab to the tiers below, before they are evicted.

A block is written once at most, and only while a lease holds it, so what lies under a key is that key's block. Nothing
waits for the write-down: a block that has to leave earlier is lost, which costs a recompute.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

from kv_tiers.at_rest import AtRest
from kv_tiers.books import SlotBooks
from kv_tiers.keys import BlockKey, is_exact, kept_as
from kv_tiers.store_ports import DirectoryPort, SpillCounters, joined
from kv_tiers.tier import BlockMemory, Stored, Tier
from policies.tiering import Admission

BATCH_BYTES = 8 << 20
"""One `put`. Small: between two of them the machine is left to others."""

OWNER = "store:spill"

_LOW_SHARE, _MOST_LOW = 1 / 4, 8192
"""Share of the slots, and most of them, that is to be free, or copied already, at any time."""

_LOOKED_AT_ONCE = 1024
"""Blocks between two turns of the event loop."""

_LOOK_REST = 9.0
"""Pause after a look at what goes next, in multiples of what it took: whoever writes a lot nudges all the time."""

_AGAIN_S = 30.0
"""After so long a block that was refused is looked at again."""

_LEAST_PAUSE, _MOST_PAUSE, _LONGEST_PAUSE_S = 0.25, 4.0, 1.0
"""Pause after a batch: so many times its own duration, the more the busier the machine; a second at most."""

_FORGET_S = 5.0
"""Longest wait for a batch that is being written, by whoever forgets blocks of it."""

_KEPT = (Stored.STORED, Stored.PRESENT)


class Spill:
    """The write-down of one store. `start` begins it, `nudge` says that something changed in the slab."""

    def __init__(
        self,
        books: SlotBooks,
        memory: BlockMemory,
        lower: Sequence[Tier],
        directory: DirectoryPort,
        admission: Admission[BlockKey],
        clock: Callable[[], float],
        *,
        at_once: bool,
        idle_share: Callable[[], float],
        tenant_of: Callable[[BlockKey], str | None],
        pays: Callable[[str], bool] = lambda tier: True,
    ) -> None:
        """`lower`, the fastest first, is looked at anew each time. `at_once`: everything is written as soon as it is
        visible; otherwise what `admission` finds worth it, when it is among the next to be evicted, and to the tiers of
        which it `pays` to read. `idle_share`: the part of the machine that nobody uses now, 0 to 1.
        """
        self._books = books
        self._memory = memory
        self._lower = lower
        self._directory = directory
        self._admission = admission
        self._clock = clock
        self._at_once = at_once
        self._idle_share = idle_share
        self._tenant_of = tenant_of
        self._pays = pays
        # → whether it is written whatever reading costs
        self._queue: OrderedDict[BlockKey, bool] = OrderedDict()
        self._settled: OrderedDict[BlockKey, float] = OrderedDict()  # not to be looked at again before
        self._low = max(1, min(int(books.slots * _LOW_SHARE), _MOST_LOW))
        self._batch = max(1, BATCH_BYTES // books.slot_bytes)
        self._work = asyncio.Event()
        self._writing = asyncio.Lock()
        # The batch that is being written: all of it, where those lie that are still wanted somewhere, and by tier those
        # that are to be there no more.
        self._batch_keys: frozenset[BlockKey] = frozenset()
        self._copying: dict[BlockKey, int] = {}
        self._unwanted: dict[str, set[BlockKey]] = {}
        self._rushing = 0
        self._task: asyncio.Task[None] | None = None
        self.counters = SpillCounters()

    @property
    def queued(self) -> int:
        """Blocks that wait for their write-down, protected from eviction as long as anything else can go."""
        return len(self._queue)

    def start(self) -> asyncio.Task[None]:
        """Begin; → the background task, for whoever must notice its failure. Needs a running event loop."""
        self._task = asyncio.create_task(self._run())
        return self._task

    async def close(self) -> None:
        """Stop; what is queued is given up."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        self.give_up()

    def give_up(self) -> None:
        """Forget what is queued: there is nowhere to write it to."""
        self._books.unprotect(tuple(self._queue))
        self._queue.clear()

    def nudge(self) -> None:
        """Room became scarcer, or a lower tier came."""
        if self._lower:
            self._work.set()

    def visible(self, keys: Iterable[BlockKey]) -> None:
        """A request's blocks were written to the slab just now."""
        if self._at_once and self._lower:
            self._enqueue([key for key in keys if not self._has_all(key)], priced=False)
        self.nudge()

    def accessed(self, chain: Iterable[BlockKey]) -> None:
        """A request had these blocks: what was said of them may be wrong now."""
        if self._settled:
            for key in chain:
                self._settled.pop(key, None)

    async def write_down(self, keys: Sequence[BlockKey] = ()) -> None:
        """Return when these blocks, whatever admission says, and all that is queued have been written or refused."""
        if not self._lower:
            return
        wanted = [key for key in keys if self._books.holds(key) and not self._has_all(key)]
        self._enqueue(wanted, priced=False)
        self._rushing += 1
        try:
            while self._queue:
                await self._write_batch()
            async with self._writing:  # what the background task took before us
                pass
        finally:
            self._rushing -= 1

    async def forget(
        self,
        keys: Collection[BlockKey] | None = None,
        tiers: Sequence[str] | None = None,
        *,
        leaving: bool = True,
    ) -> None:
        """What of these (None: all) is being written into these tiers (None: all) is to be there no more. `leaving`:
        they leave the slab as well, so nobody writes them down any more.

        Returns when the tiers are done with them, or after a while: what lands there later is taken away again.
        """
        for tier in self._lower:
            if tiers is None or tier.name in tiers:
                gone = self._batch_keys if keys is None else self._batch_keys.intersection(keys)
                self._unwanted.setdefault(tier.name, set()).update(gone)
        if leaving:
            for key in [*self._queue, *self._copying] if keys is None else keys:
                self._queue.pop(key, None)
                self._copying.pop(key, None)
        with suppress(TimeoutError):
            async with asyncio.timeout(_FORGET_S), self._writing:
                pass

    def check(self) -> None:
        """The queue is bounded."""
        assert len(self._queue) <= self._books.slots

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            looked_s = await self._choose()
            while self._queue and self._lower:
                began = self._clock()
                await self._write_batch()
                await self._rest(self._clock() - began)
            await asyncio.sleep(0 if self._rushing else min(_LOOK_REST * looked_s, _LONGEST_PAUSE_S))

    async def _rest(self, seconds: float) -> None:
        """Leave the machine to others, in proportion to what a batch took."""
        busy = 1.0 - min(1.0, max(0.0, self._idle_share()))
        ratio = _LEAST_PAUSE + (_MOST_PAUSE - _LEAST_PAUSE) * busy * busy
        await asyncio.sleep(0 if self._rushing else min(seconds * ratio, _LONGEST_PAUSE_S))

    async def _choose(self) -> float:
        """Queue those of the next to be evicted that would be lost and are worth a write; → seconds of looking."""
        needed = self._low - self._books.stats().free
        if needed <= 0 or not any(self._pays(tier.name) for tier in self._lower):
            return 0.0
        now = self._clock()
        cold = await self._unsettled(self._books.coldest(needed), now)
        looked_s = self._clock() - now
        if cold:
            await self._judge(cold, now)
        return looked_s

    async def _unsettled(self, keys: Sequence[BlockKey], now: float) -> list[BlockKey]:
        """Those that nothing is known of yet."""
        unsettled: list[BlockKey] = []
        for part in _parts(keys):
            unsettled += [key for key in part if not self._is_settled(key, now)]
            await asyncio.sleep(0)
        return unsettled

    async def _judge(self, cold: Sequence[BlockKey], now: float) -> None:
        """Queue what nobody else has and is worth a write."""
        copies = await self._directory.copies(joined(cold))
        sole: list[BlockKey] = []
        for place, key in enumerate(cold):
            # The directory counts our own slab as well.
            if place < len(copies) and copies[place] > 1:
                self.counters.copied_elsewhere += 1
                self._settle(key, now)
            else:
                sole.append(key)
        worthy: list[BlockKey] = []
        for part in _parts(sole):
            worthy += self._worthy(part, now)
            await asyncio.sleep(0)
        # Heads first: a tier below that has room for a part of a chain should have its beginning.
        for part in _parts(worthy[::-1]):
            self._enqueue([key for key in part if self._books.holds(key)], priced=True)
            await asyncio.sleep(0)

    def _worthy(self, keys: Sequence[BlockKey], now: float) -> list[BlockKey]:
        worthy = []
        for key, worth in zip(keys, self._admission.worth(keys, now), strict=True):
            if worth:
                worthy.append(key)
            else:
                self.counters.unworthy += 1
                self._settle(key, now)
        return worthy

    def _is_unwanted(self, tier: Tier, key: BlockKey) -> bool:
        return key in self._unwanted.get(tier.name, ())

    def _is_settled(self, key: BlockKey, now: float) -> bool:
        if not is_exact(key):  # it came from below
            return True
        return key in self._queue or self._settled.get(key, now) > now or self._has_any(key)

    def _settle(self, key: BlockKey, now: float) -> None:
        self._settled[key] = now + _AGAIN_S
        self._settled.move_to_end(key)
        while len(self._settled) > self._books.slots:
            self._settled.popitem(last=False)

    def _keeps(self) -> list[Tier]:
        """Where a block is safe: in exact tiers, if there are any, for a lossy one cannot give it back."""
        return [tier for tier in self._lower if tier.at_rest is AtRest.EXACT] or list(self._lower)

    def _has_any(self, key: BlockKey) -> bool:
        return any(_has(tier, key) for tier in self._keeps())

    def _has_all(self, key: BlockKey) -> bool:
        return all(_has(tier, key) for tier in self._lower)

    def _enqueue(self, keys: Sequence[BlockKey], *, priced: bool) -> None:
        """`priced`: only tiers of which it pays to read get these."""
        new = [key for key in keys if key not in self._queue and is_exact(key)]
        self._books.protect(new)
        self._queue.update(dict.fromkeys(new, False))
        if not priced:
            self._queue.update((key, True) for key in keys if key in self._queue)
        lost = []
        while len(self._queue) > self._books.slots:
            lost.append(self._queue.popitem(last=False)[0])
        self._books.unprotect(lost)
        self.counters.overflowed += len(lost)

    async def _write_batch(self) -> None:
        """Write the first of the queue to every tier that does not have them."""
        async with self._writing:
            batch: dict[BlockKey, bool] = {}
            while self._queue and len(batch) < self._batch:
                batch.update([self._queue.popitem(last=False)])
            began = self._clock()
            lease = self._books.prepare_copy([*batch], OWNER)
            try:  # the lease keeps the slots from being refilled
                self._copying = {entry.key: entry.offset for entry in lease.entries}
                self._batch_keys = frozenset(self._copying)
                kept: set[BlockKey] = set()
                for tier in tuple(self._lower):
                    has = await self._put(tier, batch)
                    kept |= has if tier in self._keeps() else set()
                for key in self._copying.keys() - kept:
                    self._settle(key, self._clock())
            finally:
                self._batch_keys, self._copying, self._unwanted = frozenset(), {}, {}
                self._books.complete_read(lease.id)
                self._books.unprotect([*batch])
                self.counters.seconds += self._clock() - began

    async def _put(self, tier: Tier, at_any_price: Mapping[BlockKey, bool]) -> set[BlockKey]:
        """Hand what the tier does not have to it, one tenant after the other; → what it has afterwards."""
        kept = {key for key in self._copying if _has(tier, key)}
        pays = self._pays(tier.name)
        by_tenant: dict[str | None, list[BlockKey]] = {}
        for key in self._copying:
            if not (pays or at_any_price[key]):
                self.counters.too_dear += key not in kept
            elif key not in kept:
                by_tenant.setdefault(self._tenant_of(key), []).append(key)
        for tenant, wanted in by_tenant.items():
            # Not forgotten meanwhile.
            keys = [key for key in wanted if key in self._copying and not self._is_unwanted(tier, key)]
            if not keys or tier not in self._lower:  # let go of meanwhile
                continue
            views = [self._memory.view(self._copying[key], self._books.slot_bytes) for key in keys]
            answers = await tier.put(keys, views, tenant=tenant)
            kept.update(key for key, answer in zip(keys, answers, strict=True) if answer in _KEPT)
            if late := [key for key in keys if self._is_unwanted(tier, key)]:
                await tier.drop(late)
                kept.difference_update(late)
            stored = answers.count(Stored.STORED)
            self.counters.written += stored
            self.counters.nbytes += stored * self._books.slot_bytes
            self.counters.refused += answers.count(Stored.NO_ROOM)
            self.counters.failed += answers.count(Stored.FAILED)
        return kept


def _has(tier: Tier, key: BlockKey) -> bool:
    """Whether it has the block, in its own way."""
    return tier.longest_run([kept_as(key, tier.at_rest)]) == 1


def _parts(keys: Sequence[BlockKey]) -> Iterator[Sequence[BlockKey]]:
    """What is looked at between two turns of the event loop."""
    return (keys[at : at + _LOOKED_AT_ONCE] for at in range(0, len(keys), _LOOKED_AT_ONCE))
