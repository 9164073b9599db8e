"""Blocks straight from another node's CPU slab into our own: lending, and borrowing, over a `Wire` on the slab.

The lender pins the blocks and says where they lie (`slab_loan`); the borrower reads them one-sided, verifies its copy
(`verify_block`), and gives the loan back. A lender that dies, freezes or forgets costs the borrower a deadline, never
a wrong byte: what was read is compared with its key and checksums after the read.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from kv_tiers.keys import BlockKey
from kv_tiers.store_ports import Loan, joined
from kv_tiers.tier import BlockMemory, Fetched
from kv_tiers.transfer.slab_links import Link, Links
from kv_tiers.transfer.slab_loan import LoanError, SlabLoan
from kv_tiers.transfer.wire import Span, Step, Wire
from kv_tiers.verify import verify_block

READ_BYTES = 4 << 20
"""One read: small enough to be verified while it is in the cache."""

BUSY_POLL_S = 0.0003
IDLE_POLL_S = 0.25


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
        checks: list[Future[list[Fetched]]] = []
        step = max(1, READ_BYTES // self.slot_bytes)
        for at in range(0, len(keys), step):
            spans = [
                Span(address, offset, self.slot_bytes)
                for address, offset in zip(
                    loan.addresses[at : at + step], offsets[at : at + step], strict=True
                )
            ]
            if link.doomed or not self._finish(link, spans, until):
                break
            # While the next ones are read: both are bound by memory, but neither takes all of it.
            checks.append(self._checking.submit(self._check, keys[at : at + step], offsets[at : at + step]))
        return [answer for check in checks for answer in check.result()]

    def _check(self, keys: Sequence[BlockKey], offsets: Sequence[int]) -> list[Fetched]:
        return [
            Fetched.HIT
            if verify_block(self._memory.view(offset, self.slot_bytes), key) is None
            else Fetched.CORRUPT
            for key, offset in zip(keys, offsets, strict=True)
        ]

    def _finish(self, link: Link, spans: Sequence[Span], until: float) -> bool:
        """One read, to its end or to the deadline; whether it landed."""
        read = self._wire.read(link.peer, spans)
        pause = 20e-6
        while (step := read.state()) is Step.PENDING:
            if self._clock() >= until:
                link.pending.append(read)
                return False
            time.sleep(pause)
            pause = min(pause * 1.5, 500e-6)
        read.close()
        if step is not Step.DONE:
            link.doomed = True
        return step is Step.DONE

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
