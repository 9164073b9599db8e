"""Blocks straight from another node's CPU slab into our own: lending, and borrowing, over `Wire`s on the slab.

The lender pins the blocks and says where they lie (`slab_loan`); the borrower reads them one-sided, verifies its copy
(`slab_reader`), and gives the loan back. A lender that dies, freezes or forgets costs the borrower a deadline, never
a wrong byte: what was read is compared with its key and checksums after the read.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from kv_tiers.keys import BlockKey
from kv_tiers.store_ports import Loan, joined
from kv_tiers.tier import BlockMemory, Fetched
from kv_tiers.transfer.slab_loan import LoanError, SlabLoan
from kv_tiers.transfer.slab_reader import Reading, SlabReader
from kv_tiers.transfer.wire import Wire

BUSY_POLL_S = 0.0003
IDLE_POLL_S = 0.25

_READING_AT_ONCE = 8
"""Loans. More wait; a lender that freezes holds one until its deadline."""


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
        wires: Sequence[Wire],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`memory`: the slab that all `wires` land in; the first of them lends it. `clock`: monotonic seconds."""
        self.name = name
        self.slot_bytes = slot_bytes
        self._memory = memory
        self._wire = wires[0]
        self._clock = clock
        self._readers = [SlabReader(wire, clock) for wire in wires]
        self._turns = itertools.cycle(range(len(wires)))
        self._threads = ThreadPoolExecutor(_READING_AT_ONCE * len(wires), "slab-read")
        self._lent = False
        self._woken = threading.Event()
        self._closing = False
        self._poller = threading.Thread(target=self._poll_for_ever, name="slab-poll", daemon=True)
        self._poller.start()

    @property
    def links(self) -> int:
        """Peers connected; a gauge."""
        return max(reader.links for reader in self._readers)

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

    async def read(
        self, loan: SlabLoan, keys: Sequence[BlockKey], offsets: Sequence[int], timeout_s: float
    ) -> list[Fetched]:
        """Read the loan's blocks to our offsets and verify them.

        Returns when nothing of it can land any more, also when it is cancelled.
        """
        if loan.slot_bytes != self.slot_bytes or not keys:
            return [Fetched.FAILED] * len(keys)
        end = self._clock() + loan.ttl_s
        reading = Reading(loan, keys, offsets, self._memory, timeout_s, end, len(self._readers))
        first = next(self._turns)
        readers = (self._readers * 2)[first : first + reading.parts]
        works: list[Future[None]] = []
        try:
            for part, reader in enumerate(readers):
                works.append(self._threads.submit(reader.work, reading, part))
        except RuntimeError:  # no more threads
            reading.give_up()
            raise
        finally:
            await _to_their_end(works, reading)
        if self._clock() >= end:
            # The slots may have been others' before the end: not even a verified copy counts.
            return [Fetched.FAILED] * len(keys)
        return reading.answers

    def close(self) -> None:
        """Leave the transport."""
        self._closing = True
        self._woken.set()
        self._poller.join()
        self._threads.shutdown()
        for reader in self._readers:
            reader.close()

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
            answers = await self._exchange.read(loan, keys[:run], offsets[:run], self._timeout_s)
        finally:
            self._lender.give_back(loan.lease)
        # Of the blocks that were not lent, the lender says only of the first whether it has it.
        first = [] if run == len(keys) else [Fetched.FAILED if loan.more else Fetched.MISS]
        return answers + first + [Fetched.FAILED] * (len(keys) - run - len(first))


async def _to_their_end(works: Sequence[Future[None]], reading: Reading) -> None:
    """Wait for all that have begun, also when cancelled: until then they may write to the slots."""
    left = [asyncio.wrap_future(work) for work in works]
    waiting = set(left)
    cancelled: asyncio.CancelledError | None = None
    while waiting:
        try:
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError as error:
            cancelled = error
            reading.give_up()
        waiting = {work for work in waiting if not work.done()}
        if not reading.left:
            for work in works:  # in vain for one that has begun
                work.cancel()
    failures = [None if work.cancelled() else work.exception() for work in left]
    for failure in [cancelled, *failures]:
        if failure is not None:
            raise failure
