"""What users may pin: a share of each tier, and no more pins than there are slots."""

from __future__ import annotations

import asyncio

import pytest
from store_stand import DictTier, Stand, keys, run

from kv_tiers.store_ports import PinRefused

CHAIN = keys(*range(8))


def test_a_pin_that_no_tier_could_keep_whole_is_refused_and_leaves_nothing():
    async def work():
        nvme = DictTier("nvme", slots=10)
        stand = Stand(8, nvme)
        await stand.write(CHAIN)
        nvme.fill(CHAIN)
        refused = stand.store.pin(CHAIN)
        assert isinstance(refused, PinRefused)
        assert "at most half of a tier" in refused.reason
        assert "cpu has room for 4 of 8 blocks" in refused.reason
        assert "nvme has room for 5 of 8 blocks" in refused.reason
        assert stand.store.stats().pinned == 0 and stand.books.stats().pinned == 0
        assert stand.store.pin(CHAIN[:4]) == {"cpu": 4, "nvme": 4}, "its room is free"
        assert stand.store.pin(CHAIN[:4]) == {"cpu": 4, "nvme": 4}, "a block takes one slot of the share"
        assert isinstance(stand.store.pin(CHAIN[:6]), PinRefused)
        stand.store.check()
        assert stand.store.unpin(CHAIN[:4]) == {"cpu": 4, "nvme": 4}
        assert stand.books.stats().pinned == 4, "the first pin's"
        await stand.close()

    run(work)


def test_a_pin_that_some_tier_keeps_whole_holds_what_it_can():
    async def work():
        nvme = DictTier("nvme")
        stand = Stand(8, nvme)
        await stand.write(CHAIN)
        nvme.fill(CHAIN[:6])
        assert stand.store.pin(CHAIN) == {"cpu": 4, "nvme": 6}
        await stand.close()

    run(work)


def test_pins_without_an_end_are_bounded_by_the_slots_there_are():
    async def work():
        stand = Stand(16)
        await stand.write(CHAIN)
        for _ in range(2):
            assert stand.store.pin(CHAIN) == {"cpu": 8}
        refused = stand.store.pin(CHAIN[:1])
        assert isinstance(refused, PinRefused)
        assert "2 open pins name 16 blocks" in refused.reason and "ttl_s" in refused.reason
        assert stand.store.unpin(CHAIN) == {"cpu": 8}
        assert stand.store.pin(CHAIN[:1], 5.0) == {"cpu": 1}
        stand.store.check()
        await asyncio.sleep(6)
        stand.store.sweep()
        stand.store.check()
        assert stand.store.pin(CHAIN) == {"cpu": 8}, "one ended with its time"
        await stand.close()

    run(work)


@pytest.mark.parametrize("command", ["evict", "flush", "evict in parts"])
def test_pins_whose_blocks_are_gone_count_no_more(command):
    async def work():
        nvme = DictTier("nvme", slots=16)
        stand = Stand(16, nvme)
        await stand.write(CHAIN[:4])
        nvme.fill(CHAIN[:4])
        for _ in range(3):
            stand.store.pin(CHAIN[:4])
        if command == "flush":
            await stand.store.flush(["cpu"])
            assert stand.store.stats().pinned == 3, "still pinned below"
            await stand.store.flush()
        elif command == "evict":
            await stand.store.evict(CHAIN)
        else:
            await stand.store.evict(CHAIN[:1])
            assert stand.store.stats().pinned == 3
            await stand.store.evict(CHAIN[1:])
        assert stand.store.stats().pinned == 0
        stand.store.check()
        assert stand.store.unpin(CHAIN[:4]) == {"cpu": 0, "nvme": 0}
        await stand.close()

    run(work)
