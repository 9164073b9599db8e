"""The model: `transformers` classes and weights, our attention, and what the rest of the engine must know of them.

What a layer is (heads, head size, scale, window, softcap, sinks, rotation, shared KV) is read from its own attention
call (`engine/probe.py`), not from configuration fields whose names differ between families. What cannot be served
exactly is refused at load, by name (`engine/support.py`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import Tensor

from engine.attention import ATTENTION_NAME, AttentionCall, AttentionPort, register_attention
from engine.errors import ModelUnavailable
from engine.linear import WideLinear, has_bf16_products, wide_products, widen
from engine.probe import LayerSpec, Reader, probe_layers
from engine.support import refuse_unsupported, unsupported
from kv_tiers.block import BlockLayout
from kv_tiers.keys import Fingerprint

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# Families whose checkpoints we load the language model of, and leave the rest: the towers of Gemma 3n cannot even be
# built without another package.
_TEXT_ALONE = {"gemma3n"}

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

# Linear layers give a row the same bits whatever the other rows are only for some row counts (measured on an AVX-512
# machine with 1 to 8 threads, torch 2.13): multiples of 8 in fp32 (1-3 rows differ, and with two threads 5-7), all
# but a single row in bf16 (a matrix of 1024 columns and more takes another path for one row).
FP32_ROW_QUANTUM = 8
BF16_LEAST_ROWS = 2


def step_rows(count: int, dtype: torch.dtype) -> int:
    """Rows that a step of `count` rows is padded to, so that a row's bits do not depend on the others."""
    if dtype is torch.float32:
        return -(-count // FP32_ROW_QUANTUM) * FP32_ROW_QUANTUM
    return max(count, BF16_LEAST_ROWS) if count else 0


@dataclass(frozen=True, eq=False)
class ModelSpec:
    """What pages, blocks, snapshots and schedulers need to know of a model.

    `layers` are the KV caches that are stored: one per model layer, but for layers that attend to another layer's KV.
    Compared by identity; whether two models are the same one is what `fingerprint` says.
    """

    layers: tuple[LayerSpec, ...]
    dtype: torch.dtype
    vocab_size: int
    context_length: int
    end_tokens: frozenset[int]
    blocks: BlockLayout
    fingerprint: Fingerprint

    @property
    def max_kv_heads(self) -> int:
        return max(layer.kv_heads for layer in self.layers)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of full K and V of one token over all layers and kv heads."""
        return sum(2 * layer.kv_heads * layer.head_dim for layer in self.layers) * self.dtype.itemsize


class Model:
    """A loaded model and its spec. `forward` is the only way to run it."""

    def __init__(self, network: PreTrainedModel, spec: ModelSpec, readers: Sequence[Reader]) -> None:
        """`readers`: for every model layer, the cache of `spec` that it attends to."""
        self.network = network
        self.spec = spec
        self._readers = tuple(readers)
        self._shares = len(spec.layers) < len(self._readers)
        self._wide = any(isinstance(layer, WideLinear) for layer in network.modules())

    @torch.inference_mode()
    def forward(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        port: AttentionPort,
        logits_at: Sequence[int],
        *,
        prompts: bool = False,
    ) -> Tensor:
        """Run a flattened batch of tokens through all layers; → logits [len(logits_at), vocab] (model dtype).

        Token t has position positions[t]; the port decides which tokens see which KV. Rows are padded (`step_rows`);
        the port sees the real ones only. `prompts`: these are chunks of prompts, not rows of a decode step
        (`engine/linear.py` has what follows).
        """
        count, dtype = len(tokens), torch.float32 if prompts and self._wide else self.spec.dtype
        padding = step_rows(count, dtype) - count
        ids = torch.tensor([*tokens, *[0] * padding], dtype=torch.long).unsqueeze(0)
        places = torch.tensor([*positions, *[0] * padding], dtype=torch.long).unsqueeze(0)
        unasked = step_rows(len(logits_at), dtype) - len(logits_at)
        wanted = torch.tensor([*logits_at, *[0] * unasked], dtype=torch.long)
        with wide_products(prompts):
            out = self.network(
                input_ids=ids,
                position_ids=places,
                use_cache=False,
                logits_to_keep=wanted,
                kvtide=_StepPort(port, count, self._readers) if padding or self._shares else port,
            )
        return out.logits[0, : len(logits_at)]


class _StepPort:
    """Hides the padding rows of a step from its port, and turns a model layer's number into its cache's."""

    def __init__(self, port: AttentionPort, count: int, readers: Sequence[Reader]) -> None:
        self._port = port
        self._count = count
        self._readers = readers

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        n = self._count
        cache, reader = self._readers[call.layer]
        if reader or cache != call.layer:
            call = replace(call, layer=cache, reader=reader, stored=reader == 0)
        found = self._port.attend(call, query[:, :n], key[:, :n], value[:, :n])
        if n == query.shape[1]:
            return found
        out = query.new_zeros(query.shape[1], query.shape[0], query.shape[2])
        out[:n] = found
        return out


def load_model(path: Path, dtype: str = "auto", block_tokens: int = 16) -> Model:
    """Load a local Hugging Face folder (see `engine/weights.py` for how it gets there).

    `dtype` is "auto" (the checkpoint's own, float16 taken as bfloat16), "bfloat16" or "float32"; `block_tokens` the
    size of the blocks that its KV is kept in.
    Errors: `UnsupportedModel` by name, `ModelUnavailable` when the folder cannot be read.
    """
    from transformers import AutoModelForCausalLM

    config = read_config(path)
    register_attention()
    chosen = choose_dtype(dtype, config.dtype)
    network = AutoModelForCausalLM.from_pretrained(
        path, config=config, dtype=chosen, attn_implementation=ATTENTION_NAME
    )
    return wrap_model(network, end_tokens_of(path), block_tokens)


def read_config(path: Path) -> PretrainedConfig:
    """The configuration of a model that can be served, without its weights. Errors as `load_model`."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ModelUnavailable(f"no readable model configuration in {path}: {error}") from error
    refuse_unsupported(config)
    if config.model_type in _TEXT_ALONE:
        text = config.get_text_config()
        text.dtype = text.dtype or config.dtype
        config = text
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise unsupported(config, "another class than a causal language model")
    return config


def wrap_model(network: PreTrainedModel, end_tokens: frozenset[int], block_tokens: int = 16) -> Model:
    """Make a Model of a `transformers` causal LM whose attention implementation is ours; probes its layers."""
    network = network.eval()
    config = network.config
    refuse_unsupported(config)
    if not getattr(network, "_supports_attention_backend", False):
        raise unsupported(config, "attention code of its own (no attention interface)")
    register_attention()
    config._attn_implementation = ATTENTION_NAME
    if not has_bf16_products():
        widen(network)
    layers, readers = probe_layers(network)
    dtype = next(network.parameters()).dtype
    blocks = BlockLayout(tuple((layer.kv_heads, layer.head_dim) for layer in layers), dtype, block_tokens)
    text = config.get_text_config()
    spec = ModelSpec(
        layers,
        dtype,
        text.vocab_size,
        text.max_position_embeddings,
        end_tokens,
        blocks,
        _fingerprint(network, dtype, blocks),
    )
    return Model(network, spec, readers)


def choose_dtype(asked: str, stored: torch.dtype | str | None) -> torch.dtype:
    """The dtype to compute and keep KV in; ValueError names the choices."""
    if asked == "auto":
        return torch.float32 if stored in (torch.float32, "float32", None) else torch.bfloat16
    if asked not in DTYPES:
        raise ValueError(f"dtype {asked!r} is not one of auto, {', '.join(DTYPES)}")
    return DTYPES[asked]


def end_tokens_of(path: Path) -> frozenset[int]:
    """Every token that ends a text, from a model folder: generation config, model config and tokenizer together.

    They agree less often than one hopes, and a text that runs past its end is worse than one that stops at any of them.
    """
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _json(path / name).get("eos_token_id")
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    end = _json(path / "tokenizer_config.json").get("eos_token")
    text = end.get("content") if isinstance(end, dict) else end
    added = _json(path / "tokenizer.json").get("added_tokens", [])
    found.update(token["id"] for token in added if token["content"] == text)
    return frozenset(found)


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _fingerprint(network: PreTrainedModel, dtype: torch.dtype, blocks: BlockLayout) -> Fingerprint:
    """Identity of everything that decides the bytes of KV: configuration, weights, dtype, RoPE regime."""
    config = network.config.to_dict()
    rope = {key: value for key, value in config.items() if "rope" in key}
    for volatile in ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "_attn_implementation"):
        config.pop(volatile, None)
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(
        network.state_dict().items()
    ):  # with the buffers that are weights: router biases
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().data)
    return Fingerprint.of(
        config=json.dumps(config, sort_keys=True, default=str),
        weights=digest.digest(),
        dtype=str(dtype).removeprefix("torch."),
        layout=blocks.layout_id,
        rope=json.dumps(rope, sort_keys=True, default=str),
        adapter=None,
    )
