"""Recipes: what is accepted, what is refused and in which words, and what they protect."""

from __future__ import annotations

import math
import pickle

import pytest

from policies import POLICIES, Recipe, RecipeError, get_policy, make_recipe
from policies.decode_recipe import DecodeRecipe
from policies.recipe import merge_fields, register_options
from policies.recipe_options import DEFAULTS, OPTIONS


@pytest.mark.parametrize(
    ("fields", "field", "valid"),
    [
        ({"policy": "h3o"}, "policy", "full, snapkv"),
        ({"policy": 3}, "policy", "full, snapkv"),
        ({"policy": ["snapkv"]}, "policy", "full, snapkv"),
        ({"policy": "snapkv", "windw": 3}, "windw", "policy, budget, window, kernel, pool, sinks"),
        (
            {"policy": "full", "budget": 512},
            "budget",
            "decode, positions with 'full'; budget with policy snapkv",
        ),
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
        ({"policy": "snapkv", "budget": "64 apples"}, "budget", 'like "64MiB"'),
        ({"policy": "snapkv", "budget": "64kib"}, "budget", 'like "64MiB"'),
        ({"policy": "snapkv", "budget": "0.1B"}, "budget", 'like "64MiB"'),
        ({"policy": "snapkv", "budget": "9999999TiB"}, "budget", 'like "64MiB"'),
        ({"policy": "snapkv", "budget": 40, "tail": 5}, "budget", "at least 41 tokens"),
        ({"policy": "keydiff", "budget": 40, "recent": 40}, "budget", "at least 44 tokens"),
        ({"policy": "keydiff", "recent": 1.5}, "recent", "0 < f <= 1.0"),
        ({"policy": "keydiff", "recent": -1}, "recent", "from 0"),
        ({"policy": "keydiff", "window": 16}, "window", "window with policy snapkv, scissorhands, tova"),
        ({"policy": "sliding_window", "sinks": 4}, "sinks", "sinks with policy snapkv"),
        ({"policy": "snapkv", "normalize": "none"}, "normalize", "normalize with policy h2o"),
        ({"policy": "h2o", "normalize": "sum"}, "normalize", "visible_count, none"),
        ({"policy": "scissorhands", "threshold": 1.0}, "threshold", "between 0 and 1"),
        ({"policy": "scissorhands", "threshold": "now"}, "threshold", "uniform"),
        ({"policy": "expected_attention", "epsilon": math.nan}, "epsilon", "a number from 0.0"),
        ({"policy": "expected_attention", "covariance": 1}, "covariance", "true, false"),
        ({"policy": "random", "seed": 2**63}, "seed", "an integer from 0"),
        ({"policy": "snapkv", "alpha": 0.5}, "alpha", "heads 'ada'"),
        ({"policy": "snapkv", "beta": 5}, "beta", "layers 'pyramid'"),
        ({"policy": "snapkv", "critical_share": 0.1}, "critical_share", "critical True"),
        ({"policy": "snapkv", "heads": "ada", "alpha": 1.5}, "alpha", "a number from 0.0 to 1.0"),
        ({"policy": "snapkv", "bands": {"0-3": 64, "3-5": 64}}, "bands", "without overlap"),
        ({"policy": "snapkv", "bands": {"3-1": 64}}, "bands", "like"),
        ({"policy": "snapkv", "bands": {"all": 64}}, "bands", "like"),
        ({"policy": "snapkv", "bands": {"1": "64MiB"}}, "bands", "like"),
        ({"policy": "snapkv", "bands": {"1": 20}}, "bands", "at least 36 tokens"),
        ({"policy": "snapkv", "bands": [1, 2]}, "bands", "like"),
        ({"policy": "snapkv", "bands": {"1": 64}, "layers": "pyramid"}, "bands", "layers 'uniform'"),
        ({"policy": "snapkv", "spans": [[3, 3]]}, "spans", "start < stop"),
        ({"policy": "snapkv", "spans": [[3, True]]}, "spans", "start < stop"),
        ({"policy": "snapkv", "spans": "system"}, "spans", "token ranges"),
        ({"policy": "snapkv", "protect": [3]}, "protect", "start < stop"),
        ({"policy": "snapkv", "protect": ["x"] * 65}, "protect", "span names"),
        ({"policy": "snapkv", "protect": {"system": 1}}, "protect", "span names"),
        ({"policy": "snapkv", "positions": "slot"}, "positions", "streaming_llm, sliding_window"),
        ({"policy": "snapkv", "decode": "h2o", "positions": "slot"}, "positions", "streaming_llm"),
        ({"decode": "h2o"}, "decode.budget", "tokens to cache per kv head"),
        ({"decode": "h3o"}, "decode.rule", "grow, h2o, scissorhands"),
        ({"decode": 3}, "decode", "a rule's name"),
        ({"decode": {"rule": "h2o", "budgt": 3}}, "decode.budgt", "rule, budget, recent"),
        ({"decode": {"rule": "h2o", "kernel": 3}}, "decode.kernel", "kernel with rule snapkv"),
        ({"decode": {"rule": "tova", "budget": 4}}, "decode.budget", "at least 5"),
        ({"decode": {"rule": "snapkv", "budget": 35}}, "decode.budget", "at least 36"),
        ({"decode": {"rule": "h2o", "budget": 64, "every": 0}}, "decode.every", "an integer from 1"),
        ({"decode": {"rule": "h2o", "budget": 64, "recent": 1.5}}, "decode.recent", "0 < f <= 1.0"),
        (
            {"policy": "keydiff", "spans": [[2, 40]], "decode": {"rule": "h2o", "budget": 40}},
            "decode.budget",
            "at least 41",
        ),
        ({"policy": "expected_attention", "value_norm": False, "epsilon": 0.1}, "epsilon", "value_norm True"),
        ({"policy": "snapkv", "recent": 2000}, "budget", "at least 2004 tokens, or a smaller recent"),
        (
            {"decode": {"rule": "scissorhands", "budget": 4096, "every": 1}},
            "decode.every",
            "at least 7 tokens at once",
        ),
        (
            {"policy": "h2o", "budget": 4096, "decode": {"rule": "scissorhands", "every": 6}},
            "decode.every",
            "at least 7 tokens at once",
        ),
        (
            {"decode": {"rule": "scissorhands", "budget": 4096, "recent": 4089}},
            "decode.recent",
            "room for 7 tokens",
        ),
        (
            {
                "policy": "scissorhands",
                "budget": 4096,
                "heads": "ada",
                "alpha": 0.0,
                "decode": "scissorhands",
            },
            "decode.recent",
            "room for 7 tokens",
        ),
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
    assert make_recipe().protected_ranges(12345, 12345) == ()


@pytest.mark.parametrize(
    ("fields", "n", "budget", "ranges"),
    [
        ({"policy": "snapkv", "window": 8, "tail": 3}, 100, 50, ((0, 4), (89, 100))),
        ({"policy": "snapkv", "window": 8, "recent": 20}, 100, 50, ((0, 4), (80, 100))),
        ({"policy": "snapkv", "window": 8, "recent": 0.3}, 100, 50, ((0, 4), (85, 100))),
        ({"policy": "snapkv", "window": 8, "recent": 1.0}, 100, 50, ((0, 4), (54, 100))),
        ({"policy": "snapkv", "window": 8, "spans": [[2, 9], [60, 95]]}, 100, 50, ((0, 9), (60, 100))),
        ({"policy": "snapkv", "window": 8, "spans": [[2, 9]]}, 7, 50, ((0, 7),)),
        ({"policy": "h2o"}, 100, 51, ((0, 4), (75, 100))),
        ({"policy": "h2o", "recent": 0, "sinks": 0}, 100, 51, ()),
        ({"policy": "h2o", "recent": 0.29, "sinks": 0}, 200, 100, ((171, 200),)),  # as written, not 28.99…
        ({"policy": "scissorhands", "tail": 20}, 1000, 100, ((0, 4), (980, 1000))),
        ({"policy": "scissorhands"}, 1000, 100, ((0, 4), (990, 1000))),
        ({"policy": "tova", "recent": 0}, 1000, 100, ((0, 4),)),
        ({"policy": "tova"}, 1000, 100, ((0, 4), (999, 1000))),
        ({"policy": "keydiff"}, 1000, 100, ((0, 4),)),
        ({"policy": "sliding_window", "budget": 5}, 1000, 5, ()),
    ],
)
def test_protected_tokens(
    fields: dict[str, object], n: int, budget: int, ranges: tuple[tuple[int, int], ...]
) -> None:
    assert make_recipe(**fields).protected_ranges(n, budget) == ranges


def test_decode_rules_fill_in_their_defaults_and_take_the_recipes_sinks() -> None:
    assert make_recipe(policy="h2o", sinks=2, decode="h2o").decode == DecodeRecipe(
        "h2o", recent=0.5, every=1, normalize="visible_count", sinks=2
    )
    assert make_recipe(policy="h2o", decode={"rule": "h2o", "sinks": 0}).decode.sinks == 0
    assert make_recipe(policy="h2o", decode="sliding_window").decode.sinks == 0
    scissorhands = make_recipe(decode={"rule": "scissorhands", "budget": 101}).decode
    assert (scissorhands.window, scissorhands.recent, scissorhands.every) == (400, 10, 50)
    assert make_recipe(policy="h2o", decode="scissorhands").decode.every is None
    assert make_recipe(policy="h2o", decode={"rule": "grow", "budget": None}) == make_recipe(policy="h2o")
    assert (
        DecodeRecipe("h2o").recent_tokens(33) == 16 and DecodeRecipe("h2o", recent=5).recent_tokens(33) == 5
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"decode": {"rule": "scissorhands", "budget": 4096, "every": 7}},
        {"decode": {"rule": "scissorhands", "budget": 4096, "every": 1, "window": 64}},
        {"decode": {"rule": "scissorhands", "budget": 20, "every": 1}},
        {"decode": {"rule": "scissorhands", "budget": 2**31 - 1}},
        {"policy": "scissorhands", "budget": 4096, "heads": "ada", "decode": "scissorhands"},
    ],
)
def test_scissorhands_may_keep_sums_for_some_compressions_to_come(fields: dict[str, object]) -> None:
    assert make_recipe(**fields).decode.rule == "scissorhands"


def test_a_window_without_sinks_is_warned_about() -> None:
    assert make_recipe(policy="streaming_llm").warnings == ()
    assert "sliding_window" in make_recipe(policy="sliding_window").warnings[0]
    assert "streaming_llm" in make_recipe(policy="streaming_llm", sinks=0).warnings[0]
    told = make_recipe(policy="snapkv", decode={"rule": "sliding_window", "budget": 64}).warnings
    assert len(told) == 1 and "decode rule" in told[0]


@pytest.mark.parametrize(
    ("base", "given", "made"),
    [
        ({"policy": "snapkv", "budget": 9}, {"budget": None}, {"policy": "snapkv", "budget": 9}),
        ({"policy": "snapkv", "kernel": 5}, {"policy": "h2o"}, {"policy": "h2o"}),
        ({"policy": "snapkv", "budget": 9}, {"policy": "full"}, {"policy": "full"}),
        ({"heads": "ada", "alpha": 0.5}, {"heads": "uniform"}, {"heads": "uniform"}),
        ({"heads": "ada"}, {"heads": "uniform", "alpha": 1}, {"heads": "uniform", "alpha": 1}),
        ({"bands": {"0": 9}}, {"layers": "pyramid"}, {"layers": "pyramid"}),
        ({"decode": "streaming_llm", "positions": "slot"}, {"decode": "h2o"}, {"decode": "h2o"}),
    ],
)
def test_merging_drops_what_the_base_says_of_fields_that_no_longer_matter(
    base: dict[str, object], given: dict[str, object], made: dict[str, object]
) -> None:
    policy = {} if "policy" in base else {"policy": "snapkv"}
    assert merge_fields({**policy, **base}, given) == {**policy, **made}


def test_a_policy_of_a_users_own_brings_its_fields() -> None:
    name = "somewhere.else:Mine"
    with pytest.raises(ValueError, match="no such recipe fields: windw"):
        register_options(name, ("windw",))
    with pytest.raises(RecipeError, match="unknown policy"):
        make_recipe(policy=name)
    register_options(name, ("window", "seed"), {"window": 7})
    try:
        recipe = make_recipe(policy=name, seed=5, heads="ada")
        assert recipe.recipe_id == f"{name}:b1024:w7:s4:seed5:ada0.2" and recipe.kept_window == 7
        with pytest.raises(RecipeError, match="'kernel'"):
            make_recipe(policy=name, kernel=5)
    finally:
        del OPTIONS[name], DEFAULTS[name]
    assert hash(pickle.loads(pickle.dumps(recipe))) == hash(recipe)  # where nobody has loaded the policy


def test_every_policy_that_a_recipe_may_name_exists() -> None:
    assert list(POLICIES) == list(OPTIONS)
    for name in POLICIES:
        recipe = make_recipe(policy=name)
        policy = get_policy(recipe)
        assert type(policy) is POLICIES[name] and policy.recipe == recipe
