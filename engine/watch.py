"""What scorers are shown of a prompt's queries while it is computed: the last ones of it, or all of them in passing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from engine.model import LayerSpec
from policies.policy import Observer


class _Piece(NamedTuple):
    query: Tensor
    lse: Tensor


class QueryWatch:
    """The queries of one KV cache: those of the last `window` tokens are kept, an observer meets every one.

    Where several layers read the cache, their queries stand side by side in each kv head's group, readers in layer
    order: a scorer sees one layer of Hq' = Hq · readers query heads, and head h reads kv head h // (Hq' / Hk) as ever.

    An observer that raises is not asked again; `failure` keeps its error for the end of the step, because the other
    prompts of the step have nothing to do with it.
    """

    def __init__(
        self, layer: LayerSpec, tokens: int, window: int, dtype: torch.dtype, observer: Observer | None = None
    ) -> None:
        self.observer = observer
        self.failure: Exception | None = None
        self._observed: object | None = None
        self._kv_heads = layer.kv_heads
        self._readers = layer.readers
        self._first = tokens - window
        group = layer.query_heads // layer.kv_heads
        self._last = torch.empty(layer.kv_heads, layer.readers, group, window, layer.head_dim, dtype=dtype)
        self._waiting: dict[int, list[_Piece]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the queries that are kept."""
        return self._last.nbytes

    def keep(self, reader: int, query: Tensor, start: int) -> None:
        """Note those of a reader's queries [Hq, T, D] at positions `start` … that are among the last ones."""
        stop = start + query.shape[1]
        if stop <= self._first:
            return
        begin = max(start, self._first)
        rows = query[:, begin - start :].unflatten(0, (self._kv_heads, -1))
        self._last[:, reader, :, begin - self._first : stop - self._first] = rows

    def last(self, count: int) -> Tensor | None:
        """The queries [Hq', count, D] of the last `count` tokens (at most `window`); None where that is 0."""
        if not count:
            return None
        assert count <= self._last.shape[3], "more queries than were kept"
        return self._last[:, :, :, self._last.shape[3] - count :].flatten(0, 2)

    def observe(self, query: Tensor, keys: Tensor, lse: Tensor, start: int) -> None:
        """One reader's piece for the observer: query [Hq, T, D], keys [Hk, start+T, D], lse fp32 [Hq, T].

        The observer meets every piece once, in ascending order, with the queries of all readers.
        """
        if self.observer is None or self.failure is not None:
            return
        if self._readers > 1:
            waiting = self._waiting.setdefault(start, [])
            waiting.append(_Piece(query, lse))
            if len(waiting) < self._readers:
                return
            del self._waiting[start]
            query = self._joined([piece.query for piece in waiting])
            lse = self._joined([piece.lse for piece in waiting])
        try:
            self.observer.add(query, keys, lse.contiguous(), start)  # torch's attention gives it transposed
        except Exception as error:  # noqa: BLE001 - whatever it was, it ends this prompt and no other
            self.failure = error

    def observed(self) -> object | None:
        """What the observer made of the prompt, once it is filled; raises what it raised."""
        if self.failure is not None:
            raise self.failure
        if self._observed is None and self.observer is not None:
            self._observed = self.observer.result()
        return self._observed

    def _joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Rows [Hq, …] of every reader as [Hq', …]."""
        return torch.cat([part.unflatten(0, (self._kv_heads, -1)) for part in parts], dim=1).flatten(0, 1)
