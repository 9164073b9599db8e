"""Linear layers in bf16 on processors that have no bf16 products.

There torch multiplies bf16 matrices about eight times slower than fp32 ones (measured: AVX2, torch 2.13, 2.3 against
19 GFLOP/s). A prompt's rows therefore go through an fp32 copy of the weights: bf16 products are exact in fp32 and both
ways accumulate in fp32, so the result is the same but for the order of additions, rounded to bf16 once. A decode step
has few rows and is bound by reading the weights, so it stays in bf16. Neither looks at the number of rows: a row's bits
must not depend on who shares its step. (From 8 rows on fp32 is the faster one; 2 rows of a prompt take twice as long.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

_wide: ContextVar[bool] = ContextVar("wide", default=False)


def has_bf16_products() -> bool:
    """Whether this processor multiplies bf16 at full speed, as torch sees it."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@contextmanager
def wide_products(prompts: bool) -> Iterator[None]:
    """Inside, `WideLinear` layers of this thread compute in fp32, if these are rows of prompts."""
    token = _wide.set(prompts)
    try:
        yield
    finally:
        _wide.reset(token)


class WideLinear(nn.Linear):
    """`nn.Linear` in bf16, computed in fp32 within `wide_products`. The copy of the weights is made on first use."""

    _weight32: Tensor | None
    _bias32: Tensor | None

    def forward(self, rows: Tensor) -> Tensor:
        if not _wide.get():
            return super().forward(rows)
        if self._weight32 is None:
            self._weight32 = self.weight.detach().float()
            self._bias32 = None if self.bias is None else self.bias.detach().float()
        return nn.functional.linear(rows.float(), self._weight32, self._bias32).to(rows.dtype)


def widen(network: nn.Module) -> int:
    """Make every plain bf16 linear layer of a network a `WideLinear`, in place; → how many.

    Weights, names and state stay. Layers of other classes are left alone.
    """
    layers = [
        layer
        for layer in network.modules()
        if type(layer) is nn.Linear and layer.weight.dtype is torch.bfloat16
    ]
    for layer in layers:
        layer.__class__ = WideLinear
        # Past nn.Module's bookkeeping: the copies are no parameters, and belong to no state.
        object.__setattr__(layer, "_weight32", None)
        object.__setattr__(layer, "_bias32", None)
    return len(layers)
