"""Prefill workspace: the full KV of one prompt, contiguous, while it is computed, scored and written down."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from engine.arrival import Arrival
from engine.attention import AttentionCall, causal_attention
from engine.model import ModelSpec
from engine.watch import QueryWatch

_LARGE_PAGE = 2 << 20


class Workspace:
    """Keys and values [Hk, N, D] per KV cache, and what scorers asked to be shown of its queries.

    Owned by one prefill job; released when both the ticket and the spill that read it are done (by dropping it).
    `filled` counts leading tokens whose KV is complete in every layer. Attention runs in pieces that end at
    multiples of `piece_tokens`: beside what it reads, a piece's bits depend on where it starts and ends, no more.

    `exact` counts the leading tokens whose KV is as computed: all, unless lossy blocks were loaded. What was computed
    behind such is not exact either, for it attended to them.

    While `arrival` is set, the first `filled` tokens are being loaded: `arrived` waits for a layer of them, and
    `short` says that they will not all come, so that what is computed behind them is void. `settle` then takes up what
    is there.
    """

    def __init__(
        self,
        spec: ModelSpec,
        tokens: int,
        watches: Mapping[int, QueryWatch] | None = None,
        piece_tokens: int = 256,
    ) -> None:
        """`watches`: by cache, for the caches whose queries somebody asked for."""
        self.spec = spec
        self.tokens = tokens
        self.piece_tokens = piece_tokens
        self.watches = dict(watches or {})
        self.filled = 0
        self.exact = tokens
        self.arrival: Arrival | None = None
        sizes = [s.kv_heads * tokens * s.head_dim for s in spec.layers]
        memory = _memory(2 * sum(sizes), spec.dtype).split([size for size in sizes for _ in "kv"])
        shapes = [(s.kv_heads, tokens, s.head_dim) for s in spec.layers]
        self.keys = [part.view(shape) for part, shape in zip(memory[::2], shapes, strict=True)]
        self.values = [part.view(shape) for part, shape in zip(memory[1::2], shapes, strict=True)]

    @property
    def nbytes(self) -> int:
        return self.spec.kv_bytes_per_token * self.tokens

    @property
    def failure(self) -> Exception | None:
        """What an observer raised: this prompt cannot be selected from any more."""
        return next((watch.failure for watch in self.watches.values() if watch.failure is not None), None)

    @property
    def short(self) -> bool:
        """Whether less of the beginning is coming than `filled` says."""
        return self.arrival is not None and self._coming(self.arrival) < self.filled

    def arrived(self, layer: int) -> bool:
        """Wait until the beginning is in place in a layer; False: it is `short`."""
        if self.arrival is None:
            return True
        return self.arrival.wait(layer, self.filled // self.spec.blocks.block_tokens)

    def settle(self) -> bool:
        """Put `filled` right where it is `short`; False: the loader may still write where computing would go on.

        Positions computed behind the longer beginning are computed again: their KV and queries are overwritten.
        """
        if self.arrival is None or not self.short:
            return True
        if not self.arrival.blocks and not self.arrival.ended:
            return False
        self.filled = self._coming(self.arrival)
        if self.filled <= self.exact:  # the lossy ones did not come: the rest is computed
            self.exact = self.tokens
        if not self.filled:
            self.arrival = None
        return True

    def _coming(self, arrival: Arrival) -> int:
        return arrival.blocks * self.spec.blocks.block_tokens

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, start: int) -> Tensor:
        """Store T tokens from position `start` and return their attention over 0 … start+T-1, [Hq, T, D].

        What lies before `start` must have `arrived` in this layer. A layer that reads another's cache stores nothing:
        what it is called with is there already.
        """
        stop = start + key.shape[1]
        keys, values = self.keys[call.layer], self.values[call.layer]
        if call.stored:
            keys[:, start:stop].copy_(key)
            values[:, start:stop].copy_(value)
        watch = self.watches.get(call.layer)
        if watch is not None:
            watch.keep(call.reader, query, start)
        out = torch.empty_like(query)
        begin = start
        while begin < stop:
            origin = begin - begin % self.piece_tokens
            end = min(stop, origin + self.piece_tokens)
            cut = slice(begin - start, end - start)
            rows = query[:, cut].contiguous()
            out[:, cut], lse = causal_attention(call, rows, keys[:, :end], values[:, :end], begin, origin)
            if watch is not None:
                watch.observe(rows, keys[:, :end], lse, begin)
            begin = end
        return out


def _memory(elements: int, dtype: torch.dtype) -> Tensor:
    """One allocation [elements], in large pages where there are any.

    Large enough for the system's own pages, it goes back to the system when the prompt is done, where thousands of
    smaller ones would stay in the allocator's heap. It is touched for the first time while a load copies into it:
    small pages made that half of the time of a load (measured: 110 of 210 ms for 161 MB).
    """
    nbytes = elements * dtype.itemsize
    if nbytes < _LARGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(elements, dtype=dtype)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without large pages
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype)


class StepAbandoned(Exception):
    """Nobody wants the results of the running step any more; it was left between two layers."""


class PrefillPort:
    """Attention port of one prefill step: consecutive runs of the flattened batch belong to different workspaces."""

    def __init__(
        self, runs: Sequence[tuple[Workspace, int, int]], abandoned: Callable[[], bool] = lambda: False
    ) -> None:
        """`runs`: (workspace, first position, token count) in the order of the flattened batch.

        `abandoned` is asked before every layer; when it says so the step ends with `StepAbandoned`. A workspace that
        turns out `short` gets zeros from there on, and nothing more is stored in it.
        """
        self._runs = runs
        self._abandoned = abandoned

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # Before the question: whoever waits for a beginning that does not come learns it here.
        arrived = [workspace.arrived(call.layer) for workspace, _, _ in self._runs]
        if self._abandoned():
            raise StepAbandoned
        if len(self._runs) == 1 and arrived[0]:
            workspace, start, _ = self._runs[0]
            return workspace.attend(call, query, key, value, start).transpose(0, 1)
        out = query.new_zeros(query.shape[1], query.shape[0], query.shape[2])
        offset = 0
        for (workspace, start, count), here in zip(self._runs, arrived, strict=True):
            cut = slice(offset, offset + count)
            if here:
                piece = workspace.attend(call, query[:, cut], key[:, cut], value[:, cut], start)
                out[cut] = piece.transpose(0, 1)
            offset += count
        return out
