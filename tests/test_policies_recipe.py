"""Recipes: what is accepted, what is refused and in which words, and the ids that are part of cache keys."""

from __future__ import annotations

import math
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import POLICIES, Recipe, RecipeError, get_policy, make_recipe
from policies.recipe import OPTIONS

RECIPES = st.builds(
    lambda budget, window, sinks, kernel, pool: make_recipe(
        policy="snapkv", budget=budget, window=window, sinks=sinks, kernel=kernel, pool=pool
    ),
    budget=st.integers(80, 10**6) | st.floats(0, 1, exclude_min=True),
    window=st.integers(1, 64),
    sinks=st.integers(0, 16),
    kernel=st.integers(0, 127).map(lambda k: 2 * k + 1),
    pool=st.sampled_from(["avg", "max"]),
)


@pytest.mark.parametrize(
    ("fields", "recipe_id"),
    [
        ({}, "full"),
        ({"policy": "full"}, "full"),
        ({"policy": "snapkv"}, "snapkv:b1024:w32:k13:avg:s4"),
        ({"policy": "snapkv", "budget": 512}, "snapkv:b512:w32:k13:avg:s4"),
        (
            {"policy": "snapkv", "budget": 64, "window": 8, "kernel": 7, "pool": "max", "sinks": 0},
            "snapkv:b64:w8:k7:max:s0",
        ),
        ({"policy": "snapkv", "budget": 0.25}, "snapkv:b0.25:w32:k13:avg:s4"),
        ({"policy": "snapkv", "budget": 1.0}, "snapkv:b1.0:w32:k13:avg:s4"),
        ({"policy": "snapkv", "budget": 1, "window": 1, "sinks": 0}, "snapkv:b1:w1:k13:avg:s0"),
    ],
)
def test_ids_never_change(fields: dict[str, object], recipe_id: str) -> None:
    assert make_recipe(**fields).recipe_id == recipe_id


@settings(deadline=None)
@given(one=RECIPES, other=RECIPES)
def test_ids_are_equal_exactly_when_recipes_are(one: Recipe, other: Recipe) -> None:
    assert (one.recipe_id == other.recipe_id) == (one == other)
    assert make_recipe(**one.as_fields()) == one


def test_fields_given_as_none_count_as_not_given() -> None:
    assert make_recipe(policy="snapkv", budget=None, window=None) == make_recipe(policy="snapkv")
    assert make_recipe(policy=None, budget=None) == Recipe()
    assert make_recipe(**Recipe().as_fields()) == Recipe()


@pytest.mark.parametrize(
    ("fields", "field", "valid"),
    [
        ({"policy": "h3o"}, "policy", "full, snapkv"),
        ({"policy": 3}, "policy", "full, snapkv"),
        ({"policy": ["snapkv"]}, "policy", "full, snapkv"),
        ({"policy": "snapkv", "windw": 3}, "windw", "policy, budget, window, kernel, pool, sinks"),
        ({"policy": "full", "budget": 512}, "budget", "no further field with 'full'"),
        ({"window": 16}, "window", "window with policy snapkv"),
        ({"policy": "full", "sinks": 4}, "sinks", "sinks with policy snapkv"),
        ({"policy": "snapkv", "budget": 35}, "budget", "at least 36 tokens"),
        ({"policy": "snapkv", "budget": 0}, "budget", "from 1 to"),
        ({"policy": "snapkv", "budget": -5}, "budget", "from 1 to"),
        ({"policy": "snapkv", "budget": 2**31}, "budget", "from 1 to"),
        ({"policy": "snapkv", "budget": True}, "budget", "whole number of tokens"),
        ({"policy": "snapkv", "budget": "512"}, "budget", "whole number of tokens"),
        ({"policy": "snapkv", "budget": 1.5}, "budget", "0 < f <= 1.0"),
        ({"policy": "snapkv", "budget": 0.0}, "budget", "0 < f <= 1.0"),
        ({"policy": "snapkv", "budget": -0.5}, "budget", "0 < f <= 1.0"),
        ({"policy": "snapkv", "budget": math.nan}, "budget", "0 < f <= 1.0"),
        ({"policy": "snapkv", "budget": math.inf}, "budget", "0 < f <= 1.0"),
        ({"policy": "snapkv", "kernel": 6}, "kernel", "an odd integer from 1 to 255"),
        ({"policy": "snapkv", "kernel": 0}, "kernel", "an odd integer"),
        ({"policy": "snapkv", "kernel": -3}, "kernel", "an odd integer"),
        ({"policy": "snapkv", "kernel": 10**9 + 1}, "kernel", "an odd integer"),
        ({"policy": "snapkv", "kernel": True}, "kernel", "an odd integer"),
        ({"policy": "snapkv", "kernel": 7.0}, "kernel", "an odd integer"),
        ({"policy": "snapkv", "window": 0}, "window", "an integer from 1 to 1024"),
        ({"policy": "snapkv", "window": 4096}, "window", "an integer from 1 to 1024"),
        ({"policy": "snapkv", "window": "32"}, "window", "an integer"),
        ({"policy": "snapkv", "sinks": -1}, "sinks", "an integer from 0"),
        ({"policy": "snapkv", "sinks": False}, "sinks", "an integer from 0"),
        ({"policy": "snapkv", "pool": "mean"}, "pool", "avg, max"),
        ({"policy": "snapkv", "pool": ["avg"]}, "pool", "avg, max"),
    ],
)
def test_a_wrong_recipe_is_refused_with_its_field_and_what_would_be_valid(
    fields: dict[str, object], field: str, valid: str
) -> None:
    with pytest.raises(RecipeError) as refused:
        make_recipe(**fields)
    assert refused.value.field == field
    assert valid in refused.value.valid
    assert repr(field) in str(refused.value) and valid in str(refused.value)


def test_the_constructor_refuses_what_make_recipe_refuses() -> None:
    with pytest.raises(RecipeError, match="'budget'"):
        Recipe("snapkv")
    with pytest.raises(RecipeError, match="'kernel'"):
        Recipe("snapkv", budget=512, kernel=4)
    with pytest.raises(RecipeError, match="'budget'"):
        Recipe("full", budget=512)
    with pytest.raises(RecipeError, match="'policy'"):
        Recipe("nothing")


def test_a_refusal_survives_pickling() -> None:
    with pytest.raises(RecipeError) as refused:
        make_recipe(policy="h3o")
    copy = pickle.loads(pickle.dumps(refused.value))
    assert (copy.field, copy.valid, str(copy)) == ("policy", refused.value.valid, str(refused.value))


@pytest.mark.parametrize(
    ("budget", "n", "tokens"),
    [
        (512, 0, 0),
        (512, 511, 511),
        (512, 512, 512),
        (512, 100_000, 512),
        (0.5, 1001, 501),  # half up
        (0.5, 1003, 502),
        (0.145, 1000, 145),
        (0.0145, 10_000, 145),
        (0.285, 300, 86),  # 85.5 as written, although 0.285 * 300 is 85.49999999999999 in binary
        (0.01, 1000, 36),  # never fewer than window + sinks
        (0.01, 20, 20),
        (1.0, 777, 777),
        (1e-300, 10**6, 36),
    ],
)
def test_budget_in_tokens(budget: float, n: int, tokens: int) -> None:
    assert make_recipe(policy="snapkv", budget=budget).budget_tokens(n) == tokens


def test_full_keeps_every_token() -> None:
    assert make_recipe().budget_tokens(12345) == 12345


def test_every_policy_that_a_recipe_may_name_exists() -> None:
    assert list(POLICIES) == list(OPTIONS)
    for name in POLICIES:
        recipe = make_recipe(policy=name)
        policy = get_policy(recipe)
        assert type(policy) is POLICIES[name] and policy.recipe == recipe
