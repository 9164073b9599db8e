"""Streams that end early, break off, stall, are left or are not read: always visible, never leaking."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
import uvicorn
from api_stub import (
    MODEL,
    StubBackend,
    application,
    chat,
    client,
    complete,
    endless,
    events_of,
    fail,
    prompt_event,
    say,
    say_hello,
    token_events,
    until,
)
from fastapi import FastAPI

from engine.errors import ContextOverflow, InvalidRequest, Overloaded, ReplicaLost, RequestAborted
from engine.request import Event, FinishReason, GenerationRequest, TokenEvent

PIECE = TokenEvent(0, 0, 5, "a")
STOP = FinishReason.STOP


async def silent(request: GenerationRequest) -> AsyncGenerator[list[Event], None]:
    await asyncio.Event().wait()
    yield []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("raised", "status", "code"),
    [
        (InvalidRequest("no", "messages"), 400, "invalid_value"),
        (ContextOverflow("260 is more than 256"), 400, "context_length_exceeded"),
        (Overloaded("full", 0.2), 429, "overloaded"),
        (RequestAborted("superseded"), 503, "aborted"),
        (ReplicaLost("gone"), 502, "replica_lost"),
        (RuntimeError("secret detail"), 500, "internal_error"),
    ],
)
async def test_an_error_before_the_first_event_has_its_http_status(
    raised: Exception, status: int, code: str, stream: bool
) -> None:
    """CASES O-4: nothing begins where prefill refuses."""
    backend = StubBackend(fail(raised))
    response = await chat(application(backend), stream=stream)
    assert response.status_code == status
    assert response.json()["error"]["code"] == code
    assert "secret" not in response.text
    assert backend.open == 0
    if status in (429, 503):
        assert response.headers["retry-after"] == "1"


async def test_an_error_in_mid_stream_is_an_error_event_without_done() -> None:
    backend = StubBackend(fail(RuntimeError("secret detail"), [PIECE]))
    response = await chat(application(backend), stream=True)
    assert response.status_code == 200
    *_, text, last = events_of(response)
    assert text["choices"][0]["delta"] == {"content": "a"}
    assert last["error"]["code"] == "internal_error"
    assert "[DONE]" not in response.text
    assert "secret" not in response.text
    assert backend.open == 0


async def test_an_error_after_the_first_event_of_a_whole_answer_is_a_status() -> None:
    response = await chat(application(StubBackend(fail(ReplicaLost("gone"), [PIECE]))))
    assert response.status_code == 502


@pytest.mark.parametrize("unfinished", [[], [[PIECE]]])
async def test_a_backend_stream_that_just_ends_is_an_error(unfinished: list[list[Event]]) -> None:
    app = application(StubBackend(say(*unfinished)))
    response = await chat(app)
    assert response.status_code == 502
    assert response.json()["error"]["code"] == "incomplete_stream"
    last = events_of(await chat(app, stream=True))[-1]
    assert last["error"]["code"] == "incomplete_stream"


async def test_one_of_two_choices_unfinished_is_an_error() -> None:
    end = TokenEvent(0, 0, 5, "a", finish_reason=STOP)
    assert (await chat(application(StubBackend(say([end]))), n=2)).status_code == 502


async def test_an_error_of_one_prompt_ends_the_others() -> None:
    async def script(request: GenerationRequest) -> AsyncGenerator[list[Event], None]:
        stream = endless(request) if request.prompt == (10,) else fail(ReplicaLost("x"), [PIECE])(request)
        async for batch in stream:
            yield batch

    backend = StubBackend(script)
    response = await complete(application(backend), prompt=[[10], [11]])
    assert response.status_code == 502
    assert backend.open == 0


async def test_a_silent_backend_is_given_up_at_the_deadline() -> None:
    backend = StubBackend(silent)
    response = await chat(application(backend, deadline_s=0.05, deadline_grace_s=0))
    assert response.status_code == 504
    assert backend.open == 0


async def test_a_backend_that_falls_silent_is_given_up() -> None:
    async def script(request: GenerationRequest) -> AsyncGenerator[list[Event], None]:
        yield [prompt_event(request), PIECE]
        await asyncio.Event().wait()

    response = await chat(application(StubBackend(script), idle_timeout_s=0.05), stream=True)
    assert events_of(response)[-1]["error"]["code"] == "timeout"


async def test_a_long_wait_for_the_first_event_is_bridged_by_comments() -> None:
    async def script(request: GenerationRequest) -> AsyncGenerator[list[Event], None]:
        await asyncio.sleep(0.1)
        yield [prompt_event(request)]
        yield list(token_events(request, "hello"))

    fast = {"keepalive_after_s": 0.01, "keepalive_interval_s": 0.01}
    response = await chat(application(StubBackend(script), **fast), stream=True)
    assert response.text.startswith(": ")
    assert events_of(response)[-1] == "[DONE]"


async def test_an_error_after_the_first_comment_is_an_error_event() -> None:
    async def script(request: GenerationRequest) -> AsyncGenerator[list[Event], None]:
        await asyncio.sleep(0.05)
        raise Overloaded("full")
        yield []

    response = await chat(application(StubBackend(script), keepalive_after_s=0.01), stream=True)
    assert response.status_code == 200
    (error,) = events_of(response)
    assert error["error"]["code"] == "overloaded"


@asynccontextmanager
async def serving(app: FastAPI) -> AsyncIterator[int]:
    """uvicorn on a free port of this machine."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
    running = asyncio.create_task(server.serve([listener]))
    try:
        await until(lambda: server.started)
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        server.force_exit = True
        await running
        listener.close()


async def get_ok(port: int) -> bool:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
        return (await http.get("/health")).status_code == 200


async def open_request(port: int, *, stream: bool, receive_buffer: int | None = None) -> socket.socket:
    """A connection that has sent a chat request; nothing is read from it."""
    flag = b"true" if stream else b"false"
    body = b'{"model":"tiny","messages":[{"role":"user","content":"hi"}],"stream":%s}' % flag
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(connection, ("127.0.0.1", port))
    await loop.sock_sendall(connection, head + body)
    return connection


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_while_waiting_closes_the_backend(stream: bool) -> None:
    backend = StubBackend(silent)
    async with serving(application(backend)) as port:
        connection = await open_request(port, stream=stream)
        await until(lambda: backend.open == 1)
        connection.close()
        await until(lambda: backend.open == 0)


async def test_a_client_that_leaves_in_mid_stream_closes_the_backend() -> None:
    backend = StubBackend(endless)
    app = application(backend)
    async with serving(app) as port:
        connection = await open_request(port, stream=True)
        await asyncio.get_running_loop().sock_recv(connection, 1000)
        connection.close()
        await until(lambda: backend.open == 0)
        await until(lambda: b'outcome="disconnected"} 1.0' in app.state.edge.metrics.render())
        assert b"kvtide_requests_in_flight 0.0" in app.state.edge.metrics.render()


async def test_many_clients_that_leave_together_leave_nothing_running() -> None:
    backend = StubBackend(endless)
    async with serving(application(backend)) as port:
        connections = [await open_request(port, stream=True) for _ in range(50)]
        await until(lambda: backend.open == 50)
        for connection in connections:
            connection.close()
        await until(lambda: backend.open == 0)


async def test_clients_that_never_read_are_cut_off_and_others_are_served() -> None:
    produced = 0

    async def script(request: GenerationRequest) -> AsyncGenerator[list[Event], None]:
        nonlocal produced
        async for batch in endless(request):
            produced += 1
            yield batch

    backend = StubBackend(script)
    app = application(backend, stream_buffer_events=4, slow_reader_timeout_s=0.3)
    async with serving(app) as port:
        connections = [await open_request(port, stream=True, receive_buffer=4096) for _ in range(20)]
        await until(lambda: backend.open == 20)
        assert await get_ok(port)
        await until(lambda: backend.open == 0)
        await until(lambda: b'outcome="slow_reader"} 20.0' in app.state.edge.metrics.render())
        assert produced < 20 * 1000, "kernel buffers fill, then nothing more is generated"
        backend.script = say_hello
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            body = {"model": MODEL, "prompt": "x", "stream": True}
            assert events_of(await http.post("/v1/completions", json=body))[-1] == "[DONE]"
        for connection in connections:
            connection.close()


async def test_a_slow_reader_that_wakes_up_late_sees_no_clean_end() -> None:
    backend = StubBackend(endless)
    app = application(backend, stream_buffer_events=4, slow_reader_timeout_s=0.1)
    async with serving(app) as port:
        connection = await open_request(port, stream=True, receive_buffer=4096)
        await until(lambda: b'outcome="slow_reader"} 1.0' in app.state.edge.metrics.render())
        received = bytearray()
        while piece := await asyncio.get_running_loop().sock_recv(connection, 1 << 20):
            received += piece
        connection.close()
    assert b"[DONE]" not in received
    assert not received.endswith(b"0\r\n\r\n") or b'"slow_reader"' in received


async def test_a_stream_arrives_while_it_is_made() -> None:
    gate = asyncio.Event()

    async def script(request: GenerationRequest) -> AsyncGenerator[list[Event], None]:
        first, *rest = token_events(request, "hello world")
        yield [prompt_event(request), first]
        await gate.wait()
        yield list(rest)

    async with serving(application(StubBackend(script))) as port:
        body = {"model": MODEL, "prompt": "x", "stream": True}
        async with (
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http,
            http.stream("POST", "/v1/completions", json=body) as response,
        ):
            lines = response.aiter_lines()
            assert '"hello"' in await anext(lines)
            gate.set()
            assert [line async for line in lines][-2] == "data: [DONE]"


async def test_a_cancelled_handler_closes_the_backend() -> None:
    backend = StubBackend(silent)
    app = application(backend)

    async def ask() -> None:
        async with client(app) as http:
            await http.post("/v1/completions", json={"model": MODEL, "prompt": "x"})

    asking = asyncio.create_task(ask())
    await until(lambda: backend.open == 1)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert backend.open == 0
