"""The buffer between backend and client, and the check that events make whole choices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from api_stub import StubBackend, application, chat, endless, events_of, prompt_event, say_hello, until

from deployments.api.errors import BrokenStream, SlowReader
from deployments.api.progress import Progress
from deployments.api.pump import EventPump, PumpLimits
from engine.request import Event, FinishReason, GenerationRequest, PromptEvent, SamplingParams, TokenEvent

PIECE = TokenEvent(0, 0, 5, "a")
STOP = FinishReason.STOP


def asked(**sampling: int) -> GenerationRequest:
    return GenerationRequest("r", (5, 6), SamplingParams(**sampling))  # type: ignore[arg-type]


def limits(events: int = 8, slow_s: float = 5, first_s: float = 5, idle_s: float = 5) -> PumpLimits:
    return PumpLimits(events, slow_s, first_s, idle_s)


@pytest.mark.parametrize(
    "events",
    [
        [PIECE],
        [PromptEvent(2, 0, 2, 0, 0, "full"), PromptEvent(2, 0, 2, 0, 0, "full")],
        [PromptEvent(2, 0, 2, 0, 0, "full"), TokenEvent(0, 1, 5, "gap")],
        [PromptEvent(2, 0, 2, 0, 0, "full"), PIECE, PIECE],
        [PromptEvent(2, 0, 2, 0, 0, "full"), TokenEvent(1, 0, 5, "no such choice")],
        [
            PromptEvent(2, 0, 2, 0, 0, "full"),
            TokenEvent(0, 0, 5, "", None, STOP),
            TokenEvent(0, 1, 5, "late"),
        ],
    ],
)
def test_events_that_make_no_whole_choice_are_refused(events: list[Event]) -> None:
    progress = Progress(asked())
    with pytest.raises(BrokenStream):
        progress.accept(events)


def test_missing_logprobs_are_refused() -> None:
    with pytest.raises(BrokenStream):
        Progress(asked(logprobs=1)).accept([PromptEvent(2, 0, 2, 0, 0, "full"), PIECE])


def test_whole_choices_are_accepted() -> None:
    progress = Progress(asked(n=2))
    progress.accept([PromptEvent(2, 0, 2, 0, 0, "full"), TokenEvent(1, 0, 5, "", None, STOP)])
    assert not progress.finished
    progress.accept([PIECE, TokenEvent(0, 1, 5, "", None, STOP)])
    assert progress.finished
    progress.end()


async def test_the_backend_is_read_no_further_than_the_buffer_allows() -> None:
    produced = 0

    async def script(request: GenerationRequest) -> AsyncGenerator[list[Event], None]:
        nonlocal produced
        async for batch in endless(request):
            produced += 1
            yield batch

    backend = StubBackend(script)
    async with EventPump(backend, [asked()], limits(events=8)) as pump:
        await until(lambda: produced >= 9)
        for _ in range(50):
            await asyncio.sleep(0)
        assert produced == 9, "eight are held, one is in hand"
        await anext(pump)
        await until(lambda: produced >= 10)
        assert produced == 10
    assert backend.open == 0


async def test_a_buffer_that_stays_full_closes_the_backend_and_is_an_error_for_the_reader() -> None:
    backend = StubBackend(endless)
    async with EventPump(backend, [asked()], limits(events=4, slow_s=0.02)) as pump:
        await until(lambda: backend.open == 1)
        await until(lambda: backend.open == 0)
        read = 0
        with pytest.raises(SlowReader):
            async for _ in pump:
                read += 1
    assert read == 4, "what was held still arrives"


async def test_a_steady_slow_reader_is_not_cut_off() -> None:
    async def script(request: GenerationRequest) -> AsyncGenerator[list[Event], None]:
        yield [prompt_event(request)]
        for i in range(40):
            yield [TokenEvent(0, i, 5, "a", None, STOP if i == 39 else None)]

    async with EventPump(StubBackend(script), [asked()], limits(events=1, slow_s=1)) as pump:
        read = 0
        async for _ in pump:
            read += 1
            await asyncio.sleep(0.03)
    assert read == 41


async def test_leaving_early_closes_every_backend_stream() -> None:
    backend = StubBackend(endless)
    async with EventPump(backend, [asked(), asked(), asked()], limits()) as pump:
        await anext(pump)
    assert backend.open == 0


async def test_a_finished_request_does_not_wait_for_the_backends_last_word() -> None:
    async def script(request: GenerationRequest) -> AsyncGenerator[list[Event], None]:
        async for batch in say_hello(request):
            yield batch
        await asyncio.Event().wait()

    backend = StubBackend(script)
    assert events_of(await chat(application(backend), stream=True))[-1] == "[DONE]"
    assert backend.open == 0
