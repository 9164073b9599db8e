"""SnapKV against golden vectors: other people's code, and the project's canon (tests/golden/README.md)."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kernels.select import pool_scores, select_topk
from kernels.window import window_scores
from policies import LayerView, Policy, get_policy, make_recipe

GOLDEN = Path(__file__).parent / "golden"
RTOL_SCORES = 1e-5
ATOL_SCORES = 1e-9

Case = dict[str, Any]


@cache
def load(file: str) -> tuple[dict[str, np.ndarray], dict[str, Case]]:
    with np.load(GOLDEN / file) as archive:
        arrays = {name: archive[name] for name in archive.files}
    cases = json.loads(str(arrays["meta"]))["cases"]
    return arrays, {case["name"]: case for case in cases}


def named(file: str, method: str, *, granularity: str | None = None) -> list[str]:
    cases = load(file)[1].values()
    return [
        case["name"]
        for case in cases
        if case["method"] == method and granularity in (None, case["params"].get("granularity"))
    ]


def snapkv(params: Case, sinks: int) -> Policy:
    pool = params["pool"].removesuffix("pool")
    return get_policy(
        make_recipe(
            policy="snapkv",
            budget=params["budget"],
            window=params["window"],
            kernel=params["kernel"],
            pool=pool,
            sinks=sinks,
        )
    )


def view(queries: np.ndarray, keys: np.ndarray, policy: Policy, layer: int = 0) -> LayerView:
    """A prompt as long as `keys` [Hk, N, D]; `queries` holds at least its last window."""
    k = torch.from_numpy(keys)
    wanted = policy.queries_wanted(k.shape[1])
    q = torch.from_numpy(queries)[:, queries.shape[1] - wanted :]
    return LayerView(layer, k, k, q, scale=k.shape[2] ** -0.5)


def golden_sets(arrays: dict[str, np.ndarray], name: str, layer: int, heads: int) -> list[set[int]]:
    flat, off = arrays[f"{name}/kept_flat"], arrays[f"{name}/kept_off"]
    rows = range(layer * heads, (layer + 1) * heads)
    return [set(flat[off[row] : off[row + 1]].tolist()) for row in rows]


def assert_same_set(kept: list[int], golden: set[int], scores: torch.Tensor, protected: set[int]) -> None:
    """Equal sets, but for positions that score within the README's tolerance of the boundary."""
    assert len(set(kept)) == len(kept) == len(golden)
    differing = set(kept) ^ golden
    if not differing:
        return
    boundary = min(float(scores[j]) for j in kept if j not in protected)
    tolerance = min(1e-6 * max(1.0, abs(boundary)), 1e-4 * abs(boundary))
    assert all(abs(float(scores[j]) - boundary) <= tolerance for j in differing), differing


def check_case(
    arrays: dict[str, np.ndarray], name: str, policy: Policy, layers: list[LayerView], score_factor: float
) -> None:
    params = policy.recipe
    for index, layer in enumerate(layers):
        prefix = layer.tokens - params.window
        selection = policy.select(layer)
        scores = policy.score(layer)
        if f"{name}/scores" in arrays and prefix > 0:
            golden = arrays[f"{name}/scores"][index][:, :prefix]
            np.testing.assert_allclose(
                scores[:, :prefix].numpy() * score_factor, golden, rtol=RTOL_SCORES, atol=ATOL_SCORES
            )
        protected = set(range(prefix, layer.tokens))
        golden_kept = golden_sets(arrays, name, index, layer.kv_heads)
        for head in range(layer.kv_heads):
            assert_same_set(selection.head(head).tolist(), golden_kept[head], scores[head], protected)


def test_golden_files_are_the_published_ones() -> None:
    lines = (GOLDEN / "SHA256SUMS").read_text().splitlines()
    sums = {name: digest for digest, name in map(str.split, lines)}
    present = list(GOLDEN.glob("*.npz"))
    assert {"edge_cases.npz", "prefill_tiny.npz", "prefill_official.npz"} <= {path.name for path in present}
    for path in present:
        assert hashlib.sha256(path.read_bytes()).hexdigest() == sums[path.name]


def test_there_are_as_many_cases_as_expected() -> None:
    assert len(load("edge_cases.npz")[1]) == 25
    assert len(named("prefill_tiny.npz", "SnapKV")) == 16
    assert len(named("prefill_official.npz", "SnapKV")) == 12


@pytest.mark.parametrize("name", load("edge_cases.npz")[1])
def test_edge_cases_match_exactly_ties_included(name: str) -> None:
    arrays, cases = load("edge_cases.npz")
    params = cases[name]["params"]
    policy = snapkv(params, params["sinks"])
    queries = arrays[f"{name}/q_last" if f"{name}/q_last" in arrays else f"{name}/q"]
    keys = arrays[f"{name}/k"]
    positions = np.arange(keys.shape[1])
    if f"{name}/valid" in arrays:  # we never see padding: a view holds the prompt's own tokens
        positions = np.flatnonzero(arrays[f"{name}/valid"])
        queries, keys = queries[:, positions], keys[:, positions]
    layer = view(queries, keys, policy)
    assert layer.tokens == params["n"]

    selection = policy.select(layer)

    if f"{name}/scores" in arrays:
        golden = arrays[f"{name}/scores"]
        scores = policy.score(layer)[:, : golden.shape[1]].numpy()
        rtol = cases[name].get("score_rtol", RTOL_SCORES)
        np.testing.assert_allclose(scores, golden, rtol=rtol, atol=ATOL_SCORES)
    for head, kept in enumerate(golden_sets(arrays, name, 0, layer.kv_heads)):
        assert positions[selection.head(head).numpy()].tolist() == sorted(kept)


@pytest.mark.parametrize("name", named("prefill_tiny.npz", "SnapKV"))
def test_kvpress_keeps_the_same_tokens(name: str) -> None:
    arrays, cases = load("prefill_tiny.npz")
    params, inputs = cases[name]["params"], cases[name]["inputs"]
    policy = snapkv(params, sinks=0)
    k = arrays[f"{inputs}/k"]
    q = arrays[f"{inputs}/q" if f"{inputs}/q" in arrays else f"{inputs}/q_last"]
    assert k.shape[2] == params["n"]
    layers = [view(q[i], k[i], policy, i) for i in range(len(k))]
    check_case(arrays, name, policy, layers, score_factor=1.0)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in named("prefill_official.npz", "SnapKV", granularity="kv_head")
        if load("prefill_official.npz")[1][name]["params"].get("group_reduce") in ("mean", "sum")
    ],
)
def test_kvcache_factory_per_kv_head_keeps_the_same_tokens(name: str) -> None:
    arrays, cases = load("prefill_official.npz")
    params = cases[name]["params"]
    policy = snapkv(params, sinks=0)
    n = params["n"]
    layers = [view(arrays["q"][i][:, :n], arrays["k"][i][:, :n], policy, i) for i in range(2)]
    # Official code sums over window rows (and over the group where it says so); neither changes a ranking.
    summed_heads = 4 if params["group_reduce"] == "sum" else 1
    check_case(arrays, name, policy, layers, score_factor=params["window"] * summed_heads)


@pytest.mark.parametrize("name", named("prefill_official.npz", "SnapKV", granularity="query_head"))
def test_official_code_per_query_head_keeps_the_same_tokens(name: str) -> None:
    """No recipe selects per query head; the kernels beneath reproduce the published code."""
    arrays, cases = load("prefill_official.npz")
    params = cases[name]["params"]
    window, budget, pool = params["window"], params["budget"], params["pool"].removesuffix("pool")
    for layer in range(2):
        q, k = torch.from_numpy(arrays["q"][layer]), torch.from_numpy(arrays["k"][layer])
        prefix = k.shape[1] - window
        scores = window_scores(q[:, prefix:], k, k.shape[2] ** -0.5, group_reduce="none")[:, :prefix]
        pooled = pool_scores(scores, params["kernel"], pool)
        golden = arrays[f"{name}/scores"][layer]
        np.testing.assert_allclose(pooled.numpy() * window, golden, rtol=RTOL_SCORES, atol=ATOL_SCORES)
        kept = select_topk(pooled, budget - window)
        for head, golden_kept in enumerate(golden_sets(arrays, name, layer, q.shape[0])):
            assert_same_set(kept[head].tolist(), golden_kept - set(range(prefix, 384)), pooled[head], set())
