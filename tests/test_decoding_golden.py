"""Decode rules, step by step, against the golden runs of other people's code."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from decoding_simulation import DenseRun, Trace, decode_recipe
from numpy.typing import NDArray
from policy_views import one_thread  # noqa: F401

from kernels.rotary import Rotation
from policies.decoding import get_rule
from policies.recipe import Recipe

GOLDEN = np.load(Path(__file__).parent / "golden" / "decode_tiny.npz")
CASES = {case["name"]: case for case in json.loads(str(GOLDEN["meta"]))["cases"]}
RUNS = [name for name, case in CASES.items() if case["inputs"] != "none"]


def recipe_of(case: dict) -> Recipe:
    """The recipe that says what a golden case did. No sinks but StreamingLLM's own."""
    given, method = case["params"], case["method"]
    if method == "H2O":
        decode = {
            "budget": given["budget"],
            "recent": given["recent"],
            "normalize": given["normalize"],
            "sinks": 0,
        }
        # The golden prompt is whole until the first eviction: the budget of the prompt's policy is larger than it.
        return decode_recipe("h2o", "h2o", budget=200, recent=1, sinks=0, decode=decode)
    if method == "Scissorhands":
        threshold = {"row": "uniform", "now": "now"}[given["threshold"]]
        decode = {
            "budget": given["budget"], "window": given["history"], "recent": given["recent"], "every": given["drop"],
            "threshold": threshold, "sinks": 0,
        }  # fmt: skip
        return decode_recipe("scissorhands", decode=decode)
    if method == "TOVA":
        return decode_recipe("tova", decode={"budget": given["budget"], "sinks": 0})
    if method == "StreamingLLM":
        decode = {"budget": given["budget"], "sinks": given["n_sink"]}
        return decode_recipe("streaming_llm", decode=decode, positions=given["positions"])
    assert method == "sliding window"
    return decode_recipe("sliding_window", decode={"budget": given["window"]}, positions=given["positions"])


@cache
def trace(inputs: str, rotated: bool, note: str | None) -> Trace:
    suffix = "" if rotated else "_pre"
    q, k, v = (GOLDEN[f"{inputs}/{name}"].astype(np.float64) for name in (f"q{suffix}", f"k{suffix}", "v"))
    if note is not None:
        if "k[:, 0, :] = k[:, 0, :1]" in note:
            k[:, 0, :] = k[:, 0, :1]
        else:
            assert "k[:, :, :] = k[:, :, :1]" in note
            k[:, :, :] = k[:, :, :1]
    return Trace(q, k, v, q.shape[-1] ** -0.5)


def golden_sets(name: str, tokens: int) -> NDArray[np.bool_]:
    return np.unpackbits(GOLDEN[f"{name}/kept_bits"], axis=-1, count=tokens).astype(bool)


def found_sets(run: DenseRun, tokens: int) -> NDArray[np.bool_]:
    held = np.zeros((*run.k.shape[:2], tokens), bool)
    for layer, head in np.ndindex(*held.shape[:2]):
        held[layer, head, run.held(layer, head)] = True
    return held


@pytest.mark.parametrize("name", RUNS)
def test_every_step_holds_the_golden_tokens_and_gives_the_golden_output(name: str):
    case = CASES[name]
    recipe = recipe_of(case)
    slot = recipe.positions == "slot"
    inputs = trace(case["inputs"], not slot, case.get("note"))
    rotation = None
    if slot:
        rotation = Rotation(torch.from_numpy(GOLDEN[f"{case['inputs']}/inv_freq"]), inputs.q.shape[-1])
    n, steps, tokens = case["params"]["n"], case["params"]["steps"], inputs.q.shape[2]
    sets = golden_sets(name, tokens)
    outputs = GOLDEN.get(f"{name}/out")
    run = DenseRun(recipe, inputs, n, rotation=rotation)
    assert np.array_equal(found_sets(run, tokens), sets[0])
    score = GOLDEN.get(f"{name}/score") if case["method"] == "H2O" else None
    assert_sums(run, score, 0)
    for step in range(steps):
        out = run.step()
        assert np.array_equal(found_sets(run, tokens), sets[step + 1]), f"step {step}"
        if outputs is not None:
            np.testing.assert_allclose(out.numpy(), outputs[step], atol=1e-5, rtol=1e-4)
        assert_sums(run, score, step + 1)


def assert_sums(run: DenseRun, golden: NDArray[np.float32] | None, snapshot: int) -> None:
    """H2O's running sums are the golden ones where those are stored."""
    if golden is None:
        return
    score = golden[snapshot]
    for layer, head in np.ndindex(*score.shape[:2]):
        positions = run.state.positions[layer, head].numpy()
        held = positions >= 0
        mass = run.state.arrays["mass"][layer, head].numpy()[held]
        np.testing.assert_allclose(mass, score[layer, head, positions[held]], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in RUNS if f"{name}/low" in GOLDEN])
def test_scissorhands_decides_by_the_golden_counts_and_masses(name: str, monkeypatch: pytest.MonkeyPatch):
    case, seen = CASES[name], []
    inputs = trace(case["inputs"], True, case.get("note"))
    rule_type = type(get_rule(recipe_of(case)))
    score = rule_type._score
    monkeypatch.setattr(rule_type, "_score", lambda rule, state, keys: noted(rule, state, keys))

    def noted(rule, state, keys):
        arrays = (state.positions, state.arrays["low"][:, :, 0], state.arrays["mass"][:, :, 0])
        seen.append((state.position - state.n + 1, *(array.numpy().copy() for array in arrays)))
        return score(rule, state, keys)

    run = DenseRun(recipe_of(case), inputs, case["params"]["n"])
    for _ in range(case["params"]["steps"]):
        run.step()
    compared = 0
    golden_low, golden_mass = GOLDEN[f"{name}/low"], GOLDEN[f"{name}/mass"]
    for snapshot, positions, low, mass in seen:
        want_low, want_mass = golden_low[snapshot], golden_mass[snapshot]
        for layer, head in np.ndindex(*low.shape[:2]):
            held = positions[layer, head] >= 0
            at = positions[layer, head][held]
            if (want_low[layer, head, at] < 0).all():
                continue
            assert np.array_equal(low[layer, head][held], want_low[layer, head, at])
            np.testing.assert_allclose(
                mass[layer, head][held], want_mass[layer, head, at], rtol=1e-4, atol=1e-6
            )
            compared += 1
    assert compared == case["compressions"]


@pytest.mark.parametrize("index", range(len(GOLDEN["evict_for_space/length_coming"])))
def test_streaming_makes_room_for_coming_tokens_as_the_published_code_does(index: int):
    length, coming = GOLDEN["evict_for_space/length_coming"][index].tolist()
    given = CASES["evict_for_space"]["params"]
    decode = {"budget": given["n_sink"] + given["recent"], "sinks": given["n_sink"]}
    rule = get_rule(decode_recipe("streaming_llm", decode=decode))
    counts = np.array([[length]], np.int32)
    arrays = rule.prompt_state([{}], counts, length, [0])
    state = rule.open(torch.arange(length, dtype=torch.int32).view(1, 1, -1), counts, length, arrays)
    state.apply(rule.make_room(state, coming))
    held = state.positions[state.positions >= 0].tolist()
    assert held == np.flatnonzero(np.unpackbits(GOLDEN["evict_for_space/kept_bits"][index])).tolist()
