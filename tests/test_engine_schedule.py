"""Scheduling decisions: budgets hold, nobody starves, a short prompt does not wait for a long one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.schedule import PrefillNeed, Waiting, admit, plan_prefill, preemption_victim

needs = st.lists(
    st.tuples(st.integers(0, 99), st.integers(1, 300)), unique_by=lambda n: n[0], max_size=8
).map(lambda pairs: [PrefillNeed(order, remaining) for order, remaining in pairs])


@given(needs, st.integers(1, 256))
def test_a_plan_keeps_to_the_budget_and_wastes_none_of_it(waiting, budget):
    plan = plan_prefill(waiting, budget)
    remaining = {need.order: need.remaining for need in waiting}
    assert plan.keys() <= remaining.keys()
    assert all(0 < tokens <= remaining[order] for order, tokens in plan.items())
    assert sum(plan.values()) == min(budget, sum(remaining.values()))


@given(needs.filter(bool), st.integers(2, 256))
def test_the_oldest_and_the_shortest_always_get_on(waiting, budget):
    plan = plan_prefill(waiting, budget)
    oldest = min(waiting, key=lambda need: need.order)
    shortest = min(waiting, key=lambda need: (need.remaining, need.order))
    assert plan[oldest.order] >= min(oldest.remaining, budget // 2)
    assert plan[shortest.order] >= min(shortest.remaining, budget // 2)


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 300)), max_size=8),
    st.integers(1, 64),
    st.integers(2, 200),
)
def test_chunks_end_at_multiples_of_the_quantum_or_with_the_prompt_and_somebody_gets_on(
    waiting, quantum, more
):
    budget = 2 * quantum + more - 2
    needs = [PrefillNeed(order, remaining, start) for order, (remaining, start) in enumerate(waiting)]
    plan = plan_prefill(needs, budget, quantum)
    assert sum(plan.values()) <= budget and bool(plan) == bool(needs)
    for order, tokens in plan.items():
        need = needs[order]
        assert 0 < tokens <= need.remaining
        assert tokens == need.remaining or (need.start + tokens) % quantum == 0
    if needs:
        assert 0 in plan, "the oldest always gets on"
        assert min(needs, key=lambda need: (need.remaining, need.order)).order in plan


@given(needs, st.integers(1, 256), st.randoms())
def test_a_plan_does_not_depend_on_the_order_of_its_input(waiting, budget, random):
    shuffled = list(waiting)
    random.shuffle(shuffled)
    assert plan_prefill(shuffled, budget) == plan_prefill(waiting, budget)


def finish_times(arrivals, budget):
    """Step in which each prompt ends; arrivals: (step, tokens), in order of arrival."""
    remaining, ended, step = {}, {}, 0
    coming = sorted(enumerate(arrivals), key=lambda item: item[1][0])
    while coming or remaining:
        while coming and coming[0][1][0] <= step:
            order, (_, tokens) = coming.pop(0)
            remaining[order] = tokens
        plan = plan_prefill([PrefillNeed(order, left) for order, left in remaining.items()], budget)
        for order, tokens in plan.items():
            remaining[order] -= tokens
            if remaining[order] == 0:
                del remaining[order]
                ended[order] = step
        step += 1
    return ended


@pytest.mark.parametrize("budget", [2, 7, 64])
def test_a_short_prompt_beside_a_long_one_ends_within_twice_its_own_steps(budget):
    for short in (1, budget, 5 * budget):
        ended = finish_times([(0, 400 * budget), (3, short)], budget)
        assert ended[1] - 3 + 1 <= -(-short // (budget // 2))
        assert ended[1] < ended[0]


@pytest.mark.parametrize("budget", [1, 2, 7, 64])
def test_a_long_prompt_ends_under_an_endless_rain_of_short_ones(budget):
    length = 40
    alone = -(-length // budget)
    rain = [(step, 1 + budget) for step in range(20 * length)]
    ended = finish_times([(0, length), *rain], budget)
    assert ended[0] < 3 * alone + 3


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 80)), min_size=1, max_size=10), st.integers(1, 40)
)
def test_every_prompt_ends_and_no_step_is_wasted(arrivals, budget):
    arrivals = sorted(arrivals)
    ended = finish_times(arrivals, budget)
    assert set(ended) == set(range(len(arrivals)))
    total = sum(tokens for _, tokens in arrivals)
    assert max(ended.values()) <= arrivals[-1][0] + -(-total // budget)


entries = st.lists(
    st.builds(Waiting, pages=st.integers(1, 30), rows=st.integers(1, 4), headroom=st.integers(1, 8)),
    max_size=6,
)


@given(entries, st.integers(0, 60), st.integers(0, 8), st.integers(0, 3))
def test_those_admitted_fit_and_came_first(waiting, pages, rows, running):
    count = admit(waiting, pages, rows, running)
    joined = waiting[:count]
    assert sum(entry.rows for entry in joined) <= rows
    headroom = sum(entry.headroom for entry in joined) if running or count > 1 else 0
    assert sum(entry.pages for entry in joined) + headroom <= pages


@given(entries.filter(bool), st.integers(0, 60), st.integers(0, 8), st.integers(0, 3))
def test_nobody_overtakes_the_first_and_a_lone_one_that_fits_starts(waiting, pages, rows, running):
    first = waiting[0]
    count = admit(waiting, pages, rows, running)
    fits = first.rows <= rows and first.pages + (first.headroom if running else 0) <= pages
    assert (count > 0) == fits


@given(st.lists(st.integers(0, 50), min_size=1))
def test_the_one_that_came_last_gives_way(orders):
    assert orders[preemption_victim(orders)] == max(orders)


def test_nothing_to_do_is_an_empty_plan():
    assert plan_prefill([], 64) == {}
    assert admit([], 10, 10, 0) == 0
