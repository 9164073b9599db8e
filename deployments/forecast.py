"""What a recipe will keep of a prompt, before anything is computed: impossible requests are refused for free."""

import numpy as np
from numpy.typing import NDArray

from engine.model import ModelSpec
from engine.request import GenerationRequest
from engine.snapshot import SnapshotLayout, SnapshotMeta

# Metadata is padded to this (`engine/snapshot.py`).
_ALIGN = 64


def survivor_counts(spec: ModelSpec, request: GenerationRequest) -> NDArray[np.int32]:
    """Tokens that each kv head will keep, int32 [L, Hk]; absent heads of narrow layers count 0."""
    tokens = len(request.prompt)
    kept = request.recipe.budget_tokens(tokens)
    counts = np.zeros((len(spec.layers), spec.max_kv_heads), np.int32)
    for index, layer in enumerate(spec.layers):
        # A windowed layer keeps what the next query sees beside itself, whatever the recipe.
        counts[index, : layer.kv_heads] = kept if layer.window is None else min(tokens, layer.window - 1)
    return counts


def survivor_layout(spec: ModelSpec, request: GenerationRequest) -> SnapshotLayout:
    """Layout of the prompt's snapshot as far as it is known: counts and payload; metadata is left out."""
    nothing = np.zeros(0, np.uint32)
    firsts = np.zeros(len(spec.layers), np.int64)
    meta = SnapshotMeta(
        len(request.prompt), nothing, request.recipe.recipe_id, survivor_counts(spec, request), firsts, {}
    )
    return SnapshotLayout(spec, meta)


def snapshot_bytes(spec: ModelSpec, request: GenerationRequest) -> int:
    """The most bytes that the prompt's snapshot will take, metadata included; 0 where nothing decodes on."""
    if request.sampling.max_tokens == 1:
        return 0
    layout = survivor_layout(spec, request)
    positions = int(layout.meta.counts.sum())
    return layout.nbytes + 4 * (len(request.prompt) + positions) + _ALIGN
