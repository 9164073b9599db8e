"""The tiered store over lossy tiers, on virtual time: what is lost, what commands reach, what counts."""

from __future__ import annotations

import asyncio

import pytest
from store_stand import DictTier, Stand, content, keys, run

from kv_tiers.at_rest import AtRest
from kv_tiers.directory import Place
from kv_tiers.keys import is_exact, kept_as, lossy_key
from kv_tiers.tier import Stored

CHAIN = keys(*range(8))
INT8 = AtRest.INT8
MADE = [lossy_key(key, INT8) for key in CHAIN]


class LossyDictTier(DictTier):
    """Keeps blocks that it is given under their lossy keys only."""

    at_rest = INT8

    async def put(self, keys, blocks, *, tenant=None):
        assert all(map(is_exact, keys))
        names = [kept_as(key, INT8) for key in keys]
        return await super().put(names, [memoryview(content(name)) for name in names], tenant=tenant)

    async def drop(self, keys):
        return await super().drop([kept_as(key, INT8) for key in keys])


def test_a_lossy_copy_saves_no_exact_block_from_being_written_to_an_exact_tier():
    """The exact tier was away when the lossy one got it."""

    async def work():
        lossy, exact = LossyDictTier("nvme"), DictTier("redis", slots=64)
        stand = Stand(8, lossy, exact)
        exact.refusal = Stored.FAILED
        await stand.write(CHAIN)
        await asyncio.sleep(1)
        there = [at for at in range(8) if lossy.longest_run([MADE[at]])]
        assert there and not exact.blocks
        tries = len(exact.puts)
        for _ in range(20):
            stand.store._spill.nudge()
            await asyncio.sleep(0.5)
        assert len(exact.puts) == tries, "not at every look"
        exact.refusal = None
        await asyncio.sleep(30)
        stand.store._spill.nudge()
        await asyncio.sleep(5)
        assert all(exact.longest_run([CHAIN[at]]) for at in there)
        await stand.close()

    run(work)


def test_where_all_tiers_are_lossy_a_block_is_written_once():
    async def work():
        lossy = LossyDictTier("nvme")
        stand = Stand(8, lossy)
        await stand.write(CHAIN)
        for _ in range(5):
            await asyncio.sleep(31)
            stand.store._spill.nudge()
        assert lossy.puts and sum(map(len, lossy.puts)) == len({key for put in lossy.puts for key in put})
        await stand.close()

    run(work)


@pytest.mark.parametrize("tiers", [None, ["cpu"]])
def test_forgetting_a_prompt_reaches_what_another_nodes_codec_made_of_it(tiers):
    """This node has no lossy tier, and perhaps never had: its own did not start, say."""

    async def work():
        stand = Stand(16)
        stand.neighbour.tier.fill(MADE)
        stand.directory.know(Place("b", "cpu"), MADE)
        assert await stand.read(MADE, worth_s=10) == 8
        assert await stand.store.evict(CHAIN, tiers) == {"cpu": 0}
        assert stand.books.longest_run(MADE) == 0
        stand.directory.state.forget(Place("b", "cpu"), b"".join(key.digest for key in MADE))
        assert await stand.read(MADE, worth_s=10) == 0
        await stand.close()

    run(work)


def test_a_request_that_may_have_lossy_blocks_asks_for_each_of_its_keys_once():
    async def work():
        stand = Stand(16, LossyDictTier("nvme"))
        await stand.write(CHAIN[:3])
        await stand.write(MADE[3:5])
        assert await stand.read(CHAIN) == 3
        assert (stand.store.stats().asked, stand.store.stats().here) == (8, 3)
        assert await stand.read([*CHAIN[:3], *MADE[3:]]) == 5
        assert (stand.store.stats().asked, stand.store.stats().here) == (8 + 5, 3 + 2)
        assert await stand.read([*CHAIN[:1], *MADE[1:2]]) == 1
        assert (stand.store.stats().asked, stand.store.stats().here) == (14, 5)
        await stand.close()

    run(work)
