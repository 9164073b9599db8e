"""Clients that go away at any moment, and replicas that fail: everything comes back, tokens neither repeat nor lack."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
from service_stand import Stand, ask, expected, hold, model, stand

from engine.errors import GenerationFailed, InvalidRequest, Overloaded, ReplicaLost
from engine.snapshot import SnapshotError
from kv_tiers.transfer.endpoint import EndReason, Outcome
from kv_tiers.transfer.faults import Fault, FaultRule

# Where a request can be when its client goes away: how to hold it there, and how to see that it is there.


class Place:
    """Options of a stand, and for every request: what holds it, and whether all of `count` requests are held."""

    def __init__(self, reached: Callable[[Stand, int], bool], hold: str = "", **options: object) -> None:
        self.reached = reached
        self.hold = hold
        self.options = options


PLACES = {
    "waiting for workspace room": Place(
        lambda s, n: s.prefill.stats()["queue"] == n, hold="prefill", workspace_bytes=1
    ),
    "in the prefill engine": Place(lambda s, n: s.prefill.engine.queued == n, hold="prefill"),
    "waiting for staging room": Place(
        lambda s, n: s.prefill.stats()["prefilled_prompts"] == 0 and s.prefill.engine.queued == 0
        and s.prefill.stats()["queue"] == n and s.prefill.stats()["workspace_bytes"] > 0,
        prefill_faults=[FaultRule(Fault.FULL, rate=1.0)],
    ),
    "pulling": Place(
        lambda s, n: s.decode.stats()["pulls_running"] == n,
        decode_faults=[FaultRule(Fault.DELAY, rate=1.0, amount=0.05)],
    ),
    "waiting for landing room": Place(
        lambda s, n: s.decode.endpoint.counters.pulls[Outcome.NO_ROOM] >= n, hold="landing"
    ),
    "waiting for pages": Place(lambda s, n: s.decode.engine.waiting == n, hold="pages"),
    "in the batch": Place(lambda s, n: s.decode.engine.running == n, rows=16),
}  # fmt: skip


@pytest.mark.parametrize("leave", ["cancelled", "cancelled twice"])
@pytest.mark.parametrize("place", PLACES)
async def test_a_request_that_is_cancelled_leaves_nothing_behind(place, leave):
    spot = PLACES[place]
    async with stand(**spot.options) as s:
        let_go = await hold(s, spot.hold)
        tasks = [asyncio.create_task(s.run(ask(f"r{i}", max_tokens=1500))) for i in range(2)]
        await s.until(lambda: spot.reached(s, len(tasks)))
        for task in tasks:
            task.cancel()
        if leave == "cancelled twice":
            await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in done)
        let_go()
        await s.at_rest()


@pytest.mark.parametrize("place", ["pulling", "waiting for pages", "in the batch"])
async def test_closing_the_stream_after_its_first_tokens_leaves_nothing_behind(place):
    spot = PLACES[place]
    async with stand(**spot.options) as s:
        let_go = await hold(s, spot.hold)
        streams = [s.decode.generate(ask(f"r{i}", n=1 + i, max_tokens=1500)) for i in range(2)]
        for stream in streams:
            await anext(stream)
        await s.until(lambda: spot.reached(s, 3 if "pulling" not in place else 2))
        for stream in streams:
            await stream.aclose()
        let_go()
        await s.at_rest()
        if place == "pulling":
            assert s.prefill.endpoint.counters.tickets[EndReason.EXPIRED] == 0


async def test_a_stream_closed_with_its_first_tokens_in_hand_refuses_the_ticket():
    async with stand(ticket_ttl_s=60) as s:
        for i in range(20):
            stream = s.decode.generate(ask(f"r{i}", max_tokens=1500))
            await anext(stream)
            await stream.aclose()
        await s.at_rest()


@pytest.mark.parametrize("wait_s", [0.0, 0.02, 0.2])
async def test_a_hundred_clients_leaving_together_free_everything_within_a_second(wait_s):
    faults = [FaultRule(Fault.DELAY, rate=0.3, amount=0.02)]
    async with stand(decode_faults=faults, staging=256 << 10, landing=256 << 10) as s:
        tasks = [asyncio.create_task(s.run(ask(f"r{i}", 30, seed=i, max_tokens=1000))) for i in range(100)]
        await s.until(lambda: len(s.client.asked) == 100)
        await asyncio.sleep(wait_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await s.at_rest(1.0)
        # The gauges live on: new work is taken and counted.
        assert (await s.run(ask("next"))).tokens == expected(ask("next")).tokens


async def test_clients_leaving_at_random_moments_leave_nothing_behind():
    async with stand(pages=60, rows=4, staging=128 << 10, landing=64 << 10, workspace_bytes=64 << 10) as s:
        for round_ in range(4):
            tasks = [
                asyncio.create_task(s.run(ask(f"{round_}-{i}", 20 + i, n=1 + i % 3, max_tokens=20)))
                for i in range(15)
            ]
            for i, task in enumerate(tasks):
                await asyncio.sleep(0.003 * (i % 3))
                if i % 2:
                    task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            assert not [end for end in ends if isinstance(end, Exception)]
            await s.at_rest()


# Replicas that die


async def test_a_prefill_replica_lost_once_costs_an_attempt_and_no_token():
    async def die_once(request):
        if request.attempt == 1000:
            raise ReplicaLost("gone")

    request = replace(ask(), attempt=1000)
    async with stand() as s:
        s.client.before = die_once
        assert (await s.run(request)).tokens == expected(ask()).tokens
        assert [r.attempt for r in s.client.asked] == [1000, 1001]


async def test_a_prefill_pool_that_stays_dead_is_an_error_after_so_many_attempts():
    async def die(request):
        raise ReplicaLost("gone")

    async with stand(attempts=2) as s:
        s.client.before = die
        with pytest.raises(ReplicaLost):
            await s.run(ask())
        assert [r.attempt for r in s.client.asked] == [0, 1]


async def test_a_prefill_replica_that_dies_after_staging_is_replaced_and_its_ticket_revoked():
    async def die_once(request, reply):
        if request.attempt == 0:
            raise ReplicaLost("gone with the answer")

    async with stand(ticket_ttl_s=60) as s:
        s.client.after = die_once
        assert (await s.run(ask())).tokens == expected(ask()).tokens
        await s.at_rest()
        assert s.prefill.endpoint.counters.tickets[EndReason.REVOKED] == 1


# Transfers that fail


@pytest.mark.parametrize(
    ("fault", "amount", "expires"),
    [
        (Fault.CORRUPT, 100, False),
        (Fault.FAIL, 0, False),
        (Fault.FAIL_PIECE, 0, False),
        (Fault.LOSE_PEER, 0, True),
    ],
    ids=lambda value: getattr(value, "name", None),
)
async def test_a_failed_pull_is_a_counted_recompute_with_the_same_tokens(fault, amount, expires):
    """CASES O-3."""
    async with stand(decode_faults=[FaultRule(fault, nth={0}, amount=amount)], ticket_ttl_s=0.5) as s:
        done = await s.run(ask(n=2, temperature=1.0, max_tokens=12))
        assert done.tokens == expected(ask(n=2, temperature=1.0, max_tokens=12)).tokens
        assert s.decode.stats()["recomputes"] == 1
        assert [r.attempt for r in s.client.asked] == [0, 1]


async def test_a_frozen_source_is_given_up_and_the_prompt_computed_again(monkeypatch):
    monkeypatch.setattr("deployments.arrivals._PULL_LEAST_S", 0.1)
    async with stand() as s:
        fabric = s.decode.endpoint._wire._fabric

        async def freeze_first(request, reply):
            if request.attempt == 0:
                fabric.freeze("prefill")
                asyncio.get_running_loop().call_later(0.3, fabric.thaw, "prefill")

        s.client.after = freeze_first
        assert (await s.run(ask())).tokens == expected(ask()).tokens
        assert s.decode.stats()["recomputes"] >= 1
        assert s.decode.endpoint.counters.pulls[Outcome.TIMED_OUT] >= 1


async def test_pulls_that_always_fail_are_a_clear_error_after_so_many_attempts():
    async with stand(decode_faults=[FaultRule(Fault.CORRUPT, rate=1.0)], attempts=3) as s:
        stream = s.decode.generate(ask())
        batches = []
        with pytest.raises(ReplicaLost, match="3 attempts"):
            async for batch in stream:
                batches.append(batch)
        assert len(batches) == 1, "first tokens, once"
        assert s.decode.stats()["recomputes"] == 3


async def test_a_lost_acknowledgement_lets_the_ticket_expire():
    async with stand(decode_faults=[FaultRule(Fault.DROP_ACKNOWLEDGE, nth={0})], ticket_ttl_s=0.3) as s:
        assert (await s.run(ask())).tokens == expected(ask()).tokens
        assert s.prefill.endpoint.open_tickets == 1
        await s.at_rest()
        assert s.prefill.endpoint.counters.tickets[EndReason.EXPIRED] == 1


async def test_a_source_that_died_holds_no_landing_room_and_no_pages():
    """CASES O-1."""
    async with stand(ticket_ttl_s=0.3, attempts=2) as s:

        async def kill(request, reply):
            if request.attempt == 0:
                s.decode.endpoint._wire._fabric.kill("prefill")

        s.client.after = kill
        with pytest.raises(ReplicaLost, match="2 attempts"):
            await s.run(ask())
        assert s.decode.endpoint.counters.pulls[Outcome.PEER_LOST] == 2
        assert s.decode.endpoint.used_bytes == 0 and s.decode.engine.use.used == 0


async def test_a_ticket_that_expired_before_the_pull_is_a_recompute():
    faults = [FaultRule(Fault.DELAY, nth={0}, amount=0.3)]
    async with stand(decode_faults=faults, ticket_ttl_s=0.1) as s:
        assert (await s.run(ask())).tokens == expected(ask()).tokens
        assert s.decode.endpoint.counters.pulls[Outcome.STALE] == 1


async def test_without_landing_room_a_request_waits_for_it():
    async with stand() as s:
        let_go = await hold(s, "landing")
        run = asyncio.create_task(s.run(ask()))
        await s.until(lambda: s.decode.endpoint.counters.pulls[Outcome.NO_ROOM] >= 1)
        let_go()
        assert (await run).tokens == expected(ask()).tokens
        assert s.decode.stats()["recomputes"] == 0


async def test_a_snapshot_that_cannot_be_read_fails_its_request_alone(monkeypatch):
    def refuse(*_):
        raise SnapshotError("not one of ours")

    async with stand() as s:
        with monkeypatch.context() as patch:
            patch.setattr("deployments.decode_service.parse_snapshot", refuse)
            with pytest.raises(GenerationFailed, match="cannot be read"):
                await s.run(ask())
        await s.at_rest()
        assert (await s.run(ask())).tokens == expected(ask()).tokens


async def test_what_the_engine_refuses_late_is_an_invalid_request_and_frees_its_landing(monkeypatch):
    """CASES O-2."""
    async with stand() as s:
        add = s.decode.engine.add

        def refuse(*_):
            raise InvalidRequest("never fits", "max_tokens")

        s.decode.engine.add = refuse
        with pytest.raises(InvalidRequest):
            await s.run(ask())
        s.decode.engine.add = add
        await s.at_rest()
        await s.run(ask())


# Limits of time and room


async def test_the_deadline_ends_a_wait_for_workspace_room():
    async with stand(workspace_bytes=1) as s:
        let_go = await hold(s, "prefill")
        first = asyncio.create_task(s.run(ask("first")))
        await s.until(lambda: s.prefill.engine.queued == 1)
        with pytest.raises(Overloaded, match=r"0\.1 s"):
            await s.run(ask("late", deadline_s=0.1))
        let_go()
        assert (await first).tokens == expected(ask("first")).tokens


async def test_the_deadline_ends_a_wait_for_staging_room():
    async with stand(prefill_faults=[FaultRule(Fault.FULL, rate=1.0)]) as s:
        with pytest.raises(Overloaded):
            await s.run(ask(deadline_s=0.2))


async def test_room_in_staging_that_nobody_announces_is_found():
    async with stand(prefill_faults=[FaultRule(Fault.FULL, nth={0, 1})]) as s:
        assert (await s.run(ask())).tokens == expected(ask()).tokens


async def test_a_large_prompt_is_not_overtaken_for_ever_by_small_ones():
    finished: list[str] = []

    async def run(s, request):
        await s.run(request)
        finished.append(request.request_id)

    room = 200 * model().spec.kv_bytes_per_token
    async with stand(workspace_bytes=room) as s:
        let_go = await hold(s, "prefill")
        requests = [ask("a", 100), ask("large", 190), *(ask(f"s{i}", 50) for i in range(6))]
        tasks = []
        for request in requests:
            tasks.append(asyncio.create_task(run(s, request)))
            await asyncio.sleep(0)
        await s.until(lambda: s.prefill.stats()["queue"] == 8)
        assert s.prefill.engine.queued == 1, "those behind the large one wait, too"
        let_go()
        await asyncio.gather(*tasks)
    assert finished.index("large") <= 2
