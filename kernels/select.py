"""Pooling of scores over positions, exact top-k with a stated tie rule, and budgets that move between heads.

Ties decide what is kept far more often than one would think (max pooling makes them the normal case), and
`torch.topk` leaves them open. Here equal scores go to the higher position, on every machine. Source:
ALGORITHMS.md sections 2.3 and 4.2.
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

    scores: float32 or float64 [H, N]; keep: how many per head, one number for all or int64 [H], at most N each;
    protected: bool [N] or [H, N], positions kept before any score counts (no more than `keep`).
    Equal scores: the higher position is kept. NaN ranks below everything.

    Returns int64 [H, keep]. With a per-head `keep` rows are as long as the longest and end in the value N;
    finding that length is the only host synchronisation here, a plain number needs none. Raises ValueError
    on other scores, and where more than N positions are to be kept.
    """
    _check_scores(scores)
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


def allocate_heads(
    scores: torch.Tensor, keep: int, protected: torch.Tensor | None = None, floor: int = 0
) -> torch.Tensor:
    """How many positions each head keeps when heads share one budget of H * keep, as in Ada-KV.

    scores: float32 or float64 [H, N], comparable between heads; keep: positions per head on average; protected: bool
    [N] or [H, N], no more than `keep` a head; floor: the best that a head keeps whatever others have, its protected
    ones counted first. Of all other positions those with the lowest scores leave, over all heads; of equal scores the
    lower head leaves first, then the lower position.

    Returns int64 [H]; the sum is H * keep exactly. `select_topk(scores, counts, protected)` gives the positions. No
    host synchronisation. Raises ValueError on other scores, and unless 0 <= floor <= keep <= N.
    """
    _check_scores(scores)
    heads, n = scores.shape
    if not 0 <= floor <= keep <= n:
        raise ValueError(f"cannot keep {keep} of {n} positions, {floor} of them whatever the others have")
    safe = torch.zeros(heads, n, dtype=torch.bool, device=scores.device)
    if floor:
        safe.scatter_(1, _ranks(scores, protected).topk(floor, dim=-1, sorted=False).indices, True)
    if protected is not None:
        safe |= protected
    # All heads as one row: the position in it orders by head, then by position within the head.
    ranks = _ranks(scores.reshape(1, -1), safe.view(1, -1))[0]
    kept = ranks.topk(heads * keep, sorted=False).indices
    counts = torch.zeros(heads, dtype=torch.int64, device=scores.device)
    return counts.index_add_(0, kept // max(n, 1), torch.ones_like(kept))


def _check_scores(scores: torch.Tensor) -> None:
    if scores.dim() != 2 or scores.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"want float32 or float64 scores [H, N], got {scores.dtype} {tuple(scores.shape)}")


def _ranks(scores: torch.Tensor, protected: torch.Tensor | None) -> torch.Tensor:
    """int64 [H, N], distinct within a row, ordered by (protected, score, position)."""
    # + 0.0 turns -0.0 into 0.0, which the bit patterns would keep apart.
    numbers = scores.masked_fill(scores.isnan(), float("-inf")).add_(0.0)
    position = torch.arange(scores.shape[-1], device=scores.device)
    if scores.dtype is torch.float64:
        # A score fills the word that holds score and position below: sort first, and rank by the place in that order.
        order = numbers.sort(dim=-1, stable=True).indices
        ordered = torch.empty_like(order).scatter_(1, order, position.expand_as(order))
    else:
        bits = numbers.view(torch.int32)
        # IEEE floats order like their bits read as integers once the magnitude bits of negatives are flipped.
        ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    if protected is not None:
        ordered = ordered.masked_fill(protected, torch.iinfo(torch.int32).max)
    return (ordered.long() << 32) | position
