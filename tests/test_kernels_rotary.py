"""Rotation against complex numbers in float64, and against the model code it stands in for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.rotary import Rotation


def make_rotation(pairs: int, head_dim: int, interleaved: bool = False) -> Rotation:
    return Rotation(1.0 / 10000 ** (torch.arange(pairs) / pairs), head_dim, interleaved)


def simulate(x: np.ndarray, positions: list[int], rotation: Rotation) -> np.ndarray:
    """float64 [T, D], one pair at a time."""
    out = x.copy()
    pairs = len(rotation.inv_freq)
    for row, position in enumerate(positions):
        for i, frequency in enumerate(rotation.inv_freq.tolist()):
            a, b = (2 * i, 2 * i + 1) if rotation.interleaved else (i, i + pairs)
            turned = complex(x[row, a], x[row, b]) * np.exp(1j * position * frequency)
            out[row, a], out[row, b] = turned.real, turned.imag
    return out


@settings(max_examples=40, deadline=None)
@given(
    pairs=st.integers(1, 6),
    rest=st.integers(0, 5),
    interleaved=st.booleans(),
    positions=st.lists(st.integers(-50, 300), min_size=1, max_size=6),
    seed=st.integers(0, 2**32),
)
def test_agrees_with_complex_numbers_and_leaves_the_other_dims_alone(
    pairs: int, rest: int, interleaved: bool, positions: list[int], seed: int
) -> None:
    rotation = make_rotation(pairs, 2 * pairs + rest, interleaved)
    x = torch.randn(2, len(positions), 2 * pairs + rest, generator=torch.Generator().manual_seed(seed))
    got = rotation.rotate(x, torch.tensor(positions, dtype=torch.int32))
    for head in range(2):
        expected = simulate(x[head].double().numpy(), positions, rotation)
        np.testing.assert_allclose(got[head].numpy(), expected, atol=1e-4)
    assert torch.equal(got[..., 2 * pairs :], x[..., 2 * pairs :])


def test_equals_what_llama_does_to_its_keys() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    rotation = make_rotation(32, 64)
    x, positions = torch.randn(3, 5, 64), torch.tensor([0, 1, 77, 4095, 131071])
    angles = torch.outer(positions.float(), rotation.inv_freq).repeat(1, 2)[None]
    theirs, _ = apply_rotary_pos_emb(x[None], x[None], angles.cos(), angles.sin())
    torch.testing.assert_close(rotation.rotate(x, positions), theirs[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_negative_positions_turn_back(interleaved: bool) -> None:
    rotation = make_rotation(8, 20, interleaved)
    x, positions = torch.randn(3, 4, 20), torch.tensor([5, 900, 0, 70000])
    back = rotation.rotate(rotation.rotate(x, positions), -positions)
    torch.testing.assert_close(back, x, rtol=0, atol=1e-6)


def test_bf16_is_rounded_once_and_the_input_stays() -> None:
    rotation = make_rotation(8, 16)
    x, positions = torch.randn(2, 7, 16).bfloat16(), torch.arange(7) + 1000
    before = x.clone()
    got = rotation.rotate(x, positions)
    assert got.dtype is torch.bfloat16
    assert torch.equal(got, rotation.rotate(x.float(), positions).bfloat16())
    assert torch.equal(x, before)


def test_strided_views_rotate_like_their_copies() -> None:
    rotation = make_rotation(8, 16)
    x = torch.randn(7, 2, 16).transpose(0, 1)
    assert torch.equal(rotation.rotate(x, torch.arange(7)), rotation.rotate(x.contiguous(), torch.arange(7)))


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_mean_matrix_is_the_mean_of_rotations(interleaved: bool) -> None:
    rotation = make_rotation(4, 11, interleaved)
    x = torch.randn(1, 11)
    one = x @ rotation.mean_matrix(300, 1).T
    torch.testing.assert_close(one, rotation.rotate(x, torch.tensor([300])), rtol=0, atol=1e-6)
    positions = torch.arange(300, 812)
    wanted = rotation.rotate(x.expand(512, 11), positions).double().mean(0)
    got = x[0] @ rotation.mean_matrix(300, 512).T
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=1e-6)
    assert rotation.mean_matrix(300, 512).dtype is torch.float32
    far = torch.arange(40_000)
    wanted = rotation.rotate(x.expand(len(far), 11), far).double().mean(0)
    got = x[0] @ rotation.mean_matrix(0, len(far)).T
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=1e-6)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        make_rotation(5, 9)
    with pytest.raises(ValueError, match="float32"):
        Rotation(torch.ones(2, dtype=torch.float64), 8)
    with pytest.raises(ValueError, match="head size 6"):
        make_rotation(4, 8).rotate(torch.zeros(1, 6), torch.tensor([1]))
    with pytest.raises(ValueError, match="0 positions"):
        make_rotation(4, 8).mean_matrix(5, 0)
