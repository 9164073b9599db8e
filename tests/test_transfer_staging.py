"""The staging arena against a model that marks every unit of memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_tiers.transfer.staging import (
    ALIGNMENT,
    FreeList,
    StagingArena,
    lease_bytes,
    payload_checksum,
    seal_offset,
)


def first_fit(taken: list[bool], n: int) -> int | None:
    """The stupid allocator: look at every position."""
    return next((at for at in range(len(taken) - n + 1) if not any(taken[at : at + n])), None)


@given(st.integers(0, 24), st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=60))
@settings(max_examples=300, deadline=None)
def test_the_free_list_behaves_as_first_fit_over_a_bitmap(size: int, steps: list[tuple[bool, int]]) -> None:
    holes, taken, live = FreeList(size), [False] * size, []
    for take, n in steps:
        if take:
            offset = holes.take(n)
            assert offset == first_fit(taken, n)
            if offset is not None:
                taken[offset : offset + n] = [True] * n
                live.append((offset, n))
        elif live:
            offset, count = live.pop(n % len(live))
            holes.give(offset, count)
            taken[offset : offset + count] = [False] * count
        holes.check()
        assert holes.free_bytes == taken.count(False)
    for offset, count in live:
        holes.give(offset, count)
    holes.check()
    assert holes.take(size) == 0 if size else holes.free_bytes == 0


def test_giving_back_twice_is_caught() -> None:
    holes = FreeList(10)
    assert holes.take(4) == 0
    holes.give(0, 4)
    with pytest.raises(AssertionError):
        holes.give(0, 4)


@given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(1, 20_000)), max_size=40))
@settings(max_examples=100, deadline=None)
def test_leases_never_overlap_and_everything_comes_back(pages: int, steps: list[tuple[bool, int]]) -> None:
    arena, live = StagingArena(pages * ALIGNMENT), {}
    for stamp, (take, n) in enumerate(steps):
        if take and n <= arena.capacity:
            lease = arena.reserve(n)
            if lease is not None:
                assert lease.offset % ALIGNMENT == 0 and lease.buffer.data_ptr() % ALIGNMENT == 0
                assert lease.buffer.numel() == n and lease.seal.numel() == 64
                lease.buffer.fill_(stamp % 251)
                lease.seal.fill_(stamp % 251)
                live[stamp] = lease
        elif live:
            stamp = list(live)[n % len(live)]
            lease = live.pop(stamp)
            assert (lease.buffer == stamp % 251).all() and (lease.seal == stamp % 251).all()
            lease.release()
        arena.check()
        assert arena.used_bytes == sum(lease_bytes(lease.nbytes) for lease in live.values())
    for lease in live.values():
        lease.release()
    arena.check()
    assert arena.used_bytes == 0


def test_full_is_none_and_never_is_an_error() -> None:
    arena = StagingArena(2 * ALIGNMENT)
    lease = arena.reserve(arena.capacity)
    assert lease is not None and arena.reserve(1) is None
    lease.release()
    for nbytes in (0, -1, arena.capacity + 1):
        with pytest.raises(ValueError, match=str(arena.capacity)):
            arena.reserve(nbytes)


def test_a_released_lease_cannot_be_used_or_released_again() -> None:
    lease = StagingArena(ALIGNMENT).reserve(8)
    assert lease is not None
    lease.release()
    with pytest.raises(AssertionError):
        lease.release()
    with pytest.raises(AssertionError):
        _ = lease.buffer


@pytest.mark.parametrize(
    ("nbytes", "offset", "total"), [(1, 64, 4096), (64, 64, 4096), (4032, 4032, 4096), (4033, 4096, 8192)]
)
def test_the_seal_stands_at_the_next_multiple_of_64(nbytes: int, offset: int, total: int) -> None:
    assert (seal_offset(nbytes), lease_bytes(nbytes)) == (offset, total)


def test_the_checksum_is_xxh3_64() -> None:
    assert (
        payload_checksum(torch.tensor([], dtype=torch.uint8)) == 0x2D06800538D394C2
    )  # published for no input
