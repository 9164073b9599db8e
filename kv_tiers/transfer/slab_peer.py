"""Blocks straight from another node's CPU slab into our own: lending, and borrowing, over a `Wire` on the slab.

The lender pins the blocks and says where they lie (`slab_loan`); the borrower reads them one-sided, verifies its copy
(`LandingBlocks`), and gives the loan back. A lender that dies, freezes or forgets costs the borrower a deadline, never
a wrong byte: what was read is compared with its key and checksums after the read.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol

from kv_tiers.block_copy import BlockViews
from kv_tiers.keys import BlockKey
from kv_tiers.store_ports import Loan, joined
from kv_tiers.tier import BlockMemory, Fetched
from kv_tiers.transfer.slab_links import Link, Links
from kv_tiers.transfer.slab_loan import LoanError, SlabLoan
from kv_tiers.transfer.wire import Read, SpanTable, Step, Wire
from kv_tiers.verify import LandingBlocks

READ_BYTES = 4 << 20
"""One read: large enough to be worth its call, small enough to be verified while it is still in a cache."""

BUSY_POLL_S = 0.0003
IDLE_POLL_S = 0.25

_SHORTEST_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 500e-6


class Lender(Protocol):
    """The calls of one other node's agent. They take bounded time and raise nothing."""

    async def lend(self, keys: bytes) -> bytes | None:
        """A `SlabLoan` of the leading run of these keys; None when the agent does not answer."""
        ...

    def give_back(self, lease: int) -> None:
        """The loan was read; best effort."""
        ...


class SlabExchange:
    """One node's side, in both roles. `close` when no call is at work.

    NIXL makes progress only while somebody polls, so a thread polls while anything is lent.
    """

    def __init__(
        self,
        name: str,
        memory: BlockMemory,
        slot_bytes: int,
        wire: Wire,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`memory`: the slab that `wire` reads from and lands in; `clock`: monotonic seconds."""
        self.name = name
        self.slot_bytes = slot_bytes
        self._memory = memory
        self._wire = wire
        self._clock = clock
        self._links = Links(wire)
        self._checking = ThreadPoolExecutor(1, "slab-check")
        # NIXL may copy inside a call that posts, and others wait until it is over: whoever frees a handle, with the
        # GIL. So one posts at a time, and handles are freed by the next who does.
        self._posting = threading.Lock()
        self._lent = False
        self._woken = threading.Event()
        self._closing = False
        self._poller = threading.Thread(target=self._poll_for_ever, name="slab-poll", daemon=True)
        self._poller.start()

    @property
    def links(self) -> int:
        """Peers connected; a gauge."""
        return self._links.count

    def lent(self, count: int) -> None:
        """So many loans are open now."""
        self._lent = count > 0
        if self._lent:
            self._woken.set()

    def loan(self, loan: Loan) -> bytes:
        """The message that lends these slots."""
        return SlabLoan(
            endpoint=self.name,
            incarnation=self._wire.incarnation,
            lease=loan.id,
            ttl_s=loan.ttl_s,
            slot_bytes=self.slot_bytes,
            addresses=tuple(self._wire.address(offset) for offset in loan.offsets),
            metadata=self._wire.metadata,
            more=loan.more,
        ).to_bytes()

    def read(
        self, loan: SlabLoan, keys: Sequence[BlockKey], offsets: Sequence[int], timeout_s: float
    ) -> list[Fetched]:
        """Read the loan's blocks to our offsets and verify them. BLOCKS: for a worker thread.

        Returns when nothing of it can land any more: a read that is over time dooms the connection, and waits until
        the last user has left it.
        """
        began = self._clock()
        until = began + min(timeout_s, loan.ttl_s)
        if loan.slot_bytes != self.slot_bytes:
            return [Fetched.FAILED] * len(keys)
        with self._links.using(loan.peer, loan.metadata) as link:
            answers = [] if link is None else self._read_pieces(link, loan, keys, offsets, until)
        if self._clock() >= began + loan.ttl_s:
            answers = []  # the slots may have been others' before the end: not even a verified copy counts
        return answers + [Fetched.FAILED] * (len(keys) - len(answers))

    def close(self) -> None:
        """Leave the transport."""
        self._closing = True
        self._woken.set()
        self._poller.join()
        self._checking.shutdown()
        self._links.close()
        self._wire.close()

    def _read_pieces(
        self, link: Link, loan: SlabLoan, keys: Sequence[BlockKey], offsets: Sequence[int], until: float
    ) -> list[Fetched]:
        """One answer per key. All pieces are posted at once: nobody waits for the lender between two of them."""
        step = max(1, READ_BYTES // self.slot_bytes)
        spans = SpanTable.columns(loan.addresses, offsets, self.slot_bytes)
        landing: deque[tuple[slice, Read]] = deque()
        good = True
        with self._checked(keys, offsets, step) as blocks:
            # All of one loan before the next: two that took turns would be read, and then verified, at the same time.
            with self._posting:
                for at in range(0, len(keys), step):
                    if not good or link.doomed or self._clock() >= until:
                        break
                    piece = slice(at, min(at + step, len(keys)))
                    link.free()
                    landing.append((piece, self._wire.read(link.peer, spans[piece])))
                    good = self._take_landed(link, landing, blocks)
            while good and landing:
                good = self._wait(link, landing, blocks, until)
            link.pending += [read for _, read in landing]
        answers = [Fetched.HIT if whole else Fetched.CORRUPT for whole in blocks.whole()]
        return answers + [Fetched.FAILED] * (len(keys) - len(answers))

    @contextmanager
    def _checked(
        self, keys: Sequence[BlockKey], offsets: Sequence[int], step: int
    ) -> Iterator[LandingBlocks]:
        """What lands inside is verified outside; meanwhile too, where there is a processor for the other thread.

        Nobody waits for that thread: it only reads, and what it has not finished is done again.
        """
        start = min(offsets)
        memory = self._memory.view(start, max(offsets) + self.slot_bytes - start)
        views = BlockViews.within(memory, [offset - start for offset in offsets], self.slot_bytes)
        blocks = LandingBlocks(views, keys, step)
        following = self._checking.submit(blocks.follow)
        try:
            yield blocks
        finally:
            blocks.end()
            following.cancel()

    def _take_landed(self, link: Link, landing: deque[tuple[slice, Read]], blocks: LandingBlocks) -> bool:
        """Remove the leading reads that are over, up to one that failed. False: one did."""
        while landing and (step := landing[0][1].state()) is not Step.PENDING:
            piece, read = landing.popleft()
            link.over.append(read)
            if step is not Step.DONE:
                link.doomed = True
                return False
            blocks.landed(piece.stop)
        return True

    def _wait(
        self, link: Link, landing: deque[tuple[slice, Read]], blocks: LandingBlocks, until: float
    ) -> bool:
        """Wait for the next reads that are over. False: one failed, or the deadline is over."""
        pause, before = _SHORTEST_PAUSE_S, len(landing)
        while self._take_landed(link, landing, blocks):
            if len(landing) < before:
                return True
            if self._clock() >= until:
                return False
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE_S)
        return False

    def _poll_for_ever(self) -> None:
        while not self._closing:
            self._wire.receive()
            if self._lent:
                time.sleep(BUSY_POLL_S)
            else:
                self._woken.wait(IDLE_POLL_S)
                self._woken.clear()


class SlabPeer:
    """`Peer`: another node's slab, reached through its agent's calls and our exchange."""

    def __init__(self, exchange: SlabExchange, lender: Lender, *, timeout_s: float = 5.0) -> None:
        """`timeout_s`: longest that a read may take after the loan came."""
        self._exchange = exchange
        self._lender = lender
        self._timeout_s = timeout_s

    async def get(self, keys: Sequence[BlockKey], offsets: Sequence[int]) -> list[Fetched]:
        message = await self._lender.lend(joined(keys))
        if message is None:
            return [Fetched.FAILED] * len(keys)
        try:
            loan = SlabLoan.from_bytes(message)
        except LoanError:
            return [Fetched.FAILED] * len(keys)
        run = min(len(loan.addresses), len(keys))
        try:
            answers = await _to_its_end(self._exchange.read, loan, keys[:run], offsets[:run], self._timeout_s)
        finally:
            self._lender.give_back(loan.lease)
        # Of the blocks that were not lent, the lender says only of the first whether it has it.
        first = [] if run == len(keys) else [Fetched.FAILED if loan.more else Fetched.MISS]
        return answers + first + [Fetched.FAILED] * (len(keys) - run - len(first))


async def _to_its_end(
    read: Callable[[SlabLoan, Sequence[BlockKey], Sequence[int], float], list[Fetched]],
    loan: SlabLoan,
    keys: Sequence[BlockKey],
    offsets: Sequence[int],
    timeout_s: float,
) -> list[Fetched]:
    """Run in a thread; cancelled, still return only after it: until then it may write to the slots."""
    if not keys:
        return []
    work = asyncio.ensure_future(asyncio.to_thread(read, loan, keys, offsets, timeout_s))
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return work.result()
