"""The policy that evicts nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from policies.policy import LayerView, Needs, Policy


class Full(Policy):
    """Every prompt token survives, in every layer and head: a recipe with it plans budgets of N tokens."""

    needs = Needs.KEYS
    same_for_all_heads = True

    def score(self, layer: LayerView) -> Tensor:
        """float32 [Hk, N]: no token is worth more than another."""
        return layer.keys.new_zeros(layer.keys.shape[:2], dtype=torch.float32)
