"""The source's open tickets: a pure state machine (time is passed in, nothing is sent). Not thread safe."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from kv_tiers.transfer.endpoint import EndReason, TicketEnd
from kv_tiers.transfer.staging import LeaseState, StagingLease
from kv_tiers.transfer.ticket import Ticket


@dataclass
class _Open:
    ticket: Ticket
    lease: StagingLease
    deadline: float


class TicketLedger:
    """At most one open ticket for each request id; every ticket ends exactly once, and its lease with it."""

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}
        self._by_request: dict[str, int] = {}
        self._ended: list[TicketEnd] = []
        self._next_deadline = inf

    def __len__(self) -> int:
        return len(self._open)

    @property
    def payload_bytes(self) -> int:
        """Payload of all open tickets."""
        return sum(entry.ticket.nbytes for entry in self._open.values())

    def publish(self, ticket: Ticket, lease: StagingLease, now: float) -> None:
        """Open `ticket` and take over `lease`. An open ticket of the same request and an older or equal
        attempt is revoked; if the open one is newer, the new ticket is born revoked.
        """
        assert lease.state is LeaseState.HELD and lease.nbytes == ticket.nbytes
        assert ticket.generation not in self._open
        lease.write_seal(ticket.seal())
        lease.state = LeaseState.PUBLISHED
        rival = self._open.get(self._by_request.get(ticket.request_id, -1))
        self._open[ticket.generation] = _Open(ticket, lease, now + ticket.ttl_s)
        if rival is not None and rival.ticket.attempt > ticket.attempt:
            self.end(ticket.generation, EndReason.REVOKED)
            return
        if rival is not None:
            self.end(rival.ticket.generation, EndReason.REVOKED)
        self._by_request[ticket.request_id] = ticket.generation
        self._next_deadline = min(self._next_deadline, now + ticket.ttl_s)

    def end(self, generation: int, reason: EndReason) -> bool:
        """End one ticket and release its lease; False when it is not open (any more)."""
        entry = self._open.pop(generation, None)
        if entry is None:
            return False
        request_id = entry.ticket.request_id
        if self._by_request.get(request_id) == generation:
            del self._by_request[request_id]
        entry.lease.state = LeaseState.HELD
        entry.lease.release()
        self._ended.append(TicketEnd(request_id, entry.ticket.attempt, generation, reason))
        return True

    def revoke(self, request_id: str, attempt: int | None) -> bool:
        """Revoke the request's open ticket if its attempt is `attempt` or older (any attempt when None)."""
        generation = self._by_request.get(request_id)
        if generation is None:
            return False
        if attempt is not None and self._open[generation].ticket.attempt > attempt:
            return False
        return self.end(generation, EndReason.REVOKED)

    def expire(self, now: float) -> None:
        """End every ticket whose deadline has come. Costs nothing while none has."""
        if now < self._next_deadline:
            return
        for generation in [g for g, entry in self._open.items() if entry.deadline <= now]:
            self.end(generation, EndReason.EXPIRED)
        self._next_deadline = min((entry.deadline for entry in self._open.values()), default=inf)

    def end_all(self) -> None:
        """Revoke everything."""
        for generation in list(self._open):
            self.end(generation, EndReason.REVOKED)

    def take_ended(self) -> list[TicketEnd]:
        """Ends since the last call, in order."""
        ended, self._ended = self._ended, []
        return ended

    def check(self) -> None:
        """The index by request is exact, leases are published and sealed as their tickets say."""
        assert {e.ticket.request_id: g for g, e in self._open.items()} == self._by_request
        assert len(self._by_request) == len(self._open)
        for generation, entry in self._open.items():
            assert entry.ticket.generation == generation and entry.deadline >= self._next_deadline
            assert entry.lease.state is LeaseState.PUBLISHED and entry.lease.nbytes == entry.ticket.nbytes
            assert entry.lease.read_seal() == entry.ticket.seal(), "an open ticket lost its seal"
