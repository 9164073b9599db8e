"""Bodies, surrogates and templates that cannot be served: a 4xx, and the backend never hears of them."""

from __future__ import annotations

import json

import pytest
from api_stub import MODEL, TOKENIZER, StubBackend, application, chat, client, make_card, make_tokenizer, post


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b'"x"',
        b"\xff\xfe",
        b'{"model": NaN}',
        b'{"model": "tiny", "temperature": Infinity}',
        b'{"a":' * 100_000,
        b'{"max_tokens": ' + b"9" * 5000 + b"}",
    ],
)
async def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    response = await post(application(StubBackend()), "/v1/completions", body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


async def test_numbers_beyond_floats_are_refused() -> None:
    body = b'{"model": "tiny", "prompt": "x", "temperature": 1e999}'
    response = await post(application(StubBackend()), "/v1/completions", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "temperature"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (rb'{"model": "tiny", "prompt": "a\ud800b"}', "prompt"),
        (rb'{"model": "tiny", "prompt": "x", "stop": ["\udfff"]}', "stop[0]"),
        (rb'{"model": "tiny", "prompt": "x", "\ud800": 1}', None),
    ],
)
async def test_half_a_surrogate_pair_is_refused(body: bytes, param: str | None) -> None:
    response = await post(application(StubBackend()), "/v1/completions", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


async def test_a_whole_surrogate_pair_is_a_character() -> None:
    backend = StubBackend()
    body = rb'{"model": "tiny", "prompt": "\ud83d\ude00"}'
    assert (await post(application(backend), "/v1/completions", body)).status_code == 200
    assert TOKENIZER.decode(list(backend.requests[0].prompt)) == "\U0001f600"


async def test_a_body_beyond_the_limit_is_refused_with_or_without_its_length() -> None:
    app = application(StubBackend(), max_body_bytes=200)
    body = json.dumps({"model": MODEL, "prompt": "x" * 200}).encode()
    response = await post(app, "/v1/completions", body)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"

    async def pieces():  # type: ignore[no-untyped-def]
        yield body[:100]
        yield body[100:]

    async with client(app) as http:
        response = await http.post("/v1/completions", content=pieces())
    assert response.status_code == 413


async def test_a_chat_without_a_template_is_refused() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    response = await chat(application(StubBackend(), make_card(tokenizer=tokenizer)))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"


async def test_what_the_template_refuses_is_the_clients_error() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    response = await chat(application(StubBackend(), make_card(tokenizer=tokenizer)))
    assert response.status_code == 400
    assert "roles must alternate" in response.json()["error"]["message"]
