"""Prefix reuse through the engine: cached prompts answer as cold ones, whatever happens to their blocks."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import tiny_models
import torch
from tiny_models import FULL, local_engine, one_thread, request, snapkv, tiny, tokens_of  # noqa: F401

from engine.prefill import PrefillEngine, PrefillJob, run_to_end
from engine.prefix import PrefixCache
from kv_tiers.at_rest import AtRest
from kv_tiers.books import SlotBooks
from kv_tiers.slab import Slab

MODEL = tiny("llama").model
BLOCK = MODEL.spec.blocks.nbytes


@pytest.fixture
def make_cache(tmp_path):
    """`make_cache(slots)` is a PrefixCache with an empty CPU tier; its books are checked at the end."""
    made, names = [], itertools.count()

    def make(slots=64, model=MODEL, **options):
        nbytes = model.spec.blocks.nbytes
        slab = Slab.create(tmp_path / f"{next(names)}.kvslab", slots * nbytes)
        cache = PrefixCache(model.spec, SlotBooks(slots, nbytes), slab, "test", **options)
        made.append(cache)
        return cache

    yield make
    for cache in made:
        cache.tier.check()
        stats = cache.tier.stats()
        assert (stats.read_leases, stats.write_leases, stats.pinned, stats.writing) == (0, 0, 0, 0)
        cache.slab.unlink()
        cache.slab.close()


def answer(wanted, cache=None, model=MODEL, **options):
    """(tokens, cached tokens) of one request."""
    done = local_engine(model, prefix=cache, **options).generate([wanted])[wanted.request_id]
    return done.tokens, done.prompt.cached_tokens


def prefilled(wanted, cache=None):
    """A finished prefill, its cached tokens loaded and its blocks stored as the service does."""
    engine = PrefillEngine(MODEL, chunk_tokens=64)
    space, cached = engine.open_workspace(wanted), 0
    if cache is not None:
        limit = len(wanted.prompt) - engine.must_compute(wanted)
        cached = cache.load(space, cache.keys(wanted.prompt, wanted.tenant), limit)
    engine.add(PrefillJob(wanted, space, cached))
    (done,) = run_to_end(engine)
    if cache is not None:
        cache.store(space, cache.keys(wanted.prompt, wanted.tenant))
    return done


def positions(done):
    return {place: rows.tolist() for place, rows in done.layout.meta.positions.items()}


def damage(cache, prompt, block, byte):
    """Flip a bit of a stored block."""
    key = cache.keys(prompt, None)
    lease = cache.tier.prepare_read(key[: block + 1], "vandal")
    cache.slab.view(lease.entries[block].offset, BLOCK)[byte] ^= 4
    cache.tier.complete_read(lease.id)


@pytest.mark.parametrize("length", [15, 16, 17, 32, 48])
@pytest.mark.parametrize("recipe", [FULL, snapkv(14)], ids=["full", "snapkv"])
def test_a_prompt_of_whole_blocks_sent_twice_computes_at_least_its_last_token(make_cache, length, recipe):
    cache, wanted = make_cache(), request("a", tokens_of(length), recipe)
    cold, cached = answer(wanted)
    assert cached == 0
    assert answer(wanted, cache) == (cold, 0)
    need = 1 if recipe is FULL else 8
    assert answer(wanted, cache) == (cold, (length - need) // 16 * 16)
    assert cache.counters.blocks_written == length // 16 == cache.tier.stats().visible
    assert answer(wanted, cache)[0] == cold


def test_tenants_never_see_each_others_blocks(make_cache):
    cache, prompt = make_cache(), tokens_of(50)
    answer(request("a", prompt, tenant="x"), cache)
    for stranger in ("y", None, ""):
        assert answer(request("a", prompt, tenant=stranger), cache)[1] == 0
    assert answer(request("a", prompt, tenant="x"), cache)[1] == 48


def test_models_never_see_each_others_blocks(make_cache):
    first, prompt = make_cache(), tokens_of(50)
    other = PrefixCache(tiny("llama", 1).model.spec, first.tier, first.slab, "other")
    answer(request("a", prompt), first)
    assert answer(request("a", prompt), other, tiny("llama", 1).model)[1] == 0
    assert not set(first.keys(prompt, None)) & set(other.keys(prompt, None))


def test_recipes_share_blocks_and_select_as_if_cold(make_cache):
    cache, prompt = make_cache(), tokens_of(150)
    prefilled(request("a", prompt), cache)
    written = cache.counters.blocks_written
    for recipe in (snapkv(30), snapkv(60, window=16), snapkv(30, sinks=0)):
        wanted = request("b", prompt, recipe)
        cold, warm = prefilled(wanted), prefilled(wanted, cache)
        assert warm.job.cached == (150 - recipe.window) // 16 * 16 > 0
        assert positions(warm) == positions(cold) != {}
        assert answer(wanted, cache)[0] == answer(wanted)[0]
    assert cache.counters.blocks_written == written == 150 // 16


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt_oss"])
def test_other_families_answer_as_cold(make_cache, family):
    model = tiny(family).model
    cache = make_cache(model=model)
    for recipe in (FULL, snapkv(30)):
        wanted = request("a", tokens_of(100), recipe, max_tokens=16)
        cold = answer(wanted, model=model)[0]
        assert answer(wanted, cache, model)[0] == cold
        assert answer(wanted, cache, model) == (cold, 96 if recipe is FULL else 80)


def test_cached_kv_is_the_same_bits(make_cache):
    cache, prompt = make_cache(), tokens_of(80)
    cold, warm = prefilled(request("a", prompt), cache), prefilled(request("a", prompt), cache)
    assert warm.job.cached == 64
    for layer in range(len(MODEL.spec.layers)):
        assert torch.equal(warm.job.workspace.keys[layer][:, :64], cold.job.workspace.keys[layer][:, :64])
        assert torch.equal(warm.job.workspace.values[layer][:, :64], cold.job.workspace.values[layer][:, :64])


@pytest.mark.parametrize("block", [0, 1, 3])
@pytest.mark.parametrize("byte", [0, 60, BLOCK - 100])
def test_a_corrupt_block_is_dropped_counted_and_recomputed(make_cache, block, byte):
    cache, wanted = make_cache(), request("a", tokens_of(70))
    cold = answer(wanted)[0]
    answer(wanted, cache)
    damage(cache, wanted.prompt, block, byte)
    found = cache.counters.tokens_found
    assert answer(wanted, cache) == (cold, 16 * block)
    assert cache.counters.blocks_corrupt == 1
    assert cache.counters.tokens_found - found == 16 * block
    assert answer(wanted, cache) == (cold, 64), "written anew"
    assert cache.counters.blocks_corrupt == 1


@pytest.mark.parametrize("block", [0, 2, 3])
def test_a_block_gone_between_lookup_and_read_costs_only_its_tail(make_cache, block):
    cache, wanted = make_cache(), request("a", tokens_of(70))
    cold = answer(wanted)[0]
    answer(wanted, cache)
    keys = cache.keys(wanted.prompt, None)
    assert cache.tier.longest_run(keys) == 4
    cache.tier.drop([keys[block]])
    assert answer(wanted, cache) == (cold, 16 * block)
    assert answer(wanted, cache) == (cold, 64)
    assert cache.counters.blocks_corrupt == 0


@pytest.mark.parametrize("slots", [1, 3])
def test_a_slab_too_small_for_a_prompt_is_still_right(make_cache, slots):
    cache = make_cache(slots)
    for seed in (0, 1, 0, 0, 1):
        wanted = request("a", tokens_of(90, seed))
        tokens, cached = answer(wanted, cache)
        assert tokens == answer(wanted)[0]
        assert cached <= 16 * slots


def test_a_load_never_keeps_what_it_may_not(make_cache):
    """The scorer's window is always computed: its queries are not in any block."""
    cache, prompt = make_cache(), tokens_of(64)
    prefilled(request("a", prompt), cache)
    for window in (1, 8, 16, 17, 48, 49, 63):
        done = prefilled(request("b", prompt, snapkv(63, window=window, sinks=0)), cache)
        assert done.job.cached == (64 - window) // 16 * 16


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 23, 24, 25, 40])
def test_short_prompts_are_kept_whole_and_long_ones_to_the_budget(make_cache, length):
    cache, recipe = make_cache(), snapkv(24, window=8)
    wanted = request("a", tokens_of(length), recipe)
    full = answer(request("a", tokens_of(length)))[0]
    for again in (None, cache, cache):
        done = prefilled(wanted, again)
        assert done.layout.kept_tokens == min(length, 24)
        assert int(done.layout.meta.counts.min()) == min(length, 24)
        for rows in positions(done).values():
            assert {0, 1, *range(length - 8, length)} <= set(rows)
        if length <= 24:
            assert answer(wanted, again)[0] == full


def test_kept_tokens_are_those_of_full_attention_layers():
    wanted = request("a", tokens_of(60), snapkv(12, window=4))
    kept = {}
    for family in ("llama", "gemma3", "mistral"):
        kept[family] = tiny_models.prefill_all(tiny(family).model, [wanted])["a"].layout.kept_tokens
    assert kept == {"llama": 12, "gemma3": 12, "mistral": 19}  # windows of 20 show 19 tokens to the next


def test_a_second_question_over_a_document_equals_its_cold_answer(make_cache):
    cache, recipe = make_cache(), snapkv(60)
    document = tokens_of(500)
    questions = [
        (*document, *tokens_of(13, 21)),
        (*document, *tokens_of(30, 22)),
        (*document, *tokens_of(13, 21)),
    ]
    seen = []
    for asked, cached in zip(questions, (0, 496, 496), strict=True):
        wanted = request("q", asked, recipe, max_tokens=16)
        warm, cold = prefilled(wanted, cache), prefilled(wanted)
        assert warm.job.cached == cached
        assert positions(warm) == positions(cold)
        assert answer(wanted, cache)[0] == answer(wanted)[0]
        seen.append(positions(warm))
    assert seen[0] == seen[2] != seen[1], "each question selects for itself"


def test_prompts_of_mixed_lengths_select_and_answer_together_as_alone(make_cache):
    requests = [request(str(n), tokens_of(n, n), snapkv(24), max_tokens=12) for n in (10, 50, 200)]
    alone = [(positions(prefilled(wanted)), answer(wanted)[0]) for wanted in requests]
    for chunk in (16, 64, 1024):
        done = tiny_models.prefill_all(MODEL, requests, chunk)
        cold = local_engine(MODEL, chunk=chunk).generate(requests)
        cache = make_cache()
        local_engine(MODEL, chunk=chunk, prefix=cache).generate(requests)
        warm = local_engine(MODEL, chunk=chunk, prefix=cache).generate(requests)
        for wanted, (kept, tokens) in zip(requests, alone, strict=True):
            name = wanted.request_id
            assert positions(done[name]) == kept
            assert cold[name].tokens == warm[name].tokens == tokens
        assert [warm[w.request_id].prompt.cached_tokens for w in requests] == [0, 32, 192]


def test_prompt_log_probabilities_compute_everything_and_equal_transformers(make_cache):
    cache, prompt = make_cache(), tokens_of(60)
    answer(request("a", prompt), cache)
    wanted = replace(request("a", prompt), prompt_logprobs=2)
    done = local_engine(MODEL, prefix=cache, chunk=17).generate([wanted])["a"]
    assert done.prompt.cached_tokens == 0
    first, *rest = done.prompt.prompt_logprobs
    truth = torch.log_softmax(tiny("llama").full_logits(prompt), -1)
    assert first is None and len(rest) == 59
    for place, found in enumerate(rest):
        assert found.token_id == prompt[place + 1]
        assert found.logprob == pytest.approx(float(truth[place, found.token_id]), abs=1e-4)
        assert [token for token, _ in found.top] == truth[place].topk(2).indices.tolist()


@pytest.mark.parametrize(("took_s", "left_s"), [(0.0, 9.0), (4.0, 5.0), (30.0, 0.0)])
def test_who_also_takes_lossy_blocks_waits_no_longer_than_all_of_it_is_worth(make_cache, took_s, left_s):
    now, worths = [100.0], []
    cache = make_cache(clock=lambda: now[0])
    look = cache.tier.prepare_read

    def slow(keys, owner, worth_s):
        now[0] += took_s
        worths.append(worth_s)
        return look(keys, owner, worth_s=worth_s)

    cache.tier.prepare_read = slow
    assert cache.open(cache.keys(tokens_of(64), None), 64, 9.0, AtRest.INT8) is None
    assert worths == [9.0, left_s]
