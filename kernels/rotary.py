"""Rotary position embedding as a value: turn keys or queries by any number of positions, forwards or back.

Scorers that look at un-rotated queries and decode rules that store keys at their slot's position need it; the model
itself rotates its own. Source: ALGORITHMS.md sections 3.3 and 8.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Positions whose angles are held at once: a mean may be over a million.
_POSITIONS_AT_ONCE = 1 << 14


@dataclass(frozen=True, eq=False)
class Rotation:
    """Dims pair up, and pair i turns by position * inv_freq[i].

    `inv_freq` f32 [R/2], R <= `head_dim` and even; dims from R on are left alone (partial rotary embeddings). Pairs are
    (i, i + R/2), as in Llama, or (2i, 2i + 1) where `interleaved`. ValueError where they do not fit.
    """

    inv_freq: torch.Tensor
    head_dim: int
    interleaved: bool = False

    def __post_init__(self) -> None:
        if self.inv_freq.dim() != 1 or self.inv_freq.dtype is not torch.float32:
            raise ValueError(f"want float32 inv_freq [R/2], got {self.inv_freq.dtype} {self.inv_freq.shape}")
        if not 0 < 2 * len(self.inv_freq) <= self.head_dim:
            raise ValueError(f"{len(self.inv_freq)} rotated pairs do not fit a head size of {self.head_dim}")

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [..., T, D] turned forwards by int `positions` [T]; negative ones turn back. In x's dtype, fp32 inside.

        rotate(rotate(x, p), -p) is x to rounding. `positions` may also have leading dims that broadcast against x's.
        """
        if x.shape[-1] != self.head_dim:
            raise ValueError(f"head size {x.shape[-1]}, want {self.head_dim}")
        first, second = self._pairs()
        angles = self._angles(positions.to(x.device))
        cos, sin = angles.cos(), angles.sin()
        a, b = x[..., first].float(), x[..., second].float()
        out = x.clone(memory_format=torch.contiguous_format)
        out[..., first] = (a * cos - b * sin).to(x.dtype)
        out[..., second] = (b * cos + a * sin).to(x.dtype)
        return out

    def mean_matrix(self, start: int, count: int) -> torch.Tensor:
        """f32 [D, D], the mean over positions start … start+count-1 of the matrix that rotates a column vector.

        `x @ mean_matrix(p, 1).T` equals `rotate(x, p)`. ValueError where count is not positive.
        """
        if count < 1:
            raise ValueError(f"no mean over {count} positions")
        sums = torch.zeros(2, len(self.inv_freq), dtype=torch.float64, device=self.inv_freq.device)
        for begin in range(start, start + count, _POSITIONS_AT_ONCE):
            stop = min(begin + _POSITIONS_AT_ONCE, start + count)
            angles = self._angles(torch.arange(begin, stop, device=sums.device)).double()
            sums += torch.stack([angles.cos().sum(0), angles.sin().sum(0)])
        cos, sin = (sums / count).float()
        matrix = torch.eye(self.head_dim, device=self.inv_freq.device)
        dims = torch.arange(self.head_dim, device=self.inv_freq.device)
        first, second = (dims[part] for part in self._pairs())
        matrix[first, first], matrix[second, second] = cos, cos
        matrix[first, second], matrix[second, first] = -sin, sin
        return matrix

    def _pairs(self) -> tuple[slice, slice]:
        """Dims of the first and of the second member of every pair."""
        half = len(self.inv_freq)
        if self.interleaved:
            return slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        return slice(0, half), slice(half, 2 * half)

    def _angles(self, positions: torch.Tensor) -> torch.Tensor:
        """f32 [..., T, R/2], rounded as the models round theirs: fp32 position times fp32 frequency."""
        return positions.float().unsqueeze(-1) * self.inv_freq.to(positions.device)
