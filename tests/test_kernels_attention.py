"""Paged decode attention of every implementation against the float64 reference.

Pools are filled with 0xff bytes first, which is NaN in both dtypes: whatever reads an unused slot shows it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from paged_batches import KV_HEADS, LENGTHS, TOLERANCE, assert_close, implementation, make_batch

from kernels import reference
from kernels.ops import Kernels

HEAD_SIZES = [32, 64, 65, 80, 96, 128, 256]
GROUPS = [1, 3, 4, 8]


@pytest.fixture(params=["native", "portable", "torch"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return implementation(request.param)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@functools.cache
def expected(batch_key: tuple[torch.dtype, int, int, int, bool]) -> tuple[torch.Tensor, torch.Tensor]:
    return reference.paged_decode_attention(*make_batch(*batch_key))


def check(kernels: Kernels, key: tuple[torch.dtype, int, int, int, bool]) -> None:
    out, lse = kernels.paged_decode_attention(*make_batch(*key))
    wanted, wanted_lse = expected(key)
    assert out.dtype is key[0] and lse.dtype is torch.float32
    assert_close(out, wanted, TOLERANCE[key[0]])
    assert_close(lse, wanted_lse, TOLERANCE[key[0]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", HEAD_SIZES)
def test_every_head_size_matches_the_reference(kernels: Kernels, head_dim: int, dtype: torch.dtype) -> None:
    check(kernels, (dtype, head_dim, 3, 3, False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [*GROUPS, 5, 64])
def test_every_group_size_matches_the_reference(kernels: Kernels, group: int, dtype: torch.dtype) -> None:
    check(kernels, (dtype, 32, group, 1, False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tiles", [1, 4])
def test_slots_before_the_start_are_left_out_and_their_pages_untouched(
    kernels: Kernels, tiles: int, dtype: torch.dtype
) -> None:
    check(kernels, (dtype, 64, 3, tiles, True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_softcap_and_sinks_match_the_reference(kernels: Kernels, dtype: torch.dtype) -> None:
    batch = make_batch(dtype, 64, 4)
    sinks = torch.linspace(-3, 8, 4 * KV_HEADS)
    wanted, wanted_lse = reference.paged_decode_attention(*batch, softcap=2.0, sinks=sinks)
    out, lse = kernels.paged_decode_attention(*batch, softcap=2.0, sinks=sinks)
    assert_close(out, wanted, TOLERANCE[dtype])
    assert_close(lse, wanted_lse, TOLERANCE[dtype])
    plain = reference.paged_decode_attention(*batch)[0]
    assert not torch.allclose(wanted, plain, rtol=0.05), "softcap and sinks must matter in this test"


def test_the_reference_is_softmax_attention_over_the_canonical_rows() -> None:
    batch = make_batch(torch.float32, 64, 3)
    row, length = 3, LENGTHS[3][1]
    at = batch.rows.tolist().index(row)
    k, v = torch.empty(2, length, 64)
    reference.gather(batch.pool, batch.layout, batch.tables[row, 1], 0, length, k, v)
    wanted = torch.nn.functional.scaled_dot_product_attention(batch.q[at, 3:, None], k[None], v[None])[:, 0]
    out, lse = reference.paged_decode_attention(*batch)
    torch.testing.assert_close(out[at, 3:], wanted)
    torch.testing.assert_close(lse[at, 3:], torch.logsumexp(batch.q[at, 3:] @ k.T / 8, dim=-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_gets_the_same_bits_alone_and_in_any_batch(kernels: Kernels, dtype: torch.dtype) -> None:
    batch = make_batch(dtype, 64, 3)
    out, lse = kernels.paged_decode_attention(*batch)
    for b in range(len(LENGTHS)):
        one = batch._replace(q=batch.q[b : b + 1], rows=batch.rows[b : b + 1])
        alone, alone_lse = kernels.paged_decode_attention(*one)
        assert torch.equal(alone[0], out[b]) and torch.equal(alone_lse[0], lse[b])


@pytest.mark.parametrize("name", ["native", "portable"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_number_of_threads_does_not_change_a_bit(name: str, dtype: torch.dtype) -> None:
    batch = make_batch(dtype, 64, 3)
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(implementation(name).paged_decode_attention(*batch))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])


def test_huge_logits_do_not_overflow(kernels: Kernels) -> None:
    batch = make_batch(torch.float32, 64, 3)._replace(scale=100.0)
    wanted, wanted_lse = reference.paged_decode_attention(*batch)
    out, lse = kernels.paged_decode_attention(*batch)
    # Logits near 5000 carry a rounding of 2.4e-4 each, and weights the exponential of it.
    assert_close(out, wanted, 2e-3)
    assert_close(lse, wanted_lse, 1e-6)


def test_a_head_without_slots_is_our_mistake(kernels: Kernels) -> None:
    batch = make_batch(torch.float32, 64, 3)
    empty = batch.lengths.clone()
    empty[2, 1] = 0
    with pytest.raises(AssertionError):
        kernels.paged_decode_attention(*batch._replace(lengths=empty))
    with pytest.raises(AssertionError):
        kernels.paged_decode_attention(*batch._replace(starts=batch.lengths[:, 0].contiguous()))


def test_pages_outside_the_pool_and_wrong_dtypes_are_our_mistake(kernels: Kernels) -> None:
    batch = make_batch(torch.float32, 64, 3)
    for wrong in (-1, batch.pool.shape[0]):
        tables = batch.tables.clone()
        tables[3, 1, 2] = wrong
        with pytest.raises(AssertionError):
            kernels.paged_decode_attention(*batch._replace(tables=tables))
    with pytest.raises(AssertionError):
        kernels.paged_decode_attention(*batch._replace(q=batch.q.bfloat16()))
    with pytest.raises(AssertionError):
        kernels.paged_decode_attention(*batch._replace(lengths=batch.lengths + 5000))
