"""One contract for every transport: `LocalEndpoint` in this process, `NixlEndpoint` with a real process as source."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from transfer_peer import (
    FINGERPRINT,
    LocalPeer,
    ProcessPeer,
    Serving,
    bare_environment,
    payload,
    wait_until,
)

from kv_tiers.transfer import Outcome, Pull, Scope, Ticket, TransferEndpoint
from kv_tiers.transfer.local import LocalEndpoint, LocalFabric
from kv_tiers.transfer.nixl import NixlEndpoint

MB = 1 << 20
ARENA = 64 * MB
ABRUPT = """
import logging
from logging.handlers import MemoryHandler
handler = MemoryHandler(10, target=logging.StreamHandler())
from kv_tiers.transfer.nixl import NixlEndpoint
endpoint = NixlEndpoint("never-closed", 1 << 20)
assert handler.target is not None and logging.raiseExceptions, "importing nixl changed the process's logging"
"""
TRANSPORTS = ("local", "nixl") if sys.platform == "linux" else ("local",)


class Pair:
    """A destination endpoint in this process, a long-lived source, and new sources on demand."""

    def __init__(self, transport: str) -> None:
        self.transport = transport
        self.fabric = LocalFabric()
        self._extra: list[LocalPeer | ProcessPeer] = []
        self.destination: TransferEndpoint = (
            NixlEndpoint("decode", ARENA)
            if transport == "nixl"
            else LocalEndpoint("decode", ARENA, fabric=self.fabric)
        )
        self.source = self.start("prefill")

    def start(self, name: str) -> LocalPeer | ProcessPeer:
        nixl = self.transport == "nixl"
        peer = ProcessPeer(name, ARENA) if nixl else LocalPeer(name, ARENA, self.fabric)
        self._extra.append(peer)
        return peer

    def pull(self, ticket: Ticket, timeout_s: float = 10.0, **options: object) -> Pull:
        return self.destination.pull(ticket, **{"fingerprint": FINGERPRINT, "timeout_s": timeout_s} | options)

    def source_is_empty(self) -> bool:
        gauges = self.source.gauges()
        return gauges["open"] == gauges["staged"] == gauges["used"] == 0

    def stop(self) -> None:
        for peer in self._extra:
            peer.stop()
        self.destination.close()


@pytest.fixture(scope="module", params=TRANSPORTS)
def shared_pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    torch.set_num_threads(1)
    pair = Pair(request.param)
    yield pair
    pair.stop()


@pytest.fixture
def pair(shared_pair: Pair) -> Iterator[Pair]:
    """The shared pair; every test must leave it empty."""
    yield shared_pair
    assert wait_until(shared_pair.source_is_empty)
    shared_pair.destination.poll()
    shared_pair.destination.check()
    assert shared_pair.destination.used_bytes == shared_pair.destination.quarantined_bytes == 0


@pytest.mark.parametrize("nbytes", [1, 64, 4097, 65_535, MB, MB + 100, 20 * MB + 12_345])
def test_a_pull_lands_exactly_the_published_bytes(pair: Pair, nbytes: int) -> None:
    ticket = pair.source.publish("bytes", nbytes, seed=nbytes)
    pull = pair.pull(Ticket.from_bytes(ticket.to_bytes()))
    assert pull.outcome is Outcome.OK and pull.lease is not None
    assert torch.equal(pull.lease.buffer, payload(nbytes, nbytes))
    pull.lease.release()
    pair.destination.acknowledge(ticket)
    assert wait_until(lambda: pair.source.ended()[-1:] == [("bytes", 0, "acknowledged")])


def test_a_wrong_checksum_is_corrupt_and_gives_nothing(pair: Pair) -> None:
    ticket = pair.source.publish("skewed", 3 * MB, skew=1)
    pull = pair.pull(ticket)
    assert (pull.outcome, pull.scope, pull.lease) == (Outcome.CORRUPT, Scope.TRANSFER, None)
    assert pair.destination.used_bytes == 0
    pair.destination.refuse(ticket)


def test_another_fingerprint_is_refused_before_a_byte_is_read(pair: Pair) -> None:
    pulled = pair.destination.counters.bytes_pulled
    ticket = pair.source.publish("other-model", MB)
    pair.source.freeze()  # nothing could be read
    try:
        begin = time.monotonic()
        pull = pair.pull(ticket, fingerprint=b"g" * 32)
        assert time.monotonic() - begin < 1.0
    finally:
        pair.source.thaw()
    assert pull.outcome is Outcome.REFUSED_FINGERPRINT and pair.destination.counters.bytes_pulled == pulled
    pair.destination.refuse(ticket)


def test_fifty_refusals_without_a_pull_free_the_source_at_once(pair: Pair) -> None:
    """CASES O-2."""
    for index in range(50):  # 50 times 8 MB through an arena of 64 MB
        ticket = pair.source.publish(f"refused-{index}", 8 * MB)
        pair.destination.refuse(ticket)
        assert wait_until(pair.source_is_empty, timeout_s=1.0)
        assert pair.source.ended()[-1] == (f"refused-{index}", 0, "refused")


def test_the_first_message_to_a_source_never_talked_to_arrives(shared_pair: Pair) -> None:
    shared_pair.destination.remove_peer("prefill")
    ticket = shared_pair.source.publish("stranger", MB)
    shared_pair.destination.refuse(ticket)  # and nobody polls the destination
    assert wait_until(shared_pair.source_is_empty, timeout_s=1.0)


def test_ends_are_idempotent_and_late_ones_are_ignored(pair: Pair) -> None:
    ignored = pair.source.gauges()["ignored"]
    ticket = pair.source.publish("once", MB)
    pair.destination.acknowledge(ticket)
    pair.destination.acknowledge(ticket)
    pair.destination.refuse(ticket)
    assert wait_until(lambda: pair.source.gauges()["ignored"] == ignored + 2)
    assert [end for end in pair.source.ended() if end[0] == "once"] == [("once", 0, "acknowledged")]


def test_one_ticket_serves_all_choices_of_a_request(pair: Pair) -> None:
    """CASES O-6."""
    for index in range(20):  # n = 4 siblings share one pull and one acknowledgement
        ticket = pair.source.publish(f"n4-{index}", 8 * MB)
        assert pair.source.gauges()["staged"] == 8 * MB
        pull = pair.pull(ticket)
        assert pull.lease is not None
        pull.lease.release()
        pair.destination.acknowledge(ticket)
        assert wait_until(pair.source_is_empty, timeout_s=1.0)


def test_a_ticket_without_an_end_expires_and_its_late_reader_finds_it_stale(pair: Pair) -> None:
    ticket = pair.source.publish("forgotten", 2 * MB, ttl_s=0.05)
    assert wait_until(lambda: ("forgotten", 0, "expired") in pair.source.ended())
    assert pair.pull(ticket).outcome in (Outcome.STALE, Outcome.TIMED_OUT)
    late = Ticket(**{**vars(ticket), "ttl_s": 60.0})
    assert pair.pull(late).outcome is Outcome.STALE


def test_a_newer_attempt_revokes_the_older_ticket(pair: Pair) -> None:
    first = pair.source.publish("again", MB, attempt=0, seed=1)
    second = pair.source.publish("again", MB, attempt=1, seed=2)
    stale = pair.source.publish("again", MB, attempt=0, seed=3)  # a slow old prefill finishes last
    assert [pair.pull(t).outcome for t in (first, stale)] == [Outcome.STALE, Outcome.STALE]
    pull = pair.pull(second)
    assert pull.lease is not None and torch.equal(pull.lease.buffer, payload(MB, 2))
    pull.lease.release()
    pair.destination.acknowledge(first)  # late: must not end the second
    assert pair.source.gauges()["open"] == 1
    pair.destination.acknowledge(second)
    ends = [("again", 0, "revoked"), ("again", 0, "revoked"), ("again", 1, "acknowledged")]
    assert wait_until(lambda: [end for end in pair.source.ended() if end[0] == "again"] == ends)


def test_a_reader_overtaken_by_revocation_and_reuse_notices(pair: Pair) -> None:
    looks: list[int] = []

    def overtaken() -> bool:
        looks.append(1)
        if len(looks) == 2:
            assert pair.source.revoke("overtaken")
            pair.source.scribble(20 * MB)
        return False

    ticket = pair.source.publish("overtaken", 20 * MB)
    assert pair.pull(ticket, cancelled=overtaken).outcome is Outcome.STALE
    assert len(looks) >= 3


def test_cancellation_stops_between_pieces_and_returns_the_room(pair: Pair) -> None:
    ticket = pair.source.publish("aborted", 20 * MB)
    looks: list[int] = []

    def cancelled() -> bool:
        looks.append(1)
        return len(looks) == 3

    assert pair.pull(ticket, cancelled=cancelled).outcome is Outcome.CANCELLED
    pair.destination.refuse(ticket)


def test_no_landing_room_is_an_outcome(pair: Pair) -> None:
    held = pair.destination.reserve(ARENA - MB)
    assert held is not None
    ticket = pair.source.publish("too-big-now", 2 * MB)
    assert pair.pull(ticket).outcome is Outcome.NO_ROOM
    held.release()
    giant = Ticket(**{**vars(ticket), "nbytes": ARENA * 2})
    assert pair.pull(giant).outcome is Outcome.NO_ROOM
    pair.destination.refuse(ticket)


def test_an_address_outside_the_source_is_a_transport_error(pair: Pair) -> None:
    ticket = pair.source.publish("wild", MB)
    wild = Ticket(**{**vars(ticket), "address": ticket.address + 2 * ARENA})
    pull = pair.pull(wild)
    assert (pull.outcome, pull.scope) == (Outcome.TRANSPORT_ERROR, Scope.TRANSFER)
    pair.destination.refuse(ticket)


def test_several_pulls_at_once_do_not_disturb_each_other(pair: Pair) -> None:
    def work(lane: int) -> None:
        for ticket in tickets[lane::4]:
            pull = pair.pull(ticket)
            assert pull.lease is not None
            right.append(torch.equal(pull.lease.buffer, payload(ticket.nbytes, ticket.attempt)))
            pull.lease.release()
            pair.destination.acknowledge(ticket)

    tickets = [pair.source.publish(f"lane-{i}", 2 * MB + i, attempt=i, seed=i) for i in range(16)]
    right: list[bool] = []
    threads = [threading.Thread(target=work, args=(lane,)) for lane in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 16


def test_a_frozen_source_ends_in_our_deadline_and_quarantine_until_it_answers(pair: Pair) -> None:
    ticket = pair.source.publish("thawing", 8 * MB)
    # A new connection needs the source; over an old one CMA may read the memory of a frozen process all the same.
    pair.destination.remove_peer("prefill")
    pair.source.freeze()
    try:
        begin = time.monotonic()
        pull = pair.pull(ticket, timeout_s=0.4)
        assert 0.3 < time.monotonic() - begin < 2.0
        assert (pull.outcome, pull.scope) == (Outcome.TIMED_OUT, Scope.PEER)
        pair.destination.poll()
        assert pair.destination.quarantined_bytes == 8 * MB  # bytes may still land there
        pair.destination.check()
    finally:
        pair.source.thaw()

    def settled() -> bool:
        pair.destination.poll()
        return pair.destination.quarantined_bytes == 0

    assert wait_until(settled)
    pull = pair.pull(ticket)
    assert pull.lease is not None
    pull.lease.release()
    pair.destination.acknowledge(ticket)


def test_quarantine_ends_when_the_frozen_peer_is_removed_and_it_can_come_back(pair: Pair) -> None:
    ticket = pair.source.publish("removed", 8 * MB)
    pair.destination.remove_peer("prefill")
    pair.source.freeze()
    looks: list[int] = []

    def impatient() -> bool:
        looks.append(1)
        return len(looks) == 20

    try:
        assert pair.pull(ticket, timeout_s=10.0, cancelled=impatient).outcome is Outcome.CANCELLED
        assert pair.destination.quarantined_bytes == 8 * MB
        assert pair.destination.remove_peer("prefill") == 8 * MB
        assert pair.destination.quarantined_bytes == pair.destination.used_bytes == 0
        pair.destination.check()
    finally:
        pair.source.thaw()
    pull = pair.pull(ticket)
    assert pull.lease is not None and torch.equal(pull.lease.buffer, payload(8 * MB, 0))
    pull.lease.release()
    pair.destination.acknowledge(ticket)


def test_a_source_that_dies_during_a_pull_is_lost_quickly_and_all_room_returns(pair: Pair) -> None:
    """CASES O-1."""
    victim = pair.start("victim")
    tickets = [victim.publish(f"mid-{i}", 20 * MB) for i in range(2)]
    looks: list[int] = []

    def killing() -> bool:
        looks.append(1)
        if len(looks) == 2:
            victim.kill()
        return False

    begin = time.monotonic()
    pull = pair.pull(tickets[0], cancelled=killing)
    assert (pull.outcome, pull.scope) == (Outcome.PEER_LOST, Scope.PEER)
    assert pair.pull(tickets[1]).outcome is Outcome.PEER_LOST
    assert time.monotonic() - begin < 2.0
    assert pair.destination.used_bytes == 0
    pair.destination.acknowledge(tickets[0])  # into the void, without an exception
    reborn = pair.start("victim")  # same name, another incarnation: the old ticket stays lost
    ticket = reborn.publish("new-life", 4 * MB, seed=5)
    pull = pair.pull(ticket)
    assert pull.lease is not None and torch.equal(pull.lease.buffer, payload(4 * MB, 5))
    pull.lease.release()
    assert pair.pull(tickets[1]).outcome is Outcome.PEER_LOST
    pair.destination.acknowledge(ticket)
    assert wait_until(lambda: reborn.ended() == [("new-life", 0, "acknowledged")])


def test_an_endpoint_pulls_its_own_tickets(shared_pair: Pair) -> None:
    own = Serving(
        NixlEndpoint("both-roles", ARENA)
        if shared_pair.transport == "nixl"
        else LocalEndpoint("both-roles", ARENA, fabric=shared_pair.fabric)
    )
    ticket = own.publish("self", 3 * MB, seed=9)
    pull = own.endpoint.pull(ticket, fingerprint=FINGERPRINT, timeout_s=5.0)
    assert pull.lease is not None and torch.equal(pull.lease.buffer, payload(3 * MB, 9))
    pull.lease.release()
    own.endpoint.acknowledge(ticket)
    assert wait_until(lambda: own.ended() == [("self", 0, "acknowledged")])
    assert own.gauges()["used"] == 0
    own.stop()


if sys.platform == "linux":

    def test_a_destination_process_that_dies_leaves_a_ticket_that_expires() -> None:
        source = Serving(NixlEndpoint("orphaned", ARENA))
        destination = ProcessPeer("dying-decode", ARENA)
        ticket = source.publish("orphan", 8 * MB, ttl_s=2.0)
        assert destination.ask("pull", ticket=ticket.to_bytes().hex()) == "ok"
        destination.kill()
        destination.stop()
        assert wait_until(lambda: source.ended() == [("orphan", 0, "expired")])
        assert source.gauges()["used"] == 0
        source.stop()

    def test_processes_that_used_nixl_end_with_exit_code_zero() -> None:
        abrupt = subprocess.Popen([sys.executable, "-c", ABRUPT], env=bare_environment())
        orderly = ProcessPeer("orderly", ARENA)
        assert (orderly.stop(), abrupt.wait(timeout=30)) == (0, 0)
