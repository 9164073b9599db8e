"""The tiered store on virtual time: loads, sharing, deadlines, faults; and the pure parts that decide."""

from __future__ import annotations

import asyncio

import pytest
import store_stand
from store_stand import SLOT, DictTier, Stand, content, key, keys, run

from kv_tiers import store_fetch
from kv_tiers.books import SlotBooks
from kv_tiers.directory import Place
from kv_tiers.store_plan import Load, Source, Stretch, worthwhile
from kv_tiers.tier import Fetched
from policies.tiering import make_policy
from policies.tiering.speed import Speed, Speeds

CHAIN = keys(*range(8))
REDIS = Place("", "redis")


@pytest.fixture(autouse=True)
def two_blocks_a_piece(monkeypatch):
    monkeypatch.setattr(store_fetch, "PIECE_BYTES", 2 * SLOT)


def test_what_is_in_the_slab_is_read_without_asking_anybody():
    async def work():
        stand = Stand()
        assert await stand.write(CHAIN) == 8
        assert await stand.read(CHAIN, worth_s=10) == 8
        assert stand.directory.located == 0
        await stand.close()

    run(work)


@pytest.mark.parametrize("where", ["nvme", "redis", "redis of others", "peer"])
def test_what_lies_elsewhere_is_loaded_and_stays(where):
    async def work():
        tier = DictTier(where.split()[0], shy=where == "redis of others")
        stand = Stand(16, *([] if where == "peer" else [tier]))
        if where == "peer":
            stand.neighbour.tier.fill(CHAIN)
            stand.directory.know(Place("b", "cpu"), CHAIN)
        else:
            tier.fill(CHAIN)
        if where == "redis of others":
            stand.directory.know(REDIS, CHAIN)
        await stand.write(CHAIN[:3])
        assert await stand.read(CHAIN, worth_s=10) == 8
        assert stand.directory.located == (where not in ("nvme", "redis"))
        source = stand.store.stats().sources[where.split()[0]]
        assert (source.hits, source.blocks, source.nbytes) == (5, 5, 5 * SLOT)
        assert await stand.read(CHAIN) == 8
        await stand.close()

    run(work)


def test_a_chain_is_put_together_from_several_places():
    async def work():
        nvme, redis = DictTier("nvme"), DictTier("redis", shy=True)
        stand = Stand(16, nvme, redis)
        await stand.write(CHAIN[:2])
        nvme.fill(CHAIN[2:4])
        stand.directory.know(REDIS, CHAIN[4:6])
        redis.fill(CHAIN[4:6])
        await stand.write(CHAIN[6:7])
        stand.directory.know(Place("a", "cpu"), CHAIN[6:7])
        stand.directory.know(Place("b", "cpu"), CHAIN[7:])
        stand.neighbour.tier.fill(CHAIN[7:])
        assert await stand.read(CHAIN, worth_s=10) == 8
        assert stand.directory.located == 1
        await stand.close()

    run(work)


def test_a_hole_ends_what_is_loaded():
    async def work():
        nvme = DictTier("nvme")
        nvme.fill(CHAIN[:3] + CHAIN[4:])
        stand = Stand(16, nvme)
        assert await stand.read(CHAIN, worth_s=10) == 3
        assert key(4) not in [each for call in nvme.gets for each in call]
        await stand.close()

    run(work)


def test_what_would_take_longer_than_computing_is_not_loaded():
    async def work():
        nvme, redis = DictTier("nvme"), DictTier("redis")
        nvme.fill(CHAIN[:4])
        redis.fill(CHAIN[4:])
        speeds = Speeds({"nvme": Speed(1e-3, 1e9), "redis": Speed(0.9, 1e9)})
        stand = Stand(16, nvme, redis, speeds=speeds)
        assert await stand.read(CHAIN, worth_s=0.001) == 0
        assert await stand.read(CHAIN, worth_s=0.8) == 4, "0.4 s for each half: Redis would take 0.9"
        assert not redis.gets
        assert await stand.read(CHAIN, worth_s=2.0) == 8
        await stand.close()

    run(work)


def test_a_slow_source_is_left_alone_and_tried_again_later():
    async def work():
        nvme = DictTier("nvme", slots=1000)
        nvme.seconds_per_block = 0.2
        nvme.fill(keys(*range(1000)))
        stand = Stand(16, nvme)
        for first in range(0, 100, 4):
            await stand.read(keys(*range(first, first + 4)), worth_s=0.1)
        calls = len(nvme.gets)
        assert calls < 20
        nvme.seconds_per_block = 0.0
        await asyncio.sleep(600)
        assert await stand.read(keys(*range(200, 204)), worth_s=0.1) == 4
        await stand.close()

    run(work)


def test_a_late_part_is_a_miss_and_there_for_the_next():
    async def work():
        nvme = DictTier("nvme")
        nvme.fill(CHAIN)
        nvme.seconds_per_block = 0.1
        stand = Stand(16, nvme)
        loop = asyncio.get_running_loop()
        began = loop.time()
        assert await stand.read(CHAIN, worth_s=0.3) == 4, "pieces of 0.2 s, two at a time"
        assert loop.time() - began < 0.31
        assert stand.store.stats().late == 1
        await stand.store.settle()
        assert await stand.read(CHAIN) == 8, "what was under way went on"
        await stand.close()

    run(work)


def test_two_requests_for_the_same_blocks_share_one_load():
    async def work():
        nvme = DictTier("nvme")
        nvme.fill(CHAIN)
        nvme.seconds_per_call = 0.05
        stand = Stand(16, nvme)
        assert await asyncio.gather(*(stand.read(CHAIN, worth_s=10) for _ in range(5))) == [8] * 5
        assert sorted(each for call in nvme.gets for each in call) == sorted(CHAIN)
        await stand.close()

    run(work)


@pytest.mark.parametrize("place", [0, 3, 7])
@pytest.mark.parametrize("fault", [Fetched.MISS, Fetched.CORRUPT, Fetched.FAILED])
def test_a_failed_load_is_never_a_hit_and_cuts_the_run(fault, place):
    async def work():
        redis = DictTier("redis", shy=True)
        redis.fill(CHAIN)
        stand = Stand(16, redis)
        stand.directory.know(REDIS, CHAIN)
        redis.wrong[key(place)] = fault
        assert await stand.read(CHAIN, worth_s=10) == place
        await stand.store.settle()
        source = stand.store.stats().sources["redis"]
        assert source.hits == source.blocks - 1
        assert {"MISS": source.missing, "CORRUPT": source.corrupt, "FAILED": source.failed}[fault.name] == 1
        known = stand.directory.state.locate(b"".join(each.digest for each in CHAIN)).run
        assert known == (8 if fault is Fetched.FAILED else place), "a stale entry is forgotten"
        redis.wrong.clear()
        assert await stand.read(CHAIN, worth_s=10) == (8 if fault is Fetched.FAILED else place)
        await stand.close()

    run(work)


def test_a_full_slab_makes_a_load_a_miss_at_once():
    async def work():
        nvme = DictTier("nvme")
        nvme.fill(CHAIN)
        stand = Stand(4, nvme)
        others = keys(100, 101)
        await stand.write(others)
        held = await stand.store.prepare_read(others, "somebody")
        began = asyncio.get_running_loop().time()
        assert await stand.read(CHAIN, worth_s=10) == 2, "two slots are left, and they are ours"
        assert asyncio.get_running_loop().time() - began < 0.1
        stand.store.complete_read(held.id)
        assert await stand.read(CHAIN, worth_s=10) == 4
        await stand.close()

    run(work)


def test_a_block_that_a_replica_is_writing_is_not_waited_for():
    async def work():
        nvme = DictTier("nvme")
        nvme.fill(CHAIN)
        stand = Stand(16, nvme)
        lease = await stand.store.prepare_write(CHAIN[2:3], "writer")
        assert await stand.read(CHAIN, worth_s=10) == 2
        await stand.store.complete_write(lease.id, ())
        assert await stand.read(CHAIN, worth_s=10) == 8
        await stand.close()

    run(work)


def test_a_reader_that_is_cancelled_leaves_nothing_behind():
    async def work():
        nvme = DictTier("nvme")
        nvme.fill(CHAIN)
        nvme.open.clear()
        stand = Stand(16, nvme)
        reader = asyncio.create_task(stand.read(CHAIN, worth_s=10))
        await asyncio.sleep(0.1)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        nvme.open.set()
        await stand.rest()
        assert stand.books.stats().visible == 4, "what was under way came all the same"
        await stand.close()

    run(work)


def test_a_store_that_closes_gives_up_its_loads():
    async def work():
        nvme = DictTier("nvme")
        nvme.fill(CHAIN)
        nvme.open.clear()
        stand = Stand(16, nvme)
        reader = asyncio.create_task(stand.read(CHAIN, worth_s=10))
        await asyncio.sleep(0.1)
        await stand.store.close()
        await asyncio.gather(reader, return_exceptions=True)
        stats = stand.books.stats()
        assert (stats.read_leases, stats.write_leases, stats.visible, stats.free) == (0, 0, 0, 16)
        stand.store.check()

    run(work)


def test_a_loaded_block_cannot_be_evicted_before_its_reader_has_it():
    async def work():
        nvme = DictTier("nvme")
        nvme.fill(CHAIN[:4])
        nvme.seconds_per_block = 0.01
        stand = Stand(4, nvme)

        async def flood():
            for number in range(100, 140):
                await stand.write(keys(number))
                await asyncio.sleep(0.001)

        flooding = asyncio.create_task(flood())
        assert await stand.read(CHAIN[:4], worth_s=10) == 4
        await flooding
        await stand.close()

    run(work)


def test_prefetch_loads_whatever_it_takes():
    async def work():
        nvme = DictTier("nvme")
        nvme.fill(CHAIN)
        nvme.seconds_per_block = 3.0
        stand = Stand(16, nvme)
        assert await stand.store.prefetch(CHAIN) == 8
        assert await stand.store.prefetch([]) == 0
        assert await stand.read(CHAIN) == 8
        await stand.close()

    run(work)


def test_what_was_prefetched_outlives_the_requests_of_others(monkeypatch):
    def learning(slots, slot_bytes, **given):
        return SlotBooks(slots, slot_bytes, policy=make_policy("reuse", slots), **given)

    monkeypatch.setattr(store_stand, "SlotBooks", learning)

    async def work():
        nvme = DictTier("nvme")
        nvme.fill(CHAIN)
        stand = Stand(16, nvme)
        await stand.write(keys(*range(100, 116)))
        assert await stand.store.prefetch(CHAIN) == 8
        await asyncio.sleep(5)
        await stand.write(keys(*range(200, 208)))
        assert await stand.read(CHAIN) == 8
        await stand.close()

    run(work)


def test_a_directory_that_does_not_answer_costs_a_quarter_of_the_worth_and_what_is_known_here_is_loaded():
    async def work():
        nvme = DictTier("nvme")
        nvme.fill(CHAIN[:4])
        stand = Stand(16, nvme)
        answer, loop = asyncio.Event(), asyncio.get_running_loop()
        locate = stand.directory.locate

        async def slow(keys):
            await answer.wait()
            return await locate(keys)

        stand.directory.locate = slow
        asyncio.get_running_loop().call_later(100, answer.set)
        began = loop.time()
        assert await stand.read(CHAIN, worth_s=2.0) == 4
        assert loop.time() - began < 0.6
        await stand.close()

    run(work)


# The parts that decide.


def source(name: str) -> Source:
    async def get(keys, offsets):
        return []

    return Source(name, Place("", name), get)


def test_neighbouring_stretches_of_one_source_cost_its_latency_once():
    slow, fast = source("slow"), source("fast")
    stretches = [
        Stretch(0, 2, (slow,)),
        Stretch(2, 2, (slow, fast)),
        Stretch(4, 2, ()),
        Stretch(6, 1, (fast,)),
    ]
    cost = {"slow": 1.0, "fast": 0.1}

    def estimate(name: str, nbytes: int) -> float:
        return cost[name]

    expected = [Load(0, 4, slow), Load(4, 2, None), Load(6, 1, fast)]
    assert worthwhile(stretches, SLOT, 0.3, estimate) == expected
    assert worthwhile(stretches, SLOT, 0.09, estimate) == []
    assert worthwhile([*stretches, Stretch(7, 1, (slow,))], SLOT, 0.3, estimate) == expected


@pytest.mark.parametrize("true", [Speed(0.02, 50e6), Speed(1e-4, 3e9), Speed(0.05, 20e6)])
def test_speeds_are_learnt_from_loads_of_mixed_sizes(true):
    speeds = Speeds()
    for step in range(27):
        nbytes = (64 << 10) << (step % 9)
        speeds.observe("nvme", nbytes, true.seconds(nbytes), now=step * 0.01)
    for nbytes in (64 << 10, 1 << 20, 16 << 20):
        assert speeds.estimate("nvme", nbytes, 3.0) == pytest.approx(true.seconds(nbytes), rel=0.2)
    assert speeds.estimate("nvme", 1 << 20, 1e6) == pytest.approx(Speeds().estimate("nvme", 1 << 20, 0))
    assert speeds.of("peer:b", 0) == Speeds().of("peer", 0)


def test_a_slow_source_is_found_out_by_one_load_and_tried_again_later():
    speeds, nbytes = Speeds(), 16 << 20
    assert speeds.estimate("redis", nbytes, 0.0) < 0.05
    speeds.observe("redis", nbytes, 3.0, 0.0)
    assert speeds.estimate("redis", nbytes, 0.0) == pytest.approx(3.0, rel=0.2)
    assert speeds.estimate("redis", nbytes, 600.0) < 0.05


def test_content_of_the_stand_tells_blocks_apart():
    assert len({content(each) for each in CHAIN}) == 8
