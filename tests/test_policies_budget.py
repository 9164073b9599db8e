"""Budgets per layer: exact sums, protected tokens always inside, bytes never above, and the published ramp."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from policies.budget import LayerShape, plan_budgets, pyramid
from policies.recipe import Recipe, RecipeError, make_recipe

GOLDEN = Path(__file__).parent / "golden"


def shapes(*heads: int, token_bytes: int = 256) -> list[LayerShape]:
    return [LayerShape(index, count, token_bytes) for index, count in enumerate(heads)]


def snapkv(**fields: object) -> Recipe:
    return make_recipe(**{"policy": "snapkv", "window": 8, "sinks": 2, **fields})


def bytes_of(budgets: tuple[int, ...], layers: list[LayerShape]) -> int:
    return sum(s.kv_heads * s.token_bytes * tokens for s, tokens in zip(layers, budgets, strict=True))


@pytest.mark.parametrize(
    ("recipe", "n", "budgets"),
    [
        (make_recipe(), 70, (70, 70, 70)),
        (snapkv(budget=64), 70, (64, 64, 64)),
        (snapkv(budget=64), 60, (60, 60, 60)),
        (snapkv(budget=0.5), 71, (36, 36, 36)),
        (snapkv(budget=0.01), 70, (10, 10, 10)),
        (snapkv(budget=0.01, spans=[[20, 25], [57, 66]], tail=3), 70, (20, 20, 20)),  # 7 are in the window
        (snapkv(budget=64, bands={"0": 1.0, "2-9": 16}), 70, (70, 64, 16)),
        (snapkv(budget=64, bands={"0-2": 0.01}), 70, (10, 10, 10)),
        (snapkv(budget=64, bands={"7-9": 16}), 70, (64, 64, 64)),
        (snapkv(budget=40, layers="pyramid", beta=4), 1000, (64, 40, 16)),  # 8 + 32 * (7/4, 1, 1/4)
        (snapkv(budget=40, layers="pyramid", beta=4), 60, (60, 40, 20)),  # no layer above the prompt
        (snapkv(budget=40, layers="pyramid", beta=100), 1000, (70, 40, 10)),  # none below the protected
        (snapkv(budget=12, layers="pyramid", beta=1000), 1000, (14, 12, 10)),
        (snapkv(budget=40, layers="pyramid"), 40, (40, 40, 40)),
        (snapkv(budget=0.5, layers="pyramid", beta=1), 100, (50, 50, 50)),
        (make_recipe(policy="h2o", budget=40, sinks=0, layers="pyramid", beta=4), 1000, (70, 40, 10)),
    ],
)
def test_budgets(recipe: Recipe, n: int, budgets: tuple[int, ...]) -> None:
    assert plan_budgets(recipe, n, shapes(2, 2, 2)) == budgets


def test_bands_go_by_the_layers_number_not_by_its_place_among_the_scored() -> None:
    layers = [LayerShape(index, 1, 256) for index in (5, 11, 17)]
    assert plan_budgets(snapkv(budget=64, bands={"0-4": 20, "10-16": 32}), 70, layers) == (64, 32, 64)
    assert plan_budgets(snapkv(budget=64), 70, []) == ()


@pytest.mark.parametrize(
    ("recipe", "field", "problem"),
    [
        (
            snapkv(budget=20, spans=[[20, 31]]),
            "budget",
            "20 tokens cannot hold window 8 + sinks 2 + spans 11",
        ),
        (snapkv(budget=64, bands={"1": 20}, spans=[[20, 31]]), "bands", "20 tokens cannot hold window 8"),
        (
            snapkv(budget="7000B", tail=5),
            "budget",
            "7000 bytes cannot hold window 8 + tail 5 + sinks 2 in every",
        ),
        (snapkv(budget="9kB", bands={"0": 1.0}), "budget", "9000 bytes cannot hold window 8"),
    ],
)
def test_what_cannot_hold_the_protected_tokens_of_this_prompt_is_refused(
    recipe: Recipe, field: str, problem: str
) -> None:
    with pytest.raises(RecipeError) as refused:
        plan_budgets(recipe, 70, shapes(1, 1, token_bytes=256))
    assert refused.value.field == field and problem in refused.value.problem
    assert "at least" in refused.value.valid


def test_a_budget_too_small_for_a_longer_prompt_keeps_a_short_one_whole() -> None:
    recipe = snapkv(budget=19, spans=[[10, 20]])
    assert plan_budgets(recipe, 19, shapes(1)) == (19,)
    assert plan_budgets(recipe, 22, shapes(1)) == (19,)  # the span and the window overlap
    with pytest.raises(RecipeError):
        plan_budgets(recipe, 29, shapes(1))


@pytest.mark.parametrize("refusal", [("7679B", False), ("7680B", True)])
def test_the_bytes_named_by_a_refusal_are_enough(refusal: tuple[str, bool]) -> None:
    text, fits = refusal
    layers = shapes(1, 2)
    if fits:
        assert plan_budgets(snapkv(budget=text), 70, layers) == (10, 10)
    else:
        with pytest.raises(RecipeError, match="at least 7680 bytes"):
            plan_budgets(snapkv(budget=text), 70, layers)


BUDGETS = st.integers(12, 400) | st.floats(0.01, 1.0)
LAYERS = st.lists(st.integers(1, 8), min_size=1, max_size=12)


@settings(deadline=None)
@given(budget=BUDGETS, n=st.integers(1, 500), layers=LAYERS, beta=st.integers(1, 40), tail=st.integers(0, 2))
def test_a_pyramid_spends_exactly_what_uniform_budgets_would(
    budget: int | float, n: int, layers: list[int], beta: int, tail: int
) -> None:
    uniform = plan_budgets(snapkv(budget=budget, tail=tail), n, shapes(*layers))
    recipe = snapkv(budget=budget, tail=tail, layers="pyramid", beta=beta)
    ramp = plan_budgets(recipe, n, shapes(*layers))
    assert len(set(uniform)) == 1 and sum(ramp) == sum(uniform)
    assert list(ramp) == sorted(ramp, reverse=True)
    assert all(min(n, 10 + tail) <= tokens <= n for tokens in ramp)
    steps = np.diff(ramp)
    assert steps.size == 0 or steps.max() - steps.min() <= 2  # a straight line, each end rounded


@settings(deadline=None)
@given(
    limit=st.integers(1, 2_000_000),
    n=st.integers(1, 500),
    layers=LAYERS,
    rule=st.sampled_from([{}, {"layers": "pyramid", "beta": 5}, {"bands": {"1": 0.5}}]),
)
def test_bytes_are_never_exceeded_and_used_up_to_one_token_per_head(
    limit: int, n: int, layers: list[int], rule: dict[str, object]
) -> None:
    wanted = shapes(*layers)
    try:
        budgets = plan_budgets(snapkv(budget=f"{limit}B", **rule), n, wanted)
    except RecipeError:
        least = plan_budgets(snapkv(budget=10, **rule), n, wanted)
        assert bytes_of(least, wanted) > limit
        return
    assert bytes_of(budgets, wanted) <= limit
    shared = [tokens for index, tokens in enumerate(budgets) if "bands" not in rule or index != 1]
    assume(shared and min(shared) < n)
    # One token more for every head would be too much (a pyramid's rounding may shift one between unequal layers).
    slack = 256 * (sum(layers) + (max(layers) * len(layers) if "layers" in rule else 0))
    assert bytes_of(budgets, wanted) + slack > limit


def test_more_bytes_never_mean_fewer_tokens() -> None:
    layers = shapes(1, 4, 2)
    plans = [plan_budgets(snapkv(budget=f"{kib}KiB"), 300, layers) for kib in range(20, 600, 7)]
    assert all(a <= b for one, other in pairwise(plans) for a, b in zip(one, other, strict=True))
    assert plans[-1] == (300, 300, 300) and plans[0] < plans[-1]


def test_the_ramp_is_kvpress_where_its_budgets_sum_to_what_was_asked_and_within_one_token_elsewhere() -> None:
    golden = np.load(GOLDEN / "prefill_tiny.npz")
    exact = 0
    table = golden["pyramid/n_keptpermille_window_beta_layers_sum_exact"].tolist()
    for (n, permille, window, beta, layers, total, _), row in zip(
        table, golden["pyramid/budgets"], strict=True
    ):
        theirs = row[row >= 0].tolist()
        mean = Fraction(n * permille, 1000)
        if len(set(theirs)) == 1:  # kvpress turns uniform where the ramp would leave the window
            continue
        ours = pyramid(mean, layers, beta, least=window, most=n)
        assert sum(ours) == int(mean * layers + Fraction(1, 2))
        assert np.abs(np.subtract(ours, theirs)).max() <= 1
        if sum(theirs) == total and sum(ours) == total:
            exact += 1
    assert exact >= 4


def test_the_ramp_of_kvcache_factory_differs_by_what_its_floored_step_overspends() -> None:
    golden = np.load(GOLDEN / "prefill_official.npz")
    table = golden["pyramid/n_budget_window_beta_layers_sum_exact"].tolist()
    for (n, budget, window, beta, layers, total, exact), row in zip(
        table, golden["pyramid/budgets"], strict=True
    ):
        theirs = row[row >= 0]
        recipe = make_recipe(
            policy="snapkv", budget=budget, window=window, sinks=0, layers="pyramid", beta=beta
        )
        ours = np.array(plan_budgets(recipe, n, shapes(*[1] * layers)))
        assert ours.sum() == layers * budget == exact
        if len(set(theirs.tolist())) == 1:  # n < 2 (B - W): theirs is uniform
            assert (theirs == budget).all()
            continue
        # Their step and their lowest layer are rounded down: each layer is off by at most one token per step.
        assert theirs.sum() == total >= exact - layers
        assert (np.abs(ours - theirs) <= np.arange(layers) + 1).all()
