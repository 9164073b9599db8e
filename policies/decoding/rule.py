"""What a decode rule is: which cached tokens leave while a sequence is generated.

Life of a rule, for the engine. At prefill: `prompt_queries` and `prompt_all_queries` say what must be computed; where
either asks for something, `prompt_arrays` is called per scored layer, else `{}` stands for it; `prompt_state` joins the
layers into what the snapshot carries. At decode: `open` makes the state, `settle` brings it within its caps (apply the
change, move the pages); then every step, in this order:

1. append the token to slot `state.write` of every head, attend over `state.visible` slots; where `query_window` > 0,
   `keep_query` for every layer;
2. `state.advance()`;
3. where `reduce` > 0, `observe` the attention just computed;
4. `change = evict(state, keys)`, `index = state.apply(change)`; with a `Compact`, move the pages along `index`.
   `keys` only where `wants_keys(state)`.

In slot mode, after `open`, `settle` and every `evict`, turn each key whose frame changed (`state.frames`) before the
next step, and run that step's token at position `state.clock`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels import ops
from policies.decoding.state import Change, Compact, DecodeState, Victims
from policies.policy import LayerView, Selection
from policies.recipe import Recipe

_NEVER = torch.iinfo(torch.int32).max
MOST_TOKENS = 1 << 30
"""Caps end here: what is added to them stays an int32, and no sequence has as many tokens."""
_HIGH = 1e300


@dataclass(frozen=True)
class LayerKeys:
    """Cached keys of one scored layer, for a rule that scores anew.

    keys: [Hk, C, D] in slot order (Hk and D of this layer; slots beyond a head's length undefined); scale, softcap,
    sinks as in the layer's attention. Only read.
    """

    keys: Tensor
    scale: float
    softcap: float = 0.0
    sinks: Tensor | None = None


class DecodeRule(ABC):
    """Decides what leaves. Stateless: one instance serves every sequence of its recipe; `DecodeState` is what changes.

    Nothing from `observe` to `state.apply` waits for a device, except where a docstring says so. A head is never left
    with fewer tokens than its protected ones (the first `sinks` tokens and the recipe's spans); where those fill a cap,
    the newest token itself leaves after it was attended to.
    """

    reduce: ClassVar[int] = 0
    """Attention that `observe` is shown per kv head: 0 none, 1 the mean over its query heads, 2 their maximum."""

    evicts: ClassVar[bool] = True
    """False: nothing ever leaves, and the engine needs no state."""

    in_order: ClassVar[bool] = False
    """Whether slots are in the order of positions after a `Compact`. It costs more: most of what stays moves."""

    prompt_all_queries: bool = False
    """Whether `LayerView.observed` of policy h2o is wanted even of a prompt from which nothing is evicted."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.decode = recipe.decode

    # What the rule asks of the engine.

    @property
    def query_window(self) -> int:
        """Newest queries that the state keeps (`keep_query`), 0 for none."""
        return 0

    @property
    def slot_positions(self) -> bool:
        """Whether keys are turned so that cached tokens count as neighbours (`state.frames`, `state.clock`)."""
        return self.recipe.positions == "slot"

    def prompt_queries(self, n: int) -> int:
        """How many last prompt queries `prompt_arrays` reads of an `n`-token prompt."""
        return 0

    def protected_ranges(self, n: int) -> tuple[tuple[int, int], ...]:
        """Prompt tokens [start, stop) that never leave: sinks and spans, clipped to the prompt."""
        given = ((0, self.decode.sinks or 0), *self.recipe.spans)
        return tuple((start, min(stop, n)) for start, stop in given if start < min(stop, n))

    def protected_tokens(self, n: int) -> int:
        """How many prompt tokens never leave."""
        return int(_marked(self.protected_ranges(n), n).sum())

    def caps(self, counts: NDArray[np.integer], n: int, layers: Sequence[int]) -> NDArray[np.int32]:
        """Tokens held after eviction, int32 [L, Hk]: `decode.budget`, else what the prompt's selection left.

        counts: [L, Hk] survivors, 0 for absent heads; layers: cache index of each scored layer. A layer that came whole
        has its budget in tokens as cap where the recipe names one, and at least the prompt. Never below the protected
        tokens.
        """
        if self.decode.budget is not None:
            caps = np.full(counts.shape, self.decode.budget)
        else:
            whole = np.array([max(n, self._tokens_budget(layer)) for layer in layers])[:, None]
            caps = np.where(((counts == n) | (counts == 0)).all(1, keepdims=True), whole, counts)
        caps = np.minimum(caps, MOST_TOKENS)
        return np.where(counts > 0, np.maximum(caps, self.protected_tokens(n)), 0).astype(np.int32)

    def recent_tokens(self, caps: NDArray[np.int32]) -> NDArray[np.int32]:
        """Newest tokens that stay whatever their score, int32 like `caps`."""
        each = {int(cap): self.decode.recent_tokens(int(cap)) for cap in np.unique(caps)}
        return np.vectorize(each.__getitem__, otypes=[np.int32])(caps)

    def _tokens_budget(self, layer: int) -> int:
        """The layer's budget where it is a number of tokens, else 0."""
        budget = self.recipe.budget
        for first, last, own in self.recipe.bands:
            if first <= layer <= last:
                budget = own
        return budget if isinstance(budget, int) else 0

    def capacity(self, caps: NDArray[np.int32]) -> NDArray[np.int32]:
        """Slots that each head ever needs once it is settled, int32 [L, Hk]; 0 for absent heads."""
        return np.where(caps > 0, caps + self.every, 0).astype(np.int32)

    @property
    def every(self) -> int:
        """Tokens that a head grows beyond its cap before some leave."""
        return 1

    # At prefill.

    def prompt_arrays(self, layer: LayerView, selection: Selection) -> dict[str, Tensor]:
        """What one layer's prompt attention says of its survivors; columns as in `selection.indices`, [Hk, ..., kept].

        `layer.queries` holds at least the last `prompt_queries(N)` queries. May wait for the device.
        """
        return {}

    def prompt_numbers(self, caps: NDArray[np.int32], n: int) -> int:
        """Most numbers that `prompt_arrays` gives per survivor (`extra_names` aside), known before any is computed.

        caps: int32 [L, Hk], 0 for absent heads. Lower caps never give fewer.
        """
        return 0

    def prompt_state(
        self,
        per_layer: Sequence[Mapping[str, Tensor]],
        counts: NDArray[np.integer],
        n: int,
        layers: Sequence[int],
    ) -> dict[str, Tensor]:
        """The arrays that a prompt's snapshot carries: `prompt_arrays` of the scored layers joined, and "caps".

        counts: int32 [L, Hk] survivors, 0 for absent heads; n: prompt tokens; layers: cache index of each scored layer.
        Ragged parts are padded with zeros. Float32, int32 or the model's dtype.
        """
        names = per_layer[0] if per_layer else ()
        joined = {name: _stack([part[name] for part in per_layer]) for name in names}
        return {"caps": torch.from_numpy(self.caps(counts, n, layers)), **joined}

    def carried(self, n: int, running: bool) -> dict[str, tuple[torch.dtype | None, int]]:
        """Arrays of a snapshot beside the state's own: name -> dtype (None: the model's), number of dimensions.

        Those of a prompt of `n` tokens, or of a `running` sequence. All but `extra_names` are per slot.
        """
        return {"frame": (torch.int32, 3)} if running and self.slot_positions else {}

    # At decode.

    def open(
        self,
        positions: Tensor,
        lengths: NDArray[np.integer],
        n: int,
        arrays: Mapping[str, Tensor],
        most: int = MOST_TOKENS,
    ) -> DecodeState:
        """The state of a sequence, from a prompt's snapshot or from one taken in the middle (`DecodeState.export`).

        positions: int32 [L, Hk, C'], -1 beyond `lengths` [L, Hk] (slots in use, 0 exactly for absent heads) and in
        holes; n: prompt tokens; arrays: as `prompt_state` or `export` made them; most: tokens that the sequence can
        ever have, for which no cap needs more room. Nothing given is kept or changed.
        """
        running = "write" in arrays
        most = max(most, int(lengths.max(initial=0)))
        # Only the room is cut: whoever goes on from this with more tokens has the caps that it would have had.
        caps = arrays["caps"].cpu().numpy().astype(np.int32)
        capacity = np.minimum(self.capacity(caps), most)
        slots = int(max(capacity.max(initial=0), lengths.max(initial=0)))
        device = positions.device
        places = _padded(positions.to(torch.int32), slots, -1)
        size = torch.from_numpy(np.asarray(lengths, np.int32).copy()).to(device)
        newest, clock = arrays["clock"].tolist() if running else (n - 1, n)
        own = {
            name: array.to(device) for name, array in arrays.items() if name not in ("caps", "write", "clock")
        }
        extra = {name: own.pop(name).clone() for name in self.extra_names() if name in own}
        marked = torch.from_numpy(np.append(_marked(self.protected_ranges(n), n), False)).to(device)
        state = DecodeState(
            positions=places, lengths=size,
            write=arrays["write"].to(device, torch.int32).clone() if running else size.clone(),
            protected=marked[torch.where((places >= 0) & (places < n), places, n).long()],
            heads=torch.from_numpy(capacity > 0).to(device), counts=(places >= 0).sum(-1).int().cpu().numpy(),
            caps=caps, capacity=capacity, n=n, position=newest, clock=clock, settled=running,
            arrays={name: _padded(array, slots, 0) for name, array in own.items()}, extra=extra, derived={},
        )  # fmt: skip
        self._prepare(state)
        return state

    def extra_names(self) -> tuple[str, ...]:
        """Names in snapshots of tensors that are no per-slot arrays."""
        return ()

    def _prepare(self, state: DecodeState) -> None:  # noqa: B027
        """Fill in what a snapshot lacks: arrays of a prompt that brought none, and `state.derived`."""

    def settle(self, state: DecodeState, keys: Sequence[LayerKeys] | None = None) -> Change:
        """What a prompt longer than its caps loses before the first step. None for a running sequence's snapshot."""
        if state.settled:
            return None
        state.settled = True
        return self.make_room(state, keys=keys)

    def make_room(
        self, state: DecodeState, coming: int = 0, keys: Sequence[LayerKeys] | None = None
    ) -> Compact | None:
        """What leaves at once so that `coming` more tokens fit the caps: nothing where they do."""
        over = state.counts + coming > state.caps
        if not over.any():
            return None
        keep = np.where(over, state.caps - coming, state.counts)
        return self._compact(state, keep, self._score(state, keys))

    def keep_query(self, state: DecodeState, layer: int, query: Tensor) -> None:
        """Note the query [Hq, D] of the token being decoded in scored layer number `layer`. Before `state.advance`."""
        raise AssertionError("this rule keeps no queries")

    def observe(self, state: DecodeState, attention: Tensor) -> None:  # noqa: B027
        """Note the newest token's attention, f32 [L, Hk, >= longest head]; beyond `state.lengths` it is not read."""

    def wants_keys(self, state: DecodeState) -> bool:
        """Whether the `settle` or `evict` that comes next reads cached keys: gather them then. A host fact."""
        return False

    @abstractmethod
    def evict(self, state: DecodeState, keys: Sequence[LayerKeys] | None = None) -> Change:
        """What leaves after the newest token was attended to. Moves nothing: `state.apply` does."""

    # For rules.

    def _score(self, state: DecodeState, keys: Sequence[LayerKeys] | None) -> Tensor:
        """[L, Hk, C] float: higher stays, equal scores go by position. Anything in empty slots."""
        raise NotImplementedError

    def _evict_together(self, state: DecodeState, keys: Sequence[LayerKeys] | None) -> Compact | None:
        """Back to the cap where a head has grown by `every` tokens."""
        due = state.counts >= state.caps + self.every
        if not (due & state.heads_on_host).any():
            return None
        return self._compact(state, np.where(due, state.caps, state.counts), self._score(state, keys))

    def _compact(self, state: DecodeState, keep: NDArray[np.integer], score: Tensor) -> Compact:
        """Keep the best `keep` [L, Hk] tokens: protected ones first, then the `recent` newest, then by score."""
        counts = np.clip(keep, self._protected_counts(state), state.counts).astype(np.int32)
        # Doubles hold any score exactly, and leave room above for those that stay anyhow.
        value = score.double().nan_to_num(nan=-_HIGH, posinf=_HIGH, neginf=-_HIGH)
        recent = state.derived.get("recent")
        if recent is not None:
            value.masked_fill_(state.positions > state.position - recent.unsqueeze(-1), 2 * _HIGH)
        value.masked_fill_(state.protected, float("inf"))
        stays = ops.keep_highest(value, state.positions, torch.from_numpy(counts).to(value.device))
        return Compact(stays, counts, self.in_order)

    def _victims(
        self, state: DecodeState, score: Tensor | None, recent: Tensor | None = None, seen: int = 0
    ) -> Victims | None:
        """One token from each head above its cap: the lowest score, equal scores (or no scores) the oldest.

        score: f32 [L, Hk, >= C], divided by the queries that could see the token where `seen` of them were summed;
        recent: int32 [L, Hk], how many newest tokens stay as long as any other may leave.
        """
        due = (state.counts > state.caps) & state.heads_on_host
        if not due.any():
            return None
        slots = ops.lowest_slots(
            score, state.positions, state.protected, state.lengths, state.position, recent=recent, seen=seen
        )
        if not (due == state.heads_on_host).all():
            slots = torch.where(torch.from_numpy(due).to(slots.device), slots, -1)
        return Victims(slots, due)

    def _protected_counts(self, state: DecodeState) -> NDArray[np.int32]:
        """Protected tokens per head: survivors hold all protected tokens of the prompt."""
        return np.where(state.heads_on_host, self.protected_tokens(state.n), 0).astype(np.int32)


def row_of(state: DecodeState, attention: Tensor) -> Tensor:
    """f32 [L, Hk, C]: observed attention over the state's slots, zero in empty ones (whose entries are undefined)."""
    row = attention[..., : state.slots]
    if row.shape[-1] < state.slots:
        row = _padded(row, state.slots, 0)
    return torch.where(state.positions >= 0, row, 0.0)


def survivors_of(per_token: Tensor, selection: Selection) -> Tensor:
    """[Hk, ..., kept]: columns of `per_token` [Hk, ..., N] at the survivors; padding of ragged rows reads any token."""
    index = selection.indices.clamp(max=per_token.shape[-1] - 1)
    between = (1,) * (per_token.dim() - 2)
    return per_token.gather(-1, index.view(len(index), *between, -1).expand(*per_token.shape[:-1], -1))


def _marked(ranges: Sequence[tuple[int, int]], n: int) -> NDArray[np.bool_]:
    """bool [n]: positions inside any range."""
    marked = np.zeros(n, np.bool_)
    for start, stop in ranges:
        marked[start:stop] = True
    return marked


def _padded(tensor: Tensor, slots: int, value: int) -> Tensor:
    """A new tensor [..., slots] that begins with `tensor` [..., <= slots]."""
    out = tensor.new_full((*tensor.shape[:-1], slots), value)
    out[..., : tensor.shape[-1]] = tensor
    return out


def _stack(parts: Sequence[Tensor]) -> Tensor:
    """Parts of equal rank as one tensor [len(parts), ...], each padded with zeros to the widest in every dimension."""
    widest = [max(sizes) for sizes in zip(*(part.shape for part in parts), strict=True)]
    out = parts[0].new_zeros(len(parts), *widest)
    for index, part in enumerate(parts):
        out[index][tuple(slice(size) for size in part.shape)] = part
    return out
