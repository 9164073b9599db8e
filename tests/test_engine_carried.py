"""Snapshots that contradict their decode rule are refused when they are added; caps take no memory by themselves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tiny_models
import torch
from tiny_models import one_thread, pieces, request, tiny, tokens_of  # noqa: F401

from engine.batch import DecodeEngine
from engine.sequence import Choice
from engine.snapshot import SnapshotError, SnapshotLayout, parse_snapshot
from policies import make_recipe

DECODE = {
    "h2o": {"rule": "h2o", "budget": 24},
    "scissorhands": {"rule": "scissorhands", "budget": 24, "window": 20, "recent": 5, "every": 6},
    "streaming": {"rule": "streaming_llm", "budget": 24},
    "tova": {"rule": "tova", "budget": 24},
    "snapkv": {"rule": "snapkv", "budget": 24, "window": 8, "every": 7, "kernel": 5},
}
MOST = 30
INT32 = 2**31 - 1


def recipe(rule):
    positions = "slot" if rule == "streaming" else "absolute"
    return make_recipe(
        policy="snapkv", budget=24, window=8, kernel=5, decode=DECODE[rule], positions=positions
    )


def prefilled(asked, name="a", tokens=60):
    return tiny_models.prefill_all(
        tiny("llama").model,
        [request(name, tokens_of(tokens), asked, max_tokens=MOST, ignore_eos=True)],
    )[name]


def begin(engine, done):
    choice = Choice(done.job.request, 0, pieces(), frozenset())
    choice.accept(done.first[0])
    engine.add([choice], done.layout, tiny_models.packed(done))
    return choice


def snapshots(rule):
    """(generated ids, layout, packed bytes) of a prompt, and of the same sequence after nine steps."""
    model = tiny("llama").model
    done = prefilled(recipe(rule))
    engine = DecodeEngine(model, tiny_models.new_pool(model))
    choice = begin(engine, done)
    first = list(choice.generated)
    for _ in range(9):
        engine.step()
    out = engine.take_out("a", 0)
    return done, (
        (first, done.layout, tiny_models.packed(done)),
        (list(choice.generated), out.layout, out.buffer),
    )


def changed(arrays, name, value):
    """The arrays with the first number of one of them replaced."""
    array = arrays[name].clone()
    array.view(-1)[0] = value
    return {**arrays, name: array}


def wrong_arrays(arrays):
    """Ways of contradicting oneself that bytes and lengths do not show."""
    for name, array in arrays.items():
        yield {key: value for key, value in arrays.items() if key != name}
        yield {**arrays, name: array.unsqueeze(0).clone()}
        yield {**arrays, name: array[:-1].clone()}
        yield {**arrays, name: array.to(torch.float32 if array.dtype == torch.int32 else torch.int32)}
    yield {**arrays, "unknown": torch.zeros(2)}
    for value in (0, -1, INT32):
        yield changed(arrays, "caps", value)
    if "write" in arrays:
        for name in ("write", "clock"):
            for value in (-1, 2, INT32):
                yield changed(arrays, name, value)


def wrong_positions(positions, newest):
    for wrong in (newest + 1, -1):
        listed = positions[0, 0].copy()
        listed[3] = wrong
        yield {**positions, (0, 0): listed}


@pytest.mark.parametrize("rule", DECODE)
def test_a_snapshot_that_contradicts_its_rule_is_refused_and_others_go_on(rule):
    model = tiny("llama").model
    done, taken = snapshots(rule)
    engine = DecodeEngine(model, tiny_models.new_pool(model))
    neighbour = begin(engine, prefilled(recipe(rule), "b"))
    alone = DecodeEngine(model, tiny_models.new_pool(model))
    expected = begin(alone, prefilled(recipe(rule), "b"))
    refused = 0
    for ids, layout, buffer in taken:
        meta = layout.meta
        spoilt = [replace(meta, arrays=arrays) for arrays in wrong_arrays(meta.arrays)]
        spoilt += [
            replace(meta, positions=each) for each in wrong_positions(meta.positions, len(meta.tokens) - 1)
        ]
        for wrong in spoilt:
            own = SnapshotLayout(model.spec, wrong)
            raw = torch.zeros(own.nbytes, dtype=torch.uint8)
            own.write_metadata(raw)
            with pytest.raises(SnapshotError):
                engine.add(
                    [Choice(done.job.request, 0, pieces(), frozenset(), ids)],
                    parse_snapshot(model.spec, raw),
                    raw,
                )
            refused += 1
        engine.add([Choice(done.job.request, 0, pieces(), frozenset(), ids)], layout, buffer)
        engine.step()
        engine.check()
        engine.abort("a")
    while not engine.idle:
        engine.step()
    while not alone.idle:
        alone.step()
    assert refused > 30 and neighbour.generated == expected.generated


def test_arrays_without_a_rule_are_refused():
    model = tiny("llama").model
    done = prefilled(tiny_models.snapkv(20))
    meta = replace(done.layout.meta, arrays={"caps": torch.ones(2, 2, dtype=torch.int32)})
    layout = SnapshotLayout(model.spec, meta)
    choice = Choice(done.job.request, 0, pieces(), frozenset())
    choice.accept(done.first[0])
    with pytest.raises(SnapshotError, match="no rule"):
        DecodeEngine(model, tiny_models.new_pool(model)).add(
            [choice], layout, torch.zeros(layout.nbytes, dtype=torch.uint8)
        )


@pytest.mark.parametrize("rule", DECODE)
def test_a_cap_beyond_the_sequence_takes_no_memory_and_evicts_nothing(rule):
    model = tiny("llama").model
    wide = {**DECODE[rule], "budget": INT32}
    engine = DecodeEngine(model, tiny_models.new_pool(model))
    choice = begin(engine, prefilled(make_recipe(decode=wide)))
    plain = DecodeEngine(model, tiny_models.new_pool(model))
    expected = begin(plain, prefilled(tiny_models.FULL))
    engine.step()
    (eviction,) = (entry.eviction for entry in engine._running)
    assert eviction.state.slots <= 60 + MOST
    while not engine.idle:
        engine.step()
        engine.check()
    while not plain.idle:
        plain.step()
    assert choice.generated == expected.generated and len(choice.generated) == MOST


def test_spacing_takes_no_memory_either():
    model = tiny("llama").model
    often = make_recipe(policy="knorm", budget=20, decode={"rule": "h2o", "every": 65536})
    engine = DecodeEngine(model, tiny_models.new_pool(model))
    begin(engine, prefilled(often))
    engine.step()
    (eviction,) = (entry.eviction for entry in engine._running)
    assert eviction.state.slots <= 60 + MOST and np.all(eviction.state.caps == 20)


@pytest.mark.parametrize("rule", ["grow", "h2o", "streaming_llm", "tova"])
def test_a_head_whose_budget_others_take_goes_on_all_the_same(rule, monkeypatch):
    def favour_the_first_head(self, layer):
        return layer.keys.norm(dim=-1) + torch.tensor([[1e6], [0.0]])

    monkeypatch.setattr("policies.knorm.Knorm.score", favour_the_first_head)
    model = tiny("llama").model
    asked = make_recipe(policy="knorm", budget=20, sinks=0, heads="ada", alpha=0.0, decode=rule)
    done = prefilled(asked)
    least = int(rule != "grow")
    assert done.report.counts == ((40 - least, least),) * 2
    engine = DecodeEngine(model, tiny_models.new_pool(model))
    choice = begin(engine, done)
    while not engine.idle:
        engine.step()
        engine.check()
    assert len(choice.generated) == MOST


@pytest.mark.parametrize("rule", ["h2o", "scissorhands", "streaming", "tova"])
def test_a_snapshot_goes_on_with_more_tokens_than_were_asked_for_as_if_they_always_had_been(rule):
    model = tiny("llama").model
    asked = make_recipe(policy="snapkv", budget=80, window=8, kernel=5, decode={**DECODE[rule], "budget": 80})

    def started(most):
        wanted = request("a", tokens_of(60), asked, max_tokens=most, ignore_eos=True)
        done = tiny_models.prefill_all(model, [wanted])["a"]
        engine = DecodeEngine(model, tiny_models.new_pool(model))
        return wanted, engine, begin(engine, done)

    def run(engine, choice):
        while choice.finish_reason is None:
            engine.step()
        return choice.generated

    long, engine, choice = started(60)
    unbroken = run(engine, choice)
    _, engine, choice = started(15)
    for _ in range(10):
        engine.step()
    out = engine.take_out("a", 0)
    again = Choice(long, 0, pieces(), frozenset(), out.choice.generated)
    engine = DecodeEngine(model, tiny_models.new_pool(model))
    engine.add([again], out.layout, out.buffer)
    assert run(engine, again) == unbroken
