"""The tiered store on virtual time: the write-down, and everything at once."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_stand import SLOT, DictTier, Stand, content, key, keys, run, small_pieces  # noqa: F401

from kv_tiers import store_fetch, store_spill
from kv_tiers.directory import Place
from kv_tiers.tier import Fetched, Stored

CHAIN = keys(*range(8))


def test_at_once_writes_everything_down_to_every_tier_for_its_tenant():
    async def work():
        nvme, redis = DictTier("nvme"), DictTier("redis")
        stand = Stand(16, nvme, redis, at_once=True)
        await stand.write(CHAIN, tenant="acme")
        await stand.store.write_down()
        for tier in (nvme, redis):
            assert tier.longest_run(CHAIN) == 8
            assert set(tier.tenants.values()) == {"acme"}
        assert stand.store.stats().spill.written == 16
        await stand.write(CHAIN)
        await stand.store.write_down()
        assert stand.store.stats().spill.written == 16, "a block is written once"
        await stand.close()

    run(work)


def test_what_was_evicted_comes_back():
    async def work():
        nvme = DictTier("nvme", slots=200)
        stand = Stand(16, nvme)
        for first in range(0, 64, 4):
            await stand.write(keys(*range(first, first + 4)))
            await asyncio.sleep(0.1)
        for first in range(0, 64, 4):
            assert await stand.read(keys(*range(first, first + 4)), worth_s=10) == 4
        assert stand.store.stats().spill.written <= 64
        await stand.close()

    run(work)


def test_without_pressure_nothing_is_written_down():
    async def work():
        nvme = DictTier("nvme")
        stand = Stand(16, nvme)
        await stand.write(CHAIN)
        await asyncio.sleep(10)
        assert not nvme.puts
        await stand.close()

    run(work)


def test_ahead_of_eviction_only_sole_copies_that_are_worth_it_are_written():
    async def work():
        nvme = DictTier("nvme")
        stand = Stand(8, nvme)
        stand.admission.unworthy = {key(0), key(1)}
        stand.directory.know(Place("b", "cpu"), keys(2, 3))
        stand.directory.know(Place("a", "cpu"), CHAIN)
        nvme.fill(keys(4))
        stand.store._spill._low = 8
        await stand.write(CHAIN)
        await asyncio.sleep(1)
        assert sorted(each for call in nvme.puts for each in call) == keys(5, 6, 7)
        spill = stand.store.stats().spill
        assert (spill.unworthy, spill.copied_elsewhere) == (2, 2)
        assert stand.admission.requests == [tuple(CHAIN)]
        await stand.close()

    run(work)


def test_looking_at_what_goes_next_is_bounded_and_leaves_the_loop_to_others(monkeypatch):
    monkeypatch.setattr(store_spill, "_MOST_LOW", 20)
    monkeypatch.setattr(store_spill, "_LOOKED_AT_ONCE", 5)

    async def work():
        loop = asyncio.get_running_loop()
        stand = Stand(200, DictTier("nvme", slots=400))
        coldest, looks = stand.books.coldest, []

        def slow(count):
            looks.append(count)
            loop.now += 0.01
            return coldest(count)

        stand.books.coldest = slow
        began = loop.time()
        for first in range(0, 3000, 10):
            await stand.write(keys(*range(first, first + 10)))
            await asyncio.sleep(0.01)
        assert looks and max(looks) <= 20
        assert 0.01 * len(looks) < 0.2 * (loop.time() - began)
        await stand.close()

    run(work)


def test_a_block_that_waits_for_its_write_is_evicted_last():
    async def work():
        nvme = DictTier("nvme")
        nvme.open.clear()
        stand = Stand(8, nvme, at_once=True)
        await stand.write(keys(0, 1, 2, 3))
        await asyncio.sleep(0.1)
        stand.store._spill._at_once = False
        await stand.write(keys(10, 11, 12, 13))
        await asyncio.sleep(0.1)
        await stand.write(keys(20, 21, 22, 23))
        held = stand.store.holds(keys(0, 1, 2, 3, 10, 11, 12, 13))["cpu"]
        assert held == [True] * 4 + [False] * 4, f"older, but not written yet: {held}"
        nvme.open.set()
        await stand.store.write_down()
        assert nvme.longest_run(keys(0, 1, 2, 3)) == 4
        await stand.close()

    run(work)


def test_a_queued_write_holds_its_blocks():
    """DictTier.put asserts that what it gets under a key is that key's block."""

    async def work():
        nvme = DictTier("nvme")
        nvme.open.clear()
        stand = Stand(4, nvme, at_once=True)
        await stand.write(keys(0, 1, 2, 3))
        await asyncio.sleep(0.1)
        await stand.store.drop(keys(0, 1))
        assert await stand.write(keys(10, 11, 12, 13)) == 2, "two slots are still read by the write-down"
        nvme.open.set()
        await stand.store.write_down()
        assert nvme.blocks[key(0)] == content(key(0))
        assert await stand.write(keys(20, 21, 22, 23)) == 4
        await stand.close()

    run(work)


@pytest.mark.parametrize("refusal", [Stored.NO_ROOM, Stored.FAILED])
def test_a_tier_that_refuses_leaves_it_to_the_next_and_is_asked_again_later(refusal):
    async def work():
        nvme, redis = DictTier("nvme"), DictTier("redis")
        nvme.refusal = refusal
        stand = Stand(4, nvme, redis, at_once=True)
        await stand.write(CHAIN[:4])
        await stand.store.write_down()
        assert redis.longest_run(CHAIN[:4]) == 4
        redis.refusal = refusal
        await stand.write(CHAIN[4:])
        await stand.store.write_down()
        puts = len(redis.puts)
        for _ in range(20):
            stand.store._spill.nudge()
            await asyncio.sleep(0.1)
        assert len(redis.puts) == puts, "not asked over and over"
        redis.refusal = None
        await asyncio.sleep(60)
        stand.store._spill.nudge()
        await asyncio.sleep(1)
        assert any(stand.store.holds(CHAIN[4:])["redis"])
        await stand.close()

    run(work)


def test_the_write_down_rests_more_the_busier_the_machine():
    async def work(idle: float) -> float:
        nvme = DictTier("nvme")
        nvme.seconds_per_call = 0.1
        stand = Stand(16, nvme, at_once=True)
        stand.store._spill._idle_share = lambda: idle
        loop = asyncio.get_running_loop()
        began = loop.time()
        await stand.write(CHAIN)
        while nvme.longest_run(CHAIN) < 8:
            await asyncio.sleep(0.01)
        took = loop.time() - began
        await stand.close()
        return took

    idle, busy = run(lambda: work(1.0)), run(lambda: work(0.0))
    assert idle == pytest.approx(4 * 0.1 + 3 * 0.025, abs=0.03)
    assert busy == pytest.approx(4 * 0.1 + 3 * 0.4, abs=0.03)


def test_a_tier_that_comes_later_is_used_and_one_that_goes_is_not():
    async def work():
        stand = Stand(16)
        await stand.write(CHAIN)
        assert [place for place, _ in stand.store.journals()] == [Place("a", "cpu")]
        redis = DictTier("redis")
        stand.store.set_lower([redis])
        assert [place for place, _ in stand.store.journals()] == [Place("a", "cpu"), Place("", "redis")]
        await stand.store.evict(CHAIN, ["cpu"], keep=True)
        assert await stand.read(CHAIN, worth_s=10) == 8
        stand.store.set_lower([])
        await stand.store.evict(CHAIN)
        assert await stand.read(CHAIN, worth_s=10) == 0
        await stand.close()

    run(work)


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_whatever_happens_no_read_sees_anything_but_whole_blocks(seed, at_once):
    """Against the stupidest model: a block is its key's content, or it is not read. At rest nobody holds anything."""
    store_fetch.PIECE_BYTES = store_spill.BATCH_BYTES = 2 * SLOT
    chance = random.Random(seed)
    chains = [keys(*range(start, start + chance.randint(1, 9))) for start in (0, 4, 50, 53, 100, 120, 140)]
    chains += [keys(0, 1, 2, 60, 61), keys(50, 51, 70, 71, 72)]

    async def work():
        nvme, redis = DictTier("nvme", slots=12), DictTier("redis", slots=20, shy=True)
        stand = Stand(chance.randint(6, 16), nvme, redis, at_once=at_once)
        store, cold = stand.store, {}

        async def act():
            await asyncio.sleep(chance.random())
            chain = chance.choice(chains)
            match chance.randrange(12):
                case 0 | 1 | 2:
                    await stand.write(chain, tenant=chance.choice([None, "x", "y"]))
                case 3 | 4 | 5 | 6:
                    found = await stand.read(chain, worth_s=chance.choice([0.0, 0.02, 1.0, 100.0]))
                    assert found <= len(chain)
                case 7:
                    reader = asyncio.create_task(stand.read(chain, worth_s=100.0))
                    await asyncio.sleep(chance.random() / 10)
                    if not reader.done():
                        reader.cancel()
                        cold[reader] = None
                case 8:
                    tier = chance.choice([nvme, redis, stand.neighbour.tier])
                    tier.wrong[chance.choice(chain)] = chance.choice(list(Fetched)[1:])
                    tier.seconds_per_block = chance.choice([0.0, 0.01, 0.1])
                    tier.refusal = chance.choice([None, None, Stored.FAILED])
                case 9:
                    await store.evict(chain, chance.choice([None, ["cpu"]]), keep=chance.random() < 0.5)
                case 10:
                    place = chance.choice([Place("b", "cpu"), Place("", "redis")])
                    stand.directory.know(place, chain)
                    if chance.random() < 0.5:
                        (redis if place.tier == "redis" else stand.neighbour.tier).fill(chain)
                case 11:
                    store.pin(chain, 0.3)
                    loan = await store.lend(chain, "b", worth_s=chance.choice([0.0, 1.0]))
                    await asyncio.sleep(chance.random() / 10)
                    for each, offset in zip(chain, loan.offsets, strict=False):
                        assert bytes(stand.memory.view(offset, SLOT)) == content(each)
                    store.give_back(loan.id)
                    store.sweep()
            stand.books.check()
            assert nvme.stats().visible <= 12 and redis.stats().visible <= 20

        await asyncio.gather(*(act() for _ in range(60)))
        await asyncio.gather(*cold, return_exceptions=True)
        await asyncio.sleep(1)
        store.sweep()
        await stand.close()
        for tier in (nvme, redis):
            tier.check()
            assert (tier.stats().read_leases, tier.stats().write_leases) == (0, 0)
        assert not store.stats().pinned

    run(work)
