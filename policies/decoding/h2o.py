"""H2O (arXiv 2306.14048) while decoding: ALGORITHMS.md section 3.2, per kv head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels import ops
from policies.decoding.rule import DecodeRule, LayerKeys, survivors_of
from policies.decoding.state import Change, DecodeState
from policies.policy import LayerView, Selection
from policies.recipe import Recipe

PROMPT_WINDOW = 32
"""Last prompt queries whose attention scores start from where the prompt's own policy is not h2o."""


class H2O(DecodeRule):
    """Evicts the token that all queries so far gave the least attention, never one of the most recent.

    A token's score is the sum of the attention it has received, group mean: over all prompt queries where the prompt
    was selected by policy h2o, else over the last `PROMPT_WINDOW`; then over every decoded token. `normalize`
    "visible_count" ranks by score per query that was summed and could see the token. Equal ranks: the older leaves.
    With `every` 1 one token leaves per step, with more that many at once.
    """

    reduce: ClassVar[int] = 1

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.prompt_all_queries = recipe.policy == "h2o"

    @property
    def every(self) -> int:
        return self.decode.every or 1

    def prompt_queries(self, n: int) -> int:
        return 0 if self.prompt_all_queries else min(n, PROMPT_WINDOW)

    def prompt_arrays(self, layer: LayerView, selection: Selection) -> dict[str, Tensor]:
        """`mass` f32 [Hk, kept]: attention that each survivor received from the prompt's queries."""
        if self.prompt_all_queries:
            mass = layer.observed
            assert isinstance(mass, Tensor), "policy h2o observes every prompt query"
        else:
            mass = layer.window_mass(self.prompt_queries(layer.tokens), tail=0)
        return {"mass": survivors_of(mass.float(), selection)}

    def prompt_numbers(self, caps: NDArray[np.int32], n: int) -> int:
        return 1

    def carried(self, n: int, running: bool) -> dict[str, tuple[torch.dtype | None, int]]:
        return {"mass": (torch.float32, 3)}

    def _prepare(self, state: DecodeState) -> None:
        recent = torch.from_numpy(self.recent_tokens(state.caps))
        state.derived["recent"] = recent.to(state.positions.device)

    def observe(self, state: DecodeState, attention: Tensor) -> None:
        ops.add_seen(state.arrays["mass"], attention, state.lengths)

    def evict(self, state: DecodeState, keys: Sequence[LayerKeys] | None = None) -> Change:
        if self.every > 1:
            return self._evict_together(state, keys)
        return self._victims(state, state.arrays["mass"], state.derived["recent"], self._summed(state))

    def _summed(self, state: DecodeState) -> int:
        """Queries whose attention is in the scores, at most; 0 where scores count as they are."""
        if self.decode.normalize == "none":
            return 0
        prompt_rows = state.n if self.prompt_all_queries else self.prompt_queries(state.n)
        return max(1, prompt_rows + state.position + 1 - state.n)

    def _score(self, state: DecodeState, keys: Sequence[LayerKeys] | None) -> Tensor:
        mass, summed = state.arrays["mass"], self._summed(state)
        if not summed:
            return mass
        seen = (state.position + 1 - state.positions).clamp_(min=1, max=summed)
        return mass / seen.float()  # dividing by integers is twenty times slower
