"""Scorers of users, named by import path: the example of docs/examples, served on a tiny model, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from policy_views import random_prompt, view_of
from tiny_models import local_engine, one_thread, request, tiny, tokens_of  # noqa: F401
from torch import Tensor

import policies
from policies import LayerView, Needs, Policy, RecipeError, get_policy, load_policy, make_recipe
from policies.recipe_options import OPTIONS

EXAMPLES = Path(__file__).parent.parent / "docs" / "examples"
NAME = "value_norm:ValueNorm"


@pytest.fixture(autouse=True)
def fresh_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Registries as they were, and this file and the examples on the path."""
    known, options = dict(policies.POLICIES), dict(OPTIONS)
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setitem(sys.modules, "scorers_of_a_test", sys.modules[__name__])
    yield
    for registry, before in ((policies.POLICIES, known), (OPTIONS, options)):
        registry.clear()
        registry.update(before)  # type: ignore[call-overload]


class Latest(Policy):
    """The smallest scorer there is; head h keeps h tokens less than its budget."""

    needs = Needs.KEYS

    def score(self, layer: LayerView) -> Tensor:
        return torch.arange(layer.tokens, dtype=torch.float32).expand(layer.kv_heads, -1)

    def keep(self, layer: LayerView, scores: Tensor) -> Tensor:
        return layer.budget - torch.arange(layer.kv_heads)


class AllQueries(Latest):
    needs = Needs.ALL_QUERIES


class OneScoreForAll(Latest):
    def score(self, layer: LayerView) -> Tensor:
        return torch.zeros(layer.tokens)


class ReadsNothingKnown(Latest):
    options = ("temperature",)


class SaysNoNeed(Policy):
    def score(self, layer: LayerView) -> Tensor:
        return layer.keys.sum(-1)


def test_the_example_is_served_like_any_policy() -> None:
    """Two recipes with it in one batch, beside a plain one: each as alone, and none as another."""
    model = tiny()
    name = load_policy(NAME)
    prompt = tokens_of(120)
    asked = [
        request("mine", prompt, make_recipe(policy=name, budget=40, window=8)),
        request("shared", prompt, make_recipe(policy=name, budget=40, window=8, heads="ada", tail=3)),
        request("whole", prompt),
    ]
    together = local_engine(model.model).generate(asked)
    for one in asked:
        alone = local_engine(model.model).generate([one])[one.request_id]
        assert together[one.request_id].tokens == alone.tokens
    kept = {name: completion.prompt.kept_tokens for name, completion in together.items()}
    assert kept["mine"] == 40 and kept["whole"] == 120 and 40 <= kept["shared"] < 120
    assert together["mine"].prompt.recipe_id.startswith(f"{NAME}:b40:w8")


def test_the_example_scores_as_it_says() -> None:
    policy = get_policy(make_recipe(policy=load_policy(NAME), budget=20, window=4, sinks=0))
    prompt = random_prompt(1, 50)
    view = view_of(prompt, policy, 20)
    expected = sum(prompt.row(g, i) for g in prompt.heads_of(0) for i in range(46, 50)) / 3
    norms = torch.from_numpy(prompt.v[0]).norm(dim=-1)
    torch.testing.assert_close(policy.score(view)[0], (torch.from_numpy(expected) * norms).float())
    assert set(range(46, 50)) <= set(policy.select(view).head(0).tolist())


def test_a_budget_per_head_needs_no_other_interface() -> None:
    name = load_policy("scorers_of_a_test:Latest")
    policy = get_policy(make_recipe(policy=name, budget=10, sinks=1, recent=2))
    view = view_of(random_prompt(2, 20, kv_heads=3), policy, 10)
    selection = policy.select(view)
    assert selection.ragged and selection.counts.tolist() == [10, 9, 8]
    for head, count in enumerate((10, 9, 8)):
        assert selection.head(head).tolist() == [0, *range(21 - count, 20)]


def test_scores_of_the_wrong_shape_are_refused_by_name() -> None:
    name = load_policy("scorers_of_a_test:OneScoreForAll")
    policy = get_policy(make_recipe(policy=name, budget=10))
    with pytest.raises(
        ValueError, match=r"OneScoreForAll' scores torch.float32 \(20,\), want float32 \(2, 20\)"
    ):
        policy.select(view_of(random_prompt(3, 20), policy, 10))


def test_a_policy_that_reads_all_queries_without_an_observer_is_given_them() -> None:
    name = load_policy("scorers_of_a_test:AllQueries")
    assert get_policy(make_recipe(policy=name, budget=10)).queries_wanted(77) == 77


def test_a_recipe_from_another_process_loads_its_policy_here() -> None:
    recipe = make_recipe(policy=load_policy(NAME), budget=20, window=4)
    del policies.POLICIES[NAME]
    assert get_policy(recipe).recipe == recipe
    assert NAME in policies.POLICIES


def test_loading_twice_is_fine_and_options_are_those_of_the_class() -> None:
    assert load_policy(NAME) == load_policy(NAME) == NAME
    with pytest.raises(RecipeError, match="'kernel'"):
        make_recipe(policy=NAME, budget=20, kernel=5)
    with pytest.raises(RecipeError, match="'window'"):
        make_recipe(policy=load_policy("scorers_of_a_test:Latest"), window=5)


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("value_norm", "unknown policy"),
        ("value_norm:", "unknown policy"),
        (":ValueNorm", "unknown policy"),
        ("no_such_module:Scorer", "cannot be loaded"),
        ("value_norm:Scorer", "cannot be loaded"),
        ("value_norm:Tensor", "is no class that implements"),
        ("policies:Policy", "is no class that implements"),
        ("policies:make_recipe", "is no class that implements"),
        ("scorers_of_a_test:SaysNoNeed", "does not say what it `needs`"),
        ("scorers_of_a_test:ReadsNothingKnown", "temperature"),
    ],
)
def test_what_names_no_policy_is_refused_with_the_choices(path: str, problem: str) -> None:
    with pytest.raises(RecipeError, match=problem) as refused:
        load_policy(path)
    assert refused.value.field == "policy" and "snapkv, h2o" in refused.value.valid
    assert path not in policies.POLICIES
    with pytest.raises(RecipeError, match="unknown policy"):
        make_recipe(policy=path)
