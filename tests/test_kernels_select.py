"""Pooling, exact top-k and shared budgets against loops in plain Python."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from kernels.select import allocate_heads, pool_scores, select_topk

FEW_VALUES = st.sampled_from([-1.5, -0.0, 0.0, 1e-40, 0.25, 0.5, 3.0, math.inf, -math.inf])
SCORES = st.sampled_from([np.float32, np.float64]).flatmap(
    lambda dtype: arrays.arrays(
        dtype,
        st.tuples(st.integers(1, 4), st.integers(1, 40)),
        elements=FEW_VALUES.map(lambda value: float(dtype(value))),
        fill=st.nothing(),
    )
)


def simulate_topk(scores: list[float], keep: int, protected: list[bool]) -> list[int]:
    order = sorted(range(len(scores)), key=lambda j: (protected[j], scores[j], j), reverse=True)
    return sorted(order[:keep])


def simulate_allocation(scores: np.ndarray, keep: int, protected: np.ndarray, floor: int) -> list[int]:
    """One position at a time leaves: the lowest over all heads of those that are not safe in theirs."""
    heads, n = scores.shape
    kept = {(head, j) for head in range(heads) for j in range(n)}
    safe = {(head, j) for head, j in kept if protected[head, j]}
    for head in range(heads):
        best = simulate_topk(scores[head].tolist(), floor, protected[head].tolist())
        safe |= {(head, j) for j in best}
    while len(kept) > heads * keep:
        kept.remove(min(kept - safe, key=lambda at: (scores[at], at)))
    return [sum(at[0] == head for at in kept) for head in range(heads)]


def simulate_pool(scores: list[float], kernel: int, mode: str) -> list[float]:
    half = kernel // 2
    pooled = []
    for j in range(len(scores)):
        near = scores[max(0, j - half) : j + half + 1]
        pooled.append(sum(near) / kernel if mode == "avg" else max(near))
    return pooled


@settings(max_examples=80, deadline=None)
@given(scores=SCORES, data=st.data())
def test_keeps_the_highest_scores_and_of_equal_ones_the_higher_position(
    scores: np.ndarray, data: st.DataObject
) -> None:
    heads, n = scores.shape
    keep = data.draw(st.integers(0, n))
    protected = np.zeros(n, bool)
    protected[data.draw(st.lists(st.integers(0, n - 1), max_size=keep))] = True
    got = select_topk(torch.from_numpy(scores), keep, torch.from_numpy(protected))
    assert got.dtype == torch.int64 and got.shape == (heads, keep)
    for head in range(heads):
        assert got[head].tolist() == simulate_topk(scores[head].tolist(), keep, protected.tolist())


@settings(max_examples=40, deadline=None)
@given(scores=SCORES, data=st.data())
def test_a_budget_per_head_gives_padded_rows_that_hold_the_same_sets(
    scores: np.ndarray, data: st.DataObject
) -> None:
    heads, n = scores.shape
    keep = data.draw(st.lists(st.integers(0, n), min_size=heads, max_size=heads))
    protected = np.zeros((heads, n), bool)
    for head in range(heads):
        protected[head, n - min(2, keep[head]) :] = True
    got = select_topk(torch.from_numpy(scores), torch.tensor(keep), torch.from_numpy(protected))
    assert got.shape == (heads, max(keep))
    for head in range(heads):
        expected = simulate_topk(scores[head].tolist(), keep[head], protected[head].tolist())
        assert got[head].tolist() == expected + [n] * (max(keep) - keep[head])


def test_scores_that_are_not_numbers_are_the_first_to_go() -> None:
    scores = torch.tensor([[math.nan, -5.0, -math.nan, 2.0, -1e30]])
    assert select_topk(scores, 3).tolist() == select_topk(scores.double(), 3).tolist() == [[1, 3, 4]]


@settings(max_examples=60, deadline=None)
@given(scores=SCORES, data=st.data())
def test_heads_share_a_budget_exactly_and_the_lowest_scores_of_all_leave(
    scores: np.ndarray, data: st.DataObject
) -> None:
    heads, n = scores.shape
    keep = data.draw(st.integers(0, n))
    floor = data.draw(st.integers(0, keep))
    protected = np.zeros((heads, n), bool)
    for head in range(heads):
        protected[head, data.draw(st.lists(st.integers(0, n - 1), max_size=keep))] = True
    got = allocate_heads(torch.from_numpy(scores), keep, torch.from_numpy(protected), floor)
    assert got.dtype == torch.int64 and got.tolist() == simulate_allocation(scores, keep, protected, floor)
    assert int(got.sum()) == heads * keep


def test_a_protection_for_all_heads_and_none_at_all_share_budgets_too() -> None:
    scores = torch.tensor([[9.0, 8.0, 7.0, 6.0], [1.0, 2.0, 3.0, 4.0]], dtype=torch.float64)
    assert allocate_heads(scores, 2).tolist() == [4, 0]
    assert allocate_heads(scores, 2, floor=1).tolist() == [3, 1]
    assert allocate_heads(scores, 2, torch.tensor([True, True, False, False])).tolist() == [2, 2]
    assert allocate_heads(scores, 2, torch.tensor([True, False, False, False]), floor=1).tolist() == [3, 1]
    assert allocate_heads(torch.zeros(3, 4), 2).tolist() == [0, 2, 4], (
        "of equal scores lower heads leave first"
    )
    assert allocate_heads(torch.zeros(3, 0), 0).tolist() == [0, 0, 0]


@pytest.mark.parametrize(("keep", "floor"), [(4, 0), (-1, 0), (2, 3), (2, -1)])
def test_a_shared_budget_beyond_what_there_is_is_refused(keep: int, floor: int) -> None:
    with pytest.raises(ValueError, match="of 3 positions"):
        allocate_heads(torch.zeros(2, 3), keep, floor=floor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_neighbouring_floats_are_told_apart(dtype: torch.dtype) -> None:
    low = torch.tensor(1e-5, dtype=dtype)
    high = torch.nextafter(low, torch.tensor(1.0, dtype=dtype))
    assert select_topk(torch.stack((high, low, low)).unsqueeze(0), 1).tolist() == [[0]]


@pytest.mark.parametrize("keep", [-1, 4])
def test_keeping_more_than_there_is_is_refused(keep: int) -> None:
    with pytest.raises(ValueError, match="of 3 positions"):
        select_topk(torch.zeros(2, 3), keep)


def test_scores_in_another_dtype_or_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="float32"):
        select_topk(torch.zeros(2, 3, dtype=torch.bfloat16), 1)
    with pytest.raises(ValueError, match="float32"):
        select_topk(torch.zeros(3), 1)
    with pytest.raises(ValueError, match="float32"):
        allocate_heads(torch.zeros(2, 3, dtype=torch.int64), 1)


@settings(max_examples=60, deadline=None)
@given(
    scores=arrays.arrays(
        np.float32, st.tuples(st.integers(1, 3), st.integers(1, 25)), elements=st.floats(0, 1, width=32)
    ),
    kernel=st.sampled_from([1, 3, 5, 7, 13, 51]),
    mode=st.sampled_from(["avg", "max"]),
)
def test_pooling_agrees_with_loops(scores: np.ndarray, kernel: int, mode: str) -> None:
    pooled = pool_scores(torch.from_numpy(scores), kernel, mode)
    expected = [simulate_pool(row, kernel, mode) for row in scores.tolist()]
    np.testing.assert_allclose(pooled.numpy(), np.array(expected), rtol=1e-6, atol=1e-30)


def test_pooling_keeps_leading_dimensions_and_its_input() -> None:
    scores = torch.rand(2, 3, 20)
    original = scores.clone()
    for kernel in (1, 5):
        pooled = pool_scores(scores, kernel, "avg")
        assert pooled.shape == scores.shape
        assert torch.equal(pooled[1, 2], pool_scores(scores[1, 2], kernel, "avg"))
        pooled.zero_()
        assert torch.equal(scores, original)


def test_pooling_of_no_positions_is_empty() -> None:
    assert pool_scores(torch.zeros(3, 0), 7, "avg").shape == (3, 0)


@pytest.mark.parametrize(("kernel", "mode"), [(4, "avg"), (0, "max"), (-3, "avg"), (5, "mean")])
def test_even_kernels_and_unknown_modes_are_refused(kernel: int, mode: str) -> None:
    with pytest.raises(ValueError, match="pooling"):
        pool_scores(torch.zeros(2, 9), kernel, mode)
