"""Lossy codecs at rest: how far what comes back is from what was computed, and that no two makers differ."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import lossy
from kernels.lossy import Encoded
from kv_tiers import lossy_codec
from kv_tiers.at_rest import GROUP, AtRest, part_bytes
from kv_tiers.block import BlockFault, BlockLayout, open_block, read_header, read_layer_run, write_run
from kv_tiers.keys import Fingerprint, block_keys, is_exact, is_kept_as, kept_as, lossy_key, survivor_key
from kv_tiers.lossy_blocks import decode_blocks, encode_blocks
from kv_tiers.lossy_codec import NativeCodec, TorchCodec
from kv_tiers.verify import verify_block

LOSSY = [AtRest.FP8, AtRest.INT8, AtRest.INT4]
CODECS = {
    "native": NativeCodec(lossy.load()),
    "portable": NativeCodec(lossy.load(("-DKVTIDE_WIDTH=4",))),
    "torch": TorchCodec(),
}
FINGERPRINT = Fingerprint(bytes(32))
KEYS = block_keys(FINGERPRINT, range(4000), 4)
LEVELS = {AtRest.INT8: 255, AtRest.INT4: 15}
# Groups that are full, several, and broken off, along tokens and channels; odd numbers of codes.
SHAPES = [(((2, 64),), 16), (((1, 33), (3, 40)), 35), (((1, 1), (2, 5)), 1), (((1, 70),), 64), (((1, 3),), 7)]

GOLDEN_LOSSY = {
    AtRest.FP8: "f24bbff5710d9aff79ad0f6c4c2e4e97050cc8ee0a13deab6b766c6f73737901",
    AtRest.INT8: "f0ffd01644cb29aa4c9a03bdd457681156a0e74d1fea512f6b766c6f73737902",
    AtRest.INT4: "b478b26aba8c1392f9973388d232321be330fb6401b1b5566b766c6f73737903",
}
GOLDEN_BYTES = {
    AtRest.FP8: "2549123c00000000006e7afe000000002549923b0000000076767efe00000000",
    AtRest.INT8: "813be13c000080c000feff00000000000000813c803f00c00000fe0000000000",
    AtRest.INT4: "4d3eab3e000080c0f00f0000000000000000893e803f00c0000f000000000000",
}


@pytest.fixture(params=list(CODECS))
def maker(request, monkeypatch):
    """Everybody encodes with this implementation."""
    monkeypatch.setattr(lossy_codec, "chosen", lambda: CODECS[request.param])
    return request.param


def blocks_of(layout, rows, count=1, keys=KEYS):
    """Blocks of K and V [Hk, count * T, D] per layer, as computed."""
    slots = [bytearray(layout.nbytes) for _ in range(count)]
    write_run(slots, layout, FINGERPRINT, keys[:count], rows[::2], rows[1::2])
    return slots


def random_rows(layout, count=1, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(heads, count * layout.block_tokens, dim, generator=generator) * scale).to(layout.dtype)
        for heads, dim in layout.layers
        for _ in "kv"
    ]


def there_and_back(layout, codec, rows, count=1):
    """The encoded blocks, and K and V per layer as they come back."""
    encoded = [bytearray(layout.kept_as(codec).nbytes + 64) for _ in range(count)]
    assert (
        encode_blocks(blocks_of(layout, rows, count), encoded, KEYS[:count], codec) == [Encoded.DONE] * count
    )
    names = [lossy_key(key, codec) for key in KEYS[:count]]
    assert [verify_block(buf, name) for buf, name in zip(encoded, names, strict=True)] == [None] * count
    decoded = [bytearray(b"\xee" * (layout.nbytes + 100)) for _ in range(count)]
    assert decode_blocks(encoded, decoded, names, codec) == [True] * count
    headers = [open_block(buf, layout, FINGERPRINT, name) for buf, name in zip(decoded, names, strict=True)]
    assert not any(isinstance(header, BlockFault) for header in headers)
    back = [torch.full_like(each, float("nan")) for each in rows]
    for layer in range(len(layout.layers)):
        keys, values = back[2 * layer], back[2 * layer + 1]
        assert read_layer_run(decoded, layout, headers, layer, keys, values) == count
    return encoded, back


# Keys


def test_golden_lossy_keys_are_pinned_and_show_their_codec():
    assert {codec: lossy_key(KEYS[0], codec).digest.hex() for codec in LOSSY} == GOLDEN_LOSSY
    for codec in LOSSY:
        key = lossy_key(KEYS[0], codec)
        assert not is_exact(key) and [each for each in AtRest if is_kept_as(key, each)] == [codec]
        assert kept_as(key, AtRest.INT4) == kept_as(key, AtRest.EXACT) == key, "made once"
    assert is_exact(KEYS[0]) and kept_as(KEYS[0], AtRest.EXACT) == KEYS[0]
    assert len({lossy_key(key, codec) for key in KEYS for codec in LOSSY}) == 3 * len(KEYS)


def test_survivors_of_lossy_kv_have_keys_of_their_own():
    keys = {survivor_key(FINGERPRINT, range(9), "full", at_rest=codec) for codec in AtRest}
    assert len(keys) == 4 and survivor_key(FINGERPRINT, range(9), "full") in keys


# What comes back


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.label)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_element_comes_back_within_its_bound(maker, shape, codec, dtype):
    layout = BlockLayout(layers=shape[0], dtype=dtype, block_tokens=shape[1])
    rows = random_rows(layout, count=3)
    _, back = there_and_back(layout, codec, rows, count=3)
    for place, (ours, theirs) in enumerate(zip(rows, back, strict=True)):
        for block in range(3):
            span = slice(block * layout.block_tokens, (block + 1) * layout.block_tokens)
            assert_near(ours[:, span], theirs[:, span], codec, keys=place % 2 == 0)


def assert_near(ours, theirs, codec, *, keys):
    """Half a scale, or what three bits of mantissa leave, and the rounding of the dtype on top."""
    x, y = ours.double(), theirs.double()
    rounding = torch.finfo(ours.dtype).eps * x.abs().amax() * 2 + torch.finfo(ours.dtype).tiny
    if codec is AtRest.FP8:
        scale = x.abs().amax((1, 2), keepdim=True) / 448
        assert bool(((x - y).abs() <= torch.maximum(x.abs() / 16, scale / 1024) + rounding).all())
        return
    axis, size = (2, x.shape[2]) if codec is AtRest.INT8 else (1 if keys else 2, GROUP)
    for before, after in zip(x.split(size, axis), y.split(size, axis), strict=True):
        spread = before.amax(axis, keepdim=True) - before.amin(axis, keepdim=True)
        scale = spread / LEVELS[codec] * (1 + torch.finfo(ours.dtype).eps) + 2.0**-24
        assert bool(((before - after).abs() <= scale / 2 + rounding).all())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.floats(-(2.0**100), 2.0**100, width=32) | st.floats(-8, 8, width=16), min_size=12, max_size=12
    ),
    st.sampled_from(LOSSY),
    st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_the_bounds_hold_for_any_numbers(values, codec, dtype):
    layout = BlockLayout(layers=((1, 3),), dtype=dtype, block_tokens=4)
    rows = [torch.tensor(values).view(1, 4, 3).to(dtype), torch.tensor(values[::-1]).view(1, 4, 3).to(dtype)]
    for implementation in CODECS.values():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lossy_codec, "chosen", lambda made=implementation: made)
            _, back = there_and_back(layout, codec, rows)
        for place in (0, 1):
            assert_near(rows[place], back[place], codec, keys=place == 0)


@pytest.mark.parametrize("codec", [AtRest.INT8, AtRest.INT4], ids=lambda codec: codec.label)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("value", [0.0, -0.3, 1e-6, 60_000.0])
def test_constant_groups_come_back_exactly(maker, codec, dtype, value):
    layout = BlockLayout(layers=((2, 40),), dtype=dtype, block_tokens=40)
    rows = [torch.full((2, 40, 40), value).to(dtype) for _ in "kv"]
    _, back = there_and_back(layout, codec, rows)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(rows, back, strict=True))


@pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.label)
def test_the_largest_numbers_come_back_finite(maker, codec):
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        layout = BlockLayout(layers=((1, 16),), dtype=dtype, block_tokens=16)
        most = torch.finfo(dtype).max * (1.0 if codec is AtRest.FP8 or dtype is torch.float16 else 0.49)
        rows = [torch.tensor([most, -most, 0.0, 1.0]).repeat(64).view(1, 16, 16).to(dtype) for _ in "kv"]
        _, back = there_and_back(layout, codec, rows)
        assert all(bool(each.isfinite().all()) for each in back)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.label)
def test_a_block_with_a_number_that_is_not_finite_is_not_encoded(maker, codec, bad):
    layout = BlockLayout(layers=((1, 8), (2, 8)), dtype=torch.bfloat16, block_tokens=4)
    rows = random_rows(layout, count=3)
    rows[3][1, 5, 7] = bad  # the second block's
    encoded = [bytearray(layout.kept_as(codec).nbytes) for _ in range(3)]
    outcomes = encode_blocks(blocks_of(layout, rows, 3), encoded, KEYS[:3], codec)
    assert outcomes == [Encoded.DONE, Encoded.NOT_FINITE, Encoded.DONE]
    assert read_header(encoded[1]) is BlockFault.NOT_A_BLOCK


def test_a_range_that_is_no_number_is_not_encoded_either(maker):
    layout = BlockLayout(layers=((1, 4),), dtype=torch.float32, block_tokens=4)
    rows = [torch.tensor([3e38, -3e38] * 8).view(1, 4, 4) for _ in "kv"]
    outcomes = encode_blocks(blocks_of(layout, rows), [bytearray(layout.nbytes * 2)], KEYS[:1], AtRest.INT8)
    assert outcomes == [Encoded.NOT_FINITE]


# Who makes it


@pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.label)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_makers_make_the_same_bytes(monkeypatch, shape, codec):
    layout = BlockLayout(layers=shape[0], dtype=torch.bfloat16, block_tokens=shape[1])
    rows = random_rows(layout, count=2, seed=7, scale=3.0)
    rows[0][0, 0] *= 1e-30  # subnormal codes, and scales near zero
    made = []
    for implementation in CODECS.values():
        monkeypatch.setattr(lossy_codec, "chosen", lambda made=implementation: made)
        encoded, back = there_and_back(layout, codec, rows, count=2)
        made.append(([bytes(each) for each in encoded], [each.view(torch.int16).tolist() for each in back]))
    assert made[0] == made[1] == made[2]


def test_the_bytes_of_a_small_block_are_pinned(maker):
    """The format is FINAL. Int8 by hand: K of token 0 is [0, 1], its scale 1/255 up to bf16, its codes 0 and 254."""
    layout = BlockLayout(layers=((1, 2),), dtype=torch.bfloat16, block_tokens=2)
    rows = [
        torch.tensor([[[0.0, 1.0], [3.0, -4.0]]]).bfloat16(),
        torch.tensor([[[1.0, 1.0], [2.0, -2.0]]]).bfloat16(),
    ]
    found = {}
    for codec in LOSSY:
        (encoded,), _ = there_and_back(layout, codec, rows)
        rest = layout.kept_as(codec)
        found[codec] = bytes(encoded[rest.header_bytes : rest.header_bytes + rest.payload_bytes]).hex()
    assert found == GOLDEN_BYTES


# What is not encoded, and not decoded


@pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.label)
def test_what_is_torn_another_block_or_too_long_is_not_encoded(maker, codec):
    layout = BlockLayout(layers=((1, 8), (2, 8)), dtype=torch.bfloat16, block_tokens=4)
    blocks = blocks_of(layout, random_rows(layout, 5), 5)
    blocks[0][layout.layer_offset(1) + 3] ^= 1
    blocks[1][9] ^= 1  # the header
    encoded = [bytearray(layout.kept_as(codec).nbytes) for _ in range(5)]
    encoded[3] = bytearray(layout.kept_as(codec).nbytes - 64)
    names = [*KEYS[:2], KEYS[9], *KEYS[3:5]]
    outcomes = encode_blocks(blocks, encoded, names, codec)
    assert outcomes == [Encoded.NOT_WHOLE] * 4 + [Encoded.DONE]
    assert all(isinstance(read_header(each), BlockFault) for each in encoded[:4])
    again = encode_blocks(encoded[4:], [bytearray(layout.nbytes)], KEYS[4:5], codec)
    assert again == [Encoded.NOT_WHOLE], "encoded already"


@pytest.mark.parametrize("codec", LOSSY, ids=lambda codec: codec.label)
def test_a_block_of_another_codec_is_not_decoded_and_none_is_read_as_computed(maker, codec):
    layout = BlockLayout(layers=((1, 8), (2, 8)), dtype=torch.bfloat16, block_tokens=4)
    rows = random_rows(layout)
    (encoded,), _ = there_and_back(layout, codec, rows)
    into = [bytearray(b"\x11" * layout.nbytes)]
    for other in LOSSY:
        if other is not codec:
            assert decode_blocks([encoded], into, [lossy_key(KEYS[0], codec)], other) == [False]
            assert decode_blocks([encoded], into, [lossy_key(KEYS[0], other)], other) == [False]
    assert decode_blocks([encoded], into, [lossy_key(KEYS[1], codec)], codec) == [False]
    assert decode_blocks(blocks_of(layout, rows), into, [KEYS[0]], codec) == [False]
    assert read_header(into[0]) is BlockFault.NOT_A_BLOCK
    name = lossy_key(KEYS[0], codec)
    assert open_block(encoded, layout, FINGERPRINT, name) is BlockFault.CODEC
    assert open_block(encoded, layout, FINGERPRINT, KEYS[0]) is BlockFault.KEY
    (exact,) = blocks_of(layout, rows)
    assert open_block(exact, layout.kept_as(codec), FINGERPRINT, KEYS[0]) is BlockFault.CODEC


def test_an_unknown_codec_in_a_whole_header_is_refused():
    layout = BlockLayout(layers=((1, 8),), dtype=torch.bfloat16, block_tokens=4)
    (block,) = blocks_of(layout, random_rows(layout))
    block[11] = 9
    end = layout.header_bytes - 8
    block[end : end + 8] = xxhash.xxh3_64_intdigest(bytes(block[:end])).to_bytes(8, "little")
    assert read_header(block) is BlockFault.CODEC


@pytest.mark.parametrize(
    ("codec", "share"), [(AtRest.FP8, 0.505), (AtRest.INT8, 0.532), (AtRest.INT4, 0.345)], ids=str
)
def test_a_block_of_smollm2_shrinks_as_the_docs_say(codec, share):
    layout = BlockLayout(layers=((3, 64),) * 30, dtype=torch.bfloat16)
    assert layout.kept_as(codec).nbytes / layout.nbytes == pytest.approx(share, abs=0.001)
    parts = sum(part_bytes(codec, keys=keys, tokens=16, dim=64, width=2) for keys in (True, False))
    assert layout.kept_as(codec).payload_bytes == 90 * parts


def test_labels_are_read_back_and_wrong_ones_name_the_right_ones():
    assert [AtRest.named(codec.label) for codec in AtRest] == list(AtRest)
    with pytest.raises(ValueError, match="valid: exact, fp8, int8, int4"):
        AtRest.named("int2")


def test_encoding_leaves_what_it_reads_alone(maker):
    layout = BlockLayout(layers=((2, 64),), dtype=torch.bfloat16)
    (block,) = blocks_of(layout, random_rows(layout))
    before = np.frombuffer(bytes(block), np.uint8).copy()
    encode_blocks([block], [bytearray(layout.nbytes)], KEYS[:1], AtRest.INT4)
    assert np.array_equal(before, np.frombuffer(block, np.uint8))
