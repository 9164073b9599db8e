"""What a recipe will keep of a prompt, before anything is computed: impossible requests are refused for free."""

import numpy as np
from numpy.typing import NDArray

from engine.model import ModelSpec
from engine.plan import PromptPlan, plan_prompt
from engine.request import GenerationRequest
from engine.snapshot import SnapshotLayout, SnapshotMeta

# Metadata and every array are padded to this (`engine/snapshot.py`, `engine/arrays.py`).
_ALIGN = 64
# The directory of a decode rule's arrays, and the padding of each.
_ARRAYS_FRAME = 1024


def survivor_counts(spec: ModelSpec, request: GenerationRequest) -> NDArray[np.int32]:
    """Tokens that each kv head will keep, int32 [L, Hk]; absent heads of narrow layers count 0.

    Where the heads of a layer share its budget ("ada") each counts the mean: the sum is exact. `InvalidRequest` for a
    recipe that this model and prompt cannot meet.
    """
    return _counts(spec, plan_prompt(spec, request))


def survivor_layout(spec: ModelSpec, request: GenerationRequest) -> SnapshotLayout:
    """Layout of the prompt's snapshot as far as it is known: counts and payload; metadata is left out."""
    return _layout(spec, request, plan_prompt(spec, request))


def snapshot_bytes(spec: ModelSpec, request: GenerationRequest) -> int:
    """The most bytes that the prompt's snapshot will take, metadata included; 0 where nothing decodes on."""
    if request.sampling.max_tokens == 1:
        return 0
    plan = plan_prompt(spec, request)
    layout = _layout(spec, request, plan)
    positions = int(layout.meta.counts.sum())
    arrays = _array_bytes(spec, plan, layout.meta.counts)
    return layout.nbytes + 4 * (len(request.prompt) + positions) + _ALIGN + arrays


def prefill_bytes(spec: ModelSpec, request: GenerationRequest) -> int:
    """Bytes of what prefill keeps of the prompt: full KV, queries that are read, arrays of a decode rule.

    Scratch memory of a selection and sums over columns (a few numbers per token) come on top.
    """
    plan = plan_prompt(spec, request)
    queries = sum(
        plan.queries(place) * spec.layers[index].scored_heads * spec.layers[index].head_dim
        for place, index in enumerate(plan.scored)
    )
    held = spec.kv_bytes_per_token * plan.tokens + queries * spec.dtype.itemsize
    return held + _array_bytes(spec, plan, _counts(spec, plan))


def _layout(spec: ModelSpec, request: GenerationRequest, plan: PromptPlan) -> SnapshotLayout:
    nothing, firsts = np.zeros(0, np.uint32), np.zeros(len(spec.layers), np.int64)
    recipe_id, counts = request.recipe.recipe_id, _counts(spec, plan)
    return SnapshotLayout(spec, SnapshotMeta(plan.tokens, nothing, recipe_id, counts, firsts, {}))


def _counts(spec: ModelSpec, plan: PromptPlan) -> NDArray[np.int32]:
    counts = np.zeros((len(spec.layers), spec.max_kv_heads), np.int32)
    budgets = dict(zip(plan.scored, plan.budgets, strict=True))
    for index, layer in enumerate(spec.layers):
        # A windowed layer keeps what the next query sees beside itself, whatever the recipe.
        kept = budgets[index] if layer.window is None else min(plan.tokens, layer.window - 1)
        counts[index, : layer.kv_heads] = kept
    return counts


def _array_bytes(spec: ModelSpec, plan: PromptPlan, counts: NDArray[np.int32]) -> int:
    """The most bytes of what the recipe's decode rule starts from (`DecodeRule.prompt_state`).

    Arrays are as wide as the head that keeps most, which has the whole layer's budget at worst where heads share it.
    """
    rule, layers = plan.rule, list(plan.scored)
    if not rule.evicts or not layers:
        return 0
    kept = counts[layers]
    caps = rule.caps(kept, plan.tokens, layers)
    shared = plan.recipe.heads == "ada" and not plan.whole
    longest = min(plan.tokens, int((kept.sum(1) if shared else kept.max(1)).max()))
    values = caps.size + kept.size * longest * rule.prompt_numbers(_lowest(plan, caps), plan.tokens)
    kept_queries = 0
    if rule.query_window:
        heads = max(spec.layers[index].scored_heads for index in layers)
        dim = max(spec.layers[index].head_dim for index in layers)
        kept_queries = len(layers) * heads * rule.query_window * dim * spec.dtype.itemsize
    return 4 * values + kept_queries + _ARRAYS_FRAME


def _lowest(plan: PromptPlan, caps: NDArray[np.int32]) -> NDArray[np.int32]:
    """Caps as low as a head's can become: where heads share a budget, what the others cannot take from one."""
    if plan.recipe.decode.budget is not None or plan.recipe.heads != "ada":
        return caps
    least = plan.recipe.least_tokens(plan.tokens)
    safe = np.maximum((plan.recipe.alpha * caps).astype(np.int32), least)
    return np.where(caps > 0, np.minimum(caps, safe), 0).astype(np.int32)
