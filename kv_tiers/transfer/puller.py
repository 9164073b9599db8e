"""The destination's half: peers, piecewise reads, verification, and quarantine of memory that may still be
written.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import xxhash

from kv_tiers.transfer.endpoint import Outcome, Pull, Scope
from kv_tiers.transfer.staging import LeaseState, StagingArena, StagingLease, seal_offset
from kv_tiers.transfer.ticket import SEAL_BYTES, Message, MessageKind, PeerId, Ticket
from kv_tiers.transfer.wire import Read, Span, Step, Wire

MIN_PIECE_BYTES = 64 << 10
PIECE_BYTES = 1 << 20
PIECES_PER_READ = 4
QUARANTINE_S = 30.0
_GREETING_S = 0.5
_LOOK_S = 0.005


class _Parked(NamedTuple):
    """A read that was given up while pending, and the lease it may still write to."""

    read: Read
    lease: StagingLease
    since: float


@dataclass
class _Peer:
    """A connected peer. `users` are calls at work with it; `doomed` says to drop it when the last one
    leaves. `greeted` once a read has completed: only then is the connection up and do messages leave
    without further progress.
    """

    users: int = 0
    doomed: bool = False
    greeted: bool = False
    parked: list[_Parked] = field(default_factory=list)


def reads_of(ticket: Ticket, lease: StagingLease) -> Iterator[list[Span]]:
    """The payload as reads of up to PIECES_PER_READ pieces of PIECE_BYTES; a rest under 64 KB joins the
    last piece.
    """
    pieces, at = [], 0
    while at < ticket.nbytes:
        nbytes = min(PIECE_BYTES, ticket.nbytes - at)
        if ticket.nbytes - at - nbytes < MIN_PIECE_BYTES:
            nbytes = ticket.nbytes - at
        pieces.append(Span(ticket.address + at, lease.offset + at, nbytes))
        at += nbytes
    for first in range(0, len(pieces), PIECES_PER_READ):
        yield pieces[first : first + PIECES_PER_READ]


class _GivenUp(Exception):
    """Leaves the transfer from wherever it is; never seen outside this module."""

    def __init__(self, outcome: Outcome, detail: str = "", pending: Read | None = None) -> None:
        super().__init__(detail)
        self.outcome = outcome
        self.detail = detail
        self.pending = pending


@dataclass
class _Watch:
    """When to give up, and whether the peer `answered` (completed a read) in this call."""

    deadline: float
    clock: Callable[[], float]
    cancelled: Callable[[], bool] | None
    answered: bool = False

    def look(self, pending: Read | None = None) -> None:
        """Raise _GivenUp when it is time to."""
        if self.cancelled is not None and self.cancelled():
            raise _GivenUp(Outcome.CANCELLED, pending=pending)
        if self.clock() >= self.deadline:
            raise _GivenUp(Outcome.TIMED_OUT, "deadline passed", pending=pending)


class Puller:
    """Pulls, and tells sources how their tickets ended. Thread safe; never raises for what peers do."""

    def __init__(self, wire: Wire, arena: StagingArena, clock: Callable[[], float]) -> None:
        self._wire = wire
        self._arena = arena
        self._clock = clock
        self._lock = (
            threading.Lock()
        )  # guards _peers and their fields; never held while connecting or reading
        self._connecting = threading.Lock()
        self._peers: dict[PeerId, _Peer] = {}

    @property
    def unfinished(self) -> bool:
        """Whether `sweep` has something to watch."""
        return any(peer.parked for peer in list(self._peers.values()))

    def pull(
        self, ticket: Ticket, fingerprint: bytes, timeout_s: float, cancelled: Callable[[], bool] | None
    ) -> Pull:
        """See `TransferEndpoint.pull`."""
        if ticket.fingerprint != fingerprint:
            return Pull(
                Outcome.REFUSED_FINGERPRINT, detail="the ticket is for another model, dtype or layout"
            )
        watch = _Watch(self._clock() + min(timeout_s, ticket.ttl_s), self._clock, cancelled)
        self.sweep(self._clock())
        if ticket.nbytes > self._arena.capacity:
            return Pull(
                Outcome.NO_ROOM, detail=f"{ticket.nbytes} bytes, staging holds {self._arena.capacity}"
            )
        lease = self._arena.reserve(ticket.nbytes)
        if lease is None:
            return Pull(
                Outcome.NO_ROOM, detail=f"{self._arena.used_bytes} of {self._arena.size} bytes in use"
            )
        peer, step = self._enter(ticket)
        if peer is None:
            lease.release()
            outcome = Outcome.PEER_LOST if step is Step.LOST else Outcome.TRANSPORT_ERROR
            return Pull(outcome, Scope.PEER, detail="could not connect")
        try:
            self._transfer(peer, ticket, lease, watch)
            return Pull(Outcome.OK, lease=lease)
        except _GivenUp as end:
            self._settle(peer, lease, end)
            silent = end.outcome is Outcome.TIMED_OUT and not watch.answered
            scope = Scope.PEER if silent or end.outcome is Outcome.PEER_LOST else Scope.TRANSFER
            return Pull(end.outcome, scope, detail=end.detail)
        finally:
            self._leave(ticket.peer, peer)

    def tell(self, ticket: Ticket, kind: MessageKind) -> bool:
        """Send the source a ticket's end; False when it could not be sent."""
        peer, _ = self._enter(ticket)
        if peer is None:
            return False
        try:
            if not peer.greeted:
                self._greet(peer, ticket)
            step = self._wire.send(
                ticket.peer, Message(kind, ticket.incarnation, ticket.generation).to_bytes()
            )
            if step is Step.LOST:
                peer.doomed = True
            return step is Step.DONE
        finally:
            self._leave(ticket.peer, peer)

    def remove(self, endpoint: str) -> int:
        """See `TransferEndpoint.remove_peer`."""
        freed = 0
        with self._lock:
            for peer_id in [p for p in self._peers if p.endpoint == endpoint]:
                self._peers[peer_id].doomed = True
                freed += self._drop_if_unused(peer_id)
        return freed

    def sweep(self, now: float) -> None:
        """Free parked memory whose read has ended; drop peers that kept some for QUARANTINE_S."""
        with self._lock:
            for peer_id, peer in list(self._peers.items()):
                for parked in list(peer.parked):
                    step = parked.read.state()
                    if step is Step.PENDING:
                        peer.doomed = peer.doomed or now - parked.since >= QUARANTINE_S
                        continue
                    peer.doomed = peer.doomed or step is Step.LOST
                    parked.read.close()
                    parked.lease.release()
                    peer.parked.remove(parked)
                self._drop_if_unused(peer_id)

    def close(self) -> None:
        """Drop all peers; no pull may be running."""
        with self._lock:
            for peer_id, peer in list(self._peers.items()):
                assert peer.users == 0, "close while a pull is running"
                peer.doomed = True
                self._drop_if_unused(peer_id)

    def check(self) -> None:
        """Exactly the parked leases are quarantined."""
        with self._lock:
            parked = {p.lease.offset for peer in self._peers.values() for p in peer.parked}
        assert parked == {lease.offset for lease in self._arena.live(LeaseState.QUARANTINED)}

    def _transfer(self, peer: _Peer, ticket: Ticket, lease: StagingLease, watch: _Watch) -> None:
        """Seal, payload, seal, checksum; raises _GivenUp unless all of it is right."""
        # The seal first: a ticket that has ended already costs one small read, and a fresh connection comes
        # up.
        self._expect_seal(peer, ticket, lease, watch)
        digest, landed = xxhash.xxh3_64(), lease.buffer.numpy().data
        at = 0
        for spans in reads_of(ticket, lease):
            watch.look()
            self._finish(peer, self._wire.read(ticket.peer, spans), watch)
            end = at + sum(span.nbytes for span in spans)
            digest.update(landed[at:end])  # while it is still in the cache
            at = end
        # And last: the source wipes the seal before it reuses the memory, so a seal still there now says that
        # everything read before belonged to this ticket.
        self._expect_seal(peer, ticket, lease, watch)
        if digest.intdigest() != ticket.checksum:
            raise _GivenUp(Outcome.CORRUPT, "checksum does not match the ticket's")

    def _expect_seal(self, peer: _Peer, ticket: Ticket, lease: StagingLease, watch: _Watch) -> None:
        """Read the seal behind the source's buffer; STALE unless it is this ticket's."""
        local = lease.offset + seal_offset(lease.nbytes)
        span = Span(ticket.address + seal_offset(ticket.nbytes), local, SEAL_BYTES)
        self._finish(peer, self._wire.read(ticket.peer, [span]), watch)
        if lease.read_seal() != ticket.seal():
            raise _GivenUp(Outcome.STALE, "the ticket has ended")

    def _finish(self, peer: _Peer, read: Read, watch: _Watch) -> None:
        """Wait for a read. The first looks are close together (copies over CMA are done already)."""
        pause, waited = 20e-6, 0.0
        while (step := read.state()) is Step.PENDING:
            time.sleep(pause)
            waited += pause
            pause = min(pause * 1.5, 500e-6)
            if waited >= _LOOK_S:
                watch.look(read)
                waited = 0.0
        read.close()
        if step is Step.LOST:
            raise _GivenUp(Outcome.PEER_LOST, "the source is gone")
        if step is Step.FAILED:
            raise _GivenUp(Outcome.TRANSPORT_ERROR, "the transport failed the read")
        peer.greeted = watch.answered = True

    def _settle(self, peer: _Peer, lease: StagingLease, end: _GivenUp) -> None:
        """Give landing room back, or park it where bytes may still arrive."""
        with self._lock:
            peer.doomed = peer.doomed or end.outcome is Outcome.PEER_LOST
            if end.pending is None:
                lease.release()
                return
            lease.state = LeaseState.QUARANTINED
            peer.parked.append(_Parked(end.pending, lease, self._clock()))

    def _greet(self, peer: _Peer, ticket: Ticket) -> None:
        """Bring a fresh connection up with a small read: a message sent before would wait for progress made
        here.
        """
        lease = self._arena.reserve(SEAL_BYTES)
        if lease is None:
            return
        watch = _Watch(self._clock() + _GREETING_S, self._clock, None)
        span = Span(ticket.address + seal_offset(ticket.nbytes), lease.offset, SEAL_BYTES)
        try:
            self._finish(peer, self._wire.read(ticket.peer, [span]), watch)
            lease.release()
        except _GivenUp as end:
            self._settle(peer, lease, end)

    def _enter(self, ticket: Ticket) -> tuple[_Peer | None, Step]:
        """The ticket's peer, connected and in use by one more call; None and why when out of reach."""
        peer = self._join(ticket.peer)
        if peer is not None:
            return peer, Step.DONE
        with self._connecting:
            peer = self._join(ticket.peer)
            if peer is not None:
                return peer, Step.DONE
            step = self._wire.connect(ticket.peer, ticket.metadata)
            if step is not Step.DONE:
                return None, step
            with self._lock:
                peer = self._peers[ticket.peer] = _Peer(users=1)
                # Another life under the same name: the older one is gone (or about to be).
                for other_id, other in list(self._peers.items()):
                    if other_id.endpoint == ticket.endpoint and other is not peer:
                        other.doomed = True
                        self._drop_if_unused(other_id)
            return peer, Step.DONE

    def _join(self, peer_id: PeerId) -> _Peer | None:
        """One more call at work with a peer that is connected already."""
        with self._lock:
            if peer_id in self._peers:
                self._drop_if_unused(peer_id)  # a doomed one is connected anew
            peer = self._peers.get(peer_id)
            if peer is not None:
                peer.users += 1
            return peer

    def _leave(self, peer_id: PeerId, peer: _Peer) -> None:
        with self._lock:
            peer.users -= 1
            self._drop_if_unused(peer_id)

    def _drop_if_unused(self, peer_id: PeerId) -> int:
        """Drop a doomed peer that nobody uses; returns the quarantined payload bytes that came free. Lock
        held.
        """
        peer = self._peers[peer_id]
        if not peer.doomed or peer.users:
            return 0
        for parked in peer.parked:
            parked.read.close()
        self._wire.disconnect(peer_id)
        # Only now can nothing land any more.
        freed = 0
        for parked in peer.parked:
            freed += parked.lease.nbytes
            parked.lease.release()
        del self._peers[peer_id]
        return freed
