"""Commands to the tiered store on virtual time: loans, pins, evict and flush, beside loads and writes under way."""

from __future__ import annotations

import asyncio

import pytest
from store_stand import SLOT, DictTier, Stand, content, keys, run, small_pieces  # noqa: F401

from kv_tiers.at_rest import AtRest
from kv_tiers.directory import Place
from kv_tiers.keys import lossy_key
from kv_tiers.store_lend import LOAN_S
from kv_tiers.store_ports import Cleared

CHAIN = keys(*range(8))


def test_loans_end_when_given_back_or_over():
    async def work():
        nvme = DictTier("nvme")
        stand = Stand(16, nvme)
        await stand.write(CHAIN[:4])
        nvme.fill(CHAIN[4:6])
        loan = await stand.store.lend(CHAIN, "b")
        assert [bytes(stand.memory.view(offset, SLOT)) for offset in loan.offsets] == [
            content(each) for each in CHAIN[:4]
        ]
        assert loan.more, "the next one is in a tier below"
        whole = await stand.store.lend(CHAIN, "b", worth_s=10)
        assert len(whole.offsets) == 6 and not whole.more and stand.directory.located == 0
        assert stand.store.give_back(loan.id) and not stand.store.give_back(loan.id)
        assert stand.store.stats().lent == 1
        await asyncio.sleep(LOAN_S + 1)
        stand.store.sweep()
        assert stand.store.stats().lent == 0 and not stand.store.give_back(whole.id)
        await stand.close()

    run(work)


def test_pins_hold_in_every_tier_and_end_with_their_time_or_by_name():
    async def work():
        nvme = DictTier("nvme")
        stand = Stand(8, nvme)
        await stand.write(CHAIN[:3])
        nvme.fill(CHAIN[:5])
        assert stand.store.pin(CHAIN, 5.0) == {"cpu": 3, "nvme": 5}
        assert stand.store.pin(CHAIN) == {"cpu": 3, "nvme": 5}
        await stand.write(keys(*range(20, 28)))
        assert stand.store.holds(CHAIN)["cpu"][:4] == [True, True, True, False]
        assert stand.store.unpin(CHAIN) == {"cpu": 3, "nvme": 5}
        assert stand.store.stats().pinned == 1
        await asyncio.sleep(6)
        stand.store.sweep()
        assert stand.store.stats().pinned == 1, "the one without an end"
        assert stand.store.unpin(CHAIN)["cpu"] == 3 and stand.store.unpin(CHAIN)["cpu"] == 0
        await stand.write(keys(*range(30, 38)))
        assert not any(stand.store.holds(CHAIN)["cpu"])
        await stand.close()

    run(work)


def test_a_pin_of_blocks_that_were_flushed_ends_no_later_pin():
    async def work():
        stand = Stand(8)
        await stand.write(CHAIN[:3])
        stand.store.pin(CHAIN[:3], 5.0)
        await stand.store.flush()
        await stand.write(CHAIN[:3])
        stand.store.pin(CHAIN[:3])
        await asyncio.sleep(6)
        stand.store.sweep()
        await stand.write(keys(*range(20, 28)))
        assert stand.store.holds(CHAIN[:3])["cpu"] == [True] * 3
        assert stand.store.unpin(CHAIN[:3]) == {"cpu": 3}
        await stand.close()

    run(work)


def test_evict_takes_from_the_tiers_named_and_can_keep_a_copy_below():
    async def work():
        nvme = DictTier("nvme")
        stand = Stand(16, nvme)
        stand.admission.unworthy = set(CHAIN)
        await stand.write(CHAIN)
        assert await stand.store.evict(CHAIN[:4], ["cpu", "redis"], keep=True) == {"cpu": 4}
        assert stand.store.holds(CHAIN) == {
            "cpu": [False] * 4 + [True] * 4,
            "nvme": [True] * 4 + [False] * 4,
        }
        assert await stand.read(CHAIN, worth_s=10) == 8
        assert await stand.store.evict(CHAIN) == {"cpu": 8, "nvme": 4}
        assert await stand.read(CHAIN, worth_s=10) == 0
        await stand.close()

    run(work)


def test_a_flush_clears_every_tier_or_says_what_is_left():
    async def work():
        nvme, redis = DictTier("nvme"), DictTier("redis")
        stand = Stand(16, nvme, redis, at_once=True)
        await stand.write(CHAIN)
        await stand.store.write_down()

        async def unreachable():
            pass

        redis.clear = unreachable
        cleared = await stand.store.flush()
        assert cleared == {"cpu": Cleared(8, 0), "nvme": Cleared(8, 0), "redis": Cleared(0, 8)}
        del redis.clear
        assert await stand.store.flush(["redis"]) == {"redis": Cleared(8, 0)}
        assert await stand.read(CHAIN, worth_s=10) == 0
        await stand.close()

    run(work)


@pytest.mark.parametrize("by", ["flush", "evict"])
def test_what_is_forgotten_while_it_is_written_down_comes_back_nowhere(by):
    async def work():
        nvme, redis = DictTier("nvme"), DictTier("redis")
        nvme.open.clear()
        stand = Stand(16, nvme, redis, at_once=True)
        await stand.write(CHAIN)
        await asyncio.sleep(0.1)
        assert nvme.puts, "the first batch is on its way"
        command = stand.store.flush() if by == "flush" else stand.store.evict(CHAIN)
        forgetting = asyncio.create_task(command)
        await asyncio.sleep(0.1)
        nvme.open.set()
        await forgetting
        await stand.store.write_down()
        held = stand.store.holds(CHAIN)
        assert not any(any(flags) for flags in held.values()), held
        await stand.write(CHAIN)
        await stand.store.write_down()
        assert redis.longest_run(CHAIN) == 8, "what is written anew is written down anew"
        await stand.close()

    run(work)


@pytest.mark.parametrize("tiers", [None, ["nvme"], ["cpu"]])
@pytest.mark.parametrize("by", ["flush", "evict"])
def test_a_write_that_hangs_keeps_nobody_from_forgetting_and_brings_nothing_back(by, tiers):
    async def work():
        nvme = DictTier("nvme")
        nvme.open.clear()
        stand = Stand(16, nvme, at_once=True)
        await stand.write(CHAIN)
        await asyncio.sleep(0.1)
        batch = nvme.puts[0]
        async with asyncio.timeout(60):
            await (stand.store.flush(tiers) if by == "flush" else stand.store.evict(CHAIN, tiers))
        nvme.open.set()
        await stand.store.write_down()
        held = stand.store.holds(CHAIN)
        in_nvme = {each for each, there in zip(CHAIN, held["nvme"], strict=True) if there}
        if tiers == ["nvme"]:
            assert held["cpu"] == [True] * 8 and not in_nvme & set(batch)
        else:
            assert not any(held["cpu"]) and in_nvme == (set(batch) if tiers else set())
        await stand.close()

    run(work)


def test_a_hold_keeps_loads_from_beginning_until_it_is_released_or_over():
    async def work():
        nvme = DictTier("nvme")
        nvme.fill(CHAIN[:4])
        stand = Stand(16, nvme)
        stand.directory.know(Place("b", "cpu"), CHAIN)
        stand.neighbour.tier.fill(CHAIN)
        stand.store.hold("all", None, seconds=30.0)
        stand.store.hold("some", CHAIN[:4], seconds=5.0)
        locate, stand.directory.locate = stand.directory.locate, None
        assert await stand.read(CHAIN, worth_s=10) == await stand.store.prefetch(CHAIN) == 0
        stand.directory.locate = locate
        stand.store.release("all")
        assert await stand.read(CHAIN, worth_s=10) == 0
        await asyncio.sleep(5)
        stand.store.sweep()
        assert await stand.read(CHAIN, worth_s=10) == 8
        stand.store.release("some")
        stand.store.release("never held")
        await stand.close()

    run(work)


def test_a_hold_ends_the_loads_that_are_under_way():
    async def work():
        nvme = DictTier("nvme")
        nvme.fill(CHAIN)
        nvme.seconds_per_block = 0.1
        stand = Stand(16, nvme)
        reading = asyncio.create_task(stand.read(CHAIN, worth_s=100))
        await asyncio.sleep(0.05)
        stand.store.hold("all", None, 30.0)
        await reading
        await asyncio.sleep(2)
        assert stand.store.holds(CHAIN)["cpu"] == [False] * 8
        stand.store.release("all")
        await stand.close()

    run(work)


def test_two_commands_in_a_row_while_a_write_hangs_leave_nothing_of_it():
    async def work():
        nvme = DictTier("nvme")
        nvme.open.clear()
        stand = Stand(16, nvme, at_once=True)
        await stand.write(CHAIN)
        await asyncio.sleep(0.1)
        await stand.store.flush(["cpu"])
        await stand.store.evict(CHAIN)
        nvme.open.set()
        await stand.store.write_down()
        held = stand.store.holds(CHAIN)
        assert not any(any(flags) for flags in held.values()), held
        await stand.close()

    run(work)


def test_what_is_evicted_from_a_tier_before_its_turn_in_a_batch_is_not_written_there():
    async def work():
        nvme, redis = DictTier("nvme"), DictTier("redis")
        nvme.open.clear()
        stand = Stand(16, nvme, redis, at_once=True)
        await stand.write(CHAIN)
        await asyncio.sleep(0.1)
        batch = set(nvme.puts[0])
        await stand.store.evict(CHAIN, ["redis"])
        nvme.open.set()
        await stand.store.write_down()
        assert nvme.longest_run(CHAIN) == 8
        assert not any(batch & set(put) for put in redis.puts)
        await stand.close()

    run(work)


def test_only_a_first_look_tells_what_computing_costs():
    async def work():
        stand, heard = Stand(16), []
        stand.store._computing.heard = lambda blocks, worth_s: heard.append((blocks, worth_s))
        await stand.read(CHAIN, worth_s=8.0)
        await stand.read([*CHAIN[:2], *(lossy_key(each, AtRest.INT8) for each in CHAIN[2:])], worth_s=0.1)
        assert heard == [(8, 8.0)]
        await stand.close()

    run(work)
