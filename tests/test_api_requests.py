"""What the HTTP edge makes of a request: engine values for good ones, a 4xx that names the field for bad ones."""

from __future__ import annotations

import dataclasses

import pytest
from api_stub import (
    MODEL,
    TOKENIZER,
    StubBackend,
    application,
    chat,
    complete,
    make_card,
    make_tokenizer,
    post,
)

from engine.request import GenerationRequest


async def accepted_chat(**fields: object) -> GenerationRequest:
    backend = StubBackend()
    response = await chat(application(backend), **fields)
    assert response.status_code == 200, response.text
    return backend.requests[0]


async def accepted_completion(**fields: object) -> GenerationRequest:
    backend = StubBackend()
    response = await complete(application(backend), **fields)
    assert response.status_code == 200, response.text
    return backend.requests[0]


def without_id(request: GenerationRequest) -> GenerationRequest:
    """A request as the engine works on it: its id is drawn anew every time."""
    return dataclasses.replace(request, request_id="any")


async def refused(kind: str, status: int = 400, **fields: object) -> dict[str, str]:
    backend = StubBackend()
    send = chat if kind == "chat" else complete
    response = await send(application(backend), **fields)
    assert response.status_code == status, response.text
    assert backend.requests == [], "a refused request never reaches the backend"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def test_defaults_are_openais() -> None:
    sampling = (await accepted_completion()).sampling
    assert (sampling.temperature, sampling.top_p, sampling.n, sampling.max_tokens) == (1.0, 1.0, 1, 16)
    assert sampling.logprobs is None
    assert sampling.stop == ()


async def test_every_sampling_field_reaches_the_engine() -> None:
    request = await accepted_chat(
        temperature=0,
        top_p=0.5,
        top_k=7,
        min_p=0.1,
        seed=42,
        stop=["a", "b"],
        stop_token_ids=[5],
        ignore_eos=True,
        max_completion_tokens=9,
        min_tokens=3,
        n=2,
        logprobs=True,
        top_logprobs=4,
        presence_penalty=-1.5,
        frequency_penalty=0.5,
        repetition_penalty=1.1,
        logit_bias={"7": -100, "5": 2.5},
        cache_salt="tenant-a",
    )
    s = request.sampling
    assert (s.temperature, s.top_p, s.top_k, s.min_p, s.seed) == (0.0, 0.5, 7, 0.1, 42)
    assert (s.stop, s.stop_token_ids, s.ignore_eos) == (("a", "b"), (5,), True)
    assert (s.max_tokens, s.min_tokens, s.n, s.logprobs) == (9, 3, 2, 4)
    assert (s.presence_penalty, s.frequency_penalty, s.repetition_penalty) == (-1.5, 0.5, 1.1)
    assert s.logit_bias == ((5, 2.5), (7, -100.0))
    assert request.tenant == "tenant-a"
    assert request.prompt_logprobs is None


async def test_a_seed_is_drawn_where_none_is_given() -> None:
    first, second = await accepted_chat(), await accepted_chat()
    assert first.sampling.seed != second.sampling.seed


async def test_top_k_minus_one_is_off() -> None:
    assert (await accepted_chat(top_k=-1)).sampling.top_k == 0


async def test_null_means_not_given() -> None:
    nulls = dict.fromkeys(
        ["temperature", "stop", "n", "seed", "max_tokens", "logit_bias", "stream", "kv", "user"]
    )
    assert (await accepted_chat(**nulls)).sampling.temperature == 1.0


async def test_a_chat_goes_through_the_template_and_developer_is_system() -> None:
    request = await accepted_chat(
        messages=[
            {"role": "developer", "content": "hello"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "hello"}, {"type": "text", "text": "world"}],
            },
        ]
    )
    want = "<|im_start|>system\nhello<|im_end|>\n<|im_start|>user\nhello\nworld<|im_end|>\n<|im_start|>assistant\n"
    assert TOKENIZER.decode(list(request.prompt)) == want
    assert request.prompt[0] == 0, "the template's special text becomes the special token"


async def test_an_answer_can_be_sent_back_as_the_client_received_it() -> None:
    received = {
        "role": "assistant",
        "content": "hello",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    turn = {"role": "user", "content": "hi"}
    plain = {"role": "assistant", "content": "hello"}
    sent_back = await accepted_chat(messages=[turn, received, turn], seed=1)
    assert without_id(sent_back) == without_id(await accepted_chat(messages=[turn, plain, turn], seed=1))


async def test_the_last_assistant_message_can_be_continued() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello w"}]
    request = await accepted_chat(messages=messages, continue_final_message=True)
    assert TOKENIZER.decode(list(request.prompt)).endswith("<|im_start|>assistant\nhello w")


async def test_the_answer_of_a_chat_may_fill_the_context() -> None:
    request = await accepted_chat()
    assert request.sampling.max_tokens == 64 - len(request.prompt)


async def test_text_gets_a_begin_token_only_where_the_tokenizer_adds_one_and_never_an_end() -> None:
    plain = (await accepted_completion(prompt="hello")).prompt
    backend = StubBackend()
    await complete(application(backend, make_card(tokenizer=make_tokenizer(begin=True))), prompt="hello")
    assert backend.requests[0].prompt == (2, *plain)
    await chat(application(backend, make_card(tokenizer=make_tokenizer(begin=True))))
    assert 2 not in backend.requests[1].prompt, "a chat has exactly its template's tokens"


async def test_a_truncation_inside_the_tokenizer_file_does_not_cut_prompts() -> None:
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(2)
    backend = StubBackend()
    await complete(application(backend, make_card(tokenizer=tokenizer)), prompt="abcdefgh")
    assert len(backend.requests[0].prompt) == 8


async def test_token_ids_are_taken_as_they_are() -> None:
    assert (await accepted_completion(prompt=[5, 6, 7])).prompt == (5, 6, 7)


@pytest.mark.parametrize(
    ("kind", "fields", "param", "says"),
    [
        ("chat", {"temperature": 2.5}, "temperature", "from 0 to 2"),
        ("chat", {"temperature": "1"}, "temperature", "number"),
        ("chat", {"temperature": True}, "temperature", "number"),
        ("chat", {"top_p": 0}, "top_p", "above 0, to 1"),
        ("chat", {"top_k": -2}, "top_k", "from -1"),
        ("chat", {"min_p": 1.5}, "min_p", "from 0 to 1"),
        ("chat", {"n": 0}, "n", "from 1"),
        ("chat", {"n": 17}, "n", "from 1 to 16"),
        ("chat", {"n": 1.0}, "n", "integer"),
        ("chat", {"seed": 2**63}, "seed", str(2**63)),
        ("chat", {"max_tokens": 0}, "max_tokens", "from 1"),
        ("chat", {"max_completion_tokens": -1}, "max_completion_tokens", "from 1"),
        ("chat", {"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "differ"),
        ("chat", {"max_tokens": 3, "min_tokens": 4}, "min_tokens", "from 0 to 3"),
        ("chat", {"presence_penalty": 3}, "presence_penalty", "from -2 to 2"),
        ("chat", {"frequency_penalty": -3}, "frequency_penalty", "from -2 to 2"),
        ("chat", {"repetition_penalty": 0}, "repetition_penalty", "above 0, to 10"),
        ("chat", {"stop": ""}, "stop", "1 to 1024 characters"),
        ("chat", {"stop": ["x"] * 17}, "stop", "up to 16"),
        ("chat", {"stop": ["x", ""]}, "stop", "1 to 1024"),
        ("chat", {"stop_token_ids": [9999]}, "stop_token_ids[0]", "from 0 to"),
        ("chat", {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
        ("chat", {"logprobs": 3}, "logprobs", "boolean"),
        ("chat", {"top_logprobs": 2}, "top_logprobs", "needs logprobs"),
        ("chat", {"logit_bias": {"5": 101}}, "logit_bias", "from -100 to 100"),
        ("chat", {"logit_bias": {"9999": 1}}, "logit_bias", 'from "0" to'),
        ("chat", {"logit_bias": {"\u0665": 1}}, "logit_bias", 'from "0" to'),
        ("chat", {"stream_options": {"include_usage": True}}, "stream_options", "stream is true"),
        (
            "chat",
            {"stream": True, "stream_options": {"include_usages": True}},
            "stream_options.include_usages",
            "Did you mean include_usage",
        ),
        ("chat", {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "'assistant'"),
        ("chat", {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "'user'"),
        ("chat", {"messages": [{"role": "user"}]}, "messages[0].content", "required"),
        ("chat", {"messages": ["x"]}, "messages[0]", "messages[0]"),
        (
            "chat",
            {"messages": [{"role": "user", "content": "x", "txt": 1}]},
            "messages[0].txt",
            "content, name, role",
        ),
        ("chat", {"messages": "x"}, "messages", "list"),
        ("chat", {"continue_final_message": True}, "continue_final_message", "assistant"),
        ("chat", {"kv": {"budgets": 3}}, "kv.budgets", "budget"),
        ("chat", {"kv": {"policy": "snapkv", "budget": 0}}, "kv.budget", "whole number"),
        ("chat", {"kv": {"policy": "none"}}, "kv.policy", "snapkv"),
        ("chat", {"kv": {"policy": ["snapkv"]}}, "kv.policy", "snapkv"),
        ("chat", {"kv": 5}, "kv", "recipe's name"),
        ("chat", {"kv": "snapkv"}, "kv.recipe", "snapkv:paper"),
        ("chat", {"kv": {"recipe": "snap"}}, "kv.recipe", "qa, code, chat, auto"),
        ("chat", {"kv": {"report": 1}}, "kv.report", "true, false"),
        ("chat", {"kv": {"decode": {"rule": "h2o", "budget": 64, "every": 0}}}, "kv.decode.every", "1 to"),
        ("chat", {"kv": {"decode": "h3o"}}, "kv.decode.rule", "streaming_llm"),
        ("chat", {"kv": {"policy": "snapkv", "bands": {"0-": 3}}}, "kv.bands", '"2-15": 256'),
        ("chat", {"kv": {"policy": "h2o", "kernel": 5}}, "kv.kernel", "snapkv"),
        ("chat", {"kv": {"policy": "knorm", "spans": [[0, 1]] * 1025}}, "kv.spans", "at most 1024"),
        (
            "chat",
            {"kv": {"policy": "knorm", "bands": {str(i): 9 for i in range(1025)}}},
            "kv.bands",
            "at most 1024",
        ),
        ("chat", {"kv": "snapkv"}, "kv.recipe", 'but a policy: {"policy": "snapkv"}'),
        ("completions", {"kv": {"policy": "snapkv", "window": "question"}}, "kv.window", "token ranges"),
        ("completions", {"kv": {"policy": "knorm", "protect": ["system"]}}, "kv.protect", "no messages"),
        ("completions", {"logprobs": 21}, "logprobs", "from 0 to 20"),
        ("completions", {"logprobs": True}, "logprobs", "integer"),
        ("completions", {"best_of": 3}, "best_of", "value of n"),
        ("completions", {"prompt": 5}, "prompt", "a string, a list of strings"),
        ("completions", {"prompt": ["a", 5]}, "prompt", "list of token ids"),
        ("completions", {"prompt": [1, 99999]}, "prompt[1]", "from 0 to"),
        ("completions", {"prompt": [[1], [2, -1]]}, "prompt[1][1]", "from 0 to"),
        ("completions", {"prompt": ["a"] * 129}, "prompt", "at most 128"),
    ],
)
async def test_a_value_out_of_bounds_is_refused_with_its_field_and_the_valid_values(
    kind: str, fields: dict[str, object], param: str, says: str
) -> None:
    error = await refused(kind, **fields)
    assert error["param"] == param
    assert says in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        ("chat", {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ("chat", {"tool_choice": "auto"}, "tool_choice"),
        ("chat", {"functions": [{}]}, "functions"),
        ("chat", {"response_format": {"type": "json_object"}}, "response_format"),
        ("chat", {"modalities": ["text", "audio"]}, "modalities"),
        ("chat", {"audio": {"voice": "x"}}, "audio"),
        ("chat", {"prediction": {"type": "content"}}, "prediction"),
        ("chat", {"service_tier": "flex"}, "service_tier"),
        ("chat", {"echo": True}, "echo"),
        (
            "chat",
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]},
            "messages[0].tool_calls",
        ),
        (
            "chat",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content",
        ),
        ("completions", {"suffix": "x"}, "suffix"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(
    kind: str, fields: dict[str, object], param: str
) -> None:
    error = await refused(kind, **fields)
    assert error["param"] == param
    assert "support" in error["message"]


async def test_unsupported_fields_that_ask_for_nothing_are_let_through() -> None:
    neutral = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "service_tier": "auto",
    }
    chatted = await accepted_chat(seed=1, **neutral)
    assert without_id(chatted) == without_id(await accepted_chat(seed=1))
    completed = await accepted_completion(seed=1, suffix=None, best_of=1)
    assert without_id(completed) == without_id(await accepted_completion(seed=1))


async def test_accepted_bookkeeping_fields_change_nothing() -> None:
    kept = await accepted_chat(
        seed=1, user="u", metadata={"a": "b"}, store=False, safety_identifier="x", prompt_cache_key="k"
    )
    assert without_id(kept) == without_id(await accepted_chat(seed=1))


async def test_an_unknown_field_is_refused_with_near_matches_and_the_valid_ones() -> None:
    error = await refused("chat", max_token=5)
    assert error["param"] == "max_token"
    assert "Did you mean max_tokens" in error["message"]
    assert "temperature" in error["message"]


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        ("completions", {"prompt": ""}, "prompt"),
        ("completions", {"prompt": []}, "prompt"),
        ("completions", {"prompt": [""]}, "prompt[0]"),
        ("completions", {"prompt": ["hello", ""]}, "prompt[1]"),
        ("completions", {"prompt": [[]]}, "prompt[0]"),
        ("completions", {"prompt": [[5], []]}, "prompt[1]"),
        ("completions", {"prompt": None}, "prompt"),
        ("chat", {"messages": []}, "messages"),
        ("chat", {"messages": [{"role": "user", "content": ""}]}, "messages[0].content"),
        ("chat", {"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ("chat", {"messages": [{"role": "system", "content": ""}]}, "messages[0].content"),
        (
            "chat",
            {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": ""}]},
            "messages[1].content",
        ),
    ],
)
async def test_an_empty_prompt_is_refused_and_the_next_request_is_served(
    kind: str, fields: dict[str, object], param: str
) -> None:
    backend = StubBackend()
    app = application(backend)
    send = chat if kind == "chat" else complete
    response = await send(app, **fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert (await send(app)).status_code == 200


async def test_an_empty_prompt_is_refused_even_where_a_begin_token_would_be_added() -> None:
    backend = StubBackend()
    response = await complete(
        application(backend, make_card(tokenizer=make_tokenizer(begin=True))), prompt=""
    )
    assert response.status_code == 400
    assert backend.requests == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_longer_than_prefill_takes_is_refused_with_both_numbers(stream: bool) -> None:
    """CASES O-4."""
    error = await refused("completions", prompt=[5] * 62, max_tokens=1, stream=stream)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "prompt"
    assert "62" in error["message"]
    assert "60" in error["message"]


async def test_a_prompt_that_fills_the_context_is_refused() -> None:
    backend = StubBackend()
    response = await complete(application(backend, make_card(max_prompt_tokens=1000)), prompt=[5] * 64)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"


async def test_max_tokens_beyond_the_context_is_refused_with_the_numbers() -> None:
    error = await refused("completions", prompt=[5] * 60, max_tokens=5)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "max_tokens"
    for number in ("64", "65", "60", "from 1 to 4"):
        assert number in error["message"]
    assert (await accepted_completion(prompt=[5] * 60, max_tokens=4)).sampling.max_tokens == 4
    assert (await accepted_completion(prompt=[5] * 60)).sampling.max_tokens == 4, "the default shrinks"


async def test_a_wrong_model_is_not_found_and_a_missing_one_is_refused() -> None:
    error = await refused("chat", status=404, model="gpt-4")
    assert error["code"] == "model_not_found"
    assert MODEL in error["message"]
    response = await post(application(StubBackend()), "/v1/completions", {"prompt": "x"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "model"
