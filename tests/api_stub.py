"""A scripted backend, a small tokenizer and clients, for the tests of the HTTP edge."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import httpx
from fastapi import FastAPI
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from deployments.api.application import build_application
from deployments.api.backend import Readiness, TierControl
from deployments.api.card import ModelCard
from deployments.api.settings import ApiSettings
from engine.report import SelectionReport
from engine.request import Event, FinishReason, GenerationRequest, PromptEvent, TokenEvent, TokenLogprob

MODEL = "tiny"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(*, begin: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level, one token per byte and a few merges; with `begin` it puts a begin and an end token around text."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|im_start|>", "<|im_end|>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    raw.train_from_iterator(["hello world " * 8], trainer)
    if begin:
        raw.post_processor = processors.TemplateProcessing(
            "<s> $A </s>", special_tokens=[("<s>", 2), ("</s>", 3)]
        )
    made = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="<|im_end|>")
    made.chat_template = TEMPLATE
    return made


TOKENIZER = make_tokenizer()


def make_card(**changes: object) -> ModelCard:
    """A card with a context of 64 tokens."""
    fields: dict[str, object] = {
        "names": (MODEL, "org/tiny"),
        "tokenizer": TOKENIZER,
        "context_length": 64,
        "max_prompt_tokens": 60,
        "end_token_ids": (1,),
        "version": "1.2.3",
        "fingerprint": "fp_tiny",
        **changes,
    }
    return ModelCard(**fields)  # type: ignore[arg-type]


def prompt_event(request: GenerationRequest) -> PromptEvent:
    """What a prompt cost, in recognisable numbers, with log-probabilities where they were asked for."""
    logprobs: tuple[TokenLogprob | None, ...] | None = None
    if request.prompt_logprobs is not None:
        logprobs = (None, *(logprob(t, request.prompt_logprobs) for t in request.prompt[1:]))
    report = SelectionReport((0, 2), (3, 3), ((3, 4), (3, 2)), 0.75, (0.5, 0.9) if request.report else None)
    return PromptEvent(len(request.prompt), 2, 3, 100, 128, request.recipe.recipe_id, logprobs, report)


def logprob(token_id: int, top: int) -> TokenLogprob:
    """-0.5 for the token; its alternatives are the ids from 4 upwards."""
    return TokenLogprob(token_id, -0.5, tuple((4 + i, -0.5 - i) for i in range(top)))


def token_events(
    request: GenerationRequest, text: str, choice: int = 0, finish: FinishReason = FinishReason.STOP
) -> list[TokenEvent]:
    """One event per token of `text`, cut at `max_tokens`."""
    ids = TOKENIZER.backend_tokenizer.encode(text, add_special_tokens=False).ids
    limit = request.sampling.max_tokens
    end = FinishReason.LENGTH if len(ids) > limit else finish
    ids = ids[:limit]
    top = request.sampling.logprobs
    return [
        TokenEvent(
            choice,
            i,
            token,
            TOKENIZER.decode([token]),
            None if top is None else logprob(token, top),
            end if i == len(ids) - 1 else None,
        )
        for i, token in enumerate(ids)
    ]


Script = Callable[[GenerationRequest], AsyncGenerator[list[Event], None]]


async def say_hello(request: GenerationRequest) -> AsyncGenerator[list[Event], None]:
    """Every choice says "hello world", one batch per step over all choices."""
    yield [prompt_event(request)]
    choices = [token_events(request, "hello world", choice) for choice in range(request.sampling.n)]
    for step in zip(*choices, strict=True):
        yield list(step)


async def endless(request: GenerationRequest) -> AsyncGenerator[list[Event], None]:
    """Never finishes; 20 kB of text per batch."""
    yield [prompt_event(request)]
    index = 0
    while True:
        yield [TokenEvent(0, index, 5, "x" * 20_000)]
        index += 1
        await asyncio.sleep(0)


def say(*batches: Sequence[Event]) -> Script:
    """A prompt event, then these batches."""

    async def script(request: GenerationRequest) -> AsyncGenerator[list[Event], None]:
        yield [prompt_event(request)]
        for batch in batches:
            yield list(batch)

    return script


def fail(raised: Exception, *before: Sequence[Event]) -> Script:
    """Raises, after these batches (and the prompt event) or at once."""

    async def script(request: GenerationRequest) -> AsyncGenerator[list[Event], None]:
        if before:
            yield [prompt_event(request)]
        for batch in before:
            yield list(batch)
        raise raised

    return script


@dataclass
class StubBackend:
    """Runs a script per request, remembers requests, and counts the streams that are open."""

    script: Script = say_hello
    requests: list[GenerationRequest] = field(default_factory=list)
    open: int = 0
    readiness: Readiness = field(default_factory=lambda: Readiness(True, {"decode": "1 of 1"}))
    gauges: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    trouble: Exception | None = None

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[list[Event], None]:
        self.requests.append(request)
        self.open += 1
        stream = self.script(request)
        try:
            async for batch in stream:
                yield batch
        finally:
            await stream.aclose()
            self.open -= 1

    async def ready(self) -> Readiness:
        if self.trouble:
            raise self.trouble
        return self.readiness

    async def stats(self) -> Mapping[str, Mapping[str, float]]:
        if self.trouble:
            raise self.trouble
        return self.gauges


def application(
    backend: StubBackend, card: ModelCard | None = None, tiers: TierControl | None = None, **settings: object
) -> FastAPI:
    """The application over `backend`, and over `tiers` where there are any."""
    given = ApiSettings(**settings)  # type: ignore[arg-type]
    return build_application(backend, card or make_card(), given, tiers=tiers)


def client(app: FastAPI, **headers: str) -> httpx.AsyncClient:
    """An HTTP client without a network; application errors become responses, as in a server."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test", headers=headers)


async def post(app: FastAPI, path: str, body: object, **headers: str) -> httpx.Response:
    """POST `body` (JSON, or bytes as they are)."""
    async with client(app, **headers) as http:
        if isinstance(body, bytes):
            return await http.post(path, content=body)
        return await http.post(path, json=body)


async def chat(app: FastAPI, **fields: object) -> httpx.Response:
    """POST a chat with one user message."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}
    return await post(app, "/v1/chat/completions", body)


async def complete(app: FastAPI, **fields: object) -> httpx.Response:
    """POST a completions request."""
    return await post(app, "/v1/completions", {"model": MODEL, "prompt": "hello", **fields})


def events_of(response: httpx.Response) -> list[object]:
    """The data of every server-sent event, parsed, "[DONE]" as it is."""
    blocks = response.text.split("\n\n")
    assert blocks.pop() == "", "the stream ends with a whole event"
    data = [block.removeprefix("data: ") for block in blocks if not block.startswith(":")]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


async def until(condition: Callable[[], bool], within_s: float = 20.0) -> None:
    """Wait for `condition`, at most `within_s`."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.005)
