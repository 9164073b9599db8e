"""Loads from slower tiers and other nodes into the CPU slab, piece by piece, shared by all who want the same blocks."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from kv_tiers.books import SlotBooks
from kv_tiers.keys import BlockKey
from kv_tiers.store_plan import Finder, Load, Source, Stretch, worthwhile
from kv_tiers.store_ports import DirectoryPort, SourceCounters, joined
from kv_tiers.tier import Fetched, WriteLease
from policies.tiering.speed import Speeds

PIECE_BYTES = 16 << 20
"""Blocks become visible in pieces of this size: one that comes too late costs no more than itself."""

AHEAD = 2
"""Pieces of one request under way at once: one is read while another is verified."""

OWNER = "store:fetch"

_FAILURE = 10.0
"""A load that failed counts as one that took so many times as long as expected."""


@dataclass(eq=False)
class _Piece:
    """One load under way. While `waiting` requests want it, its blocks stay pinned once they are here."""

    keys: tuple[BlockKey, ...]
    waiting: int = 0
    pin: int | None = None
    task: asyncio.Task[bool] | None = None
    """True: every key is in the slab."""


@dataclass(eq=False)
class _Wish:
    """One request's. `over`: nothing is loaded for it any more, for somebody wants these blocks gone."""

    keys: Sequence[BlockKey]
    over: bool


class Fetches:
    """All loads of one store. Never waits for room: what gets no slot is a miss."""

    def __init__(
        self,
        books: SlotBooks,
        finder: Finder,
        directory: DirectoryPort,
        speeds: Speeds,
        clock: Callable[[], float],
        tenant_of: Callable[[BlockKey], str | None],
    ) -> None:
        """`clock`: the event loop's time."""
        self._books = books
        self._finder = finder
        self._directory = directory
        self._speeds = speeds
        self._clock = clock
        self._tenant_of = tenant_of
        self._under_way: dict[BlockKey, _Piece] = {}
        self._tasks: set[asyncio.Task[object]] = set()
        self._wishes: set[_Wish] = set()
        self._bars: list[Collection[BlockKey] | None] = []
        self.counters: dict[str, SourceCounters] = {}
        self.late = 0

    @asynccontextmanager
    async def brought(
        self, keys: Sequence[BlockKey], worth_s: float, *, abroad: bool = True
    ) -> AsyncIterator[None]:
        """Inside, what of `keys` was in the slab, and what could be loaded within its worth, cannot be evicted.

        `worth_s`: seconds that computing all of `keys` takes; `abroad`: whether other nodes and the directory count.
        """
        began = self._clock()
        own = self._books.prepare_read(keys, OWNER)
        held: list[_Piece] = []
        wish = _Wish(keys, any(_touches(bar, keys) for bar in self._bars))
        self._wishes.add(wish)
        try:
            first = len(own.entries)
            stretches = [] if wish.over else await self._find(keys, first, worth_s, abroad)
            loads = worthwhile(
                stretches,
                self._books.slot_bytes,
                worth_s / len(keys),
                lambda source, nbytes: self._speeds.estimate(source, nbytes, self._clock()),
            )
            worth = worth_s * sum(load.count for load in loads) / len(keys)
            await self._wait(wish, loads, held, began + worth)
            yield
        finally:
            self._wishes.discard(wish)
            for piece in held:
                self._leave(piece)
            self._books.complete_read(own.id)

    @contextmanager
    def barred(self, keys: Collection[BlockKey] | None = None) -> Iterator[None]:
        """From now on no load that is under way makes any of these keys (None: of all) visible; inside, none begins."""
        self._books.revoke([key for key in self._under_way if keys is None or key in keys])
        for wish in self._wishes:
            wish.over = wish.over or _touches(keys, wish.keys)
        self._bars.append(keys)
        try:
            yield
        finally:
            self._bars.remove(keys)

    async def settle(self) -> None:
        """Wait until no load is under way."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self) -> None:
        """Give up what is under way."""
        for task in self._tasks:
            task.cancel()
        await self.settle()

    @property
    def unattended(self) -> int:
        """Slots of loads that go on though nobody waits for them any more; a gauge."""
        return sum(not piece.waiting for piece in self._under_way.values())

    def check(self) -> None:
        """Every key under way belongs to a piece that is; nobody waits for one that is over."""
        pieces = set(self._under_way.values())
        assert all(piece.task is not None and not piece.task.done() for piece in pieces)
        assert all(self._under_way.get(key) is piece for piece in pieces for key in piece.keys)

    async def _find(
        self, keys: Sequence[BlockKey], first: int, worth_s: float, abroad: bool
    ) -> list[Stretch]:
        """What is known in a quarter of what the blocks are worth; a directory that is slower is done without."""
        if abroad:
            asking = asyncio.create_task(self._finder.find(keys, first, self._under_way, abroad=True))
            self._keep(asking)  # to its end, also without us: its caller learns from a deadline of its own
            within_s = None if math.isinf(worth_s) else worth_s / 4
            await asyncio.wait({asking}, timeout=within_s)
            if asking.done():
                return asking.result()
            self.late += 1
        return await self._finder.find(keys, first, self._under_way, abroad=False)

    async def _wait(self, wish: _Wish, loads: Iterable[Load], held: list[_Piece], until: float) -> None:
        """Start and await pieces in order, up to the first that does not come whole or in time."""
        open_ = deque[_Piece]()
        limit = None if math.isinf(until) else max(0.0, until - self._clock())
        try:
            async with asyncio.timeout(limit):
                for part, source in self._parts(wish.keys, loads):
                    if wish.over:
                        return
                    pieces, whole = self._pieces(part, source)
                    held += pieces
                    open_ += pieces
                    while len(open_) >= AHEAD or (open_ and not whole):
                        if not await _landed(open_.popleft()):
                            return
                    if not whole:
                        return
                while open_:
                    if not await _landed(open_.popleft()):
                        return
        except TimeoutError:
            self.late += 1

    def _parts(
        self, keys: Sequence[BlockKey], loads: Iterable[Load]
    ) -> Iterable[tuple[Sequence[BlockKey], Source | None]]:
        step = max(1, PIECE_BYTES // self._books.slot_bytes)
        for load in loads:
            end = load.first + load.count
            for at in range(load.first, end, step):
                yield keys[at : min(at + step, end)], load.source

    def _pieces(self, keys: Sequence[BlockKey], source: Source | None) -> tuple[list[_Piece], bool]:
        """Join the loads of these keys that are under way, start one for the rest; whether that is all of them."""
        pieces: dict[_Piece, None] = {}
        absent: list[BlockKey] = []
        for key in keys:
            piece = self._under_way.get(key)
            if piece is not None:
                pieces[piece] = None
            elif not self._books.holds(key):
                absent.append(key)
        whole = True
        if absent:
            started = self._start(absent, source) if source is not None else None
            if started is not None:
                pieces[started] = None
            whole = started is not None and len(started.keys) == len(absent)
        for piece in pieces:
            piece.waiting += 1
        return list(pieces), whole

    def _start(self, keys: Sequence[BlockKey], source: Source) -> _Piece | None:
        """Reserve slots and load into them; None if no slot can be had (also: a replica is writing these blocks)."""
        lease = self._books.reserve(keys, OWNER, tenant=self._tenant_of(keys[0]))
        if not lease.entries:
            self._books.complete_write(lease.id, ())
            return None
        piece = _Piece(tuple(entry.key for entry in lease.entries))
        for key in piece.keys:
            self._under_way[key] = piece
        piece.task = asyncio.create_task(self._load(piece, lease, source))
        self._keep(piece.task)
        return piece

    async def _load(self, piece: _Piece, lease: WriteLease, source: Source) -> bool:
        """Load one piece; the slots of what did not come whole are free again when this returns."""
        began = self._clock()
        answers: list[Fetched] = []
        visible: tuple[BlockKey, ...] = ()
        try:
            answers = await source.get(piece.keys, [entry.offset for entry in lease.entries])
        finally:
            hits = [key for key, answer in zip(piece.keys, answers, strict=False) if answer is Fetched.HIT]
            visible = self._books.complete_write(lease.id, hits)
            if piece.waiting and visible:
                piece.pin = self._books.prepare_read(visible, OWNER).id
            for key in piece.keys:
                del self._under_way[key]
        self._account(source, piece.keys, answers, self._clock() - began)
        return len(visible) == len(piece.keys)

    def _account(
        self, source: Source, keys: Sequence[BlockKey], answers: Sequence[Fetched], seconds: float
    ) -> None:
        totals = self.counters.setdefault(source.kind, SourceCounters())
        hits = answers.count(Fetched.HIT)
        totals.blocks += len(keys)
        totals.hits += hits
        totals.missing += answers.count(Fetched.MISS)
        totals.corrupt += answers.count(Fetched.CORRUPT)
        totals.failed += answers.count(Fetched.FAILED)
        totals.nbytes += hits * self._books.slot_bytes
        totals.seconds += seconds
        if hits:
            self._speeds.observe(source.name, hits * self._books.slot_bytes, seconds, self._clock())
        elif Fetched.FAILED in answers:  # however quickly it failed: for a while others are better
            nbytes = len(keys) * self._books.slot_bytes
            slow = _FAILURE * self._speeds.estimate(source.name, nbytes, self._clock())
            self._speeds.observe(source.name, nbytes, max(seconds, slow), self._clock())
        wrong = [key for key, answer in zip(keys, answers, strict=True) if answer in _DISPROVED]
        if wrong:
            self._keep(asyncio.create_task(self._directory.forget(source.place, joined(wrong))))

    def _leave(self, piece: _Piece) -> None:
        piece.waiting -= 1
        if not piece.waiting and piece.pin is not None:
            self._books.complete_read(piece.pin)
            piece.pin = None

    def _keep(self, task: asyncio.Task[object]) -> None:
        """The event loop alone would forget it."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _touches(bar: Collection[BlockKey] | None, keys: Sequence[BlockKey]) -> bool:
    return bar is None or any(key in bar for key in keys)


async def _landed(piece: _Piece) -> bool:
    """Whether all of a piece is in the slab; giving up the wait leaves the load under way."""
    assert piece.task is not None
    return await asyncio.shield(piece.task)


_DISPROVED = (Fetched.MISS, Fetched.CORRUPT)
