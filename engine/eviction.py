"""Eviction while a sequence decodes: its rule and the rule's state, bound to a row of the page pool.

The rule decides (`policies/decoding/`), this file moves the bytes: it says where the next token goes, moves survivors
together after a compaction, shows the rule the attention and queries that it asked for, and lets `engine/turning.py`
turn keys where tokens count by their slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention import AttentionCall
from engine.model import ModelSpec
from engine.pool import PagePool
from engine.rows import read_layer
from engine.snapshot import HOLE, SnapshotLayout, SnapshotMeta
from engine.turning import TurnedKeys, turn_prompt
from kernels import ops
from policies.decoding import DecodeRule, get_rule
from policies.decoding.rule import MOST_TOKENS, LayerKeys
from policies.decoding.state import DecodeState, Victims
from policies.recipe import Recipe


class RowEviction:
    """One sequence that forgets: `state` is between two steps, slots in it are the row's.

    Around a step: `settle` (may raise `OutOfPages`), `PagePool.reserve_slot`, `begin_step`, the forward pass, with
    `StepWatch` in between, `PagePool.advance`, `end_step`.
    """

    def __init__(
        self, spec: ModelSpec, rule: DecodeRule, state: DecodeState, turned: TurnedKeys | None, row: int = -1
    ) -> None:
        self.rule = rule
        self.state = state
        self.row = row
        self.layers = scored_layers(spec)
        self._spec = spec
        self._turned = turned
        # int64 [L, Hk, C]: old slot of every slot after a compaction whose bytes have not moved yet.
        self._moves: Tensor | None = None

    @property
    def rewrites(self) -> bool:
        """Whether steps write to slots other than the next token's."""
        return self._turned is not None

    def fork(self, row: int) -> RowEviction:
        """An independent copy for `row`, whose contents are the same."""
        turned = None if self._turned is None else self._turned.fork()
        copy = RowEviction(self._spec, self.rule, self.state.clone(), turned, row)
        copy._moves = self._moves
        return copy

    def placed(
        self, layer: int, layout: SnapshotLayout, buffer: Tensor
    ) -> list[tuple[Tensor, Tensor]] | None:
        """K and V [n, D] of every head of cache `layer` as they go into pages; None: just as they are packed."""
        if layout.meta.decoded or layer not in self.layers or (self._moves is None and not self.rewrites):
            return None
        place = int(np.searchsorted(self.layers, layer))
        lengths, frames = self.state.lengths[place].tolist(), self.state.frames
        found = []
        for head in range(self._spec.layers[layer].kv_heads):
            k, v = layout.head(buffer, layer, head)
            n = lengths[head]
            if self._moves is not None:
                order = self._moves[place, head, :n]
                k, v = k[order], v[order]
            if self.rewrites:
                assert frames is not None
                positions = self.state.positions[place, head, :n]
                k = turn_prompt(self._spec.layers[layer], k, frames[place, head, :n], positions)
            found.append((k, v))
        return found

    def bind(self, pool: PagePool, row: int) -> None:
        """Take a row that was just filled from the snapshot that this was opened from."""
        self.row = row
        self._moves = None
        if self._turned is not None:
            pool.rewrite(row)
        self._aim(pool)

    def settle(self, pool: PagePool) -> None:
        """Move the survivors of the last step's compaction together and give pages back.

        Here and not at the end of the step, because pages that are shared with another row have to be replaced: raises
        `OutOfPages` with nothing changed. Asking again is free.
        """
        if self.rewrites:
            pool.slide(self.row)
        if self._moves is None:
            return
        moves = self._moves
        pool.part(self.row, self.layers, moves.numpy())
        for place, layer in enumerate(self.layers.tolist()):
            pages = pool.pages(self.row, layer)
            ops.move_slots(pool.memory, pool.layouts[layer], pages, moves[place, : len(pages)])
        pool.shrink(self.row, self.counts(pool.counts(self.row)))
        self._moves = None
        self._aim(pool)

    def begin_step(self, pool: PagePool, position: int) -> int:
        """Last writes before the token at `position` is decoded; → the position that the model is to see it at."""
        assert self._moves is None, "settle() comes first"
        assert position == self.state.position + 1, "the state is at another token"
        if self._turned is None:
            return position
        if self.state.clock >= self._spec.context_length:
            self._turned.turn_back(pool, self.row, self.state.rebase())
        self._turned.turn(pool, self.row, self.state)
        return self.state.clock

    def end_step(self, pool: PagePool, attention: Tensor | None) -> None:
        """The token is appended and attended to; `attention` f32 [L, Hk, >= slots] where the rule observes."""
        state, rule = self.state, self.rule
        state.advance()
        if attention is not None:
            rule.observe(state, attention)
        change = rule.evict(state, self._keys(pool) if rule.wants_keys(state) else None)
        self._moves = state.apply(change)
        if isinstance(change, Victims):
            self._aim(pool)

    def slot_order(self, layer: int) -> Tensor | None:
        """int64 [Hk, C], the pool's slot of each of the state's in cache `layer`; None where they are the same."""
        if self._moves is None or layer not in self.layers:
            return None
        return self._moves[int(np.searchsorted(self.layers, layer))]

    def counts(self, counts: NDArray[np.int32]) -> NDArray[np.int32]:
        """Slots [L, Hk] of the whole row (holes included), given those of the layers that no rule acts on."""
        merged = counts.copy()
        merged[self.layers] = self.state.lengths.numpy()
        return merged

    def positions(self) -> dict[tuple[int, int], NDArray[np.int32]]:
        """By (layer, head): the position in every slot, `HOLE` where none is."""
        found, lengths = self.state.positions.numpy(), self.state.lengths.numpy()
        return {
            (layer, head): found[place, head, : lengths[place, head]].copy()
            for place, layer in enumerate(self.layers.tolist())
            for head in range(self._spec.layers[layer].kv_heads)
        }

    def export(self) -> dict[str, Tensor]:
        """What a snapshot carries beside counts, positions and payload."""
        turned = {} if self._turned is None else self._turned.export()
        return {**self.state.export(), **turned}

    def check(self, pool: PagePool) -> None:
        """AssertionError unless the state is right by itself and its slots are the row's."""
        self.state.check()
        if self._moves is None:
            lengths, write = pool.lengths[self.row, self.layers], pool.write[self.row, self.layers]
            assert torch.equal(lengths, self.state.lengths), "the row has other slots than the state"
            assert torch.equal(write, self.state.write), "the next token goes elsewhere"

    def _aim(self, pool: PagePool) -> None:
        pool.aim(self.row, self.layers, self.state.write.numpy())

    def _keys(self, pool: PagePool) -> list[LayerKeys]:
        found = []
        for layer in self.layers.tolist():
            keys, _ = read_layer(pool, self.row, layer)
            found.append(_layer_keys(self._spec, layer, keys, self.state.slots))
        return found


class StepWatch:
    """What rules are shown of one step: attention per slot, and queries; for the B sequences of the batch."""

    def __init__(self, pool: PagePool, evictions: Sequence[RowEviction | None]) -> None:
        self._pool = pool
        scored = scored_layers(pool.spec)
        self._places = {layer: place for place, layer in enumerate(scored.tolist())}
        self._keepers = [(b, e) for b, e in enumerate(evictions) if e is not None and e.rule.query_window > 0]
        self._queries: list[Tensor] = []
        codes = [0 if e is None else e.rule.reduce for e in evictions]
        self._reduce = torch.tensor(codes, dtype=torch.int32)
        self._seen: Tensor | None = None
        self._reader: Tensor | None = None
        if any(codes):
            slots = max(e.state.slots for e in evictions if e is not None and e.rule.reduce)
            # Only what is observed is ever touched.
            self._seen = pool.scratch(len(scored), len(evictions), pool.spec.max_kv_heads, slots)

    def mass(self, call: AttentionCall) -> tuple[Tensor | None, Tensor | None]:
        """Where this call's attention goes, f32 [B, Hk, M], and how heads are reduced, int32 [B]; or nothing."""
        if self._seen is None or call.layer not in self._places:
            return None, None
        heads = self._pool.spec.layers[call.layer].kv_heads
        own = self._seen[self._places[call.layer], :, :heads]
        self._reader = torch.empty_like(own) if call.reader else None
        return (own if self._reader is None else self._reader), self._reduce

    def note(self, call: AttentionCall, query: Tensor) -> None:
        """After the call: join the readers of a cache, and keep queries [Hq, B, D]."""
        if call.layer not in self._places:
            return
        place, layer = self._places[call.layer], self._pool.spec.layers[call.layer]
        if self._reader is not None:
            assert self._seen is not None
            self._join(self._seen[place, :, : layer.kv_heads], self._reader, call.reader)
            self._reader = None
        if not self._keepers:
            return
        self._queries = [*self._queries, query] if call.reader else [query]
        if call.reader == layer.readers - 1:
            grouped = [q.unflatten(0, (layer.kv_heads, -1)) for q in self._queries]
            joined = torch.cat(grouped, 1).flatten(0, 1)
            for b, eviction in self._keepers:
                eviction.rule.keep_query(eviction.state, place, joined[:, b])

    def _join(self, own: Tensor, other: Tensor, reader: int) -> None:
        """The layers that read a cache are one group of query heads."""
        for b, code in enumerate(self._reduce.tolist()):
            if code == 1:
                own[b].lerp_(other[b], 1 / (reader + 1))
            elif code:
                torch.maximum(own[b], other[b], out=own[b])

    def seen(self, b: int) -> Tensor | None:
        """Attention f32 [L, Hk, M] of sequence b, rubbish beyond its slots; None where its rule observes nothing."""
        return self._seen[:, b] if self._seen is not None and int(self._reduce[b]) else None


def scored_layers(spec: ModelSpec) -> NDArray[np.int64]:
    """The caches that policies and rules act on: those that see everything."""
    return np.array([i for i, layer in enumerate(spec.layers) if layer.window is None], np.int64)


def open_eviction(
    spec: ModelSpec, recipe: Recipe, layout: SnapshotLayout, buffer: Tensor, most: int = MOST_TOKENS
) -> RowEviction | None:
    """The eviction of a snapshot's sequence, not bound to a row yet; None where nothing ever leaves.

    `most`: tokens that the sequence can ever have; a larger cap takes no memory.
    A prompt that is longer than its caps is brought within them here: `slot_order` and `counts` say what of the
    snapshot goes into pages.
    """
    rule, layers, meta = get_rule(recipe), scored_layers(spec), layout.meta
    if not rule.evicts or not len(layers):
        return None
    assert "caps" in meta.arrays, "a prompt without the arrays of its decode rule"
    lengths = meta.counts[layers]
    positions = torch.full((*lengths.shape, int(lengths.max())), HOLE, dtype=torch.int32)
    for place, layer in enumerate(layers.tolist()):
        for head in range(spec.layers[layer].kv_heads):
            listed = meta.positions[layer, head]
            positions[place, head, : len(listed)] = torch.from_numpy(listed.copy())
    arrays = {name: array for name, array in meta.arrays.items() if name not in TurnedKeys.NAMES}
    state = rule.open(positions, lengths, meta.prompt_tokens, arrays, most)
    keys = None
    if rule.wants_keys(state):
        keys = [
            _layer_keys(spec, layer, _packed_keys(layout, buffer, layer), state.slots)
            for layer in layers.tolist()
        ]
    moves = state.apply(rule.settle(state, keys))
    turned = TurnedKeys.open(spec, layers, state, moves, layout, buffer) if rule.slot_positions else None
    eviction = RowEviction(spec, rule, state, turned)
    eviction._moves = moves
    return eviction


def settled_counts(spec: ModelSpec, recipe: Recipe, meta: SnapshotMeta) -> NDArray[np.int32]:
    """Slots [L, Hk] that a snapshot's sequence takes once it is restored."""
    caps = _caps(spec, recipe, meta)
    if caps is None or meta.decoded:
        return meta.counts
    counts = meta.counts.copy()
    layers = scored_layers(spec)
    counts[layers] = np.minimum(counts[layers], caps)
    return counts


def most_slots(spec: ModelSpec, recipe: Recipe, meta: SnapshotMeta) -> NDArray[np.int64] | None:
    """Slots [L, Hk] that heads never pass while they decode; None where nothing bounds them."""
    caps = _caps(spec, recipe, meta)
    if caps is None:
        return None
    layers = scored_layers(spec)
    most = np.full(meta.counts.shape, np.iinfo(np.int32).max, np.int64)
    most[layers] = np.maximum(get_rule(recipe).capacity(caps), settled_counts(spec, recipe, meta)[layers])
    return most


def _caps(spec: ModelSpec, recipe: Recipe, meta: SnapshotMeta) -> NDArray[np.int32] | None:
    """Caps [L, Hk] of the scored layers; worked out anew where only the counts are known yet."""
    rule, layers = get_rule(recipe), scored_layers(spec)
    if not rule.evicts or not len(layers):
        return None
    carried: Mapping[str, Tensor] = meta.arrays
    if "caps" in carried:
        return carried["caps"].numpy()
    return rule.caps(meta.counts[layers], meta.prompt_tokens, layers.tolist())


def _layer_keys(spec: ModelSpec, layer: int, keys: Tensor, slots: int) -> LayerKeys:
    """Keys [Hk, n, D] as rules read them, padded to the state's slots."""
    own = spec.layers[layer]
    padded = torch.nn.functional.pad(keys, (0, 0, 0, slots - keys.shape[1]))
    return LayerKeys(padded, own.scale, own.softcap, own.sinks)


def _packed_keys(layout: SnapshotLayout, buffer: Tensor, layer: int) -> Tensor:
    """Keys [Hk, n, D] of one layer of a packed snapshot, n the longest head's."""
    if layout.even(layer):
        return layout.layer(buffer, layer)[0]
    heads = [layout.head(buffer, layer, head)[0] for head in range(layout.spec.layers[layer].kv_heads)]
    return torch.nn.utils.rnn.pad_sequence(heads, batch_first=True)
