"""StreamingLLM (arXiv 2309.17453) and the sliding window while decoding: ALGORITHMS.md sections 3.3 and 3.4."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from policies.decoding.rule import DecodeRule, LayerKeys
from policies.decoding.state import Change, Compact, DecodeState, Victims


class Streaming(DecodeRule):
    """The oldest token leaves; sinks (none for the sliding window) and spans stay.

    In slot mode cached tokens count as neighbours: the frame of a key is that of the newest token minus the number of
    cached tokens between them. Whenever a token leaves, the frames of what stayed before it (sinks and spans) move up
    by one; nothing else ever moves, so that a stream may run past the trained context.
    """

    in_order: ClassVar[bool] = True

    def _prepare(self, state: DecodeState) -> None:
        if self.slot_positions and "frame" not in state.arrays:
            self._reframe(state, state.positions >= 0, state.counts)

    def evict(self, state: DecodeState, keys: Sequence[LayerKeys] | None = None) -> Change:
        change = self._victims(state, None)
        if change is not None and self.slot_positions:
            self._close_gap(state, change)
        return change

    def _score(self, state: DecodeState, keys: Sequence[LayerKeys] | None) -> Tensor:
        return state.positions.double()

    def _compact(self, state: DecodeState, keep: NDArray[np.integer], score: Tensor) -> Compact:
        change = super()._compact(state, keep, score)
        state.derived.pop("staying", None)
        if self.slot_positions:
            self._reframe(state, change.keep, change.counts)
        return change

    def _reframe(self, state: DecodeState, held: Tensor, counts: NDArray[np.int32]) -> None:
        """Frames of the tokens `held` [L, Hk, C] (`counts` [L, Hk] of them) as neighbours that end at the newest."""
        order = state.positions.masked_fill(~held, torch.iinfo(torch.int32).max).argsort(dim=-1)
        rank = torch.empty_like(state.positions)
        place = torch.arange(state.slots, dtype=torch.int32, device=rank.device)
        rank.scatter_(-1, order, place.expand_as(rank))
        first = state.clock - torch.from_numpy(counts).to(rank.device).unsqueeze(-1)
        state.arrays["frame"] = torch.where(held, first + rank, 0)

    def _close_gap(self, state: DecodeState, change: Victims) -> None:
        """What lies before a victim moves up by one: only what never leaves does."""
        if "staying" not in state.derived:
            state.derived["staying"] = state.protected_slots()
        staying = state.derived["staying"]
        slot, at = change.slots.unsqueeze(-1), staying.clamp(min=0)
        left = torch.where(slot >= 0, state.positions.gather(-1, slot.clamp(min=0)), -1)
        before = (staying >= 0) & (state.positions.gather(-1, at) < left)
        state.arrays["frame"].scatter_add_(-1, at, before.int())
