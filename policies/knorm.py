"""Key norm (arXiv 2406.11430): ALGORITHMS.md section 8.1. A baseline that needs no query."""

from __future__ import annotations

from torch import Tensor

from policies.policy import LayerView, Needs, Policy


class Knorm(Policy):
    """Keeps keys of small norm: in trained models they tend to attract attention."""

    needs = Needs.KEYS

    def score(self, layer: LayerView) -> Tensor:
        """float32 [Hk, N]: minus the 2-norm of a key."""
        return -layer.keys.float().norm(dim=-1)
