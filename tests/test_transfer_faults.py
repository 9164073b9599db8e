"""Injected faults look like real ones, hit what the script says, and leave nothing behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kv_tiers.transfer import EndReason, Outcome, Scope, Ticket, payload_checksum
from kv_tiers.transfer.faults import Fault, FaultRule, FaultyEndpoint
from kv_tiers.transfer.local import LocalEndpoint, LocalFabric

MB = 1 << 20


@pytest.fixture
def fabric() -> LocalFabric:
    return LocalFabric()


@pytest.fixture
def source(fabric: LocalFabric) -> Iterator[LocalEndpoint]:
    endpoint = LocalEndpoint("source", 32 * MB, fabric=fabric)
    yield endpoint
    endpoint.close()


def publish(
    source: LocalEndpoint, request_id: str = "r", nbytes: int = 10 * MB, ttl_s: float = 60.0
) -> Ticket:
    lease = source.reserve(nbytes)
    assert lease is not None
    lease.buffer.fill_(3)
    checksum = payload_checksum(lease.buffer)
    return source.publish(
        lease, request_id=request_id, attempt=0, fingerprint=b"f", checksum=checksum, ttl_s=ttl_s
    )


def faulty(fabric: LocalFabric, *rules: FaultRule, seed: int = 0) -> FaultyEndpoint:
    return FaultyEndpoint(LocalEndpoint("reader", 32 * MB, fabric=fabric), rules, seed=seed)


@pytest.mark.parametrize(
    ("rule", "outcome", "scope"),
    [
        (FaultRule(Fault.FAIL, nth={0}), Outcome.TRANSPORT_ERROR, Scope.TRANSFER),
        (FaultRule(Fault.FAIL_PIECE, nth={0}, amount=2), Outcome.TRANSPORT_ERROR, Scope.TRANSFER),
        (FaultRule(Fault.LOSE_PEER, nth={0}, amount=1), Outcome.PEER_LOST, Scope.PEER),
        (FaultRule(Fault.CORRUPT, nth={0}, amount=5 * MB), Outcome.CORRUPT, Scope.TRANSFER),
    ],
)
def test_a_scripted_fault_strikes_one_pull_and_the_next_is_well(
    fabric: LocalFabric, source: LocalEndpoint, rule: FaultRule, outcome: Outcome, scope: Scope
) -> None:
    """CASES O-3."""
    reader = faulty(fabric, rule)
    ticket = publish(source)
    struck = reader.pull(ticket, fingerprint=b"f", timeout_s=5.0)
    assert (struck.outcome, struck.scope, struck.lease) == (outcome, scope, None)
    assert reader.used_bytes == 0
    pull = reader.pull(ticket, fingerprint=b"f", timeout_s=5.0)
    assert pull.lease is not None and (pull.lease.buffer == 3).all()
    pull.lease.release()
    assert reader.counters.pulls[outcome] == reader.counters.pulls[Outcome.OK] == 1
    assert reader.injected[rule.fault] == 1
    reader.check()


def test_a_lost_acknowledgement_ends_in_expiry(fabric: LocalFabric, source: LocalEndpoint) -> None:
    reader = faulty(
        fabric, FaultRule(Fault.DROP_ACKNOWLEDGE, nth={0}), FaultRule(Fault.DROP_REFUSE, rate=1.0)
    )
    ticket = publish(source, ttl_s=5.0)
    reader.acknowledge(ticket)
    reader.refuse(ticket)
    assert source.poll() == [] and source.open_tickets == 1
    assert [end.reason for end in source.poll(1e12)] == [EndReason.EXPIRED]
    assert source.used_bytes == 0


def test_full_staging_is_scripted_by_call(fabric: LocalFabric) -> None:
    reader = faulty(fabric, FaultRule(Fault.FULL, nth={1, 2}))
    assert [reader.reserve(100) is None for _ in range(4)] == [False, True, True, False]


def test_the_users_own_cancellation_still_works_under_faults(
    fabric: LocalFabric, source: LocalEndpoint
) -> None:
    reader = faulty(
        fabric, FaultRule(Fault.DELAY, rate=1.0, amount=0.001), FaultRule(Fault.CORRUPT, rate=1.0)
    )
    pull = reader.pull(publish(source), fingerprint=b"f", timeout_s=5.0, cancelled=lambda: True)
    assert pull.outcome is Outcome.CANCELLED and reader.used_bytes == 0


def test_the_same_seed_gives_the_same_faults(fabric: LocalFabric, source: LocalEndpoint) -> None:
    def outcomes(seed: int) -> list[Outcome]:
        reader = faulty(
            fabric, FaultRule(Fault.FAIL, rate=0.3), FaultRule(Fault.CORRUPT, rate=0.3), seed=seed
        )
        found = []
        for _ in range(30):
            pull = reader.pull(ticket, fingerprint=b"f", timeout_s=5.0)
            found.append(pull.outcome)
            if pull.lease is not None:
                pull.lease.release()
        assert reader.used_bytes == 0
        reader.close()
        return found

    ticket = publish(source, nbytes=1000)
    assert outcomes(1) == outcomes(1) != outcomes(2)
    assert set(outcomes(1)) == {Outcome.OK, Outcome.TRANSPORT_ERROR, Outcome.CORRUPT}
