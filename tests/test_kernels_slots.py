"""Bookkeeping of decode rules, every implementation against the reference: exactly, there is nothing to round."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_batches import implementation

from kernels import fallback, ops, reference
from kernels.layout import page_layout
from kernels.ops import Kernels

IMPLEMENTATIONS = ["native", "portable", "torch"]


@pytest.fixture(params=IMPLEMENTATIONS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return implementation(request.param)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def heads_of(seed: int, slots: int, layers: int = 2, heads: int = 3) -> dict[str, torch.Tensor]:
    """Slots of heads of any length, one of them without any: holes, protected tokens, few different scores."""
    random = torch.Generator().manual_seed(seed)
    shape = (layers, heads, slots)
    lengths = torch.randint(0, slots + 1, shape[:2], generator=random).int()
    lengths[0, 0], lengths[-1, -1] = slots, 0
    used = torch.arange(slots) < lengths.unsqueeze(-1)
    positions = torch.rand(shape, generator=random).argsort(-1).int() * 2
    held = used & (torch.rand(shape, generator=random) < 0.95)
    score = torch.randint(0, 4, (layers, heads, slots + 5), generator=random) / 3
    score[..., slots:] = torch.nan
    score[..., :slots][~used] = torch.nan
    return {
        "score": score.float(),
        "positions": torch.where(held, positions, -1),
        "kept": held & (torch.rand(shape, generator=random) < 0.3),
        "lengths": lengths,
    }


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**16),
    slots=st.integers(1, 70),
    scored=st.booleans(),
    recent=st.booleans(),
    seen=st.sampled_from([0, 1, 17, 1000]),
    nan=st.booleans(),
)
def test_the_same_token_leaves_first_everywhere(name, seed, slots, scored, recent, seen, nan):
    given = heads_of(seed, slots)
    score = given["score"]
    if nan:
        score[..., ::7] = torch.nan
    newest = torch.randint(
        0, slots, given["lengths"].shape, generator=torch.Generator().manual_seed(seed)
    ).int()
    arguments = (
        score if scored else None,
        given["positions"],
        given["kept"],
        given["lengths"],
        2 * slots - 2,
    )
    more = {"recent": newest if recent else None, "seen": seen if scored else 0}
    wanted = reference.lowest_slots(*arguments, **more)
    assert torch.equal(implementation(name).lowest_slots(*arguments, **more), wanted)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**16), slots=st.integers(1, 70), share=st.sampled_from([0.0, 0.5, 0.97, 1.0]))
def test_the_same_tokens_are_kept_everywhere(name, seed, slots, share):
    given = heads_of(seed, slots)
    values = torch.randint(
        -2, 3, given["positions"].shape, generator=torch.Generator().manual_seed(seed)
    ).double()
    values[..., ::5] *= torch.inf
    values.nan_to_num_(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
    counts = ((given["positions"] >= 0).sum(-1) * share).int()
    wanted = reference.keep_highest(values, given["positions"], counts)
    assert torch.equal(implementation(name).keep_highest(values, given["positions"], counts), wanted)
    assert torch.equal(wanted.sum(-1), counts)


def test_of_equal_scores_the_lowest_position_leaves_wherever_it_lies(kernels):
    positions = torch.tensor([[[9, 4, 40, 3, 7]]], dtype=torch.int32)
    kept = torch.tensor([[[False, False, False, True, False]]])
    lengths = torch.tensor([[5]], dtype=torch.int32)
    for score in (None, torch.full((1, 1, 5), 0.5)):
        assert kernels.lowest_slots(score, positions, kept, lengths, 40).item() == 1
    recent = torch.tensor([[100]], dtype=torch.int32)
    rising = torch.arange(5.0).flip(0).view(1, 1, 5)
    assert kernels.lowest_slots(rising, positions, kept, lengths, 40).item() == 4
    assert kernels.lowest_slots(rising, positions, kept, lengths, 40, recent=recent).item() == 1
    assert kernels.lowest_slots(rising, positions, torch.ones_like(kept), lengths, 40).item() == -1


def test_heads_may_share_one_row_of_scores(kernels):
    given = heads_of(3, 40)
    shared = given["score"][:, :1].expand(-1, 3, -1)
    rest = (given["positions"], given["kept"], given["lengths"], 78)
    assert torch.equal(
        kernels.lowest_slots(shared, *rest), reference.lowest_slots(shared.contiguous(), *rest)
    )


def test_attention_is_added_to_slots_in_use_and_nowhere_else(kernels):
    random = torch.Generator().manual_seed(4)
    lengths = torch.tensor([[37, 0, 5], [1, 16, 33]], dtype=torch.int32)
    seen = torch.full((2, 4, 3, 50), torch.nan)[:, 2]
    sums = torch.rand(2, 3, 40, generator=random)
    used = torch.arange(40) < lengths.unsqueeze(-1)
    seen[..., :40][used] = torch.rand(int(used.sum()), generator=random)
    wanted = sums.clone()
    reference.add_seen(wanted, seen, lengths)
    found = sums.clone()
    kernels.add_seen(found, seen, lengths)
    assert torch.equal(found, wanted) and torch.equal(found[~used], sums[~used])
    assert torch.equal(found[used], (sums + seen[..., :40])[used])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [8, 40])
@pytest.mark.parametrize("in_order", [True, False])
def test_tokens_move_between_pages_and_the_others_stay(kernels, dtype, dim, in_order):
    random = torch.Generator().manual_seed(dim)
    layout = page_layout(dim, dtype, 2 * page_layout(dim, dtype, 1 << 20).tile_bytes + 64)
    heads, slots = 3, 5 * layout.slots - 3
    pool = torch.full((heads * 5 + 4, layout.page_bytes), 255, dtype=torch.uint8)
    tables = torch.randperm(len(pool), generator=random)[: heads * 5].int().view(heads, 5)
    k, v = torch.randn(2, heads, slots, dim, generator=random).to(dtype)
    fallback.scatter_heads(pool, layout, tables, k, v)
    keep = torch.rand(heads, slots, generator=random) < 0.6
    sources = torch.full((heads, slots), -1)
    for head, kept in enumerate(keep):
        count = int(kept.sum())
        order = torch.nonzero(kept)[:, 0]
        if not in_order:
            behind = order[order >= count].tolist()
            order = torch.tensor([i if kept[i] else behind.pop(0) for i in range(count)])
        sources[head, :count] = order
    before = pool.clone()
    kernels.move_slots(pool, layout, tables, sources)
    found_k, found_v = torch.empty_like(k), torch.empty_like(v)
    reference.gather_heads(pool, layout, tables, 0, slots, found_k, found_v)
    places = torch.where(sources >= 0, sources, torch.arange(slots)).unsqueeze(-1).expand_as(k)
    assert torch.equal(found_k, k.gather(1, places)) and torch.equal(found_v, v.gather(1, places))
    reference.move_slots(before, layout, tables, sources)
    assert torch.equal(before, pool)


def test_what_lies_outside_is_our_own_mistake(kernels):
    given = heads_of(1, 20)
    with pytest.raises(AssertionError):
        kernels.lowest_slots(None, given["positions"], given["kept"], given["lengths"] + 1, 40)
    with pytest.raises(AssertionError):
        kernels.add_seen(torch.zeros(2, 3, 19), torch.zeros(2, 3, 30), given["lengths"])
    with pytest.raises(AssertionError):
        kernels.keep_highest(torch.zeros(2, 3, 20).double(), given["positions"], given["lengths"] + 1)
    layout = page_layout(8, torch.float32, 4096)
    pool, tables = torch.zeros(2, 4096, dtype=torch.uint8), torch.tensor([[0, 7]], dtype=torch.int32)
    beyond = layout.slots + torch.arange(3).unsqueeze(0)
    with pytest.raises(AssertionError):
        kernels.move_slots(pool, layout, tables, beyond)


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_nothing(threads):
    given = heads_of(9, 5000, 4, 5)
    torch.set_num_threads(threads)
    arguments = (given["score"], given["positions"], given["kept"], given["lengths"], 9998)
    assert torch.equal(ops.lowest_slots(*arguments, seen=9000), fallback.lowest_slots(*arguments, seen=9000))
