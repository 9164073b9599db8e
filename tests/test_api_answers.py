"""How events become chat and completions answers, whole and streamed, over plain HTTP."""

from __future__ import annotations

import codecs
from collections.abc import AsyncGenerator

import pytest
from api_stub import (
    StubBackend,
    application,
    chat,
    complete,
    events_of,
    logprob,
    make_card,
    make_tokenizer,
    prompt_event,
    say,
    token_events,
)

from engine.request import Event, FinishReason, GenerationRequest, TokenEvent

EMOJI = "\U0001f469\u200d\U0001f4bb"


async def test_a_chat_answer_has_openais_shape_and_the_kv_usage() -> None:
    response = await chat(application(StubBackend()))
    body = response.json()
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert (body["model"], body["system_fingerprint"]) == ("tiny", "fp_tiny")
    message = {"role": "assistant", "content": "hello world", "refusal": None}
    assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}]
    prompt = body["usage"]["prompt_tokens"]
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 2,
        "total_tokens": prompt + 2,
        "prompt_tokens_details": {"cached_tokens": 2},
        "kv": {
            "recipe": "full",
            "prompt_tokens": prompt,
            "kept_tokens": 3,
            "payload_bytes": 100,
            "shipped_bytes": 128,
        },
    }


async def test_a_chat_stream_is_role_then_text_then_finish_then_done() -> None:
    chunks = events_of(await chat(application(StubBackend()), stream=True))
    assert chunks.pop() == "[DONE]"
    assert len({(c["id"], c["created"], c["model"]) for c in chunks}) == 1
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert [c["choices"][0]["delta"] for c in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "hello"},
        {"content": " world"},
        {},
    ]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, None, None, "stop"]
    assert all("usage" not in c for c in chunks)


async def test_a_streams_usage_comes_last_and_only_when_asked_for() -> None:
    response = await chat(application(StubBackend()), stream=True, stream_options={"include_usage": True})
    *chunks, last, done = events_of(response)
    assert done == "[DONE]"
    assert all(c["usage"] is None for c in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 2


async def test_tokens_of_one_batch_share_a_chunk_and_held_back_text_makes_none() -> None:
    batch = [
        TokenEvent(0, 0, 5, "a"),
        TokenEvent(0, 1, 6, "b"),
    ]
    held = [TokenEvent(0, 2, 7, "")]
    end = [TokenEvent(0, 3, 8, "", finish_reason=FinishReason.STOP)]
    response = await chat(application(StubBackend(say(batch, held, end))), stream=True)
    deltas = [c["choices"][0]["delta"] for c in events_of(response)[:-1]]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "ab"}, {}]


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
async def test_max_tokens_is_the_number_of_tokens_in_the_answer(tokens: int, stream: bool) -> None:
    async def script(request: GenerationRequest) -> AsyncGenerator[list[Event], None]:
        yield [prompt_event(request), *token_events(request, "abcdef")]

    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    response = await chat(application(StubBackend(script)), max_tokens=tokens, **options)
    if stream:
        *chunks, last, _ = events_of(response)
        finish, usage = chunks[-1]["choices"][0]["finish_reason"], last["usage"]
    else:
        finish, usage = response.json()["choices"][0]["finish_reason"], response.json()["usage"]
    assert finish == "length"
    assert usage["completion_tokens"] == tokens


async def test_parameters_reach_the_backend_together() -> None:
    backend = StubBackend()
    fields = {"min_tokens": 20, "max_tokens": 30, "n": 2, "stop": ["x"], "logprobs": True}
    response = await chat(application(backend), stream=True, stream_options={"include_usage": True}, **fields)
    assert response.status_code == 200
    s = backend.requests[0].sampling
    assert (s.min_tokens, s.max_tokens, s.n, s.stop, s.logprobs) == (20, 30, 2, ("x",), 0)


async def test_n_choices_are_answered_separately_and_the_prompt_counts_once() -> None:
    async def script(request: GenerationRequest) -> AsyncGenerator[list[Event], None]:
        first, second = token_events(request, "abc", 0), token_events(request, "xy", 1)
        yield [prompt_event(request), first[0], second[0], first[1]]
        yield [second[1], first[2]]

    app = application(StubBackend(script))
    body = (await chat(app, n=2)).json()
    assert [(c["index"], c["message"]["content"]) for c in body["choices"]] == [(0, "abc"), (1, "xy")]
    assert body["usage"]["completion_tokens"] == 5
    texts = {0: "", 1: ""}
    finishes = []
    for chunk in events_of(await chat(app, n=2, stream=True))[:-1]:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        finishes += [choice["index"]] if choice["finish_reason"] else []
    assert texts == {0: "abc", 1: "xy"}
    assert sorted(finishes) == [0, 1]


async def test_chat_logprobs_are_the_same_streamed_and_whole() -> None:
    app = application(StubBackend())
    whole = (await chat(app, logprobs=True, top_logprobs=2)).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in whole] == ["hello", " world"]
    assert whole[0]["bytes"] == list(b"hello")
    assert whole[0]["logprob"] == -0.5
    assert [alternative["logprob"] for alternative in whole[0]["top_logprobs"]] == [-0.5, -1.5]
    streamed = []
    for chunk in events_of(await chat(app, logprobs=True, top_logprobs=2, stream=True))[:-1]:
        streamed += (chunk["choices"][0]["logprobs"] or {}).get("content", [])
    assert streamed == whole
    none = (await chat(app, logprobs=True)).json()["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in none] == [[], []]


async def test_logprobs_are_streamed_even_while_their_text_is_held_back() -> None:
    events = [
        TokenEvent(0, 0, 5, "", logprob(5, 0)),
        TokenEvent(0, 1, 6, "ab", logprob(6, 0), FinishReason.STOP),
    ]
    response = await chat(application(StubBackend(say(events[:1], events[1:]))), stream=True, logprobs=True)
    counts = [len((c["choices"][0]["logprobs"] or {}).get("content", [])) for c in events_of(response)[:-1]]
    assert counts == [0, 1, 1, 0]


async def test_a_token_that_is_part_of_a_character_is_shown_as_its_bytes() -> None:
    tokenizer = make_tokenizer()
    ids = tokenizer.backend_tokenizer.encode(EMOJI, add_special_tokens=False).ids
    events: list[Event] = [TokenEvent(0, i, token, "", logprob(token, 0)) for i, token in enumerate(ids[:-1])]
    last = TokenEvent(0, len(ids) - 1, ids[-1], EMOJI, logprob(ids[-1], 0), FinishReason.STOP)
    choice = (await chat(application(StubBackend(say([*events, last]))), logprobs=True)).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert content[0]["token"] == "bytes:\\xf0"
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == EMOJI
    assert choice["message"]["content"] == EMOJI


async def test_minus_infinity_is_said_in_json() -> None:
    event = TokenEvent(0, 0, 5, "a", logprob(5, 0), FinishReason.STOP)
    impossible = TokenEvent(0, 0, 5, "a", type(event.logprob)(5, float("-inf")), FinishReason.STOP)
    body = (await chat(application(StubBackend(say([impossible]))), logprobs=True)).json()
    assert body["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0


async def test_a_completion_has_openais_shape() -> None:
    body = (await complete(application(StubBackend()))).json()
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": "hello world", "logprobs": None, "finish_reason": "stop"}]


async def test_a_completion_stream_ends_with_its_finish_reason_and_done() -> None:
    chunks = events_of(await complete(application(StubBackend()), stream=True))
    assert chunks.pop() == "[DONE]"
    parts = [(c["choices"][0]["text"], c["choices"][0]["finish_reason"]) for c in chunks]
    assert parts == [("hello", None), (" world", "stop")]


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_run_together_and_are_numbered_prompt_times_n_plus_choice(stream: bool) -> None:
    async def script(request: GenerationRequest) -> AsyncGenerator[list[Event], None]:
        yield [prompt_event(request)]
        for choice in range(2):
            yield list(token_events(request, f"{request.prompt[0]}/{choice}", choice))

    backend = StubBackend(script)
    response = await complete(application(backend), prompt=[[10], [11], [12]], n=2, stream=stream)
    texts = [""] * 6
    for part in events_of(response)[:-1] if stream else [response.json()]:
        for choice in part["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["10/0", "10/1", "11/0", "11/1", "12/0", "12/1"]
    assert len({request.request_id for request in backend.requests}) == 3
    if not stream:
        assert response.json()["usage"]["prompt_tokens"] == 3
        assert response.json()["usage"]["completion_tokens"] == 6 * 4


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_puts_the_prompt_first(stream: bool) -> None:
    response = await complete(application(StubBackend()), prompt="hello", echo=True, n=2, stream=stream)
    texts = ["", ""]
    for part in events_of(response)[:-1] if stream else [response.json()]:
        for choice in part["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["hellohello world"] * 2


async def test_echo_of_token_ids_is_their_text() -> None:
    ids = make_tokenizer()("hello!").input_ids
    body = (await complete(application(StubBackend()), prompt=ids, echo=True)).json()
    assert body["choices"][0]["text"] == "hello!hello world"


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_logprobs_covers_the_prompt(stream: bool) -> None:
    backend = StubBackend()
    response = await complete(application(backend), prompt="hello!", echo=True, logprobs=2, stream=stream)
    assert backend.requests[0].prompt_logprobs == 2
    joined: dict[str, list[object]] = {}
    for part in events_of(response)[:-1] if stream else [response.json()]:
        for name, values in part["choices"][0]["logprobs"].items():
            joined.setdefault(name, []).extend(values)
    assert joined["tokens"] == ["hello", "!", "hello", " world"]
    assert joined["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert joined["text_offset"] == [0, 5, 6, 11]
    assert joined["top_logprobs"][0] is None
    assert joined["top_logprobs"][1]["!"] == -0.5, "the chosen token is always among them"


async def test_completion_logprobs_without_alternatives() -> None:
    body = (await complete(application(StubBackend()), logprobs=0)).json()
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] is None
    assert logprobs["tokens"] == ["hello", " world"]
    assert logprobs["text_offset"] == [0, 5]


async def test_offsets_count_characters_of_the_text_and_a_begin_token_has_no_width() -> None:
    tokenizer = make_tokenizer(begin=True)
    app = application(StubBackend(), make_card(tokenizer=tokenizer))
    logprobs = (await complete(app, prompt=f"{EMOJI}!", echo=True, logprobs=0)).json()["choices"][0][
        "logprobs"
    ]
    assert logprobs["tokens"][0] == "<s>"
    text = f"{EMOJI}!hello world"
    shown = logprobs["tokens"].index("!")
    assert logprobs["text_offset"][1] == 0
    assert logprobs["text_offset"][shown] == len(EMOJI)
    assert text[logprobs["text_offset"][shown + 1] :] == "hello world"


async def test_line_ends_of_unicode_do_not_split_an_event() -> None:
    text = "a\u2028b\u2029c\x85d\ne"
    event = TokenEvent(0, 0, 5, text, finish_reason=FinishReason.STOP)
    response = await chat(application(StubBackend(say([event]))), stream=True)
    assert len(response.text.splitlines()) == 2 * 4, (
        "three chunks and [DONE], each with an empty line after it"
    )
    assert events_of(response)[1]["choices"][0]["delta"]["content"] == text


async def test_text_from_the_backend_is_passed_on_unchanged() -> None:
    pieces = ["", "a", "", "DEFGHI", EMOJI, ""]
    events = [TokenEvent(0, i, 5 + i, piece) for i, piece in enumerate(pieces)]
    end = TokenEvent(0, len(pieces), 20, "", finish_reason=FinishReason.STOP)
    response = await chat(application(StubBackend(say(*[[e] for e in events], [end]))), stream=True)
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in events_of(response)[:-1])
    assert text == "".join(pieces)
    assert codecs.encode(text, "utf-8").decode() == text
