"""The small parts below the services: shared room, blocking calls, the engine's thread, polling."""

from __future__ import annotations

import asyncio
import random
import threading
import time

import pytest
from service_stand import CONTEXT, ask, model, stand

from deployments.blocking import BlockingCalls, outlast
from deployments.loop import EngineLoop
from deployments.room import Room
from deployments.shipping import choose_transport, open_endpoint, poll_for_ever, staging_bytes
from engine.errors import GenerationFailed
from kv_tiers.transfer.local import LocalEndpoint, LocalFabric
from policies import load_policy, make_recipe
from policies.snapkv import SnapKV


@pytest.mark.parametrize("seed", range(20))
async def test_room_is_never_overdrawn_serves_in_order_and_comes_back(seed):
    chance = random.Random(seed)
    room, order, holders = Room(10), [], 0

    async def hold(index: int, nbytes: int) -> None:
        nonlocal holders
        await room.take(nbytes)
        holders += 1
        order.append(index)
        try:
            assert room.held <= 10 or holders == 1
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
        finally:
            holders -= 1
            room.give(nbytes)

    tasks = [asyncio.create_task(hold(i, chance.choice([1, 3, 7, 10, 25]))) for i in range(40)]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        if chance.random() < 0.3:
            chance.choice(tasks).cancel()
    for task in tasks:
        assert task.cancelled() or task.exception() is None
    assert room.held == 0 and order == sorted(order)
    await room.take(10)


async def test_room_granted_to_someone_who_leaves_in_the_same_moment_comes_back():
    room = Room(10)
    await room.take(10)
    waiting = asyncio.create_task(room.take(5))
    await asyncio.sleep(0)
    room.give(10)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert waiting.cancelled() and room.held == 0


async def test_a_cancelled_call_is_waited_for_however_often_it_is_cancelled_and_its_result_discarded():
    calls = BlockingCalls("test", 1)
    go, begun, stopped, discarded = threading.Event(), threading.Event(), [], []

    def work() -> str:
        begun.set()
        go.wait(5)
        return "result"

    running = asyncio.create_task(
        calls.run(work, stop=lambda: stopped.append(True), discard=discarded.append)
    )
    behind = asyncio.create_task(calls.run(lambda: discarded.append("ran")))
    while not begun.is_set():
        await asyncio.sleep(0.001)
    behind.cancel()
    for _ in range(3):
        running.cancel()
        await asyncio.sleep(0.005)
    assert behind.cancelled(), "what has not begun is dropped at once"
    assert not running.done() and stopped == [True] and discarded == []
    go.set()
    await asyncio.gather(running, return_exceptions=True)
    assert running.cancelled() and discarded == ["result"]
    await calls.close()


async def test_blocking_calls_pass_errors_on_and_posts_are_done_before_closing():
    calls, done = BlockingCalls("test", 1), []

    def fail() -> None:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        await calls.run(fail)
    for i in range(5):
        calls.post(lambda i=i: done.append(i))
    await calls.close()
    assert done == [0, 1, 2, 3, 4]


async def test_outlast_says_whether_it_was_cancelled():
    future = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(outlast(future))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    future.set_result(None)
    assert await task is True
    assert await outlast(future) is False


def test_the_engine_thread_counts_failures_until_a_step_brings_results():
    script = ["fail", "nothing", "fail", "result", "fail", "nothing", "fail", "fail"]
    seen: list[object] = []
    broken: list[bool] = []
    done = threading.Event()

    def step() -> list[int]:
        broken.append(loop.broken)
        word = script.pop(0)
        if not script:
            done.set()
        if word == "fail":
            raise RuntimeError("no")
        return [1] if word == "result" else []

    gate = threading.Event()
    loop = EngineLoop(
        "test", step, lambda: gate.is_set() and bool(script), seen.append, lambda e: seen.append(str(e)), 1
    )
    gate.set()
    loop.wake()
    assert done.wait(5)
    loop.stop()
    assert seen == ["no", "no", [1], "no", "no", "no"]
    assert not any(broken) and loop.broken


class Picky(SnapKV):
    """Cannot cope with prompts of 75 tokens."""

    def score(self, layer):
        assert layer.keys.shape[1] != 75, "not 75"
        return super().score(layer)


async def test_a_prompt_that_its_policy_cannot_take_fails_alone():
    recipe = make_recipe(policy=load_policy(f"{__name__}:Picky"), budget=24)
    async with stand(chunk_tokens=512) as s:
        asked = [ask(f"r{tokens}", tokens, max_tokens=1, recipe=recipe) for tokens in (60, 75, 80)]
        calls = [s.prefill.prefill(one) for one in asked]
        good, bad, fine = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(bad, GenerationFailed) and "not 75" in str(bad)
        assert good.prompt.prompt_tokens == 60 and fine.prompt.prompt_tokens == 80


@pytest.mark.parametrize("sound", [True, False])
def test_an_idle_engine_whose_books_are_wrong_is_broken(sound: bool):
    checked = threading.Event()

    def check() -> None:
        checked.set()
        assert sound, "a page is lost"

    loop = EngineLoop("test", list, lambda: False, lambda _: None, lambda _: None, 1, check)
    assert checked.wait(5)
    loop.wake()
    time.sleep(0.1)
    assert loop.alive and loop.broken is not sound
    loop.stop()


async def test_polling_is_woken_early_hears_of_ends_and_can_be_cancelled():
    endpoint = LocalEndpoint("a", 1 << 20, fabric=LocalFabric())
    wake, ends = asyncio.Event(), []
    task = asyncio.create_task(poll_for_ever(endpoint, wake, lambda: ends.append(1)))
    await asyncio.sleep(0)
    lease = endpoint.reserve(100)
    endpoint.publish(lease, request_id="r", attempt=0, fingerprint=b"f", checksum=0, ttl_s=0.01)
    wake.set()
    async with asyncio.timeout(2):
        while not ends:
            await asyncio.sleep(0.001)
    assert endpoint.open_tickets == 0
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()


def test_staging_holds_two_contexts_unless_asked_otherwise():
    spec = model().spec
    assert staging_bytes(spec, CONTEXT, None) == 256 << 20
    assert staging_bytes(spec, 1 << 20, None) > 2 * spec.kv_bytes_per_token << 20
    assert staging_bytes(spec, CONTEXT, 0.5) == 512 << 20


def test_without_nixl_survivors_travel_by_reply_unless_nixl_is_demanded(monkeypatch):
    monkeypatch.setattr("deployments.shipping.unavailable", lambda: "no such library")
    with pytest.raises(RuntimeError, match="no such library"):
        choose_transport("nixl")
    assert choose_transport("auto") == choose_transport("local") == "local"
    assert isinstance(open_endpoint("x", 1 << 20, "local"), LocalEndpoint)
    monkeypatch.setattr("deployments.shipping.unavailable", lambda: None)
    assert choose_transport("auto") == choose_transport("nixl") == "nixl"
    assert choose_transport("local") == "local"
