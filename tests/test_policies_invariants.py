"""What must hold for every selection, whatever the method: ALGORITHMS.md 9.4."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_views import (
    DIM,
    SCORED,
    one_thread,  # noqa: F401
    output_weight,
    protected_of,
    random_prompt,
    recipes,
    single,
    view_of,
)
from torch import Tensor

from policies import POLICIES, LayerView, Needs, Policy, Recipe, get_policy, make_recipe
from policies.report import budget_entropy, kept_mass

SEEDS = st.integers(0, 2**32)
# A hash of the head's number, and a set that all heads share, mean something else when heads move.
PER_HEAD = [name for name in SCORED if name not in ("random", "tova")]
SIMPLE: dict[str, dict[str, object]] = {
    name: {"sinks": 2, **own}
    for name, own in {
        "snapkv": {"window": 8, "kernel": 5},
        "h2o": {},
        "scissorhands": {"window": 20, "recent": 4},
        "tova": {},
        "expected_attention": {"future": 16},
        "keydiff": {},
        "knorm": {},
        "streaming_llm": {},
        "random": {},
    }.items()
} | {"sliding_window": {}}


def simple(name: str, budget: int = 30, **more: object) -> Policy:
    return get_policy(make_recipe(policy=name, budget=budget, **{**SIMPLE[name], **more}))


def kept_rows(policy: Policy, view: LayerView) -> list[list[int]]:
    selection = policy.select(view)
    return [selection.head(head).tolist() for head in range(view.kv_heads)]


@pytest.mark.parametrize("name", SCORED)
@settings(max_examples=20, deadline=None)
@given(data=st.data(), seed=SEEDS, n=st.integers(1, 80), ties=st.booleans())
def test_selections_are_ascending_in_range_of_the_right_size_and_hold_the_protected(
    name: str, data: st.DataObject, seed: int, n: int, ties: bool
) -> None:
    recipe: Recipe = data.draw(recipes(name))
    assert isinstance(recipe.budget, int)
    budget = min(n, recipe.budget)
    policy = get_policy(recipe)
    view = view_of(random_prompt(seed, n), policy, budget)
    if ties:
        view = replace(view, keys=torch.ones_like(view.keys))
    selection = policy.select(view)
    assert selection.indices.dtype == selection.counts.dtype == torch.int64
    assert selection.counts.sum() == budget * view.kv_heads
    if recipe.heads == "uniform" or policy.one_set:
        assert not selection.ragged and selection.counts.tolist() == [budget] * view.kv_heads
    must = protected_of(recipe, n, budget)
    for head in range(view.kv_heads):
        row = selection.head(head).tolist()
        assert all(a < b for a, b in pairwise(row))
        assert must <= set(row) <= set(range(n))  # no token at all where alpha is 0
        padding = selection.indices[head, len(row) :].tolist()
        assert padding == [n] * len(padding)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("n", [1, 2, 29, 30])
def test_a_prompt_within_budget_stays_whole_without_being_scored(name: str, n: int) -> None:
    policy = get_policy(make_recipe()) if name == "full" else simple(name, heads="ada", critical=True)
    keys = torch.randn(2, n, DIM)
    view = LayerView(0, keys, keys, None, 1.0, budget=n)
    selection = policy.select(view)
    assert selection.indices.tolist() == [list(range(n))] * 2 and not selection.ragged
    assert selection.counts.tolist() == [n, n]


@pytest.mark.parametrize("name", SCORED)
@pytest.mark.parametrize("n", [31, 32, 33])
def test_prompts_just_above_the_budget_are_scored_with_finite_numbers(name: str, n: int) -> None:
    policy = simple(name, tail=2)
    view = view_of(random_prompt(n, n), policy, 30)
    assert policy.score(view).isfinite().all()
    assert all(len(row) == 30 for row in kept_rows(policy, view))


@pytest.mark.parametrize("name", PER_HEAD)
@pytest.mark.parametrize("critical", [False, True])
def test_permuting_kv_heads_permutes_the_selection_and_split_heads_select_as_together(
    name: str, critical: bool
) -> None:
    policy = simple(name, critical=critical)
    prompt = random_prompt(5, 90, group=3, kv_heads=4, sinks=True)
    weight = output_weight(prompt).reshape(20, 4, 3 * DIM)
    together = kept_rows(policy, view_of(prompt, policy, 30))
    for order in ([2, 0, 3, 1], [0, 1], [2, 3]):
        assert prompt.sinks is not None
        part = replace(
            prompt,
            q=prompt.q.reshape(4, 3, 90, DIM)[order].reshape(-1, 90, DIM),
            k=prompt.k[order],
            v=prompt.v[order],
            sinks=prompt.sinks.reshape(4, 3)[order].reshape(-1),
        )
        view = replace(view_of(part, policy, 30), output_weight=single(weight[:, order].reshape(20, -1)))
        assert kept_rows(policy, view) == [together[head] for head in order]


@pytest.mark.parametrize("name", ["h2o", "expected_attention"])
@settings(max_examples=20, deadline=None)
@given(seed=SEEDS, pieces=st.lists(st.integers(1, 40), min_size=1, max_size=8), n=st.integers(32, 70))
def test_any_pieces_of_a_prompt_give_the_sets_of_one_shot(
    name: str, seed: int, pieces: list[int], n: int
) -> None:
    policy = simple(name)
    prompt = random_prompt(seed, n)
    at_once = view_of(prompt, policy, 30, pieces=[n])
    in_pieces = view_of(prompt, policy, 30, pieces=[*pieces, n])
    torch.testing.assert_close(policy.score(in_pieces), policy.score(at_once), rtol=1e-5, atol=1e-7)
    assert kept_rows(policy, in_pieces) == kept_rows(policy, at_once)


@pytest.mark.parametrize("name", SCORED)
def test_more_queries_than_asked_for_change_nothing(name: str) -> None:
    """A decode rule may want more of them than the policy does."""
    policy = simple(name, tail=3)
    prompt = random_prompt(6, 80)
    view = view_of(prompt, policy, 30)
    wider = replace(view, queries=single(prompt.q[:, 20:]))
    assert kept_rows(policy, wider) == kept_rows(policy, view)


@pytest.mark.parametrize("name", SCORED)
def test_a_bf16_prompt_selects_like_the_same_numbers_in_fp32(name: str) -> None:
    policy = simple(name, budget=60, critical=name == "knorm")
    prompt = random_prompt(7, 200)
    rounded = replace(
        prompt, **{field: single(getattr(prompt, field)).bfloat16().double().numpy() for field in "qkv"}
    )
    wide = view_of(rounded, policy, 60)
    narrow = replace(
        wide,
        keys=wide.keys.bfloat16(),
        values=wide.values.bfloat16(),
        queries=None if wide.queries is None else wide.queries.bfloat16(),
    )
    assert kept_rows(policy, narrow) == kept_rows(policy, wide)


@pytest.mark.parametrize("name", ["snapkv", "h2o", "keydiff", "knorm", "tova", "streaming_llm"])
def test_when_everything_ties_the_latest_tokens_stay(name: str) -> None:
    options = {"kernel": 1} if name == "snapkv" else {"normalize": "none"} if name == "h2o" else {}
    policy = simple(name, **options)
    view = view_of(random_prompt(8, 100), policy, 30)
    observed = torch.ones(2, 100) if name == "h2o" else None
    view = replace(view, keys=torch.ones_like(view.keys), observed=observed)
    assert kept_rows(policy, view) == [[0, 1, *range(72, 100)]] * 2


@pytest.mark.parametrize("name", SCORED)
@pytest.mark.parametrize("shared", [{}, {"critical": True, "structure": [(20, 40)], "spans": [(5, 9)]}])
def test_selecting_never_looks_at_a_number(name: str, shared: dict[str, object]) -> None:
    """On the meta device no tensor has values, so anything that had to be read back to the host would fail."""
    policy = simple(name, budget=40, **shared)
    view = view_of(random_prompt(9, 100), policy, 40)

    def without_values(value: object) -> object:
        if isinstance(value, Tensor):
            return value.to("meta")
        return type(value)(*map(without_values, value)) if isinstance(value, tuple) else value

    fields = {name: without_values(value) for name, value in vars(view).items()}
    assert policy.select(LayerView(**fields)).indices.shape == (2, 40)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [name for name in SCORED if POLICIES[name].same_for_all_heads])
def test_policies_that_keep_one_set_for_all_heads_share_no_budget_between_them(name: str) -> None:
    policy = simple(name, heads="ada")
    rows = kept_rows(policy, view_of(random_prompt(10, 90), policy, 30))
    assert policy.one_set and rows == [rows[0]] * 2
    assert not simple(name, critical=True).one_set


def test_policies_say_what_they_need_to_see() -> None:
    ours = [name for name in POLICIES if ":" not in name]  # other tests register scorers of their own
    wanted = {name: get_policy(make_recipe(policy=name)).queries_wanted(1000) for name in ours}
    assert {name: count for name, count in wanted.items() if count} == {
        "snapkv": 32,
        "scissorhands": 400,
        "tova": 1,
    }
    everything = [name for name in ours if POLICIES[name].needs is Needs.ALL_QUERIES]
    assert everything == ["h2o", "expected_attention"]
    with_tail = simple("snapkv", tail=5)
    assert [with_tail.queries_wanted(n) for n in (1, 12, 13, 14)] == [1, 12, 13, 13]


@pytest.mark.parametrize(
    ("name", "options", "missing"),
    [
        ("expected_attention", {}, "rotation"),
        ("knorm", {"critical": True}, "output_weight"),
    ],
)
def test_a_layer_without_what_a_policy_needs_is_refused(
    name: str, options: dict[str, object], missing: str
) -> None:
    policy = simple(name, **options)
    view = view_of(random_prompt(11, 60), policy, 30)
    assert policy.needs_rotation == (missing == "rotation")
    assert policy.needs_output_weight == (missing == "output_weight")
    with pytest.raises(ValueError, match="layer 0"):
        policy.select(replace(view, **{missing: None}))


def test_the_tail_is_kept_and_its_queries_are_not_observed() -> None:
    """A template's end that looks elsewhere must not decide what stays of the question's document."""
    policy = simple("snapkv", tail=4)
    prompt = random_prompt(12, 100)
    view = view_of(prompt, policy, 30)
    assert view.queries is not None
    other = view.queries.clone()
    other[:, -4:] = 50.0
    assert kept_rows(policy, replace(view, queries=other)) == kept_rows(policy, view)
    assert all(row[-12:] == list(range(88, 100)) for row in kept_rows(policy, view))


def test_mass_inside_the_window_does_not_favour_its_neighbours() -> None:
    policy = simple("snapkv", budget=20, sinks=0, kernel=13)
    queries, keys = torch.zeros(1, 8, DIM), torch.zeros(1, 60, DIM)
    queries[..., 0] = 8.0
    keys[:, 52:, 0] = 8.0  # the window attends almost only to itself
    keys[:, 10, 0] = 1.0  # and a little to this
    kept = policy.select(LayerView(0, keys, keys, queries, DIM**-0.5, budget=20)).head(0).tolist()
    assert set(range(5, 16)) <= set(kept)


@pytest.mark.parametrize("name", ["snapkv", "h2o", "expected_attention", "scissorhands", "tova"])
def test_attention_sinks_and_softcap_of_the_layer_reach_the_scores(name: str) -> None:
    policy = simple(name)
    prompt = random_prompt(13, 60)
    plain = policy.score(view_of(prompt, policy, 30))
    with_sinks = replace(prompt, sinks=random_prompt(13, 60, sinks=True).sinks)
    assert not torch.equal(policy.score(view_of(with_sinks, policy, 30)), plain)
    if name != "expected_attention":  # its expectation has no closed form under a softcap
        assert not torch.equal(policy.score(view_of(replace(prompt, softcap=1.0), policy, 30)), plain)


def test_kept_mass_is_the_share_of_attention_that_fell_on_survivors() -> None:
    policy = simple("snapkv", heads="ada")
    view = view_of(random_prompt(14, 90), policy, 30)
    mass, selection = view.window_mass(8, 0), policy.select(view)
    kept = sum(mass[head, selection.head(head)].sum() for head in range(2))
    torch.testing.assert_close(kept_mass(mass, selection), kept / mass.sum())
    whole = policy.select(replace(view, budget=90))
    assert kept_mass(mass, whole) == 1.0


def test_budget_entropy_is_one_for_equal_budgets_and_falls_with_inequality() -> None:
    assert budget_entropy([7, 7, 7]) == pytest.approx(1.0)
    assert budget_entropy([21, 0, 0]) == 0.0
    assert 0.0 < budget_entropy([12, 6, 3]) < budget_entropy([8, 7, 6]) < 1.0
    assert budget_entropy([5]) == budget_entropy([0, 0]) == 1.0
