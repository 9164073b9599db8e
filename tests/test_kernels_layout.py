"""Page formats: sizes that every implementation relies on."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.layout import TILE, min_page_bytes, page_layout

dtypes = st.sampled_from([torch.bfloat16, torch.float32])


@given(head_dim=st.integers(1, 600), dtype=dtypes, tiles=st.integers(1, 64), spare=st.integers(0, 15))
def test_a_page_holds_as_many_whole_tiles_as_fit(
    head_dim: int, dtype: torch.dtype, tiles: int, spare: int
) -> None:
    tile = min_page_bytes(head_dim, dtype)
    layout = page_layout(head_dim, dtype, tiles * tile + 64 * spare)
    assert layout.tile_bytes == tile and tile % 64 == 0
    assert layout.slots == TILE * layout.tiles and layout.tiles == tiles
    assert layout.padded_dim % 16 == 0 and 0 <= layout.padded_dim - head_dim < 16
    assert layout.tile_bytes == 2 * TILE * layout.padded_dim * dtype.itemsize


def test_one_tile_of_a_smollm2_head_is_four_kilobytes_in_bf16() -> None:
    assert min_page_bytes(64, torch.bfloat16) == 4096
    assert min_page_bytes(64, torch.float32) == 8192


@given(head_dim=st.integers(1, 600), dtype=dtypes)
def test_a_page_below_one_tile_is_refused(head_dim: int, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="page_bytes must be at least"):
        page_layout(head_dim, dtype, min_page_bytes(head_dim, dtype) - 64)


def test_unaligned_pages_unknown_dtypes_and_empty_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 64"):
        page_layout(64, torch.bfloat16, 4100)
    with pytest.raises(ValueError, match="dtype must be one of"):
        page_layout(64, torch.float16, 4096)
    with pytest.raises(ValueError, match="head_dim"):
        min_page_bytes(0, torch.bfloat16)


def test_importing_the_package_loads_nothing_heavy() -> None:
    probe = "import sys, kernels; assert not hasattr(kernels, '__version__'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
