"""SnapKV against a naive float64 simulation, and what must hold for every selection (ALGORITHMS.md 9.4)."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import LayerView, Needs, Policy, Recipe, Selection, get_policy, make_recipe

DIM = 8


def random_layer(
    seed: int, n: int, recipe: Recipe, group: int = 3, kv_heads: int = 2, dtype: torch.dtype = torch.float32
) -> LayerView:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(kv_heads, n, DIM, generator=generator).to(dtype)
    wanted = get_policy(recipe).queries_wanted(n)
    queries = torch.randn(kv_heads * group, wanted, DIM, generator=generator).to(dtype) * 2
    return LayerView(0, keys, keys, queries, scale=DIM**-0.5)


def simulate_scores(layer: LayerView, recipe: Recipe) -> np.ndarray:
    """float64 [Hk, N]; protected positions score +inf."""
    assert layer.queries is not None
    q, k = layer.queries.double().numpy(), layer.keys.double().numpy()
    kv_heads, n, _ = k.shape
    group, window = q.shape[0] // kv_heads, q.shape[1]
    prefix = n - window
    scores = np.full((kv_heads, n), math.inf)
    for h in range(kv_heads):
        mass = np.zeros(n)
        for g in range(group):
            for w in range(window):
                seen = prefix + w + 1
                logits = k[h, :seen] @ q[h * group + g, w] * layer.scale
                if layer.softcap:
                    logits = layer.softcap * np.tanh(logits / layer.softcap)
                weights = np.exp(logits - logits.max())
                mass[:seen] += weights / weights.sum() / (group * window)
        for j in range(recipe.sinks, prefix):
            low, high = max(0, j - recipe.kernel // 2), min(prefix, j + recipe.kernel // 2 + 1)
            near = mass[low:high]
            scores[h, j] = near.max() if recipe.pool == "max" else near.sum() / recipe.kernel
    return scores


def assert_keeps_the_best(kept: list[int], scores: np.ndarray, budget: int) -> None:
    """As many as asked for, and nothing dropped scores above anything kept, within fp32's reach."""
    assert len(kept) == budget
    dropped = np.delete(scores, kept)
    boundary = scores[kept].min()
    if len(dropped) and math.isfinite(boundary):
        tolerance = min(1e-6 * max(1.0, abs(boundary)), 1e-4 * abs(boundary))
        assert dropped.max() <= boundary + tolerance


def snapkv(**fields: object) -> Recipe:
    return make_recipe(policy="snapkv", **fields)


SMALL_RECIPES = st.builds(
    lambda window, sinks, free, kernel, pool: snapkv(
        window=window, sinks=sinks, budget=window + sinks + free, kernel=kernel, pool=pool
    ),
    window=st.integers(1, 12),
    sinks=st.integers(0, 5),
    free=st.integers(0, 20),
    kernel=st.sampled_from([1, 3, 7, 13]),
    pool=st.sampled_from(["avg", "max"]),
)
SEEDS = st.integers(0, 2**32)


@settings(max_examples=60, deadline=None)
@given(
    recipe=SMALL_RECIPES,
    seed=SEEDS,
    n=st.integers(1, 80),
    group=st.sampled_from([1, 3, 4, 8]),
    softcap=st.sampled_from([0.0, 2.0]),
)
def test_agrees_with_a_simulation_in_float64(
    recipe: Recipe, seed: int, n: int, group: int, softcap: float
) -> None:
    layer = replace(random_layer(seed, n, recipe, group), softcap=softcap)
    scores = simulate_scores(layer, recipe)
    policy = get_policy(recipe)
    selection = policy.select(layer)
    free = np.isfinite(scores)
    np.testing.assert_allclose(policy.score(layer).numpy()[free], scores[free], rtol=1e-5, atol=1e-8)
    for head in range(layer.kv_heads):
        assert_keeps_the_best(selection.head(head).tolist(), scores[head], min(n, recipe.budget_tokens(n)))


@settings(max_examples=80, deadline=None)
@given(recipe=SMALL_RECIPES, seed=SEEDS, n=st.integers(1, 80), ties=st.booleans())
def test_every_selection_is_ascending_in_range_within_budget_and_holds_the_protected(
    recipe: Recipe, seed: int, n: int, ties: bool
) -> None:
    layer = random_layer(seed, n, recipe)
    if ties:
        layer = replace(layer, keys=torch.ones_like(layer.keys))
    selection = get_policy(recipe).select(layer)
    kept = min(n, recipe.budget_tokens(n))
    assert selection.indices.dtype == selection.counts.dtype == torch.int64
    assert selection.indices.shape == (layer.kv_heads, kept) and not selection.ragged
    assert selection.counts.tolist() == [kept] * layer.kv_heads
    must = {*range(min(n, recipe.sinks)), *range(max(0, n - recipe.window), n)}
    for head in range(layer.kv_heads):
        row = selection.head(head).tolist()
        assert all(a < b for a, b in pairwise(row))
        assert must <= set(row) and row[0] >= 0 and row[-1] < n


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 47, 48, 49])
def test_prompts_around_window_and_budget_select_without_complaint(n: int) -> None:
    """CASES.md O-28: 1, 2, window-1 to window+1, budget-1 to budget+1, with normalised queries and keys."""
    recipe = snapkv(budget=48, window=16)
    layer = random_layer(n, n, recipe)
    assert layer.queries is not None and layer.queries.shape[1] == min(n, 16)
    normalised = replace(
        layer,
        keys=torch.nn.functional.normalize(layer.keys, dim=-1),
        queries=torch.nn.functional.normalize(layer.queries, dim=-1),
    )
    policy = get_policy(recipe)
    assert policy.keeps_all(n) == (n <= 48)
    for view in (layer, normalised):
        assert policy.score(view).isfinite().all()
        selection = policy.select(view)
        if n <= 48:
            assert selection.indices.tolist() == [list(range(n))] * 2
        else:
            assert_keeps_the_best(selection.head(0).tolist(), simulate_scores(view, recipe)[0], 48)


@settings(max_examples=25, deadline=None)
@given(recipe=SMALL_RECIPES, seed=SEEDS, n=st.integers(30, 80), order=st.permutations(range(4)))
def test_permuting_kv_heads_permutes_the_selection(
    recipe: Recipe, seed: int, n: int, order: list[int]
) -> None:
    layer = random_layer(seed, n, recipe, group=3, kv_heads=4)
    assert layer.queries is not None
    queries = layer.queries.view(4, 3, -1, DIM)[order].flatten(0, 1)
    permuted = replace(layer, keys=layer.keys[order], queries=queries)
    policy = get_policy(recipe)
    assert torch.equal(policy.select(permuted).indices, policy.select(layer).indices[order])


def test_heads_split_over_ranks_select_the_same_as_together() -> None:
    recipe = snapkv(budget=60, window=16)
    layer = random_layer(1, 200, recipe, group=4, kv_heads=4)
    assert layer.queries is not None
    policy = get_policy(recipe)
    ranks = [
        replace(layer, keys=layer.keys[half], queries=layer.queries[half.start * 4 : half.stop * 4])
        for half in (slice(0, 2), slice(2, 4))
    ]
    split = torch.cat([policy.select(rank).indices for rank in ranks])
    assert torch.equal(split, policy.select(layer).indices)


def test_when_everything_ties_the_latest_tokens_stay() -> None:
    recipe = snapkv(budget=30, window=8, kernel=1)
    layer = random_layer(2, 100, recipe)
    layer = replace(layer, keys=torch.ones_like(layer.keys))
    assert get_policy(recipe).select(layer).head(0).tolist() == [0, 1, 2, 3, *range(74, 100)]


def test_mass_inside_the_window_does_not_favour_its_neighbours() -> None:
    recipe = snapkv(budget=20, window=8, sinks=0, kernel=13)
    layer = random_layer(3, 60, recipe, group=1, kv_heads=1)
    assert layer.queries is not None
    queries = torch.zeros_like(layer.queries)
    queries[..., 0] = 8.0
    keys = torch.zeros_like(layer.keys)
    keys[:, 52:, 0] = 8.0  # the window attends almost only to itself
    keys[:, 10, 0] = 1.0  # and a little to this
    selection = get_policy(recipe).select(replace(layer, keys=keys, queries=queries))
    assert set(range(5, 16)) <= set(selection.head(0).tolist())


def test_a_bf16_prompt_selects_like_the_same_numbers_in_fp32() -> None:
    recipe = snapkv(budget=100)
    layer = random_layer(4, 400, recipe, dtype=torch.bfloat16)
    assert layer.queries is not None
    wide = replace(layer, keys=layer.keys.float(), queries=layer.queries.float())
    policy = get_policy(recipe)
    assert torch.equal(policy.select(layer).indices, policy.select(wide).indices)


def test_a_fraction_of_the_prompt_as_budget() -> None:
    recipe = snapkv(budget=0.25, window=8)
    layer = random_layer(5, 203, recipe)
    assert get_policy(recipe).select(layer).indices.shape == (2, 51)


def test_softcap_and_sinks_of_the_layer_reach_the_scores() -> None:
    recipe = snapkv(budget=40, window=8)
    policy = get_policy(recipe)
    layer = random_layer(6, 120, recipe)
    plain = policy.score(layer)
    assert not torch.equal(policy.score(replace(layer, softcap=1.0)), plain)
    assert not torch.equal(policy.score(replace(layer, sinks=torch.ones(6))), plain)


def test_full_keeps_everything_and_wants_no_queries() -> None:
    policy = get_policy(make_recipe())
    assert policy.needs is Needs.KEYS and policy.queries_wanted(100) == 0
    assert policy.keeps_all(1) and policy.keeps_all(10**6)
    keys = torch.randn(2, 70, DIM)
    layer = LayerView(0, keys, keys, None, scale=1.0)
    assert policy.select(layer).indices.tolist() == [list(range(70))] * 2
    assert policy.score(layer).shape == (2, 70)


def test_snapkv_says_which_queries_it_wants() -> None:
    policy = get_policy(snapkv(budget=100, window=16))
    assert policy.needs is Needs.LAST_QUERIES and policy.window == 16
    assert [policy.queries_wanted(n) for n in (1, 15, 16, 17)] == [1, 15, 16, 16]


class LatestPerHead(Policy):
    """Head h keeps its budget less h tokens, the latest ones: the smallest possible ragged policy."""

    needs = Needs.KEYS

    def score(self, layer: LayerView) -> torch.Tensor:
        return torch.arange(layer.tokens, dtype=torch.float32).expand(layer.kv_heads, -1)

    def keep(self, layer: LayerView, scores: torch.Tensor) -> torch.Tensor:
        return self.recipe.budget_tokens(layer.tokens) - torch.arange(layer.kv_heads)


def test_a_policy_with_a_budget_per_head_needs_no_other_interface() -> None:
    policy = LatestPerHead(snapkv(budget=10, window=2, sinks=1))
    keys = torch.zeros(3, 20, DIM)
    selection = policy.select(LayerView(0, keys, keys, None, scale=1.0))
    assert isinstance(selection, Selection) and selection.ragged
    assert selection.counts.tolist() == [10, 9, 8]
    for head, count in enumerate((10, 9, 8)):
        assert selection.head(head).tolist() == [0, *range(21 - count, 20)]
