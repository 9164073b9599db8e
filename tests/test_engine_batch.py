"""Continuous batching: the company a request keeps, preemption, aborts and bad neighbours do not change it."""

from __future__ import annotations

import pytest
import tiny_models
import torch
from tiny_models import local_engine, one_thread, pieces, request, snapkv, tiny, tokens_of  # noqa: F401

import engine.batch
from engine.batch import DecodeEngine
from engine.errors import ContextOverflow, GenerationFailed, InvalidRequest
from engine.pool import PagePool
from engine.request import FinishReason
from engine.sequence import Choice

MODEL = tiny("llama").model

MIXED = [
    request("a", tokens_of(50, 1), snapkv(20), max_tokens=20),
    request("b", tokens_of(9, 2), max_tokens=25),
    request("c", tokens_of(90, 3), snapkv(40), n=3, temperature=1.0, seed=5, max_tokens=18),
    request("d", tokens_of(64, 4), max_tokens=1),
    request("e", tokens_of(33, 5), snapkv(16), temperature=0.7, top_p=0.9, seed=8, max_tokens=30),
    request("f", tokens_of(1, 6), n=2, temperature=1.0, seed=1, max_tokens=12),
    request("g", tokens_of(120, 7), max_tokens=16),
    request("h", tokens_of(70, 8), snapkv(69), frequency_penalty=0.5, max_tokens=22),
]


def run(requests, **options):
    """Tokens of every choice of every request, run together; nothing may be left behind."""
    local = local_engine(MODEL, **options)
    completions = local.generate(requests)
    local.decode.check()
    assert local.decode.use.used == 0 and local.decode.idle
    return {name: done.tokens for name, done in completions.items()}, local


@pytest.fixture(scope="module")
def alone():
    return {wanted.request_id: run([wanted])[0][wanted.request_id] for wanted in MIXED}


def test_mixed_requests_get_together_what_each_gets_alone(alone):
    assert run(MIXED)[0] == alone
    assert run(MIXED[::-1], chunk=17)[0] == alone
    lengths = {wanted.request_id: {len(choice) for choice in alone[wanted.request_id]} for wanted in MIXED}
    assert lengths == {wanted.request_id: {wanted.sampling.max_tokens} for wanted in MIXED}


def test_logits_of_a_running_request_do_not_depend_on_who_joins_and_leaves(monkeypatch):
    seen = {}
    step = engine.batch.decode_step

    def record(model, pool, rows, tokens, positions, evictions):
        logits = step(model, pool, rows, tokens, positions, evictions)
        for token, position, own in zip(tokens, positions, logits, strict=True):
            seen.setdefault((token, position), []).append(own.clone())
        return logits

    monkeypatch.setattr(engine.batch, "decode_step", record)
    requests = [wanted for wanted in MIXED if wanted.sampling.temperature == 0]
    done = {w.request_id: tiny_models.prefill_all(MODEL, [w])[w.request_id] for w in requests}
    for company in ([[w] for w in requests], [requests]):
        for together in company:
            decode = DecodeEngine(MODEL, tiny_models.new_pool(MODEL))
            for wanted in together:
                add(decode, done[wanted.request_id])
            while not decode.idle:
                decode.step()
    pairs = [logits for logits in seen.values() if len(logits) == 2]
    assert len(pairs) == len(seen) == sum(w.sampling.max_tokens - 1 for w in requests)
    assert all(torch.equal(*logits) for logits in pairs)


def add(decode, done, release=lambda: None):
    """Queue a finished prompt; → its choices."""
    wanted = done.job.request
    choices = [Choice(wanted, i, pieces(), MODEL.spec.end_tokens) for i in range(wanted.sampling.n)]
    for choice, first in zip(choices, done.first, strict=True):
        choice.accept(first)
    live = [choice for choice in choices if choice.finish_reason is None]
    if live:
        decode.add(live, done.layout, tiny_models.packed(done), release)
    return choices


@pytest.mark.parametrize("pages", [48, 60, 90])
def test_preemption_changes_no_token(alone, pages):
    found, local = run(MIXED, pages=pages)
    assert found == alone
    assert local.decode.preemptions > 0


def test_preemption_at_any_moment_changes_no_token(alone):
    done = tiny_models.prefill_all(MODEL, MIXED)
    decode = DecodeEngine(MODEL, tiny_models.new_pool(MODEL, rows=20))
    choices = {name: add(decode, one) for name, one in done.items()}
    step = 0
    while not decode.idle:
        decode.step()
        decode.check()
        if decode.running and step < 40:
            decode.preempt(step % decode.running)
        step += 1
    assert {name: [choice.generated for choice in own] for name, own in choices.items()} == alone
    assert decode.preemptions >= 20 and decode.use.used == 0


def test_a_seed_gives_the_same_text_in_any_company(alone):
    wanted = request("x", tokens_of(30, 11), temperature=1.0, seed=77, n=2, max_tokens=20)
    lonely = run([wanted])[0]["x"]
    for others in (MIXED[:3], MIXED[3:]):
        assert run([*others, wanted])[0]["x"] == lonely
    assert run([wanted], pages=18)[0]["x"] == lonely
    other = request("x", tokens_of(30, 11), temperature=1.0, seed=78, n=2, max_tokens=20)
    assert run([other])[0]["x"] != lonely
    assert lonely[0] != lonely[1]


def test_choices_share_pages_until_they_differ():
    done = tiny_models.prefill_all(
        MODEL, [request("a", tokens_of(120), n=4, temperature=1.0, max_tokens=30)]
    )["a"]
    single = tiny_models.new_pool(MODEL).pages_for(done.layout.meta.counts)
    decode = DecodeEngine(MODEL, tiny_models.new_pool(MODEL))
    choices = add(decode, done)
    decode.step()
    heads = sum(layer.kv_heads for layer in MODEL.spec.layers)
    assert decode.use.used <= single + 4 * heads < 2 * single
    while not decode.idle:
        decode.step()
        decode.check()
    assert len({tuple(choice.generated) for choice in choices}) == 4
    assert decode.use.used == 0


def test_a_buffer_is_released_exactly_once_whatever_happens():
    done = tiny_models.prefill_all(MODEL, [request(name, tokens_of(40)) for name in "abc"])
    released = []
    decode = DecodeEngine(MODEL, tiny_models.new_pool(MODEL, rows=2))
    for name in "abc":
        add(decode, done[name], lambda name=name: released.append(name))
    decode.step()
    assert released == ["a", "b"] and decode.waiting == 1  # two rows
    assert decode.pages_owed == decode.pool.pages_for(done["c"].layout.meta.counts)
    decode.abort("c")
    decode.step()
    assert released == ["a", "b", "c"]
    assert decode.fail_all() == ["a", "b"]
    assert decode.idle and decode.use.used == 0 and released == ["a", "b", "c"]
    decode.check()


@pytest.mark.parametrize("moment", range(8))
def test_an_abort_at_any_stage_frees_everything(alone, moment):
    """Moments 0-1: waiting for prefill, half prefilled; 2: waiting for pages; later: running, preempted."""
    local = local_engine(MODEL, chunk=16)
    victim = request("victim", tokens_of(40, 3), n=2, temperature=1.0, max_tokens=50)
    others = [MIXED[0], MIXED[2]]
    for wanted in (victim, *others):
        local.start(wanted)
    results, step = {}, 0
    while local.prefill.queued or not local.decode.idle:
        if step == moment:
            local.prefill.abort("victim", 0)
            local.decode.abort("victim")
        for done in local.prefill.step():
            results[done.job.request.request_id] = add(local.decode, done)
        if moment == 7 and step == 6:
            victims = [i for i, e in enumerate(local.decode._running) if e.choice.request is victim]
            local.decode.preempt(victims[0])
        local.decode.step()
        local.decode.check()
        step += 1
    assert local.decode.use.used == 0 and local.decode.running == local.decode.waiting == 0
    for wanted in others:
        assert [choice.generated for choice in results[wanted.request_id]] == alone[wanted.request_id]
    assert all(len(choice.generated) < 50 for choice in results.get("victim", []))


def test_max_tokens_one_ends_with_the_first_token_and_never_decodes():
    local = local_engine(MODEL)
    done = local.generate([request("a", tokens_of(20), max_tokens=1, n=3, temperature=1.0)])["a"]
    assert [len(choice) for choice in done.tokens] == [1, 1, 1]
    assert {event.finish_reason for event in done.events} == {FinishReason.LENGTH}
    assert local.decode.use.used == 0


def test_an_end_token_ends_a_choice_and_its_text():
    free = run([request("a", tokens_of(30), max_tokens=12)])[0]["a"][0]
    end = free[5]
    at = free.index(end)
    done = local_engine(MODEL).generate([request("a", tokens_of(30), max_tokens=12, stop_token_ids=(end,))])[
        "a"
    ]
    assert done.tokens[0] == free[: at + 1]
    assert done.events[-1].finish_reason is FinishReason.STOP
    assert done.texts[0] == "".join(f"<{token}>" for token in free[:at])


def test_logits_without_a_usable_token_fail_one_request_only(monkeypatch, alone):
    done = tiny_models.prefill_all(MODEL, MIXED)
    decode = DecodeEngine(MODEL, tiny_models.new_pool(MODEL))
    choices = {name: add(decode, one) for name, one in done.items()}
    step = engine.batch.decode_step
    poisoned = done["c"].job.request

    def poison(model, pool, rows, tokens, positions, evictions):
        logits = step(model, pool, rows, tokens, positions, evictions).clone()
        for row, entry in enumerate(decode._running):
            if (
                entry.choice.request is poisoned
                and entry.choice.choice == 1
                and len(entry.choice.generated) == 6
            ):
                logits[row, 7] = float("nan")
        return logits

    monkeypatch.setattr(engine.batch, "decode_step", poison)
    failed = []
    while not decode.idle:
        for result in decode.step():
            if result.error is not None:
                assert isinstance(result.error, GenerationFailed) and "NaN" in str(result.error)
                failed.append(result.request_id)
        decode.check()
    assert failed == ["c"]
    found = {name: [choice.generated for choice in own] for name, own in choices.items() if name != "c"}
    assert found == {name: tokens for name, tokens in alone.items() if name != "c"}
    assert decode.use.used == 0


def test_a_request_that_can_never_fit_is_refused_and_one_that_just_fits_runs():
    wanted = request("a", tokens_of(60), max_tokens=40)
    done = tiny_models.prefill_all(MODEL, [wanted])["a"]
    exact = tiny_models.new_pool(MODEL).pages_at(done.layout.meta.counts, 39)
    with pytest.raises(InvalidRequest, match="lower max_tokens") as refusal:
        add(DecodeEngine(MODEL, tiny_models.new_pool(MODEL, pages=exact - 1)), done)
    assert refusal.value.field == "max_tokens"
    decode = DecodeEngine(MODEL, tiny_models.new_pool(MODEL, pages=exact))
    choices = add(decode, done)
    while not decode.idle:
        decode.step()
    assert len(choices[0].generated) == 40


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_what_exceeds_the_page_tables_is_refused_and_harms_nobody(family):
    model = tiny(family).model
    asked = [request("long", tokens_of(90), max_tokens=50), request("fits", tokens_of(90), max_tokens=7)]
    done = tiny_models.prefill_all(model, asked)
    decode = DecodeEngine(model, PagePool(model.spec, 2000, 4, 96))
    add(decode, done["fits"])
    with pytest.raises(ContextOverflow, match=r"139.*96") as refusal:
        add(decode, done["long"])
    assert refusal.value.field == "max_tokens"
    while not decode.idle:
        decode.step()
        decode.check()
    assert decode.use.used == 0


def test_what_exceeds_the_context_is_refused_with_both_numbers():
    done = tiny_models.prefill_all(MODEL, [request("a", tokens_of(1000), snapkv(20), max_tokens=25)])["a"]
    with pytest.raises(ContextOverflow, match=r"1000 tokens and 25 .* 1024"):
        add(DecodeEngine(MODEL, tiny_models.new_pool(MODEL)), done)


def test_leaving_a_stream_early_and_an_error_in_it_free_everything():
    local = local_engine(MODEL, chunk=32)
    stream = local.stream(MIXED)
    for _ in range(12):
        next(stream)
    assert local.decode.running and local.prefill.queued
    stream.close()
    assert local.prefill.queued == 0 and local.decode.idle and local.decode.use.used == 0
    with pytest.raises(ContextOverflow):
        list(local.stream([MIXED[0], request("long", tokens_of(1025))]))
    assert local.prefill.queued == 0
    local.decode.check()
    assert local.generate([MIXED[1]])["b"].tokens == run([MIXED[1]])[0]["b"]


def test_a_row_that_nobody_runs_is_found():
    decode = DecodeEngine(MODEL, tiny_models.new_pool(MODEL))
    decode.check()
    tiny_models.join(decode.pool, tiny_models.prefill_all(MODEL, [request("a", tokens_of(20))])["a"])
    with pytest.raises(AssertionError, match="held by nobody"):
        decode.check()


def test_more_choices_than_rows_are_refused():
    done = tiny_models.prefill_all(MODEL, [request("a", tokens_of(20), n=3, temperature=1.0)])["a"]
    with pytest.raises(InvalidRequest) as refusal:
        add(DecodeEngine(MODEL, tiny_models.new_pool(MODEL, rows=2)), done)
    assert refusal.value.field == "n"


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers():
    with pytest.raises(ContextOverflow, match=r"1025.*1024"):
        local_engine(MODEL).start(request("a", tokens_of(1025)))


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_greedy_text_is_what_transformers_would_choose(family):
    pair = tiny(family)
    requests = [request(str(length), tokens_of(length, length), max_tokens=30) for length in (1, 18, 65)]
    for name, done in local_engine(pair.model, chunk=16).generate(requests).items():
        text = [*tokens_of(int(name), int(name)), *done.tokens[0]]
        assert pair.full_logits(text)[int(name) - 1 : -1].argmax(-1).tolist() == done.tokens[0]


@pytest.mark.parametrize("family", ["mistral", "gemma3", "gpt_oss"])
def test_windowed_models_survive_preemption(family):
    model = tiny(family).model
    # Where all layers are windowed, only prompts shorter than the window grow.
    first, more = (2, 5) if family == "mistral" else (30, 15)
    requests = [request(str(i), tokens_of(first + more * i, i), max_tokens=40) for i in range(4)]
    plenty = local_engine(model, pages=2000)
    tight = local_engine(model, pages=64 if family != "mistral" else 28)
    wanted = {name: done.tokens for name, done in plenty.generate(requests).items()}
    assert {name: done.tokens for name, done in tight.generate(requests).items()} == wanted
    assert tight.decode.preemptions > 0 and tight.decode.use.used == 0
    tight.decode.check()
