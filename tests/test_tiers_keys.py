"""Keys: the same everywhere, different whenever the bytes may differ."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_tiers.keys import BlockKey, Fingerprint, block_keys, survivor_key

FIELDS = {
    "config": '{"hidden_size":576}',
    "weights": b"\x01\x02",
    "dtype": "bfloat16",
    "layout": "kvblock1:bfloat16:t16:30*3x64+0",
    "rope": "default",
    "adapter": None,
}
FINGERPRINT = Fingerprint.of(**FIELDS)
TOKENS = list(range(1, 257))
RECIPE = "snapkv:b512:w32:k13:avg:s4"

GOLDEN_FINGERPRINT = "79260f228197bdc082d1c6fb8d2489beb118c8cca0074d113f20711dbc89a5c6"
GOLDEN_KEYS = {  # tenant: (first block, last block, survivors)
    None: (
        "dbf3b540904321137d360d14e7b0bd8d413e8a2aab1ddd528d34d27f409a844a",
        "2a586ae92890a497d53f32c5acab8b9994dcbd6b057d2004b3311c07d5f9ca40",
        "e22a6caf5871d0f987cc1587bca163deedc1abd2379c31956fb3621f3e6a3e92",
    ),
    "": (
        "ed14125e9ea6ccbbc0a47d442c47771f1d5e4eed029d700ec15a458a7d9e10ae",
        "320c83d68a6a6905fca35d736f4d2432277b78dc7817194b94a406764cefe60e",
        "682a10fe024c3215c7d92e17f367c3f0e9bdc5e3464ea8f99177ed7d63b15f4a",
    ),
    "acme": (
        "8b3c818165cb00ff4d656f39973f74d183f4f5822e03122948ebd8d20ddc390c",
        "b6814d40560698cf94494942e118a486fcd36b176f67d596049ddcdc65b23c19",
        "1531dc37f8d0f81ee08a441493ae0d6c7419afb5ef08c64b350c9fc4e4b27419",
    ),
}


def fingerprint(**changed):
    return Fingerprint.of(**{**FIELDS, **changed})


def test_golden_values_pin_the_encoding():
    assert FINGERPRINT.digest.hex() == GOLDEN_FINGERPRINT
    for tenant, (first, last, survivors) in GOLDEN_KEYS.items():
        keys = block_keys(FINGERPRINT, TOKENS, 16, tenant=tenant)
        assert (keys[0].digest.hex(), keys[-1].digest.hex()) == (first, last)
        assert survivor_key(FINGERPRINT, TOKENS, RECIPE, tenant=tenant).digest.hex() == survivors


def test_o20_keys_are_equal_in_processes_with_different_hash_seeds():
    program = (
        "from kv_tiers.keys import *\n"
        f"f = Fingerprint.of(**{FIELDS!r})\n"
        "print(block_keys(f, range(1, 257), 16)[-1].digest.hex())\n"
        f"print(survivor_key(f, range(1, 257), {RECIPE!r}).digest.hex())\n"
    )
    for seed in ("0", "1", "random"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[1])}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == list(GOLDEN_KEYS[None][1:])


def test_o21_fields_do_not_run_into_one_another():
    keys = [
        block_keys(fingerprint(adapter=adapter), TOKENS, 16, tenant=tenant)[0]
        for adapter in (None, "", "x", "ab", "a")
        for tenant in (None, "", "x", "c", "bc")
    ]
    assert len(set(keys)) == 25


def test_o21_neighbouring_fields_are_delimited():
    assert fingerprint(dtype="ab", layout="c") != fingerprint(dtype="a", layout="bc")
    assert survivor_key(FINGERPRINT, [1, 2], "r", tenant="t") != survivor_key(
        FINGERPRINT, [1, 2], "", tenant="tr"
    )


def test_o22_everything_that_changes_bytes_changes_the_key():
    others = [
        fingerprint(config="{}"),
        fingerprint(weights=b""),
        fingerprint(dtype="float16"),
        fingerprint(layout="kvblock1:bfloat16:t16:30*3x64+3"),
        fingerprint(rope="yarn"),
        fingerprint(adapter="x"),
    ]
    chains = [block_keys(other, TOKENS, 16) for other in [FINGERPRINT, *others]]
    chains += [block_keys(FINGERPRINT, TOKENS, 32), block_keys(FINGERPRINT, TOKENS, 16, tenant="t")]
    for one, other in combinations(chains, 2):
        assert not set(one) & set(other)


def test_o22_recipes_share_blocks_but_not_survivors():
    one, other = (survivor_key(FINGERPRINT, TOKENS, recipe) for recipe in (RECIPE, RECIPE + "x"))
    assert one != other
    assert survivor_key(FINGERPRINT, TOKENS[:-1], RECIPE) != one
    assert survivor_key(FINGERPRINT, [*TOKENS, 0], RECIPE) != one


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), max_size=40), st.integers(1, 5))
def test_keys_agree_exactly_up_to_the_first_differing_block(one, other, block_tokens):
    left, right = (block_keys(FINGERPRINT, tokens, block_tokens) for tokens in (one, other))
    assert len(left) == len(one) // block_tokens
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        end = (index + 1) * block_tokens
        assert (a == b) == (one[:end] == other[:end])


def test_o36_partial_blocks_have_no_key():
    assert [len(block_keys(FINGERPRINT, range(n), 16)) for n in (0, 1, 15, 16, 17, 32, 48)] == [
        0,
        0,
        0,
        1,
        1,
        2,
        3,
    ]


def test_any_integer_container_gives_the_same_keys():
    expected = block_keys(FINGERPRINT, TOKENS, 16)
    for dtype in (np.int64, np.int32, np.uint32, np.uint16, ">i4"):
        assert block_keys(FINGERPRINT, np.array(TOKENS, dtype=dtype), 16) == expected
    assert block_keys(FINGERPRINT, tuple(TOKENS), 16) == expected
    assert block_keys(FINGERPRINT, np.repeat(np.array(TOKENS), 2)[::2], 16) == expected


@pytest.mark.parametrize("tokens", [[-1], [2**32], [2**70], [1.0], [True], ["a"], [[1, 2]]])
def test_what_is_no_token_id_is_refused(tokens):
    with pytest.raises(ValueError):
        block_keys(FINGERPRINT, tokens, 1)


def test_block_size_below_one_is_refused():
    with pytest.raises(ValueError, match="block_tokens"):
        block_keys(FINGERPRINT, TOKENS, 0)


@pytest.mark.parametrize("digest", [b"", b"x" * 31, "x" * 32])
def test_digests_of_the_wrong_kind_are_refused(digest):
    with pytest.raises(ValueError):
        BlockKey(digest)


def test_keys_survive_pickling_and_have_an_order():
    keys = block_keys(FINGERPRINT, TOKENS, 16)
    assert pickle.loads(pickle.dumps(keys)) == keys
    assert sorted(keys) == sorted(keys, key=lambda key: key.digest)
