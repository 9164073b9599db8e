"""TOVA (arXiv 2401.06104) while decoding: ALGORITHMS.md sections 2.1 and 8.2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from policies.decoding.rule import DecodeRule, LayerKeys, survivors_of
from policies.decoding.state import Change, DecodeState
from policies.policy import LayerView, Selection


class TOVA(DecodeRule):
    """Evicts the token that the newest query gave the least attention; the newest token may be the one to leave.

    Where all heads of a layer hold the same tokens they decide together, by the mean over every query head, and go on
    holding the same; where the prompt's selection left each its own, each decides for itself. Equal attention: the
    older leaves.
    """

    reduce: ClassVar[int] = 1

    def prompt_queries(self, n: int) -> int:
        return int(self.decode.budget is not None and n > self.decode.budget)

    def prompt_arrays(self, layer: LayerView, selection: Selection) -> dict[str, Tensor]:
        """`last` f32 [Hk, kept]: what the last prompt token gave each survivor, where the prompt exceeds the budget."""
        if not self.prompt_queries(layer.tokens):
            return {}
        return {"last": survivors_of(layer.window_mass(1, tail=0), selection)}

    def prompt_numbers(self, caps: NDArray[np.int32], n: int) -> int:
        return self.prompt_queries(n)

    def carried(self, n: int, running: bool) -> dict[str, tuple[torch.dtype | None, int]]:
        if running:
            return {"shared": (torch.uint8, 1)}
        return {"last": (torch.float32, 3)} if self.prompt_queries(n) else {}

    def extra_names(self) -> tuple[str, ...]:
        return ("shared",)

    def _prepare(self, state: DecodeState) -> None:
        if "shared" not in state.extra:
            same = (state.positions == state.positions[:, :1]).all(-1) | ~state.heads
            state.extra["shared"] = same.all(-1).to(torch.uint8)
        state.derived["heads"] = state.heads.sum(-1, dtype=torch.int32)
        state.derived["together"] = (
            state.extra["shared"].bool().all().cpu()
        )  # on the host: known at each step

    def settle(self, state: DecodeState, keys: Sequence[LayerKeys] | None = None) -> Change:
        change = super().settle(state, keys)
        state.arrays.pop("last", None)  # one row serves one decision
        return change

    def observe(self, state: DecodeState, attention: Tensor) -> None:
        state.arrays["last"] = attention

    def evict(self, state: DecodeState, keys: Sequence[LayerKeys] | None = None) -> Change:
        change = None
        if (state.counts > state.caps).any():
            change = self._victims(state, self._score(state, keys))
        del state.arrays["last"]
        return change

    def _score(self, state: DecodeState, keys: Sequence[LayerKeys] | None) -> Tensor:
        own = state.arrays["last"]
        # Heads that a narrower layer lacks, and slots beyond a head's, hold anything: the ones must not be counted.
        real = own if state.heads_on_host.all() else torch.where(state.heads.unsqueeze(-1), own, 0.0)
        together = (real.sum(1) / state.derived["heads"].float().unsqueeze(-1)).unsqueeze(1)
        if state.derived["together"]:
            return together.expand_as(own)
        return torch.where(state.extra["shared"].bool().view(-1, 1, 1), together, own)
