"""What a model's layers are, read from a short forward pass instead of from configuration fields.

The probe runs two tokens at several positions each and answers every attention call with zeros, so a token's hidden
state is the same at every position in every layer, and its keys may differ by their rotation alone. That settles:

- which calls attend to the same keys and values (Gemma 3n: late layers read an earlier layer's KV): one *cache* each,
- whether the keys and queries of a cache are rotated by one of the model's own frequency tables (RoPE),
- and, from the modules around the calls, the projection that the attention output goes through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from engine.attention import AttentionCall
from engine.linear import WideLinear
from engine.support import unsupported
from kernels.rotary import Rotation

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_POSITIONS = (0, 1, 2, 5, 11, 29, 73, 191, 499)
# Largest error of a rotated key against the model's own, as a share of the largest element, in fp32 and in
# less: bf16 models round the cosines, the products and the sums to 8 bits each. A wrong frequency is off by about 1.
_EXACT_TOLERANCE, _ROUNDED_TOLERANCE = 1e-3, 0.03
_OUTPUT_NAMES = ("o_proj", "out_proj", "dense", "c_proj", "wo")


@dataclass(frozen=True, eq=False)
class LayerSpec:
    """One stored KV cache and the attention of the model layer that writes it. Compared by identity.

    `window` None sees everything; `softcap` 0 is off. `readers` model layers attend to the cache (the writer included),
    each with `query_heads` heads and everything else equal. `rotation` is what RoPE does to its keys and queries (the
    identity where a layer uses none), None where the model does something else. `output_weight` [hidden, Hq·D] is the
    writer's projection of the attention output (a view of the weights), None where it is not a plain matrix.
    """

    query_heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    softcap: float
    sinks: Tensor | None
    rotation: Rotation | None = None
    output_weight: Tensor | None = None
    readers: int = 1

    @property
    def scored_heads(self) -> int:
        """Query heads that read the cache, all readers together."""
        return self.readers * self.query_heads


class Reader(NamedTuple):
    """The cache that a model layer attends to, and its place among the cache's readers (0 writes the cache)."""

    cache: int
    reader: int


class Probed(NamedTuple):
    """The stored caches in order of their writers, and for every model layer which of them it reads."""

    caches: tuple[LayerSpec, ...]
    readers: tuple[Reader, ...]


class _Seen(NamedTuple):
    call: AttentionCall
    query: Tensor
    key: Tensor
    value: Tensor


class _ProbePort:
    """Keeps each layer's attention call (alive, so that no two of them can lie at one address); answers zeros."""

    def __init__(self) -> None:
        self.layers: dict[int, _Seen] = {}
        self.calls = 0

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.calls += 1
        self.layers[call.layer] = _Seen(call, query, key, value)
        return query.new_zeros(query.shape[1], query.shape[0], query.shape[2])


def probe_layers(network: PreTrainedModel) -> Probed:
    """Run the probe. The network's attention implementation must be ours.

    `UnsupportedModel` names what cannot be served.
    """
    config = network.config
    text = config.get_text_config()
    port = _ProbePort()
    positions = torch.tensor(_POSITIONS).clamp(max=text.max_position_embeddings - 1)
    tokens = torch.tensor([text.vocab_size // 3, 2 * text.vocab_size // 3])
    with torch.inference_mode():
        network(
            input_ids=tokens.repeat_interleave(len(positions)).unsqueeze(0),
            position_ids=positions.repeat(len(tokens)).unsqueeze(0),
            use_cache=False,
            logits_to_keep=torch.tensor([0]),
            kvtide=port,
        )
    layers = [port.layers[index] for index in sorted(port.layers)]
    if len(layers) != text.num_hidden_layers:
        raise unsupported(config, "layers without self-attention, or with attention code of their own")
    if port.calls != len(layers):
        raise unsupported(config, "layers that attend more than once per token")
    owners, readers = _share(network, layers)
    counts = [sum(reader.cache == cache for reader in readers) for cache in range(len(owners))]
    tables = _frequency_tables(network)
    caches = tuple(
        LayerSpec(
            seen.query.shape[0],
            seen.key.shape[0],
            seen.key.shape[2],
            seen.call.scale,
            seen.call.window,
            seen.call.softcap,
            seen.call.sinks,
            _find_rotation(seen, positions, tables),
            _output_weight(network, seen.call.layer, seen.query.shape[0] * seen.value.shape[2]),
            count,
        )
        for seen, count in zip(owners, counts, strict=True)
    )
    return Probed(caches, tuple(readers))


def _share(network: PreTrainedModel, layers: Sequence[_Seen]) -> tuple[list[_Seen], list[Reader]]:
    """The first call on each key tensor, which stores it, and every layer's place among the readers of its own."""
    owners: list[_Seen] = []
    at: dict[int, int] = {}
    readers: list[Reader] = []
    for seen in layers:
        cache = at.setdefault(seen.key.data_ptr(), len(owners))
        if cache == len(owners):
            owners.append(seen)
        elif not _attend_alike(owners[cache], seen):
            raise unsupported(network.config, "layers that share keys and attend to them differently")
        readers.append(Reader(cache, sum(reader.cache == cache for reader in readers)))
    return owners, readers


def _attend_alike(owner: _Seen, reader: _Seen) -> bool:
    """Whether one stored, scored and evicted cache can stand for both."""
    return (
        (owner.value.data_ptr(), owner.key.shape, owner.value.shape, owner.query.shape)
        == (reader.value.data_ptr(), reader.key.shape, reader.value.shape, reader.query.shape)
        and (owner.call.scale, owner.call.window, owner.call.softcap)
        == (reader.call.scale, reader.call.window, reader.call.softcap)
        and owner.call.sinks is None
        and reader.call.sinks is None
    )


def _frequency_tables(network: nn.Module) -> list[Tensor]:
    """Every inverse-frequency table of the model's rotary modules (one per layer type in some), fp32."""
    tables: list[Tensor] = []
    for name, buffer in network.named_buffers():
        if not name.endswith("inv_freq") or buffer.ndim != 1:
            continue
        table = buffer.detach().float()
        if not any(torch.equal(table, other) for other in tables):
            tables.append(table)
    return tables


def _find_rotation(seen: _Seen, positions: Tensor, tables: Sequence[Tensor]) -> Rotation | None:
    """The rotation that turns key and query of position 0 into those of every other position; None if none does.

    Relative to position 0, so a factor on cosines and sines (YaRN) is in both and cancels.
    """
    head_dim = seen.key.shape[2]
    candidates = [Rotation(torch.zeros(1), head_dim)]  # a layer without position encoding
    candidates += [
        Rotation(turning, head_dim, interleaved)
        for table in tables
        if 2 * len(table) <= head_dim
        for turning in (table, -table)  # NanoChat turns the other way
        for interleaved in (False, True)
    ]
    errors = [
        max(_rotation_error(rotation, states, positions) for states in (seen.key, seen.query))
        for rotation in candidates
    ]
    best = min(range(len(candidates)), key=errors.__getitem__)
    tolerance = _EXACT_TOLERANCE if seen.key.dtype is torch.float32 else _ROUNDED_TOLERANCE
    return candidates[best] if errors[best] < tolerance else None


def _rotation_error(rotation: Rotation, states: Tensor, positions: Tensor) -> float:
    """Largest relative error over `states` [H, tokens · positions, D]; infinite where they say nothing."""
    by_token = states.float().unflatten(1, (-1, len(positions)))
    found = rotation.rotate(by_token[:, :, :1].expand_as(by_token), positions)
    largest = float(by_token.abs().max())
    return float((found - by_token).abs().max()) / largest if largest > 0 else float("inf")


def _output_weight(network: PreTrainedModel, layer: int, inputs: int) -> Tensor | None:
    """The matrix [hidden, inputs] that layer's attention module puts its output through; None unless there is one."""
    kind = network.config.get_text_config().model_type
    found = []
    for module in network.modules():
        own = getattr(getattr(module, "config", None), "model_type", None)
        if getattr(module, "layer_idx", None) != layer or own != kind:  # a vision tower counts its layers too
            continue
        weights = (_matrix(getattr(module, name, None)) for name in _OUTPUT_NAMES)
        found += [weight for weight in weights if weight is not None and weight.shape[1] == inputs]
    return found[0] if len(found) == 1 else None


def _matrix(module: object) -> Tensor | None:
    """Weights [out, in] of a plain projection; GPT-2's Conv1D keeps them the other way round."""
    from transformers.pytorch_utils import Conv1D

    if isinstance(module, Conv1D):
        return module.weight.detach().T
    if isinstance(module, nn.Linear) and type(module) in (nn.Linear, WideLinear):
        return module.weight.detach()
    return None
