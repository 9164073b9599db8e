"""Keeping books and Redis in agreement: removals that are owed, listings, clearing, another run of Redis.

What the books give up is owed to Redis as a removal; until that is paid the block is a miss here. A writer who makes
room pays before it writes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable

from kv_tiers.at_rest import AtRest
from kv_tiers.books import SlotBooks
from kv_tiers.breaker import Breaker
from kv_tiers.keys import BlockKey, is_kept_as
from kv_tiers.redis_charges import Charges
from kv_tiers.redis_listing import list_blocks
from kv_tiers.redis_ports import Client, Unreachable
from kv_tiers.redis_values import largest_frame, part_names, read_name, value_name

_SHORTEST_PAUSE_S = 0.05
_AT_ONCE = 1000  # blocks between two turns of the event loop


class Upkeep:
    """What the tier's calls share with the task that looks after Redis every `watch_s` seconds, and when woken.

    `writing`: keys that a `put` is at; `condemned`: those of them that were cleared meanwhile. `kept_as`: the
    codec of our blocks; others' we do not see, and remove when we list for the first time. `renew_s`: how often
    pinned blocks get their time to live in Redis anew. `moved` is called when Redis is another run.
    """

    def __init__(
        self,
        client: Client,
        books: SlotBooks,
        charges: Charges,
        breaker: Breaker,
        *,
        kept_as: AtRest,
        watch_s: float,
        renew_s: float | None,
        moved: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self.incarnation = 0
        self.writing: set[BlockKey] = set()
        self.condemned: set[BlockKey] = set()
        self.pins: Counter[BlockKey] = Counter()
        self.clearing = False
        self._client = client
        self._books = books
        self._charges = charges
        self._breaker = breaker
        self._kept_as = kept_as
        self._watch_s = watch_s
        self._renew_s = renew_s
        self._moved = moved
        self._clock = clock
        self._renewed = clock()
        self._paying = asyncio.Lock()
        self._sweeping = asyncio.Lock()
        self._unlisted = True
        self._closing = False
        self._changed: set[BlockKey] | None = None  # written or removed while a listing is under way
        self._wake = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Look once, then begin to watch."""
        assert self._watcher is None, "started before"
        await self._look()
        self._watcher = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Stop watching."""
        self._closing = True  # redis-py has been seen to swallow a cancellation
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.wait([self._watcher])

    def wake(self) -> None:
        """There is something to do."""
        self._wake.set()

    def report(self, answered: bool) -> None:
        """How a call went, for the breaker. After a time away everything is listed: some may be lost or left over."""
        if not answered:
            self._breaker.failed(self._clock())
            return
        if self._breaker.is_open:
            self._unlisted = True
            self.wake()
        self._breaker.succeeded()

    def hides(self, key: BlockKey) -> bool:
        """Whether Redis may have the block, and nobody shall see it: not complete, to be removed, not our codec's."""
        if self.clearing or key in self.writing or not is_kept_as(key, self._kept_as):
            return True
        return key not in self._charges and self._charges.is_owed(key)

    def written(self, keys: set[BlockKey]) -> None:
        """Those became visible: a listing that is under way may have passed them by."""
        if self._changed is not None:
            self._changed |= keys

    async def pay(self) -> None:
        """Remove what is owed. Unreachable: it stays owed."""
        async with self._paying:
            debts = [charge for charge in self._charges.owed() if charge.key not in self.writing]
            names: list[bytes] = []
            for charge in debts:
                if charge.key not in self._charges:  # else a later write took its place
                    largest = max(charge.frame_bytes, largest_frame(self._books.slot_bytes))
                    names += (value_name(charge.key), *part_names(charge.key, largest))
            await self._client.remove(names)
            self._charges.paid(debts)
            if self._changed is not None:
                self._changed.update(charge.key for charge in debts)

    async def sweep(self) -> None:
        """Remove every key of ours, whoever wrote it. Unreachable: blocks stay hidden until it has been done."""
        async with self._sweeping:
            async for page in self._client.names():
                await self._client.remove([name for name in page if read_name(name) is not None])
            self.clearing = False

    async def attempt(self, action: Callable[[], Awaitable[None]]) -> None:
        """Do it now if Redis answers; otherwise it is left to the watcher."""
        if self._breaker.is_open:
            self.wake()
            return
        try:
            await action()
        except Unreachable:
            self.report(False)

    async def _watch(self) -> None:
        while not self._closing:
            try:
                async with asyncio.timeout(self._watch_s):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            await self._look()
            await asyncio.sleep(min(self._watch_s, _SHORTEST_PAUSE_S))

    async def _look(self) -> None:
        """Whether Redis is the one we know, then whatever is to be done. A failure ends it until the next time.

        While the breaker is open and nobody else tries, this is its try.
        """
        trying = self._breaker.is_open and self._breaker.allow(self._clock())
        try:
            incarnation = await self._client.incarnation()
            self._unlisted |= trying  # some may be lost or left over
            if incarnation != self.incarnation or self._unlisted:
                if incarnation != self.incarnation:
                    self._moved()
                self._unlisted = False
                try:
                    await self._list(first=self.incarnation == 0)
                except BaseException:
                    self._unlisted = True
                    raise
                self.incarnation = incarnation
            if self.clearing:
                await self.sweep()
            await self.pay()
            await self._renew()
            if trying:
                self._breaker.answers()
        except Unreachable:
            self.report(False)

    async def _list(self, *, first: bool) -> None:
        """Make the books agree with Redis: what is gone leaves, what others wrote enters as far as it fits.

        The first time the rest of what is there is removed: this node's bound is what an earlier process left to it.
        """
        async with self._sweeping:
            before = [key for key in self._charges if self._books.holds(key)]
            changed: set[BlockKey] = set()
            self._changed = changed
            try:
                listing = await list_blocks(self._client)
                spared = changed | self.writing
                gone = [key for key in before if key not in listing.frames and key not in spared]
                for key in gone:
                    self._charges.forget(key)
                self._books.drop(gone)
                await self._adopt(listing.frames, changed, first=first)
                await self._client.remove(listing.debris)
            finally:
                self._changed = None

    async def _adopt(self, frames: dict[BlockKey, int], changed: set[BlockKey], *, first: bool) -> None:
        slots = self._charges.free_slots()
        for count, (key, frame_bytes) in enumerate(frames.items()):
            if count % _AT_ONCE == 0:
                await asyncio.sleep(0)
            if key in self._charges or key in self.writing or key in changed or self._charges.is_owed(key):
                continue
            ours = is_kept_as(key, self._kept_as)
            slot = next(slots, None) if ours and self._charges.fits(frame_bytes) else None
            if slot is not None and self._books.adopt([(key, slot)]):
                self._charges.add(key, slot, frame_bytes)
            elif first:
                self._charges.owe(key, frame_bytes)

    async def _renew(self) -> None:
        """Pinned blocks outlive their time to live in Redis."""
        if self._renew_s is None or self._clock() - self._renewed < self._renew_s:
            return
        names: list[bytes] = []
        for key in self.pins:
            if (charge := self._charges.get(key)) is not None:
                names += (value_name(key), *part_names(key, charge.frame_bytes))
        await self._client.renew(names)
        self._renewed = self._clock()
