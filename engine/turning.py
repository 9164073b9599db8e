"""Keys that count by their slot: rotations kept where a rule wants them (`DecodeState.frames`), for endless streams.

RoPE sees differences of positions only. So the newest tokens keep the rotation that they were cached with, and only
what never leaves (sinks, spans) is turned again whenever a token behind it left: always from the key as the model
computed it, kept here beside the pages, so that nothing adds up. The model is run at the state's clock. Before the
clock reaches the context length every key of the row is turned back once and the clock with it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.model import LayerSpec, ModelSpec
from engine.pool import PagePool
from engine.rows import read_layer, write_layer
from engine.snapshot import SnapshotLayout
from kernels import ops
from kernels.rotary import Rotation
from policies.decoding.state import DecodeState

_KEYS = "slot_keys"


class _Alike(NamedTuple):
    """Scored layers that are turned in one go: places in the state, cache indices, keys and values [n, S, Hk, D]."""

    places: list[int]
    layers: list[int]
    rotation: Rotation
    keys: Tensor
    values: Tensor


class TurnedKeys:
    """The keys of one sequence that never leave, as the model computed them, and where they were last turned to.

    `slots` int64 [L, Hk, S]: where they lie, -1 beyond a head's own.
    """

    NAMES = (_KEYS,)

    def __init__(self, slots: Tensor, alike: list[_Alike]) -> None:
        self._slots = slots
        self._alike = alike
        self._written: Tensor | None = None

    @classmethod
    def open(
        cls,
        spec: ModelSpec,
        layers: NDArray[np.int64],
        state: DecodeState,
        moves: Tensor | None,
        layout: SnapshotLayout,
        buffer: Tensor,
    ) -> TurnedKeys:
        """From a snapshot; `moves` int64 [L, Hk, C]: the packed slot of each of the state's, None where they agree."""
        slots = state.protected_slots()
        most = slots.shape[-1]
        packed = slots if moves is None else moves.gather(-1, slots.clamp(min=0))
        carried = layout.meta.arrays.get(_KEYS)
        at = 0
        groups: dict[tuple[object, ...], list[int]] = {}
        for place, layer in enumerate(layers.tolist()):
            groups.setdefault(_kind(spec.layers[layer]), []).append(place)
        alike = []
        for places in groups.values():
            caches = [int(layers[place]) for place in places]
            own = spec.layers[caches[0]]
            keys = torch.zeros(len(places), most, own.kv_heads, own.head_dim, dtype=spec.dtype)
            values = torch.zeros_like(keys)
            for i, (place, layer) in enumerate(zip(places, caches, strict=True)):
                for head in range(own.kv_heads):
                    found = packed[place, head][slots[place, head] >= 0]
                    k, v = layout.head(buffer, layer, head)
                    keys[i, : len(found), head], values[i, : len(found), head] = k[found], v[found]
            if carried is not None:
                keys = carried[at : at + keys.numel()].view(keys.shape)
                at += keys.numel()
            assert own.rotation is not None, "refused where a model's rotation is not known"
            alike.append(_Alike(places, caches, own.rotation, keys, values))
        return cls(slots, alike)

    def fork(self) -> TurnedKeys:
        """For a row with the same contents: the keys themselves are shared and never change."""
        copy = TurnedKeys(self._slots, self._alike)
        copy._written = self._written
        return copy

    def export(self) -> dict[str, Tensor]:
        """What a snapshot carries, beside what the pages hold."""
        return {_KEYS: torch.cat([group.keys.reshape(-1) for group in self._alike])}

    def turn(self, pool: PagePool, row: int, state: DecodeState) -> None:
        """Write the kept keys to pages, turned to their frames, where those changed. The row's pages are its own."""
        frames = state.frames
        assert frames is not None
        if not self._slots.shape[-1]:
            return
        at = self._slots.clamp(min=0)
        wanted = frames.gather(-1, at)
        if self._written is not None and torch.equal(wanted, self._written):
            return
        valid = self._slots >= 0
        shifts = torch.where(valid, wanted - state.positions.gather(-1, at), 0).transpose(1, 2)
        # A head that has fewer of them writes the rest to the next token's slot, which that token fills in this step.
        target = torch.where(valid, self._slots, state.write.unsqueeze(-1)).int().permute(2, 0, 1)
        for group in self._alike:
            heads, layers = group.keys.shape[2], torch.tensor(group.layers, dtype=torch.int32)
            turned = group.rotation.rotate(group.keys, shifts[group.places][..., :heads])
            tables, layout = pool.tables[row, :, :heads], pool.layouts[group.layers[0]]
            slots = torch.zeros(len(target), *tables.shape[:2], dtype=torch.int32)
            slots[:, group.layers] = target[:, group.places, :heads]
            # As if the layers were sequences: their next token is one that stays.
            for i, each in enumerate(slots):
                ops.append(
                    pool.memory, layout, tables, each, layers, turned[:, i], group.values[:, i]
                )  # fmt: skip
        self._written = wanted

    def turn_back(self, pool: PagePool, row: int, down: int) -> None:
        """Turn every key of a row, windowed layers' too, by -`down`. The kept ones are due again."""
        for layer, spec in enumerate(pool.spec.layers):
            k, v = read_layer(pool, row, layer)
            write_layer(pool, row, layer, _turned_back(spec, k, down), v)
        self._written = None


def turn_prompt(spec: LayerSpec, keys: Tensor, frames: Tensor, positions: Tensor) -> Tensor:
    """keys [n, D] of one head as the model computed them, turned from `positions` [n] to `frames` [n]."""
    shifts = torch.where(positions >= 0, frames - positions, 0)
    if spec.rotation is None or not shifts.any():
        return keys
    return spec.rotation.rotate(keys, shifts)


def _turned_back(spec: LayerSpec, keys: Tensor, down: int) -> Tensor:
    assert spec.rotation is not None, "refused where a model's rotation is not known"
    return spec.rotation.rotate(keys, torch.full((keys.shape[1],), -down))


def _kind(spec: LayerSpec) -> tuple[object, ...]:
    rotation = spec.rotation
    assert rotation is not None, "refused where a model's rotation is not known"
    return spec.kv_heads, spec.head_dim, rotation.interleaved, tuple(rotation.inv_freq.tolist())
