"""Moving blocks in C++ and in Python: the same checksums, the same answers, the same bytes."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import blocks
from kv_tiers import block_copy
from kv_tiers.block import BlockFault, BlockLayout, open_block, read_layer_run, write_run
from kv_tiers.block_copy import BlockCopy, BlockViews, NativeCopy, PythonCopy
from kv_tiers.keys import Fingerprint, block_keys
from kv_tiers.verify import BlockCheck, copy_verified, copy_whole_blocks, verify_block, whole_blocks

NATIVE = blocks.load()
PORTABLE = blocks.load(("-DKVTIDE_WIDTH=4",))
COPIES: dict[str, BlockCopy] = {
    "native": NativeCopy(NATIVE),
    "portable": NativeCopy(PORTABLE),
    "python": PythonCopy(),
}
FINGERPRINT = Fingerprint(bytes(range(32)))
NOISE = np.random.default_rng(0).integers(0, 256, 100_100, dtype=np.uint8)
# Odd sizes; layers below and above 240 bytes, of one round and of many; several layouts in one batch.
SMALL = BlockLayout(layers=((3, 8), (1, 1), (2, 33)), dtype=torch.bfloat16, block_tokens=3)
SMOL = BlockLayout(layers=((3, 64),) * 4, dtype=torch.bfloat16)
WIDE = BlockLayout(layers=((2, 5), (8, 128)), dtype=torch.float32, first_heads=(0, 1))
LAYOUTS = {"small": SMALL, "smol": SMOL, "wide": WIDE}


@pytest.fixture(params=list(COPIES))
def copies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Everybody copies by this implementation."""
    monkeypatch.setattr(block_copy, "chosen", lambda: COPIES[request.param])
    yield request.param


@pytest.fixture(params=list(LAYOUTS))
def layout(request: pytest.FixtureRequest) -> BlockLayout:
    return LAYOUTS[request.param]


def rows_of(layout: BlockLayout, count: int, kind: str = "plain", seed: int = 0) -> list[list[torch.Tensor]]:
    """K and V of each layer [Hk, count * T, D] as slices of something larger, or with their last dim strided."""
    random = torch.Generator().manual_seed(seed)
    found: list[list[torch.Tensor]] = [[], []]
    for heads, dim in layout.layers:
        for rows in found:
            shape = (heads, count * layout.block_tokens, dim)
            values = torch.randn(shape, generator=random).to(layout.dtype)
            if kind == "sliced":
                larger = torch.full((heads, shape[1] + 5, dim + 3), torch.nan, dtype=layout.dtype)
                larger[:, 2 : 2 + shape[1], :dim] = values
                values = larger[:, 2 : 2 + shape[1], :dim]
            elif kind == "transposed":
                values = values.transpose(1, 2).contiguous().transpose(1, 2)
            rows.append(values)
    return found


def written(layout: BlockLayout, count: int, kind: str = "plain", extra: int = 0, seed: int = 0):
    """(buffers of a page-aligned arena, their keys, K, V)."""
    size = -(-(layout.nbytes + extra) // 64) * 64
    arena = memoryview(mmap.mmap(-1, count * size))
    bufs = [arena[at : at + size] for at in range(0, count * size, size)]
    names = block_keys(FINGERPRINT, range(seed, seed + count * layout.block_tokens), layout.block_tokens)
    keys, values = rows_of(layout, count, kind, seed)
    write_run([buf[: layout.nbytes] for buf in bufs], layout, FINGERPRINT, names, keys, values)
    return bufs, names, keys, values


def digests(address_offset: int, length: int) -> tuple[int, int, int]:
    piece = NOISE[address_offset : address_offset + length]
    address = NOISE.ctypes.data + address_offset
    return NATIVE.xxh3(address, length), PORTABLE.xxh3(address, length), xxhash.xxh3_64_intdigest(piece)


def test_every_short_length_has_the_checksum_of_the_library():
    for length in range(2200):
        native, portable, expected = digests(length % 61, length)
        assert native == portable == expected, length


@settings(deadline=None)
@given(st.integers(0, 100_000), st.integers(0, 99))
def test_any_length_and_alignment_has_the_checksum_of_the_library(length, offset):
    native, portable, expected = digests(offset, length)
    assert native == portable == expected


@pytest.mark.parametrize(
    ("data", "digest"),
    [
        (b"", 0x2D06800538D394C2),
        (b"a", 0xE6C632B61E964E1F),
        (b"abc", 0x78AF5F94892F3950),
        (bytes(4096), None),
    ],
)
def test_fixed_vectors(data, digest):
    array = np.frombuffer(data or b"\0", np.uint8)
    expected = xxhash.xxh3_64_intdigest(data) if digest is None else digest
    assert (
        NATIVE.xxh3(array.ctypes.data, len(data)) == PORTABLE.xxh3(array.ctypes.data, len(data)) == expected
    )


@pytest.mark.parametrize("kind", ["plain", "sliced", "transposed"])
def test_all_write_the_same_bytes_and_read_them_into_any_rows(layout, kind, monkeypatch):
    made = {}
    for name, copy in COPIES.items():
        monkeypatch.setattr(block_copy, "chosen", lambda copy=copy: copy)
        bufs, names, keys, values = written(layout, 5, kind)
        made[name] = [bytes(buf) for buf in bufs]
        headers = [open_block(buf, layout, FINGERPRINT, key) for buf, key in zip(bufs, names, strict=True)]
        for layer in range(len(layout.layers)):
            k, v = (rows[layer].zero_() for rows in rows_of(layout, 5, kind))
            assert read_layer_run(bufs, layout, headers, layer, k, v) == 5
            assert torch.equal(k, keys[layer]) and torch.equal(v, values[layer])
            for rows in (k, v):
                if kind == "sliced":
                    assert rows._base[:, :2].isnan().all() and rows._base[..., rows.shape[2] :].isnan().all()
    assert made["native"] == made["portable"] == made["python"]


def test_runs_that_go_past_the_caches_are_the_same(copies):
    """More than 2 MB in a call, to targets that are aligned and to ones that are not."""
    count = 200
    bufs, names, keys, values = written(SMOL, count)
    headers = [open_block(buf, SMOL, FINGERPRINT, key) for buf, key in zip(bufs, names, strict=True)]
    for shift in (0, 1):
        k, v = (torch.zeros(3 * count * 16 * 64 + 64, dtype=torch.bfloat16) for _ in range(2))
        k, v = (t[shift : len(t) - 64 + shift].view(3, count * 16, 64) for t in (k, v))
        assert read_layer_run(bufs, SMOL, headers, 2, k, v) == count
        assert torch.equal(k, keys[2]) and torch.equal(v, values[2])
        bufs[150][SMOL.layer_offset(1)] ^= 1
        assert read_layer_run(bufs, SMOL, headers, 1, k.fill_(7), v.fill_(7)) == 150
        assert (
            torch.equal(k[:, :2400], keys[1][:, :2400])
            and (k[:, 2400:] == 7).all()
            and (v[:, 2400:] == 7).all()
        )
        bufs[150][SMOL.layer_offset(1)] ^= 1
        size = len(bufs[0])
        arena = memoryview(bytearray(count * size + 128))[shift:]
        targets = [arena[at : at + size] for at in range(0, count * size, size)]
        assert all(copy_whole_blocks(bufs, targets, names)) and targets == bufs
        for target in targets:
            target[:] = bytes(size)
        block_copy.chosen().copy(BlockViews(bufs), BlockViews(targets))
        assert targets == bufs


def test_the_first_bad_block_ends_a_run_and_nothing_behind_it_is_touched(copies, layout):
    bufs, names, keys, _ = written(layout, 6)
    headers = [open_block(buf, layout, FINGERPRINT, key) for buf, key in zip(bufs, names, strict=True)]
    views = BlockViews(bufs)
    for layer in range(len(layout.layers)):
        for bad in range(6):
            end = layout.layer_offset(layer) + layout.layer_bytes(layer)
            bufs[bad][end - 1] ^= 128
            k, v = (rows[layer].fill_(torch.nan) for rows in rows_of(layout, 6))
            assert read_layer_run(views, layout, headers, layer, k, v) == bad
            tokens = bad * layout.block_tokens
            assert torch.equal(k[:, :tokens], keys[layer][:, :tokens])
            assert k[:, tokens:].isnan().all() and v[:, tokens:].isnan().all()
            bufs[bad][end - 1] ^= 128


def test_part_of_a_run_is_read_by_a_slice_of_its_views(copies):
    bufs, names, keys, _ = written(SMALL, 6)
    headers = [open_block(buf, SMALL, FINGERPRINT, key) for buf, key in zip(bufs, names, strict=True)]
    k, v = (torch.zeros(3, 4 * 3, 8, dtype=torch.bfloat16) for _ in range(2))
    assert read_layer_run(BlockViews(bufs)[1:5], SMALL, headers[1:5], 0, k, v) == 4
    assert torch.equal(k, keys[0][:, 3:15])


def test_a_buffer_that_ends_before_its_block_is_refused(copies):
    bufs, names, *_ = written(SMALL, 2)
    headers = [open_block(buf, SMALL, FINGERPRINT, key) for buf, key in zip(bufs, names, strict=True)]
    k, v = (torch.zeros(3, 2 * 3, 8, dtype=torch.bfloat16) for _ in range(2))
    with pytest.raises(AssertionError, match="bytes for blocks of"):
        read_layer_run([bufs[0], bufs[1][: SMALL.nbytes - 64]], SMALL, headers, 0, k, v)


def test_each_block_of_a_batch_is_judged_for_itself(copies):
    """Several layouts, a wrong key, a damaged header, a damaged layer, no block at all; read-only buffers too."""
    small, small_keys, *_ = written(SMALL, 3, extra=500)
    wide, wide_keys, *_ = written(WIDE, 2, seed=5)
    bufs = [*small, *wide, memoryview(bytearray(640))]
    keys = [*small_keys, wide_keys[1], wide_keys[1], wide_keys[0]]
    expected: list[BlockFault | None] = [None, None, None, BlockFault.KEY, None, BlockFault.NOT_A_BLOCK]
    small[1][SMALL.layer_offset(1)] ^= 4
    small[2][60] ^= 1
    expected[1] = expected[2] = BlockFault.CORRUPT
    faults = [verify_block(buf, key) for buf, key in zip(bufs, keys, strict=True)]
    assert faults == expected
    assert whole_blocks(bufs, keys) == [fault is None for fault in expected]
    assert verify_block(memoryview(bytes(small[0])), small_keys[0]) is None
    targets = [memoryview(bytearray(len(buf))) for buf in bufs]
    assert copy_whole_blocks(bufs, targets, keys) == [fault is None for fault in expected]
    for buf, target, fault in zip(bufs, targets, expected, strict=True):
        assert fault is not None or buf == target, "to the last byte behind the block"
        assert fault is None or verify_block(target, keys[0]) is not None
    assert whole_blocks([], []) == copy_whole_blocks([], [], []) == []


def test_blocks_that_are_checked_in_parts_are_judged_as_all_at_once(copies):
    bufs, names, *_ = written(SMOL, 40)
    wide, wide_names, *_ = written(WIDE, 2, seed=5)
    bufs[7][SMOL.layer_offset(2)] ^= 4
    bufs[19][60] ^= 1
    names[31] = names[30]
    keys = [*names[:32], *wide_names, *names[34:]]
    views = BlockViews([*bufs[:32], *wide, *bufs[34:]])
    expected = [index not in (7, 19, 31) for index in range(40)]
    for step in (1, 4, 7, 40):
        check, found = BlockCheck(), []
        for at in range(0, 40, step):
            found += check.whole(views[at : at + step], keys[at : at + step])
        assert found == expected
    bufs[0][0] ^= 1  # the first says of no form
    check = BlockCheck()
    assert check.whole(views[:4], keys[:4]) == [False, True, True, True]
    assert check.whole(views, keys) == [False, *expected[1:]]


def test_views_at_offsets_of_one_memory_are_that_memory(copies):
    bufs, *_ = written(SMALL, 5)
    size = len(bufs[0])
    arena = memoryview(bytearray(b"".join([bytes(100), *bufs])))
    views = BlockViews.within(arena, [100 + index * size for index in (4, 0, 2)], size)
    assert [*views] == [bufs[4], bufs[0], bufs[2]] and list(views.addresses) == list(
        BlockViews([*views]).addresses
    )
    assert views[1:][1] == bufs[2] and list(views.sizes) == [size] * 3 and views.shortest == size
    with pytest.raises(AssertionError):
        BlockViews.within(arena, [len(arena) - size + 1], size)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(list(LAYOUTS)), st.integers(0), st.integers(1, 255), st.sampled_from(list(COPIES)))
def test_a_flipped_byte_in_a_copied_block_is_found(name, position, flip, copy):
    layout = LAYOUTS[name]
    (buf,), (key,), *_ = written(layout, 1)
    end = layout.header_bytes + layout.payload_bytes
    buf[position % end] ^= flip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_copy, "chosen", lambda: COPIES[copy])
        assert verify_block(buf, key) is not None
        assert copy_verified(buf, memoryview(bytearray(len(buf))), key) is not None


def test_without_native_kernels_python_does_it(monkeypatch):
    monkeypatch.setattr(block_copy.ops, "implementation", lambda: "torch")
    assert block_copy.chosen.__wrapped__().name == "python"
    monkeypatch.undo()
    assert (
        block_copy.chosen().name == {"native": "native", "torch": "python"}[block_copy.ops.implementation()]
    )
