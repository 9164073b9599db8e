"""Decode rules against a slow simulation, and what holds for all of them."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from decoding_simulation import DenseRun, Simulation, Trace, decode_recipe, random_trace
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_views import one_thread  # noqa: F401

from kernels.rotary import Rotation
from policies.decode_recipe import DECODE_OPTIONS
from policies.decoding import RULES, DecodeState, LayerKeys, Victims, get_rule
from policies.recipe import Recipe, make_recipe

Survivors = dict[tuple[int, int], list[int]]

DECODES: dict[str, list[dict]] = {
    "h2o": [{}, {"normalize": "none", "recent": 3}, {"every": 5}, {"every": 3, "recent": 0}],
    "scissorhands": [
        {"window": 20, "recent": 3},
        {"window": 7, "recent": 2, "every": 4},
        {"window": 9, "recent": 4, "every": 2, "threshold": "now"},
        {"window": 16, "recent": 2, "every": 5, "threshold": 0.6},
    ],
    "streaming_llm": [{}],
    "sliding_window": [{}],
    "tova": [{}],
    "snapkv": [
        {"window": 4, "kernel": 3, "every": 5},
        {"window": 6, "kernel": 5, "every": 3, "pool": "max"},
        {"window": 8, "kernel": 1, "every": 1},
    ],
}
EVERY_DECODE = [(rule, more) for rule, options in DECODES.items() for more in options]


@st.composite
def situations(draw: st.DrawFn) -> tuple[Recipe, Trace, int, Survivors]:
    """A recipe, a trace, prompt tokens, and what its selection left: all, the same everywhere, or each head its own."""
    rule, more = draw(st.sampled_from(EVERY_DECODE))
    n, kept = draw(st.integers(14, 34)), draw(st.sampled_from(["all", "same", "ragged"]))
    sinks = draw(st.integers(0, 3)) if rule != "sliding_window" else 0
    spans = ((6, 8),) if draw(st.booleans()) else ()
    budget = draw(st.integers(12, 16))
    capped = draw(st.booleans())
    decode = more | ({"budget": budget} if capped else {})
    if rule == "sliding_window":
        recipe = decode_recipe(rule, "sliding_window", budget=budget, spans=spans, decode=decode)
    else:
        recipe = decode_recipe(rule, "random", budget=budget, sinks=sinks, spans=spans, decode=decode)
    trace = random_trace(
        draw(st.integers(0, 2**16)), n + 16, layers=1, group=draw(st.sampled_from([1, 3, 4, 8])),
        softcap=draw(st.sampled_from([0.0, 3.0])), sinks=draw(st.booleans()),
    )  # fmt: skip
    return recipe, trace, n, survivors_of(recipe, trace, n, kept, budget)


def survivors_of(recipe: Recipe, trace: Trace, n: int, kept: str, budget: int) -> Survivors:
    layers, heads = trace.k.shape[:2]
    rng = np.random.default_rng(n)
    safe = sorted(set(range(recipe.sinks)).union(*(range(*span) for span in recipe.spans)))
    rest = [token for token in range(n) if token not in safe]
    found, same = {}, rng.permutation(rest)
    for at in np.ndindex(layers, heads):
        count = {"all": n, "same": budget, "ragged": budget + int(rng.integers(-2, 3))}[kept]
        order = same if kept == "same" else rng.permutation(rest)
        found[at] = sorted([*safe, *order.tolist()[: min(n, count) - len(safe)]])
    return found


@settings(max_examples=120, deadline=None, derandomize=True)
@given(situations())
def test_each_step_holds_what_the_simulation_holds(situation: tuple[Recipe, Trace, int, Survivors]):
    recipe, trace, n, survivors = situation
    run, simulation = DenseRun(recipe, trace, n, survivors), Simulation(trace, recipe, n, survivors)
    protected = set(range(recipe.decode.sinks or 0)).union(*(range(*span) for span in recipe.spans))
    for step in range(17):
        if step:
            run.step()
            simulation.step()
        for at, head in simulation.heads.items():
            assert run.held(*at) == head.held, (step, at)
            assert protected <= set(head.held)
        state = run.state
        assert (state.counts <= state.caps + run.rule.every - 1).all()
        assert (state.lengths.numpy() <= state.capacity).all()


def started(rule: str, more: dict, *, seed: int = 1, n: int = 30, budget: int | None = 12) -> DenseRun:
    decode = {"budget": budget} | more
    policy = "h2o" if rule == "h2o" else "full"
    given = {"budget": 64, "sinks": 2, "recent": 1} if policy == "h2o" else {}
    return DenseRun(decode_recipe(rule, policy, decode=decode, **given), random_trace(seed, n + 40), n)


def reopened(run: DenseRun) -> DecodeState:
    """The state of a run, through what a snapshot carries."""
    used = int(run.state.lengths.max())
    carried = {name: tensor.clone() for name, tensor in run.state.export().items()}
    return run.rule.open(run.state.positions[..., :used].clone(), run.state.lengths.numpy(), run.n, carried)


def assert_same(state: DecodeState, other: DecodeState) -> None:
    """Bit for bit, as far as anything can be told from outside."""
    assert (state.position, state.clock, state.settled) == (other.position, other.clock, other.settled)
    for name in ("positions", "lengths", "write", "protected"):
        assert torch.equal(getattr(state, name), getattr(other, name)), name
    mine, others = state.export(), other.export()
    assert mine.keys() == others.keys()
    for name in mine:
        assert torch.equal(mine[name], others[name]), name


@pytest.mark.parametrize(("rule", "more"), EVERY_DECODE)
def test_a_snapshot_taken_anywhere_goes_on_as_if_nothing_had_happened(rule: str, more: dict):
    run, unbroken = started(rule, more), started(rule, more)
    for _ in range(14):
        run.state = reopened(run)
        run.state.check()
        assert run.rule.settle(run.state) is None
        assert torch.equal(run.step(), unbroken.step())
        assert_same(run.state, unbroken.state)


@pytest.mark.parametrize(("rule", "more"), EVERY_DECODE)
def test_what_snapshots_carry_has_names_and_types_that_they_take(rule: str, more: dict):
    run = started(rule, more)
    run.step()
    for name, array in run.state.export().items():
        assert re.fullmatch("[a-z_]{1,16}", name)
        assert array.dtype in (torch.float32, torch.bfloat16, torch.int32, torch.uint8)


@pytest.mark.parametrize(("rule", "more"), EVERY_DECODE)
def test_a_fork_does_not_see_what_the_other_does(rule: str, more: dict):
    run, alone = started(rule, more), started(rule, more)
    for _ in range(3):
        run.step()
        alone.step()
    fork = run.state.clone()
    slots = run.slots_k.clone(), run.slots_v.clone()
    for _ in range(9):
        run.step()
    run.state, (run.slots_k, run.slots_v) = fork, slots
    for _ in range(9):
        assert torch.equal(run.step(), alone.step())
        assert_same(run.state, alone.state)


@pytest.mark.parametrize("rule", ["h2o", "scissorhands", "streaming_llm", "tova"])
def test_heads_that_a_layer_lacks_hold_nothing_and_change_nothing(rule: str):
    recipe = started(rule, DECODES[rule][0]).rule.recipe
    run = DenseRun(recipe, random_trace(3, 60, layers=2, kv_heads=3), 20)
    narrow = DenseRun(recipe, random_trace(3, 60, layers=2, kv_heads=3), 20)
    # The second layer's last head goes missing, from the trace and from the state.
    lengths = narrow.state.lengths.numpy().copy()
    positions = narrow.state.positions.clone()
    carried = narrow.state.export()
    lengths[1, 2], positions[1, 2], carried["caps"][1, 2], carried["write"][1, 2] = 0, -1, 0, 0
    narrow.state = narrow.rule.open(positions, lengths, 20, carried)
    for _ in range(10):
        run.step()
        narrow.step()
        assert narrow.held(1, 2) == []
        for at in [(0, 0), (0, 1), (0, 2), *([] if rule == "tova" else [(1, 0), (1, 1)])]:
            assert narrow.held(*at) == run.held(*at)
        assert narrow.held(1, 0) and len(narrow.held(1, 0)) == len(run.held(1, 0))


@pytest.mark.parametrize(
    ("rule", "more"),
    [("snapkv", DECODES["snapkv"][0]), *(("scissorhands", m) for m in DECODES["scissorhands"])],
)
def test_layers_of_different_widths_are_decided_as_each_alone(rule: str, more: dict):
    recipe = decode_recipe(rule, decode={"budget": 16, **more})
    traces = [
        random_trace(11, 60, layers=1, kv_heads=3, group=2),
        random_trace(12, 60, layers=1, kv_heads=2, group=4),
    ]
    alone = [DenseRun(recipe, trace, 30) for trace in traces]
    parts = [
        run._prompt_arrays(0, [list(range(30))] * trace.k.shape[1])
        for run, trace in zip(alone, traces, strict=True)
    ]
    counts = np.array([[30, 30, 30], [30, 30, 0]], np.int32)
    positions = torch.where(torch.from_numpy(counts > 0).unsqueeze(-1), torch.arange(30), -1)
    both = alone[0].rule
    state = both.open(positions.int(), counts, 30, both.prompt_state(parts, counts, 30, range(2)))
    keys = [LayerKeys(run.k[0, :, :30].repeat(1, 2, 1)[:, : state.slots], run.trace.scale) for run in alone]
    state.apply(both.settle(state, keys if both.wants_keys(state) else None))
    state.check()
    for layer, run in enumerate(alone):
        heads = run.k.shape[1]
        assert torch.equal(state.positions[layer, :heads, : run.state.slots], run.state.positions[0])
        for name, array in run.state.arrays.items():
            assert torch.equal(state.arrays[name][layer, :heads], array[0])
    assert (state.positions[1, 2] == -1).all()


def test_of_equal_scores_the_older_token_leaves():
    trace = random_trace(5, 40)
    flat = trace._replace(k=np.zeros_like(trace.k))
    for rule, more in [("tova", {"sinks": 0}), ("h2o", {"normalize": "none", "recent": 0, "sinks": 0})]:
        run = DenseRun(decode_recipe(rule, decode={"budget": 10, **more}), flat, 10)
        if rule == "h2o":
            run.state.arrays["mass"].zero_()
            run.rule.observe = lambda state, attention: None  # type: ignore[method-assign]
        for step in range(8):
            run.step()
            assert run.held(0, 0) == list(range(step + 1, step + 11))


def test_where_protected_tokens_fill_the_cap_the_newest_leaves_after_it_was_seen():
    recipe = decode_recipe("h2o", "random", budget=16, spans=((4, 14),), sinks=4)
    # Budgets that move between heads may leave one no more than that.
    kept = {at: list(range(14)) for at in np.ndindex(2, 2)}
    run = DenseRun(recipe, random_trace(6, 40), 20, kept)
    assert (run.state.caps == 14).all()
    for _ in range(5):
        run.step()
        assert run.held(0, 0) == list(range(14))
    assert run.rule.capacity(run.state.caps).max() == 15


def rotated(seed: int, spans: tuple[tuple[int, int], ...]) -> DenseRun:
    recipe = decode_recipe(
        "streaming_llm", "random", budget=12, sinks=2, spans=spans, decode={"budget": 12}, positions="slot"
    )
    trace = random_trace(seed, 60)
    return DenseRun(recipe, trace, 20, rotation=Rotation(torch.tensor([1.0, 0.3, 0.1, 0.01]), 8))


@pytest.mark.parametrize("spans", [(), ((8, 11),)])
def test_in_slot_mode_cached_tokens_count_as_neighbours(spans: tuple[tuple[int, int], ...]):
    run = rotated(7, spans)
    for _ in range(12):
        run.step()
        for layer, head in np.ndindex(2, 2):
            positions, frames = run.state.positions[layer, head], run.state.frames[layer, head]
            held = positions >= 0
            ordered = frames[held][positions[held].argsort()].tolist()
            assert ordered == list(range(run.state.clock - len(ordered), run.state.clock))
            newest = positions.argmax()
            assert frames[newest] == run.state.clock - 1


def test_rebasing_a_stream_leaves_what_it_attends_to():
    run, plain = rotated(8, ()), rotated(8, ())
    for step in range(20):
        if step == 7:
            before = run.state.clock
            assert run.state.rebase() == before - 12
            assert run.state.clock == 12
            assert int(run.state.frames[run.state.positions >= 0].min()) == 0
        torch.testing.assert_close(run.step(), plain.step(), atol=1e-5, rtol=1e-4)
    assert run.held(0, 0) == plain.held(0, 0)


@pytest.mark.parametrize(
    ("given", "counts", "n", "caps"),
    [
        ({"budget": 64, "decode": {"rule": "h2o", "budget": 20}}, [[30, 30]], 30, [[20, 20]]),
        ({"budget": 64, "decode": "h2o"}, [[30, 30]], 30, [[64, 64]]),
        ({"budget": 64, "decode": "h2o"}, [[60, 68], [100, 0]], 100, [[60, 68], [100, 0]]),
        ({"budget": 0.5, "decode": "tova"}, [[50, 50], [100, 100]], 100, [[50, 50], [100, 100]]),
        ({"budget": 64, "bands": {"1-1": 200}, "decode": "tova"}, [[64, 64], [100, 100]], 100, [[64, 64], [200, 200]]),
    ],
)  # fmt: skip
def test_caps_are_the_decode_budget_or_what_the_selection_left(given: dict, counts: list, n: int, caps: list):
    rule = get_rule(make_recipe(policy="knorm", **given))
    assert rule.caps(np.array(counts, np.int32), n, range(len(counts))).tolist() == caps


def test_a_victim_leaves_each_full_head_and_no_other():
    recipe = decode_recipe("streaming_llm", "random", budget=12, sinks=1, decode={"rule": "streaming_llm"})
    run = DenseRun(recipe, random_trace(9, 40), 10)
    state = run.state
    state.caps = np.array([[10, 11], [10, 12]], np.int32)
    state.advance()
    change = run.rule.evict(state)
    assert isinstance(change, Victims)
    assert change.slots.tolist() == [[1, -1], [1, -1]]
    assert change.due.tolist() == [[True, False], [True, False]]


def test_every_rule_of_a_recipe_is_built_and_growing_asks_for_nothing():
    assert RULES.keys() == DECODE_OPTIONS.keys()
    grow = get_rule(make_recipe(policy="knorm", budget=64))
    assert not grow.evicts
    assert (grow.reduce, grow.query_window, grow.prompt_queries(100)) == (0, 0, 0)


@pytest.mark.parametrize("rule", ["h2o", "streaming_llm"])
def test_what_stays_fills_the_gaps_and_moves_no_further_unless_slots_are_to_stay_in_order(rule: str):
    run = started(rule, {"every": 4} if rule == "h2o" else {})
    state, before = run.state, run.state.positions.clone()
    change = run.rule.make_room(state, 4)
    index = state.apply(change)
    state.check()
    assert index is not None and (state.counts == 8).all()
    kept = index.clamp(min=0)
    assert torch.equal(state.positions, torch.where(index >= 0, before.gather(-1, kept), -1))
    for row, (at, held) in enumerate(zip(index.flatten(0, 1), state.positions.flatten(0, 1), strict=True)):
        if rule == "h2o":
            stayed = change.keep.flatten(0, 1)[row, :8]
            assert torch.equal(at[:8] == torch.arange(8), stayed) and not stayed.all()
        else:
            assert held[:8].tolist() == sorted(held[:8].tolist())
