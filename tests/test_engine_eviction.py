"""Eviction while decoding: pages, holes, compactions and turned keys against a simulation that has none of them."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tiny_models
import torch
from eviction_simulation import SimulatedRow
from tiny_models import one_thread, request, tiny, tokens_of  # noqa: F401

from engine.attention import AttentionCall
from engine.batch import DecodeEngine
from engine.decode import DecodePort, decode_step
from engine.errors import ContextOverflow, InvalidRequest
from engine.eviction import RowEviction, StepWatch, open_eviction
from engine.pool import PagePool
from engine.restore import restore, take_snapshot
from engine.sequence import Choice
from engine.snapshot import parse_snapshot
from policies import make_recipe

DECODE = {
    "h2o": {"rule": "h2o", "budget": 24},
    "h2o every 5": {"rule": "h2o", "budget": 24, "recent": 6, "every": 5, "normalize": "none"},
    "scissorhands": {"rule": "scissorhands", "budget": 24, "window": 20, "recent": 5, "every": 6},
    "scissorhands percentile": {
        "rule": "scissorhands", "budget": 24, "window": 10, "recent": 5, "every": 4, "threshold": 0.5,
    },
    "streaming": {"rule": "streaming_llm", "budget": 24},
    "sliding": {"rule": "sliding_window", "budget": 24},
    "tova": {"rule": "tova", "budget": 24},
    "snapkv": {"rule": "snapkv", "budget": 24, "window": 8, "every": 7, "kernel": 5},
}  # fmt: skip
SNAPKV = {"policy": "snapkv", "budget": 24, "window": 8, "kernel": 5}
SLOT = {"decode": DECODE["streaming"], "positions": "slot"}


def recipe(decode="h2o", **fields):
    return make_recipe(**{"decode": DECODE[decode], **fields})


def prefilled(model, wanted, tokens=60):
    return tiny_models.prefill_all(model, [request("a", tokens_of(tokens), wanted, max_tokens=40)])["a"]


def open_row(model, pool, done):
    """A pool row of a finished prompt and its eviction."""
    layout, buffer = done.layout, tiny_models.packed(done)
    eviction = open_eviction(model.spec, done.job.request.recipe, layout, buffer)
    return restore(pool, layout, buffer, eviction), eviction


def held(eviction):
    return {place: sorted(rows[rows >= 0].tolist()) for place, rows in eviction.positions().items()}


def follow_simulation(model, done, steps):
    """Decode `steps` tokens in pages and in the simulation: same tokens cached, same logits."""
    pool = tiny_models.new_pool(model)
    pool.memory.fill_(255)  # NaN: what was not written shows
    row, eviction = open_row(model, pool, done)
    simulated = SimulatedRow(model, done)
    start, worst = len(done.job.request.prompt), 0.0
    for step, token in enumerate(tokens_of(steps, 7)):
        wanted = simulated.step(token)
        found = decode_step(model, pool, [row], [token], [start + step], [eviction])[0]
        worst = max(worst, float((found - wanted).abs().max() / wanted.abs().max()))
        assert held(eviction) == {place: sorted(rows) for place, rows in simulated.held().items()}, step
        pool.check()
        eviction.check(pool)
    assert worst < 2e-4
    pool.close(row)
    assert pool.use.used == 0
    return eviction


@pytest.mark.parametrize("policy", ["full", "snapkv"])
@pytest.mark.parametrize("decode", DECODE)
def test_every_rule_evicts_what_the_simulation_evicts(decode, policy):
    """A prompt of 60 tokens that comes whole is cut to 24 at once; one of 24 survivors goes on from there."""
    fields = SNAPKV if policy == "snapkv" else {}
    follow_simulation(tiny("llama").model, prefilled(tiny("llama").model, recipe(decode, **fields)), 30)


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "gpt_oss", "gemma3n"])
@pytest.mark.parametrize("decode", ["h2o", "scissorhands", "snapkv"])
def test_softcap_windows_sinks_and_shared_caches_are_honoured(family, decode):
    follow_simulation(tiny(family).model, prefilled(tiny(family).model, recipe(decode), 40), 24)


def test_heads_of_different_lengths_evict_at_their_own_caps():
    wanted = make_recipe(**{**SNAPKV, "heads": "ada", "decode": {"rule": "h2o"}})
    done = prefilled(tiny("llama").model, wanted)
    eviction = follow_simulation(tiny("llama").model, done, 20)
    counts = {place: len(rows) for place, rows in held(eviction).items()}
    assert counts == {place: len(rows) for place, rows in done.layout.meta.positions.items()}
    assert len(set(counts.values())) > 1


def test_a_short_prompt_grows_until_it_meets_its_cap():
    eviction = follow_simulation(tiny("llama").model, prefilled(tiny("llama").model, recipe(), 5), 40)
    assert {len(rows) for rows in held(eviction).values()} == {24}


@functools.cache
def short_context(family):
    """A model that was made for 64 positions."""
    network = tiny_models.build_network(family, max_position_embeddings=64)
    return tiny_models.wrap_model(network, frozenset())


SLOT_RECIPES = {
    "whole": {},
    "scattered": {**SNAPKV, "budget": 20},
    "spans": {**SNAPKV, "budget": 22, "protect": ((9, 12), (20, 22)), "spans": ((9, 12), (20, 22))},
    "streaming": {"policy": "streaming_llm", "budget": 16},
}


@pytest.mark.parametrize("name", SLOT_RECIPES)
def test_a_stream_that_counts_by_slots_is_the_recomputed_window_far_past_the_context(name):
    model = short_context("llama")
    eviction = follow_simulation(model, prefilled(model, make_recipe(**SLOT_RECIPES[name], **SLOT), 40), 200)
    assert eviction.state.position == 239 and eviction.state.clock < 64


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
def test_windowed_layers_go_along_past_the_context(family):
    network = tiny_models.build_network(family, max_position_embeddings=600)
    model = tiny_models.wrap_model(network, frozenset())
    done = prefilled(model, make_recipe(**SLOT), 30)
    # The second pool's page tables are long enough for slots to stay what positions are.
    pools = [tiny_models.new_pool(model), PagePool(model.spec, 2000, 2, 2000)]
    rows, evictions = zip(*[open_row(model, pool, done) for pool in pools], strict=True)
    simulated, used = SimulatedRow(model, done), set()
    later = tokens_of(700, 3)
    for step, token in enumerate(later):
        found, unmoved = (
            decode_step(model, pool, [row], [token], [30 + step], [eviction])[0]
            for pool, row, eviction in zip(pools, rows, evictions, strict=True)
        )
        assert torch.equal(found, unmoved), step
        if step > 60:
            used.add(pools[0].use.used)
        if step < 40:
            wanted = simulated.step(token)
            assert float((found - wanted).abs().max() / wanted.abs().max()) < 2e-4
    pools[0].check()
    windowed = [index for index, layer in enumerate(model.spec.layers) if layer.window]
    assert (pools[0].counts(rows[0])[windowed, 0] == 730 - 512).all()
    assert evictions[0].state.clock < 600
    # Windows straddle one page more or less; nothing else changes.
    assert max(used) - min(used) <= sum(model.spec.layers[index].kv_heads for index in windowed)
    text = [*tokens_of(30), *later, 5]
    layout, buffer = take_snapshot(pools[0], rows[0], done.layout.meta, text, evictions[0])
    moved = open_eviction(model.spec, done.job.request.recipe, layout, buffer)
    away = tiny_models.new_pool(model)
    there = decode_step(model, away, [restore(away, layout, buffer, moved)], [5], [730], [moved])
    assert torch.equal(there, decode_step(model, pools[0], rows[:1], [5], [730], evictions[:1]))


def test_an_endless_stream_keeps_its_pages_and_gives_them_back():
    model = short_context("llama")
    wanted = request("a", tokens_of(40), make_recipe(**SLOT), max_tokens=300)
    local = tiny_models.local_engine(model, pages=40)
    used = []
    for _, events in local.stream([wanted]):
        used += [local.decode.use.used for _ in events]
        local.decode.check()
    assert len(used) == 301
    assert len(set(used[20:-1])) == 1 and local.decode.use.used == 0


def test_what_cannot_count_by_slots_is_refused():
    model = short_context("llama")
    decode = DecodeEngine(model, tiny_models.new_pool(model))

    def refuse(wanted):
        done = tiny_models.prefill_all(model, [wanted])["a"]
        choice = Choice(wanted, 0, tiny_models.pieces(), frozenset())
        choice.accept(done.first[0])
        decode.add([choice], done.layout, tiny_models.packed(done))

    absolute = recipe("streaming")
    with pytest.raises(ContextOverflow, match=r"40 tokens and 300 .* 64"):
        refuse(request("a", tokens_of(40), absolute, max_tokens=300))
    large = make_recipe(decode={"rule": "streaming_llm", "budget": 64}, positions="slot")
    with pytest.raises(ContextOverflow, match=r"65 cached .* 64") as refusal:
        refuse(request("a", tokens_of(40), large, max_tokens=300))
    assert refusal.value.field == "kv.decode.budget"
    refuse(request("a", tokens_of(40), make_recipe(**SLOT), max_tokens=300))


def test_caps_bound_the_pages_of_what_is_refused():
    model = tiny("llama").model
    wanted = request("a", tokens_of(60), recipe("h2o"), max_tokens=400)
    done = tiny_models.prefill_all(model, [wanted])["a"]
    exact = 2 * 4  # 25 slots in each of four heads
    for pages in (exact - 1, exact):
        decode = DecodeEngine(model, tiny_models.new_pool(model, pages=pages))
        choice = Choice(wanted, 0, tiny_models.pieces(), frozenset())
        choice.accept(done.first[0])
        if pages < exact:
            with pytest.raises(InvalidRequest, match="lower max_tokens"):
                decode.add([choice], done.layout, tiny_models.packed(done))
            continue
        decode.add([choice], done.layout, tiny_models.packed(done))
        while not decode.idle:
            decode.step()
            decode.check()
        assert len(choice.generated) == 400


@pytest.mark.parametrize("decode", [*DECODE, "slot"])
def test_a_moved_sequence_that_evicts_goes_on_bit_by_bit(decode):
    model = short_context("llama") if decode == "slot" else tiny("llama").model
    wanted = make_recipe(**SLOT) if decode == "slot" else recipe(decode)
    done = prefilled(model, wanted, 40)
    stay, away = tiny_models.new_pool(model), tiny_models.new_pool(model)
    (row, eviction), meta = open_row(model, stay, done), done.layout.meta
    later = tokens_of(45, 5)
    for step, token in enumerate(later):
        text = [*tokens_of(40), *later[: step + 1]]
        _, buffer = take_snapshot(stay, row, meta, text, eviction)
        parsed = parse_snapshot(model.spec, buffer)
        assert parsed.meta.decoded
        moved = open_eviction(model.spec, wanted, parsed, buffer)
        other = restore(away, parsed, buffer, moved)
        there = decode_step(model, away, [other], [token], [40 + step], [moved])
        fork = stay.fork(row)
        forked = eviction.fork(fork)
        both = [row, fork]
        here = decode_step(model, stay, both, [token] * 2, [40 + step] * 2, [eviction, forked])
        assert torch.equal(there[0], here[0]) and torch.equal(here[0], here[1]), step
        assert held(moved) == held(eviction) == held(forked)
        away.close(other)
        stay.close(fork)
        if step % 9 == 0:  # and now and then the snapshot replaces the row itself
            stay.close(row)
            eviction, meta = open_eviction(model.spec, wanted, parsed, buffer), parsed.meta
            row = restore(stay, parsed, buffer, eviction)
            decode_step(model, stay, [row], [token], [40 + step], [eviction])
        stay.check()
        eviction.check(stay)
    stay.close(row)
    assert stay.use.used == away.use.used == 0


def test_forks_that_evict_different_tokens_leave_each_others_pages_alone():
    model = tiny("llama").model
    for decode in ("h2o", "h2o every 5", "snapkv"):
        done = prefilled(model, recipe(decode), 40)
        pool, lonely = tiny_models.new_pool(model), tiny_models.new_pool(model)
        row, eviction = open_row(model, pool, done)
        fork = pool.fork(row)
        rows, evictions = [row, fork], [eviction, eviction.fork(fork)]
        texts = [tokens_of(40, 1), tokens_of(40, 2)]
        logits = [
            decode_step(model, pool, rows, pair, [40 + step] * 2, evictions)
            for step, pair in enumerate(zip(*texts, strict=True))
        ]
        assert held(evictions[0]) != held(evictions[1])
        for b, text in enumerate(texts):
            alone, own = open_row(model, lonely, done)
            for step, token in enumerate(text):
                wanted = decode_step(model, lonely, [alone], [token], [40 + step], [own])
                assert torch.equal(wanted[0], logits[step][b]), (decode, b, step)
        pool.check()


def test_readers_of_one_cache_are_observed_as_one_group():
    model = tiny("gemma3n").model
    spec = model.spec
    layer = next(i for i, s in enumerate(spec.layers) if s.window is None and s.readers > 1)
    own = spec.layers[layer]
    for decode in ("h2o", "scissorhands"):
        done = prefilled(model, recipe(decode), 40)
        pool = tiny_models.new_pool(model)
        row, eviction = open_row(model, pool, done)
        pool.reserve_slot(np.array([row]))
        queries = [torch.randn(own.query_heads, 1, own.head_dim) for _ in range(own.readers)]
        key, value = (torch.randn(own.kv_heads, 1, own.head_dim) for _ in "kv")
        seen = []
        for mine in [[query] for query in queries] + [queries]:
            watch = StepWatch(pool, [eviction])
            port = DecodePort(pool, np.array([row]), watch)
            for reader, query in enumerate(mine):
                call = AttentionCall(layer, own.scale, None, 0.0, None, reader == 0, reader)
                port.attend(call, query, key, value)
            place = eviction.layers.tolist().index(layer)
            seen.append(watch.seen(0)[place, : own.kv_heads, :25].clone())
        *single, joined = seen
        wanted = torch.stack(single).mean(0) if decode == "h2o" else torch.stack(single).amax(0)
        torch.testing.assert_close(joined, wanted)


def test_a_prompt_without_its_rules_arrays_is_our_own_mistake():
    model = tiny("llama").model
    done = prefilled(model, tiny_models.FULL, 40)
    with pytest.raises(AssertionError, match="arrays"):
        open_eviction(model.spec, recipe(), done.layout, tiny_models.packed(done))
    plain = open_eviction(model.spec, tiny_models.FULL, done.layout, tiny_models.packed(done))
    assert not isinstance(plain, RowEviction)
