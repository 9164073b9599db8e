"""What a selection says about itself: how much attention it kept, how unequal its budgets are."""

from __future__ import annotations

from collections.abc import Sequence
from math import log

import torch
from torch import Tensor
from torch.nn.functional import pad

from policies.policy import Selection


def kept_mass(mass: Tensor, selection: Selection) -> Tensor:
    """float32 []: share of a layer's observed attention (float32 [Hk, N]) that fell on its survivors, 0 … 1.

    NaN where no attention was observed. On the device of `mass`; no host synchronisation.
    """
    # The padding of ragged rows points at position N.
    kept = pad(mass, (0, 1)).gather(-1, selection.indices)
    return (kept.sum(dtype=torch.float64) / mass.sum(dtype=torch.float64)).float()


def budget_entropy(counts: Sequence[int]) -> float:
    """Entropy of how the kept tokens are spread over `counts` (one per layer and head): 1 equal, 0 all in one."""
    total = sum(counts)
    if len(counts) < 2 or total == 0:
        return 1.0
    return -sum(count / total * log(count / total) for count in counts if count) / log(len(counts))
