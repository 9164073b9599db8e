"""Snapshots: the bytes, what is refused, and that a sequence goes on from one as if nothing had happened."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_models
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_models import FULL, one_thread, plain_spec, request, snapkv, tiny, tokens_of  # noqa: F401

from engine.decode import decode_step
from engine.restore import restore, take_snapshot
from engine.snapshot import (
    SnapshotError,
    SnapshotLayout,
    SnapshotMeta,
    pack_prompt,
    parse_snapshot,
    prompt_meta,
)
from engine.survivors import LayerSurvivors
from engine.workspace import Workspace

SPEC = plain_spec([(2, 32, None), (1, 16, 20), (3, 16, None)])


def random_workspace(spec, tokens, seed=0):
    space = Workspace(spec, tokens, 0)
    generator = torch.Generator().manual_seed(seed)
    for rows in (*space.keys, *space.values):
        rows.copy_(torch.randn(rows.shape, generator=generator))
    space.filled = tokens
    return space


def ragged_survivors(spec, tokens, seed=0):
    """Windowed layers keep their window, other heads anything, each another number."""
    random = np.random.default_rng(seed)
    chosen = []
    for layer in spec.layers:
        if layer.window is not None:
            first = max(0, tokens - layer.window + 1)
            chosen.append(LayerSurvivors(layer.kv_heads, first, tokens, None))
            continue
        kept = [
            np.sort(random.permutation(tokens)[: random.integers(1, tokens + 1)])
            for _ in range(layer.kv_heads)
        ]
        rows = tuple(torch.tensor(positions, dtype=torch.int32) for positions in kept)
        chosen.append(LayerSurvivors(layer.kv_heads, 0, tokens, rows))
    return chosen


def pack(spec, space, survivors, recipe_id="snapkv:test", prompt=None, arrays=None):
    prompt = tokens_of(space.tokens) if prompt is None else prompt
    layout = SnapshotLayout(spec, prompt_meta(spec, prompt, recipe_id, survivors, arrays))
    buffer = torch.full((layout.nbytes,), 255, dtype=torch.uint8)
    pack_prompt(layout, buffer, space, survivors)
    return buffer


@pytest.mark.parametrize("tokens", [1, 15, 20, 21, 90])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_packed_is_parsed_back(tokens, dtype):
    spec = plain_spec([(2, 32, None), (1, 16, 20), (3, 16, None)], dtype)
    space, survivors = random_workspace(spec, tokens), ragged_survivors(spec, tokens, tokens)
    layout = parse_snapshot(spec, pack(spec, space, survivors, "snapkv:é"))
    buffer = pack(spec, space, survivors, "snapkv:é")
    assert layout.meta.recipe_id == "snapkv:é"
    assert (layout.meta.prompt_tokens, tuple(layout.meta.tokens.tolist())) == (tokens, tokens_of(tokens))
    assert layout.nbytes == buffer.numel() and layout.payload_offset % 64 == 0
    for index, kept in enumerate(survivors):
        for head in range(kept.kv_heads):
            places = (
                torch.arange(kept.first, tokens) if kept.positions is None else kept.positions[head].long()
            )
            k, v = layout.head(buffer, index, head)
            assert torch.equal(k, space.keys[index][head, places])
            assert torch.equal(v, space.values[index][head, places])
            if kept.positions is not None:
                assert layout.meta.positions[index, head].tolist() == places.tolist()
            else:
                assert layout.meta.firsts[index] == kept.first


def test_metadata_is_a_few_percent_at_512_kept_tokens_of_smollm2():
    spec = plain_spec([(3, 64, None)] * 30, torch.bfloat16, group=3)
    kept = tuple(torch.arange(512, dtype=torch.int32) * 15 for _ in range(3))
    survivors = [LayerSurvivors(3, 0, 8000, kept)] * 30
    layout = SnapshotLayout(spec, prompt_meta(spec, range(8000), "snapkv:b512:w32:k13:avg:s4", survivors))
    assert layout.payload_bytes == 30 * 3 * 512 * 64 * 2 * 2
    assert layout.payload_offset <= 0.03 * layout.payload_bytes


ARRAYS = {
    "mass": torch.randn(2, 3, 40),
    "caps": torch.arange(6, dtype=torch.int32).view(2, 3),
    "seen": torch.arange(7, dtype=torch.uint8),
    "queries": torch.randn(2, 4, 3, 5).bfloat16(),
    "nothing": torch.empty(0, 5),
    "single": torch.tensor(3.5),
}


def test_arrays_of_a_rule_travel_as_they_are():
    space, survivors = random_workspace(SPEC, 40), ragged_survivors(SPEC, 40)
    layout = SnapshotLayout(SPEC, prompt_meta(SPEC, tokens_of(40), "h2o:test", survivors, ARRAYS))
    buffer = torch.full((layout.nbytes,), 255, dtype=torch.uint8)
    pack_prompt(layout, buffer, space, survivors)
    found = parse_snapshot(SPEC, buffer)
    assert found.meta.arrays.keys() == ARRAYS.keys() and not found.meta.decoded
    for name, array in ARRAYS.items():
        assert found.meta.arrays[name].dtype == array.dtype
        assert torch.equal(found.meta.arrays[name], array)
    for ours, theirs in zip(found.head(buffer, 2, 1), layout.head(buffer, 2, 1), strict=True):
        assert torch.equal(ours, theirs)
    carried = {name: array.clone() for name, array in found.meta.arrays.items()}
    buffer.fill_(0)
    assert all(torch.equal(found.meta.arrays[name], carried[name]) for name in ARRAYS)


@pytest.mark.parametrize("name", ["Mass", "m2", "", "a" * 17])
def test_an_array_that_cannot_be_carried_is_our_own_mistake(name):
    with pytest.raises(AssertionError):
        damaged_meta(arrays={name: torch.zeros(2)})
    with pytest.raises(AssertionError):
        damaged_meta(arrays={"mass": torch.zeros(2, dtype=torch.float64)})


def test_holes_are_for_sequences_that_evict():
    meta = parse_snapshot(SPEC, BUFFER).meta
    listed = meta.positions[2, 0].copy()
    listed[0] = -1
    twice = listed.copy()
    twice[0] = twice[1] if len(twice) > 1 else -2
    running = {"caps": torch.zeros(2, 3, dtype=torch.int32), "write": torch.zeros(2, 3, dtype=torch.int32)}
    one = {**meta.positions, (2, 0): listed}
    assert parse_snapshot(SPEC, damaged_meta(positions=one, arrays=running)).meta.positions[2, 0][0] == -1
    two = {**one, (2, 0): np.where(np.arange(len(listed)) < 2, -1, listed).astype(np.int32)}
    for positions, arrays in ((one, {}), (one, {"caps": running["caps"]}), (two, running)):
        with pytest.raises(SnapshotError, match="without a token"):
            parse_snapshot(SPEC, damaged_meta(positions=positions, arrays=arrays))
    with pytest.raises(SnapshotError, match="twice"):
        parse_snapshot(SPEC, damaged_meta(positions={**one, (2, 0): twice}, arrays=running))


BUFFER = pack(SPEC, random_workspace(SPEC, 40), ragged_survivors(SPEC, 40), arrays=ARRAYS)
METADATA = parse_snapshot(SPEC, BUFFER).payload_offset


def parsed_or_refused(buffer):
    """A damaged snapshot is refused, or (where the damage still makes sense) every view of it lies inside."""
    try:
        layout = parse_snapshot(SPEC, buffer)
    except SnapshotError:
        return
    assert layout.nbytes == buffer.numel()
    pool = tiny_models.PagePool(SPEC, 400, 1, 1024)
    restore(pool, layout, buffer)
    pool.check()


@settings(max_examples=400, deadline=None)
@given(st.integers(0, METADATA - 1), st.integers(1, 255))
def test_a_changed_byte_of_the_metadata_never_crashes(place, change):
    buffer = BUFFER.clone()
    buffer[place] ^= change
    parsed_or_refused(buffer)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, (METADATA - 4) // 4), st.sampled_from([0, 1, 39, 40, 41, 2**31 - 1, 2**31, 2**32 - 1]))
def test_a_changed_word_of_the_metadata_never_crashes(word, value):
    buffer = BUFFER.clone()
    buffer[4 * word : 4 * word + 4] = torch.frombuffer(
        bytearray(value.to_bytes(4, "little")), dtype=torch.uint8
    )
    parsed_or_refused(buffer)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, BUFFER.numel() - 1))
@example(0)
@example(METADATA)
def test_a_cut_snapshot_is_refused(length):
    with pytest.raises(SnapshotError):
        parse_snapshot(SPEC, BUFFER[:length].clone())


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=600))
def test_any_other_bytes_are_refused(raw):
    prefixed = BUFFER[:40].numpy().tobytes() + raw
    for data in (raw, prefixed):
        with pytest.raises(SnapshotError):
            parse_snapshot(SPEC, torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8))


def damaged_meta(**changes):
    meta = parse_snapshot(SPEC, BUFFER).meta
    fields = {name: getattr(meta, name) for name in SnapshotMeta.__dataclass_fields__}
    layout = SnapshotLayout(SPEC, SnapshotMeta(**{**fields, **changes}))
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    layout.write_metadata(buffer)
    return buffer


def test_metadata_that_contradicts_itself_is_refused():
    meta = parse_snapshot(SPEC, BUFFER).meta
    ghost, huge = meta.counts.copy(), meta.firsts.copy()
    ghost[1, 2] = 5  # layer 1 has one head
    huge[1] = 39
    strangers = meta.tokens.copy()
    strangers[3] = SPEC.vocab_size
    beyond = {key: rows + (40 if key == (0, 0) else 0) for key, rows in meta.positions.items()}
    wide, listed = meta.counts.copy(), meta.firsts.copy()
    wide[1, 0], listed[1] = 20, -1  # layer 1 sees 19 tokens beside the next, always a range
    for changes in (
        {"counts": ghost},
        {"firsts": huge},
        {"tokens": strangers},
        {"positions": beyond},
        {"counts": wide, "firsts": np.where(meta.firsts > 0, 20, meta.firsts)},
        {"firsts": listed, "positions": {**meta.positions, (1, 0): np.arange(21, 40, dtype=np.int32)}},
    ):
        with pytest.raises(SnapshotError):
            parse_snapshot(SPEC, damaged_meta(**changes))
    parse_snapshot(SPEC, damaged_meta())


def test_a_snapshot_of_another_model_is_refused_by_its_fingerprint():
    done = tiny_models.prefill_all(tiny("llama").model, [request("a", tokens_of(30))])["a"]
    buffer = tiny_models.packed(done)
    parse_snapshot(tiny("llama").model.spec, buffer)
    with pytest.raises(SnapshotError, match="another model"):
        parse_snapshot(tiny("llama", 1).model.spec, buffer)
    with pytest.raises(SnapshotError, match="version"):
        changed = buffer.clone()
        changed[4] += 1
        parse_snapshot(tiny("llama").model.spec, changed)


@pytest.mark.parametrize("recipe", [FULL, snapkv(24)], ids=["full", "snapkv"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt_oss"])
def test_a_moved_sequence_goes_on_bit_by_bit(family, recipe):
    model = tiny(family).model
    prompt, later = tokens_of(70), tokens_of(60, 5)
    done = tiny_models.prefill_all(model, [request("a", prompt, recipe)])["a"]
    stay, away = tiny_models.new_pool(model), tiny_models.new_pool(model)
    row, meta = tiny_models.join(stay, done), done.layout.meta
    tiny_models.decode_row(model, stay, row, later[:3], 70)
    for step in range(3, 45):  # moves after 3, 4, ... tokens, each from the last snapshot
        text = [*prompt, *later[: step + 1]]
        layout, buffer = take_snapshot(stay, row, meta, text)
        parsed = parse_snapshot(model.spec, buffer)
        check_positions(model.spec, done.layout.meta, parsed.meta, len(text) - 1)
        moved = restore(away, parsed, buffer)
        there = decode_step(model, away, [moved], [later[step]], [70 + step])
        here = decode_step(model, stay, [row], [later[step]], [70 + step])
        assert torch.equal(there, here)
        away.close(moved)
        if step % 7 == 0:  # and now and then the snapshot replaces the row itself
            stay.close(row)
            row, meta = restore(stay, layout, buffer), layout.meta
            decode_step(model, stay, [row], [later[step]], [70 + step])
        stay.check()
    stay.close(row)
    assert stay.use.used == away.use.used == 0


@functools.cache
def wide_windows(family):
    """A model whose windows span several chunks of the attention kernel, none of them from slot 0."""
    return tiny_models.wrap_model(tiny_models.build_network(family, sliding_window=150), frozenset())


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_a_long_window_gives_the_same_bits_wherever_it_moved(family):
    model = wide_windows(family)
    prompt, later = tokens_of(333), tokens_of(260, 5)
    done = tiny_models.prefill_all(model, [request("a", prompt, snapkv(40))])["a"]
    stay, away = tiny_models.new_pool(model), tiny_models.new_pool(model)
    row, meta = tiny_models.join(stay, done), done.layout.meta
    for step, token in enumerate(later):
        if step % 13 == 0:
            _, buffer = take_snapshot(stay, row, meta, [*prompt, *later[: step + 1]])
            moved = restore(away, parse_snapshot(model.spec, buffer), buffer)
            there = decode_step(model, away, [moved], [token], [333 + step])
            away.close(moved)
        here = decode_step(model, stay, [row], [token], [333 + step])
        assert step % 13 or torch.equal(there, here), step
    stay.check()


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_windowed_layers_use_the_slots_of_their_positions_shipped_or_resumed(family):
    model = wide_windows(family)
    text = tokens_of(400)
    windowed = [index for index, layer in enumerate(model.spec.layers) if layer.window is not None]
    pool = tiny_models.new_pool(model)

    def shipped(tokens):
        return tiny_models.prefill_all(model, [request("a", text[:tokens])])["a"]

    done = shipped(300)
    resumed = tiny_models.join(pool, done)
    tiny_models.decode_row(model, pool, resumed, text[300:390], 300)
    layout, buffer = take_snapshot(pool, resumed, done.layout.meta, text[:391])
    rows = (resumed, restore(pool, layout, buffer), tiny_models.join(pool, shipped(390)))
    for row in rows:
        assert (pool.first_slots(row)[windowed] == 390 - 149).all()
        assert (pool.counts(row)[windowed, :2] == 390).all()


def test_a_restore_that_fails_gives_its_row_and_pages_back(monkeypatch):
    model = tiny("gemma3").model
    done = tiny_models.prefill_all(model, [request("a", tokens_of(70))])["a"]
    pool, buffer = tiny_models.new_pool(model), tiny_models.packed(done)

    def broken(*_):
        raise RuntimeError("no room to breathe")

    with monkeypatch.context() as patch:
        patch.setattr("engine.restore.ops.scatter_heads", broken)
        with pytest.raises(RuntimeError, match="breathe"):
            restore(pool, done.layout, buffer)
    pool.check()
    assert pool.use.used == 0 and pool.free_rows == pool.rows
    restore(pool, done.layout, buffer)


def check_positions(spec, first, meta, cached):
    """Every head holds what selection kept and every token since; windowed layers the last window-1."""
    new = list(range(first.prompt_tokens, cached))
    for index, layer in enumerate(spec.layers):
        for head in range(layer.kv_heads):
            count = int(meta.counts[index, head])
            if meta.firsts[index] >= 0:
                found = list(range(int(meta.firsts[index]), int(meta.firsts[index]) + count))
            else:
                found = meta.positions[index, head].tolist()
            if layer.window is not None:
                wanted = list(range(max(0, cached - layer.window + 1), cached))
            elif first.firsts[index] >= 0:
                wanted = list(range(cached))
            else:
                wanted = first.positions[index, head].tolist() + new
            assert found == wanted
    assert meta.prompt_tokens == first.prompt_tokens and len(meta.tokens) == cached + 1


CONTINUE = """
import sys
import torch
torch.set_num_threads(1)
import tiny_models
from engine.restore import restore
from engine.snapshot import parse_snapshot

model = tiny_models.tiny(sys.argv[1]).model
buffer = torch.frombuffer(bytearray(sys.stdin.buffer.read()), dtype=torch.uint8)
layout = parse_snapshot(model.spec, buffer)
pool = tiny_models.new_pool(model)
row, text = restore(pool, layout, buffer), layout.meta.tokens.tolist()
for _ in range(20):
    text.append(int(tiny_models.decode_row(model, pool, row, text[-1:], len(text) - 1).argmax()))
print(text)
"""


@pytest.mark.parametrize("family", ["gemma3"])
def test_another_process_goes_on_with_the_same_tokens(family):
    model = tiny(family).model
    prompt = tokens_of(50)
    done = tiny_models.prefill_all(model, [request("a", prompt, snapkv(20))])["a"]
    pool = tiny_models.new_pool(model)
    row, text = tiny_models.join(pool, done), [*prompt, done.first[0].token_id]
    raw = b""
    for step in range(30):
        if step == 10:
            raw = take_snapshot(pool, row, done.layout.meta, text)[1].numpy().tobytes()
        text.append(int(tiny_models.decode_row(model, pool, row, text[-1:], len(text) - 1).argmax()))
    tests = Path(__file__).parent
    ran = subprocess.run(
        [sys.executable, "-c", CONTINUE, family],
        input=raw,
        capture_output=True,
        timeout=100,
        check=False,
        env={**os.environ, "PYTHONPATH": f"{tests}:{tests.parent}"},
    )
    assert ran.returncode == 0, ran.stderr.decode()[-2000:]
    assert ran.stdout.decode().strip() == str(text)
