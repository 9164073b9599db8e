"""KeyDiff: ALGORITHMS.md section 8.2."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import normalize

from policies.policy import LayerView, Needs, Policy


class KeyDiff(Policy):
    """Keeps keys that point away from the others: low cosine similarity to the mean direction of the head's keys."""

    needs = Needs.KEYS

    def score(self, layer: LayerView) -> Tensor:
        """float32 [Hk, N]: minus the cosine between a key and the mean of all normalised keys."""
        directions = normalize(layer.keys.float(), dim=-1)
        anchor = normalize(directions.mean(1), dim=-1)
        return -(directions @ anchor.unsqueeze(-1)).squeeze(-1)
