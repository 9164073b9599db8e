"""Prefill workspace: the full KV of one prompt, contiguous, while it is computed, scored and written down."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from engine.attention import AttentionCall, causal_attention
from engine.model import ModelSpec
from engine.watch import QueryWatch


class Workspace:
    """Keys and values [Hk, N, D] per KV cache, and what scorers asked to be shown of its queries.

    Owned by one prefill job; released when both the ticket and the spill that read it are done (by dropping it).
    `filled` counts leading tokens whose KV is complete in every layer. Attention runs in pieces that end at
    multiples of `piece_tokens`: beside what it reads, a piece's bits depend on where it starts and ends, no more.
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
        # One allocation: large enough for the system's own pages, it goes back to the system when the prompt is done,
        # where thousands of smaller ones would stay in the allocator's heap.
        sizes = [s.kv_heads * tokens * s.head_dim for s in spec.layers]
        memory = torch.empty(2 * sum(sizes), dtype=spec.dtype).split([size for size in sizes for _ in "kv"])
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

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor, start: int) -> Tensor:
        """Store T tokens from position `start` and return their attention over 0 … start+T-1, [Hq, T, D].

        A layer that reads another's cache stores nothing: what it is called with is there already.
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
            end = min(stop, begin - begin % self.piece_tokens + self.piece_tokens)
            cut = slice(begin - start, end - start)
            rows = query[:, cut].contiguous()
            out[:, cut], lse = causal_attention(call, rows, keys[:, :end], values[:, :end], begin)
            if watch is not None:
                watch.observe(rows, keys[:, :end], lse, begin)
            begin = end
        return out


class StepAbandoned(Exception):
    """Nobody wants the results of the running step any more; it was left between two layers."""


class PrefillPort:
    """Attention port of one prefill step: consecutive runs of the flattened batch belong to different workspaces."""

    def __init__(
        self, runs: Sequence[tuple[Workspace, int, int]], abandoned: Callable[[], bool] = lambda: False
    ) -> None:
        """`runs`: (workspace, first position, token count) in the order of the flattened batch.

        `abandoned` is asked before every layer; when it says so the step ends with `StepAbandoned`.
        """
        self._runs = runs
        self._abandoned = abandoned

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self._abandoned():
            raise StepAbandoned
        if len(self._runs) == 1:
            workspace, start, _ = self._runs[0]
            return workspace.attend(call, query, key, value, start).transpose(0, 1)
        out = query.new_empty(query.shape[1], query.shape[0], query.shape[2])
        offset = 0
        for workspace, start, count in self._runs:
            cut = slice(offset, offset + count)
            piece = workspace.attend(call, query[:, cut], key[:, cut], value[:, cut], start)
            out[cut] = piece.transpose(0, 1)
            offset += count
        return out
