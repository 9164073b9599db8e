"""The source's tickets as a state machine, and what only a controllable clock or fabric can show."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kv_tiers.transfer import EndReason, Outcome, Scope, Ticket, payload_checksum
from kv_tiers.transfer.local import LocalEndpoint, LocalFabric
from kv_tiers.transfer.puller import MIN_PIECE_BYTES, PIECES_PER_READ, QUARANTINE_S, reads_of
from kv_tiers.transfer.staging import StagingArena
from kv_tiers.transfer.ticket import Message, MessageKind, PeerId

MB = 1 << 20
REQUESTS = st.sampled_from(["a", "b", "c"])
PICK = st.integers(0, 1000)


class TicketLife(RuleBasedStateMachine):
    """Random publications and ends against a dictionary: every ticket ends once, for the right reason."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        fabric = LocalFabric()
        self.source = LocalEndpoint("source", 64 * 4096, fabric=fabric, clock=lambda: self.now)
        self.reader = LocalEndpoint("reader", 64 * 4096, fabric=fabric, clock=lambda: self.now)
        self.tickets: list[Ticket] = []
        self.deadlines: dict[int, float] = {}  # open ones, by generation
        self.expected: list[tuple[int, EndReason]] = []

    def _end(self, generation: int, reason: EndReason) -> bool:
        if self.deadlines.pop(generation, None) is None:
            return False
        self.expected.append((generation, reason))
        return True

    def _open(self, request_id: str) -> Ticket | None:
        return next(
            (t for t in self.tickets if t.request_id == request_id and t.generation in self.deadlines), None
        )

    @rule(
        request_id=REQUESTS, attempt=st.integers(0, 3), nbytes=st.integers(1, 9000), ttl_s=st.integers(1, 20)
    )
    def publish(self, request_id: str, attempt: int, nbytes: int, ttl_s: int) -> None:
        lease = self.source.reserve(nbytes)
        if lease is None:
            return
        lease.buffer.fill_(attempt)
        rival = self._open(request_id)
        ticket = self.source.publish(
            lease,
            request_id=request_id,
            attempt=attempt,
            fingerprint=b"f",
            checksum=payload_checksum(lease.buffer),
            ttl_s=ttl_s,
        )
        self.tickets.append(ticket)
        self.deadlines[ticket.generation] = self.now + ttl_s
        if rival is not None:
            loser = ticket if rival.attempt > attempt else rival
            self._end(loser.generation, EndReason.REVOKED)

    @rule(pick=PICK, acknowledge=st.booleans())
    def tell(self, pick: int, acknowledge: bool) -> None:
        if not self.tickets:
            return
        ticket = self.tickets[pick % len(self.tickets)]
        (self.reader.acknowledge if acknowledge else self.reader.refuse)(ticket)
        self._poll()
        self._end(ticket.generation, EndReason.ACKNOWLEDGED if acknowledge else EndReason.REFUSED)
        self._compare()

    @rule(request_id=REQUESTS, attempt=st.none() | st.integers(0, 3))
    def revoke(self, request_id: str, attempt: int | None) -> None:
        ticket = self._open(request_id)
        due = ticket is not None and (attempt is None or ticket.attempt <= attempt)
        assert self.source.revoke(request_id, attempt) == due
        if due and ticket is not None:
            self._end(ticket.generation, EndReason.REVOKED)

    @rule(seconds=st.integers(0, 8))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds
        self._poll()
        for generation, deadline in list(self.deadlines.items()):
            if deadline <= self.now:
                self._end(generation, EndReason.EXPIRED)
        self._compare()

    @rule(pick=PICK)
    def pull(self, pick: int) -> None:
        if not self.tickets:
            return
        ticket = self.tickets[pick % len(self.tickets)]
        pull = self.reader.pull(ticket, fingerprint=b"f", timeout_s=5.0)
        assert pull.outcome is (Outcome.OK if ticket.generation in self.deadlines else Outcome.STALE)
        if pull.lease is not None:
            assert (pull.lease.buffer == ticket.attempt).all()
            pull.lease.release()

    def _poll(self) -> None:
        self.seen = [(end.generation, end.reason) for end in self.source.poll(self.now)]

    def _compare(self) -> None:
        assert sorted(self.seen) == sorted(self.expected)
        self.expected = []

    @invariant()
    def sums_hold(self) -> None:
        self.source.check()
        self.reader.check()
        live = [t for t in self.tickets if t.generation in self.deadlines]
        assert self.source.open_tickets == len(live)
        assert self.source.staged_bytes == sum(t.nbytes for t in live)
        assert self.reader.used_bytes == 0

    def teardown(self) -> None:
        self.source.close()
        assert self.source.used_bytes == self.source.open_tickets == self.source.staged_bytes == 0


TestTicketLife = TicketLife.TestCase
TestTicketLife.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def filled(source: LocalEndpoint, nbytes: int, value: int, ttl_s: float = 1e3) -> Ticket:
    lease = source.reserve(nbytes)
    assert lease is not None
    lease.buffer.fill_(value)
    return source.publish(
        lease,
        request_id="r",
        attempt=0,
        fingerprint=b"f",
        checksum=payload_checksum(lease.buffer),
        ttl_s=ttl_s,
    )


def test_late_bytes_never_land_in_memory_that_is_in_use_again() -> None:
    fabric = LocalFabric()
    source = LocalEndpoint("source", 8 * MB, fabric=fabric)
    reader = LocalEndpoint("reader", 8 * MB, fabric=fabric)
    ticket = filled(source, MB, 7)

    def freeze_after_the_seal() -> bool:
        fabric.freeze("source")
        return False

    pull = reader.pull(ticket, fingerprint=b"f", timeout_s=0.05, cancelled=freeze_after_the_seal)
    assert (pull.outcome, pull.scope) == (Outcome.TIMED_OUT, Scope.TRANSFER)
    lease = reader.reserve(MB)
    assert lease is not None and lease.offset >= MB
    lease.buffer.fill_(1)
    fabric.thaw("source")
    reader.poll()  # the read ends now and its bytes land
    assert (lease.buffer == 1).all() and reader.quarantined_bytes == 0
    lease.release()
    reader.check()
    assert reader.used_bytes == 0


def test_quarantine_of_a_peer_that_stays_frozen_ends_by_itself() -> None:
    now = [0.0]
    fabric = LocalFabric()
    source = LocalEndpoint("source", 8 * MB, fabric=fabric)
    reader = LocalEndpoint("reader", 8 * MB, fabric=fabric, clock=lambda: now[0])
    ticket = filled(source, MB, 7)
    fabric.freeze("source")
    assert reader.pull(ticket, fingerprint=b"f", timeout_s=0.0).outcome is Outcome.TIMED_OUT
    reader.poll(QUARANTINE_S - 1)
    assert reader.quarantined_bytes == MB and reader.wait_hint() < 0.05
    reader.poll(QUARANTINE_S + 1)
    assert reader.quarantined_bytes == reader.used_bytes == 0


def test_a_restarted_endpoint_of_the_same_name_is_another_peer() -> None:
    """CASES O-5."""
    fabric = LocalFabric()
    old = LocalEndpoint("source", 8 * MB, fabric=fabric)
    reader = LocalEndpoint("reader", 8 * MB, fabric=fabric)
    prepared = filled(old, MB, 1)
    new = LocalEndpoint("source", 8 * MB, fabric=fabric)
    current = filled(new, MB, 2)
    assert prepared.generation == current.generation and prepared.address == current.address
    assert reader.pull(prepared, fingerprint=b"f", timeout_s=1.0).outcome is Outcome.PEER_LOST
    reader.acknowledge(prepared)
    assert new.poll() == [] and new.open_tickets == 1 and reader.counters.messages_unsent == 1
    pull = reader.pull(current, fingerprint=b"f", timeout_s=1.0)
    assert pull.lease is not None and (pull.lease.buffer == 2).all()


def test_messages_that_are_garbage_are_counted_and_ignored() -> None:
    source = LocalEndpoint("source", MB, fabric=LocalFabric())
    filled(source, 100, 1)
    source._wire._inbox.extend([b"", b"\x80\x04.", b"x" * 29])
    assert source.poll() == [] and source.open_tickets == 1 and source.counters.messages_ignored == 3


def test_an_acknowledgement_for_another_life_of_the_source_is_ignored() -> None:
    """CASES O-5."""
    source = LocalEndpoint("source", MB, fabric=LocalFabric())
    ticket = filled(source, 100, 1)
    other = Message(MessageKind.ACKNOWLEDGE, ticket.incarnation ^ 1, ticket.generation)
    source._wire._inbox.append(other.to_bytes())
    assert source.poll() == [] and source.open_tickets == 1 and source.counters.messages_ignored == 1


def test_a_lost_peer_is_forgotten_so_that_the_next_ticket_connects_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fabric = LocalFabric()
    source = LocalEndpoint("source", 8 * MB, fabric=fabric)
    reader = LocalEndpoint("reader", 8 * MB, fabric=fabric)
    forgotten: list[PeerId] = []
    monkeypatch.setattr(reader._wire, "disconnect", forgotten.append)
    ticket = filled(source, MB, 7)

    def killing() -> bool:
        fabric.kill("source")
        return False

    assert (
        reader.pull(ticket, fingerprint=b"f", timeout_s=1.0, cancelled=killing).outcome is Outcome.PEER_LOST
    )
    assert forgotten == [ticket.peer]


def test_pieces_cover_the_payload_once_and_are_never_small() -> None:
    arena = StagingArena(64 * MB)
    for nbytes in (1, MIN_PIECE_BYTES - 1, MB, MB + 1, MB + MIN_PIECE_BYTES, 9 * MB + 5, 20 * MB):
        lease = arena.reserve(nbytes)
        assert lease is not None
        ticket = Ticket("r", 0, 1, b"f", "source", 1, 1000, nbytes, 0, 1.0)
        reads = list(reads_of(ticket, lease))
        assert all(1 <= len(spans) <= PIECES_PER_READ for spans in reads)
        at = 0
        for span in (span for spans in reads for span in spans):
            assert (span.remote, span.local) == (1000 + at, lease.offset + at)
            assert span.nbytes >= min(nbytes, MIN_PIECE_BYTES)
            at += span.nbytes
        assert at == nbytes
        lease.release()
