"""bf16 linear layers on processors without bf16 products: equal to one rounding, and only for prompts."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from engine.linear import WideLinear, wide_products, widen


def layer(bias: bool = True) -> WideLinear:
    torch.manual_seed(3)
    network = nn.Sequential(nn.Linear(96, 48, bias=bias, dtype=torch.bfloat16))
    assert widen(network) == 1
    found = network[0]
    assert isinstance(found, WideLinear)
    return found


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 64, 333])
def test_wide_products_equal_bf16_ones_to_one_rounding(rows: int, bias: bool) -> None:
    linear = layer(bias)
    given = torch.randn(1, rows, 96, dtype=torch.bfloat16)
    exact = nn.functional.linear(
        given.double(), linear.weight.double(), linear.bias.double() if bias else None
    )
    with wide_products(True):
        wide = linear(given)
    assert wide.dtype is torch.bfloat16
    torch.testing.assert_close(wide, exact.to(torch.bfloat16), rtol=2**-7, atol=1e-5)
    assert (wide == exact.to(torch.bfloat16)).float().mean() > 0.99


def test_decode_steps_stay_in_bf16() -> None:
    linear = layer()
    given = torch.randn(1, 200, 96, dtype=torch.bfloat16)
    plain = nn.functional.linear(given, linear.weight, linear.bias)
    assert torch.equal(linear(given), plain)
    with wide_products(False):
        assert torch.equal(linear(given), plain)
    assert linear._weight32 is None, "the copy is made when it is needed"


def test_another_thread_s_step_is_not_widened() -> None:
    linear = layer()
    given = torch.randn(1, 100, 96, dtype=torch.bfloat16)
    with wide_products(True):
        thread = threading.Thread(target=linear, args=(given,))
        thread.start()
        thread.join()
        assert linear._weight32 is None
        linear(given)
    assert linear._weight32 is not None


def test_widening_changes_no_state_and_leaves_other_layers_alone() -> None:
    class Other(nn.Linear):
        pass

    network = nn.ModuleList(
        [nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.bfloat16), Other(8, 8, dtype=torch.bfloat16)]
    )
    before = {name: value.clone() for name, value in network.state_dict().items()}
    assert widen(network) == 1 and widen(network) == 0
    with wide_products(True):
        network[1](torch.randn(100, 8, dtype=torch.bfloat16))
    after = network.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert [type(each) for each in network] == [nn.Linear, WideLinear, Other]
