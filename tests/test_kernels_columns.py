"""column_sums of every implementation against the float64 reference, and the reference against whole attention.

Whatever must not be read is NaN: keys after the last query, and scratch memory of the torch path.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import fallback, native, ops, reference
from kernels.ops import Kernels

NAMES = ["native", "avx2", "portable", "torch"]
FLAGS = {"native": (), "avx2": ("-DKVTIDE_WIDTH=8",), "portable": ("-DKVTIDE_WIDTH=4",)}
DTYPES = [torch.float32, torch.bfloat16]
# Products of bf16 are exact in fp32, so both dtypes carry the rounding of sums and exponentials only.
RTOL = 1e-5


@functools.cache
def implementation(name: str) -> Kernels:
    """The implementation under test."""
    return fallback if name == "torch" else native.load(FLAGS[name])


@pytest.fixture(params=NAMES)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return implementation(request.param)


@pytest.fixture(autouse=True)
def one_thread_and_nan_in_fresh_memory() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(before)


class Prompt(NamedTuple):
    """A whole prompt of one layer, its float64 attention and the log denominators of its rows."""

    q: torch.Tensor
    k: torch.Tensor
    lse: torch.Tensor
    attention: torch.Tensor
    scale: float
    softcap: float

    def add(self, kernels: Kernels, out: torch.Tensor, start: int, stop: int) -> None:
        """Add the columns of rows start .. stop to `out`; no key after them may be read."""
        future = torch.full_like(self.k[:, stop:], torch.nan)
        keys = torch.cat((self.k[:, :stop], future), dim=1)
        lse = self.lse[:, start:stop]
        kernels.column_sums(self.q[:, start:stop], keys, lse, self.scale, start, out, softcap=self.softcap)

    def columns(self, start: int, stop: int) -> torch.Tensor:
        """What `add` should add, float64 [Hk, N]."""
        group = self.q.shape[0] // self.k.shape[0]
        return self.attention[:, start:stop].sum(1).unflatten(0, (-1, group)).mean(1)


@functools.cache
def make_prompt(
    dtype: torch.dtype,
    kv_heads: int,
    group: int,
    dim: int,
    n: int,
    softcap: float = 0.0,
    with_sinks: bool = False,
) -> Prompt:
    random = torch.Generator().manual_seed(n * dim + group)
    # Heads of a fused projection: rows lie (heads * dim) apart, as the engine hands them over.
    q = torch.randn(n, kv_heads * group, dim, generator=random).to(dtype).transpose(0, 1)
    k = torch.randn(n, kv_heads, dim, generator=random).to(dtype).transpose(0, 1)
    scale = 2 * dim**-0.5
    logits = q.double() @ k.double().repeat_interleave(group, 0).transpose(1, 2) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
    sinks = torch.linspace(-3, 8, kv_heads * group).double() if with_sinks else torch.tensor(-torch.inf)
    sinks = sinks.expand(kv_heads * group).view(-1, 1)
    lse = torch.logaddexp(logits.logsumexp(-1), sinks)
    # torch's flash attention hands its log-sum-exp over token by token.
    return Prompt(
        q, k, lse.float().t().contiguous().t(), torch.exp(logits - lse.unsqueeze(-1)), scale, softcap
    )


def check(kernels: Kernels, prompt: Prompt, start: int, stop: int) -> None:
    """One piece, added to what was there; entries after it stay as they were."""
    before = torch.rand(prompt.k.shape[0], prompt.k.shape[1] + 3, generator=torch.Generator().manual_seed(1))
    out = before.clone()
    prompt.add(kernels, out, start, stop)
    wanted = prompt.columns(start, stop)[:, :stop] + before[:, :stop]
    torch.testing.assert_close(out[:, :stop].double(), wanted, rtol=RTOL, atol=1e-6)
    assert torch.equal(out[:, stop:], before[:, stop:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 32, 64, 65, 80, 128, 256])
def test_every_head_size_gives_the_columns_of_whole_attention(
    kernels: Kernels, dim: int, dtype: torch.dtype
) -> None:
    check(kernels, make_prompt(dtype, 2, 3, dim, 150), 20, 131)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 3, 4, 5, 8, 64])
def test_every_group_size_gives_the_columns_of_whole_attention(
    kernels: Kernels, group: int, dtype: torch.dtype
) -> None:
    check(kernels, make_prompt(dtype, 2, group, 33, 90), 11, 90)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("start", "stop"), [(0, 1), (0, 15), (63, 64), (64, 65), (63, 66), (127, 129), (0, 200), (199, 200)]
)
def test_pieces_on_and_beside_block_borders(
    kernels: Kernels, start: int, stop: int, dtype: torch.dtype
) -> None:
    check(kernels, make_prompt(dtype, 2, 3, 64, 200), start, stop)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("softcap", "with_sinks"), [(2.0, False), (0.0, True), (50.0, True)])
def test_softcap_and_sinks_in_the_denominators_count(
    kernels: Kernels, softcap: float, with_sinks: bool, dtype: torch.dtype
) -> None:
    prompt = make_prompt(dtype, 2, 4, 64, 150, softcap, with_sinks)
    check(kernels, prompt, 5, 150)
    plain = make_prompt(dtype, 2, 4, 64, 150).columns(5, 150)
    assert not torch.allclose(prompt.columns(5, 150), plain, rtol=0.05), "they must matter in this test"


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 8),
    dim=st.integers(1, 70),
    n=st.integers(1, 170),
    data=st.data(),
)
def test_pieces_of_any_size_add_up_to_one_shot(
    name: str, dtype: torch.dtype, kv_heads: int, group: int, dim: int, n: int, data: st.DataObject
) -> None:
    prompt = make_prompt(dtype, kv_heads, group, dim, n)
    cuts = sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=4))})
    whole, pieces = torch.zeros(2, kv_heads, n)
    prompt.add(implementation(name), whole, 0, n)
    for start, stop in itertools.pairwise(cuts):
        prompt.add(implementation(name), pieces, start, stop)
    torch.testing.assert_close(pieces, whole, rtol=RTOL, atol=1e-7)
    torch.testing.assert_close(whole.double(), prompt.columns(0, n), rtol=RTOL, atol=1e-6)


def test_the_reference_sums_the_columns_of_whole_attention() -> None:
    prompt = make_prompt(torch.float32, 2, 3, 17, 40, 3.0, True)
    check(reference, prompt, 0, 40)  # type: ignore[arg-type]
    check(reference, prompt, 13, 29)  # type: ignore[arg-type]


def test_every_row_spreads_the_weight_of_one(kernels: Kernels) -> None:
    prompt = make_prompt(torch.float32, 3, 3, 64, 700)
    out = torch.zeros(3, 700)
    prompt.add(kernels, out, 0, 700)
    torch.testing.assert_close(out.double().sum(1), torch.full((3,), 700.0).double(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_does_not_change_a_bit(kernels: Kernels, dtype: torch.dtype) -> None:
    prompt = make_prompt(dtype, 3, 3, 64, 700)
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(torch.zeros(3, 700))
        prompt.add(kernels, results[-1], 300, 700)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_a_kv_head_gets_the_same_bits_with_and_without_the_others(kernels: Kernels) -> None:
    prompt = make_prompt(torch.bfloat16, 3, 3, 64, 200)
    together, alone = torch.zeros(2, 3, 200)
    prompt.add(kernels, together, 30, 200)
    for head in range(3):
        queries = slice(3 * head, 3 * head + 3)
        one = prompt._replace(q=prompt.q[queries], k=prompt.k[head : head + 1], lse=prompt.lse[queries])
        one.add(kernels, alone[head : head + 1], 30, 200)
    assert torch.equal(together, alone)


def test_keys_far_below_the_best_get_next_to_nothing(kernels: Kernels) -> None:
    q, k = torch.full((1, 20, 8), 30.0), torch.zeros(1, 20, 8)
    k[:, 0] = 30.0
    out = torch.zeros(1, 20)
    kernels.column_sums(q, k, torch.full((1, 20), 7200.0), 1.0, 0, out)
    torch.testing.assert_close(out[0], torch.tensor([20.0] + [0.0] * 19), rtol=1e-4, atol=1e-30)


def test_no_queries_add_nothing(kernels: Kernels) -> None:
    out = torch.ones(2, 9)
    kernels.column_sums(torch.empty(4, 0, 8), torch.randn(2, 9, 8), torch.empty(4, 0), 1.0, 9, out)
    assert torch.equal(out, torch.ones(2, 9))


def test_ops_hands_over_everything() -> None:
    prompt = make_prompt(torch.float32, 2, 3, 17, 40, 3.0, True)
    check(ops, prompt, 13, 29)  # type: ignore[arg-type]


def test_shapes_and_dtypes_that_do_not_fit_are_our_mistake(kernels: Kernels) -> None:
    q, k, lse, out = torch.randn(4, 5, 8), torch.randn(2, 9, 8), torch.zeros(4, 5), torch.zeros(2, 9)
    wrong: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor]] = [
        (q, k, lse, 5, out),
        (q, k, lse, -1, out),
        (q, k, lse, 4, out[:, :8]),
        (q, k, lse, 4, out.double()),
        (q, k, lse[:, :4], 4, out),
        (q, k.bfloat16(), lse, 4, out),
        (q.half(), k.half(), lse, 4, out),
        (q[:3], k, lse[:3], 4, out),
        (q[..., :4], k, lse, 4, out),
        (q.transpose(1, 2).contiguous().transpose(1, 2), k, lse, 4, out),
    ]
    for a, b, c, start, d in wrong:
        with pytest.raises(AssertionError):
            kernels.column_sums(a, b, c, 1.0, start, d)
