"""Engines and pollers that fail, and services that close: every request hears of it, and health checks see it."""

from __future__ import annotations

import asyncio

import pytest
from service_stand import FULL, SNAPKV, ask, expected, hold, stand

from deployments.shipping import poll_for_ever
from engine.errors import GenerationFailed, ReplicaLost


def _fail_steps(engine, times: int) -> None:
    step, left = engine.model.forward, [times]

    class Failing:
        spec = engine.model.spec

        def forward(self, *args, **options):
            if left[0]:
                left[0] -= 1
                raise RuntimeError("a kernel failed")
            return step(*args, **options)

    engine.model = Failing()


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_failed_step_fails_its_requests_and_the_next_one_works(side, caplog):
    async with stand() as s:
        engine = getattr(s, side).engine
        _fail_steps(engine, 1)
        with pytest.raises(GenerationFailed, match="RuntimeError"):
            await s.run(ask("first", n=2))
        await s.at_rest()
        s.prefill.health(), s.decode.health()
        assert (await s.run(ask("second"))).tokens == expected(ask("second")).tokens


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_three_failed_steps_in_a_row_make_the_replica_unhealthy_until_one_works(side, caplog):
    async with stand() as s:
        service = getattr(s, side)
        _fail_steps(service.engine, 3)
        for i in range(3):
            service.health()
            with pytest.raises(GenerationFailed):
                await s.run(ask(f"r{i}"))
        with pytest.raises(RuntimeError, match=f"{side} engine"):
            service.health()
        await s.run(ask("well"))
        service.health()


async def test_a_failure_after_prompts_were_finished_reaches_all_of_them(monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError("selection failed")

    async with stand() as s:
        with monkeypatch.context() as patch:
            patch.setattr("engine.prefill.select_survivors", fail)
            runs = [s.run(ask(f"r{i}", 20)) for i in range(3)]
            ends = await asyncio.wait_for(asyncio.gather(*runs, return_exceptions=True), 5)
        assert [type(end) for end in ends] == [GenerationFailed] * 3
        await s.run(ask())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_an_engine_beyond_repair_fails_its_requests_and_takes_no_more(side, caplog):
    def fail_all():
        raise AssertionError("books are wrong")

    with pytest.raises(RuntimeError, match="engine"):
        async with stand(attempts=1) as s:
            service = getattr(s, side)
            _fail_steps(service.engine, 1)
            fail_all_well, service.engine.fail_all = service.engine.fail_all, fail_all
            with pytest.raises(GenerationFailed):
                await s.run(ask())
            await s.until(lambda: not service._loop.alive)
            service.engine.fail_all = fail_all_well
            service.engine.fail_all()
            with pytest.raises(ReplicaLost):
                await s.run(ask("next"))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_poller_that_died_shows_in_health(side):
    async with stand() as s:
        poller = getattr(s, side)._poller
        poller.cancel()
        await asyncio.gather(poller, return_exceptions=True)
        with pytest.raises(RuntimeError, match="polled"):
            getattr(s, side).health()
        service = getattr(s, side)
        service._poller = asyncio.create_task(poll_for_ever(service.endpoint, asyncio.Event(), lambda: None))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_closing_ends_what_runs_with_an_error_and_frees_it():
    with pytest.raises(
        RuntimeError, match="engine"
    ):  # from the stand, which wants healthy services at its end
        async with stand() as s:
            let_go = await hold(s, "pages")
            runs = [asyncio.create_task(s.run(ask(f"r{i}", recipe=FULL if i else SNAPKV))) for i in range(3)]
            await s.until(lambda: s.decode.engine.waiting == 3)
            closing = asyncio.create_task(s.decode.close())
            ends = await asyncio.wait_for(asyncio.gather(*runs, return_exceptions=True), 5)
            assert [type(end) for end in ends] == [ReplicaLost] * 3
            await closing
            let_go()
            waiting = asyncio.create_task(s.prefill.prefill(ask()))
            await asyncio.sleep(0)
            await s.prefill.close()
            with pytest.raises(ReplicaLost):
                await waiting
            with pytest.raises(ReplicaLost):
                await s.prefill.prefill(ask())
            with pytest.raises(ReplicaLost):
                await s.run(ask())
