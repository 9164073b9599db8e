"""Prompt selection against golden vectors: every case of kvpress on tiny models, and the project's own canon.

Other codes and real weights are in test_policies_golden_parity.py.
"""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from golden_policies import (
    ATOL,
    GOLDEN,
    RTOL,
    Case,
    assert_same_sets,
    assert_scores,
    cases_of,
    golden_sets,
    kept_sets,
    load,
    policy,
    snapkv,
    view,
)
from policy_views import one_thread  # noqa: F401

from kernels.rotary import Rotation
from policies import Policy, make_recipe
from policies.budget import LayerShape, plan_budgets
from policies.critical import criticality


def kvpress(case: Case) -> Policy:
    """The recipe that means what a kvpress case did."""
    params, method = case["params"], case["method"]
    # kvpress pools per query head and then reduces; for average pooling the order does not matter, to rounding.
    press = {"order": "pool_reduce"}
    match method:
        case "SnapKV" | "KeyRerotation(SnapKV)" | "PyramidKV(SnapKV)":
            return snapkv(params, **press)
        case "AdaKV(SnapKV)":
            return snapkv(params, **press, heads="ada", alpha=params["alpha_safeguard"])
        case "CriticalKV(SnapKV)":
            return snapkv(params, **press, critical=True, critical_share=params["first_stage_ratio"])
        case "ObservedAttention":
            return policy("h2o", params["budget"], normalize="visible_count", recent=0)
        case "StreamingLLM" | "KeyRerotation(StreamingLLM)":
            return policy("streaming_llm", params["budget"], sinks=params["n_sink"])
        case "ExpectedAttention":
            return policy(
                "expected_attention",
                params["budget"],
                sinks=params["n_sink"],
                future=params["n_future_positions"],
                epsilon=params["epsilon"],
                covariance=params["use_covariance"],
                value_norm=params["use_vnorm"],
            )
    return policy({"TOVA": "tova", "Knorm": "knorm", "KeyDiff": "keydiff"}[method], params["budget"])


def rerotation(inputs: str) -> Rotation:
    arrays = load("prefill_tiny")[0]
    return Rotation(torch.from_numpy(arrays[f"{inputs}/inv_freq"]), arrays[f"{inputs}/k"].shape[-1])


def queries_of(case: Case, layer: int) -> np.ndarray:
    """What a case stores of the queries after RoPE; all of them where the method reads all."""
    arrays, inputs = load("prefill_tiny")[0], case["inputs"]
    if case["method"] == "ExpectedAttention":
        plain = torch.from_numpy(arrays[f"{inputs}/q_pre"][layer])
        return rerotation(inputs).rotate(plain, torch.arange(plain.shape[1])).numpy()
    stored = f"{inputs}/q" if f"{inputs}/q" in arrays else f"{inputs}/q_last"
    return arrays[stored][layer]


def test_golden_files_are_the_published_ones() -> None:
    lines = (GOLDEN / "SHA256SUMS").read_text().splitlines()
    sums = {name: digest for digest, name in map(str.split, lines)}
    present = list(GOLDEN.glob("*.npz"))
    wanted = {"edge_cases", "prefill_tiny", "prefill_official", "prefill_smollm2"}
    assert wanted <= {path.stem for path in present}
    for path in present:
        assert hashlib.sha256(path.read_bytes()).hexdigest() == sums[path.name]


def test_there_are_as_many_cases_as_expected() -> None:
    assert len(load("edge_cases")[1]) == 25
    assert len(cases_of("prefill_tiny")) == 65


@pytest.mark.parametrize("name", cases_of("prefill_tiny"))
def test_kvpress_keeps_the_same_tokens(name: str) -> None:
    arrays, cases = load("prefill_tiny")
    case = cases[name]
    inputs, params, chosen = case["inputs"], case["params"], kvpress(case)
    keys = arrays[f"{inputs}/k"]
    layers, heads, n, _ = keys.shape
    assert n == params["n"]
    for layer in range(layers):
        # Its PyramidKV has a ramp of its own (README): given as bands it is what a recipe asks for.
        budget = case.get("budgets_per_layer", [params["budget"]] * layers)[layer]
        seen = view(
            chosen,
            budget,
            queries_of(case, layer),
            keys[layer],
            arrays[f"{inputs}/v"][layer] if f"{inputs}/v" in arrays else None,
            index=layer,
            rotation=rerotation(inputs),
            weight=torch.from_numpy(arrays[f"{inputs}/o_proj"][layer])
            if f"{inputs}/o_proj" in arrays
            else None,
        )
        protected = chosen.protected(seen)
        scores = chosen.score(seen)
        if chosen.recipe.critical:
            scores = criticality(seen, scores, protected, chosen.recipe.critical_share)
        if f"{name}/scores" in arrays:
            compare_scores(case, scores, arrays[f"{name}/scores"][layer])
        golden = golden_sets(arrays, name, layer, heads)
        kept = kept_sets(chosen, seen)
        safe = set(torch.nonzero(protected)[:, 0].tolist())
        assert_same_sets(kept, golden, scores, safe, together=chosen.recipe.heads == "ada")
        if case["method"].startswith("KeyRerotation"):
            assert_rerotated_keys(name, layer, keys[layer], kept)


def compare_scores(case: Case, scores: torch.Tensor, golden: np.ndarray) -> None:
    n, window = scores.shape[-1], case["params"].get("window", 0)
    method = case["method"]
    if method in ("StreamingLLM", "KeyRerotation(StreamingLLM)"):
        return  # kvpress scores only say in and out
    end = n - max(window, method == "TOVA")  # what it always keeps it lifts above all scores
    # Scores of ObservedAttention come from eager attention, the stored queries and keys from sdpa (README).
    rtol = 1e-4 if method == "ObservedAttention" else RTOL
    assert_scores(scores[:, :end], golden[:, :end], rtol, 1e-8 if method == "ObservedAttention" else ATOL)


def assert_rerotated_keys(name: str, layer: int, keys: np.ndarray, kept: list[set[int]]) -> None:
    """Keys turned from their position to their slot, as slot positions hold them."""
    arrays, cases = load("prefill_tiny")
    rotation = rerotation(cases[name]["inputs"])
    for head, positions in enumerate(map(sorted, kept)):
        moved = torch.arange(len(positions)) - torch.tensor(positions)
        turned = rotation.rotate(torch.from_numpy(keys[head, positions]), moved)
        np.testing.assert_allclose(turned.numpy(), arrays[f"{name}/keys"][layer, head], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", cases_of("prefill_tiny", "PyramidKV(SnapKV)"))
def test_a_recipe_can_spell_the_ramp_of_kvpress_as_bands(name: str) -> None:
    budgets = load("prefill_tiny")[1][name]["budgets_per_layer"]
    bands = {str(layer): budget for layer, budget in enumerate(budgets)}
    params = load("prefill_tiny")[1][name]["params"]
    recipe = make_recipe(
        policy="snapkv", budget=params["budget"], window=params["window"], sinks=0, bands=bands
    )
    shapes = [LayerShape(layer, 2, 64) for layer in range(len(budgets))]
    assert list(plan_budgets(recipe, params["n"], shapes)) == budgets


@pytest.mark.parametrize("name", load("edge_cases")[1])
def test_edge_cases_match_exactly_ties_included(name: str) -> None:
    arrays, cases = load("edge_cases")
    params = cases[name]["params"]
    chosen = snapkv(params, sinks=params["sinks"])
    queries = arrays[f"{name}/q_last" if f"{name}/q_last" in arrays else f"{name}/q"]
    keys = arrays[f"{name}/k"]
    positions = np.arange(keys.shape[1])
    if f"{name}/valid" in arrays:  # we never see padding: a view holds the prompt's own tokens
        positions = np.flatnonzero(arrays[f"{name}/valid"])
        queries, keys = queries[:, positions], keys[:, positions]
    layer = view(chosen, params["budget"], queries, keys)
    assert layer.tokens == params["n"]
    if f"{name}/scores" in arrays:
        golden = arrays[f"{name}/scores"]
        rtol = cases[name].get("score_rtol", RTOL)
        assert_scores(chosen.score(layer)[:, : golden.shape[1]], golden, rtol)
    kept = [set(positions[sorted(row)].tolist()) for row in kept_sets(chosen, layer)]
    assert kept == golden_sets(arrays, name, 0, layer.kv_heads)
