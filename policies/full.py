"""The policy that evicts nothing."""

from __future__ import annotations

import torch

from policies.policy import LayerView, Needs, Policy


class Full(Policy):
    """Every prompt token survives, in every layer and head."""

    needs = Needs.KEYS

    def score(self, layer: LayerView) -> torch.Tensor:
        """float32 [Hk, N]: no token is worth more than another."""
        return layer.keys.new_zeros(layer.keys.shape[:2], dtype=torch.float32)
