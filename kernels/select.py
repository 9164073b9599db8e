"""Pooling of scores over positions, and exact top-k with a stated tie rule.

Ties decide what is kept far more often than one would think (max pooling makes them the normal case), and
`torch.topk` leaves them open. Here equal scores go to the higher position, on every machine. Source:
ALGORITHMS.md section 2.3.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn import functional

PoolMode = Literal["avg", "max"]


def pool_scores(scores: torch.Tensor, kernel: int, mode: str) -> torch.Tensor:
    """Pool [..., N] scores over `kernel` neighbouring positions (odd, centred), same shape out.

    "avg" counts the zero padding beyond both ends, "max" does not. Raises ValueError on an even kernel or an
    unknown mode.
    """
    if kernel < 1 or kernel % 2 == 0:
        raise ValueError(f"pooling kernel {kernel} is not an odd positive number")
    if mode not in ("avg", "max"):
        raise ValueError(f"pooling mode {mode!r} is not one of: avg, max")
    if kernel == 1 or scores.numel() == 0:
        return scores.clone()
    rows = scores.reshape(-1, 1, scores.shape[-1])
    pool = functional.avg_pool1d if mode == "avg" else functional.max_pool1d
    return pool(rows, kernel, stride=1, padding=kernel // 2).reshape(scores.shape)


def select_topk(
    scores: torch.Tensor, keep: int | torch.Tensor, protected: torch.Tensor | None = None
) -> torch.Tensor:
    """Positions of the `keep` highest scores per head, ascending.

    scores: float32 [H, N]; keep: how many per head, one number for all or int64 [H], at most N each;
    protected: bool [N] or [H, N], positions kept before any score counts (no more than `keep`).
    Equal scores: the higher position is kept. NaN ranks below everything.

    Returns int64 [H, keep]. With a per-head `keep` rows are as long as the longest and end in the value N;
    finding that length is the only host synchronisation here, a plain number needs none. Raises ValueError
    on other scores, and where more than N positions are to be kept.
    """
    if scores.dim() != 2 or scores.dtype != torch.float32:
        raise ValueError(f"want float32 scores [H, N], got {scores.dtype} {tuple(scores.shape)}")
    n = scores.shape[1]
    ragged = isinstance(keep, torch.Tensor)
    longest = int(keep.max()) if isinstance(keep, torch.Tensor) else keep
    if not 0 <= longest <= n:
        raise ValueError(f"cannot keep {longest} of {n} positions")
    ranks = _ranks(scores, protected)
    # Ranks are distinct, so top-k has nothing left to choose and needs no stability.
    kept = ranks.topk(longest, dim=-1, sorted=ragged).indices
    if isinstance(keep, torch.Tensor):
        beyond = torch.arange(longest, device=scores.device) >= keep.unsqueeze(-1)
        kept = kept.masked_fill(beyond, n)
    return kept.sort(dim=-1).values


def _ranks(scores: torch.Tensor, protected: torch.Tensor | None) -> torch.Tensor:
    """int64 [H, N], distinct within a row, ordered by (protected, score, position)."""
    # + 0.0 turns -0.0 into 0.0, which the bit patterns would keep apart.
    bits = scores.masked_fill(scores.isnan(), float("-inf")).add_(0.0).view(torch.int32)
    # IEEE floats order like their bits read as integers once the magnitude bits of negatives are flipped.
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    if protected is not None:
        ordered = ordered.masked_fill(protected, torch.iinfo(torch.int32).max)
    position = torch.arange(scores.shape[-1], device=scores.device)
    return (ordered.long() << 32) | position
