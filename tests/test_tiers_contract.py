"""What every `Tier` promises of the blocks in it: found, whole, bounded and told. Add your tier to `STANDS`."""

from __future__ import annotations

import asyncio
import random

import pytest
from lossy_stands import LOSSY_STANDS
from tier_stands import FINGERPRINT, KEYS, STANDS, begun, block, buffers, get, put, stand_fixture, visible

from kv_tiers.keys import Fingerprint, block_keys
from kv_tiers.tier import Changes, Fetched, Stored

A, B, C, D, E = KEYS[:5]
HIT, MISS, CORRUPT = Fetched.HIT, Fetched.MISS, Fetched.CORRUPT
STORED, PRESENT, NO_ROOM = Stored.STORED, Stored.PRESENT, Stored.NO_ROOM

open_stand = stand_fixture([*STANDS, *LOSSY_STANDS])
open_exact_stand = stand_fixture(STANDS)


# Storing and finding


async def test_o7_a_block_is_visible_only_after_it_was_put(open_stand):
    tier = (await open_stand(4)).tier
    task = await begun(put(tier, [A, B]))
    assert tier.longest_run([A, B]) == 0 and await get(tier, [A]) == [MISS]
    assert await task == [STORED, STORED]
    assert tier.longest_run([A, B, C]) == 2
    assert tier.drain_changes() == Changes(1, (A, B), ())


async def test_a_batch_has_one_answer_per_block(open_stand):
    tier = (await open_stand(4)).tier
    assert await put(tier, []) == await get(tier, []) == []
    await put(tier, [B])
    assert await put(tier, [A, B, C]) == [STORED, PRESENT, STORED]
    assert await get(tier, [A, D, C, E, B]) == [HIT, MISS, HIT, MISS, HIT]


async def test_a_block_named_twice_is_stored_once_and_found_twice(open_stand):
    tier = (await open_stand(4)).tier
    assert await put(tier, [A, A, B]) == [STORED, PRESENT, STORED]
    assert tier.stats().visible == 2
    assert await get(tier, [A, A]) == [HIT, HIT]


@pytest.mark.parametrize("writers", [2, 8])
async def test_o19_writers_of_the_same_block_all_succeed(open_stand, writers):
    tier = (await open_stand(8)).tier
    answers = await asyncio.gather(*(put(tier, [A, B]) for _ in range(writers)))
    assert sorted(answers, key=str) == sorted(
        [[STORED, STORED]] + [[PRESENT, PRESENT]] * (writers - 1), key=str
    )
    assert tier.stats().visible == 2 and tier.stats().blocks_written == 2, "no bytes are charged twice"


@pytest.mark.parametrize(("hole", "run"), [(0, 0), (1, 1), (2, 2)])
async def test_o17_a_run_ends_at_the_first_hole(open_stand, hole, run):
    tier = (await open_stand(4)).tier
    await put(tier, [A, B, C])
    assert await tier.drop([KEYS[hole]]) == 1
    assert tier.longest_run([A, B, C]) == run


@pytest.mark.parametrize("gone", [0, 1, 2])
async def test_o13_a_block_that_went_after_the_look_is_a_miss_and_the_others_hits(open_stand, gone):
    tier = (await open_stand(4)).tier
    await put(tier, [A, B, C])
    assert tier.longest_run([A, B, C]) == 3
    await tier.drop([KEYS[gone]])
    expected = [HIT] * 3
    expected[gone] = MISS
    assert await get(tier, [A, B, C]) == expected


async def test_o12_a_buffer_that_happens_to_hold_the_block_makes_no_hit_of_a_miss(open_stand):
    tier = (await open_stand(4)).tier
    await put(tier, [A])
    assert await tier.get([B, A], [block(B), block(B)]) == [MISS, HIT]


# Whole blocks only


async def test_o12_a_corrupt_block_is_never_a_hit_and_gone_afterwards(open_stand):
    stand = await open_stand(4)
    tier = stand.tier
    await put(tier, [A, B, C])
    tier.drain_changes()
    await stand.corrupt(B)
    assert await get(tier, [A, B, C]) == [HIT, CORRUPT, HIT]
    assert tier.longest_run([A, B, C]) == 1
    assert tier.drain_changes() == Changes(2, (), (B,))
    assert await get(tier, [B]) == [MISS]
    assert await put(tier, [B]) == [STORED]
    assert await get(tier, [A, B, C]) == [HIT, HIT, HIT]


async def test_o12_what_was_put_under_a_wrong_name_is_corrupt(open_stand):
    tier = (await open_stand(4)).tier
    stored = await tier.put([A], [block(B)])
    assert await get(tier, [A]) == [CORRUPT if stored == [STORED] else MISS], (
        "who encodes it looks at it before"
    )
    assert tier.longest_run([A]) == 0


async def test_a_pinned_block_that_is_corrupt_goes_too(open_stand):
    stand = await open_stand(4)
    await put(stand.tier, [A])
    assert stand.tier.pin([A]) == 1
    await stand.corrupt(A)
    assert await get(stand.tier, [A]) == [CORRUPT]
    assert stand.tier.longest_run([A]) == 0 and stand.tier.unpin([A]) == 0
    assert stand.tier.stats().pinned == 0


async def test_the_callers_buffer_is_copied(open_stand):
    tier = (await open_stand(4)).tier
    mine = block(A)
    await tier.put([A], [mine])
    mine[:] = bytes(len(mine))
    assert await get(tier, [A]) == [HIT]


# Bounds


async def test_o14_random_traffic_stays_in_bounds_and_every_change_is_told(open_stand):
    """A directory that hears the journal knows at rest exactly what is stored."""
    tier = (await open_stand(10)).tier
    chance = random.Random(0)
    told, seq = set(), 0
    for _ in range(150):
        keys = chance.sample(KEYS[:40], chance.randint(1, 4))
        for key, answer in zip(keys, await get(tier, keys), strict=True):
            assert (answer is HIT) == (key in told)
        await put(tier, keys)
        changes = tier.drain_changes()
        assert changes.seq == seq + bool(changes.added or changes.removed)
        seq = changes.seq
        assert told.issuperset(changes.removed) and told.isdisjoint(changes.added)
        told = (told - set(changes.removed)) | set(changes.added)
        assert told == set(visible(tier)) and len(told) <= 10
    assert tier.stats().blocks_evicted > 100
    assert (set(tier.manifest().keys), tier.manifest().seq) == (told, seq)


async def test_o14_the_eleventh_block_of_ten_is_told_to_have_replaced_another(open_stand):
    tier = (await open_stand(10)).tier
    await put(tier, KEYS[:10])
    tier.drain_changes()
    assert await put(tier, [KEYS[10]]) == [STORED]
    changes = tier.drain_changes()
    assert changes.added == (KEYS[10],) and len(changes.removed) == 1
    assert await get(tier, changes.removed) == [MISS]


async def test_the_tail_of_a_chain_goes_before_its_head(open_stand):
    tier = (await open_stand(4)).tier
    await put(tier, KEYS[:4])
    for number, expected in enumerate((3, 2, 1)):
        assert await put(tier, [KEYS[10 + number]]) == [STORED]
        assert tier.longest_run(KEYS[:4]) == expected


async def test_what_was_read_or_asked_for_stays_longest(open_stand):
    tier = (await open_stand(3)).tier
    for key in (A, B, C):
        await put(tier, [key])
    await get(tier, [A])
    await put(tier, [D])
    assert visible(tier) == [A, C, D]
    tier.accessed([C])
    await put(tier, [E])
    assert visible(tier) == [C, D, E]


async def test_o11_more_blocks_than_slots_are_answered_at_once(open_stand):
    tier = (await open_stand(2)).tier
    assert await put(tier, [A, B, C]) == [STORED, STORED, NO_ROOM]
    assert await get(tier, [A, B, C]) == [HIT, HIT, MISS]


async def test_o8_what_is_being_written_gives_its_slot_to_nobody(open_exact_stand):
    """Encoding comes before a slot is asked for, so of a lossy tier these two are its inner tier's promises."""
    tier = (await open_exact_stand(2)).tier
    task = await begun(put(tier, [A, B]))
    assert await put(tier, [C]) == [NO_ROOM]
    assert await task == [STORED, STORED]
    assert await put(tier, [C]) == [STORED]


async def test_o18_what_is_being_read_gives_its_slot_to_nobody(open_exact_stand):
    tier = (await open_exact_stand(2)).tier
    await put(tier, [A, B])
    task = await begun(get(tier, [A, B]))
    assert await put(tier, [C, D]) == [NO_ROOM, NO_ROOM]
    assert await task == [HIT, HIT]
    assert await put(tier, [C, D]) == [STORED, STORED]


# Telling


async def test_what_comes_and_goes_between_two_messages_is_no_change(open_stand):
    tier = (await open_stand(1)).tier
    await put(tier, [A])
    assert tier.drain_changes() == Changes(1, (A,), ())
    await put(tier, [B])
    await put(tier, [A])
    assert tier.drain_changes() == Changes(1, (), ())


async def test_a_manifest_takes_the_place_of_the_next_message(open_stand):
    tier = (await open_stand(3)).tier
    await put(tier, [A])
    tier.drain_changes()
    await put(tier, [B])
    manifest = tier.manifest()
    assert (manifest.seq, set(manifest.keys)) == (2, {A, B})
    assert tier.drain_changes() == Changes(2, (), ())


async def test_stats_add_up(open_stand):
    stand = await open_stand(3)
    tier = stand.tier
    await put(tier, [A, B, C])
    await put(tier, [D, A])
    await get(tier, [D, E, E])
    await stand.corrupt(D)
    await get(tier, [D])
    await tier.drop([A])
    stats = tier.stats()
    assert (stats.capacity, stats.visible, stats.free) == (3, 1, 2)
    assert (stats.blocks_written, stats.blocks_evicted, stats.blocks_dropped) == (4, 1, 2)
    assert stats.blocks_read == 1, "misses and corrupt blocks were not read"
    assert stats.blocks_refused == stats.blocks_rolled_back == 0


async def test_o22_what_differs_in_model_or_tenant_never_meets(open_stand):
    tier = (await open_stand(8)).tier
    tokens = range(4)
    model = Fingerprint(bytes(range(32)))
    keys = [
        block_keys(fingerprint, tokens, 4, tenant=tenant)[0]
        for fingerprint in (FINGERPRINT, model)
        for tenant in (None, "a", "b")
    ]
    assert len(set(keys)) == 6
    for number, key in enumerate(keys):
        assert tier.longest_run([key]) == 0 and await get(tier, [key]) == [MISS]
        fingerprint = FINGERPRINT if number < 3 else model
        assert await tier.put([key], [block(key, fingerprint)]) == [STORED]
    into = buffers(6)
    assert await tier.get(keys, into) == [HIT] * 6
    assert len({bytes(found) for found in into}) == 6
    await tier.clear()
