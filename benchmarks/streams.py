"""Streaming requests as a client sees them: when each piece of text came, alone or while others run."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import httpx
from transformers import PreTrainedTokenizerBase

from benchmarks.running_service import Service

Seen = TypeVar("Seen")
Kv = dict[str, object]
"""The request's `kv` field: a recipe."""

_JOINED_EVENTS = 3
_JOIN_LIMIT_S = 300.0


@dataclass
class Stream:
    """One streamed completion. `lines` are the raw content events, `times` when each was read (seconds)."""

    sent: float = 0.0
    times: list[float] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    usage: dict[str, object] = field(default_factory=dict)
    joined: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ttft_s(self) -> float:
        """From sending the request to its first text."""
        return self.times[0] - self.sent

    def texts(self) -> list[str]:
        """Text of each content event."""
        return [json.loads(line)["choices"][0]["text"] for line in self.lines]

    async def run(self, client: httpx.AsyncClient, body: dict[str, object]) -> None:
        """Send and read to the end; cancelling it disconnects, which frees the request in the service."""
        self.sent = time.perf_counter()
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != httpx.codes.OK:
                raise SystemExit(f"HTTP {answer.status_code}: {(await answer.aread()).decode()}")
            async for line in answer.aiter_lines():
                now = time.perf_counter()
                if '"choices":[{' in line:  # parsed later: reading must not slow the service on a shared core
                    self.times.append(now)
                    self.lines.append(line.removeprefix("data: "))
                    if len(self.times) == _JOINED_EVENTS:
                        self.joined.set()
                elif '"usage":{' in line:
                    self.usage = json.loads(line.removeprefix("data: "))["usage"]
                elif '"error"' in line:
                    raise SystemExit(f"the stream ended in an error: {line}")


def body(service: Service, ids: Sequence[int], max_tokens: int, kv: Kv, salt: str) -> dict[str, object]:
    """A greedy streamed completion of exactly `max_tokens` tokens. Another `salt` sees no cached prefix."""
    return {
        "model": service.model,
        "prompt": list(ids),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": salt,
        "kv": kv,
    }


def client_of(service: Service) -> httpx.AsyncClient:
    """A client that opens as many connections as requests, without a read limit: prompts may take minutes."""
    limits = httpx.Limits(max_connections=64)
    return httpx.AsyncClient(base_url=service.url, timeout=httpx.Timeout(600, connect=10), limits=limits)


def run_alone(service: Service, request: dict[str, object]) -> Stream:
    """One request by itself, read to its end."""

    async def run() -> Stream:
        stream = Stream()
        async with client_of(service) as client:
            await stream.run(client, request)
        return stream

    return asyncio.run(run())


@dataclass(frozen=True)
class Window:
    """What was seen in a window of time in which all requests were decoding.

    gaps_s: seconds per token, one entry per token (pieces of several tokens share their gap); ttfts_s: of every
    request; tokens_per_s: over all requests; generated: mean tokens a sequence had generated at mid-window.
    """

    gaps_s: list[float]
    ttfts_s: list[float]
    tokens_per_s: float
    generated: float


@dataclass(frozen=True)
class Together(Generic[Seen]):
    """Streams that ran at once, the window in which all decoded, and what `look` saw at its end."""

    streams: list[Stream]
    began: float
    ended: float
    seen: Seen


async def run_together(
    service: Service, requests: Sequence[dict[str, object]], window_s: float, look: Callable[[], Seen]
) -> Together[Seen]:
    """Start all requests; once every one decodes, watch for `window_s`, `look`, then disconnect.

    SystemExit when a request ends or fails before the window does.
    """
    streams = [Stream() for _ in requests]
    async with client_of(service) as client:
        tasks = [
            asyncio.create_task(stream.run(client, each))
            for stream, each in zip(streams, requests, strict=True)
        ]
        all_joined = asyncio.create_task(_all_joined(streams))
        try:
            await asyncio.wait(
                {all_joined, *tasks}, timeout=_JOIN_LIMIT_S, return_when=asyncio.FIRST_COMPLETED
            )
            began = time.perf_counter()
            ended_early, _ = await asyncio.wait(tasks, timeout=window_s)
            ended = time.perf_counter()
            for task in ended_early:
                task.result()
            if ended_early or not all_joined.done():
                raise SystemExit("the requests did not all decode at once long enough to be measured")
            seen = await asyncio.to_thread(look)
        finally:
            all_joined.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, all_joined, return_exceptions=True)
    return Together(streams, began, ended, seen)


async def _all_joined(streams: Sequence[Stream]) -> None:
    for stream in streams:
        await stream.joined.wait()


def observe(together: Together[Seen], tokenizer: PreTrainedTokenizerBase) -> Window:
    """Gaps and rates of the window. Tokens of a piece are counted by encoding its text (usually one)."""
    streams, began, ended = together.streams, together.began, together.ended
    gaps: list[float] = []
    generated = 0.0
    for stream in streams:
        counts = [max(1, len(tokenizer.encode(text, add_special_tokens=False))) for text in stream.texts()]
        for i in range(1, len(counts)):
            if began < stream.times[i] <= ended:
                gaps += [(stream.times[i] - stream.times[i - 1]) / counts[i]] * counts[i]
        middle = (began + ended) / 2
        generated += sum(count for count, at in zip(counts, stream.times, strict=True) if at <= middle)
    rate = len(gaps) / (ended - began)
    return Window(gaps, [stream.ttft_s for stream in streams], rate, generated / len(streams))
