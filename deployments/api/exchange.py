"""One generating request from its body to the last byte of its answer."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deployments.api import sse
from deployments.api.answer import Answer
from deployments.api.backend import Backend
from deployments.api.body import check_model, drop_neutral, drop_neutral_in_messages, parse_object, read_body
from deployments.api.card import ModelCard
from deployments.api.chat import ChatAnswer
from deployments.api.completions import CompletionAnswer
from deployments.api.errors import ApiError, ClientDisconnected, Outcome, SlowReader, api_error
from deployments.api.metrics import ApiMetrics, RequestMeter
from deployments.api.plan import Plan
from deployments.api.pump import EventPump, PumpLimits
from deployments.api.schemas import (
    CHAT_UNSUPPORTED,
    COMPLETION_UNSUPPORTED,
    ChatRequest,
    CompletionRequest,
)
from deployments.api.settings import ApiSettings
from deployments.api.validate import plan_chat, plan_completion

_log = logging.getLogger("kvtide.api")


@dataclass(frozen=True)
class Edge:
    """What every request of one application needs."""

    backend: Backend
    card: ModelCard
    settings: ApiSettings
    metrics: ApiMetrics


@dataclass(frozen=True)
class Endpoint:
    """What differs between the two generating endpoints. `plan` blocks and runs in a thread."""

    name: str
    plan: Callable[[ModelCard, ApiSettings, bytes], Plan]
    answer: type[Answer]


def _read_chat(card: ModelCard, settings: ApiSettings, raw: bytes) -> Plan:
    fields = drop_neutral_in_messages(drop_neutral(parse_object(raw), CHAT_UNSUPPORTED))
    return plan_chat(card, settings, check_model(ChatRequest, fields, frozenset(CHAT_UNSUPPORTED)))


def _read_completion(card: ModelCard, settings: ApiSettings, raw: bytes) -> Plan:
    fields = drop_neutral(parse_object(raw), COMPLETION_UNSUPPORTED)
    known = frozenset(COMPLETION_UNSUPPORTED)
    return plan_completion(card, settings, check_model(CompletionRequest, fields, known))


CHAT = Endpoint("chat", _read_chat, ChatAnswer)
COMPLETIONS = Endpoint("completions", _read_completion, CompletionAnswer)


class Exchange(Response):
    """A response that works when it is sent: only there it can choose its status and see the client leave.

    An error before the first event is raised and becomes an HTTP status; later it is an error event, after
    which the stream ends without [DONE]. A stream that is silent for `keepalive_after_s` answers 200 early
    and sends comments.
    """

    def __init__(self, edge: Edge, endpoint: Endpoint, request_id: str) -> None:
        # Not the base's __init__: there is no content to render and no header to compute.
        self.background = None
        self._edge = edge
        self._endpoint = endpoint
        self._request_id = request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read, run, answer; whatever happens, the meter finishes and the backend's streams are closed."""
        meter = RequestMeter(self._edge.metrics, self._endpoint.name, self._request_id)
        outcome = Outcome.FAILED
        try:
            plan = await self._plan(HttpRequest(scope, receive))
            meter.plan = plan
            outcome = await _unless_disconnected(receive, self._answer(plan, meter, scope, receive, send))
        except (ClientDisconnected, asyncio.CancelledError) as left:
            outcome = Outcome.DISCONNECTED
            if isinstance(left, asyncio.CancelledError):
                raise
        except Exception as raised:
            outcome = api_error(raised).outcome
            raise
        finally:
            meter.finish(outcome)

    async def _plan(self, request: HttpRequest) -> Plan:
        settings = self._edge.settings
        declared = request.headers.get("content-length")
        try:
            raw = await read_body(request.stream(), declared, settings.max_body_bytes)
        except ClientDisconnect:
            raise ClientDisconnected from None
        return await asyncio.to_thread(self._endpoint.plan, self._edge.card, settings, raw)

    async def _answer(
        self, plan: Plan, meter: RequestMeter, scope: Scope, receive: Receive, send: Send
    ) -> Outcome:
        settings = self._edge.settings
        limits = PumpLimits(
            settings.stream_buffer_events,
            settings.slow_reader_timeout_s,
            settings.deadline_s + settings.deadline_grace_s,
            settings.idle_timeout_s,
        )
        answer = self._endpoint.answer(self._edge.card, plan, int(time.time()))
        async with EventPump(self._edge.backend, plan.requests, limits, meter.observe) as pump:
            if plan.stream:
                return await self._stream(pump, answer, sse.SseWriter(send, settings.slow_reader_timeout_s))
            async for batch in pump:
                answer.collect(batch.prompt, batch.events)
        whole = Response(sse.to_json(answer.body()), media_type="application/json")
        await whole(scope, receive, send)
        return Outcome.OK

    async def _stream(self, pump: EventPump, answer: Answer, writer: sse.SseWriter) -> Outcome:
        try:
            await self._copy(pump, answer, writer)
        except (
            Exception
        ) as raised:  # the status is gone; without an error event the end would look like success
            if not writer.started:
                raise
            error = api_error(raised)
            if error.status == 500:
                _log.exception("request %s failed in mid-stream", self._request_id)
            await _last_words(writer, error)
            return error.outcome
        return Outcome.OK

    async def _copy(self, pump: EventPump, answer: Answer, writer: sse.SseWriter) -> None:
        settings = self._edge.settings
        patience_s = settings.keepalive_after_s
        while True:
            if not await pump.readable(patience_s):
                await writer.write(sse.KEEPALIVE)
                patience_s = settings.keepalive_interval_s
                continue
            batch = await anext(pump, None)
            if batch is None:
                break
            patience_s = settings.keepalive_interval_s
            chunks = answer.chunks(batch.prompt, batch.events)
            if chunks:
                await writer.write(b"".join(sse.event(chunk) for chunk in chunks))
        if answer.plan.include_usage:
            await writer.write(sse.event(answer.usage_chunk()))
        await writer.write(sse.DONE)
        await writer.close()


async def _last_words(writer: sse.SseWriter, error: ApiError) -> None:
    """An error event, then the end; for a client that takes nothing the response never completes."""
    try:
        slow = error.outcome is Outcome.SLOW_READER
        await writer.write(sse.event(error.body()), sse.LAST_WORD_S if slow else None)
        await writer.close()
    except SlowReader:
        _log.warning("client did not take its error event")


async def _unless_disconnected(receive: Receive, work: Coroutine[None, None, Outcome]) -> Outcome:
    """The result of `work`, or `ClientDisconnected` after cancelling it as soon as the client has left."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnected
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
