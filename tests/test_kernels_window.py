"""window_scores against a float64 simulation written with loops, and what it promises besides."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.window import window_scores

RTOL_FP32 = 1e-5
ATOL_FP32 = 1e-8


def simulate(
    q: np.ndarray,
    k: np.ndarray,
    scale: float,
    softcap: float = 0.0,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """float64 [Hq, N], one query and one key at a time."""
    query_heads, window, _ = q.shape
    kv_heads, n, _ = k.shape
    out = np.zeros((query_heads, n))
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
                out[h, j] += math.exp(logit - top) / total / window
    return out


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
    per_query_head = simulate(
        q.double().numpy(),
        k.double().numpy(),
        0.35,
        softcap,
        None if sinks is None else sinks.double().numpy(),
    )
    per_kv_head = per_query_head.reshape(kv_heads, group, -1).mean(1)

    got = window_scores(q, k, 0.35, softcap=softcap, sinks=sinks)
    ungrouped = window_scores(q, k, 0.35, softcap=softcap, sinks=sinks, group_reduce="none")

    assert got.dtype == ungrouped.dtype == torch.float32
    np.testing.assert_allclose(got.numpy(), per_kv_head, rtol=RTOL_FP32, atol=ATOL_FP32)
    np.testing.assert_allclose(ungrouped.numpy(), per_query_head, rtol=RTOL_FP32, atol=ATOL_FP32)


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
    with pytest.raises(ValueError, match="mean, none"):
        window_scores(q, k, 1.0, group_reduce="max")  # type: ignore[arg-type]
