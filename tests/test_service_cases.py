"""CASES O-1 to O-4 and O-11 between a prefill and a decode service: what ends early leaves nothing behind."""

from __future__ import annotations

import asyncio
import math

import pytest
from service_stand import FULL, Stand, ask, expected, model, network, stand

from deployments.prefill_service import PrefillService
from engine.errors import ContextOverflow, InvalidRequest, Overloaded
from engine.model import wrap_model
from engine.prefill import PrefillEngine
from kv_tiers.transfer import puller
from kv_tiers.transfer.endpoint import EndReason, Outcome
from kv_tiers.transfer.faults import Fault, FaultRule
from kv_tiers.transfer.local import LocalEndpoint
from kv_tiers.transfer.ticket import Message, MessageKind, Ticket


async def replace_prefill(s: Stand, engine: PrefillEngine) -> None:
    """Another prefill service under the name of the stand's, which ends."""
    old, fabric = s.prefill, s.decode.endpoint._wire._fabric
    s.prefill = s.client.service = PrefillService(
        engine, LocalEndpoint("prefill", 8 << 20, fabric=fabric), None, threads=1, max_queued=200,
        workspace_bytes=64 << 20, ticket_ttl_s=30.0, by_reply=False,
    )  # fmt: skip
    await old.close()


async def test_o1_receives_aborted_before_their_source_dies_leave_all_room_to_the_next():
    # Survivors of 240 tokens take all 64 pages and most of the landing memory; those of the others would lie there.
    large = ask("large", 240, recipe=FULL)
    async with stand(pages=64, landing=160 << 10) as s:
        fabric = s.decode.endpoint._wire._fabric

        async def freeze(request, reply):
            fabric.freeze("prefill")  # it answered, and sends nothing

        s.client.after = freeze
        tasks = [asyncio.create_task(s.run(ask(f"r{i}", 60, recipe=FULL))) for i in range(4)]
        await s.until(lambda: s.decode.stats()["pulls_running"] == 4)
        assert s.decode.endpoint.used_bytes > s.decode.endpoint.capacity / 2
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ends)
        assert s.decode.endpoint.quarantined_bytes > s.decode.endpoint.capacity / 2, "it may still land"
        fabric.kill("prefill")
        s.client.after = None
        await replace_prefill(s, PrefillEngine(model(), chunk_tokens=64))
        await s.at_rest()
        assert (await s.run(large)).tokens == expected(large).tokens
        # What the dead one might have had to say comes late, and means nothing.
        for reply in s.client.replies[:4]:
            ticket = Ticket.from_bytes(reply.ticket)
            late = Message(MessageKind.ACKNOWLEDGE, ticket.incarnation, ticket.generation)
            s.decode.endpoint._wire._inbox.append(late.to_bytes())
        await s.until(lambda: s.decode.endpoint.counters.messages_ignored == 4)


async def test_o2_what_decode_refuses_after_prefill_frees_its_survivors_at_once():
    """Nothing ends by waiting: the tickets would outlive the test."""
    # Two prompts would fill the staging memory; landing memory has no room for any of them.
    async with stand(staging=96 << 10, landing=16 << 10, ticket_ttl_s=3600) as s:
        for i in range(50):
            with pytest.raises(InvalidRequest, match="landing memory"):
                await s.run(ask(f"r{i}", recipe=FULL))
            await s.at_rest(1.0)
        tickets = s.prefill.endpoint.counters.tickets
        assert (tickets[EndReason.REFUSED], tickets[EndReason.EXPIRED]) == (50, 0)
        assert (await s.run(ask())).tokens == expected(ask()).tokens


async def test_o3_one_part_that_cannot_be_read_makes_no_part_of_it_count(monkeypatch):
    request = ask("parts", 240, recipe=FULL, max_tokens=12)
    monkeypatch.setattr(puller, "PIECE_BYTES", 32 << 10)
    monkeypatch.setattr(puller, "MIN_PIECE_BYTES", 1)
    monkeypatch.setattr(puller, "PIECES_PER_READ", 1)
    async with stand(decode_faults=[FaultRule(Fault.FAIL_PIECE, nth={0}, amount=2)], ticket_ttl_s=3600) as s:
        done = await s.run(request)
        assert math.ceil(done.prompt.shipped_bytes / (32 << 10)) == 4
        assert done.tokens == expected(request).tokens
        counters = s.decode.endpoint.counters
        assert (counters.pulls[Outcome.TRANSPORT_ERROR], counters.pulls[Outcome.OK]) == (1, 1)
        assert (s.decode.stats()["recomputes"], len(s.client.asked)) == (1, 2)
        await s.at_rest(1.0)


async def test_o4_a_prompt_too_long_for_prefill_alone_is_refused_and_never_decoded():
    small = network()
    small.config.max_position_embeddings = 256
    async with stand() as s:
        await replace_prefill(s, PrefillEngine(wrap_model(small, frozenset()), chunk_tokens=64))
        batches = []
        with pytest.raises(ContextOverflow, match=r"260.*256"):
            async for batch in s.decode.generate(ask(tokens=260)):
                batches.append(batch)
        assert not batches and not s.client.replies
        assert len(s.client.asked) == 1, "no other replica would take it either"
        assert s.decode.stats()["generated_tokens"] == 0


async def test_o11_survivors_without_room_wait_for_their_deadline_and_keep_nobody_up():
    """Nothing can leave: the one ticket that fills the staging memory outlives the test."""
    async with stand(staging=48 << 10, ticket_ttl_s=3600) as s:
        held = await s.prefill.prefill(ask("held", recipe=FULL))
        began = asyncio.get_running_loop().time()
        waiting = asyncio.create_task(s.prefill.prefill(ask("waits", seed=1, recipe=FULL, deadline_s=1.0)))
        await s.until(lambda: s.prefill.stats()["prefilled_prompts"] == 1 and not s.prefill.engine.queued)
        short = ask("short", seed=2, recipe=FULL, max_tokens=1)
        assert (await s.prefill.prefill(short)).first[0].token_id == expected(short).tokens[0][0]
        assert not waiting.done()
        with pytest.raises(Overloaded, match="1 s"):
            await asyncio.wait_for(waiting, 10)
        assert asyncio.get_running_loop().time() - began < 5
        s.decode.endpoint.refuse(Ticket.from_bytes(held.ticket))
        await s.at_rest()
        assert (await s.run(ask(recipe=FULL))).tokens == expected(ask(recipe=FULL)).tokens
