"""What every `Tier` promises of its life: pins, quotas, expiry, drops, cancelled calls, failures, restarts."""

from __future__ import annotations

import asyncio
import random

import pytest
from lossy_stands import LOSSY_STANDS
from tier_stands import KEYS, STANDS, Clock, at_rest, begun, buffers, get, put, stand_fixture, visible

from kv_tiers.tier import Fetched, Stored

A, B, C, D, E, F = KEYS[:6]
HIT, MISS = Fetched.HIT, Fetched.MISS
STORED, NO_ROOM = Stored.STORED, Stored.NO_ROOM

open_stand = stand_fixture([*STANDS, *LOSSY_STANDS])
open_warm_stand = stand_fixture([stand for stand in (*STANDS, *LOSSY_STANDS) if stand.warm])
open_breakable_stand = stand_fixture([stand for stand in (*STANDS, *LOSSY_STANDS) if stand.breakable])


# Pins, quotas, time to live


async def test_o10_pins_survive_pressure_and_end(open_stand):
    tier = (await open_stand(6)).tier
    await put(tier, [A, B])
    assert tier.pin([A, B]) == 2
    for start in range(10, 60, 4):
        assert await put(tier, KEYS[start : start + 4]) == [STORED] * 4
    assert await get(tier, [A, B]) == [HIT, HIT]
    assert tier.stats().pinned == 2
    assert (tier.unpin([A, B, C]), tier.unpin([A, B])) == (2, 0)
    assert tier.stats().pinned == 0
    await put(tier, KEYS[70:76])
    assert tier.longest_run([A]) == 0


async def test_o10_lookups_pin_nothing(open_stand):
    tier = (await open_stand(3)).tier
    await put(tier, [A, B, C])
    for _ in range(1000):
        tier.longest_run([A, B, C])
    assert tier.stats().pinned == 0
    assert await put(tier, [D, E, F]) == [STORED] * 3


async def test_pins_add_up_and_stop_at_their_share(open_stand):
    tier = (await open_stand(4)).tier
    await put(tier, [A, B, C])
    assert tier.pin([A, D]) == 1, "what is not here is not pinned, nor what follows it"
    assert tier.pin([A, B, C]) == 2, "half of the slots"
    assert tier.unpin([A]) == 1
    await put(tier, KEYS[10:14])
    assert visible(tier, [A, B, C]) == [A, B], "the other pin of A is left"
    assert tier.unpin([A, B]) == 2 and tier.stats().pinned == 0


async def test_a_tenant_at_its_share_replaces_its_own_blocks(open_stand):
    tier = (await open_stand(4, tenant_share=0.5)).tier
    await put(tier, [A], tenant="other")
    assert await put(tier, [B, C], tenant="greedy") == [STORED, STORED]
    assert await put(tier, [D], tenant="greedy") == [STORED]
    assert await put(tier, [E], tenant="greedy") == [STORED]
    assert visible(tier) == [A, D, E] and tier.stats().free == 1
    assert tier.pin([D, E]) == 2
    assert await put(tier, [F], tenant="greedy") == [NO_ROOM]
    assert await put(tier, [F], tenant="other") == [STORED]
    tier.unpin([D, E])


async def test_unused_blocks_expire_pinned_ones_do_not(open_stand):
    clock = Clock()
    tier = (await open_stand(6, clock=clock, ttl_s=60.0)).tier
    await put(tier, [A, B, C, D])
    tier.pin([D])
    clock.now += 59
    assert tier.expire() == 0
    assert await get(tier, [B]) == [HIT]  # used
    clock.now += 2
    assert tier.expire() == 2
    assert visible(tier) == [B, D]
    assert set(tier.drain_changes().added) == {B, D}
    assert tier.unpin([D]) == 1
    assert (tier.expire(), visible(tier)) == (1, [B])
    clock.now += 60
    assert (tier.expire(), visible(tier)) == (1, [])


# Dropping, clearing, cancelling


async def test_o9_dropping_twice_frees_once(open_stand):
    tier = (await open_stand(2)).tier
    await put(tier, [A, B])
    assert await tier.drop([A, A, C]) == 1 and await tier.drop([A]) == 0
    assert tier.stats().free == 1 and visible(tier) == [B]
    assert await put(tier, [C]) == [STORED]


async def test_o43_clear_leaves_nothing(open_stand):
    tier = (await open_stand(4)).tier
    await put(tier, [A, B, C])
    tier.pin([A])
    tier.drain_changes()
    await tier.clear()
    assert visible(tier) == [] and tier.stats().free == 4
    assert set(tier.drain_changes().removed) == {A, B, C}
    assert await put(tier, [A, B]) == [STORED, STORED]
    assert tier.unpin([A]) == 0, "the pin went with its block"


@pytest.mark.parametrize("how", ["drop", "clear"])
async def test_a_read_that_is_overtaken_gives_right_bytes_or_none(open_stand, how):
    tier = (await open_stand(2)).tier
    await put(tier, [A, B])
    task = await begun(get(tier, [A, B]))
    await (tier.drop([A, B]) if how == "drop" else tier.clear())
    assert tier.longest_run([A]) == 0
    assert set(await task) <= {HIT, MISS}, "and `get` compared the bytes of hits"
    assert await put(tier, [C, D]) == [STORED, STORED]


async def test_o43_what_is_being_written_during_a_clear_does_not_appear(open_stand):
    tier = (await open_stand(4)).tier
    task = await begun(put(tier, [A]))
    await tier.clear()
    assert await task == [Stored.FAILED]
    assert tier.longest_run([A]) == 0
    assert await put(tier, [A]) == [STORED]


async def test_a_cancelled_put_leaves_the_tier_whole(open_stand):
    tier = (await open_stand(2)).tier
    task = await begun(put(tier, [A, B]))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await at_rest(tier)
    assert await put(tier, [C, D]) == [STORED, STORED]


async def test_o26_a_cancelled_get_leaves_its_buffers_alone_and_answers_nobody_else(open_stand):
    tier = (await open_stand(2)).tier
    await put(tier, [A, B])
    into = buffers(1)
    task = await begun(tier.get([A], into))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    into[0][:] = bytes(len(into[0]))
    for _ in range(20):
        assert await get(tier, [B]) == [HIT]
    assert not any(into[0]), "nothing is written after the call has returned"
    assert await put(tier, [C, D]) == [STORED, STORED]


# Ends and failures


async def test_a_restart_finds_what_a_warm_tier_had_and_a_cold_one_starts_empty(open_stand):
    stand = await open_stand(4)
    await put(stand.tier, [A, B, C, D])
    await stand.tier.drop([C])
    await stand.reopen()
    tier = stand.tier
    tier.check()
    expected = [A, B, D] if stand.warm else []
    assert visible(tier) == expected
    assert set(tier.drain_changes().added) == set(expected)
    assert tier.stats().free == 4 - len(expected)
    assert await put(tier, [C, E]) == [STORED, STORED]


async def test_a_restarted_warm_tier_serves_no_block_that_rotted_meanwhile(open_warm_stand):
    stand = await open_warm_stand(4)
    await put(stand.tier, [A, B])
    await stand.corrupt(A)
    await stand.reopen()
    assert (await get(stand.tier, [A, B]))[1] is HIT
    assert await get(stand.tier, [A]) == [MISS]


async def test_a_closed_tier_serves_nothing(open_stand):
    stand = await open_stand(2)
    await put(stand.tier, [A])
    await stand.tier.close()
    for call, refusal in ((get(stand.tier, [A]), Fetched.FAILED), (put(stand.tier, [B]), Stored.FAILED)):
        answers = (await asyncio.gather(call, return_exceptions=True))[0]
        assert isinstance(answers, AssertionError) or answers == [refusal]
    stand.tier = await stand.make()
    await stand.tier.start()


async def test_a_broken_medium_is_no_error_and_the_tier_comes_back(open_breakable_stand):
    stand = await open_breakable_stand(6)
    tier = stand.tier
    await put(tier, [A, B])
    await stand.break_()
    for _ in range(10):
        assert set(await get(tier, [A, B])) <= {Fetched.FAILED, MISS}
        assert await put(tier, [C]) == [Stored.FAILED]
    assert tier.longest_run([C]) == 0
    assert await tier.drop([B]) <= 1
    await stand.mend()
    assert await put(tier, [D]) == [STORED]
    assert await get(tier, [B, D]) == [MISS, HIT]


async def test_random_overlapping_calls_leave_a_tier_that_is_right(open_stand):
    """Gets, puts, drops and pins of the same few keys at once, some cancelled; hits are compared."""
    tier = (await open_stand(4)).tier
    chance = random.Random(1)
    keys = KEYS[:7]

    async def one(number):
        some = chance.sample(keys, chance.randint(1, 3))
        kind = chance.choices(["get", "put", "drop", "pin"], [5, 4, 1, 1])[0]
        if kind == "pin":
            pinned = some[: tier.pin(some)]
            await asyncio.sleep(0)
            tier.unpin(pinned)
        elif kind == "drop":
            await tier.drop(some[:1])
        else:
            task = asyncio.ensure_future((get if kind == "get" else put)(tier, some))
            await asyncio.sleep(0)
            if number == 0:
                task.cancel()
            await asyncio.wait([task])
            assert task.cancelled() or task.exception() is None

    for _ in range(40):
        await asyncio.gather(*(one(number) for number in range(6)))
        tier.check()
    stats = tier.stats()
    assert stats.pinned == 0 and stats.blocks_evicted > 20 and stats.blocks_read > 20
    assert await put(tier, KEYS[20:24]) == [STORED] * 4
