"""Checked fields to a `Plan`: prompts become token ids, defaults are filled in, limits are checked.

Blocking (tokenizer, chat template): callers run the two `plan_*` functions in a thread.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from deployments.api.card import ModelCard
from deployments.api.errors import ModelNotFound
from deployments.api.plan import Plan
from deployments.api.prompts import Prompt, chat_prompt, check_token_ids, completion_prompt, split_prompt
from deployments.api.recipes import KvFields, refusal, split_kv
from deployments.api.schemas import ChatRequest, CompletionRequest, Request
from deployments.api.settings import ApiSettings
from engine.errors import ContextOverflow, InvalidRequest
from engine.request import GenerationRequest, SamplingParams
from policies.recipe import Recipe, RecipeError

DEFAULT_COMPLETION_TOKENS = 16
MAX_STREAMED_TOKENS = 1_000_000
"""Most tokens per choice where slot positions let an answer outgrow the context."""

_SEED_BITS = 63


@dataclass(frozen=True)
class _Ask:
    """What differs between the endpoints once the prompt is token ids."""

    field: str
    max_tokens: int | None
    max_tokens_field: str
    default_tokens: int | None
    kv: KvFields
    logprobs: int | None
    prompt_logprobs: int | None = None


def plan_chat(card: ModelCard, settings: ApiSettings, request: ChatRequest) -> Plan:
    """The plan of a chat. Raises `InvalidRequest` and its kinds."""
    _check_shared(card, settings, request, prompts=1)
    logprobs = _chat_logprobs(request)
    max_tokens, max_field = _chat_max_tokens(request)
    kv = _kv(settings, request)
    prompt = chat_prompt(card, request)
    ask = _Ask("messages", max_tokens, max_field, None, kv, logprobs)
    answer_id = f"chatcmpl-{secrets.token_hex(16)}"
    return Plan(
        answer_id,
        (_generation(card, settings, request, ask, prompt, answer_id),),
        stream=bool(request.stream),
        include_usage=_include_usage(request),
        logprobs=logprobs,
        report=kv.report,
    )


def plan_completion(card: ModelCard, settings: ApiSettings, request: CompletionRequest) -> Plan:
    """The plan of a completions request; several prompts make several engine requests."""
    prompts = split_prompt(request.prompt)
    _check_shared(card, settings, request, prompts=len(prompts))
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise InvalidRequest("best_of is supported only with the value of n.", "best_of")
    kv = _kv(settings, request)
    read = [completion_prompt(card, prompt, field) for field, prompt in prompts]
    answer_id = f"cmpl-{secrets.token_hex(16)}"
    echo = bool(request.echo)
    made: list[GenerationRequest] = []
    for (field, _), each in zip(prompts, read, strict=True):
        ask = _Ask(
            field,
            request.max_tokens,
            "max_tokens",
            DEFAULT_COMPLETION_TOKENS,
            kv,
            request.logprobs,
            request.logprobs if echo else None,
        )
        name = f"{answer_id}-{len(made)}"
        made.append(_generation(card, settings, request, ask, each, name))
    return Plan(
        answer_id,
        tuple(made),
        stream=bool(request.stream),
        include_usage=_include_usage(request),
        logprobs=request.logprobs,
        report=kv.report,
        echo=tuple(p if isinstance(p, str) else card.decode(p) for _, p in prompts) if echo else (),
        prefix_tokens=len(card.prompt_prefix) if isinstance(prompts[0][1], str) else 0,
    )


def _check_shared(card: ModelCard, settings: ApiSettings, request: Request, prompts: int) -> None:
    if request.model not in card.names:
        raise ModelNotFound(
            f"The model {request.model[:128]!r} does not exist; served: {_served(card)}.", "model"
        )
    n = request.n or 1
    if n > settings.max_n:
        raise InvalidRequest(f"n: {n} is too many; valid: from 1 to {settings.max_n}.", "n")
    if n * prompts > settings.max_choices:
        raise InvalidRequest(
            f"prompt: {prompts} prompts with n {n} make {n * prompts} choices; "
            f"valid: at most {settings.max_choices}.",
            "prompt",
        )
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options is only allowed when stream is true.", "stream_options")
    check_token_ids(card, request.stop_token_ids or [], "stop_token_ids")


def _served(card: ModelCard) -> str:
    return ", ".join(card.names)


def _include_usage(request: Request) -> bool:
    return bool(request.stream_options and request.stream_options.include_usage)


def _chat_logprobs(request: ChatRequest) -> int | None:
    if not request.logprobs:
        if request.top_logprobs:
            raise InvalidRequest("top_logprobs needs logprobs true.", "top_logprobs")
        return None
    return request.top_logprobs or 0


def _chat_max_tokens(request: ChatRequest) -> tuple[int | None, str]:
    new, old = request.max_completion_tokens, request.max_tokens
    if new is not None and old is not None and new != old:
        raise InvalidRequest(
            f"max_completion_tokens {new} and max_tokens {old} differ; send one.", "max_completion_tokens"
        )
    return (new, "max_completion_tokens") if new is not None else (old, "max_tokens")


def _fit_prompt(card: ModelCard, ask: _Ask, prompt_tokens: int) -> int:
    """Tokens that the context leaves for an answer, or `ContextOverflow` with both numbers."""
    if prompt_tokens > card.max_prompt_tokens:
        raise ContextOverflow(
            f"The prompt has {prompt_tokens} tokens; at most {card.max_prompt_tokens} are accepted.",
            ask.field,
        )
    context = card.context_length
    room = context - prompt_tokens
    if room < 1:
        raise ContextOverflow(
            f"This model's maximum context length is {context} tokens; the prompt has {prompt_tokens} "
            "tokens, which leaves no room for an answer.",
            ask.field,
        )
    return room


def _fit_context(card: ModelCard, ask: _Ask, prompt_tokens: int, room: int, recipe: Recipe) -> int:
    """The choice's `max_tokens`, or `ContextOverflow` with both numbers."""
    if ask.max_tokens is None:
        return room if ask.default_tokens is None else min(room, ask.default_tokens)
    if recipe.positions == "slot":
        if ask.max_tokens > MAX_STREAMED_TOKENS:
            raise ContextOverflow(
                f"{ask.max_tokens_field}: {ask.max_tokens} is too many; valid with slot positions: from 1 to "
                f"{MAX_STREAMED_TOKENS}.",
                ask.max_tokens_field,
            )
        return ask.max_tokens
    if ask.max_tokens > room:
        context = card.context_length
        raise ContextOverflow(
            f"This model's maximum context length is {context} tokens; you requested "
            f"{prompt_tokens + ask.max_tokens} tokens ({prompt_tokens} in the {ask.field}, {ask.max_tokens} "
            f"in the completion). Valid {ask.max_tokens_field}: from 1 to {room}.",
            ask.max_tokens_field,
        )
    return ask.max_tokens


def _generation(
    card: ModelCard,
    settings: ApiSettings,
    request: Request,
    ask: _Ask,
    prompt: Prompt,
    request_id: str,
) -> GenerationRequest:
    room = _fit_prompt(card, ask, len(prompt.tokens))
    recipe = _recipe(card, ask.kv.recipe, prompt)
    max_tokens = _fit_context(card, ask, len(prompt.tokens), room, recipe)
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens: {min_tokens} is more than max_tokens; valid: from 0 to {max_tokens}.", "min_tokens"
        )
    return GenerationRequest(
        request_id=request_id,
        prompt=prompt.tokens,
        sampling=_sampling(card, request, max_tokens, min_tokens, ask.logprobs),
        recipe=recipe,
        tenant=request.cache_salt,
        prompt_logprobs=ask.prompt_logprobs,
        deadline_s=settings.deadline_s,
        report=ask.kv.report,
        at_rest=ask.kv.at_rest,
    )


def _sampling(
    card: ModelCard, request: Request, max_tokens: int, min_tokens: int, logprobs: int | None
) -> SamplingParams:
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    seed = secrets.randbits(_SEED_BITS) if request.seed is None else request.seed % 2**_SEED_BITS
    return SamplingParams(
        temperature=_or(request.temperature, 1.0),
        top_p=_or(request.top_p, 1.0),
        top_k=min(max(0, request.top_k or 0), card.vocabulary),
        min_p=_or(request.min_p, 0.0),
        seed=seed,
        n=request.n or 1,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        stop=stop,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        logprobs=logprobs,
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        logit_bias=_logit_bias(card, request.logit_bias or {}),
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _logit_bias(card: ModelCard, biases: dict[str, float]) -> tuple[tuple[int, float], ...]:
    made: dict[int, float] = {}
    for key, bias in biases.items():
        # Only ASCII digits, and not so many that int() would refuse them.
        token = int(key) if key.isascii() and key.isdigit() and len(key) <= 18 else -1
        if not 0 <= token < card.vocabulary:
            raise InvalidRequest(
                f'logit_bias: {key[:32]!a} is no token id; valid: from "0" to "{card.vocabulary - 1}".',
                "logit_bias",
            )
        if not -100 <= bias <= 100:
            raise InvalidRequest(
                f"logit_bias.{token}: {bias} is out of range; valid: from -100 to 100.", "logit_bias"
            )
        made[token] = bias
    return tuple(sorted(made.items()))


def _kv(settings: ApiSettings, request: Request) -> KvFields:
    try:
        return split_kv(request.kv, settings.at_rest)
    except RecipeError as error:
        raise refusal(error) from None


def _recipe(card: ModelCard, fields: dict[str, object], prompt: Prompt) -> Recipe:
    try:
        return card.recipes.choose(fields, prompt.map)
    except RecipeError as error:
        raise refusal(error) from None
