"""The random baseline: what a budget is worth without any idea behind it."""

from __future__ import annotations

import torch
from torch import Tensor

from policies.policy import LayerView, Needs, Policy

_MASK = 0xFFFFFFFF


class Random(Policy):
    """Keeps a random set per layer and head, fixed by `seed`: equal in every process, batch and piece of a prompt."""

    needs = Needs.KEYS

    def score(self, layer: LayerView) -> Tensor:
        """float64 [Hk, N]: uniform in [0, 1), a hash of (seed, layer, head, position); no generator has a state."""
        device = layer.keys.device
        key = torch.full((), self.recipe.seed & _MASK, dtype=torch.int64, device=device)
        for part in (self.recipe.seed >> 32, layer.index):
            key = _mix(key) ^ part
        key = _mix(key)
        heads = torch.arange(layer.kv_heads, dtype=torch.int64, device=device).unsqueeze(-1)
        positions = torch.arange(layer.tokens, dtype=torch.int64, device=device)
        return _mix(_mix(key ^ heads) ^ positions).double() / 2**32


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit numbers, held in int64, that spreads every bit over all ("lowbias32" by C. Wellons)."""
    x = x ^ (x >> 16)
    # A product may leave the 63 bits; its low 32 are right all the same.
    x = x * 0x7FEB352D & _MASK
    x = x ^ (x >> 15)
    x = x * 0x846CA68B & _MASK
    return x ^ (x >> 16)
