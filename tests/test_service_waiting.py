"""Survivors on their way to the batch: bounded in bytes, no ticket open meanwhile, pulled or in the reply itself."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import numpy as np
import pytest
from service_stand import FULL, SNAPKV, ask, expected, hold, model, stand

from deployments.forecast import snapshot_bytes
from engine.errors import InvalidRequest, Overloaded, ReplicaLost
from engine.snapshot import parse_snapshot
from kv_tiers.transfer.endpoint import EndReason, Outcome
from kv_tiers.transfer.faults import Fault, FaultRule

NEED = snapshot_bytes(model().spec, ask())


# Bounded in bytes


@pytest.mark.parametrize("by_reply", [False, True])
async def test_no_more_than_the_budget_waits_for_pages_and_the_rest_is_not_even_prefilled(by_reply):
    requests = [ask(f"r{i}", seed=i, max_tokens=20) for i in range(9)]
    async with stand(waiting_bytes=3 * NEED, ticket_ttl_s=0.2, by_reply=by_reply, rows=16) as s:
        let_go = await hold(s, "pages")
        runs = [asyncio.create_task(s.run(request)) for request in requests]
        await s.until(lambda: s.decode.engine.waiting == 3)
        await asyncio.sleep(0.4)  # twice the life of a ticket
        assert s.decode.stats()["snapshot_bytes_waiting"] == 3 * NEED
        assert s.decode.engine.waiting == 3 and len(s.client.asked) == 3
        assert s.prefill.stats()["tickets_open"] == 0
        assert s.decode.stats()["landing_bytes"] <= 32 << 10, "at most the first waits in landing memory"
        let_go()
        for request, done in zip(requests, await asyncio.gather(*runs), strict=True):
            assert done.tokens == expected(request).tokens
        assert s.decode.stats()["recomputes"] == 0, "no ticket ran out"


async def test_a_request_larger_than_the_budget_runs_alone():
    async with stand(waiting_bytes=1) as s:
        runs = [s.run(ask(f"r{i}", seed=i)) for i in range(4)]
        done = await asyncio.gather(*runs)
    assert [d.tokens for d in done] == [expected(ask(seed=i)).tokens for i in range(4)]


async def test_the_deadline_ends_a_wait_for_the_budget():
    async with stand(waiting_bytes=NEED) as s:
        let_go = await hold(s, "pages")
        first = asyncio.create_task(s.run(ask("first")))
        await s.until(lambda: s.decode.engine.waiting == 1)
        with pytest.raises(Overloaded, match=r"0\.1 s"):
            await s.run(ask("late", deadline_s=0.1))
        assert (await s.run(ask("one token", max_tokens=1))).tokens, "what never decodes needs no room"
        let_go()
        assert (await first).tokens == expected(ask("first")).tokens


async def test_a_request_that_leaves_while_it_waits_for_the_budget_holds_nobody_up():
    async with stand(waiting_bytes=NEED) as s:
        let_go = await hold(s, "pages")
        runs = [asyncio.create_task(s.run(ask(f"r{i}", seed=i))) for i in range(4)]
        await s.until(lambda: s.decode.engine.waiting == 1)
        for run in runs[:3]:
            run.cancel()
        ends = await asyncio.gather(*runs[:3], return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ends)
        let_go()
        assert (await runs[3]).tokens == expected(ask(seed=3)).tokens


@pytest.mark.parametrize("recipe", [FULL, SNAPKV], ids=lambda r: r.policy)
@pytest.mark.parametrize("tokens", [9, 60, 333])
async def test_the_forecast_is_never_less_than_the_snapshot_takes(recipe, tokens):
    request = ask("r", tokens, recipe=recipe)
    async with stand(by_reply=True) as s:
        await s.run(request)
        real = s.client.replies[0].snapshot.payload.nbytes
    assert real <= snapshot_bytes(model().spec, request) <= 1.05 * real + 512


async def test_snapshots_are_read_and_copied_off_the_event_loop(monkeypatch):
    threads = []

    def parse(spec, buffer):
        threads.append(threading.current_thread())
        return parse_snapshot(spec, buffer)

    monkeypatch.setattr("deployments.decode_service.parse_snapshot", parse)
    async with stand() as s:
        await s.run(ask())
    assert threads and threading.main_thread() not in threads


# A retry whose own first token would end


async def test_a_retry_stages_survivors_even_if_its_own_first_token_ends():
    """The first attempt's token is out already: what a later one samples instead (other kernels) does not matter."""

    async def end_from_now_on(request, reply):
        s.prefill._ends = lambda request, first: True

    async with stand(decode_faults=[FaultRule(Fault.FAIL, nth={0})]) as s:
        s.client.after = end_from_now_on
        assert (await s.run(ask())).tokens == expected(ask()).tokens
        assert [reply.ticket is not None for reply in s.client.replies] == [True, True]
        assert s.decode.stats()["recomputes"] == 1
        # Without such a retry it stages nothing.
        assert (await s.prefill.prefill(ask("other"))).ticket is None


# Survivors inside the reply


@pytest.mark.parametrize("recipe", [FULL, SNAPKV], ids=lambda r: r.policy)
async def test_without_a_transport_survivors_come_with_the_reply_and_give_the_same_tokens(recipe):
    requests = [ask(f"r{i}", 40 + i, n=1 + i % 2, temperature=0.9, seed=i, recipe=recipe) for i in range(6)]
    async with stand(by_reply=True) as s:
        for request, done in zip(requests, await asyncio.gather(*map(s.run, requests)), strict=True):
            assert done.tokens == expected(request).tokens
        assert all(reply.ticket is None for reply in s.client.replies)
        assert s.decode.stats()["shipped_bytes"] == sum(r.prompt.shipped_bytes for r in s.client.replies)
        assert not any(s.prefill.endpoint.counters.tickets.values())


async def test_tickets_alone_cannot_be_pulled_from_another_process():
    """What `by_reply` is for; the ticket expires and the request ends with an error."""
    async with stand(by_reply=True, ticket_ttl_s=0.1, attempts=1) as s:
        s.prefill._by_reply = False
        with pytest.raises(ReplicaLost):
            await s.run(ask())
        assert s.decode.endpoint.counters.pulls[Outcome.PEER_LOST] == 1
        await s.at_rest()
        assert s.prefill.endpoint.counters.tickets[EndReason.EXPIRED] == 1


@pytest.mark.parametrize("damage", ["payload", "fingerprint"])
async def test_a_reply_damaged_on_its_way_is_a_counted_recompute(damage):
    async def spoil(request, reply):
        if request.attempt == 0:
            snapshot = reply.snapshot
            if damage == "payload":
                spoilt = replace(
                    snapshot, payload=np.where(np.arange(len(snapshot.payload)) == 5000, 7, snapshot.payload)
                )
            else:
                spoilt = replace(snapshot, fingerprint=b"another")
            object.__setattr__(reply, "snapshot", spoilt)

    async with stand(by_reply=True) as s:
        s.client.after = spoil
        assert (await s.run(ask())).tokens == expected(ask()).tokens
        assert s.decode.stats()["recomputes"] == 1


async def test_survivors_in_a_reply_wait_for_landing_room_and_are_refused_when_there_never_is_any():
    async with stand(by_reply=True, landing=64 << 10) as s:
        let_go = await hold(s, "landing")
        run = asyncio.create_task(s.run(ask()))
        await s.until(lambda: bool(s.client.replies))
        gone = asyncio.create_task(s.run(ask("gone")))
        await s.until(lambda: len(s.client.replies) == 2)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        let_go()
        assert (await run).tokens == expected(ask()).tokens
        with pytest.raises(InvalidRequest, match="landing memory"):
            await s.run(ask(recipe=FULL, tokens=400))
