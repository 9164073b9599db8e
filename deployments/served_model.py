"""The served model as the API sees it: tokenizer, names, limits and identity, without weights."""

import importlib.metadata
import os
import tomllib
from pathlib import Path

import xxhash
from transformers import PreTrainedTokenizerFast

from deployments.api.card import ModelCard
from deployments.config import AppArgs
from engine.model import end_tokens_of
from engine.weights import ensure_weights

_SAMPLE_BYTES = 1 << 16


def tokenizer_of(args: AppArgs) -> PreTrainedTokenizerFast:
    """The model's tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(ensure_weights(args.model))


def model_card(args: AppArgs) -> ModelCard:
    """Everything but the weights, from the model's folder."""
    from transformers import AutoConfig

    path = ensure_weights(args.model)
    config = AutoConfig.from_pretrained(path).get_text_config()
    context = args.context_length(config.max_position_embeddings)
    return ModelCard(
        names=args.names,
        tokenizer=tokenizer_of(args),
        context_length=context,
        max_prompt_tokens=context,
        recipes=args.recipe_book,
        end_token_ids=tuple(sorted(end_tokens_of(path))),
        vocab_size=config.vocab_size,
        created=int(os.stat(path).st_mtime),
        version=version(),
        fingerprint=folder_fingerprint(path),
    )


def version() -> str:
    """Of the checkout that we run from, else of the installed distribution."""
    project = Path(__file__).parents[1] / "pyproject.toml"
    if project.is_file():
        return str(tomllib.loads(project.read_text())["project"]["version"])
    return importlib.metadata.version("kvtide")


def folder_fingerprint(path: Path) -> str:
    """Identity of a model folder, the same on every machine: its configuration, and each weight file's name, size, head
    and tail (reading all weights would cost the gateway seconds).
    """
    digest = xxhash.xxh3_128((path / "config.json").read_bytes())
    for file in sorted(path.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name}\\0{size}\\0".encode())
        with file.open("rb") as weights:
            digest.update(weights.read(_SAMPLE_BYTES))
            weights.seek(max(0, size - _SAMPLE_BYTES))
            digest.update(weights.read())
    return f"fp_{digest.hexdigest()[:16]}"
