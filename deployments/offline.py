"""`kvtide generate`: one prompt through the engine, in this process."""

import sys

from deployments.config import GIB, AppArgs
from engine.errors import ContextOverflow, InvalidRequest
from engine.local import LocalEngine
from engine.model import load_model
from engine.pool import PagePool, pool_page_bytes
from engine.request import GenerationRequest, PromptEvent, SamplingParams
from engine.text import TokenPieces
from engine.weights import ensure_weights


def generate(options: AppArgs, text: str, *, chat: bool, max_tokens: int, temperature: float) -> None:
    """Stream the answer to standard output and what the prompt cost to standard error."""
    from transformers import AutoTokenizer

    path = ensure_weights(options.model)
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = load_model(path, options.dtype, options.block_tokens)
    if chat:
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
    else:
        ids = tokenizer(text).input_ids
    room = model.spec.context_length - len(ids)
    if not ids:
        raise InvalidRequest("the prompt is empty", "prompt")
    if room < 1:
        raise ContextOverflow(
            f"the prompt has {len(ids)} tokens, the context {model.spec.context_length}, and an answer needs one",
            "prompt",
        )
    pages = int(options.pool_gib * GIB) // pool_page_bytes(model.spec)
    pool = PagePool(model.spec, pages, options.max_n, model.spec.context_length)
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
