"""window_scores and window_low_counts against float64 simulations written with loops, and what else they promise."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.window import window_low_counts, window_scores

RTOL_FP32 = 1e-5
ATOL_FP32 = 1e-8


def simulate_rows(
    q: np.ndarray,
    k: np.ndarray,
    scale: float,
    softcap: float = 0.0,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """Attention float64 [Hq, W, N], one query and one key at a time."""
    query_heads, window, _ = q.shape
    kv_heads, n, _ = k.shape
    out = np.zeros((query_heads, window, n))
    for h in range(query_heads):
        for w in range(window):
            i = n - window + w
            seen = range(i + 1)
            logits = [scale * float(np.dot(q[h, w], k[h * kv_heads // query_heads, j])) for j in seen]
            if softcap:
                logits = [softcap * math.tanh(logit / softcap) for logit in logits]
            top = max(logits)
            total = sum(math.exp(logit - top) for logit in logits)
            if sinks is not None:
                total += math.exp(float(sinks[h]) - top)
            for j, logit in zip(seen, logits, strict=True):
                out[h, w, j] = math.exp(logit - top) / total
    return out


def simulate_low_counts(
    rows: np.ndarray, weights: np.ndarray, threshold: str | float
) -> tuple[np.ndarray, np.ndarray, float]:
    """low and mass [Hk, R, N] of attention [Hq, W, N], and how close any entry comes to its row's limit."""
    kv_heads, results, window = weights.shape
    n = rows.shape[2]
    low, mass = np.zeros((2, kv_heads, results, n))
    margin = math.inf
    for h, r, w in np.ndindex(kv_heads, results, window):
        seen = n - window + w + 1
        group = rows.shape[0] // kv_heads
        row = rows[h * group : (h + 1) * group, w, :seen].max(0)
        limit = 1 / seen if threshold == "uniform" else np.quantile(row, threshold)
        low[h, r, :seen] += weights[h, r, w] * (row < limit)
        mass[h, r, :seen] += weights[h, r, w] * row
        away = np.abs(row - limit)
        # A quantile may be an entry itself, or two entries a rounding apart.
        margin = min(margin, float(away[away > 1e-12].min(initial=1.0)))
    return low, mass, margin


def random_qk(
    seed: int, query_heads: int, kv_heads: int, window: int, n: int, dim: int = 8
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(query_heads, window, dim, generator=generator) * 2
    return q, torch.randn(kv_heads, n, dim, generator=generator)


@pytest.fixture
def uninitialised_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 3, 4, 8]),
    window=st.integers(1, 9),
    before=st.integers(0, 30),
    softcap=st.sampled_from([0.0, 1.5, 30.0]),
    with_sinks=st.booleans(),
)
def test_agrees_with_a_simulation_in_float64(
    seed: int,
    kv_heads: int,
    group: int,
    window: int,
    before: int,
    softcap: float,
    with_sinks: bool,
) -> None:
    q, k = random_qk(seed, kv_heads * group, kv_heads, window, window + before)
    sinks = torch.linspace(-2, 3, kv_heads * group) if with_sinks else None
    per_query_head = simulate_rows(
        q.double().numpy(),
        k.double().numpy(),
        0.35,
        softcap,
        None if sinks is None else sinks.double().numpy(),
    ).mean(1)
    per_kv_head = per_query_head.reshape(kv_heads, group, -1).mean(1)

    got = window_scores(q, k, 0.35, softcap=softcap, sinks=sinks)
    ungrouped = window_scores(q, k, 0.35, softcap=softcap, sinks=sinks, group_reduce="none")

    assert got.dtype == ungrouped.dtype == torch.float32
    np.testing.assert_allclose(got.numpy(), per_kv_head, rtol=RTOL_FP32, atol=ATOL_FP32)
    np.testing.assert_allclose(ungrouped.numpy(), per_query_head, rtol=RTOL_FP32, atol=ATOL_FP32)
    strongest = window_scores(q, k, 0.35, softcap=softcap, sinks=sinks, group_reduce="max")
    assert torch.equal(strongest, ungrouped.view(kv_heads, group, -1).amax(1))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 3, 4]),
    window=st.integers(1, 7),
    before=st.integers(0, 30),
    results=st.integers(1, 3),
    threshold=st.sampled_from(["uniform", 0.9, 0.5, 0.1]),
    softcap=st.sampled_from([0.0, 1.5]),
    with_sinks=st.booleans(),
)
def test_low_counts_agree_with_a_simulation_in_float64(
    seed: int,
    kv_heads: int,
    group: int,
    window: int,
    before: int,
    results: int,
    threshold: str | float,
    softcap: float,
    with_sinks: bool,
) -> None:
    q, k = random_qk(seed, kv_heads * group, kv_heads, window, window + before)
    sinks = torch.linspace(-2, 3, kv_heads * group) if with_sinks else None
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randint(0, 3, (kv_heads, results, window), generator=generator).float()
    numbers = [None if x is None else x.double().numpy() for x in (q, k, sinks)]
    rows = simulate_rows(numbers[0], numbers[1], 0.35, softcap, numbers[2])
    low, mass, margin = simulate_low_counts(rows, weights.numpy(), threshold)
    got = window_low_counts(q, k, 0.35, weights, threshold=threshold, softcap=softcap, sinks=sinks)
    assert got.low.dtype == got.mass.dtype == torch.float32
    np.testing.assert_allclose(got.mass.numpy(), mass, rtol=RTOL_FP32, atol=ATOL_FP32)
    if margin > 1e-6:
        assert got.low.tolist() == low.tolist()


def test_low_counts_of_a_hand_made_row() -> None:
    """Four keys get .1 .2 .3 .4: under the uniform share two are low, under the 90 % quantile three."""
    k = torch.log(torch.tensor([0.1, 0.2, 0.3, 0.4])).view(1, 4, 1)
    q, weights = torch.ones(1, 1, 1), torch.tensor([[[2.0]]])
    assert window_low_counts(q, k, 1.0, weights).low.tolist() == [[[2.0, 2.0, 0.0, 0.0]]]
    assert window_low_counts(q, k, 1.0, weights, threshold=0.9).low.tolist() == [[[2.0, 2.0, 2.0, 0.0]]]
    torch.testing.assert_close(window_low_counts(q, k, 1.0, weights).mass[0, 0], 2 * k[0, :, 0].exp())


def test_keys_that_all_get_the_uniform_share_are_never_low() -> None:
    q, k = random_qk(11, 4, 2, 9, 100)
    low, mass = window_low_counts(q, k[:, :1].expand(2, 100, 8), 0.35, torch.ones(2, 1, 9))
    assert not low.any()
    torch.testing.assert_close(mass.sum(), torch.tensor(18.0))


@pytest.mark.parametrize("threshold", ["uniform", 0.9])
def test_low_counts_of_several_blocks_of_scratch_are_those_of_single_rows(
    threshold: str | float, uninitialised_memory_is_nan: None
) -> None:
    q, k = random_qk(12, 6, 2, 60, 7001)
    together = window_low_counts(q, k, 0.35, torch.eye(60).expand(2, 60, 60), threshold=threshold)
    for w in (0, 24, 25, 59):
        seen = 7001 - 59 + w
        alone = window_low_counts(
            q[:, w : w + 1], k[:, :seen], 0.35, torch.ones(2, 1, 1), threshold=threshold
        )
        torch.testing.assert_close(together.mass[:, w, :seen], alone.mass[:, 0], rtol=1e-5, atol=1e-9)
        # A rounding may move a key across its limit, no more.
        assert int((together.low[:, w, :seen] != alone.low[:, 0]).sum()) <= 2
        assert not together.low[:, w, seen:].any() and not together.mass[:, w, seen:].any()


def test_equal_keys_get_equal_counts_and_masses_wherever_they_stand() -> None:
    q, k = random_qk(13, 6, 2, 40, 533)
    k[:, :490] = k[:, :1]
    for found in window_low_counts(q, k, 0.35, torch.ones(2, 3, 40)):
        assert torch.equal(found[..., :490], found[..., :1].expand(-1, -1, 490))


def test_low_counts_do_not_depend_on_the_number_of_threads_or_other_heads() -> None:
    q, k = random_qk(14, 9, 3, 64, 3000, dim=64)
    weights = torch.rand(3, 2, 64, generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(window_low_counts(q, k, 0.125, weights))
    torch.set_num_threads(before)
    assert torch.equal(results[0].low, results[1].low) and torch.equal(results[0].mass, results[1].mass)
    alone = window_low_counts(q[3:6], k[1:2], 0.125, weights[1:2])
    assert torch.equal(alone.low[0], results[0].low[1]) and torch.equal(alone.mass[0], results[0].mass[1])


def test_wrong_weights_and_thresholds_are_refused() -> None:
    q, k = random_qk(1, 4, 2, 3, 9)
    with pytest.raises(ValueError, match="row_weights"):
        window_low_counts(q, k, 1.0, torch.ones(2, 1, 4))
    with pytest.raises(ValueError, match="row_weights"):
        window_low_counts(q, k, 1.0, torch.ones(4, 1, 3))
    for threshold in (0.0, 1.0, "now"):
        with pytest.raises(ValueError, match="threshold"):
            window_low_counts(q, k, 1.0, torch.ones(2, 1, 3), threshold=threshold)  # type: ignore[arg-type]


def test_a_head_spread_over_several_blocks_of_scratch_scores_the_same(
    uninitialised_memory_is_nan: None,
) -> None:
    q, k = random_qk(3, 6, 2, 50, 7001)
    logits = torch.einsum("hgwd,hnd->hgwn", q.double().view(2, 3, 50, 8), k.double()) * 0.35
    future = torch.arange(7001) > torch.arange(6951, 7001).unsqueeze(1)
    expected = logits.masked_fill(future, -math.inf).softmax(-1).mean((1, 2))
    torch.testing.assert_close(window_scores(q, k, 0.35).double(), expected, rtol=RTOL_FP32, atol=ATOL_FP32)


def test_bf16_inputs_score_exactly_like_the_same_numbers_in_fp32() -> None:
    q, k = random_qk(4, 9, 3, 32, 300, dim=64)
    q, k = q.bfloat16(), k.bfloat16()
    assert torch.equal(window_scores(q, k, 0.125), window_scores(q.float(), k.float(), 0.125))


def test_strided_views_score_like_their_copies() -> None:
    q, k = random_qk(5, 4, 2, 7, 60)
    q_view = q.transpose(0, 1).contiguous().transpose(0, 1)
    k_view = torch.cat((k, k), dim=1)[:, :60]
    assert torch.equal(window_scores(q_view, k_view, 0.35), window_scores(q, k, 0.35))


def test_a_kv_head_scores_the_same_with_and_without_the_others() -> None:
    q, k = random_qk(6, 9, 3, 16, 200)
    together = window_scores(q, k, 0.35)
    for head in range(3):
        alone = window_scores(q[3 * head : 3 * head + 3], k[head : head + 1], 0.35)
        assert torch.equal(together[head : head + 1], alone)


def test_scores_do_not_depend_on_the_number_of_threads() -> None:
    q, k = random_qk(7, 9, 3, 32, 3000, dim=64)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(window_scores(q, k, 0.125))
    torch.set_num_threads(before)
    assert torch.equal(*results)


def test_equal_keys_score_exactly_equal_wherever_they_stand() -> None:
    q, k = random_qk(8, 6, 2, 16, 500)
    k[:, :484] = k[:, :1]
    scores = window_scores(q, k, 0.35)
    assert torch.equal(scores[:, :484], scores[:, :1].expand(-1, 484))


def test_huge_common_logits_do_not_overflow() -> None:
    q, k = random_qk(9, 2, 1, 4, 50)
    q, k = q + 40, k + 40
    scores = window_scores(q, k, 1.0)
    assert scores.isfinite().all()
    torch.testing.assert_close(scores.sum(), torch.tensor(1.0))


@pytest.mark.parametrize(
    ("query_heads", "kv_heads", "window", "n", "words"),
    [(4, 3, 2, 9, "do not divide"), (4, 2, 10, 9, "does not fit"), (4, 2, 0, 9, "does not fit")],
)
def test_shapes_that_do_not_fit_are_refused(
    query_heads: int, kv_heads: int, window: int, n: int, words: str
) -> None:
    q, k = random_qk(1, query_heads, kv_heads, window, n)
    with pytest.raises(ValueError, match=words):
        window_scores(q, k, 1.0)


def test_other_wrong_arguments_are_refused() -> None:
    q, k = random_qk(1, 4, 2, 3, 9)
    with pytest.raises(ValueError, match="sinks"):
        window_scores(q, k, 1.0, sinks=torch.zeros(2))
    with pytest.raises(ValueError, match="want q"):
        window_scores(q, k[..., :4], 1.0)
    with pytest.raises(ValueError, match="mean, max, none"):
        window_scores(q, k, 1.0, group_reduce="sum")  # type: ignore[arg-type]
