"""Prompt selection against the methods' own codes (prefill_official) and on real weights (prefill_smollm2).

Official codes select per query head: K and V repeated, a group is one head, and our policies do the same.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from golden_policies import (
    Case,
    assert_same_sets,
    assert_scores,
    cases_of,
    golden_sets,
    kept_sets,
    load,
    policy,
    sets_of_bits,
    snapkv,
    view,
)
from policy_views import one_thread  # noqa: F401

from kernels.select import select_topk
from policies import LayerView, Policy, make_recipe
from policies.budget import LayerShape, plan_budgets
from policies.snapkv import SnapKV

OFFICIAL = "prefill_official"
SMOLLM2 = "prefill_smollm2"
SCISSORHANDS = "Scissorhands (KVCache-Factory rule)"


class HistorySum(SnapKV):
    """KVCache-Factory's "Scissorhands": attention summed over the last rows. Only its `recent` tokens are kept.

    It is not the paper's rule (ALGORITHMS.md 3.6), so no recipe names it; the hooks of a policy express it.
    """

    def protected(self, layer: LayerView) -> torch.Tensor:
        recipe, position = self.recipe, torch.arange(layer.tokens)
        assert isinstance(recipe.recent, int)
        return (position < recipe.sinks) | (position >= layer.tokens - recipe.recent)


def official(case: Case) -> Policy:
    params, budget = case["params"], case["params"]["budget"]
    match case["method"]:
        case "SnapKV" | "PyramidKV" | "Ada-KV":
            return snapkv(params, group="max" if params.get("group_reduce") == "max" else "mean")
        case "H2O prefill":
            return policy("h2o", budget, normalize="none", recent=params["window"])
        case "StreamingLLM":
            return policy("streaming_llm", budget, sinks=params["n_sink"])
        case "key norm":
            return policy("knorm", budget)
    recent, history = params["recent_size"], params["history_window"]
    recipe = make_recipe(
        policy="snapkv", budget=budget, window=history, kernel=1, recent=recent, sinks=params["sink_size"]
    )
    return HistorySum(recipe)


def official_view(case: Case, chosen: Policy, layer: int) -> LayerView:
    arrays, params = load(OFFICIAL)[0], case["params"]
    q, k, v = (arrays[name][layer][:, : params["n"]] for name in "qkv")
    if params["granularity"] == "query_head":
        k, v = (np.repeat(array, len(q) // len(array), axis=0) for array in (k, v))
    budgets = case.get("budgets_per_layer")
    budget = budgets[params["layers"][layer]] if budgets else params["budget"]
    return view(chosen, budget, q, k, v)


def factor(case: Case) -> int:
    """Published codes sum over rows (and over a group, where they say so) where we take means."""
    params = case["params"]
    if case["method"] in ("SnapKV", "PyramidKV"):
        return params["window"] * (4 if params.get("group_reduce") == "sum" else 1)
    return params["history_window"] if case["method"] == SCISSORHANDS else 1


def test_there_are_as_many_cases_as_expected() -> None:
    assert len(cases_of(OFFICIAL)) == 26
    assert len(load(SMOLLM2)[1]) == 8


@pytest.mark.parametrize("name", [name for name in cases_of(OFFICIAL) if "adakv" not in name])
def test_the_methods_own_codes_keep_the_same_tokens(name: str) -> None:
    arrays, cases = load(OFFICIAL)
    case = cases[name]
    chosen = official(case)
    for layer in range(2):
        seen = official_view(case, chosen, layer)
        scores = chosen.score(seen)
        if f"{name}/scores" in arrays:
            golden = arrays[f"{name}/scores"][layer]
            assert_scores(scores[:, : golden.shape[1]] * factor(case), golden)
        safe = set(torch.nonzero(chosen.protected(seen))[:, 0].tolist())
        assert_same_sets(
            kept_sets(chosen, seen), golden_sets(arrays, name, layer, seen.kv_heads), scores, safe
        )


def official_ada_counts(
    scores: torch.Tensor, budget: int, window: int, floor: float, normalize: bool
) -> list[int]:
    """The published head budgets: each head rounded by itself, which does not always sum up (ALGORITHMS.md 4.2)."""
    heads, base = scores.shape[0], budget - window
    if normalize:  # by the share of a head's mass that an even budget would capture
        captured = scores.topk(base).values.sum(-1, keepdim=True) / scores.sum(-1, keepdim=True)
        scores = scores * captured
    best = scores.flatten().topk(heads * base).indices // scores.shape[1]
    counts = torch.bincount(best, minlength=heads).tolist()
    return [round(count * (1 - floor) + int(base * floor)) + window for count in counts]


@pytest.mark.parametrize("name", cases_of(OFFICIAL, "Ada-KV"))
def test_official_ada_keeps_the_same_tokens_given_its_own_rounding(name: str) -> None:
    """Scores are our policy's and sets our kernel's; the head budgets are exact in sum with us, so not those."""
    arrays, cases = load(OFFICIAL)
    case, params = cases[name], cases[name]["params"]
    chosen = official(case)
    for layer in range(2):
        seen = official_view(case, chosen, layer)
        scores, protected = chosen.score(seen), chosen.protected(seen)
        golden = arrays[f"{name}/scores"][layer]
        prefix = golden.shape[1]
        assert_scores(scores[:, :prefix], golden)
        rule = {key: params[key] for key in ("budget", "window", "floor", "normalize")}
        counts = official_ada_counts(scores[:, :prefix], **rule)
        assert counts == case["kept_per_head"][layer]
        rows = select_topk(scores, torch.tensor(counts), protected).tolist()
        kept = [set(row[:count]) for row, count in zip(rows, counts, strict=True)]
        safe = set(range(prefix, params["n"]))
        assert_same_sets(kept, golden_sets(arrays, name, layer, seen.kv_heads), scores, safe)


def test_the_pyramid_of_kvcache_factory_where_it_spends_what_it_was_given() -> None:
    case = load(OFFICIAL)[1]["kvcf_pyramid_ramp_b128"]
    assert case["sum_minus_exact"] == 0
    params = case["params"]
    recipe = make_recipe(
        policy="snapkv",
        budget=params["budget"],
        window=params["window"],
        sinks=0,
        layers="pyramid",
        beta=params["beta"],
    )
    shapes = [LayerShape(index, kv_heads=2, token_bytes=64) for index in range(params["num_hidden_layers"])]
    assert list(plan_budgets(recipe, params["n"], shapes)) == case["budgets_per_layer"]


@pytest.mark.parametrize("name", cases_of(SMOLLM2, "SnapKV", "AdaKV(SnapKV)"))
def test_snapkv_and_ada_on_real_weights(name: str) -> None:
    arrays, cases = load(SMOLLM2)
    case, params = cases[name], cases[name]["params"]
    shared = {"heads": "ada", "alpha": params["alpha_safeguard"]} if "Ada" in case["method"] else {}
    chosen = snapkv(params, order="pool_reduce", **shared)
    for place, layer in enumerate(arrays["layers"]):
        seen = view(chosen, params["budget"], arrays["q_last"][place], arrays["k"][place])
        scores = chosen.score(seen)
        prefix = seen.tokens - params["window"]
        assert_scores(scores[:, :prefix], arrays[case["scores"]][place][:, :prefix])
        golden = sets_of_bits(arrays, name, layer, seen.tokens)
        safe = set(range(prefix, seen.tokens))
        assert_same_sets(kept_sets(chosen, seen), golden, scores, safe, together=bool(shared))


@pytest.mark.parametrize("name", cases_of(SMOLLM2, "StreamingLLM"))
def test_streaming_on_real_weights(name: str) -> None:
    arrays, cases = load(SMOLLM2)
    params = cases[name]["params"]
    chosen = policy("streaming_llm", params["budget"], sinks=params["n_sink"])
    seen = view(chosen, params["budget"], arrays["q_last"][0], arrays["k"][0])
    kept = kept_sets(chosen, seen)
    layers = len(arrays[f"{name}/kept_bits"])
    assert [sets_of_bits(arrays, name, layer, seen.tokens) for layer in range(layers)] == [kept] * layers


@pytest.mark.parametrize("name", cases_of(SMOLLM2, "ObservedAttention"))
def test_h2o_on_real_weights(name: str) -> None:
    """One kv head of one layer is stored with all its queries."""
    arrays, cases = load(SMOLLM2)
    meta = json.loads(str(arrays["meta"]))
    layer, head = meta["observed_layer"], meta["observed_kv_head"]
    place = arrays["layers"].tolist().index(layer)
    params = cases[name]["params"]
    chosen = policy("h2o", params["budget"], normalize="visible_count", recent=0)
    keys = arrays["k"][place][head : head + 1]
    seen = view(chosen, params["budget"], arrays["q_full"], keys, pieces=[500, 500, 500])
    scores = chosen.score(seen)
    assert_scores(scores[0], arrays[cases[name]["scores"]][place, head])
    golden = sets_of_bits(arrays, name, layer, seen.tokens)[head]
    assert_same_sets(kept_sets(chosen, seen), [golden], scores, set())
