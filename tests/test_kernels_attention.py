"""Paged decode attention of every implementation against the float64 reference.

Pools are filled with 0xff bytes first, which is NaN in both dtypes: whatever reads an unused slot shows it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

from kernels import fallback, native, reference
from kernels.layout import PageLayout, page_layout
from kernels.ops import Kernels

PORTABLE = ("-DKVTIDE_WIDTH=4",)
KV_HEADS = 2
LENGTHS = [[1, 15], [16, 17], [511, 512], [513, 1025], [33, 700], [64, 2049]]
# Largest error over the largest entry: fp32 exact to rounding, bf16 to one rounding of weights and result.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
HEAD_SIZES = [32, 64, 65, 80, 96, 128, 256]
GROUPS = [1, 3, 4, 8]


@functools.cache
def implementation(name: str) -> Kernels:
    """The implementation under test."""
    if name == "torch":
        return fallback
    return native.load(PORTABLE if name == "portable" else ())


@pytest.fixture(params=["native", "portable", "torch"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return implementation(request.param)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Batch(NamedTuple):
    """Positional arguments of paged_decode_attention."""

    q: torch.Tensor
    pool: torch.Tensor
    layout: PageLayout
    tables: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    rows: torch.Tensor
    scale: float


@functools.cache
def make_batch(
    dtype: torch.dtype, head_dim: int, group: int, tiles: int = 3, started: bool = False, seed: int = 0
) -> Batch:
    """Ragged sequences on shuffled pages; everything outside a head's span is NaN or page -1."""
    random = torch.Generator().manual_seed(seed)
    tile_bytes = page_layout(head_dim, dtype, 1 << 20).tile_bytes
    layout = page_layout(head_dim, dtype, tiles * tile_bytes + 64)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    shortest = lengths.min(dim=1).values
    starts = (
        (shortest * torch.rand(len(LENGTHS), generator=random)).int()
        if started
        else torch.zeros_like(shortest)
    )
    pages = -(-int(lengths.max()) // layout.slots)
    count = lengths.numel() * pages
    pool = torch.full((count, layout.page_bytes), 255, dtype=torch.uint8)
    # A layer of a bigger table, as the engine holds it: strided, last dim contiguous.
    tables = torch.full((len(LENGTHS), 3, KV_HEADS, pages), -1, dtype=torch.int32)[:, 1]
    order = torch.randperm(count, generator=random).int().view(tables.shape)
    for row in range(len(LENGTHS)):
        first = int(starts[row])
        for head in range(KV_HEADS):
            stop = int(lengths[row, head])
            used = slice(first // layout.slots, -(-stop // layout.slots))
            tables[row, head, used] = order[row, head, used]
            k, v = torch.randn(2, stop - first, head_dim, generator=random).to(dtype)
            within = first - used.start * layout.slots
            fallback.scatter(pool, layout, tables[row, head, used], k, v, within)
    fused = torch.randn(len(LENGTHS), KV_HEADS * (group + 2), head_dim, generator=random).to(dtype)
    rows = torch.randperm(len(LENGTHS), generator=random).int()
    return Batch(fused[:, : KV_HEADS * group], pool, layout, tables, starts, lengths, rows, head_dim**-0.5)


@functools.cache
def expected(batch_key: tuple[torch.dtype, int, int, int, bool]) -> tuple[torch.Tensor, torch.Tensor]:
    return reference.paged_decode_attention(*make_batch(*batch_key))


def assert_close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    error = (found.double() - wanted.double()).abs().amax(dim=-1)
    assert bool((error <= tolerance * wanted.double().abs().amax(dim=-1).clamp(min=1e-3)).all()), float(
        error.max()
    )


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
