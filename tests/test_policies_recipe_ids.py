"""Ids of recipes: pinned, equal exactly when recipes are, and recipes that come back from their fields."""

from __future__ import annotations

import json
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import Recipe, RecipeError, make_recipe
from policies.decode_recipe import DECODE_OPTIONS, DecodeRecipe
from policies.recipe import FIELDS
from policies.recipe_options import CONDITIONS, OPTIONS

SHARES = st.sampled_from([0.25, 0.5, 1.0])
RANGES = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 9)).map(lambda r: [r[0], r[0] + r[1]]), max_size=3
)
VALUES: dict[str, st.SearchStrategy[object]] = {
    "budget": st.sampled_from([800, 1.0, 0.5, 700, 701, "700B", "64MiB"]),
    "window": st.integers(1, 3),
    "kernel": st.sampled_from([1, 5, 13]),
    "pool": st.sampled_from(["avg", "max"]),
    "sinks": st.sampled_from([0, 1, 4]),
    "tail": st.integers(0, 2),
    "recent": st.sampled_from([0, 1, 1.0, 0.5, 10]),
    "group": st.sampled_from(["mean", "max"]),
    "order": st.sampled_from(["reduce_pool", "pool_reduce"]),
    "normalize": st.sampled_from(["visible_count", "none"]),
    "threshold": st.sampled_from(["uniform", 0.5, 0.9]),
    "future": st.sampled_from([1, 512]),
    "epsilon": st.sampled_from([0, 0.0, 0.01]),
    "covariance": st.booleans(),
    "value_norm": st.booleans(),
    "seed": st.integers(0, 2),
    "critical": st.booleans(),
    "critical_share": SHARES,
    "layers": st.sampled_from(["uniform", "pyramid"]),
    "beta": st.sampled_from([10, 20]),
    "bands": st.sampled_from([{}, {"0-1": 1.0}, {"0-1": 1}, {"1": 0.5, "0": 700}]),
    "heads": st.sampled_from(["uniform", "ada"]),
    "alpha": st.sampled_from([0, 0.2, 0.5]),
    "protect": st.sampled_from([[], ["code"], ["system", [0, 3]]]),
    "spans": RANGES,
    "structure": RANGES,
    "decode": st.fixed_dictionaries(
        {"rule": st.sampled_from(list(DECODE_OPTIONS))},
        optional={
            "budget": st.sampled_from([500, 501]),
            "recent": st.sampled_from([0.5, 1, 1.0]),
            "window": st.integers(31, 33),
            "every": st.sampled_from([1, 128, 250]),
            "normalize": st.sampled_from(["visible_count", "none"]),
            "threshold": st.sampled_from(["uniform", "now", 0.5]),
            "kernel": st.sampled_from([5, 13]),
            "pool": st.sampled_from(["avg", "max"]),
            "sinks": st.sampled_from([0, 4]),
        },
    ),
    "positions": st.sampled_from(["absolute", "slot"]),
}


@st.composite
def some_recipes(draw: st.DrawFn) -> Recipe:
    """A few random fields of a random policy; what does not go together is dropped, not avoided."""
    policy = draw(st.sampled_from(list(OPTIONS)))
    names = draw(st.lists(st.sampled_from(OPTIONS[policy]), max_size=5, unique=True))
    fields = {name: draw(VALUES[name]) for name in names}
    fields |= dict(CONDITIONS[name] for name in names if name in CONDITIONS)
    if "positions" in fields:
        fields["decode"] = {"rule": "streaming_llm", "budget": 500}
    if "decode" in fields:
        rule = fields["decode"]
        fields["decode"] = {k: v for k, v in rule.items() if k == "rule" or k in DECODE_OPTIONS[rule["rule"]]}
    try:
        return make_recipe(policy=policy, **fields)
    except RecipeError:
        return make_recipe(policy=policy)


def dumped(recipe: Recipe) -> dict[str, object]:
    """All fields but `protect`, told apart to the type of every number."""
    return {name: repr(getattr(recipe, name)) for name in FIELDS if name != "protect"}


def test_every_field_has_random_values_above() -> None:
    assert set(VALUES) == set(FIELDS) - {"policy"}


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
        ({"policy": "snapkv", "budget": "64MiB", "tail": 5}, "snapkv:b67108864B:w32:k13:avg:s4:t5"),
        ({"policy": "snapkv", "recent": 64, "group": "max"}, "snapkv:b1024:w32:k13:avg:s4:r64:gmax"),
        (
            {"policy": "snapkv", "order": "pool_reduce", "layers": "pyramid", "heads": "ada"},
            "snapkv:b1024:w32:k13:avg:s4:pool-first:pyramid20:ada0.2",
        ),
        ({"policy": "snapkv", "critical": True}, "snapkv:b1024:w32:k13:avg:s4:critical0.5"),
        (
            {"policy": "snapkv", "bands": {"2-15": 256, "0-1": 1.0}},
            "snapkv:b1024:w32:k13:avg:s4:bands0-1=1.0,2-15=256",
        ),
        ({"policy": "snapkv", "spans": [[0, 9]]}, "snapkv:b1024:w32:k13:avg:s4:p4e3218097e2f"),
        ({"policy": "h2o"}, "h2o:b1024:s4"),
        ({"policy": "h2o", "recent": 0.5, "normalize": "none"}, "h2o:b1024:s4:n-none"),
        ({"policy": "h2o", "recent": 16, "decode": "h2o"}, "h2o:b1024:s4:r16:d=h2o,r0.5,e1"),
        ({"policy": "scissorhands", "threshold": 0.9}, "scissorhands:b1024:w400:s4:th-0.9"),
        ({"policy": "tova"}, "tova:b1024:w1:s4"),
        (
            {"policy": "expected_attention", "epsilon": 0.01, "covariance": False, "future": 64},
            "expected_attention:b1024:s4:f64:eps0.01:no-covariance",
        ),
        ({"policy": "keydiff", "value_norm": None}, "keydiff:b1024:s4"),
        ({"policy": "random", "seed": 3}, "random:b1024:s4:seed3"),
        ({"policy": "sliding_window"}, "sliding_window:b1024"),
        (
            {"decode": {"rule": "streaming_llm", "budget": 64}, "positions": "slot"},
            "full:d=streaming_llm,b64:slot",
        ),
        (
            {"policy": "knorm", "sinks": 2, "decode": {"rule": "snapkv", "budget": 512, "sinks": 0}},
            "knorm:b1024:s2:d=snapkv,b512,w32,e128,k13,avg,s0",
        ),
        (
            {"decode": {"rule": "scissorhands", "budget": 99, "threshold": "now"}},
            "full:d=scissorhands,b99,w400,r10,e49,th-now",
        ),
    ],
)
def test_ids_never_change(fields: dict[str, object], recipe_id: str) -> None:
    assert make_recipe(**fields).recipe_id == recipe_id


@settings(deadline=None, max_examples=150)
@given(one=some_recipes(), other=some_recipes())
def test_ids_are_equal_exactly_when_all_fields_that_survivors_depend_on_are(
    one: Recipe, other: Recipe
) -> None:
    assert (one.recipe_id == other.recipe_id) == (dumped(one) == dumped(other))
    assert (one == other) == (one.recipe_id == other.recipe_id and one.protect == other.protect)
    if one == other:
        assert hash(one) == hash(other)


@settings(deadline=None, max_examples=150)
@given(one=some_recipes())
def test_fields_make_the_same_recipe_again_also_through_json_and_pickle(one: Recipe) -> None:
    again = make_recipe(**json.loads(json.dumps(one.as_fields())))
    assert again == one and dumped(again) == dumped(one) and again.protect == one.protect
    copy = pickle.loads(pickle.dumps(one))
    assert copy == one and copy.recipe_id == one.recipe_id


def test_one_token_and_the_whole_prompt_are_different_recipes() -> None:
    given = {"policy": "snapkv", "window": 1, "sinks": 0}
    assert make_recipe(budget=1, **given) != make_recipe(budget=1.0, **given)
    assert make_recipe(policy="h2o", recent=1) != make_recipe(policy="h2o", recent=1.0)
    assert DecodeRecipe("h2o", recent=1) != DecodeRecipe("h2o", recent=1.0)


def test_ids_cover_resolved_ranges_and_not_what_they_were_asked_by() -> None:
    plain = make_recipe(policy="snapkv")
    assert make_recipe(policy="snapkv", protect="code").recipe_id == plain.recipe_id
    spans, structure = (make_recipe(policy="snapkv", **{name: [[5, 9]]}) for name in ("spans", "structure"))
    assert len({plain.recipe_id, spans.recipe_id, structure.recipe_id}) == 3
    merged = make_recipe(policy="snapkv", spans=[[7, 9], [5, 7], (6, 8)])
    assert merged.spans == ((5, 9),) and merged == spans


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("64MiB", "67108864B"),
        ("67108864B", "67108864B"),
        ("1.5GiB", "1610612736B"),
        ("500kB", "500000B"),
        ("123B", "123B"),
        ("0.1 KiB", "102B"),
        ("2TB", "2000000000000B"),
    ],
)
def test_byte_budgets_have_one_form(text: str, canonical: str) -> None:
    recipe = make_recipe(policy="snapkv", budget=text)
    assert recipe.budget == canonical
    assert recipe == make_recipe(policy="snapkv", budget=canonical)


def test_fields_given_as_none_count_as_not_given() -> None:
    assert make_recipe(policy="snapkv", budget=None, window=None) == make_recipe(policy="snapkv")
    assert make_recipe(policy=None, budget=None) == Recipe()
    assert make_recipe(**Recipe().as_fields()) == Recipe()


@settings(deadline=None, max_examples=150)
@given(recipe=some_recipes(), n=st.integers(0, 200), room=st.integers(0, 30))
def test_protected_tokens_fit_any_budget_that_holds_the_fixed_ones(recipe: Recipe, n: int, room: int) -> None:
    budget = min(n, recipe.protected_tokens(n) + room)
    ranges = recipe.protected_ranges(n, budget)
    assert sum(stop - start for start, stop in ranges) <= budget
    assert all(0 <= start < stop <= n for start, stop in ranges)


def test_a_zero_with_a_sign_is_no_other_number() -> None:
    plain, signed = (make_recipe(policy="snapkv", heads="ada", alpha=zero) for zero in (0.0, -0.0))
    assert plain == signed and plain.recipe_id == signed.recipe_id
