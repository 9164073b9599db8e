"""Requests through both services: the same tokens as the engine alone, and nothing held afterwards."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import replace

import pytest
from service_stand import FULL, SNAPKV, ask, expected, model, stand, tokenizer

from engine.errors import ContextOverflow, GenerationFailed, InvalidRequest, Overloaded
from engine.request import FinishReason, PromptEvent
from kv_tiers.transfer.endpoint import EndReason


@pytest.mark.parametrize("recipe", [FULL, SNAPKV], ids=lambda r: r.policy)
@pytest.mark.parametrize("n", [1, 4])
async def test_streams_what_the_engine_alone_generates(recipe, n):
    request = ask(recipe=recipe, n=n, temperature=0.8, seed=3, max_tokens=12)
    truth = expected(request)
    async with stand() as s:
        done = await s.run(request)
        assert done.tokens == truth.tokens and done.texts == truth.texts
        assert done.prompt.prompt_tokens == 60
        assert done.prompt.kept_tokens == (60 if recipe is FULL else 24)
        assert done.prompt.shipped_bytes >= done.prompt.payload_bytes > 0
        assert {e.finish_reason for e in done.events if e.finish_reason} == {FinishReason.LENGTH}


async def test_n_choices_share_one_ticket_and_one_copy_twenty_times_over():
    """CASES O-6."""
    truth = expected(ask(n=4, temperature=1.0, seed=5)).tokens
    assert len({tuple(tokens) for tokens in truth}) == 4
    async with stand(staging=64 << 10) as s:
        for i in range(20):
            done = await s.run(ask(f"r{i}", n=4, temperature=1.0, seed=5))
            assert done.tokens == truth
        assert s.prefill.endpoint.counters.tickets[EndReason.ACKNOWLEDGED] == 20
        assert sum(s.decode.endpoint.counters.pulls.values()) == 20


@pytest.mark.parametrize("max_tokens", [1, 2])
@pytest.mark.parametrize("n", [1, 3])
async def test_gives_exactly_max_tokens_and_one_token_needs_no_ticket(max_tokens, n):
    async with stand() as s:
        done = await s.run(ask(max_tokens=max_tokens, n=n))
        assert [len(tokens) for tokens in done.tokens] == [max_tokens] * n
        assert [e.finish_reason for e in done.events if e.index == max_tokens - 1] == [
            FinishReason.LENGTH
        ] * n
        assert [reply.ticket is None for reply in s.client.replies] == [max_tokens == 1]
        assert sum(s.decode.endpoint.counters.pulls.values()) == (max_tokens > 1)


async def test_an_end_token_first_needs_no_ticket():
    first = expected(ask()).tokens[0][0]
    async with stand() as s:
        done = await s.run(ask(stop_token_ids=(first,)))
        assert done.tokens == [[first]] and done.texts == [""]
        assert done.events[-1].finish_reason is FinishReason.STOP
        assert s.client.replies[0].ticket is None


async def test_a_stop_string_with_the_first_token_refuses_the_ticket_at_once_fifty_times_over():
    request = ask(seed=_readable_seed())
    text = tokenizer().decode([expected(request).tokens[0][0]])
    async with stand(staging=40 << 10) as s:
        for i in range(50):
            done = await s.run(ask(f"r{i}", seed=_readable_seed(), stop=(text,)))
            assert done.texts == [""] and done.events[-1].finish_reason is FinishReason.STOP
        await s.at_rest()
        assert s.prefill.endpoint.counters.tickets[EndReason.REFUSED] == 50
        assert sum(s.decode.endpoint.counters.pulls.values()) == 0


@functools.cache
def _readable_seed() -> int:
    """A prompt whose first generated token is one ASCII character."""
    for seed in range(30):
        first = expected(ask(seed=seed, max_tokens=1)).tokens[0][0]
        text = tokenizer().decode([first]) if first < 256 else ""
        if text.isascii() and text:
            return seed
    raise AssertionError("no seed")


async def test_min_tokens_is_for_decode_and_does_not_disturb_prefill():
    plain = expected(ask(max_tokens=6)).tokens[0]
    async with stand() as s:
        done = await s.run(ask(max_tokens=6, min_tokens=5, stop_token_ids=tuple(plain)))
        assert 5 <= len(done.tokens[0]) <= 6
        assert not set(done.tokens[0][:5]) & set(plain)


async def test_a_short_prompt_overtakes_a_long_one_that_came_first():
    finished: list[str] = []

    async def run(s, request):
        await s.run(request)
        finished.append(request.request_id)

    async with stand(chunk_tokens=32, pages=1000) as s:
        slow = asyncio.create_task(run(s, ask("long", 1500, recipe=FULL, max_tokens=2)))
        await s.until(lambda: s.prefill.engine.queued > 0)
        quick = asyncio.create_task(run(s, ask("short", 40, recipe=FULL, max_tokens=4)))
        await asyncio.gather(slow, quick)
    assert finished == ["short", "long"]


async def test_many_requests_at_once_do_not_change_one_another():
    requests = [
        ask(f"r{i}", 20 + 7 * i, seed=i, recipe=FULL if i % 2 else SNAPKV, n=1 + i % 2, temperature=0.7)
        for i in range(12)
    ]
    truths = {request.request_id: expected(request).tokens for request in requests}
    async with stand(pages=60, rows=4) as s:  # some must wait for pages, some for rows
        done = await asyncio.gather(*(s.run(request) for request in requests))
    assert {r.request_id: d.tokens for r, d in zip(requests, done, strict=True)} == truths


async def test_a_consumer_that_stays_away_does_not_keep_the_ticket_open():
    async with stand(ticket_ttl_s=5) as s:
        stream = s.decode.generate(ask(max_tokens=50))
        first = await anext(stream)
        assert isinstance(first[0], PromptEvent)
        await s.until(lambda: s.decode.engine.idle and s.prefill.endpoint.open_tickets == 0)
        rest = [event for batch in [b async for b in stream] for event in batch]
        assert len(first) - 1 + len(rest) == 50


async def test_prompt_logprobs_and_logprobs_arrive():
    async with stand() as s:
        done = await s.run(replace(ask(logprobs=2, max_tokens=3), prompt_logprobs=1))
        assert done.prompt.prompt_logprobs is not None and len(done.prompt.prompt_logprobs) == 60
        assert [len(e.logprob.top) for e in done.events] == [2, 2, 2]


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (ask(tokens=0), "prompt"),
        (ask(n=9), "n"),
        (ask(tokens=2000, max_tokens=100), "max_tokens"),
        (ask(tokens=1900, recipe=FULL), "max_tokens"),
    ],
    ids=["empty", "more choices than rows", "context", "pages"],
)
async def test_what_can_never_fit_is_refused_before_prefill_works_for_it(request_, field):
    async with stand(rows=8, pages=100) as s:
        with pytest.raises(InvalidRequest) as refused:
            await s.run(request_)
        assert refused.value.field == field
        assert not s.client.asked
        await s.run(ask())


async def test_a_prompt_beyond_the_context_names_both_numbers():
    """CASES O-4."""
    async with stand() as s:
        with pytest.raises(ContextOverflow, match=r"2100.*2048"):
            await s.prefill.prefill(ask(tokens=2100, max_tokens=1))
        with pytest.raises(InvalidRequest, match="empty"):
            await s.prefill.prefill(ask(tokens=0))


async def test_survivors_larger_than_staging_are_an_invalid_request():
    async with stand(staging=128 << 10) as s:
        with pytest.raises(InvalidRequest, match="staging_gib") as refused:
            await s.run(ask(recipe=FULL, tokens=300))
        assert refused.value.field == "kv.budget"
        # Within the limit by its payload, beyond it with its metadata.
        fits = s.prefill.endpoint.capacity // model().spec.kv_bytes_per_token
        with pytest.raises(InvalidRequest, match="staging_gib"):
            await s.prefill.prefill(ask(recipe=FULL, tokens=fits))
        await s.run(ask(recipe=FULL, tokens=300, max_tokens=1))  # one token stages nothing


async def test_survivors_larger_than_landing_memory_are_an_invalid_request():
    async with stand(landing=16 << 10) as s:
        with pytest.raises(InvalidRequest, match="landing memory"):
            await s.run(ask(recipe=FULL, tokens=200))


async def test_a_full_decode_replica_says_so():
    async with stand(max_requests=2) as s:
        first = [s.decode.generate(ask(f"r{i}", max_tokens=100)) for i in range(2)]
        for stream in first:
            await anext(stream)
        with pytest.raises(Overloaded) as full:
            await s.run(ask("third"))
        assert full.value.retry_after_s > 0
        for stream in first:
            await stream.aclose()
        await s.run(ask("fourth"))


async def test_a_full_prefill_replica_says_so():
    async with stand(max_queued=0) as s:
        with pytest.raises(Overloaded):
            await s.run(ask())


async def test_an_id_in_use_is_refused_and_free_again_afterwards():
    async with stand() as s:
        stream = s.decode.generate(ask("same", max_tokens=200))
        await anext(stream)
        with pytest.raises(GenerationFailed, match="in use"):
            await s.run(ask("same"))
        await stream.aclose()
        # The engine may not have dropped the first one yet: the second must not suffer for it.
        for _ in range(10):
            again = s.decode.generate(ask("same", max_tokens=200))
            await anext(again)
            await again.aclose()
        assert (await s.run(ask("same"))).tokens == expected(ask("same")).tokens
