"""The one format for moving a sequence: shipping, preemption, drain and recovery all use it.

A snapshot is one buffer: a fixed header, metadata (tokens, kept counts, positions where they are not a range), the
arrays of a decode rule (`engine/arrays.py`), then the payload from a 64-byte boundary: layer-major, then kv head,
K [n, D] then V [n, D] in the model's dtype. Slots and positions are different counters: decode goes on at position
`next_position`, whatever the number of slots.
Everything is little endian; a reader checks magic, version, fingerprint and lengths before it trusts a byte. The
checksum over the whole buffer travels in the ticket.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.arrays import ArraysError, arrays_bytes, read_arrays, write_arrays
from engine.model import ModelSpec
from engine.survivors import LayerSurvivors
from engine.workspace import Workspace

_MAGIC = b"KVTS"
_VERSION = 2
# magic, version, fingerprint, prompt tokens (the selection point N), all tokens, layers, max kv heads, payload offset,
# payload bytes, recipe id length, positions length (int32 entries), arrays length (bytes)
_HEADER = struct.Struct("<4sI32sQQIIQQIIQ")
_ALIGN = 64
HOLE = -1


class SnapshotError(ValueError):
    """The buffer is not a snapshot of this model; nothing of it was used."""


@dataclass(frozen=True)
class SnapshotMeta:
    """What a snapshot says beside its payload.

    `tokens` are prompt and generated ids, of which the first `prompt_tokens` were there when survivors were selected.
    `counts` int32 [L, Hk]; `firsts` int64 [L]: the first position where positions are a range (windowed layers always
    are), -1 where they are listed in `positions`, one int32 array per (layer, head), in the order of the payload.
    `arrays` is what a rule that evicts while decoding starts from, or goes on from (it has a "write" then): named
    tensors that this file only carries. With them slots are in the order of the pool's, so positions may be in any
    order, and one of them per head may be `HOLE`: a slot whose token was evicted and not yet overwritten.
    """

    prompt_tokens: int
    tokens: NDArray[np.uint32]
    recipe_id: str
    counts: NDArray[np.int32]
    firsts: NDArray[np.int64]
    positions: dict[tuple[int, int], NDArray[np.int32]]
    arrays: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def decoded(self) -> bool:
        """Whether a rule went on evicting after the prompt's selection: the arrays are its state in mid-way."""
        return "write" in self.arrays


class SnapshotLayout:
    """Byte offsets of a snapshot, known before its payload exists."""

    def __init__(self, spec: ModelSpec, meta: SnapshotMeta) -> None:
        self.spec = spec
        self.meta = meta
        listed = sum(len(p) for p in meta.positions.values())
        fixed = _HEADER.size + len(meta.recipe_id.encode()) + 4 * len(meta.tokens) + 8 * len(spec.layers)
        self.listed = listed
        self._arrays_offset = _aligned(fixed + 4 * meta.counts.size + 4 * listed)
        self.arrays_bytes = arrays_bytes(meta.arrays)
        self.payload_offset = _aligned(self._arrays_offset + self.arrays_bytes)
        item = spec.dtype.itemsize
        sizes = [
            2 * int(meta.counts[layer, head]) * spec.layers[layer].head_dim * item
            for layer in range(len(spec.layers))
            for head in range(spec.layers[layer].kv_heads)
        ]
        self._offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        heads = [spec.layers[layer].kv_heads for layer in range(len(spec.layers))]
        self._first_head = np.concatenate([[0], np.cumsum(heads)]).astype(np.int64)
        self.payload_bytes = int(self._offsets[-1])
        self.nbytes = self.payload_offset + self.payload_bytes

    @property
    def kept_tokens(self) -> int:
        """Most slots of any head of a full-attention layer; of any layer where all of them are windowed."""
        full = [index for index, layer in enumerate(self.spec.layers) if layer.window is None]
        return int((self.meta.counts[full] if full else self.meta.counts).max())

    def head(self, buffer: Tensor, layer: int, head: int) -> tuple[Tensor, Tensor]:
        """K and V [n, D] of one head: views into `buffer` (uint8 [nbytes])."""
        index = int(self._first_head[layer]) + head
        start = self.payload_offset + int(self._offsets[index])
        stop = self.payload_offset + int(self._offsets[index + 1])
        rows = buffer[start:stop].view(self.spec.dtype).view(2, -1, self.spec.layers[layer].head_dim)
        return rows[0], rows[1]

    def even(self, layer: int) -> bool:
        """Whether all heads of a layer keep the same number of tokens, so that `layer` can show them together."""
        counts = self.meta.counts[layer, : self.spec.layers[layer].kv_heads]
        return bool((counts == counts[0]).all())

    def layer(self, buffer: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """K and V [Hk, n, D] of an `even` layer: views into `buffer` (uint8 [nbytes])."""
        heads, dim = self.spec.layers[layer].kv_heads, self.spec.layers[layer].head_dim
        first = int(self._first_head[layer])
        start = self.payload_offset + int(self._offsets[first])
        stop = self.payload_offset + int(self._offsets[first + heads])
        count = int(self.meta.counts[layer, 0])
        rows = buffer[start:stop].view(self.spec.dtype).view(heads, 2, count, dim)
        return rows[:, 0], rows[:, 1]

    def write_metadata(self, buffer: Tensor) -> None:
        """Header and metadata into `buffer`; the payload is the caller's to fill through `head`."""
        meta, spec = self.meta, self.spec
        recipe = meta.recipe_id.encode()
        header = _HEADER.pack(
            _MAGIC, _VERSION, spec.fingerprint.digest, meta.prompt_tokens, len(meta.tokens), len(spec.layers),
            meta.counts.shape[1], self.payload_offset, self.payload_bytes, len(recipe), self.listed,
            self.arrays_bytes,
        )  # fmt: skip
        listed = [meta.positions[key] for key in sorted(meta.positions)]
        raw = b"".join(
            [header, recipe, meta.tokens.astype("<u4").tobytes(), meta.firsts.astype("<i8").tobytes()]
            + [meta.counts.astype("<i4").tobytes()]
            + [p.astype("<i4").tobytes() for p in listed]
        )
        raw = raw.ljust(self._arrays_offset, b"\0")
        buffer[: self._arrays_offset] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        stop = self._arrays_offset + self.arrays_bytes
        write_arrays(meta.arrays, buffer[self._arrays_offset : stop])
        buffer[stop : self.payload_offset] = 0


def parse_snapshot(spec: ModelSpec, buffer: Tensor) -> SnapshotLayout:
    """Check a buffer (uint8 [nbytes]) and return its layout; payload views come from `SnapshotLayout.head`.

    Raises `SnapshotError` for another version, another model, or lengths that do not add up.
    """
    if buffer.numel() < _HEADER.size:
        raise SnapshotError(f"{buffer.numel()} bytes are too short for a snapshot header")
    (
        magic,
        version,
        fingerprint,
        prompt,
        total,
        layers,
        heads,
        offset,
        payload,
        recipe_len,
        listed,
        carried,
    ) = _HEADER.unpack(buffer[: _HEADER.size].numpy().tobytes())
    if magic != _MAGIC or version != _VERSION:
        raise SnapshotError(f"not a version {_VERSION} snapshot")
    if fingerprint != spec.fingerprint.digest:
        raise SnapshotError("snapshot of another model, dtype or RoPE regime")
    if (layers, heads) != (len(spec.layers), spec.max_kv_heads) or prompt > total or offset < _HEADER.size:
        raise SnapshotError("snapshot header contradicts the model")
    if offset + payload != buffer.numel():
        raise SnapshotError(f"snapshot of {offset + payload} bytes in a buffer of {buffer.numel()}")
    needed = recipe_len + 4 * total + 8 * layers + 4 * layers * heads + 4 * listed
    arrays_at = _aligned(_HEADER.size + needed)
    if offset != _aligned(arrays_at + carried):
        raise SnapshotError("snapshot lengths do not add up")
    raw = buffer[_HEADER.size : _HEADER.size + needed].numpy().tobytes()
    recipe, raw = raw[:recipe_len].decode("utf-8", "replace"), raw[recipe_len:]
    tokens, raw = np.frombuffer(raw, "<u4", total).astype(np.uint32), raw[4 * total :]
    firsts, raw = np.frombuffer(raw, "<i8", layers).astype(np.int64), raw[8 * layers :]
    size = layers * heads
    counts, raw = np.frombuffer(raw, "<i4", size).astype(np.int32).reshape(layers, heads), raw[4 * size :]
    flat = np.frombuffer(raw, "<i4", listed).astype(np.int32)
    try:
        arrays = read_arrays(buffer[arrays_at : arrays_at + carried])
    except ArraysError as error:
        raise SnapshotError(str(error)) from error
    meta = SnapshotMeta(
        prompt, tokens, recipe, counts, firsts, _split_positions(spec, counts, firsts, flat), arrays
    )
    _refuse_impossible_counts(spec, counts, firsts, total)
    _refuse_impossible_positions(meta)
    if (tokens >= spec.vocab_size).any():
        raise SnapshotError("snapshot names a token that does not exist")
    layout = SnapshotLayout(spec, meta)
    if layout.payload_offset != offset or layout.payload_bytes != payload:
        raise SnapshotError("snapshot lengths do not add up")
    return layout


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _refuse_impossible_counts(
    spec: ModelSpec, counts: NDArray[np.int32], firsts: NDArray[np.int64], total: int
) -> None:
    """Counts lie between 0 and `total`, heads that do not exist keep nothing, heads of a range keep the same, and
    windowed layers are ranges within their window.
    """
    heads = np.array([layer.kv_heads for layer in spec.layers])
    missing = np.arange(counts.shape[1])[None, :] >= heads[:, None]
    if (counts < 0).any() or (counts > total).any() or counts[missing].any():
        raise SnapshotError("snapshot counts contradict the model")
    uneven = ((counts != counts[:, :1]) & ~missing).any(1)
    beyond = (firsts > total) | (firsts + counts[:, 0] > total)
    if (firsts < -1).any() or ((firsts >= 0) & (uneven | beyond)).any():
        raise SnapshotError("snapshot ranges do not fit its tokens")
    windows = np.array([layer.window or 0 for layer in spec.layers])
    if ((windows > 0) & ((firsts < 0) | (counts[:, 0] >= windows))).any():
        raise SnapshotError("snapshot keeps more of a windowed layer than its window")


def _refuse_impossible_positions(meta: SnapshotMeta) -> None:
    """Listed positions are tokens of the text, each once; one of a head's slots is a hole at most, in mid-way only."""
    for listed in meta.positions.values():
        real = listed[listed != HOLE]
        if (real < 0).any() or (real >= len(meta.tokens)).any() or len(np.unique(real)) < len(real):
            raise SnapshotError("snapshot names a position that does not exist, or one twice")
        if len(real) < len(listed) - int(meta.decoded):
            raise SnapshotError("snapshot has slots without a token")


def _split_positions(
    spec: ModelSpec, counts: NDArray[np.int32], firsts: NDArray[np.int64], flat: NDArray[np.int32]
) -> dict[tuple[int, int], NDArray[np.int32]]:
    positions, at = {}, 0
    for layer in np.flatnonzero(firsts < 0).tolist():
        for head in range(spec.layers[layer].kv_heads):
            count = int(counts[layer, head])
            positions[layer, head] = flat[at : at + count]
            at += count
    if at != len(flat):
        raise SnapshotError("snapshot positions do not match its counts")
    return positions


def prompt_meta(
    spec: ModelSpec,
    prompt: Sequence[int],
    recipe_id: str,
    survivors: Sequence[LayerSurvivors],
    arrays: Mapping[str, Tensor] | None = None,
) -> SnapshotMeta:
    """Metadata of a prompt's snapshot straight after selection; `arrays` is what its decode rule starts from."""
    counts = np.zeros((len(spec.layers), spec.max_kv_heads), np.int32)
    firsts = np.full(len(spec.layers), -1, np.int64)
    positions: dict[tuple[int, int], NDArray[np.int32]] = {}
    for index, layer in enumerate(survivors):
        for head in range(layer.kv_heads):
            counts[index, head] = layer.count(head)
        if layer.positions is None:
            firsts[index] = layer.first
        else:
            positions.update({(index, head): rows.numpy() for head, rows in enumerate(layer.positions)})
    tokens = np.asarray(prompt, np.uint32)
    return SnapshotMeta(len(prompt), tokens, recipe_id, counts, firsts, positions, dict(arrays or {}))


def pack_prompt(
    layout: SnapshotLayout, buffer: Tensor, workspace: Workspace, survivors: Sequence[LayerSurvivors]
) -> None:
    """Fill `buffer` (uint8 [layout.nbytes]) with a prompt's survivors, in ascending position."""
    layout.write_metadata(buffer)
    for index, layer in enumerate(survivors):
        keys, values = workspace.keys[index], workspace.values[index]
        if layer.positions is None:
            k, v = layout.layer(buffer, index)
            k.copy_(keys[:, layer.first :])
            v.copy_(values[:, layer.first :])
            continue
        # Head by head straight into place: gathering all heads first and copying then is no faster (1.07 against
        # 1.16 ms for 30 layers of 3 heads, 512 of 8000 tokens).
        for head, rows in enumerate(layer.positions):
            k, v = layout.head(buffer, index, head)
            torch.index_select(keys[head], 0, rows, out=k)
            torch.index_select(values[head], 0, rows, out=v)
