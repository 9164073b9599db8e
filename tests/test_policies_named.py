"""Named recipes, and how a request's recipe finds its place on its prompt."""

from __future__ import annotations

import json

import pytest

from policies.budget import LayerShape, plan_budgets
from policies.named import NAMED, NamedRecipe, auto_recipe, choose_recipe
from policies.recipe import RecipeError, make_recipe
from policies.spans import PromptMap

CHAT = PromptMap(300, {"system": (0, 20), "question": (270, 295)}, tail=5)
SNAPKV = {"policy": "snapkv", "budget": 100}


@pytest.mark.parametrize("name", NAMED)
def test_every_name_gives_a_valid_recipe_on_any_prompt_and_says_what_it_is(name: str) -> None:
    assert NAMED[name].about.endswith(".") and NAMED[name].source
    assert json.loads(json.dumps(dict(NAMED[name].fields))) == dict(NAMED[name].fields)
    for n in (1, 30, 2000, 9000, 40_000, 200_000):
        recipe = choose_recipe({"recipe": name}, PromptMap(n, tail=min(n, 5)))
        budgets = plan_budgets(recipe, n, [LayerShape(index, 2, 256) for index in range(4)])
        assert all(min(n, 1) <= tokens <= n for tokens in budgets)


@pytest.mark.parametrize(
    ("name", "recipe_id"),
    [
        ("snapkv:paper", "snapkv:b1024:w32:k7:max:s0"),
        ("snapkv:kvpress", "snapkv:b0.5:w64:k5:avg:s0:pool-first"),
        ("snapkv:kvcache-factory", "snapkv:b128:w8:k7:max:s0"),
        ("pyramidkv:paper", "snapkv:b2048:w8:k7:max:s0:pyramid20"),
        ("adakv:paper", "snapkv:b1024:w32:k7:max:s0:ada0.2"),
        ("h2o:paper", "h2o:b0.2:s0:n-none:d=h2o,r0.5,e1,n-none"),
        ("h2o:kvpress", "h2o:b0.5:s0:r0"),
        ("streaming_llm:paper", "streaming_llm:b2048:s4:d=streaming_llm:slot"),
        ("scissorhands:paper", "scissorhands:b0.2:w400:s0:d=scissorhands,w400,r10"),
        ("tova:paper", "tova:b512:w1:s0:r0:d=tova"),
        ("expected_attention:kvpress", "expected_attention:b0.5:s4"),
        ("keydiff:kvpress", "keydiff:b0.5:s0"),
        ("knorm:kvpress", "knorm:b0.5:s0"),
        ("criticalkv:kvpress", "snapkv:b0.5:w64:k5:avg:s0:pool-first:critical0.5"),
        ("summarize", "snapkv:b0.4:w32:k13:avg:s4:r128:ada0.2"),
        ("qa", "snapkv:b0.15:w32:k13:avg:s4:ada0.2"),
        ("code", "snapkv:b0.3:w32:k13:avg:s4:r256:ada0.2"),
        ("chat", "snapkv:b0.5:w32:k13:avg:s4:r256:ada0.2"),
    ],
)
def test_what_names_stand_for_never_changes(name: str, recipe_id: str) -> None:
    assert choose_recipe({"recipe": name}, PromptMap(5000)).recipe_id == recipe_id


@pytest.mark.parametrize(
    ("tokens", "recipe_id"),
    [
        (1, "full"),
        (8192, "full"),
        (8193, "snapkv:b0.5:w32:k13:avg:s4"),
        (32768, "snapkv:b0.5:w32:k13:avg:s4"),
        (32769, "snapkv:b4096:w32:k13:avg:s4:ada0.2"),
        (131072, "snapkv:b4096:w32:k13:avg:s4:ada0.2"),
        (131073, "snapkv:b4096:w32:k13:avg:s4:ada0.2:d=snapkv,w32,e128,k13,avg"),
    ],
)
def test_auto_goes_by_the_prompts_length(tokens: int, recipe_id: str) -> None:
    assert make_recipe(**auto_recipe(tokens)).recipe_id == recipe_id
    assert choose_recipe({"recipe": "auto"}, PromptMap(tokens)).recipe_id == recipe_id


def test_auto_can_be_overridden_and_a_short_prompt_stays_whole_unless_a_budget_is_named() -> None:
    short, long = PromptMap(3000, CHAT.spans, tail=5), PromptMap(40_000, tail=5)
    kept = {"recipe": "auto", "protect": ["system"], "window": "question", "kernel": 5}
    assert choose_recipe(kept, short) == make_recipe()
    assert choose_recipe({"recipe": "auto", "budget": 200}, short).budget == 200
    assert choose_recipe({"recipe": "auto", "policy": "keydiff", "budget": 200}, short).policy == "keydiff"
    assert (
        choose_recipe({"recipe": "auto", "heads": "uniform"}, long).recipe_id
        == "snapkv:b4096:w32:k13:avg:s4:t5"
    )
    decode = {"rule": "h2o", "budget": 512}
    assert choose_recipe({"recipe": "auto", "decode": decode, "kernel": 5}, short).recipe_id == (
        "full:d=h2o,b512,r0.5,e1"
    )
    for wrong in ({"kernel": 4}, {"windw": 3}, {"protect": ["nobody"]}):
        with pytest.raises(RecipeError) as refused:
            choose_recipe({"recipe": "auto", **wrong}, short)
        assert refused.value.field == next(iter(wrong))


def test_fields_go_over_the_named_recipe_and_none_counts_as_not_given() -> None:
    recipe = choose_recipe(
        {"recipe": "snapkv:paper", "budget": 2048, "kernel": None, "sinks": 4}, PromptMap(5000)
    )
    assert recipe.recipe_id == "snapkv:b2048:w32:k7:max:s4"
    assert choose_recipe({"recipe": "code", "policy": "keydiff"}, PromptMap(5000)).recipe_id == (
        "keydiff:b0.3:s4:r256:ada0.2"
    )
    assert choose_recipe({"recipe": "streaming_llm:paper", "decode": "grow"}, PromptMap(5000)).recipe_id == (
        "streaming_llm:b2048:s4"
    )
    own = {"mine": NamedRecipe({"policy": "knorm", "budget": 64}, "Ours.", "here")}
    assert choose_recipe({"recipe": "mine"}, PromptMap(5000), own).recipe_id == "knorm:b64:s4"
    with pytest.raises(RecipeError, match="unknown recipe 'qa'; valid: mine"):
        choose_recipe({"recipe": "qa"}, PromptMap(5000), own)
    with pytest.raises(RecipeError, match="unknown policy 'h3o'"):
        choose_recipe({"recipe": "qa", "policy": "h3o"}, PromptMap(5000))
    assert choose_recipe({}, CHAT) == make_recipe()


@pytest.mark.parametrize(
    ("given", "window", "tail"),
    [
        ({}, 32, 5),
        ({"window": 8}, 8, 5),
        ({"window": 8, "tail": 0}, 8, 0),
        ({"window": "question"}, 25, 5),
        ({"window": [280, 290]}, 10, 10),
        ({"window": [280, 999]}, 20, 0),
    ],
)
def test_the_window_ends_before_the_templates_tail_or_where_it_is_told(
    given: dict[str, object], window: int, tail: int
) -> None:
    recipe = choose_recipe({**SNAPKV, **given}, CHAT)
    assert (recipe.window, recipe.tail) == (window, tail)
    assert recipe.protected_ranges(300, 100)[-1] == (300 - window - tail, 300)


def test_policies_that_observe_no_window_have_no_tail_of_their_own() -> None:
    assert choose_recipe({"policy": "keydiff", "budget": 100}, CHAT).tail == 0
    assert choose_recipe({"policy": "keydiff", "budget": 100, "tail": 7}, CHAT).tail == 7
    assert choose_recipe({"policy": "scissorhands", "budget": 100}, CHAT).tail == 5
    assert choose_recipe(SNAPKV, PromptMap(4, tail=4)).tail == 0


@pytest.mark.parametrize(
    ("given", "field", "said"),
    [
        ({"window": "answer"}, "window", "spans of this prompt (system, question)"),
        ({"window": [290, 290]}, "window", "start < stop"),
        ({"window": [300, 310]}, "window", "tokens from 0 to 299"),
        ({"window": "question", "tail": 3}, "tail", "no tail with a named window"),
        ({"window": True}, "window", "is not an integer"),
        ({"window": "question", "policy": "keydiff"}, "window", "window with policy snapkv"),
        ({"protect": ["answer"]}, "protect", "this prompt has no span 'answer'"),
        ({"protect": ["code"]}, "protect", "needs the text of every token"),
        ({"protect": [[400, 410]]}, "protect", "lies behind the prompt"),
        ({"budget": 40}, "budget", "window 32 + tail 5 + sinks 4 (the chat template's last 5 tokens)"),
        (
            {"window": [100, 164]},
            "budget",
            "window 64 + tail 136 + sinks 4 (what follows the named window: 136",
        ),
        (
            {"window": 64, "tail": 5, "protect": [[30, 70]]},
            "budget",
            "window 64 + tail 5 + sinks 4 + spans 40",
        ),
        ({"bands": {"0": 40}}, "bands", "40 tokens cannot hold window 32 + tail 5"),
        (
            {"policy": "full", "budget": None, "protect": ["system"]},
            "protect",
            "policy 'full' has no protect",
        ),
    ],
)
def test_what_does_not_fit_the_prompt_is_refused_with_its_numbers(
    given: dict[str, object], field: str, said: str
) -> None:
    with pytest.raises(RecipeError) as refused:
        choose_recipe({**SNAPKV, **given}, CHAT)
    assert refused.value.field == field and said in str(refused.value)


def test_too_long_a_window_is_refused_not_shortened() -> None:
    prompt = PromptMap(5000, {"question": (1000, 4990)})
    with pytest.raises(RecipeError, match="3990 tokens are too many to observe"):
        choose_recipe({"policy": "snapkv", "budget": 0.5, "window": "question"}, prompt)


def test_a_prompt_within_its_budget_needs_no_place_for_a_window() -> None:
    recipe = choose_recipe({"policy": "snapkv", "budget": 300, "window": [0, 290]}, CHAT)
    assert (recipe.window, recipe.tail) == (32, 0) and recipe.budget_tokens(300) == 300
    tight = {"policy": "snapkv", "budget": 36}
    assert choose_recipe(tight, PromptMap(36, tail=5)) == make_recipe(**tight)
    with pytest.raises(RecipeError, match="at least 41 tokens"):
        choose_recipe(tight, PromptMap(37, tail=5))
    with pytest.raises(RecipeError, match="'window'"):
        choose_recipe({"policy": "snapkv", "budget": 300, "window": -3}, CHAT)


def test_protected_names_become_ranges_cut_to_the_prompt() -> None:
    given = {
        **SNAPKV,
        "protect": ["system", [290, 400], [15, 25]],
        "spans": [[50, 52]],
        "structure": [[299, 305]],
    }
    recipe = choose_recipe(given, CHAT)
    assert recipe.spans == ((0, 25), (50, 52), (290, 300)) and recipe.structure == ((299, 300),)
    assert recipe.protect == ("system", (290, 400), (15, 25))


def test_code_finds_structural_tokens_and_presets_do_without_what_a_prompt_lacks() -> None:
    pieces = ["x", "\n", "def", " f", "(", ")", ":", "\n    ", "return", " 1", *["\nword"] * 290]
    prompt = PromptMap(300, tail=5, pieces=pieces)
    assert choose_recipe({**SNAPKV, "protect": "code"}, prompt).structure == ((2, 7),)
    assert choose_recipe({"recipe": "code"}, prompt).structure == ((2, 7),)
    assert choose_recipe({"recipe": "code"}, CHAT).structure == ()
    assert choose_recipe({"recipe": "chat"}, prompt).spans == ()
    assert choose_recipe({"recipe": "chat"}, CHAT).spans == ((0, 20),)
    with pytest.raises(RecipeError, match="this prompt has no span 'system'"):
        choose_recipe({"recipe": "chat", "protect": ["system"]}, prompt)


def test_scissorhands_is_told_apart_by_what_the_prompts_length_makes_of_a_fraction() -> None:
    given = {"policy": "scissorhands", "budget": 0.5, "decode": {"rule": "scissorhands", "every": 1}}
    assert choose_recipe(given, PromptMap(300)).budget_tokens(300) == 150
    for budget in (0.5, "1GiB"):
        with pytest.raises(RecipeError) as refused:
            choose_recipe({**given, "budget": budget}, PromptMap(10_000))
        assert refused.value.field == "decode.every" and "at least 7 tokens at once" in refused.value.valid
