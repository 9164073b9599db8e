"""The Redis tier over a real server that misbehaves: gone, frozen, slow, full, forgetful, or another run."""

from __future__ import annotations

import asyncio
import random
import time

import pytest
from redis_server import RedisServer, shared_server
from redis_stand import KEYS, LARGE, buffers, get, proxy, put, room, running, until

from kv_tiers.redis_values import value_name
from kv_tiers.tier import Fetched, Stored

A, B, C, D = KEYS[:4]
HIT, MISS, CORRUPT, FAILED = Fetched.HIT, Fetched.MISS, Fetched.CORRUPT, Fetched.FAILED
STORED, NO_ROOM = Stored.STORED, Stored.NO_ROOM


@pytest.fixture
def server():
    server = shared_server()
    with server.client() as client:
        client.flushall()
    return server


@pytest.fixture
def own_server(tmp_path):
    server = RedisServer(tmp_path)
    yield server
    server.stop()


class Timed:
    def __enter__(self):
        self.begin = time.monotonic()
        return self

    def __exit__(self, *_):
        self.seconds = time.monotonic() - self.begin


async def cancelled_after(call, seconds):
    task = asyncio.ensure_future(call)
    await asyncio.sleep(seconds)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# Cancelled and late commands


async def test_o26_a_cancelled_get_never_answers_the_next_one(server, tmp_path):
    async with running(server.url) as straight:
        await put(straight, [A, B])
        async with (
            proxy(server, str(tmp_path / "slow"), delay_s=0.1) as url,
            running(url, connections=2) as tier,
        ):
            into = buffers(1)
            await cancelled_after(tier.get([A], into), 0.02)
            into[0][:] = bytes(len(into[0]))
            assert await get(tier, [B] * 4) == [HIT] * 4
            await cancelled_after(tier.get([A, B], buffers(2)), 0.12)
            assert await get(tier, [B, C, A]) == [HIT, MISS, HIT]
            assert not any(into[0]), "and nothing is written into what the caller has back"
        # A hundred times, without the proxy's patience.
        async with running(server.url, connections=2) as tier:
            for number in range(100):
                into = buffers(1)
                task = asyncio.ensure_future(tier.get([A], into))
                await asyncio.sleep(0.0001 * (number % 10))
                task.cancel()
                await asyncio.wait([task])
                found = bytes(into[0])
                assert await get(tier, [B]) == [HIT]
                assert bytes(into[0]) == found


async def test_o26_a_cancelled_small_command_never_answers_the_next_one(server, tmp_path):
    """Those go through redis-py, and what comes back names no key."""
    async with running(server.url) as straight:
        await put(straight, [A])
    async with proxy(server, str(tmp_path / "slow"), delay_s=0.1) as url, running(url, connections=2) as tier:
        for number in range(10):
            await cancelled_after(tier._client.headers([A]), 0.005 * number)
            assert await tier._client.headers([B]) == [None]
        (found,) = await tier._client.headers([A])
        assert found is not None


async def test_a_cancelled_put_leaves_nothing_that_anybody_sees(server, tmp_path):
    async with proxy(server, str(tmp_path / "slow"), delay_s=0.05) as url, running(url, 4, LARGE) as tier:
        for delay in (0.02, 0.06, 0.12, 0.2):
            await cancelled_after(put(tier, [A], LARGE), delay)
            assert tier.longest_run([A]) == 0
            tier.check()
        assert await get(tier, [A], LARGE) == [MISS]
        with server.client() as client:
            await until(lambda: not client.exists(value_name(A)))
        assert await put(tier, [A], LARGE) == [STORED] and await get(tier, [A], LARGE) == [HIT]


async def test_a_late_answer_is_a_failure_within_the_deadline_and_heard_by_nobody(server, tmp_path):
    async with running(server.url) as straight:
        await put(straight, [A, B])
    async with proxy(server, str(tmp_path / "slow"), delay_s=0.3) as url:
        async with running(url, deadline_s=0.1, breaker_failures=100) as tier:
            for _ in range(3):
                into = buffers(2)
                with Timed() as timed:
                    assert await tier.get([A, B], into) == [FAILED, FAILED]
                assert timed.seconds < 1.5
            await asyncio.sleep(0.3)
            assert not any(into[0]) and not any(into[1])


# Gone, frozen, back


async def load(tier, stop, delays, answers):
    """Gets and puts until told to stop; hits are compared."""
    chance = random.Random(id(tier))
    while not stop.is_set():
        begin = time.monotonic()
        keys = chance.sample(KEYS[:12], 3)
        answers.update(await (get(tier, keys) if chance.random() < 0.6 else put(tier, keys)))
        delays.append(time.monotonic() - begin)
        await asyncio.sleep(0.002)


@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_o27_redis_goes_away_under_load_and_comes_back(own_server, how):
    deadline_s = 0.3
    async with running(own_server.url, 8, deadline_s=deadline_s) as tier:
        stop, delays, answers = asyncio.Event(), [], set()
        workers = [asyncio.create_task(load(tier, stop, delays, answers)) for _ in range(4)]
        await until(lambda: HIT in answers and STORED in answers)
        first = tier.incarnation
        own_server.kill() if how == "killed" else own_server.freeze()
        await until(lambda: FAILED in answers and Stored.FAILED in answers)
        await asyncio.sleep(0.7)
        if how == "killed":
            assert tier.longest_run([key for key in KEYS[:12] if tier.longest_run([key])]) > 0
            own_server.start()
        else:
            own_server.thaw()
        answers.clear()
        await until(lambda: HIT in answers and STORED in answers)
        stop.set()
        await asyncio.gather(*workers)
        # One batch waits for another that hangs, then for its own deadline; then the breaker is open.
        assert max(delays) < 3 * deadline_s + 1.5
        await until(lambda: (tier.incarnation == first) == (how == "frozen"))
        with own_server.client() as client:
            listed = {value_name(key) for key in tier.manifest().keys}
            await until(lambda: set(client.keys()) == listed)
        tier.check()


async def test_o27_what_another_run_has_not_leaves_the_books_without_being_asked_for(own_server):
    async with running(own_server.url) as tier:
        await put(tier, [A, B])
        tier.drain_changes()
        first = tier.incarnation
        own_server.kill()
        await asyncio.sleep(1.1)  # a run is told by the second in which it starts
        own_server.start()
        await until(lambda: tier.incarnation != first)
        assert tier.incarnation > first, "a later run has a larger number"
        assert set(tier.drain_changes().removed) == {A, B} and tier.used_bytes == 0
        assert await put(tier, [A]) == [STORED]


async def test_nodes_agree_on_the_number_of_a_run(server):
    async with running(server.url) as one, running(f"redis://127.0.0.1:{server.port}/1") as other:
        assert one.incarnation == other.incarnation > 0


async def test_a_frozen_redis_costs_its_deadline_a_few_times_and_then_nothing(own_server):
    async with running(own_server.url, deadline_s=0.2, breaker_pause_s=30, watch_s=30) as tier:
        await put(tier, [A, B])
        own_server.freeze()
        for _ in range(3):
            with Timed() as timed:
                assert await get(tier, [A, B]) == [FAILED, FAILED]
            assert timed.seconds < 1.5
        with Timed() as timed:
            for _ in range(50):
                assert await get(tier, [A]) == [FAILED]
                assert await put(tier, [A, C]) == [Stored.PRESENT, Stored.FAILED]
            assert await tier.drop([B]) == 1
            await tier.clear()
        assert timed.seconds < 2, "a hundred calls that wait would take twenty seconds"
        assert tier.longest_run([A]) == 0
        own_server.thaw()


@pytest.mark.parametrize("how", ["killed", "frozen"])
async def test_a_redis_that_is_back_is_found_by_whoever_looks_after_it(own_server, how):
    """Nobody asks it for anything meanwhile: what a user sees must not wait for the next request."""
    async with running(own_server.url, deadline_s=0.2) as tier:
        await put(tier, [A])
        own_server.kill() if how == "killed" else own_server.freeze()
        while not tier.left_alone:
            assert await get(tier, [A]) == [FAILED]
        await asyncio.sleep(0.5)
        assert tier.left_alone, "it looks in vain"
        own_server.start() if how == "killed" else own_server.thaw()
        await until(lambda: not tier.left_alone)
        assert await get(tier, [A, B]) == [MISS if how == "killed" else HIT, MISS]


async def test_a_redis_that_answers_small_questions_only_is_left_alone_at_its_first_failure(
    own_server, monkeypatch
):
    async with running(own_server.url) as tier:

        async def nothing(wanted):
            return [FAILED] * len(wanted)

        monkeypatch.setattr(tier._lanes, "fetch", nothing)
        for _ in range(3):
            await get(tier, [A])
        assert tier.left_alone
        for _ in range(2):
            await until(lambda: not tier.left_alone)
            await get(tier, [A])
            assert tier.left_alone


async def test_what_was_dropped_and_cleared_while_redis_was_away_stays_gone(own_server):
    async with running(own_server.url, deadline_s=0.2) as tier:
        await put(tier, [A, B, C])
        own_server.freeze()
        assert await tier.drop([A]) == 1
        own_server.thaw()
        assert await get(tier, [A, B]) == [MISS, HIT]
        own_server.freeze()
        await tier.clear()
        own_server.thaw()
        assert await get(tier, [B, C]) == [MISS, MISS]
        with own_server.client() as client:
            await until(lambda: client.keys() == [] and not tier._upkeep.clearing)
        assert await put(tier, [A]) == [STORED] and await get(tier, [A, B]) == [HIT, MISS]


async def test_a_tier_may_start_before_its_redis(own_server):
    async with running(own_server.url) as tier:
        await put(tier, [A])
        own_server.kill()
        async with running(own_server.url) as early:
            assert early.incarnation == 0 and await get(early, [A]) == [FAILED]
            own_server.start()
            await until(lambda: early.incarnation > 0)
            await asyncio.sleep(0.15)
            assert await put(early, [A]) == [STORED] and await get(early, [A]) == [HIT]


# Full and forgetful


async def test_a_full_redis_takes_new_blocks_in_place_of_our_coldest_or_refuses(own_server):
    with own_server.client() as client:
        client.set("foreign", bytes(100))
        client.config_set("maxmemory", client.info("memory")["used_memory"] + room(100))
        async with running(own_server.url, 300) as tier:
            answers = []
            for start in range(0, 240, 4):
                answers += await put(tier, KEYS[start : start + 4])
            # The limit also counts the server's buffers, which come and go, so now and then twice is not enough.
            assert answers.count(STORED) > 230 and set(answers) <= {STORED, NO_ROOM}
            assert 50 < tier.stats().visible < 100, "the coldest made room"
            assert (await get(tier, KEYS[220:240])).count(HIT) > 10
            await tier.clear()
            client.config_set("maxmemory", 1)
            assert await put(tier, [A, B]) == [NO_ROOM, NO_ROOM]
            assert await get(tier, [A, C]) == [MISS, MISS]
            assert client.keys() == [b"foreign"]
            client.config_set("maxmemory", 0)
            assert await put(tier, [A]) == [STORED]


async def test_a_redis_that_evicts_by_itself_causes_misses_that_are_told(own_server):
    with own_server.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        client.config_set("maxmemory", client.info("memory")["used_memory"] + room(20))
        async with running(own_server.url, 100) as tier:
            for start in range(0, 60, 2):
                assert await put(tier, KEYS[start : start + 2]) == [STORED, STORED]
            assert tier.longest_run(KEYS[:60]) == 60
            answers = await get(tier, KEYS[:60])
            assert set(answers) == {HIT, MISS} and answers.count(HIT) < 40
            gone = {key for key, answer in zip(KEYS[:60], answers, strict=True) if answer is MISS}
            assert gone.isdisjoint(tier.manifest().keys) and tier.stats().visible == answers.count(HIT)


async def test_a_read_only_or_loading_server_is_a_failure_not_an_error(own_server):
    with own_server.client() as client:
        async with running(own_server.url, breaker_failures=100) as tier:
            await put(tier, [A])
            client.execute_command("REPLICAOF", "127.0.0.1", "1")
            assert await put(tier, [B]) == [Stored.FAILED]
            assert set(await get(tier, [A])) <= {FAILED, HIT}
            client.execute_command("REPLICAOF", "NO", "ONE")
            assert await put(tier, [B]) == [STORED]


async def test_bits_that_flip_in_redis_are_never_a_hit(server):
    chance = random.Random(3)
    with server.client() as client:
        async with running(server.url, 4) as tier:
            for _ in range(30):
                await put(tier, [A])
                place = chance.randrange(client.strlen(value_name(A)) - 2)
                byte = client.getrange(value_name(A), place, place)[0]
                client.setrange(value_name(A), place, bytes([byte ^ 1 << chance.randrange(8)]))
                (answer,) = await get(tier, [A])  # which compares hits
                assert answer in (CORRUPT, HIT)
                if answer is CORRUPT:
                    assert tier.longest_run([A]) == 0
