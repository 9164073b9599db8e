"""The Redis tier without its client: which blocks are ours, what they cost, and what to do when Redis misbehaves.

Every node keeps books of the blocks that it wrote or found when it last listed; their bytes stay within its bound.
Other nodes write to the same Redis: `get` asks for any key, `put` leaves what somebody wrote alone and takes it into
the books, and `longest_run` knows the books only. What Redis has lost leaves the books when a `get` misses it, and all
at once when Redis turns out to be another run, or has been away.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kv_tiers.at_rest import AtRest
from kv_tiers.block import BlockHeader, read_header
from kv_tiers.books import SlotBooks
from kv_tiers.breaker import Breaker
from kv_tiers.keys import BlockKey
from kv_tiers.over_books import OverBooks
from kv_tiers.packing import FRAME_BYTES, Frame, packed_frame, raw_frame
from kv_tiers.redis_charges import Charge, Charges
from kv_tiers.redis_ports import BlockLanes, Client, Outgoing, Sent, Unreachable, Wanted
from kv_tiers.redis_upkeep import Upkeep
from kv_tiers.tier import Entry, Fetched, Stored, one_each

_OWNER = "redis"


class RedisBlocks(OverBooks):
    """`Tier` over a client and lanes. `nbytes` bounds what the blocks in the books take in Redis, metadata included.

    `pack`: losslessly. `kept_as`, `watch_s`, `renew_s`: see `Upkeep`.
    """

    name = "redis"

    def __init__(
        self,
        client: Client,
        lanes: BlockLanes,
        books: SlotBooks,
        *,
        nbytes: int,
        pack: bool,
        kept_as: AtRest,
        breaker: Breaker,
        watch_s: float,
        renew_s: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(books)
        self.slot_bytes = books.slot_bytes
        self._client = client
        self._lanes = lanes
        self._charges = Charges(nbytes, books.slots)
        books.tell_gone(self._charges.give_up)
        self._pack = pack
        self._breaker = breaker
        self._clock = clock
        self._started = False
        self._calls = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._upkeep = Upkeep(
            client,
            books,
            self._charges,
            breaker,
            kept_as=kept_as,
            watch_s=watch_s,
            renew_s=renew_s,
            moved=lanes.disconnect,
            clock=clock,
        )

    @property
    def incarnation(self) -> int:
        """Of the Redis whose contents the books know, larger for a later run; 0 before it was first reached."""
        return self._upkeep.incarnation

    @property
    def left_alone(self) -> bool:
        """Whether Redis has not been reached yet, or not of late."""
        return self._breaker.is_open or not self.incarnation

    @property
    def used_bytes(self) -> int:
        """What the blocks in the books take in Redis; never more than the bound."""
        return self._charges.used

    async def start(self) -> None:
        """List what is there, if Redis answers; from then on look after it."""
        await self._upkeep.start()
        self._started = True

    async def get(self, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> list[Fetched]:
        """As in `Tier`; Redis is asked for all keys, also those that are not in the books."""
        assert len(keys) == len(into) and all(len(view) == self.slot_bytes for view in into)
        with self._call():
            return await self._get(keys, into)

    async def put(
        self, keys: Sequence[BlockKey], blocks: Sequence[memoryview], *, tenant: str | None = None
    ) -> list[Stored]:
        """As in `Tier`. A block that another node has written is PRESENT, enters the books, and is not sent."""
        assert len(keys) == len(blocks) and all(len(view) == self.slot_bytes for view in blocks)
        sources = dict(zip(reversed(keys), reversed(blocks), strict=True))
        answers = {key: Stored.PRESENT if self._books.holds(key) else Stored.FAILED for key in keys}
        with self._call():
            new = Stored.FAILED in answers.values()
            if new and not self._upkeep.clearing and self._breaker.allow(self._clock()):
                try:
                    await self._put(list(answers), sources, answers, tenant)
                except Unreachable:
                    self._upkeep.report(False)
        return one_each(keys, answers)

    async def drop(self, keys: Sequence[BlockKey]) -> int:
        """As in `Tier`; other nodes' blocks are removed from Redis too."""
        with self._call():
            dropped = self._books.drop(keys)
            for key in keys:
                self._upkeep.pins.pop(key, None)
                if key not in self._upkeep.writing:
                    self._charges.owe(key)
            await self._upkeep.attempt(self._upkeep.pay)
        return dropped

    def pin(self, keys: Sequence[BlockKey]) -> int:
        pinned = super().pin(keys)
        self._upkeep.pins.update(keys[:pinned])
        return pinned

    def unpin(self, keys: Sequence[BlockKey]) -> int:
        ended = 0
        for key in keys:
            if self._books.unpin([key]):
                ended += 1
                self._upkeep.pins[key] -= 1
        self._upkeep.pins = +self._upkeep.pins
        return ended

    def expire(self) -> int:
        """As in `Tier`. Redis forgets expired blocks by itself too, pinned ones are renewed there."""
        expired = super().expire()
        if expired:
            self._upkeep.wake()
        return expired

    async def clear(self) -> None:
        """As in `Tier`: every block of ours in this Redis, whichever node wrote it, and no other key."""
        with self._call():
            for key in [key for key in self._charges if key not in self._upkeep.writing]:
                self._charges.forget(key)
            self._books.clear()
            self._upkeep.pins.clear()
            self._upkeep.condemned |= self._upkeep.writing
            self._upkeep.clearing = True
            await self._upkeep.attempt(self._upkeep.sweep)

    def check(self) -> None:
        self._books.check()
        self._charges.check()
        for key in self._charges:
            assert key in self._upkeep.writing or self._books.holds(key), (
                f"{key} is charged, and not in the books"
            )

    async def close(self) -> None:
        """As in `Tier`. Debts that could not be paid are found by the next start."""
        self._started = False
        await self._idle.wait()
        await self._upkeep.close()
        await self._upkeep.attempt(self._upkeep.pay)
        await self._lanes.close()
        await self._client.close()

    @contextmanager
    def _call(self) -> Iterator[None]:
        assert self._started, "the redis tier is not started, or closed"
        self._calls += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()

    async def _get(self, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> list[Fetched]:
        answers = [Fetched.MISS] * len(keys)
        asked = [index for index, key in enumerate(keys) if not self._upkeep.hides(key)]
        if not asked:
            return answers
        if not self._breaker.allow(self._clock()):
            return [Fetched.FAILED] * len(keys)
        before = [self._charges.get(keys[index]) for index in asked]
        lease = self._books.prepare_scattered([keys[index] for index in asked], _OWNER)
        hits = 0
        try:
            fetched = await self._lanes.fetch([Wanted(keys[index], into[index]) for index in asked])
            hidden = [self._upkeep.hides(keys[index]) for index in asked]  # before any of them is found lost
            for index, charge, answer, is_hidden in zip(asked, before, fetched, hidden, strict=True):
                hits += answer is Fetched.HIT and charge is not None
                answers[index] = Fetched.MISS if is_hidden else answer
                if answer in (Fetched.MISS, Fetched.CORRUPT):
                    self._lost(keys[index], charge, answer)
        finally:
            self._unread += len(lease.entries) - hits
            self._books.complete_read(lease.id)
        self._upkeep.report(Fetched.FAILED not in fetched)
        return answers

    async def _put(
        self,
        chain: Sequence[BlockKey],
        sources: dict[BlockKey, memoryview],
        answers: dict[BlockKey, Stored],
        tenant: str | None,
    ) -> None:
        chain = [key for key in chain if key not in self._upkeep.condemned]
        lease = self._books.reserve(chain, _OWNER, tenant=tenant, bypass=True)
        answers.update(dict.fromkeys((*lease.present, *lease.being_written), Stored.PRESENT))
        answers.update(dict.fromkeys(lease.no_room, Stored.NO_ROOM))
        mine = [entry.key for entry in lease.entries]
        self._upkeep.writing.update(mine)
        done: list[BlockKey] = []
        try:
            there = await self._written_by_others(mine)
            frames = await self._frames([key for key in mine if key not in there], sources)
            sizes = there | {key: frame.nbytes for key, frame in frames.items()}
            taken = self._charge(lease.entries, sizes, answers)
            await self._upkeep.pay()
            for key in taken:
                if key in there:
                    done.append(key)
                    answers[key] = Stored.PRESENT
            outgoing = [Outgoing(key, frames[key]) for key in taken if key not in there]
            if outgoing:
                await self._send(outgoing, answers, done)
            else:
                self._upkeep.report(True)  # it has answered all that there was to ask
        finally:
            visible = set(self._books.complete_write(lease.id, done))
            for key in mine:
                self._upkeep.writing.discard(key)
                self._upkeep.condemned.discard(key)
                if key not in visible:
                    self._charges.give_up(key)
            self._upkeep.written(visible)
            if len(visible) < len(mine):
                self._upkeep.wake()
        for key in done:
            if key not in visible:
                answers[key] = Stored.FAILED  # cleared meanwhile

    async def _written_by_others(self, keys: Sequence[BlockKey]) -> dict[BlockKey, int]:
        """Of those that Redis has already, the frames' lengths; what is to be removed is not had."""
        owed = {key for key in keys if self._charges.is_owed(key)}
        headers = await self._client.headers(keys)
        return {
            key: FRAME_BYTES + header.body_bytes
            for key, header in zip(keys, headers, strict=True)
            if header is not None and key not in owed
        }

    async def _frames(
        self, keys: Sequence[BlockKey], sources: dict[BlockKey, memoryview]
    ) -> dict[BlockKey, Frame]:
        """What to send; nothing for bytes that are no block."""
        if self._pack:
            frames = await self._lanes.compute(_packed, [sources[key] for key in keys])
        else:
            frames = [_raw(sources[key]) for key in keys]
        return {key: frame for key, frame in zip(keys, frames, strict=True) if frame is not None}

    def _charge(
        self, entries: Sequence[Entry], sizes: dict[BlockKey, int], answers: dict[BlockKey, Stored]
    ) -> list[BlockKey]:
        """Charge the frames, evicting until they fit; returns which do."""
        taken = []
        for key, offset in entries:
            if (size := sizes.get(key)) is None:
                continue
            while not self._charges.fits(size) and self._books.evict(1):
                pass
            if self._charges.fits(size):
                self._charges.add(key, offset // self.slot_bytes, size)
                taken.append(key)
            else:
                answers[key] = Stored.NO_ROOM
        return taken

    async def _send(
        self, outgoing: Sequence[Outgoing], answers: dict[BlockKey, Stored], done: list[BlockKey]
    ) -> None:
        """Store blocks. Those for which Redis itself has no room are tried again in the place of our coldest."""
        full = await self._send_once(outgoing, answers, done)
        if full:
            # Twice as many: what is on its way takes memory in the server too.
            self._books.evict(2 * len(full))
            await self._upkeep.pay()
            for each in await self._send_once(full, answers, done):
                answers[each.key] = Stored.NO_ROOM

    async def _send_once(
        self, outgoing: Sequence[Outgoing], answers: dict[BlockKey, Stored], done: list[BlockKey]
    ) -> list[Outgoing]:
        sent = await self._lanes.store(outgoing)
        self._upkeep.report(Sent.UNKNOWN not in sent)
        for each, outcome in zip(outgoing, sent, strict=True):
            if outcome is Sent.STORED:
                done.append(each.key)
                answers[each.key] = Stored.STORED
        return [each for each, outcome in zip(outgoing, sent, strict=True) if outcome is Sent.FULL]

    def _lost(self, key: BlockKey, before: Charge | None, answer: Fetched) -> None:
        """Redis has no such block, or a broken one, unless it was written anew since it was asked."""
        if self._charges.get(key) is not before or key in self._upkeep.writing:
            return
        if before is not None:
            self._books.drop([key])  # and Redis is told, for of a block in parts some may be left
            self._upkeep.pins.pop(key, None)
        elif answer is Fetched.CORRUPT:
            self._charges.owe(key)
        else:
            return
        self._upkeep.wake()


def _header(block: memoryview) -> BlockHeader | None:
    header = read_header(block)
    return header if isinstance(header, BlockHeader) else None


def _raw(slot: memoryview) -> Frame | None:
    header = _header(slot)
    return None if header is None else raw_frame(slot[: header.layout.nbytes])


def _packed(slot: memoryview) -> Frame | None:
    header = _header(slot)
    if header is None:
        return None
    width = header.layout.dtype.itemsize if header.layout.codec is AtRest.EXACT else 1
    return packed_frame(slot[: header.layout.nbytes], width)
