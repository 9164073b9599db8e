"""What takes a while goes piece by piece: long writes let others pass, and what was told to go does not come back."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_stand import SLOT, DictTier, Stand, key, keys, run

from kv_tiers import store_fetch, store_write
from kv_tiers.books import SlotBooks
from kv_tiers.tier import UnknownLease
from kv_tiers.tier import WriteLease as Lease

CHAIN = keys(*range(8))
LONG = keys(*range(20))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(store_fetch, "PIECE_BYTES", 2 * SLOT)
    monkeypatch.setattr(store_write, "PIECE", 4)


async def turns(work) -> tuple[int, object]:
    """How many turns of the event loop others had meanwhile; and the result."""
    count = 0

    async def others():
        nonlocal count
        while True:
            await asyncio.sleep(0)
            count += 1

    other = asyncio.create_task(others())
    await asyncio.sleep(0)
    begun = count
    result = await work
    taken = count - begun
    other.cancel()
    return taken, result


def test_others_are_served_between_the_pieces_of_a_long_write_and_it_is_as_if_it_were_whole():
    async def work():
        nvme = DictTier("nvme")
        stand = Stand(32, nvme)
        await stand.write(LONG[6:9])
        served, lease = await turns(stand.store.prepare_write(LONG, "replica"))
        assert served >= 5 + 4, "five pieces, and four who learn from the request"
        assert [entry.key for entry in lease.entries] == LONG[:6] + LONG[9:]
        assert lease.present == tuple(LONG[6:9]) and not lease.being_written and not lease.no_room
        assert stand.admission.requests[-1] == tuple(LONG)
        stand.store.check()
        written = [entry.key for entry in lease.entries]
        served, visible = await turns(stand.store.complete_write(lease.id, written[:-1]))
        assert served >= 4
        assert visible == tuple(written[:-1]) and stand.books.longest_run(LONG) == 19
        await stand.close()

    run(work)


def test_a_short_write_takes_no_turn():
    async def work():
        stand = Stand()
        served, lease = await turns(stand.store.prepare_write(CHAIN[:4], "replica"))
        assert served == 0
        served, _ = await turns(stand.store.complete_write(lease.id, CHAIN[:4]))
        assert served == 0
        await stand.close()

    run(work)


@pytest.mark.parametrize("below", [True, False])
def test_of_a_chain_that_is_too_long_its_head_gets_the_slots(below):
    async def work():
        stand = Stand(10, *([DictTier("nvme")] if below else []))
        await stand.write(keys(*range(100, 110)))
        await stand.write(LONG[2:4])
        lease = await stand.store.prepare_write(LONG, "replica")
        assert [entry.key for entry in lease.entries] == LONG[:2] + LONG[4:10]
        assert lease.present == tuple(LONG[2:4]), "none of a chain's blocks goes for others of it"
        assert lease.no_room == tuple(LONG[10:])
        await stand.store.complete_write(lease.id, [entry.key for entry in lease.entries])
        assert stand.books.longest_run(LONG) == 10
        await stand.close()

    run(work)


def test_an_owner_who_dies_while_its_write_is_prepared_gets_nothing_and_leaves_nothing():
    async def work():
        stand = Stand(32)
        preparing = asyncio.create_task(stand.store.prepare_write(LONG, "dying"))
        while not stand.books.stats().writing:
            await asyncio.sleep(0)
        assert stand.store.release_owner("dying").written_blocks > 0
        lease = await preparing
        assert not lease.entries and lease.no_room == tuple(LONG)
        await stand.store.complete_write(lease.id, ())
        await stand.close()

    run(work)


def test_a_write_that_is_cancelled_while_it_is_prepared_leaves_nothing():
    async def work():
        stand = Stand(32)
        preparing = asyncio.create_task(stand.store.prepare_write(LONG, "replica"))
        while not stand.books.stats().writing:
            await asyncio.sleep(0)
        preparing.cancel()
        await asyncio.gather(preparing, return_exceptions=True)
        await stand.close()
        assert stand.books.stats().free == 32

    run(work)


def test_a_write_that_is_cancelled_while_it_is_completed_is_complete():
    async def work():
        stand = Stand(32)
        lease = await stand.store.prepare_write(LONG, "replica")
        completing = asyncio.create_task(stand.store.complete_write(lease.id, LONG))
        while not stand.books.stats().visible:
            await asyncio.sleep(0)
        assert not stand.books.holds(LONG[0]), "its tail is visible first"
        completing.cancel()
        await asyncio.gather(completing, return_exceptions=True)
        assert stand.books.longest_run(LONG) == 20
        await stand.close()

    run(work)


def test_an_owner_who_dies_while_its_write_is_completed_leaves_nothing():
    async def work():
        stand = Stand(32)
        lease = await stand.store.prepare_write(LONG, "dying")
        completing = asyncio.create_task(stand.store.complete_write(lease.id, LONG))
        while not stand.books.stats().visible:
            await asyncio.sleep(0)
        stand.store.release_owner("dying")
        visible = await completing
        assert 0 < len(visible) < 20 and stand.books.stats().visible == len(visible)
        await stand.close()

    run(work)


def test_a_foreign_key_or_an_old_lease_changes_nothing():
    async def work():
        stand = Stand(32)
        lease = await stand.store.prepare_write(LONG, "replica")
        with pytest.raises(ValueError, match="no slot for"):
            await stand.store.complete_write(lease.id, [*LONG, key(99)])
        assert stand.books.stats().writing == 20
        assert await stand.store.complete_write(lease.id, LONG) == tuple(LONG)
        with pytest.raises(UnknownLease):
            await stand.store.complete_write(lease.id, LONG)
        await stand.close()

    run(work)


@given(
    chain=st.lists(st.integers(0, 11), max_size=14),
    here=st.sets(st.integers(0, 11), max_size=6),
    written=st.sets(st.integers(0, 11)),
    piece=st.integers(1, 5),
    slots=st.integers(1, 12),
)
def test_leases_that_are_joined_and_parted_are_worth_one(chain, here, written, piece, slots):
    """The same as one reservation: slots, what became visible, and what goes next."""

    def play(pieces: bool):
        books = SlotBooks(slots, SLOT, clock=lambda: 0.0)
        first = books.reserve(keys(*sorted(here)), "before")
        books.complete_write(first.id, [entry.key for entry in first.entries])
        whole = keys(*chain)
        if pieces and whole:
            starts = range(0, len(whole), piece)
            leases = [books.reserve(whole[at : at + piece], "w", spare=frozenset(whole)) for at in starts]
            lease = books.join(leases)
        else:
            lease = books.reserve(whole, "w")
        books.check()
        commit = [entry.key for entry in lease.entries if entry.key in set(keys(*written))]
        if pieces:
            for part, own in books.part(lease.id, commit, piece):
                books.complete_write(part, own)
                books.check()
        else:
            books.complete_write(lease.id, commit)
        # A key that is named in two pieces and finds no room is refused twice.
        return _without_offsets(lease), books.coldest(slots), replace(books.stats(), blocks_refused=0)

    assert play(True) == play(False)


def _without_offsets(lease: Lease) -> tuple:
    given = [entry.key for entry in lease.entries]
    return given, lease.present, lease.being_written, lease.no_room


@pytest.mark.parametrize("command", ["evict", "flush"])
@pytest.mark.parametrize("when", [0.001, 0.0095, 0.0105, 0.0185])
def test_what_was_being_loaded_when_it_was_told_to_go_does_not_come_back(command, when):
    async def work():
        nvme = DictTier("nvme")
        nvme.fill(CHAIN)
        nvme.seconds_per_block = 0.005
        stand = Stand(16, nvme)
        reading = asyncio.create_task(stand.read(CHAIN, worth_s=10))
        await asyncio.sleep(when)
        if command == "evict":
            await stand.store.evict(CHAIN, ["cpu"])
        else:
            await stand.store.flush(["cpu"])
        assert stand.books.stats().visible == 0
        assert await reading == 0
        await stand.rest()
        assert stand.books.stats().visible == 0, "nothing of that load is visible later"
        assert await stand.read(CHAIN, worth_s=10) == 8, "the next request may have it"
        await stand.close()

    run(work)


def test_nothing_is_loaded_into_the_slab_while_the_tiers_below_are_being_emptied():
    async def work():
        nvme = DictTier("nvme")
        nvme.fill(CHAIN)
        stand = Stand(16, nvme)
        emptying = asyncio.Event()

        async def clear() -> None:
            await emptying.wait()
            nvme.books.clear()

        nvme.clear = clear
        flushing = asyncio.create_task(stand.store.flush())
        await asyncio.sleep(0.001)
        assert await stand.read(CHAIN, worth_s=10) == 0 and not nvme.gets
        emptying.set()
        assert (await flushing)["nvme"].left == 0
        await stand.rest()
        assert stand.store.stats().tiers["cpu"].visible == 0
        await stand.close()

    run(work)


def test_an_eviction_cuts_only_the_loads_of_its_own_blocks():
    async def work():
        nvme = DictTier("nvme")
        nvme.fill(CHAIN)
        nvme.seconds_per_block = 0.005
        stand = Stand(16, nvme)
        one = asyncio.create_task(stand.read(CHAIN[:4], worth_s=10))
        other = asyncio.create_task(stand.read(CHAIN[4:], worth_s=10))
        await asyncio.sleep(0.001)
        await stand.store.evict(CHAIN[1:2], ["cpu"])
        assert await one == 1, "the first of its piece came"
        assert await other == 4
        await stand.close()

    run(work)


@pytest.mark.parametrize("command", ["evict", "flush"])
def test_what_a_replica_was_writing_when_it_was_told_to_go_does_not_become_visible(command):
    async def work():
        stand = Stand()
        lease = await stand.store.prepare_write(CHAIN[:4], "replica")
        if command == "evict":
            await stand.store.evict(CHAIN[1:])
        else:
            await stand.store.flush()
        left = tuple(CHAIN[:1]) if command == "evict" else ()
        assert await stand.store.complete_write(lease.id, CHAIN[:4]) == left
        await stand.close()

    run(work)


def test_a_copy_on_its_way_down_is_waited_for_before_its_block_is_dropped_there():
    async def work():
        nvme = DictTier("nvme")
        nvme.seconds_per_block = 0.01
        stand = Stand(16, nvme, at_once=True)
        await stand.write(CHAIN)
        await asyncio.sleep(0.015)
        await stand.store.evict(CHAIN, ["nvme"])
        assert not any(stand.store.holds(CHAIN)["nvme"])
        assert all(stand.store.holds(CHAIN)["cpu"])
        await stand.close()

    run(work)


def test_the_longest_time_between_two_turns_grows_with_the_piece_and_not_with_the_prompt(monkeypatch):
    """Counted in slots that were reserved or committed in one go, for seconds depend on the machine."""
    monkeypatch.setattr(store_write, "PIECE", 64)
    chain = keys(*range(1_000))

    async def work():
        stand = Stand(1_024)
        counts = [0]

        async def watch():
            while True:
                await asyncio.sleep(0)
                stats = stand.books.stats()
                counts.append(stats.writing + 2 * stats.visible)

        watching = asyncio.create_task(watch())
        lease = await stand.store.prepare_write(chain, "replica")
        await stand.store.complete_write(lease.id, chain)
        await asyncio.sleep(0)
        watching.cancel()
        assert counts[-1] == 2 * 1_000
        assert max(after - before for before, after in pairwise(counts)) == 64
        await stand.close()

    run(work)
