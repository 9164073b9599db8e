"""What a snapshot carries for its decode rule, held against the recipe before anything is opened from it.

`parse_snapshot` knows bytes and the model, not the rule. What contradicts itself would fail the engine's step, and with
it every sequence of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.eviction import scored_layers
from engine.model import LayerSpec, ModelSpec
from engine.sequence import next_position
from engine.snapshot import HOLE, SnapshotError, SnapshotMeta
from engine.turning import TurnedKeys
from policies.decoding import DecodeRule, get_rule
from policies.decoding.rule import MOST_TOKENS
from policies.decoding.state import OWN_NAMES
from policies.recipe import Recipe


def refuse_contradictions(spec: ModelSpec, recipe: Recipe, meta: SnapshotMeta) -> None:
    """Raise `SnapshotError` unless the recipe's rule can go on from these arrays, counts and positions."""
    rule, layers = get_rule(recipe), scored_layers(spec)
    if not rule.evicts or not len(layers):
        _require(not meta.arrays, "arrays that its recipe has no rule for")
        return
    heads = np.array([spec.layers[index].kv_heads for index in layers])
    real = np.arange(spec.max_kv_heads)[None] < heads[:, None]
    lengths = meta.counts[layers]
    _require(bool((lengths[real] > 0).all()), "no tokens in a head")
    _require(bool((meta.firsts[layers] < 0).all()), "positions of an evicting sequence that are not listed")
    _check_kinds(spec, rule, layers, meta)
    _check_caps(rule, meta, real)
    _check_slots(rule, layers, meta, real)
    owners = [spec.layers[index] for index in layers]
    if rule.query_window:
        _check_queries(rule, owners, meta)
    for name in TurnedKeys.NAMES if rule.slot_positions and meta.decoded else ():
        size = len(_protected(rule, meta)) * sum(layer.kv_heads * layer.head_dim for layer in owners)
        _require(len(meta.arrays[name]) == size, f"{name} of another size")


def _check_kinds(spec: ModelSpec, rule: DecodeRule, layers: NDArray[np.int64], meta: SnapshotMeta) -> None:
    """The arrays that the rule reads and no others, each of its dtype and as large as the snapshot's slots."""
    wanted = {**rule.carried(meta.prompt_tokens, meta.decoded), "caps": (torch.int32, 2)}
    if meta.decoded:
        wanted |= {"write": (torch.int32, 2), "clock": (torch.int32, 1)}
        wanted |= {name: (None, 1) for name in TurnedKeys.NAMES if rule.slot_positions}
    _require(wanted.keys() == meta.arrays.keys(), f"the arrays {', '.join(meta.arrays)}")
    places, longest = (len(layers), spec.max_kv_heads), int(meta.counts[layers].max())
    for name, (dtype, dims) in wanted.items():
        array = meta.arrays[name]
        _require(array.dtype == (dtype or spec.dtype) and array.dim() == dims, f"another kind of {name}")
        if name in ("caps", "write"):
            _require(array.shape == places, f"{name} of another shape")
        elif name not in (*OWN_NAMES, *TurnedKeys.NAMES, *rule.extra_names()):
            _require(array.shape[:2] == places and array.shape[-1] == longest, f"{name} of another shape")
        elif name in rule.extra_names():
            _require(len(array) == len(layers), f"{name} of another shape")


def _check_caps(rule: DecodeRule, meta: SnapshotMeta, real: NDArray[np.bool_]) -> None:
    caps = meta.arrays["caps"].numpy()
    least = max(1, rule.protected_tokens(meta.prompt_tokens))
    _require(bool((caps[real] >= least).all() and not caps[~real].any()), "impossible caps")
    _require(bool((caps <= MOST_TOKENS).all()), "impossible caps")


def _check_slots(
    rule: DecodeRule, layers: NDArray[np.int64], meta: SnapshotMeta, real: NDArray[np.bool_]
) -> None:
    """Holes lie where the next token goes, nothing that never leaves is missing, and no token is from the future."""
    cached = next_position(meta)
    kept = np.zeros(cached + 1, np.bool_)  # the last entry stands for a hole
    kept[_protected(rule, meta)] = True
    protected = int(kept.sum())
    write = meta.arrays["write"].numpy() if meta.decoded else meta.counts[layers]
    for place, head in np.argwhere(real).tolist():
        listed = meta.positions[int(layers[place]), head]
        lowest = int(listed.argmin())
        slot = lowest if listed[lowest] == HOLE else len(listed)
        _require(int(write[place, head]) == slot, "a next slot that is not empty")
        _require(int(listed.max()) < cached, "a token from the future")
        _require(int(kept[listed].sum()) == protected, "protected tokens that are gone")
    _require(not write[~real].any(), "slots of a head that does not exist")
    if not meta.decoded:
        return
    _require(len(meta.arrays["clock"]) == 2, "a clock of another shape")
    newest, clock = meta.arrays["clock"].tolist()
    held = int(meta.counts[layers].max())
    _require(newest == cached - 1, "the state of another token")
    _require(held <= clock + 1 <= cached + 1 if rule.slot_positions else clock == cached, "another clock")
    capacity = rule.capacity(meta.arrays["caps"].numpy())
    _require(bool((meta.counts[layers] <= capacity).all()), "more tokens than its caps")


def _protected(rule: DecodeRule, meta: SnapshotMeta) -> NDArray[np.int64]:
    """Positions that never leave."""
    ranges = rule.protected_ranges(meta.prompt_tokens)
    return np.unique(np.concatenate([np.arange(0), *(np.arange(*each) for each in ranges)]))


def _check_queries(rule: DecodeRule, owners: Sequence[LayerSpec], meta: SnapshotMeta) -> None:
    shape = (
        len(owners),
        max(layer.scored_heads for layer in owners),
        rule.query_window,
        max(layer.head_dim for layer in owners),
    )
    _require(meta.arrays["queries"].shape == shape, "queries of another shape")
    heads = meta.arrays["query_heads"]
    _require(heads.shape == (len(owners), 1), "query_heads of another shape")
    _require(heads[:, 0].tolist() == [layer.scored_heads for layer in owners], "query heads of another model")


def _require(true: bool, what: str) -> None:
    if not true:
        raise SnapshotError(f"snapshot has {what}")
