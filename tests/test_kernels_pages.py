"""Moving tokens in and out of pages: every implementation against plain rows."""

from __future__ import annotations

import pytest
import torch

from kernels import fallback, native, reference
from kernels.layout import PageLayout, page_layout
from kernels.ops import Kernels

HEADS = 3


@pytest.fixture(params=["native", "torch", "reference"], scope="module")
def kernels(request: pytest.FixtureRequest) -> Kernels:
    if request.param == "native":
        return native.load()
    return fallback if request.param == "torch" else reference


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def make_pool(layout: PageLayout, slots: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A NaN-filled pool and shuffled tables int32[HEADS,P] for `slots` tokens a head, one page to spare."""
    pages = -(-slots // layout.slots)
    pool = torch.full((HEADS * pages + 1, layout.page_bytes), 255, dtype=torch.uint8)
    order = torch.randperm(HEADS * pages, generator=torch.Generator().manual_seed(seed))
    return pool, order.int().view(HEADS, pages)


def make_rows(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random rows whose row stride is not their length."""
    random = torch.Generator().manual_seed(seed)
    wide = torch.randn(*shape[:-1], shape[-1] + 3, generator=random).to(dtype)
    return wide[..., 1 : shape[-1] + 1]


def odd_page(head_dim: int, dtype: torch.dtype, tiles: int) -> PageLayout:
    """A page with spare bytes after its last tile."""
    return page_layout(head_dim, dtype, tiles * page_layout(head_dim, dtype, 1 << 20).tile_bytes + 64)


@pytest.mark.parametrize("head_dim", [32, 64, 65, 80, 96, 128, 256])
@pytest.mark.parametrize("span", [(0, 1), (0, 100), (5, 6), (7, 71), (16, 48), (31, 33), (40, 40)])
def test_what_is_scattered_is_gathered_and_nothing_else_changes(
    kernels: Kernels, head_dim: int, dtype: torch.dtype, span: tuple[int, int]
) -> None:
    start, stop = span
    layout = odd_page(head_dim, dtype, 2)
    pool, tables = make_pool(layout, 100)
    k, v = make_rows((2, HEADS, stop - start, head_dim), dtype, seed=1)
    kernels.scatter_heads(pool, layout, tables, k, v, start)
    k_out, v_out = torch.zeros(2, HEADS, stop - start, head_dim, dtype=dtype)
    kernels.gather_heads(pool, layout, tables, start, stop, k_out, v_out)
    assert torch.equal(k_out, k) and torch.equal(v_out, v)
    everything, values = torch.zeros(2, HEADS, tables.shape[1] * layout.slots, head_dim, dtype=dtype)
    kernels.gather_heads(pool, layout, tables, 0, everything.shape[1], everything, values)
    untouched = torch.ones(everything.shape[1], dtype=torch.bool)
    untouched[start:stop] = False
    assert bool(everything[:, untouched].isnan().all()) and bool(values[:, untouched].isnan().all())
    assert bool((pool[-1] == 255).all())


@pytest.mark.parametrize("head_dim", [64, 65])
def test_all_implementations_write_the_same_bytes(
    kernels: Kernels, head_dim: int, dtype: torch.dtype
) -> None:
    layout = odd_page(head_dim, dtype, 2)
    k, v = make_rows((2, HEADS, 90, head_dim), dtype, seed=2)
    pool, tables = make_pool(layout, 100)
    wanted = pool.clone()
    kernels.scatter_heads(pool, layout, tables, k, v, 3)
    reference.scatter_heads(wanted, layout, tables, k, v, 3)
    assert torch.equal(pool, wanted)


def test_one_head_moves_like_all_of_them(kernels: Kernels, dtype: torch.dtype) -> None:
    layout = odd_page(80, dtype, 1)
    k, v = make_rows((2, HEADS, 50, 80), dtype, seed=3)
    pool, tables = make_pool(layout, 60)
    wanted = pool.clone()
    reference.scatter_heads(wanted, layout, tables, k, v, 9)
    for head in range(HEADS):
        kernels.scatter(pool, layout, tables[head], k[head], v[head], 9)
        k_out, v_out = torch.zeros(2, 20, 80, dtype=dtype)
        kernels.gather(pool, layout, tables[head], 30, 50, k_out, v_out)
        assert torch.equal(k_out, k[head, 21:41]) and torch.equal(v_out, v[head, 21:41])
    assert torch.equal(pool, wanted)


def test_appends_continue_a_sequence_across_tiles_and_pages(kernels: Kernels, dtype: torch.dtype) -> None:
    layout = odd_page(65, dtype, 2)
    steps, first = 40, [[3, 20, 31], [15, 16, 0]]
    pool, flat = make_pool(layout, 6 * layout.slots)
    tables = flat.view(HEADS, 2, -1).transpose(0, 1)
    lengths = torch.tensor(first, dtype=torch.int32)
    rows = torch.tensor([1, 0], dtype=torch.int32)
    k, v = make_rows((2, steps, 2, HEADS, 65), dtype, seed=4)
    for step in range(steps):
        kernels.append(pool, layout, tables, lengths, rows, k[step], v[step])
        lengths += 1
    for b, row in enumerate(rows.tolist()):
        for head in range(HEADS):
            k_out, v_out = torch.zeros(2, steps, 65, dtype=dtype)
            start = first[row][head]
            kernels.gather(pool, layout, tables[row, head], start, start + steps, k_out, v_out)
            assert torch.equal(k_out, k[:, b, head]) and torch.equal(v_out, v[:, b, head])
    assert lengths.tolist() == [[at + steps for at in row] for row in first]


def test_a_copied_page_is_equal_byte_for_byte_and_independent(kernels: Kernels, dtype: torch.dtype) -> None:
    layout = odd_page(64, dtype, 1)
    pool = torch.randint(0, 256, (4, layout.page_bytes), dtype=torch.uint8)
    before = pool.clone()
    kernels.copy_page(pool, 2, 0)
    assert torch.equal(pool, before[[2, 1, 2, 3]])
    pool[2] = 0
    assert torch.equal(pool[0], before[2])


def test_spans_and_pages_outside_are_our_mistake(kernels: Kernels) -> None:
    layout = odd_page(64, torch.float32, 1)
    pool, tables = make_pool(layout, 32)
    k = torch.zeros(HEADS, 8, 64)
    with pytest.raises(AssertionError):
        kernels.scatter_heads(pool, layout, tables, k, k, 25)
    with pytest.raises(AssertionError):
        kernels.gather_heads(pool, layout, tables, 0, 9, k, k)
    with pytest.raises(AssertionError):
        kernels.scatter_heads(pool, layout, tables, k[:, :, :60], k[:, :, :60])
    with pytest.raises(AssertionError):
        kernels.copy_page(pool, 0, pool.shape[0])
    tables[1, 0] = -1
    with pytest.raises(AssertionError):
        kernels.scatter_heads(pool, layout, tables, k, k)
    with pytest.raises(AssertionError):
        kernels.gather_heads(pool, layout, tables, 0, 8, k, k)
    full = torch.full((1, HEADS), 32, dtype=torch.int32)
    with pytest.raises(AssertionError):
        kernels.append(
            pool, layout, tables[None], full, torch.zeros(1, dtype=torch.int32), k[None, :, 0], k[None, :, 0]
        )
