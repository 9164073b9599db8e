"""Reads from another node's slab, shared out between readers: each has a wire of its own and verifies what it read.

A NIXL agent copies inside the call that posts, one thread at a time; two agents on two threads read twice as fast, and
each verifies its piece while that is still in its core's cache.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from kv_tiers.block_copy import BlockViews
from kv_tiers.keys import BlockKey
from kv_tiers.tier import BlockMemory, Fetched
from kv_tiers.transfer.slab_links import Link, Links
from kv_tiers.transfer.slab_loan import SlabLoan
from kv_tiers.transfer.wire import Read, SpanTable, Step, Wire
from kv_tiers.verify import BlockCheck

READ_BYTES = 4 << 20
"""One read: large enough to be worth its call, small enough to be verified while it is still in a cache."""

_SHORTEST_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 500e-6
_TURN_S = 1e-3


class Reading:
    """One loan's blocks on their way to our slab, in pieces, each of which belongs to one of several readers."""

    def __init__(
        self,
        loan: SlabLoan,
        keys: Sequence[BlockKey],
        offsets: Sequence[int],
        memory: BlockMemory,
        timeout_s: float,
        end: float,
        readers: int,
    ) -> None:
        """Block i of `loan` goes to `memory` at `offsets[i]`. It is given up `timeout_s` after the first reader began,
        at the readers' clock's `end` at the latest.

        `parts` for at most `readers` of them, none of which is empty.
        """
        self.loan = loan
        self.until = end
        self.answers = [Fetched.FAILED] * len(keys)
        self._timeout_s = timeout_s
        self._begun = False
        self._keys = keys
        self._offsets = offsets
        self._spans = SpanTable.columns(loan.addresses[: len(keys)], offsets, loan.slot_bytes)
        self._start = min(offsets)
        self._memory = memory.view(self._start, max(offsets) + loan.slot_bytes - self._start)
        self._check = BlockCheck()
        self._lock = threading.Lock()
        step = max(1, READ_BYTES // loan.slot_bytes)
        pieces = [slice(at, min(at + step, len(keys))) for at in range(0, len(keys), step)]
        self.parts = min(readers, len(pieces))
        self._left = [deque(pieces[part :: self.parts]) for part in range(self.parts)]

    @property
    def left(self) -> bool:
        """Whether there is a piece that nobody has taken."""
        return any(self._left)

    def begin(self, now: float) -> None:
        """A reader began."""
        with self._lock:
            if not self._begun:
                self._begun = True
                self.until = min(self.until, now + self._timeout_s)

    def take(self, part: int, *, idle: bool) -> slice | None:
        """The next piece of a part, or, if its reader is `idle`, of what others have most of; None: no more for now."""
        with self._lock:
            left = self._left[part]
            if not left and idle:
                left = max(self._left, key=len)
            return left.popleft() if left else None

    def give_up(self) -> None:
        """Nobody takes another piece."""
        with self._lock:
            for left in self._left:
                left.clear()

    def spans(self, piece: slice) -> SpanTable:
        """What is read for it."""
        return self._spans[piece]

    def landed(self, piece: slice) -> None:
        """Verify it, and answer for its blocks."""
        offsets = [offset - self._start for offset in self._offsets[piece]]
        views = BlockViews.within(self._memory, offsets, self.loan.slot_bytes)
        whole = self._check.whole(views, self._keys[piece])
        self.answers[piece] = [Fetched.HIT if good else Fetched.CORRUPT for good in whole]


class SlabReader:
    """One wire's part in readings. Several may read at once; one of them posts at a time, the others wait for it."""

    def __init__(self, wire: Wire, clock: Callable[[], float]) -> None:
        """`clock`: monotonic seconds."""
        self._wire = wire
        self._clock = clock
        self._links = Links(wire)
        # NIXL may copy inside a call that posts, and others wait until it is over: whoever frees a handle, with the
        # GIL. So one posts at a time, and handles are freed by the next who does.
        self._posting = threading.Lock()

    @property
    def links(self) -> int:
        """Peers connected."""
        return self._links.count

    def work(self, reading: Reading, part: int) -> None:
        """Read and verify pieces until nobody has one left, those of its part first. BLOCKS: for a worker thread.

        Returns when nothing that it read can land any more: a read that is over time dooms the connection, and waits
        until the last user has left it.
        """
        if not reading.left:
            return
        reading.begin(self._clock())
        with self._links.using(reading.loan.peer, reading.loan.metadata) as link:
            if link is None:
                reading.give_up()
                return
            landing: deque[tuple[slice, Read]] = deque()
            try:
                while reading.left:
                    good = self._post_in_turn(link, reading, part, landing)
                    while good and landing:
                        good = self._wait(link, reading, landing)
                    if not good:
                        reading.give_up()
            finally:
                link.pending += [read for _, read in landing]

    def close(self) -> None:
        """Leave the transport; no call may be at work."""
        self._links.close()
        self._wire.close()

    def _post_in_turn(
        self, link: Link, reading: Reading, part: int, landing: deque[tuple[slice, Read]]
    ) -> bool:
        """As `_post`. All of one loan before the next, which would only make both late; what others have read meanwhile
        is not waited for.
        """
        while not self._posting.acquire(timeout=_TURN_S):
            if not reading.left:
                return True
        try:
            return self._post(link, reading, part, landing)
        finally:
            self._posting.release()

    def _post(self, link: Link, reading: Reading, part: int, landing: deque[tuple[slice, Read]]) -> bool:
        """Ask for every piece there is: nobody waits for the lender between two of them. False: something failed."""
        while not link.doomed and self._clock() < reading.until:
            piece = reading.take(part, idle=not landing)
            if piece is None:
                return True
            link.free()
            landing.append((piece, self._wire.read(link.peer, reading.spans(piece))))
            if not self._take_landed(link, reading, landing):
                return False
        return False

    def _take_landed(self, link: Link, reading: Reading, landing: deque[tuple[slice, Read]]) -> bool:
        """Remove and verify the leading reads that are over, up to one that failed. False: one did."""
        while landing and (step := landing[0][1].state()) is not Step.PENDING:
            piece, read = landing.popleft()
            link.over.append(read)
            if step is not Step.DONE:
                link.doomed = True
                return False
            reading.landed(piece)
        return True

    def _wait(self, link: Link, reading: Reading, landing: deque[tuple[slice, Read]]) -> bool:
        """Wait for the next reads that are over. False: one failed, or the deadline is over."""
        pause, before = _SHORTEST_PAUSE_S, len(landing)
        while self._take_landed(link, reading, landing):
            if len(landing) < before:
                return True
            if self._clock() >= reading.until:
                return False
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE_S)
        return False
