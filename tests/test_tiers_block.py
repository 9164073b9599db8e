"""Blocks as bytes: what was written comes back, or nothing does."""

from __future__ import annotations

import struct
import threading

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import blocks
from kv_tiers import block_copy
from kv_tiers.block import (
    ALIGN,
    FORMAT_VERSION,
    MAGIC,
    BlockFault,
    BlockHeader,
    BlockLayout,
    open_block,
    read_header,
    read_layer,
    read_layer_run,
    write_block,
    write_run,
)
from kv_tiers.keys import Fingerprint, block_keys

COPIES = {"native": lambda: block_copy.NativeCopy(blocks.load()), "python": block_copy.PythonCopy}
FINGERPRINT = Fingerprint(bytes(range(32)))
OTHER_FINGERPRINT = Fingerprint(bytes(32))
KEYS = block_keys(FINGERPRINT, range(64), 4)
LAYOUT = BlockLayout(layers=((3, 8), (1, 16), (2, 8)), dtype=torch.bfloat16, block_tokens=4)

GOLDEN_BLOCK = "1f8db5173686947c"

LAYOUTS = [
    LAYOUT,
    BlockLayout(layers=((1, 1),), dtype=torch.float32, block_tokens=1),
    BlockLayout(layers=((2, 5), (3, 7)), dtype=torch.float16, block_tokens=3, first_heads=(2, 3)),
    BlockLayout(layers=((3, 64),) * 30, dtype=torch.bfloat16, block_tokens=16),
]


@pytest.fixture(scope="module", params=list(COPIES), autouse=True)
def copies(request):
    """Every test here is of both implementations."""
    copy = COPIES[request.param]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_copy, "chosen", lambda: copy)
        yield


def random_kv(layout, blocks=1, seed=0):
    """Keys and values per layer, [Hk, blocks * T, D]."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(heads, blocks * layout.block_tokens, dim) for heads, dim in layout.layers]
    return tuple(
        [torch.randn(shape, generator=generator).to(layout.dtype) for shape in shapes] for _ in range(2)
    )


def written(layout=LAYOUT, key=KEYS[0], seed=0):
    buf = np.full(layout.nbytes, 0xFF, dtype=np.uint8)
    keys, values = random_kv(layout, seed=seed)
    write_block(buf, layout, FINGERPRINT, key, keys, values)
    return buf, keys, values


def nan_rows(layout, layer, blocks=1):
    heads, dim = layout.layers[layer]
    return [
        torch.full((heads, blocks * layout.block_tokens, dim), torch.nan, dtype=layout.dtype)
        for _ in range(2)
    ]


def read_everything(buf, layout=LAYOUT, key=KEYS[0]):
    """All layers, or None for a miss: how a reader uses a block."""
    header = open_block(buf, layout, FINGERPRINT, key)
    if isinstance(header, BlockFault):
        return None
    outputs = []
    for layer in range(len(layout.layers)):
        k, v = nan_rows(layout, layer)
        if not read_layer(buf, layout, header, layer, k, v):
            assert k.isnan().all() and v.isnan().all(), "a miss leaves the outputs alone"
            return None
        outputs.append((k, v))
    return outputs


def reseal(buf, layout=LAYOUT):
    """Give a patched header a right checksum, as a writer of another version would."""
    end = layout.header_bytes - 8
    struct.pack_into("<Q", buf, end, xxhash.xxh3_64_intdigest(buf[:end]))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.layout_id)
def test_what_was_written_is_read_back(layout):
    buf, keys, values = written(layout)
    outputs = read_everything(buf, layout)
    assert outputs is not None
    for (k, v), expected_k, expected_v in zip(outputs, keys, values, strict=True):
        assert torch.equal(k, expected_k) and torch.equal(v, expected_v)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.layout_id)
def test_offsets_describe_the_bytes(layout):
    buf, keys, values = written(layout)
    tensor = torch.from_numpy(buf)
    for layer, (heads, dim) in enumerate(layout.layers):
        head_bytes = layout.layer_bytes(layer) // heads
        for head in range(heads):
            start = layout.head_offset(layer, head)
            rows = tensor[start : start + head_bytes].clone().view(layout.dtype)
            k, v = rows.view(2, layout.block_tokens, dim)
            assert torch.equal(k, keys[layer][head]) and torch.equal(v, values[layer][head])
    last = len(layout.layers) - 1
    assert layout.layer_offset(0) == layout.header_bytes
    assert layout.header_bytes + layout.payload_bytes == layout.layer_offset(last) + layout.layer_bytes(last)
    assert (
        layout.nbytes % ALIGN == 0 and 0 <= layout.nbytes - layout.header_bytes - layout.payload_bytes < ALIGN
    )


def test_golden_bytes_pin_format_version_1():
    layout = BlockLayout(layers=((2, 2), (1, 2)), dtype=torch.float32, block_tokens=2, first_heads=(4, 2))
    ramp = torch.arange(8, dtype=torch.float32).view(2, 2, 2)
    buf = bytearray(layout.nbytes)
    write_block(buf, layout, FINGERPRINT, KEYS[0], [ramp, ramp[:1]], [-ramp, -ramp[:1]])
    head = (
        struct.pack("<8sHBBIQII", b"kvtideBK", 1, 3, 0, 192, 96, 2, 2) + FINGERPRINT.digest + KEYS[0].digest
    )
    assert buf[: len(head)] == head
    assert buf[len(head) : len(head) + 24] == struct.pack("<6I", 4, 2, 2, 2, 1, 2)
    payload = struct.pack(
        "<24f",
        *(0, 1, 2, 3, -0.0, -1, -2, -3, 4, 5, 6, 7, -4, -5, -6, -7),
        *(0, 1, 2, 3),
        *(-0.0, -1, -2, -3),
    )
    assert buf[192:288] == payload
    assert xxhash.xxh3_64_hexdigest(bytes(buf)) == GOLDEN_BLOCK
    assert layout.layout_id == "kvblock1:float32:t2:1*2x2+4,1*1x2+2"


def test_a_model_of_smollm_size_has_the_stated_sizes():
    layout = LAYOUTS[-1]
    assert (layout.header_bytes, layout.payload_bytes, layout.nbytes) == (704, 30 * 12288, 369344)
    assert layout.layout_id == "kvblock1:bfloat16:t16:30*3x64+0"


def test_layers_are_read_into_slices_of_a_workspace():
    buf, keys, values = written()
    header = open_block(buf, LAYOUT, FINGERPRINT, KEYS[0])
    workspace = torch.full((2, 3, 100, 8), torch.nan, dtype=torch.bfloat16)
    assert read_layer(buf, LAYOUT, header, 0, workspace[0, :, 40:44], workspace[1, :, 40:44])
    assert torch.equal(workspace[0, :, 40:44], keys[0]) and torch.equal(workspace[1, :, 40:44], values[0])
    assert workspace[:, :, :40].isnan().all() and workspace[:, :, 44:].isnan().all()


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(0, 9))
def test_a_run_is_read_up_to_the_first_bad_block(blocks, bad):
    layout = BlockLayout(layers=((2, 8), (1, 4)), dtype=torch.float32, block_tokens=4)
    bufs = [bytearray(layout.nbytes) for _ in range(blocks)]
    keys, values = random_kv(layout, blocks)
    write_run(bufs, layout, FINGERPRINT, KEYS[:blocks], keys, values)
    headers = [open_block(buf, layout, FINGERPRINT, key) for buf, key in zip(bufs, KEYS, strict=False)]
    if bad < blocks:
        bufs[bad][layout.layer_offset(1)] ^= 1
    for layer, expected in ((0, blocks), (1, min(bad, blocks))):
        k, v = nan_rows(layout, layer, blocks)
        assert read_layer_run(bufs, layout, headers, layer, k, v) == expected
        end = expected * layout.block_tokens
        assert torch.equal(k[:, :end], keys[layer][:, :end]) and torch.equal(
            v[:, :end], values[layer][:, :end]
        )
        assert k[:, end:].isnan().all() and v[:, end:].isnan().all()


def test_runs_longer_than_the_staging_memory_are_read_whole():
    layout = BlockLayout(layers=((8, 128),), dtype=torch.bfloat16, block_tokens=16)
    keys, values = random_kv(layout, 20)  # 20 * 64 KiB
    bufs = [bytearray(layout.nbytes) for _ in range(20)]
    names = block_keys(FINGERPRINT, range(320), 16)
    write_run(bufs, layout, FINGERPRINT, names, keys, values)
    headers = [open_block(buf, layout, FINGERPRINT, key) for buf, key in zip(bufs, names, strict=True)]
    k, v = nan_rows(layout, 0, 20)
    assert read_layer_run(bufs, layout, headers, 0, k, v) == 20
    assert torch.equal(k, keys[0]) and torch.equal(v, values[0])
    bufs[13][-1] ^= 1
    assert read_layer_run(bufs, layout, headers, 0, *nan_rows(layout, 0, 20)) == 13


@settings(deadline=None)
@given(st.data())
def test_a_flipped_byte_anywhere_is_a_miss_or_harmless_padding(data):
    buf, keys, values = written()
    position = data.draw(st.integers(0, LAYOUT.nbytes - 1))
    buf[position] ^= data.draw(st.integers(1, 255))
    outputs = read_everything(buf)
    if position < LAYOUT.header_bytes + LAYOUT.payload_bytes:
        assert outputs is None
    else:
        assert all(torch.equal(k, e) for (k, _), e in zip(outputs, keys, strict=True))
        assert all(torch.equal(v, e) for (_, v), e in zip(outputs, values, strict=True))


@settings(deadline=None)
@given(st.binary(max_size=600), st.booleans())
def test_o44_arbitrary_bytes_are_never_a_block(data, with_magic):
    """Neither an exception nor a header, whatever lengths the bytes claim."""
    if with_magic:
        data = MAGIC + struct.pack("<H", FORMAT_VERSION) + data
    assert isinstance(read_header(memoryview(data)), BlockFault)


@settings(deadline=None)
@given(st.sampled_from([(12, 4), (16, 8), (24, 4), (28, 4), (10, 1), (11, 1)]), st.integers(0, 2**64 - 1))
def test_o44_header_fields_that_contradict_each_other_are_refused_even_with_a_right_checksum(field, value):
    buf, _, _ = written()
    offset, size = field
    before = buf.tobytes()
    buf[offset : offset + size] = np.frombuffer(value.to_bytes(8, "little")[:size], dtype=np.uint8)
    reseal(buf)
    if buf.tobytes() != before:
        assert isinstance(open_block(buf, LAYOUT, FINGERPRINT, KEYS[0]), BlockFault)


def test_o24_a_truncated_block_is_refused():
    buf, _, _ = written()
    for length in (0, 7, 20, LAYOUT.header_bytes - 1, LAYOUT.header_bytes, LAYOUT.nbytes - 1):
        assert isinstance(read_header(buf[:length]), BlockFault)


def test_a_mismatch_is_named_and_refused_before_the_payload():
    buf, _, _ = written()
    header_only = np.zeros_like(buf)
    header_only[: LAYOUT.header_bytes] = buf[: LAYOUT.header_bytes]  # no payload there to be read
    layers = LAYOUT.layers
    other_size = BlockLayout(layers, torch.bfloat16, block_tokens=8)
    other_heads = BlockLayout(layers, torch.bfloat16, block_tokens=4, first_heads=(3, 1, 2))
    fewer_heads = BlockLayout(((1, 8), (1, 16), (1, 8)), torch.bfloat16, block_tokens=4)
    assert open_block(header_only, LAYOUT, OTHER_FINGERPRINT, KEYS[0]) is BlockFault.FINGERPRINT
    assert open_block(header_only, LAYOUT, FINGERPRINT, KEYS[1]) is BlockFault.KEY
    assert open_block(header_only, other_size, FINGERPRINT, KEYS[0]) is BlockFault.LAYOUT
    assert open_block(header_only, other_heads, FINGERPRINT, KEYS[0]) is BlockFault.HEAD_RANGE
    assert open_block(header_only, fewer_heads, FINGERPRINT, KEYS[0]) is BlockFault.HEAD_RANGE
    assert isinstance(open_block(header_only, LAYOUT, FINGERPRINT, KEYS[0]), BlockHeader)
    struct.pack_into("<H", header_only, len(MAGIC), FORMAT_VERSION + 1)
    reseal(header_only)
    assert open_block(header_only, LAYOUT, FINGERPRINT, KEYS[0]) is BlockFault.VERSION


def test_a_read_under_another_layout_is_a_miss():
    buf, _, _ = written()
    header = open_block(buf, LAYOUT, FINGERPRINT, KEYS[0])
    other = BlockLayout(LAYOUT.layers, torch.float16, block_tokens=4)
    assert not read_layer(buf, other, header, 0, *nan_rows(other, 0))


def test_o18_a_slot_overwritten_after_it_was_opened_is_a_miss():
    buf, _, _ = written(seed=1)
    header = open_block(buf, LAYOUT, FINGERPRINT, KEYS[0])
    buf[:] = written(key=KEYS[1], seed=2)[0]
    for layer in range(3):
        assert not read_layer(buf, LAYOUT, header, layer, *nan_rows(LAYOUT, layer))


def test_o18_reads_racing_with_overwrites_never_mix_blocks():
    layout = BlockLayout(layers=((4, 64),) * 2, dtype=torch.float32, block_tokens=16)
    buf = bytearray(layout.nbytes)
    filled = [[torch.full((4, 16, 64), float(value))] * 2 for value in range(2)]
    stop = threading.Event()

    def overwrite():
        while not stop.is_set():
            for value in range(2):
                write_block(buf, layout, FINGERPRINT, KEYS[value], filled[value], filled[value])

    writer = threading.Thread(target=overwrite)
    writer.start()
    try:
        for attempt in range(400):
            wanted = attempt % 2
            header = open_block(buf, layout, FINGERPRINT, KEYS[wanted])
            if isinstance(header, BlockFault):
                continue
            for layer in range(2):
                k, v = nan_rows(layout, layer)
                if read_layer(buf, layout, header, layer, k, v):
                    assert torch.equal(k, filled[wanted][layer]) and torch.equal(v, filled[wanted][layer])
    finally:
        stop.set()
        writer.join()


def test_a_write_that_dies_half_way_leaves_no_block(monkeypatch):
    buf, keys, values = written()

    class Died(Exception):
        pass

    def die(_):
        raise Died

    monkeypatch.setattr("kv_tiers.block.xxhash.xxh3_64_intdigest", die)
    with pytest.raises(Died):
        write_block(buf, LAYOUT, FINGERPRINT, KEYS[1], keys, values)
    monkeypatch.undo()
    assert read_header(buf) is BlockFault.NOT_A_BLOCK


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": torch.int8},
        {"layers": ()},
        {"layers": ((0, 8),)},
        {"layers": ((1, 1 << 30),)},
        {"block_tokens": 0},
        {"first_heads": (1,)},
        {"first_heads": (-1, 0, 0)},
    ],
)
def test_impossible_layouts_are_refused(fields):
    with pytest.raises(ValueError):
        BlockLayout(**{"layers": LAYOUT.layers, "dtype": torch.bfloat16, "block_tokens": 4, **fields})
