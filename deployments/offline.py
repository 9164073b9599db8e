"""`kvtide generate`: one prompt through the engine, in this process."""

import sys
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoTokenizer

from deployments.config import GIB, AppArgs, resolve
from engine.errors import ContextOverflow, InvalidRequest
from engine.local import LocalEngine
from engine.model import load_model, read_config
from engine.pool import PagePool, pool_page_bytes
from engine.request import GenerationRequest, PromptEvent, SamplingParams
from engine.text import TokenPieces
from engine.weights import ensure_weights


def own_context(path: Path) -> int:
    """Tokens of context that the model in this folder was made for. Raises `UnsupportedModel`, `ModelUnavailable`."""
    return int(read_config(path).get_text_config().max_position_embeddings)


def generate(options: AppArgs, text: str, *, chat: bool, max_tokens: int, temperature: float) -> None:
    """Stream the answer to standard output and what the prompt cost to standard error."""
    # All cores by default: there is no other pool here to leave some to.
    torch.set_num_threads(options.threads or resolve(options).cores)
    path = ensure_weights(options.model)
    context = options.context_length(own_context(path))
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = load_model(path, options.dtype, options.block_tokens)
    model.spec = replace(model.spec, context_length=context)
    if chat:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
    else:
        ids = tokenizer(text).input_ids
    room = context - len(ids)
    if not ids:
        raise InvalidRequest("the prompt is empty", "prompt")
    if room < 1:
        raise ContextOverflow(
            f"the prompt has {len(ids)} tokens, the context {context}, and an answer needs one",
            "prompt",
        )
    pages = int(options.pool_gib * GIB) // pool_page_bytes(model.spec)
    pool = PagePool(model.spec, pages, options.max_n, context)
    engine = LocalEngine(model, TokenPieces(tokenizer), pool, chunk_tokens=options.chunk_tokens)
    sampling = SamplingParams(temperature=temperature, max_tokens=min(max_tokens, room))
    request = GenerationRequest("generate", tuple(ids), sampling, options.recipe)
    for _, events in engine.stream([request]):
        for event in events:
            if isinstance(event, PromptEvent):
                print(f"{event.prompt_tokens} prompt tokens, {event.kept_tokens} kept per head"
                      f" ({event.recipe_id}), {event.payload_bytes} bytes of KV", file=sys.stderr)  # fmt: skip
            else:
                print(event.text, end="", flush=True)
    print()
