"""Turn a GGUF file into a Hugging Face folder (bfloat16 safetensors, config, tokenizer), and check the result.

transformers reads the tensors; the tokenizer is what goes wrong without an error (a vocabulary that falls apart into
characters, digits glued together, a wrong end token), so nothing is written before the probes below have passed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import ModelUnavailable, UnsupportedModel

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

CONVERSION_STEPS = ("tokenizer", "weights", "writing")

# Byte-level vocabularies whose text is split at every digit (llama.cpp's list); transformers' reader does not know it.
DIGIT_SPLIT_PRE_TOKENIZERS = frozenset(
    {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva"}
)

PROBE = (
    "The quick brown fox jumps over the lazy dog, and the weather in London remained surprisingly pleasant."
)
ROUND_TRIPS = (
    PROBE,
    "In 1987 it cost 1234.50, up 7%.",
    "naïve café, 東京, 🙂 and\ttabs\n\n  two spaces",
    "def f(x):\n    return x ** 2  # square\n",
)
# English text has 4 to 5 characters a token in any real vocabulary; one that fell apart has 1.
MIN_CHARACTERS_PER_TOKEN = 2.0


def convert_gguf(source: Path, target: Path, step: Callable[[str], None]) -> None:
    """Write `source` as a Hugging Face folder into the existing folder `target`; `step` hears what starts now.

    Raises UnsupportedModel for an architecture that transformers cannot read or a tokenizer that does not survive the
    probes, and ModelUnavailable for a damaged file. Peak memory is the bfloat16 weights plus one float32 tensor.
    """
    step(CONVERSION_STEPS[0])
    metadata = read_metadata(source)
    if metadata.get("split.count", 1) not in (0, 1):
        raise UnsupportedModel(
            f"{source.name}: GGUF files in several parts are not read; merge them into one first"
        )
    tokenizer = load_tokenizer(source, metadata)
    check_tokenizer(tokenizer, metadata, source.name)
    config = _read_config(source)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(str(target))
    step(CONVERSION_STEPS[1])
    model = _load_model(source, config)
    step(CONVERSION_STEPS[2])
    model.save_pretrained(str(target))


def read_metadata(source: Path) -> dict[str, object]:
    """The file's scalar metadata (string and number fields; arrays are left out)."""
    from gguf import GGUFReader, GGUFValueType

    try:
        reader = GGUFReader(str(source))
    except (ValueError, OSError, IndexError) as error:
        raise ModelUnavailable(f"{source} is no readable GGUF file: {error}") from error
    return {
        name: field.contents()
        for name, field in reader.fields.items()
        if field.types and field.types[0] != GGUFValueType.ARRAY
    }


def load_tokenizer(source: Path, metadata: dict[str, object]) -> PreTrainedTokenizerBase:
    """The tokenizer that transformers reads, with the digit rule of `tokenizer.ggml.pre` and the file's end token."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    except (ValueError, KeyError) as error:
        raise UnsupportedModel(f"{source.name}: transformers cannot build its tokenizer: {error}") from error
    if _splits_digits(metadata):
        # Digits first, then the word rule inside each piece, as llama.cpp does: it decides how blanks before a
        # digit split.
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    eos = metadata.get("tokenizer.ggml.eos_token_id")
    if eos is not None:
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(eos)
        padding = metadata.get("tokenizer.ggml.padding_token_id", eos)
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(padding)
    return tokenizer


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, metadata: dict[str, object], name: str) -> None:
    """Raise UnsupportedModel, naming what is wrong, unless the tokenizer does what the file says."""

    def refuse(what: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"{name}: the tokenizer that transformers builds from this GGUF file is wrong ({what}). "
            "Serve the model from its Hugging Face folder (safetensors and tokenizer.json) instead."
        )

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    tokens = encode(PROBE)
    if len(tokens) * MIN_CHARACTERS_PER_TOKEN > len(PROBE):
        raise refuse(f"it cuts {len(PROBE)} characters of English into {len(tokens)} tokens")
    for text in ROUND_TRIPS:
        # Vocabularies without byte tokens may lose rare characters honestly, so only ASCII must come back.
        back = tokenizer.decode(encode(text), clean_up_tokenization_spaces=False)
        if text.isascii() and back.removeprefix(" ") != text:
            raise refuse(f"{text!r} comes back as {back!r}")
    if _splits_digits(metadata) and len(encode("90210")) != len("90210"):
        raise refuse("digits are glued together")
    eos = metadata.get("tokenizer.ggml.eos_token_id")
    if eos is not None and tokenizer.eos_token_id != eos:
        raise refuse(f"its end token is {tokenizer.eos_token_id}, the file says {eos}")
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if metadata.get("tokenizer.ggml.add_bos_token") is False and bos in tokenizer("hi").input_ids:
        raise refuse("it adds a start token although the file says not to")


def weights_fingerprint(parameters: dict[str, torch.Tensor]) -> str:
    """sha256 (hex) over the parameters sorted by name: name, shape as Python prints it, little-endian bfloat16 bytes.

    `parameters` lists a tied tensor once. The same number identifies the golden vectors' model.
    """
    import hashlib

    import torch

    digest = hashlib.sha256()
    for name, value in sorted(parameters.items()):
        digest.update((name + str(tuple(value.shape))).encode())
        digest.update(
            value.detach().to(torch.bfloat16).contiguous().view(torch.int16).numpy().astype("<i2").tobytes()
        )
    return digest.hexdigest()


def _splits_digits(metadata: dict[str, object]) -> bool:
    byte_level = metadata.get("tokenizer.ggml.model") == "gpt2"
    return byte_level and metadata.get("tokenizer.ggml.pre") in DIGIT_SPLIT_PRE_TOKENIZERS


def _read_config(source: Path) -> PreTrainedConfig:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(source.parent), gguf_file=source.name)
    except (ValueError, KeyError) as error:
        raise UnsupportedModel(
            f"{source.name}: transformers cannot read its architecture: {error}"
        ) from error


def _load_model(source: Path, config: PreTrainedConfig) -> PreTrainedModel:
    """The dense bfloat16 model.

    Not `from_pretrained(gguf_file=...)`: that wants accelerate, keeps quantised blocks where it can, and refuses to
    save what it loaded. The reader underneath is the same, so the weights are too.
    """
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        loaded = load_gguf_checkpoint(
            str(source), return_tensors=True, model_to_load=model, torch_dtype=torch.bfloat16
        )["tensors"]
        missing, unexpected = model.load_state_dict(loaded, strict=False, assign=True)
    except (ValueError, KeyError, NotImplementedError, RuntimeError) as error:
        raise UnsupportedModel(f"{source.name}: transformers cannot read its weights: {error}") from error
    model.tie_weights()
    left = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if left or unexpected:
        raise UnsupportedModel(
            f"{source.name}: weights are missing or unknown: {(left or missing)[:3]}, {unexpected[:3]}"
        )
    model.generation_config = GenerationConfig.from_model_config(config)
    return model
