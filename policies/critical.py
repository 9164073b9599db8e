"""CriticalKV (arXiv 2502.03805): any scorer's result weighed by what a token's value does to the layer's output.

Source: ALGORITHMS.md section 8.2; the constants are those of kvpress 0.5.5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.select import select_topk
from policies.recipe_checks import share

if TYPE_CHECKING:
    from policies.policy import LayerView

EPSILON = 1e-4
"""Added to every score: a token without attention still counts by its value."""

_BLOCK_OUTPUTS = 1 << 21
"""Outputs held at once: 8 MiB of fp32."""


def criticality(layer: LayerView, scores: Tensor, protected: Tensor, first_share: float) -> Tensor:
    """[Hk, N], in the dtype of `scores`: the two stages of CriticalKV, as one score.

    The first stage is safe: per head the best `first_share` of the layer's budget by `scores` ([Hk, N]), protected
    tokens (bool [N]) first, get the highest number there is. The others get (score + 1e-4) times the output norm of
    their value. Scores of a head that go below zero are first lifted by the lowest finite one that is not protected, or
    a larger norm would count against a token. Raises ValueError where the layer's output weight is not known.
    """
    if layer.output_weight is None:
        raise ValueError(
            f"critical selection needs the output weight of layer {layer.index}, which is not known"
        )
    first = share(first_share, layer.budget)
    lowest = scores.masked_fill(protected | ~scores.isfinite(), torch.inf).amin(-1, keepdim=True)
    lifted = scores - lowest.clamp(max=0)
    weighed = (lifted + EPSILON) * output_norms(layer.values, layer.output_weight)
    return weighed.scatter_(-1, select_topk(scores, first, protected), torch.finfo(scores.dtype).max)


def output_norms(values: Tensor, weight: Tensor) -> Tensor:
    """float32 [Hk, N]: the 1-norm of each value after its query heads' part of the output weight, group mean.

    values: [Hk, N, D]; weight: [hidden, Hq * D]. Scratch memory does not grow with N.
    """
    kv_heads, n, dim = values.shape
    hidden = weight.shape[0]
    group = weight.shape[1] // (kv_heads * dim)
    per_head = weight.reshape(hidden, kv_heads, group, dim).float()
    block = max(1, _BLOCK_OUTPUTS // hidden)
    norms = torch.zeros(kv_heads, n, dtype=torch.float32, device=values.device)
    for head in range(kv_heads):
        for member in range(group):
            part = per_head[:, head, member].t()
            for start in range(0, n, block):
                piece = slice(start, start + block)
                norms[head, piece] += (values[head, piece].float() @ part).abs_().sum(-1)
    return norms.div_(group)
