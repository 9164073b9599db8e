"""The directory: numbered messages, gaps, and manifests in parts."""

from __future__ import annotations

import random

import pytest
from directory_words import CHAIN, DISK, KEYS, LEASE_S, N1, join, pack, resync, run

from kv_tiers.books import SlotBooks
from kv_tiers.directory import DirectoryState, Located, Outcome, Segment
from kv_tiers.shards import parts


@pytest.fixture
def directory():
    state = DirectoryState(LEASE_S, epoch=3)
    yield state
    state.check()


def test_o14_the_directory_knows_of_every_eviction():
    """Room for 10 blocks, 11 stored; then random stores and drops, some of whose messages are lost."""
    rng = random.Random(14)
    books, directory = SlotBooks(10, 64), DirectoryState(LEASE_S, epoch=1)
    directory.register(N1, 1, 0.0)

    def store(keys):
        lease = books.prepare_write(keys, "w")
        books.complete_write(lease.id, [entry.key for entry in lease.entries])

    def tell():
        changes = books.drain_changes()
        if not changes.added and not changes.removed:
            return Outcome.OK
        return directory.announce(N1, 1, changes.seq, pack(changes.added), pack(changes.removed))

    for key in CHAIN[:11]:
        store([key])
    assert tell() is Outcome.OK
    assert run(directory, KEYS[:1]) == 0 and run(directory, KEYS[1:11]) == 10
    lost = False
    for step in range(1000):
        store(rng.sample(CHAIN, rng.randint(1, 4)))
        if rng.random() < 0.2:
            books.drop(rng.sample(CHAIN, 2))
        if rng.random() < 0.1:
            changes = books.drain_changes()
            lost |= bool(changes.added or changes.removed)
        if tell() is Outcome.GAP or step == 999:
            manifest = books.manifest()
            assert resync(directory, N1, manifest.seq, manifest.keys) is Outcome.OK
            lost = False
        stored = bytes(bool(books.longest_run([key])) for key in CHAIN)
        assert lost or directory.copies(pack(CHAIN)) == stored
    assert directory.stats(0.0).entries == books.stats().visible <= 10
    assert directory.stats(0.0).gaps > 10
    directory.check()


def test_a_lost_message_stops_everything_but_a_resync(directory):
    join(directory, N1, KEYS[:2])
    assert directory.announce(N1, 1, 3, KEYS[3], b"") is Outcome.GAP
    assert directory.announce(N1, 1, 4, KEYS[4], b"") is Outcome.GAP
    assert directory.announce(N1, 1, 2, KEYS[2], b"") is Outcome.GAP, "late: the later ones are lost"
    assert directory.heartbeat("n1", 1, 1.0) is Outcome.GAP
    assert directory.register(N1, 1, 1.0) is Outcome.GAP
    assert run(directory) == 2
    assert resync(directory, N1, 3, KEYS[:4]) is Outcome.GAP, "message 4 is newer"
    assert resync(directory, N1, 4, KEYS[1:5]) is Outcome.OK
    assert run(directory) == 0 and run(directory, KEYS[1:]) == 4
    assert directory.announce(N1, 1, 5, KEYS[0], b"") is Outcome.OK
    assert run(directory) == 5
    stats = directory.stats(0.0)
    assert (stats.gaps, stats.resyncs, stats.nodes_in_gap) == (1, 2, 0)


def test_a_gap_of_one_tier_does_not_stop_another(directory):
    join(directory, N1, KEYS[:1])
    join(directory, DISK, KEYS[:1])
    assert directory.announce(DISK, 1, 3, KEYS[1], b"") is Outcome.GAP
    assert directory.announce(N1, 1, 2, KEYS[1], b"") is Outcome.OK
    assert directory.heartbeat("n1", 1, 1.0) is Outcome.GAP
    assert directory.locate(pack(KEYS)).segments == (Segment(1, (N1, DISK)), Segment(1, (N1,)))


def test_an_empty_message_reveals_a_lost_one(directory):
    join(directory, N1, KEYS[:2])
    assert directory.announce(N1, 1, 1, b"", b"") is Outcome.OK
    assert directory.announce(N1, 1, 2, b"", KEYS[0]) is Outcome.OK
    assert directory.announce(N1, 1, 4, b"", b"") is Outcome.GAP


def test_repeated_and_outdated_messages_change_nothing(directory):
    join(directory, N1, KEYS[:2])
    assert directory.announce(N1, 1, 2, KEYS[2], KEYS[0]) is Outcome.OK
    assert directory.announce(N1, 1, 1, pack(KEYS[:2]), b"") is Outcome.OK
    assert directory.announce(N1, 1, 2, KEYS[0], KEYS[2]) is Outcome.OK
    assert resync(directory, N1, 1, KEYS) is Outcome.OK
    assert run(directory, KEYS[1:]) == 2 and run(directory) == 0


def test_the_parts_of_a_resync_replace_the_old_entries_when_the_last_has_come(directory):
    join(directory, N1, KEYS[:4])
    assert directory.resync(N1, 1, 5, pack(KEYS[2:6]), True, False) is Outcome.OK
    assert run(directory) == 6, "old and new are known meanwhile"
    assert directory.copies(pack(KEYS[:7])) == bytes([1, 1, 1, 1, 1, 1, 0]), "as one place"
    assert directory.resync(N1, 1, 5, pack(KEYS[6:8]), False, True) is Outcome.OK
    assert run(directory) == 0 and run(directory, KEYS[2:]) == 6
    assert directory.stats(0.0).entries == 6


@pytest.mark.parametrize("interruption", ["first part lost", "announcement", "begun anew", "expired"])
def test_parts_of_a_resync_that_is_no_longer_whole_do_not_count(directory, interruption):
    join(directory, N1, KEYS[:2])
    first = pack(KEYS[8:10])
    if interruption != "first part lost":
        assert directory.resync(N1, 1, 1, first, True, False) is Outcome.OK
    if interruption == "announcement":
        assert directory.announce(N1, 1, 2, KEYS[2], b"") is Outcome.OK
        assert run(directory, KEYS[8:]) == 0, "the manifest is older"
        assert directory.resync(N1, 1, 1, KEYS[10], False, True) is Outcome.OK, "outdated, not missing"
        assert run(directory) == 3
    if interruption == "begun anew":
        assert directory.resync(N1, 1, 1, KEYS[3], True, True) is Outcome.OK
        assert run(directory, KEYS[3:]) == 1
    if interruption == "expired":
        directory.expire(10.0)
        assert directory.register(N1, 1, 11.0) is Outcome.OK
    if interruption in ("first part lost", "expired"):
        assert directory.resync(N1, 1, 1, KEYS[10], False, True) is Outcome.GAP
        assert directory.heartbeat("n1", 1, 12.0) is Outcome.GAP, "until all parts come"
        assert resync(directory, N1, 1, KEYS[:1]) is Outcome.OK
        assert directory.heartbeat("n1", 1, 12.0) is Outcome.OK
        assert run(directory) == 1
    assert run(directory, KEYS[8:]) == 0


def test_changes_do_not_count_while_a_manifest_is_torn(directory):
    directory.register(N1, 1, 0.0)
    assert directory.resync(N1, 1, 0, KEYS[1], False, True) is Outcome.GAP
    assert directory.announce(N1, 1, 1, KEYS[0], b"") is Outcome.GAP
    assert run(directory) == 0
    assert resync(directory, N1, 1, KEYS[:2]) is Outcome.OK
    assert directory.announce(N1, 1, 2, KEYS[2], b"") is Outcome.OK
    assert run(directory) == 3


def test_a_part_repeated_by_the_network_changes_nothing(directory):
    directory.register(N1, 1, 0.0)
    for keys, first, last in [(KEYS[0], True, False), (KEYS[1], False, False), (KEYS[1], False, True)]:
        assert directory.resync(N1, 1, 7, keys, first, last) is Outcome.OK
    assert directory.resync(N1, 1, 7, KEYS[1], False, True) is Outcome.GAP, "as good as lost: resync again"
    assert run(directory) == 2


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 50])
def test_parts_cut_a_manifest_of_any_size(directory, count):
    join(directory, N1, KEYS[40:])
    for part in parts(pack(KEYS[:count]), part_keys=4):
        assert directory.resync(N1, 1, 3, part.keys, part.first, part.last) is Outcome.OK
    assert run(directory) == count and directory.stats(0.0).entries == count


def test_o16_a_restarted_directory_is_refilled_by_manifests():
    tier = SlotBooks(4, 64)
    lease = tier.prepare_write(CHAIN[:3], "w")
    tier.complete_write(lease.id, CHAIN[:3])
    tier.drain_changes()
    restarted = DirectoryState(LEASE_S, epoch=4)
    assert restarted.heartbeat("n1", 1, 0.0) is Outcome.UNKNOWN
    assert restarted.announce(N1, 1, 1, pack(KEYS[:3]), b"") is Outcome.UNKNOWN
    assert restarted.locate(pack(KEYS)) == Located(4, ()), "until then everything is a miss"
    assert restarted.register(N1, 1, 0.0) is Outcome.OK
    manifest = tier.manifest()
    assert resync(restarted, N1, manifest.seq, manifest.keys) is Outcome.OK
    assert run(restarted) == 3
    tier.drop(CHAIN[2:3])
    changes = tier.drain_changes()
    assert restarted.announce(N1, 1, changes.seq, pack(changes.added), pack(changes.removed)) is Outcome.OK
    assert run(restarted) == 2
    assert restarted.stats(0.0).epoch == 4


def test_o13_what_a_reader_forgets_is_forgotten_in_a_resync_under_way_too(directory):
    join(directory, N1, KEYS[:3])
    directory.resync(N1, 1, 1, pack(KEYS[:3]), True, False)
    assert directory.forget(N1, KEYS[0]) == 1
    assert directory.resync(N1, 1, 1, b"", False, True) is Outcome.OK
    assert run(directory) == 0 and run(directory, KEYS[1:]) == 2
