"""Prompts and messages to token ids, empty ones refused. Blocking: tokenizer and chat template run here."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from deployments.api.card import ModelCard
from deployments.api.schemas import ChatRequest, Message
from deployments.api.spans import LazyPromptMap, Parts, chat_parts, text_map
from engine.errors import InvalidRequest


class Prompt(NamedTuple):
    """A prompt's token ids, and where its parts are."""

    tokens: tuple[int, ...]
    map: LazyPromptMap


def split_prompt(prompt: str | Sequence[str | int | list[int]]) -> list[tuple[str, str | list[int]]]:
    """One (field name, text or ids) per prompt; refuses empty ones."""
    if not prompt:
        raise InvalidRequest("prompt is empty; it needs at least one token.", "prompt")
    if isinstance(prompt, str):
        return [("prompt", prompt)]
    ids = [part for part in prompt if isinstance(part, int)]
    if ids:
        return [("prompt", ids)]
    several: list[tuple[str, str | list[int]]] = []
    for i, part in enumerate(prompt):
        assert not isinstance(part, int), "the schema allows no mixed lists"
        if not part:
            raise InvalidRequest(f"prompt[{i}] is empty; it needs at least one token.", f"prompt[{i}]")
        several.append((f"prompt[{i}]", part))
    return several


def completion_prompt(card: ModelCard, prompt: str | list[int], field: str) -> Prompt:
    """One prompt, begin token included where the tokenizer adds one to text."""
    tokens = _completion_tokens(card, prompt, field)
    return Prompt(tokens, text_map(len(tokens), partial(card.token_texts, tokens)))


def _completion_tokens(card: ModelCard, prompt: str | list[int], field: str) -> tuple[int, ...]:
    if isinstance(prompt, str):
        ids = card.encode(prompt)
        if not ids:  # a normaliser may drop everything
            raise InvalidRequest(f"{field} has no token in this model's vocabulary.", field)
        return (*card.prompt_prefix, *ids)
    check_token_ids(card, prompt, field)
    return tuple(prompt)


def check_token_ids(card: ModelCard, ids: list[int], field: str) -> None:
    """Refuse ids that the model has no embedding for."""
    if not ids or (min(ids) >= 0 and max(ids) < card.vocabulary):
        return
    for i, token in enumerate(ids):
        if not 0 <= token < card.vocabulary:
            raise InvalidRequest(
                f"{field}[{i}]: token id {token} is out of vocabulary; "
                f"valid: from 0 to {card.vocabulary - 1}.",
                f"{field}[{i}]",
            )


def chat_prompt(card: ModelCard, request: ChatRequest) -> Prompt:
    """The chat in the model's template."""
    messages = [{"role": _role(message), "content": _text(message)} for message in request.messages]
    if not messages:
        raise InvalidRequest("messages is empty; it needs at least one message.", "messages")
    nothing_said = not any(message["content"] for message in messages)
    for i, message in enumerate(messages):
        # An empty system or assistant turn is harmless next to real ones; an empty question is not.
        if not message["content"] and (nothing_said or message["role"] == "user"):
            field = f"messages[{i}].content"
            raise InvalidRequest(f"{field} is empty.", field)
    go_on = bool(request.continue_final_message)
    add_prompt = not go_on if request.add_generation_prompt is None else request.add_generation_prompt
    if go_on and add_prompt:
        raise InvalidRequest(
            "continue_final_message needs add_generation_prompt false.", "continue_final_message"
        )
    if go_on and messages[-1]["role"] != "assistant":
        raise InvalidRequest(
            "continue_final_message needs a last message of the assistant.", "continue_final_message"
        )
    render = partial(card.render_chat, add_prompt=add_prompt, go_on=go_on)
    text = render(messages)
    encoding = card.encoding(text)
    tokens = tuple(encoding.ids)
    if not tokens:
        raise InvalidRequest("messages make an empty prompt.", "messages")

    def parts() -> Parts:
        return chat_parts(render, messages, text, encoding.offsets)

    return Prompt(tokens, LazyPromptMap(len(tokens), parts, partial(card.token_texts, tokens)))


def _role(message: Message) -> str:
    return "system" if message.role == "developer" else message.role


def _text(message: Message) -> str:
    if isinstance(message.content, str):
        return message.content
    return "\n".join(part.text for part in message.content)
