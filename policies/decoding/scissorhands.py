"""Scissorhands (arXiv 2305.17118) while decoding, the paper's rule with exact windows: ALGORITHMS.md section 3.6."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.window import window_low_counts
from policies.decoding.compressions import Compressions
from policies.decoding.rule import DecodeRule, LayerKeys, row_of, survivors_of
from policies.decoding.state import Change, Compact, DecodeState
from policies.decoding.window_rows import low_below, quantile_of_rows
from policies.policy import LayerView, Selection


class Scissorhands(DecodeRule):
    """When a head outgrows its cap, `every` tokens leave at once: those that got too little attention most often.

    Over the last `window` queries, prompt's and generated, a token's low-count is the number of them that saw it and
    gave it, by the group's maximum, less than 1/t: t tokens seen by that query ("uniform") or cached at the
    compression ("now"); or less than a percentile of the query's own row (a float). Never the last `recent`. Equal
    counts: less attention over the same queries leaves first, then the older.

    The attention rows are not kept. A head is compressed at steps known beforehand, so every row is added, when it is
    seen, to the sums of each coming compression whose window holds it: `low` and `mass` f32 [L, Hk, K, C], number 0
    the next compression, K = ceil(window / tokens dropped at once).
    """

    reduce: ClassVar[int] = 2

    @property
    def window(self) -> int:
        """Queries that are looked back over."""
        assert self.decode.window is not None
        return self.decode.window

    def prompt_queries(self, n: int) -> int:
        return min(n, self.window)

    def _compressions(self, caps: NDArray[np.int32], n: int) -> Compressions:
        every = self.decode.every
        drop = np.maximum(1, caps // 2 if every is None else np.full_like(caps, every))
        floor = np.minimum(caps, self.protected_tokens(n) + self.recent_tokens(caps))
        return Compressions(caps, drop, floor)

    # At prefill.

    def prompt_arrays(self, layer: LayerView, selection: Selection) -> dict[str, Tensor]:
        """`low` and `mass` f32 [Hk, K + 1, kept]: what the prompt's rows add to the compressions to come."""
        queries, _ = layer.window(self.window, tail=0)
        n, rows = layer.tokens, queries.shape[1]
        counts = selection.counts.cpu().numpy().astype(np.int32)
        caps = self.caps(counts[None], n, [layer.index])[0]
        compressions = self._compressions(caps, n)
        # One more than while decoding: a prompt above its cap is compressed at once, and soon again.
        coming = compressions.positions(counts, n - 1, compressions.ahead(self.window) + 1)
        inside = np.arange(n - rows, n) > coming[..., None] - self.window
        weights = torch.from_numpy(inside.astype(np.float32)).to(queries.device)
        threshold = self.decode.threshold
        sums = window_low_counts(
            queries, layer.keys, layer.scale, weights, softcap=layer.softcap, sinks=layer.sinks,
            threshold=threshold if isinstance(threshold, float) else "uniform",
        )  # fmt: skip
        low = sums.low
        if threshold == "now":
            cached = np.where(coming == n - 1, counts[:, None], caps[:, None] + 1)
            limits = torch.from_numpy((1 / cached).astype(np.float32)).to(queries.device)
            low = low_below(queries, layer, weights, limits)
        return {"low": survivors_of(low, selection), "mass": survivors_of(sums.mass, selection)}

    def prompt_numbers(self, caps: NDArray[np.int32], n: int) -> int:
        """A count and a mass for each compression to come."""
        return 2 * (self._compressions(caps, n).ahead(self.window) + 1)

    def carried(self, n: int, running: bool) -> dict[str, tuple[torch.dtype | None, int]]:
        return {"low": (torch.float32, 4), "mass": (torch.float32, 4)}

    # At decode.

    def _prepare(self, state: DecodeState) -> None:
        windows = self._ahead(state) + (not state.settled)
        for name in ("low", "mass"):
            given = state.arrays[name][:, :, :windows]
            short = windows - given.shape[2]
            state.arrays[name] = torch.nn.functional.pad(given, (0, 0, 0, short)) if short else given.clone()
        state.derived["recent"] = torch.from_numpy(self.recent_tokens(state.caps)).to(given.device)

    def _ahead(self, state: DecodeState) -> int:
        return self._compressions(state.caps, state.n).ahead(self.window)

    def settle(self, state: DecodeState, keys: Sequence[LayerKeys] | None = None) -> Change:
        fresh = not state.settled
        change = super().settle(state, keys)
        if fresh:
            for name in ("low", "mass"):
                state.arrays[name] = state.arrays[name][:, :, : self._ahead(state)].clone()
        return change

    def make_room(
        self, state: DecodeState, coming: int = 0, keys: Sequence[LayerKeys] | None = None
    ) -> Compact | None:
        over = (state.counts + coming > state.caps) & state.heads_on_host
        if not over.any():
            return None
        left = self._compressions(state.caps, state.n).left(state.counts, coming)
        return self._compress(state, np.where(over, left, state.counts), over)

    def observe(self, state: DecodeState, attention: Tensor) -> None:
        row = row_of(state, attention).unsqueeze(2)
        windows = state.arrays["low"].shape[2]
        coming = self._compressions(state.caps, state.n).positions(state.counts, state.position, windows)
        inside = torch.from_numpy((coming - self.window < state.position).astype(np.float32))
        inside = inside.to(row.device).unsqueeze(-1)
        low = (row < self._limit(state, row)) & (state.positions >= 0).unsqueeze(2)
        state.arrays["low"].addcmul_(inside, low.float())
        state.arrays["mass"].addcmul_(inside, row)

    def _limit(self, state: DecodeState, row: Tensor) -> Tensor:
        """f32 [L, Hk, 1, 1]: attention below which a token counts as neglected in the present row [L, Hk, 1, C]."""
        threshold = self.decode.threshold
        if isinstance(threshold, float):
            limits = quantile_of_rows(row[:, :, 0], state.positions >= 0, state.counts, threshold)
            return limits[..., None, None]
        seen = state.counts if threshold == "uniform" else state.caps + 1
        limit = (1 / np.maximum(seen, 1)).astype(np.float32)
        return torch.from_numpy(limit).to(row.device)[..., None, None]

    def evict(self, state: DecodeState, keys: Sequence[LayerKeys] | None = None) -> Change:
        return self.make_room(state)

    def _score(self, state: DecodeState, keys: Sequence[LayerKeys] | None) -> Tensor:
        """Minus the low-count, plus less than one for the attention received."""
        low, mass = state.arrays["low"][:, :, 0], state.arrays["mass"][:, :, 0]
        return mass.double() / (self.window + 1) - low.double()

    def _compress(self, state: DecodeState, keep: NDArray[np.integer], due: NDArray[np.bool_]) -> Compact:
        """Keep the pivotal, and let the sums of the compression after become the next ones where one happens."""
        change = self._compact(state, keep, self._score(state, None))
        done = torch.from_numpy(due).to(change.keep.device)[..., None, None]
        for name in ("low", "mass"):
            sums = state.arrays[name]
            later = torch.nn.functional.pad(sums[:, :, 1:], (0, 0, 0, 1))
            state.arrays[name] = torch.where(done, later, sums)
        return change
