"""How packed survivors move from a prefill process to a decode process: the contract.

The life of a transfer. Source: `reserve` room, fill `lease.buffer`, `publish` it as a ticket, hand the
ticket's bytes to the destination by any channel, `poll` until the ticket ends. Destination: `pull` the
ticket into own staging, use the landed buffer, `acknowledge`, release the landing lease; or `refuse` the
ticket, with or without having pulled.

A process has one endpoint for both roles. Every ticket ends exactly once (acknowledged, refused, revoked,
expired) and its room with it, whatever dies on the way; lost KV is a recompute for the caller, never an
error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from kv_tiers.transfer.staging import StagingLease
from kv_tiers.transfer.ticket import Ticket


class Outcome(StrEnum):
    """How a pull ended. Only OK comes with a lease."""

    OK = "ok"
    PEER_LOST = "peer_lost"  # the source's process (that incarnation of it) is gone
    TIMED_OUT = "timed_out"  # our own deadline; the source may be frozen, cut off or slow
    REFUSED_FINGERPRINT = "refused_fingerprint"  # other model, dtype, layout...; nothing was read
    CORRUPT = "corrupt"  # the landed bytes do not have the ticket's checksum
    STALE = "stale"  # the ticket had ended (revoked, expired, acknowledged) before the read was over
    NO_ROOM = "no_room"  # no landing room now
    CANCELLED = "cancelled"  # `cancelled()` said so
    TRANSPORT_ERROR = "transport_error"  # the transport refused or failed this transfer


class Scope(StrEnum):
    """What a failure says: only about this transfer, or about the peer (use another one for the next try)."""

    TRANSFER = "transfer"
    PEER = "peer"


@dataclass(frozen=True)
class Pull:
    """Result of `pull`. `lease` is set exactly for OK; `detail` is for logs."""

    outcome: Outcome
    scope: Scope = Scope.TRANSFER
    lease: StagingLease | None = None
    detail: str = ""

    @property
    def ok(self) -> bool:
        """Whether the whole buffer landed and was verified."""
        return self.outcome is Outcome.OK


class EndReason(StrEnum):
    """Why a ticket is no longer open."""

    ACKNOWLEDGED = "acknowledged"
    REFUSED = "refused"
    REVOKED = "revoked"  # by `revoke`, by a newer attempt, or by `close`
    EXPIRED = "expired"


class TicketEnd(NamedTuple):
    """One ticket's end; (request_id, attempt, generation) are the ticket's."""

    request_id: str
    attempt: int
    generation: int
    reason: EndReason


@dataclass(frozen=True)
class Counters:
    """Totals since the endpoint was made (monotonic; a snapshot).

    `messages_ignored`: acknowledgements and refusals that were unknown, late, damaged or for another
    incarnation. `messages_unsent`: own ones that could not be sent (the source's deadline then ends the
    ticket).
    """

    bytes_pulled: int
    pulls: dict[Outcome, int]
    tickets: dict[EndReason, int]
    messages_ignored: int
    messages_unsent: int


class TransferEndpoint(ABC):
    """Both roles of one process. All methods may be called from any thread unless they say otherwise.

    No method but the constructor and `close` raises for what peers, networks or other machines do.
    """

    # Source role

    @abstractmethod
    def reserve(self, nbytes: int) -> StagingLease | None:
        """Room for `nbytes` in the registered staging arena, or None: full now, wait for `poll` to end
        tickets, or refuse the request. The caller owns the lease and its buffer until `publish` or
        `lease.release()`. Raises ValueError when `nbytes` is not in 1..`capacity`: waiting would not help.
        """

    @abstractmethod
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
        """Offer a filled lease (from this endpoint's `reserve`) to whoever holds the returned ticket.

        The endpoint owns the lease from here on and releases it when the ticket ends, at the latest `ttl_s`
        seconds from now; the caller must neither write to the buffer nor release the lease. `checksum` is
        `payload_checksum(lease.buffer)`. One ticket serves a whole request: its `n` choices share one copy.

        An open ticket of the same `request_id` and an older or the same attempt is revoked at once. When a
        newer attempt is open already, the returned ticket is born revoked: its reader finds it STALE. A
        reader that is still reading a ticket while it ends finds out at the end of its read (the seal
        behind the buffer is wiped before the memory can be used again), so room never waits for unknown
        readers. Raises TicketError (ValueError) for values outside a ticket's limits; the lease then stays
        the caller's.
        """

    @abstractmethod
    def revoke(self, request_id: str, attempt: int | None = None) -> bool:
        """End the open ticket of `request_id` (with `attempt`: only if its attempt is that or older). False
        when there was none. Its room is free on return; its end is reported by the next `poll`.
        """

    @abstractmethod
    def poll(self, now: float | None = None) -> list[TicketEnd]:
        """Make progress, take messages in, enforce deadlines; return the tickets that ended since the last
        call.

        Does not block. `now` is the endpoint's clock (default: read it). Someone must call it every
        `wait_hint()` seconds in BOTH roles: peers' reads of open tickets only progress while the source
        polls (it is the progress loop that NIXL has no thread for), and transfers given up by the
        destination are cleaned up here. Each end is returned to one caller only: let one thread or task do
        the polling.
        """

    @abstractmethod
    def wait_hint(self) -> float:
        """Seconds until the next `poll` is worth while: 0.3 ms with tickets open, 1 ms with transfers to
        clean up, 50 ms when idle.
        """

    # Destination role

    @abstractmethod
    def pull(
        self,
        ticket: Ticket,
        *,
        fingerprint: bytes,
        timeout_s: float,
        cancelled: Callable[[], bool] | None = None,
    ) -> Pull:
        """Read the ticket's buffer into own staging and verify it. BLOCKS: call it from a worker thread.

        Several pulls may run at once. Reads go in pieces of 64 KB or more; `cancelled()` (called in this
        thread, must be cheap) and the deadline of min(timeout_s, ticket.ttl_s) seconds are looked at
        between reads of a few pieces, and every few ms while one is pending. With OK the caller owns
        `lease`, whose buffer holds exactly the bytes whose checksum the ticket names, and must release it;
        the ticket stays open until it is acknowledged, refused or expired. With any other outcome nothing
        is owned by the caller and all room comes back: at once, or, where the transport may still write to
        it (a transfer given up while a read was pending), after the read has ended or the peer was removed;
        until then it counts in `quarantined_bytes`. The caller decides whether to refuse, retry or
        recompute. Failures are values, never exceptions.
        """

    @abstractmethod
    def acknowledge(self, ticket: Ticket) -> None:
        """Tell the source that the buffer is here and its room can go. Idempotent, best effort: if it is
        lost the ticket expires. Microseconds after a pull of the same peer.
        """

    @abstractmethod
    def refuse(self, ticket: Ticket) -> None:
        """Tell the source that nobody will use this ticket. Idempotent, best effort. For a peer never
        talked to before it connects first: up to some 100 ms (at most 0.5 s for a frozen one), so call it
        from a worker thread.
        """

    @abstractmethod
    def remove_peer(self, endpoint: str) -> int:
        """Forget all lives of the endpoint of that name (known to be dead or frozen); returns the bytes of
        quarantine that came free. With pulls from it still running, removal happens when the last one ends.
        A later ticket of the same name connects anew. Without this call a peer with quarantined memory is
        removed after a while by `poll`.
        """

    # Both

    @property
    @abstractmethod
    def capacity(self) -> int:
        """The largest payload that staging can hold, bytes."""

    @property
    @abstractmethod
    def open_tickets(self) -> int:
        """Tickets published here that have not ended; a gauge that returns to zero."""

    @property
    @abstractmethod
    def staged_bytes(self) -> int:
        """Payload bytes owed to readers by the open tickets; a gauge that returns to zero."""

    @property
    @abstractmethod
    def used_bytes(self) -> int:
        """Arena bytes under lease in either role (rounding and quarantine included); returns to zero."""

    @property
    @abstractmethod
    def quarantined_bytes(self) -> int:
        """Payload bytes of landing room that the transport may still write to; returns to zero."""

    @property
    @abstractmethod
    def counters(self) -> Counters:
        """Snapshot of the totals."""

    @abstractmethod
    def check(self) -> None:
        """Assert the invariants (free list disjoint, sums, seals). For tests, and for service when idle."""

    @abstractmethod
    def close(self) -> None:
        """Revoke all tickets, forget all peers, leave the transport. No other call may run or follow;
        idempotent. Leases still held keep their memory, but peers can no longer read it.
        """
