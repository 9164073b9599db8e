"""Every scorer and every rule of selection against a naive float64 simulation (simulation.py), on random prompts."""

from __future__ import annotations

import numpy as np
import pytest
import simulation
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_views import (
    SCORED,
    one_thread,  # noqa: F401
    output_weight,
    protected_of,
    random_prompt,
    recipes,
    view_of,
)
from simulation import Prompt

from policies import LayerView, Policy, Recipe, get_policy, make_recipe
from policies.critical import criticality

SEEDS = st.integers(0, 2**32)
GROUPS = st.sampled_from([1, 3, 4, 8])


def simulate(prompt: Prompt, recipe: Recipe, layer: int) -> np.ndarray:
    match recipe.policy:
        case "snapkv":
            choice = (recipe.kernel, recipe.pool, recipe.group, recipe.order)
            return simulation.snapkv(prompt, recipe.window, recipe.tail, *choice)
        case "h2o":
            return simulation.h2o(prompt, recipe.normalize)
        case "scissorhands":
            return simulation.scissorhands(prompt, recipe.window, recipe.tail, recipe.threshold)
        case "tova":
            return simulation.tova(prompt, recipe.window, recipe.tail)
        case "expected_attention":
            choice = (recipe.future, recipe.epsilon, recipe.covariance, recipe.value_norm)
            return simulation.expected_attention(prompt, recipe.sinks, *choice)
        case "random":
            return simulation.random_scores(prompt, recipe.seed, layer)
    return {
        "keydiff": simulation.keydiff,
        "knorm": simulation.knorm,
        "streaming_llm": simulation.latest,
        "sliding_window": simulation.latest,
    }[recipe.policy](prompt)


def cut_prompt(
    seed: int, n: int, group: int, recipe: Recipe, **more: object
) -> tuple[Prompt, Policy, LayerView]:
    """A prompt longer than the recipe's budget, and the view of it."""
    assert isinstance(recipe.budget, int)
    prompt = random_prompt(seed, recipe.budget + n, group, **more)  # type: ignore[arg-type]
    policy = get_policy(recipe)
    return prompt, policy, view_of(prompt, policy, recipe.budget, index=seed % 5)


@pytest.mark.parametrize("name", SCORED)
@settings(max_examples=20, deadline=None)
@given(data=st.data(), seed=SEEDS, extra=st.integers(1, 30), group=GROUPS)
def test_scores_agree_with_the_simulation(
    name: str, data: st.DataObject, seed: int, extra: int, group: int
) -> None:
    recipe = data.draw(recipes(name, plain=True))
    softcap = 0.0 if name == "expected_attention" else data.draw(st.sampled_from([0.0, 2.0]))
    prompt, policy, view = cut_prompt(
        seed, extra, group, recipe, softcap=softcap, sinks=data.draw(st.booleans())
    )
    scores = policy.score(view)
    assert scores.shape == (view.kv_heads, view.tokens)
    expected = simulate(prompt, recipe, view.index)
    # A cosine near zero is a difference of numbers near one.
    atol = 1e-6 if name == "keydiff" else 1e-7
    np.testing.assert_allclose(scores.double().numpy(), expected, rtol=1e-5, atol=atol)


@pytest.mark.parametrize("name", SCORED)
@settings(max_examples=20, deadline=None)
@given(data=st.data(), seed=SEEDS, extra=st.integers(1, 30), group=GROUPS)
def test_selections_agree_with_the_simulation_exactly(
    name: str, data: st.DataObject, seed: int, extra: int, group: int
) -> None:
    """Given our scores, whatever they are: protected tokens, structure, heads that share, ties."""
    recipe = data.draw(recipes(name))
    _, policy, view = cut_prompt(seed, extra, group, recipe)
    budget, heads = view.budget, view.kv_heads
    scores = policy.score(view)
    if recipe.critical:
        scores = criticality(view, scores, policy.protected(view), recipe.critical_share)
    values = scores.double().numpy()
    hard = protected_of(recipe, view.tokens, budget)
    protected = [simulation.with_structure(values[h], hard, recipe.structure, budget) for h in range(heads)]
    counts = [budget] * heads
    if recipe.heads == "ada" and not policy.one_set:
        counts = simulation.ada_counts(values, protected, budget, recipe.alpha)

    selection = policy.select(view)

    assert selection.counts.tolist() == counts
    for h in range(heads):
        assert selection.head(h).tolist() == simulation.best(values[h], counts[h], protected[h])


@settings(max_examples=25, deadline=None)
@given(
    data=st.data(),
    name=st.sampled_from(["snapkv", "knorm", "keydiff", "scissorhands"]),
    seed=SEEDS,
    extra=st.integers(1, 30),
    group=GROUPS,
    share=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
)
def test_critical_scores_agree_with_the_simulation(
    data: st.DataObject, name: str, seed: int, extra: int, group: int, share: float
) -> None:
    """Scores that go below zero as well: there a large norm must not count against a token."""
    recipe = data.draw(recipes(name, plain=True))
    prompt, policy, view = cut_prompt(seed, extra, group, recipe)
    scores = policy.score(view)
    values = scores.double().numpy()
    protected = protected_of(recipe, view.tokens, view.budget)
    norms = simulation.output_norms(prompt, output_weight(prompt))
    expected = simulation.critical(values, norms, protected, view.budget, share)
    ours = criticality(view, scores, policy.protected(view), share).double().numpy()
    safe, free = np.isinf(expected), [j for j in range(view.tokens) if j not in protected]
    expected[safe] = torch.finfo(scores.dtype).max
    np.testing.assert_allclose(ours[:, free], expected[:, free], rtol=1e-5, atol=1e-6)


@settings(max_examples=20, deadline=None)
@given(
    seed=SEEDS,
    n=st.integers(1, 40),
    group=GROUPS,
    window=st.integers(1, 12),
    tail=st.integers(0, 5),
    sinks=st.booleans(),
)
def test_window_mass_is_the_attention_that_the_observed_queries_gave(
    seed: int, n: int, group: int, window: int, tail: int, sinks: bool
) -> None:
    """Of prompts shorter than window or tail, too."""
    prompt = random_prompt(seed, n, group, sinks=sinks)
    policy = get_policy(make_recipe(policy="snapkv", budget=50, window=window, tail=tail, sinks=0))
    expected = np.zeros((prompt.kv_heads, n))
    for h in range(prompt.kv_heads):
        for g in prompt.heads_of(h):
            for i in prompt.observed(window, tail):
                expected[h] += prompt.row(g, i) / prompt.group
    mass = view_of(prompt, policy, n).window_mass(window, tail)
    np.testing.assert_allclose(mass.numpy(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_a_score_that_is_no_number_drags_no_other_token_along(bad: float) -> None:
    recipe = make_recipe(policy="knorm", budget=20, sinks=0, critical=True, critical_share=0.0)
    _, policy, view = cut_prompt(4, 60, 3, recipe)
    scores, protected = policy.score(view), policy.protected(view)
    worst = scores.argmin(-1, keepdim=True)
    dropped = criticality(view, scores.scatter(-1, worst, bad), protected, 0.0)
    others = torch.ones_like(scores, dtype=torch.bool).scatter_(-1, worst, False)
    assert dropped[others].isfinite().all()
    assert len(dropped[others].unique()) == int(others.sum())
    assert not dropped.gather(-1, worst).isfinite().any()


def test_the_first_stage_of_critical_selection_is_safe_from_the_second() -> None:
    recipe = make_recipe(policy="knorm", budget=20, sinks=0, critical=True, critical_share=0.5)
    _, policy, view = cut_prompt(3, 60, 3, recipe)
    first = make_recipe(policy="knorm", budget=10, sinks=0)
    kept = policy.select(view).indices
    sure = get_policy(first).select(view_of(random_prompt(3, 80), get_policy(first), 10, index=3)).indices
    assert all(set(sure[h].tolist()) < set(kept[h].tolist()) for h in range(2))


@pytest.mark.parametrize("share", [(0, 3), (5, 5)])
def test_structural_tokens_hold_at_most_their_share(share: tuple[int, int]) -> None:
    """15 % of 40 tokens is 6: of a large structure the best six stay whatever else scores, of a small one all."""
    length, expected = share if share[0] else (60, 6)
    recipe = make_recipe(policy="streaming_llm", budget=40, sinks=4, structure=[(10, 10 + length)])
    prompt = random_prompt(0, 200)
    policy = get_policy(recipe)
    kept = set(policy.select(view_of(prompt, policy, 40)).head(0).tolist())
    middle = kept & set(range(10, 100))
    assert middle == set(range(10 + length - expected, 10 + length))
    assert len(kept) == 40


def test_another_seed_layer_or_head_keeps_another_random_set() -> None:
    prompt = random_prompt(0, 200)
    one, other = (get_policy(make_recipe(policy="random", budget=50, seed=seed)) for seed in (0, 2**40))
    sets = [
        policy.select(view_of(prompt, policy, 50, index=index)).head(head).tolist()
        for policy in (one, other)
        for index in (0, 1)
        for head in (0, 1)
    ]
    assert len({tuple(row) for row in sets}) == len(sets)
