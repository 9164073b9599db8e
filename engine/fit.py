"""What can never run: requests that not even an empty decode pool could hold to their end, refused before they wait."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.errors import ContextOverflow, InvalidRequest
from engine.eviction import most_slots, settled_counts
from engine.pool import PagePool
from engine.request import GenerationRequest
from engine.sequence import next_position
from engine.snapshot import SnapshotLayout
from engine.support import refuse_recipe


def refuse_impossible(pool: PagePool, request: GenerationRequest, layout: SnapshotLayout) -> None:
    """Raise `InvalidRequest` when even an empty pool could not hold one choice of `request` with all its tokens.

    `layout` is the snapshot that it would start from, its arrays not needed. `ContextOverflow` where the context or the
    pool's page tables are too short, with both numbers.
    """
    spec, recipe, meta = pool.spec, request.recipe, layout.meta
    refuse_recipe(spec, recipe)
    tokens = len(request.prompt) + request.sampling.max_tokens
    most = most_slots(spec, recipe, meta)
    endless = most is not None and recipe.positions == "slot"
    if endless:
        assert most is not None
        _refuse_slots(pool, most)
    elif tokens > spec.context_length:
        raise ContextOverflow(
            f"prompt of {len(request.prompt)} tokens and {request.sampling.max_tokens} new ones do not fit the context"
            f" of {spec.context_length} tokens",
            "max_tokens",
        )
    # The last token's KV is never asked for.
    more = tokens - 1 - next_position(meta)
    counts = settled_counts(spec, recipe, meta)
    slots = counts.astype(np.int64) + more
    if most is not None:
        slots = np.minimum(slots, most)
    # Windowed layers number their slots by position, but for endless rows.
    windowed = np.array([layer.window is not None for layer in spec.layers])
    used = np.where(windowed, 0 if endless else tokens - 1, slots.max(1))
    width = pool.tables.shape[3] * pool.slots
    if (used > width).any():
        raise ContextOverflow(
            f"{used.max()} tokens do not fit the {width[used > width].min()} that the decode pool's page tables"
            " hold of one sequence",
            "max_tokens",
        )
    needed, total = pool.pages_at(counts, more, most), pool.use.total
    if needed > total:
        raise InvalidRequest(
            f"keeping {layout.kept_tokens} prompt tokens and {more} new ones takes {needed} pages of"
            f" {pool.page_bytes} bytes, the decode pool has {total}; lower max_tokens or kv.budget",
            "max_tokens",
        )


def _refuse_slots(pool: PagePool, most: NDArray[np.int64]) -> None:
    """A stream whose tokens count by their slots: the model must see fewer than its context, windows must fit."""
    spec = pool.spec
    full = [index for index, layer in enumerate(spec.layers) if layer.window is None]
    cached = int(most[full].max())
    if cached > spec.context_length:
        raise ContextOverflow(
            f"{cached} cached tokens that count by their slots do not fit the context of {spec.context_length} tokens",
            "kv.decode.budget",
        )
    # A window may begin at any slot below the one that numbers start again at.
    for layer, slots, period in zip(
        spec.layers, pool.slots.tolist(), pool.early_period.tolist(), strict=True
    ):
        width = pool.tables.shape[3] * slots
        if layer.window is not None and layer.window + period > width:
            raise ContextOverflow(
                f"a window of {layer.window} tokens is too long for endless streams in page tables of {width} tokens",
                "kv.positions",
            )
