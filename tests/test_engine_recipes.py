"""Sixteen recipes in one batch: each gets the tokens and keeps the positions that it has alone."""

from __future__ import annotations

import pytest
import tiny_models
from tiny_models import one_thread, pieces, request, tokens_of  # noqa: F401

from engine.batch import DecodeEngine
from engine.sequence import Choice
from policies import make_recipe

# Two layers, four query heads over two kv heads, made for 128 positions: the streams below run past them.
MODEL = tiny_models.wrap_model(
    tiny_models.build_network("llama", max_position_embeddings=128), frozenset({1})
)

RECIPES = {
    "full": {},
    "snapkv": {"policy": "snapkv", "budget": 20, "window": 8, "kernel": 5},
    "pyramid": {"policy": "snapkv", "budget": 24, "window": 8, "layers": "pyramid", "beta": 3},
    "ada": {"policy": "snapkv", "budget": 20, "window": 8, "heads": "ada"},
    "critical": {"policy": "snapkv", "budget": 0.4, "window": 8, "critical": True},
    "h2o prompt": {"policy": "h2o", "budget": 24, "recent": 8},
    "tova prompt": {"policy": "tova", "budget": 18},
    "expected": {"policy": "expected_attention", "budget": 22},
    "keydiff": {"policy": "keydiff", "budget": "24KiB"},
    "h2o": {"policy": "h2o", "budget": 20, "decode": "h2o"},
    "h2o in blocks": {
        "policy": "knorm", "budget": 30, "decode": {"rule": "h2o", "budget": 22, "every": 6, "normalize": "none"},
    },
    "scissorhands": {
        "policy": "scissorhands", "budget": 20, "window": 16, "recent": 4,
        "decode": {"rule": "scissorhands", "window": 16, "recent": 4},
    },
    "streaming": {"policy": "streaming_llm", "budget": 20, "decode": "streaming_llm", "positions": "slot"},
    "sliding": {"policy": "full", "decode": {"rule": "sliding_window", "budget": 18}},
    "tova": {"policy": "snapkv", "budget": 26, "window": 8, "heads": "ada", "decode": "tova"},
    "snapkv again": {
        "policy": "random", "budget": 30,
        "decode": {"rule": "snapkv", "budget": 20, "window": 8, "every": 7, "kernel": 5},
    },
}  # fmt: skip
SAMPLED = {"h2o", "streaming", "ada", "snapkv again"}


def asked(name):
    """Prompts of different lengths; four requests have two sampled choices; the stream passes the context."""
    index = list(RECIPES).index(name)
    more = {"n": 2, "temperature": 1.0, "seed": index} if name in SAMPLED else {}
    most = 120 if name == "streaming" else 30
    prompt = tokens_of(40 + 3 * index, index)
    return request(name, prompt, make_recipe(**RECIPES[name]), max_tokens=most, **more)


def start(engine, done, known=None):
    """Queue a finished prompt, with `known` ids of each choice where they are made anew; → its choices."""
    wanted = done.job.request
    ids = known or [()] * wanted.sampling.n
    choices = [Choice(wanted, i, pieces(), MODEL.spec.end_tokens, given) for i, given in enumerate(ids)]
    if known is None:
        for choice, first in zip(choices, done.first, strict=True):
            choice.accept(first)
    engine.add(choices, done.layout, tiny_models.packed(done))
    return choices


def cached(engine, entry):
    """What a running choice's row holds: in every slot its position, or the number of slots where nothing evicts."""
    if entry.eviction is None:
        return engine.pool.counts(entry.row).tolist()
    return {place: rows.tolist() for place, rows in entry.eviction.positions().items()}


def run(engine, meddle=lambda step: None):
    """Step to the end; → the slots of every choice after its last step but one, and the most pages ever used."""
    final, step, peak = {}, 0, 0
    while not engine.idle:
        engine.step()
        engine.check()
        peak = max(peak, engine.use.used)
        for entry in engine._running:
            final[entry.request_id, entry.choice.choice] = cached(engine, entry)
        meddle(step)
        step += 1
    assert engine.use.used == 0
    return final, peak


@pytest.fixture(scope="module")
def prompts():
    """Prefilled in one batch of chunks."""
    return tiny_models.prefill_all(MODEL, [asked(name) for name in RECIPES], chunk=96)


@pytest.fixture(scope="module")
def alone(prompts):
    """Tokens and final slots of each request by itself, its prompt computed by itself too."""
    tokens, final = {}, {}
    for name in RECIPES:
        engine = DecodeEngine(MODEL, tiny_models.new_pool(MODEL, rows=24))
        choices = start(engine, tiny_models.prefill_all(MODEL, [asked(name)])[name])
        final.update(run(engine)[0])
        tokens[name] = [choice.generated for choice in choices]
    return tokens, final


def generated(choices):
    return {name: [choice.generated for choice in own] for name, own in choices.items()}


def test_sixteen_recipes_in_one_batch_are_each_what_they_are_alone(prompts, alone):
    assert len({done.job.request.recipe.recipe_id for done in prompts.values()}) == 16
    engine = DecodeEngine(MODEL, tiny_models.new_pool(MODEL, rows=24))
    choices = {name: start(engine, done) for name, done in prompts.items()}
    final, _ = run(engine)
    assert (generated(choices), final) == alone
    assert {len(own) for names in alone[0].values() for own in names} == {30, 120}
    evicting = [name for name in RECIPES if prompts[name].job.request.recipe.decode.evicts]
    assert len(evicting) == 7
    for name in evicting:
        slots = alone[1][name, 0]
        kept = prompts[name].layout.meta.positions
        assert all(set(slots[place]) != set(kept[place].tolist()) for place in kept), name


def test_preemption_in_mid_stream_changes_nothing(prompts, alone):
    engine = DecodeEngine(MODEL, tiny_models.new_pool(MODEL, rows=24))
    choices = {name: start(engine, done) for name, done in prompts.items()}

    def meddle(step):
        if engine.running and step < 60:
            engine.preempt(7 * step % engine.running)
            engine.check()

    final, _ = run(engine, meddle)
    assert (generated(choices), final) == alone
    assert engine.preemptions >= 50


def test_a_tight_pool_preempts_and_changes_nothing(prompts, alone):
    engine = DecodeEngine(MODEL, tiny_models.new_pool(MODEL, pages=110, rows=24))
    choices = {name: start(engine, done) for name, done in prompts.items()}
    final, peak = run(engine)
    assert (generated(choices), final) == alone
    assert engine.preemptions > 0 and peak <= 110


def test_choices_that_are_taken_out_go_on_elsewhere(prompts, alone):
    engines = [DecodeEngine(MODEL, tiny_models.new_pool(MODEL, rows=24)) for _ in "ab"]
    choices = {name: start(engines[0], done) for name, done in prompts.items()}
    final = {}
    for step in range(24):
        engines[0].step()
        if step >= 4 and engines[0].running:
            entry = engines[0]._running[5 * step % engines[0].running]
            taken = engines[0].take_out(entry.request_id, entry.choice.choice)
            engines[1].add([taken.choice], taken.layout, taken.buffer)
        engines[1].step()
        for engine in engines:
            engine.check()
    for engine in engines:
        final.update(run(engine)[0])
    assert (generated(choices), final) == alone


@pytest.mark.parametrize("cut", [1, 13, 29])
def test_a_lost_sequence_is_rebuilt_by_replaying_its_evictions(prompts, alone, cut):
    engine = DecodeEngine(MODEL, tiny_models.new_pool(MODEL, rows=24))
    choices = {
        name: start(engine, done, [own[: cut + i] for i, own in enumerate(alone[0][name])])
        for name, done in prompts.items()
        if name not in SAMPLED or cut < 29
    }
    final, _ = run(engine)
    assert generated(choices) == {name: alone[0][name] for name in choices}
    assert final == {key: slots for key, slots in alone[1].items() if key in final}
