"""`kvtide generate`: one prompt through the engine, in this process."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from deployments.api.card import ModelCard
from deployments.api.prompts import Prompt, chat_prompt, completion_prompt
from deployments.api.recipes import split_kv
from deployments.api.schemas import ChatRequest, Message
from deployments.config import GIB, AppArgs, resolve
from deployments.served_model import model_card
from engine.errors import ContextOverflow, InvalidRequest
from engine.local import LocalEngine
from engine.model import load_model, read_config
from engine.pool import PagePool, pool_page_bytes
from engine.request import GenerationRequest, PromptEvent, SamplingParams
from engine.text import TokenPieces
from engine.weights import ensure_weights
from policies.recipe import Recipe, RecipeError


def own_context(path: Path) -> int:
    """Tokens of context that the model in this folder was made for. Raises `UnsupportedModel`, `ModelUnavailable`."""
    return int(read_config(path).get_text_config().max_position_embeddings)


def generate(options: AppArgs, text: str, *, chat: bool, max_tokens: int, temperature: float) -> None:
    """Stream the answer to standard output and what the prompt cost to standard error."""
    # All cores by default: there is no other pool here to leave some to.
    torch.set_num_threads(options.threads or resolve(options).cores)
    path = ensure_weights(options.model)
    context = options.context_length(own_context(path))
    card = model_card(options)
    prompt = read_prompt(card, text, chat)
    recipe = choose_recipe(card, {}, prompt)
    room = context - len(prompt.tokens)
    if room < 1:
        raise ContextOverflow(
            f"the prompt has {len(prompt.tokens)} tokens, the context {context}, and an answer needs one",
            "prompt",
        )
    model = load_model(path, options.dtype, options.block_tokens)
    model.spec = replace(model.spec, context_length=context)
    pages = int(options.pool_gib * GIB) // pool_page_bytes(model.spec)
    pool = PagePool(model.spec, pages, options.max_n, context)
    engine = LocalEngine(model, TokenPieces(card.tokenizer), pool, chunk_tokens=options.chunk_tokens)
    # Slot positions let an answer outgrow the context.
    limit = max_tokens if recipe.positions == "slot" else min(max_tokens, room)
    sampling = SamplingParams(temperature=temperature, max_tokens=limit)
    request = GenerationRequest("generate", prompt.tokens, sampling, recipe)
    for _, events in engine.stream([request]):
        for event in events:
            if isinstance(event, PromptEvent):
                print(f"{event.prompt_tokens} prompt tokens, {event.kept_tokens} kept per head"
                      f" ({event.recipe_id}), {event.payload_bytes} bytes of KV", file=sys.stderr)  # fmt: skip
            else:
                print(event.text, end="", flush=True)
    print()


def read_prompt(card: ModelCard, text: str, chat: bool) -> Prompt:
    """A text as the service would read it, as a question of a chat or as it is. Raises `InvalidRequest`."""
    if not text:
        raise InvalidRequest("the prompt is empty", "prompt")
    if chat:
        return chat_prompt(card, ChatRequest(model="", messages=[Message(role="user", content=text)]))
    return completion_prompt(card, text, "prompt")


def choose_recipe(card: ModelCard, given: Mapping[str, object], prompt: Prompt) -> Recipe:
    """The recipe of these fields, its warnings said on standard error. ValueError names the field that is wrong."""
    try:
        recipe = card.recipes.choose(split_kv(given).recipe, prompt.map)
    except RecipeError as error:
        raise ValueError(f"{error.field}: {error.problem}; valid: {error.valid}") from None
    for warning in recipe.warnings:
        print(f"kvtide: {warning}", file=sys.stderr)
    return recipe
