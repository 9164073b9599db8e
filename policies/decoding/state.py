"""What a decode rule knows of one sequence's cache: which token lies in which slot, and what was noted about it.

No keys or values are here: those lie in the engine's pages, slot for slot. Everything is batched over scored layers and
kv heads; what the host must know each step (token counts, whether anything leaves) is plain numbers kept beside the
tensors, so that a step never waits for a device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

OWN_NAMES = ("caps", "write", "clock")
"""Names in an export that are the state's own; a rule's arrays use others."""


@dataclass(frozen=True)
class Victims:
    """One token leaves each head that is full; its slot takes the next token. No KV moves.

    slots: int64 [L, Hk], the slot that empties, -1 where nothing leaves; due: host bool [L, Hk], where one leaves.
    """

    slots: Tensor
    due: NDArray[np.bool_]


@dataclass(frozen=True)
class Compact:
    """Many tokens leave at once and the rest move together.

    keep: bool [L, Hk, C], False in empty slots; counts: host int32 [L, Hk], how many are kept. in_order: what stays
    keeps its order, which moves all of it; else only as many move as there are gaps to fill.
    """

    keep: Tensor
    counts: NDArray[np.int32]
    in_order: bool = False


Change = Victims | Compact | None
"""What `DecodeRule.evict` asks for. Which of the three it is never depends on tensor values."""


@dataclass
class DecodeState:
    """Slots of one sequence in the L scored layers, between two decode steps. Made by `DecodeRule.open`.

    positions: int32 [L, Hk, C], true position of each slot's token, -1 where empty. lengths: int32 [L, Hk], slots in
    use, a hole (a slot below the length whose token left) included; at most one per head. write: int32 [L, Hk], slot
    of the next token: the hole, or the length. protected: bool [L, Hk, C], never evicted. heads: bool [L, Hk], False
    for heads that a narrower layer lacks (lengths 0, write 0, positions -1).

    arrays: per-slot notes of the rule, [L, Hk, ..., C], moved with the slots and zero for a new token. extra: other
    tensors of the rule that travel in exports. derived: tensors computed from the rest, never exported.

    Host side: counts, caps, capacity: int32 [L, Hk] (tokens held; tokens held after eviction; slots ever needed once
    settled); n: prompt tokens; position: of the newest token; clock: where the next token's key and query are rotated
    (position + 1, less in slot mode after `rebase`); settled: whether the prompt is within its caps already.

    With an array "frame" (slot mode) int32 [L, Hk, C] it says at which position each key has to be rotated.
    """

    positions: Tensor
    lengths: Tensor
    write: Tensor
    protected: Tensor
    heads: Tensor
    counts: NDArray[np.int32]
    caps: NDArray[np.int32]
    capacity: NDArray[np.int32]
    n: int
    position: int
    clock: int
    settled: bool
    arrays: dict[str, Tensor]
    extra: dict[str, Tensor]
    derived: dict[str, Tensor]

    @property
    def slots(self) -> int:
        """C: slots that the tensors have room for."""
        return self.positions.shape[-1]

    @property
    def visible(self) -> Tensor:
        """int32 [L, Hk]: slots that the next step's attention runs over, its own token's included; none is empty."""
        return torch.maximum(self.lengths, self.write + self.heads)

    @property
    def frames(self) -> Tensor | None:
        """int32 [L, Hk, C]: where each key has to be rotated for the next step; None outside slot mode."""
        return self.arrays.get("frame")

    def protected_slots(self) -> Tensor:
        """int64 [L, Hk, S]: the slots of what is never evicted, S the most of any head, -1 beyond a head's own.

        Waits for the device. They change with a `Compact` alone.
        """
        most = int(self.protected.sum(-1).max())
        order = (~self.protected).to(torch.int8).argsort(dim=-1, stable=True)[..., :most]
        return torch.where(self.protected.gather(-1, order), order, -1)

    def advance(self) -> None:
        """Count the token just appended to slot `write` of every head. Before `observe`."""
        self.position += 1
        slot = self.write.long().unsqueeze(-1)
        self.positions.scatter_(-1, slot, torch.where(self.heads, self.position, -1).int().unsqueeze(-1))
        self.protected.scatter_(-1, slot, False)
        for name, array in self.arrays.items():
            index = slot.view(*slot.shape[:2], *(1,) * (array.dim() - 3), 1).expand(*array.shape[:-1], 1)
            array.scatter_(-1, index, self.clock if name == "frame" else 0)
        self.lengths = self.visible
        self.write = self.lengths.clone()
        self.counts = self.counts + self.heads_on_host
        self.clock += 1

    @property
    def heads_on_host(self) -> NDArray[np.bool_]:
        """bool [L, Hk]: `heads`, without asking a device: every real head may hold at least one token."""
        return self.capacity > 0

    def apply(self, change: Change) -> Tensor | None:
        """Let tokens go. After a `Compact`: int64 [L, Hk, C'], the old slot of each new one, -1 beyond the counts."""
        if change is None:
            return None
        if isinstance(change, Victims):
            self._empty(change)
            return None
        return self._move_together(change)

    def _empty(self, change: Victims) -> None:
        leaves = change.slots >= 0
        slot = change.slots.clamp(min=0).unsqueeze(-1)
        stays = self.positions.gather(-1, slot)
        self.positions.scatter_(-1, slot, torch.where(leaves.unsqueeze(-1), -1, stays))
        self.write = torch.where(leaves, change.slots, self.lengths).int()
        self.counts = self.counts - change.due

    def _move_together(self, change: Compact) -> Tensor:
        width = int(max(self.capacity.max(initial=0), change.counts.max(initial=0)))
        counts = torch.from_numpy(change.counts.astype(np.int32)).to(self.positions.device)
        if change.in_order:
            order = (~change.keep).to(torch.int8).argsort(dim=-1, stable=True)[..., :width]
        else:
            order = _gaps_filled(change.keep, counts)[..., :width]
        order = torch.nn.functional.pad(order, (0, width - order.shape[-1]))
        filled = torch.arange(width, device=order.device) < counts.unsqueeze(-1)
        self.positions = torch.where(filled, self.positions.gather(-1, order), -1)
        self.protected = self.protected.gather(-1, order) & filled
        self.arrays = {name: _gather(array, order, filled) for name, array in self.arrays.items()}
        self.lengths, self.write = counts, counts.clone()
        self.counts = change.counts.astype(np.int32)
        return torch.where(filled, order, -1)

    def rebase(self) -> int:
        """Slot mode: move all frames and the clock down as far as they go. Returns by how much keys have to follow.

        The clock becomes the number of tokens in the fullest head, the lowest value at which no frame is negative.
        """
        down = self.clock - int(self.counts.max(initial=0))
        frame = self.arrays["frame"]
        self.arrays["frame"] = torch.where(self.positions >= 0, frame - down, frame)
        self.clock -= down
        return down

    def clone(self) -> DecodeState:
        """An independent copy, for a fork of the sequence."""
        return DecodeState(
            self.positions.clone(), self.lengths.clone(), self.write.clone(), self.protected.clone(), self.heads,
            self.counts.copy(), self.caps, self.capacity, self.n, self.position, self.clock, self.settled,
            {name: array.clone() for name, array in self.arrays.items()},
            {name: array.clone() for name, array in self.extra.items()},
            dict(self.derived),
        )  # fmt: skip

    def export(self) -> dict[str, Tensor]:
        """What a snapshot carries beside `positions` and `lengths`: `DecodeRule.open` makes the same state of it again.

        Named as snapshots want ([a-z_], at most 16 long), float32, bfloat16, int32 or uint8, no memory shared. Per-slot
        arrays end with the longest head. "write" tells a running sequence from a prompt. Waits for the device.
        """
        used = int(self.lengths.max()) if self.lengths.numel() else 0
        device = self.positions.device
        own = {
            "caps": torch.from_numpy(self.caps.copy()).to(device),
            "write": self.write.clone(),
            "clock": torch.tensor([self.position, self.clock], dtype=torch.int32, device=device),
        }
        arrays = {name: array[..., :used].clone() for name, array in self.arrays.items()}
        return own | arrays | {name: array.clone() for name, array in self.extra.items()}

    def check(self) -> None:
        """AssertionError unless slots, counts and notes agree. Waits for the device."""
        held = self.positions >= 0
        assert (held.sum(-1).cpu().numpy() == self.counts).all(), "counts differ from the slots"
        place = torch.arange(self.slots, device=self.positions.device)
        assert not (held & (place >= self.lengths.unsqueeze(-1))).any(), (
            "a token lies beyond the slots in use"
        )
        holes = self.lengths - held.sum(-1)
        assert ((holes == 0) | (holes == 1)).all(), "more than one hole in a head"
        assert (self.write == torch.where(holes == 1, self._first_empty(), self.lengths)).all(), (
            "wrong next slot"
        )
        assert not (self.protected & ~held).any(), "an empty slot is protected"
        assert not held[~self.heads].any(), "a head that does not exist holds tokens"
        ordered = self.positions.sort(dim=-1).values
        assert not ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any(), "a token twice"
        assert not (self.positions > self.position).any(), "a token from the future"
        for name, array in self.arrays.items():
            assert array.shape[:2] == self.heads.shape and array.shape[-1] == self.slots, f"shape of {name}"
        if self.settled:
            assert (self.counts <= self.capacity).all(), "a head outgrew its capacity"

    def _first_empty(self) -> Tensor:
        return (self.positions < 0).int().argmax(-1).int()


def _gaps_filled(keep: Tensor, counts: Tensor) -> Tensor:
    """int64 [L, Hk, C]: the old slots of the first `counts` [L, Hk] when what lies behind moves into the gaps.

    Waits for the device.
    """
    place = torch.arange(keep.shape[-1], device=keep.device)
    inside = place < counts.unsqueeze(-1)
    order = place.repeat(*keep.shape[:-1], 1)
    # A head has as many gaps as tokens behind, and both come head by head, in ascending order.
    order[inside & ~keep] = (keep & ~inside).nonzero()[:, -1]
    return order


def _gather(array: Tensor, order: Tensor, filled: Tensor) -> Tensor:
    """[L, Hk, ..., C] at slots `order` [L, Hk, C'], zero where not `filled`."""
    between = (1,) * (array.dim() - 3)
    shape = (*array.shape[:-1], order.shape[-1])
    index = order.view(*order.shape[:2], *between, -1).expand(shape)
    return torch.where(filled.view(*filled.shape[:2], *between, -1), array.gather(-1, index), 0)
