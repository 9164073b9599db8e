"""Tiny random models of the families we serve, an identical copy computed by transformers alone, and requests."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from engine.decode import decode_step
from engine.local import LocalEngine
from engine.model import LayerSpec, Model, ModelSpec, wrap_model
from engine.pool import PagePool
from engine.prefill import PrefillDone, PrefillEngine, PrefillJob, run_to_end
from engine.prefix import PrefixCache
from engine.request import GenerationRequest, SamplingParams
from engine.restore import restore
from engine.text import TokenPieces
from kv_tiers.block import BlockLayout
from kv_tiers.keys import Fingerprint
from policies import Recipe, make_recipe


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Modules that import this run on one thread: these matrices are too small to share."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


VOCABULARY = 96
# Random projections leave attention nearly flat; this makes it as peaked as a trained model's.
SHARPNESS = 6.0

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "initializer_range": 0.2,
}
# Layers 3 to 5 read the KV of layers 1 and 2: three caches, of which one is windowed and private.
_SHARING = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 3,
    "sliding_window": 20,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]

FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {"num_key_value_heads": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 24}),
    "mistral": ("MistralConfig", {"sliding_window": 20}),
    "gemma2": (
        "Gemma2Config",
        {
            "num_hidden_layers": 4,
            "layer_types": _MIXED,
            "sliding_window": 20,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 20.0,
            "query_pre_attn_scalar": 4,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "num_hidden_layers": 4,
            "layer_types": _MIXED,
            "sliding_window": 20,
            "head_dim": 32,
            "query_pre_attn_scalar": 20,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
            },
        },
    ),
    "phi3": ("Phi3Config", {"sliding_window": None, "num_key_value_heads": 4, "head_dim": None}),
    "gpt_oss": (
        "GptOssConfig",
        {
            "num_hidden_layers": 4,
            "layer_types": _MIXED,
            "sliding_window": 20,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "gemma3n": (
        "Gemma3nTextConfig",
        {
            **_SHARING,
            "altup_num_inputs": 2,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0, 0.0, 0.0],
        },
    ),
    "gemma4": ("Gemma4TextConfig", {**_SHARING, "global_head_dim": 32}),
}


def build_config(family: str, **changes: object) -> PretrainedConfig:
    name, own = FAMILIES[family]
    fields = {key: value for key, value in {**_COMMON, **own, **changes}.items() if value is not None}
    return getattr(transformers, name)(**fields)


def build_network(family: str, seed: int = 0, **changes: object) -> nn.Module:
    """The family's causal LM in fp32 with random weights; the same seed gives the same weights in any process."""
    config = build_config(family, **changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in network.named_parameters():
            if "sinks" in name or name.endswith("norm.weight"):
                nn.init.normal_(parameter, 0.5, 0.3)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name.endswith(("q_proj.weight", "q_norm.weight")):
                parameter.mul_(SHARPNESS)
            elif name.endswith("qkv_proj.weight"):
                parameter.mul_(SHARPNESS**0.5)
    return network.eval()


class Pair(NamedTuple):
    """Our model, and transformers' own with the same weights."""

    model: Model
    truth: nn.Module

    def full_logits(self, tokens: Sequence[int]) -> Tensor:
        """Logits [T, vocab] of one plain forward pass over the whole sequence, by transformers."""
        with torch.inference_mode():
            return self.truth(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]


@functools.cache
def tiny(family: str = "llama", seed: int = 0) -> Pair:
    """A cached pair; nobody may change its weights."""
    network = build_network(family, seed)
    truth = copy.deepcopy(network)
    truth.set_attn_implementation("eager")
    return Pair(wrap_model(network, frozenset({1})), truth)


def tokens_of(length: int, seed: int = 0) -> tuple[int, ...]:
    """Random token ids that end no text."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return tuple(torch.randint(3, VOCABULARY, (length,), generator=generator).tolist())


@functools.cache
def pieces() -> TokenPieces:
    """A tokenizer in which token i reads "<i>"."""
    tokenizer = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(VOCABULARY)}, unk_token="<0>"))
    tokenizer.decoder = decoders.Fuse()
    return TokenPieces(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


def plain_spec(
    layers: Sequence[tuple[int, int, int | None]], dtype: torch.dtype = torch.float32, group: int = 1
) -> ModelSpec:
    """What a model would be that has such layers: (kv heads, head size, window) each."""
    blocks = BlockLayout(tuple((heads, dim) for heads, dim, _ in layers), dtype, 16)
    identity = Fingerprint.of(
        config=repr(layers), weights=b"", dtype=str(dtype), layout=blocks.layout_id, rope="", adapter=None
    )
    specs = tuple(
        LayerSpec(heads * group, heads, dim, dim**-0.5, window, 0.0, None) for heads, dim, window in layers
    )
    return ModelSpec(specs, dtype, VOCABULARY, 1024, frozenset({1}), blocks, identity)


def snapkv(budget: int, window: int = 8, sinks: int = 2) -> Recipe:
    return make_recipe(policy="snapkv", budget=budget, window=window, sinks=sinks, kernel=5)


FULL = Recipe()


def request(
    name: str, prompt: Sequence[int], recipe: Recipe = FULL, *, tenant: str | None = None, **sampling: object
) -> GenerationRequest:
    """A greedy request that ignores end tokens, unless told otherwise."""
    fields: dict[str, object] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 8, **sampling}
    params = SamplingParams(**fields)  # type: ignore[arg-type]
    return GenerationRequest(name, tuple(prompt), params, recipe, tenant)


def new_pool(model: Model, pages: int = 2000, rows: int = 16) -> PagePool:
    return PagePool(model.spec, pages, rows, model.spec.context_length)


def local_engine(
    model: Model, pages: int = 2000, rows: int = 16, chunk: int = 64, prefix: PrefixCache | None = None
) -> LocalEngine:
    return LocalEngine(model, pieces(), new_pool(model, pages, rows), chunk_tokens=chunk, prefix=prefix)


def prefill_all(
    model: Model, requests: Sequence[GenerationRequest], chunk: int = 64
) -> dict[str, PrefillDone]:
    """Prefill requests together; → finished prompts by request id."""
    engine = PrefillEngine(model, chunk_tokens=chunk)
    for wanted in requests:
        engine.add(PrefillJob(wanted, engine.open_workspace(wanted)))
    return {done.job.request.request_id: done for done in run_to_end(engine)}


def packed(done: PrefillDone) -> Tensor:
    """The snapshot of a finished prompt."""
    buffer = torch.empty(done.layout.nbytes, dtype=torch.uint8)
    done.pack(buffer)
    return buffer


def join(pool: PagePool, done: PrefillDone) -> int:
    """A pool row that holds a finished prompt's survivors."""
    return restore(pool, done.layout, packed(done))


def decode_row(model: Model, pool: PagePool, row: int, tokens: Sequence[int], position: int) -> Tensor:
    """Feed tokens one by one from `position`; → logits [len(tokens), vocab]."""
    steps = [decode_step(model, pool, [row], [token], [position + i]) for i, token in enumerate(tokens)]
    return torch.cat(steps)
