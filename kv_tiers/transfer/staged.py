"""The endpoint that all transports share: ledger and puller over one arena and one `Wire`."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

from typing_extensions import override

from kv_tiers.transfer.endpoint import (
    Counters,
    EndReason,
    Outcome,
    Pull,
    TicketEnd,
    TransferEndpoint,
)
from kv_tiers.transfer.ledger import TicketLedger
from kv_tiers.transfer.puller import Puller
from kv_tiers.transfer.staging import LeaseState, StagingArena, StagingLease
from kv_tiers.transfer.ticket import Message, MessageKind, Ticket, TicketError
from kv_tiers.transfer.wire import Wire

BUSY_POLL_S = 0.0003
CLEANUP_POLL_S = 0.001
IDLE_POLL_S = 0.05


class StagedEndpoint(TransferEndpoint):
    """`TransferEndpoint` over a `Wire`; see there for the contract. `clock` is monotonic seconds."""

    def __init__(
        self, name: str, arena: StagingArena, wire: Wire, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = name
        self._arena = arena
        self._wire = wire
        self._clock = clock
        self._ledger = TicketLedger()
        self._ledger_lock = threading.Lock()
        self._generation = 0
        self._puller = Puller(wire, arena, clock)
        self._count_lock = threading.Lock()
        self._bytes_pulled = 0
        self._pulls: Counter[Outcome] = Counter()
        self._ends: Counter[EndReason] = Counter()
        self._ignored = 0
        self._unsent = 0
        self._closed = False

    @property
    def incarnation(self) -> int:
        """Random 64-bit number of this life of the endpoint."""
        return self._wire.incarnation

    @override
    def reserve(self, nbytes: int) -> StagingLease | None:
        return self._arena.reserve(nbytes)

    @override
    def publish(
        self,
        lease: StagingLease,
        *,
        request_id: str,
        attempt: int,
        fingerprint: bytes,
        checksum: int,
        ttl_s: float,
    ) -> Ticket:
        assert lease.arena is self._arena and lease.state is LeaseState.HELD
        with self._ledger_lock:
            ticket = Ticket(
                request_id=request_id,
                attempt=attempt,
                generation=self._generation + 1,
                fingerprint=fingerprint,
                endpoint=self.name,
                incarnation=self._wire.incarnation,
                address=self._wire.address(lease.offset),
                nbytes=lease.nbytes,
                checksum=checksum,
                ttl_s=ttl_s,
                metadata=self._wire.metadata,
            )
            self._generation = ticket.generation
            self._ledger.publish(ticket, lease, self._clock())
        return ticket

    @override
    def revoke(self, request_id: str, attempt: int | None = None) -> bool:
        with self._ledger_lock:
            return self._ledger.revoke(request_id, attempt)

    @override
    def poll(self, now: float | None = None) -> list[TicketEnd]:
        now = self._clock() if now is None else now
        messages = self._wire.receive()
        with self._ledger_lock:
            for message in messages:
                self._apply(message)
            self._ledger.expire(now)
            ended = self._ledger.take_ended()
        self._puller.sweep(now)
        with self._count_lock:
            self._ends.update(end.reason for end in ended)
        return ended

    @override
    def wait_hint(self) -> float:
        if len(self._ledger):
            return BUSY_POLL_S
        return CLEANUP_POLL_S if self._puller.unfinished else IDLE_POLL_S

    @override
    def pull(
        self,
        ticket: Ticket,
        *,
        fingerprint: bytes,
        timeout_s: float,
        cancelled: Callable[[], bool] | None = None,
    ) -> Pull:
        pull = self._puller.pull(ticket, fingerprint, timeout_s, cancelled)
        with self._count_lock:
            self._pulls[pull.outcome] += 1
            self._bytes_pulled += ticket.nbytes if pull.ok else 0
        return pull

    @override
    def acknowledge(self, ticket: Ticket) -> None:
        self._tell(ticket, MessageKind.ACKNOWLEDGE)

    @override
    def refuse(self, ticket: Ticket) -> None:
        self._tell(ticket, MessageKind.REFUSE)

    @override
    def remove_peer(self, endpoint: str) -> int:
        return self._puller.remove(endpoint)

    @property
    @override
    def capacity(self) -> int:
        return self._arena.capacity

    @property
    @override
    def open_tickets(self) -> int:
        return len(self._ledger)

    @property
    @override
    def staged_bytes(self) -> int:
        with self._ledger_lock:
            return self._ledger.payload_bytes

    @property
    @override
    def used_bytes(self) -> int:
        return self._arena.used_bytes

    @property
    @override
    def quarantined_bytes(self) -> int:
        return sum(lease.nbytes for lease in self._arena.live(LeaseState.QUARANTINED))

    @property
    @override
    def counters(self) -> Counters:
        with self._count_lock:
            return Counters(
                bytes_pulled=self._bytes_pulled,
                pulls={outcome: self._pulls[outcome] for outcome in Outcome},
                tickets={reason: self._ends[reason] for reason in EndReason},
                messages_ignored=self._ignored,
                messages_unsent=self._unsent,
            )

    @override
    def check(self) -> None:
        self._arena.check()
        with self._ledger_lock:
            self._ledger.check()
            assert len(self._arena.live(LeaseState.PUBLISHED)) == len(self._ledger)
        self._puller.check()

    @override
    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with self._ledger_lock:
            self._ledger.end_all()
        self._puller.close()
        self._wire.close()

    def _apply(self, data: bytes) -> None:
        """End the ticket that a message names; anything else is counted and ignored. Ledger lock held."""
        try:
            message = Message.from_bytes(data)
        except TicketError:
            self._ignored += 1
            return
        acknowledged = message.kind is MessageKind.ACKNOWLEDGE
        reason = EndReason.ACKNOWLEDGED if acknowledged else EndReason.REFUSED
        if message.incarnation != self._wire.incarnation or not self._ledger.end(message.generation, reason):
            self._ignored += 1

    def _tell(self, ticket: Ticket, kind: MessageKind) -> None:
        if not self._puller.tell(ticket, kind):
            with self._count_lock:
                self._unsent += 1
