"""What `BlockStore` promises, run over the books of every tier."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from kv_tiers.block import BlockFault, BlockLayout, open_block, read_layer, write_block
from kv_tiers.books import SlotBooks
from kv_tiers.keys import Fingerprint, block_keys
from kv_tiers.slab import Slab
from kv_tiers.tier import Changes, UnknownLease

FINGERPRINT = Fingerprint(bytes(32))
LAYOUT = BlockLayout(layers=((2, 8),), dtype=torch.float32, block_tokens=4)
KEYS = block_keys(FINGERPRINT, range(400), 4)
A, B, C, D, E = KEYS[:5]

TIERS: list[tuple[str, Callable[[int], SlotBooks]]] = [
    ("cpu", lambda slots: SlotBooks(slots, LAYOUT.nbytes)),
]


@pytest.fixture(params=[factory for _, factory in TIERS], ids=[name for name, _ in TIERS])
def make(request):
    """slots -> a Tier; all made ones are checked at the end."""
    made = []

    def build(slots):
        made.append(request.param(slots))
        return made[-1]

    yield build
    for tier in made:
        tier.check()


def store(tier, keys, owner="w"):
    lease = tier.prepare_write(keys, owner)
    tier.complete_write(lease.id, [entry.key for entry in lease.entries])
    return lease


def keys_of(entries):
    return [entry.key for entry in entries]


def test_o7_a_block_is_visible_only_after_it_is_complete(make):
    tier = make(4)
    lease = tier.prepare_write([A, B], "w")
    assert keys_of(lease.entries) == [A, B]
    assert tier.longest_run([A]) == 0 and tier.prepare_read([A], "r").entries == ()
    assert tier.drain_changes() == Changes(0, (), ())
    assert tier.complete_write(lease.id, [A, B]) == (A, B)
    assert tier.longest_run([A, B, C]) == 2
    assert tier.drain_changes() == Changes(1, (A, B), ())


def test_unwritten_blocks_of_a_lease_roll_back(make):
    tier = make(2)
    lease = tier.prepare_write([A, B], "w")
    assert tier.complete_write(lease.id, [A]) == (A,)
    assert tier.longest_run([A, B]) == 1
    stats = tier.stats()
    assert (stats.free, stats.visible, stats.blocks_rolled_back) == (1, 1, 1)


def test_o8_a_queued_store_holds_its_blocks(make, tmp_path):
    """A read lease is what a spill queue holds; pressure neither frees nor refills the blocks under it."""
    tier = make(2)
    with Slab.create(tmp_path / "s.kvslab", 2 * LAYOUT.nbytes) as slab:
        write_through(tier, slab, [A, B], 1.0)
        queued = tier.prepare_read([A, B], "spill")
        assert tier.prepare_write([C, D], "w").no_room == (C, D)
        assert [read_through(slab, entry) for entry in queued.entries] == [1.0, 1.0]
        tier.complete_read(queued.id)
        write_through(tier, slab, [C, D], 2.0)
        assert tier.longest_run([A]) == 0 and tier.longest_run([C, D]) == 2


def test_o9_nothing_is_released_twice(make):
    tier = make(8)
    lease = tier.prepare_write(KEYS[:8], "w")
    tier.complete_write(lease.id, KEYS[:3])  # the prefetch ended early
    with pytest.raises(UnknownLease):
        tier.complete_write(lease.id, KEYS[:3])
    read = tier.prepare_read(KEYS[:3], "r")
    tier.complete_read(read.id)
    with pytest.raises(KeyError):
        tier.complete_read(read.id)
    assert tier.stats().free == 5
    again = tier.prepare_write(KEYS[10:18], "w")
    assert len({entry.offset for entry in again.entries}) == 8
    assert {entry.offset % LAYOUT.nbytes for entry in again.entries} == {0}


def test_leases_of_one_kind_are_not_completed_as_the_other(make):
    tier = make(2)
    write = tier.prepare_write([A], "w")
    with pytest.raises(UnknownLease):
        tier.complete_read(write.id)
    tier.complete_write(write.id, [A])
    read = tier.prepare_read([A], "r")
    with pytest.raises(UnknownLease):
        tier.complete_write(read.id, [])
    tier.complete_read(read.id)


def test_a_foreign_key_commits_nothing_and_keeps_the_lease(make):
    tier = make(2)
    lease = tier.prepare_write([A], "w")
    with pytest.raises(ValueError, match="no slot"):
        tier.complete_write(lease.id, [A, B])
    assert tier.longest_run([A]) == 0
    assert tier.complete_write(lease.id, [A]) == (A,)


def test_o10_pins_end_however_the_request_ends(make):
    tier = make(4)
    store(tier, KEYS[:4])
    for number in range(1000):
        tier.longest_run(KEYS[:4])  # a lookup alone pins nothing
        lease = tier.prepare_read(KEYS[:4], f"replica {number % 2}")
        if number % 2:
            tier.complete_read(lease.id)
    assert tier.stats().pinned == 4
    reclaimed = tier.release_owner("replica 0")
    assert (reclaimed.leases, reclaimed.read_blocks, reclaimed.written_blocks) == (500, 2000, 0)
    assert tier.stats().pinned == 0 and tier.stats().read_leases == 0
    assert keys_of(store(tier, KEYS[10:14]).entries) == KEYS[10:14]


def test_o11_a_full_tier_gives_a_partial_lease_at_once(make):
    tier = make(3)
    store(tier, [A, B])
    pinned = tier.prepare_read([A, B], "r")
    lease = tier.prepare_write([C, D, E], "w")
    assert (keys_of(lease.entries), lease.no_room) == ([C], (D, E))
    assert tier.prepare_write([D], "w").no_room == (D,), "what is being written is not evicted"
    tier.complete_write(lease.id, [C])
    tier.complete_read(pinned.id)
    assert keys_of(tier.prepare_write([D, E], "w").entries) == [D, E]


@pytest.mark.parametrize("hole", [0, 2, 4])
def test_o13_a_block_that_vanished_between_lookup_and_read_shortens_the_run(make, hole):
    tier = make(5)
    store(tier, KEYS[:5])
    promised = tier.longest_run(KEYS[:5])
    assert tier.drop([KEYS[hole]]) == 1
    lease = tier.prepare_read(KEYS[:promised], "r")
    assert keys_of(lease.entries) == KEYS[:hole]
    assert tier.longest_run(KEYS[:5]) == hole


def test_o14_evictions_and_drops_are_told(make):
    tier = make(2)
    store(tier, [A, B])
    assert tier.drain_changes() == Changes(1, (A, B), ())
    store(tier, [C])
    tier.drop([A])
    changes = tier.drain_changes()
    assert (changes.seq, changes.added, set(changes.removed)) == (2, (C,), {A, B})
    assert tier.drain_changes() == Changes(2, (), ())


def test_what_comes_and_goes_between_two_messages_is_no_change(make):
    tier = make(1)
    store(tier, [A])
    tier.drain_changes()
    store(tier, [B])
    store(tier, [A])
    assert tier.drain_changes() == Changes(1, (), ())


def test_a_manifest_takes_the_place_of_the_next_message(make):
    tier = make(3)
    store(tier, [A])
    tier.drain_changes()
    store(tier, [B])
    manifest = tier.manifest()
    assert (manifest.seq, set(manifest.keys)) == (2, {A, B})
    assert tier.drain_changes() == Changes(2, (), ())


@pytest.mark.parametrize("writers", [2, 8])
def test_o19_writers_of_the_same_block_all_succeed(make, writers):
    """All look before any stores; one gets the slots, the others hear that somebody is writing."""
    tier = make(8)
    lock = threading.Lock()  # an actor's mailbox
    barrier = threading.Barrier(writers)
    leases = []

    def run(number):
        with lock:
            assert tier.longest_run([A, B]) == 0
        barrier.wait()
        with lock:
            lease = tier.prepare_write([A, B], f"w{number}")
        barrier.wait()
        with lock:
            tier.complete_write(lease.id, keys_of(lease.entries))
            leases.append(lease)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(len(lease.entries) for lease in leases) == [0] * (writers - 1) + [2]
    assert all(lease.being_written == (A, B) for lease in leases if not lease.entries)
    assert tier.stats().visible == 2 and tier.stats().free == 6, "no duplicate bytes"
    assert tier.prepare_write([A, B], "late").present == (A, B)


def test_a_key_named_twice_gets_one_slot(make):
    tier = make(4)
    lease = tier.prepare_write([A, A], "w")
    assert (keys_of(lease.entries), lease.being_written) == ([A], (A,))


def test_the_least_recently_used_block_goes_first(make):
    tier = make(3)
    for key in (A, B, C):
        store(tier, [key])
    tier.complete_read(tier.prepare_read([A], "r").id)
    store(tier, [D])
    assert [tier.longest_run([key]) for key in (A, B, C, D)] == [1, 0, 1, 1]


def test_the_tail_of_a_chain_goes_before_its_head(make):
    tier = make(4)
    store(tier, KEYS[:4])
    for number, expected in enumerate((3, 2, 1)):
        store(tier, [KEYS[10 + number]])
        assert tier.longest_run(KEYS[:4]) == expected


def test_a_read_leaves_the_head_of_its_chain_most_recent(make):
    tier = make(3)
    store(tier, [A, B])
    store(tier, [C])
    tier.complete_read(tier.prepare_read([A, B], "r").id)
    for stranger, expected in ((10, 2), (11, 1)):
        store(tier, [KEYS[stranger]])
        assert tier.longest_run([A, B]) == expected


def test_storing_a_longer_chain_keeps_the_shared_prefix_longest(make):
    tier = make(4)
    store(tier, KEYS[:2])
    store(tier, [KEYS[20]])
    store(tier, KEYS[:3])  # two are present, one is new
    store(tier, [KEYS[21], KEYS[22]])  # evicts the stranger and then the new tail, not the prefix
    assert tier.longest_run([KEYS[20]]) == 0
    assert tier.longest_run(KEYS[:3]) == 2


def test_a_request_does_not_evict_its_own_prefix(make):
    tier = make(2)
    store(tier, [A, B])
    lease = tier.prepare_write([A, B, C], "w")
    assert (lease.present, lease.entries, lease.no_room) == ((A, B), (), (C,))
    assert tier.longest_run([A, B]) == 2


def test_a_dropped_block_is_gone_at_once_but_its_slot_only_with_its_readers(make):
    tier = make(1)
    store(tier, [A])
    reader, other = tier.prepare_read([A], "r"), tier.prepare_read([A], "r")
    assert tier.drop([A, A, B]) == 1
    assert tier.longest_run([A]) == 0 and tier.stats().condemned == 1
    assert tier.prepare_write([A], "w").no_room == (A,)
    tier.complete_read(reader.id)
    assert tier.prepare_write([A], "w").no_room == (A,)
    tier.complete_read(other.id)
    assert keys_of(tier.prepare_write([A], "w").entries) == [A]


def test_a_dead_writer_leaves_nothing_and_its_late_completion_is_refused(make):
    tier = make(4)
    dead = tier.prepare_write([A, B], "dead")
    alive = tier.prepare_write([C], "alive")
    reclaimed = tier.release_owner("dead")
    assert (reclaimed.leases, reclaimed.read_blocks, reclaimed.written_blocks) == (1, 0, 2)
    with pytest.raises(UnknownLease):
        tier.complete_write(dead.id, [A, B])
    assert tier.longest_run([A]) == 0 and tier.stats().free == 3
    assert tier.complete_write(alive.id, [C]) == (C,)
    assert tier.release_owner("nobody").leases == 0


def test_o43_clear_hides_everything_also_what_is_being_written(make):
    tier = make(4)
    store(tier, [A, B])
    tier.drain_changes()
    reader = tier.prepare_read([A], "r")
    writer = tier.prepare_write([C], "w")
    tier.clear()
    tier.check()
    assert tier.longest_run([A]) == 0 and tier.manifest().keys == ()
    renewed = tier.prepare_write([C], "w")
    assert keys_of(renewed.entries) == [C] and renewed.entries[0].offset != writer.entries[0].offset
    assert tier.complete_write(writer.id, [C]) == ()
    assert tier.longest_run([C]) == 0
    tier.complete_read(reader.id)
    assert tier.complete_write(renewed.id, [C]) == (C,)
    assert tier.stats().free == 3


def write_through(tier, slab, keys, value):
    """What a replica does to store: lease, write, complete."""
    lease = tier.prepare_write(keys, "w")
    rows = [torch.full((2, 4, 8), value)]
    for key, offset in lease.entries:
        write_block(slab.view(offset, LAYOUT.nbytes), LAYOUT, FINGERPRINT, key, rows, rows)
    tier.complete_write(lease.id, keys_of(lease.entries))


def read_through(slab, entry):
    """The value a block was filled with, or None for a miss."""
    view = slab.view(entry.offset, LAYOUT.nbytes)
    header = open_block(view, LAYOUT, FINGERPRINT, entry.key)
    k, v = torch.empty(2, 4, 8), torch.empty(2, 4, 8)
    if isinstance(header, BlockFault) or not read_layer(view, LAYOUT, header, 0, k, v):
        return None
    assert (k == k[0, 0, 0]).all() and torch.equal(k, v)
    return float(k[0, 0, 0])


def test_o12_what_lies_under_a_key_is_always_that_block(make, tmp_path):
    """Random traffic over a small slab: every leased read yields the key's own bytes."""
    tier = make(5)
    generator = torch.Generator().manual_seed(0)
    with Slab.create(tmp_path / "s.kvslab", 5 * LAYOUT.nbytes) as slab:
        for _ in range(300):
            first = int(torch.randint(0, 12, (), generator=generator))
            write_through(tier, slab, [KEYS[first]], float(first))
            for number in range(12):
                lease = tier.prepare_read([KEYS[number]], "r")
                assert all(read_through(slab, entry) == number for entry in lease.entries)
                tier.complete_read(lease.id)
    assert tier.stats().blocks_evicted > 100


def test_a_corrupt_block_is_dropped_and_stored_anew(make, tmp_path):
    tier = make(2)
    with Slab.create(tmp_path / "s.kvslab", 2 * LAYOUT.nbytes) as slab:
        write_through(tier, slab, [A], 1.0)
        lease = tier.prepare_read([A], "r")
        slab.view(lease.entries[0].offset + LAYOUT.header_bytes, 1)[0] ^= 1
        assert read_through(slab, lease.entries[0]) is None
        tier.drop([A])
        tier.complete_read(lease.id)
        write_through(tier, slab, [A], 1.0)
        assert read_through(slab, tier.prepare_read([A], "r").entries[0]) == 1.0
