"""StreamingLLM (arXiv 2309.17453) and the sliding window: ALGORITHMS.md sections 3.3 and 3.4."""

from __future__ import annotations

import torch
from torch import Tensor

from policies.policy import LayerView, Needs, Policy


class StreamingLLM(Policy):
    """Keeps the first `sinks` tokens and the most recent ones, sinks and recent together the budget.

    No score is computed: nothing in the middle can be reached afterwards, whatever it says.
    """

    needs = Needs.KEYS
    same_for_all_heads = True

    def score(self, layer: LayerView) -> Tensor:
        """float64 [Hk, N]: the position."""
        positions = torch.arange(layer.tokens, dtype=torch.float64, device=layer.keys.device)
        return positions.expand(layer.kv_heads, -1)


class SlidingWindow(StreamingLLM):
    """Keeps the most recent tokens alone. A model trained without a window breaks as soon as its first token goes."""
