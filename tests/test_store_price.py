"""What reading from a tier costs against computing: a block is not written where loading it is slower."""

from __future__ import annotations

import asyncio
import math

from store_stand import DictTier, Stand, keys, run

from policies.tiering.speed import Computing, Speed, Speeds

CHAIN = keys(*range(8))


def test_a_tier_that_is_no_faster_than_computing_is_not_written_to_until_it_is():
    async def work():
        nvme, redis = DictTier("nvme"), DictTier("redis", slots=200)
        speeds = Speeds({"nvme": Speed(1e-3, 1e9), "redis": Speed(0.2, 1e9)})
        stand = Stand(8, nvme, redis, speeds=speeds)
        stand.store._spill._low = 8
        await stand.read(keys(*range(100, 108)), worth_s=0.1)  # nobody has it: computing takes 0.1 s
        await stand.write(CHAIN)
        await asyncio.sleep(1)
        assert nvme.longest_run(CHAIN) == 8 and not redis.puts
        assert stand.store.stats().spill.too_dear == 8
        for _ in range(20):
            await stand.read(keys(*range(100, 108)), worth_s=1.0)  # a busier machine
        await stand.write(keys(*range(10, 18)))
        await asyncio.sleep(1)
        assert redis.longest_run(keys(*range(10, 18))) == 8
        await stand.close()

    run(work)


def test_where_no_tier_is_worth_reading_nobody_is_asked_what_is_worth_writing():
    async def work():
        redis = DictTier("redis")
        stand = Stand(8, redis, speeds=Speeds({"redis": Speed(0.2, 1e9)}))
        stand.store._spill._low = 8
        await stand.read(keys(*range(100, 108)), worth_s=0.1)
        await stand.write(CHAIN)
        await asyncio.sleep(1)
        assert not redis.puts and stand.store.stats().spill.unworthy == 0
        await stand.close()

    run(work)


def test_what_is_written_by_command_or_at_once_goes_down_at_any_price():
    async def work():
        redis = DictTier("redis")
        stand = Stand(16, redis, speeds=Speeds({"redis": Speed(0.2, 1e9)}))
        await stand.read(keys(*range(100, 108)), worth_s=0.1)
        await stand.write(CHAIN)
        assert await stand.store.evict(CHAIN, ["cpu"], keep=True) == {"cpu": 8}
        assert redis.longest_run(CHAIN) == 8
        await stand.close()
        redis = DictTier("redis")
        stand = Stand(16, redis, at_once=True, speeds=Speeds({"redis": Speed(0.2, 1e9)}))
        await stand.read(keys(*range(100, 108)), worth_s=0.1)
        await stand.write(CHAIN)
        await stand.store.write_down()
        assert redis.longest_run(CHAIN) == 8
        await stand.close()

    run(work)


def test_the_price_of_computing_is_that_of_the_requests_of_late():
    computing = Computing()
    assert computing.dearer_than(lambda blocks: 1e9), "nobody has told"
    computing.heard(0, 1.0)
    computing.heard(10, 0.0)
    computing.heard(10, math.inf)
    assert computing.dearer_than(lambda blocks: 1e9), "these did not either"
    computing.heard(10, 1.0)
    assert computing.dearer_than(lambda blocks: 0.099 * blocks)
    assert not computing.dearer_than(lambda blocks: 0.101 * blocks)
    for _ in range(50):
        computing.heard(100, 200.0)
    assert computing.dearer_than(lambda blocks: 1.99 * blocks)
    assert not computing.dearer_than(lambda blocks: 2.01 * blocks)
