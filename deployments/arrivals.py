"""How survivors come from a prefill reply into landing memory: pulled with its ticket, or out of the reply itself."""

import asyncio
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np

from deployments.blocking import BlockingCalls
from deployments.reply import PackedSnapshot, PrefillReply
from engine.errors import InvalidRequest
from kv_tiers.transfer.endpoint import Outcome, Pull, Scope, TransferEndpoint
from kv_tiers.transfer.staging import StagingLease, payload_checksum
from kv_tiers.transfer.ticket import Ticket

Result = TypeVar("Result")
_log = logging.getLogger("kvtide.decode")

# A pull moves at least some 100 MB/s even over slow TCP; a frozen peer must not hold a request for its whole deadline.
_PULL_FLOOR_BYTES_PER_S = 50e6
_PULL_LEAST_S = 5.0
_LOOK_AGAIN_S = 0.25
_PULL_THREADS = 8
_WORD_THREADS = 2


class Arrivals:
    """Fetches for one event loop. `under_way` counts transfers that run, `pulled` is set whenever one has ended."""

    def __init__(self, endpoint: TransferEndpoint, fingerprint: bytes) -> None:
        self.endpoint = endpoint
        self.under_way = 0
        self.pulled = asyncio.Event()
        self.bytes_in_replies = 0
        self._fingerprint = fingerprint
        self._event_loop = asyncio.get_running_loop()
        self._transfers = BlockingCalls("pull", _PULL_THREADS)
        self._words = BlockingCalls("word", _WORD_THREADS)

    async def fetch(self, reply: PrefillReply, deadline: float) -> StagingLease | None:
        """Landed, verified survivors, now the caller's; None when they cannot be had (counted, or logged).

        Waits for landing room until `deadline` (of the event loop's clock). Raises `InvalidRequest` for what never has
        room. Cancelling frees everything, at the source too.
        """
        if reply.snapshot is not None:
            return await self._unpack(reply.snapshot, deadline)
        assert reply.ticket is not None, "prefill stages whatever decodes on"
        ticket = Ticket.from_bytes(reply.ticket)
        try:
            pull = await self._pull_into_room(ticket, deadline)
        except (asyncio.CancelledError, InvalidRequest):
            self.refuse(reply)
            raise
        if pull.lease is not None:
            return pull.lease
        _log.warning("pull for %s: %s %s", ticket.request_id, pull.outcome, pull.detail)
        if pull.scope is Scope.PEER:
            await self._words.run(partial(self.endpoint.remove_peer, ticket.endpoint))
        else:
            self.refuse(reply)
        return None

    def refuse(self, reply: PrefillReply) -> None:
        """Nobody will fetch these survivors."""
        if reply.ticket is not None:
            self._words.post(partial(self.endpoint.refuse, Ticket.from_bytes(reply.ticket)))

    async def close(self) -> None:
        """Wait for what runs; no call may follow."""
        await self._transfers.close()
        await self._words.close()

    async def _pull_into_room(self, ticket: Ticket, deadline: float) -> Pull:
        """Pull once there is landing room, or until the deadline."""
        while True:
            gone = threading.Event()
            pull = await self._transfer(partial(self._pull, ticket, gone.is_set), gone.set, _give_up)
            if pull.outcome is not Outcome.NO_ROOM:
                return pull
            self._refuse_unlandable(ticket.nbytes)
            if self._event_loop.time() >= deadline:
                return pull
            await asyncio.sleep(_LOOK_AGAIN_S)  # admission of what has landed makes room

    def _pull(self, ticket: Ticket, cancelled: Callable[[], bool]) -> Pull:
        """In a thread: pull, and acknowledge what has landed."""
        landed = self.endpoint.pull(
            ticket,
            fingerprint=self._fingerprint,
            timeout_s=_PULL_LEAST_S + ticket.nbytes / _PULL_FLOOR_BYTES_PER_S,
            cancelled=cancelled,
        )
        if landed.ok:
            self.endpoint.acknowledge(ticket)
        return landed

    async def _unpack(self, snapshot: PackedSnapshot, deadline: float) -> StagingLease | None:
        """Copy survivors out of their reply, under the same bound of memory as pulled ones."""
        nbytes = snapshot.payload.nbytes
        self._refuse_unlandable(nbytes)
        while (lease := self.endpoint.reserve(nbytes)) is None:
            if self._event_loop.time() >= deadline:
                return None
            await asyncio.sleep(_LOOK_AGAIN_S)
        verified = False
        try:
            verified = await self._transfer(
                partial(_copy, snapshot, lease), lambda: None, lambda result: None
            ) and (snapshot.fingerprint == self._fingerprint)
        finally:
            if not verified:
                lease.release()
        if not verified:
            _log.warning("a snapshot of %d bytes came damaged, or from another model", nbytes)
            return None
        self.bytes_in_replies += nbytes
        return lease

    async def _transfer(
        self, work: Callable[[], Result], stop: Callable[[], None], discard: Callable[[Result], None]
    ) -> Result:
        self.under_way += 1
        try:
            return await self._transfers.run(work, stop=stop, discard=discard)
        finally:
            self.under_way -= 1
            self.pulled.set()

    def _refuse_unlandable(self, nbytes: int) -> None:
        if nbytes > self.endpoint.capacity:
            raise InvalidRequest(
                f"what the recipe keeps of the prompt takes {nbytes} bytes, landing memory holds"
                f" {self.endpoint.capacity}; lower kv.budget or raise staging_gib",
                "kv.budget",
            )


def _copy(snapshot: PackedSnapshot, lease: StagingLease) -> bool:
    """Whether the copy in `lease` has the snapshot's checksum."""
    np.copyto(lease.buffer.numpy(), snapshot.payload)
    return payload_checksum(lease.buffer) == snapshot.checksum


def _give_up(pull: Pull) -> None:
    """What landed after all is not wanted any more."""
    if pull.lease is not None:
        pull.lease.release()
