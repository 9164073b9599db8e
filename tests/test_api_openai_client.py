"""The real `openai` client against the application."""

from __future__ import annotations

import httpx2
import openai
import pytest
from api_stub import MODEL, StubBackend, application, fail
from fastapi import FastAPI

from engine.errors import Overloaded, ReplicaLost
from engine.request import TokenEvent

ASK = [{"role": "user", "content": "hi"}]


def openai_client(app: FastAPI, key: str = "unused") -> openai.AsyncOpenAI:
    transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
    http = httpx2.AsyncClient(transport=transport)
    return openai.AsyncOpenAI(api_key=key, base_url="http://test/v1", http_client=http, max_retries=0)


async def test_a_chat() -> None:
    async with openai_client(application(StubBackend())) as client:
        answer = await client.chat.completions.create(
            model=MODEL, messages=ASK, n=2, logprobs=True, top_logprobs=3
        )
    assert [choice.message.content for choice in answer.choices] == ["hello world"] * 2
    entries = answer.choices[1].logprobs.content
    assert [(entry.token, len(entry.top_logprobs)) for entry in entries] == [("hello", 3), (" world", 3)]
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert answer.usage.kv["kept_tokens"] == 3


async def test_a_streamed_chat() -> None:
    async with openai_client(application(StubBackend())) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=ASK, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "hello world"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == 2


async def test_completions_with_several_prompts_echo_and_logprobs() -> None:
    async with openai_client(application(StubBackend())) as client:
        answer = await client.completions.create(
            model=MODEL, prompt=["hello", "world"], echo=True, logprobs=2
        )
    assert [choice.text for choice in answer.choices] == ["hellohello world", "worldhello world"]
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["hello", "hello", " world"]
    assert logprobs.token_logprobs == [None, -0.5, -0.5]


async def test_a_streamed_completion() -> None:
    async with openai_client(application(StubBackend())) as client:
        stream = await client.completions.create(model=MODEL, prompt="hello", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "hello world"


async def test_the_kv_extension_goes_in_extra_body() -> None:
    backend = StubBackend()
    async with openai_client(application(backend)) as client:
        kv = {"policy": "snapkv", "budget": 0.5}
        answer = await client.chat.completions.create(model=MODEL, messages=ASK, extra_body={"kv": kv})
    assert answer.usage.kv["recipe"] == backend.requests[0].recipe.recipe_id != "full"


async def test_models() -> None:
    async with openai_client(application(StubBackend())) as client:
        assert [model.id async for model in client.models.list()] == ["tiny", "org/tiny"]
        assert (await client.models.retrieve("org/tiny")).owned_by == "kvtide"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("other")


async def test_errors_are_the_clients_own_types() -> None:
    async with openai_client(application(StubBackend())) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model=MODEL, messages=ASK, temperature=3)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.BadRequestError) as long:
            await client.completions.create(model=MODEL, prompt=[5] * 100)
        assert long.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="other", messages=ASK)
        assert missing.value.code == "model_not_found"


@pytest.mark.parametrize("stream", [False, True])
async def test_overload_is_a_rate_limit_error_with_retry_after(stream: bool) -> None:
    async with openai_client(application(StubBackend(fail(Overloaded("full", 2.5))))) as client:
        with pytest.raises(openai.RateLimitError) as full:
            await client.chat.completions.create(model=MODEL, messages=ASK, stream=stream)
    assert full.value.response.headers["retry-after"] == "3"


async def test_an_error_in_mid_stream_is_raised_by_the_client() -> None:
    app = application(StubBackend(fail(ReplicaLost("gone"), [TokenEvent(0, 0, 5, "a")])))
    async with openai_client(app) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=ASK, stream=True)
        text = ""
        with pytest.raises(openai.APIError, match="replica died"):
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
    assert text == "a"


async def test_the_api_key_is_checked() -> None:
    app = application(StubBackend(), api_key="secret")
    async with openai_client(app, "secret") as client:
        await client.chat.completions.create(model=MODEL, messages=ASK)
    async with openai_client(app, "wrong") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.chat.completions.create(model=MODEL, messages=ASK)
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
