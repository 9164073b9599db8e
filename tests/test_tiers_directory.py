"""The directory: named cases of places, leases, incarnations, readers and reports."""

from __future__ import annotations

import pytest
from directory_words import DISK, KEYS, LEASE_S, N1, N2, N3, REDIS, join, pack, resync, run

from kv_tiers.directory import DirectoryState, Located, Outcome, Place, Segment
from kv_tiers.keys import Fingerprint, block_keys
from kv_tiers.shards import split

NOTHING = Located(3, ())


@pytest.fixture
def directory():
    state = DirectoryState(LEASE_S, epoch=3)
    yield state
    state.check()


@pytest.mark.parametrize(("evicted", "left"), [([0], 0), ([1], 1), ([2], 2), ([], 3), ([0, 2], 0)])
def test_o17_a_run_ends_at_the_first_hole(directory, evicted, left):
    join(directory, N1, KEYS[:3])
    directory.announce(N1, 1, 2, b"", pack(KEYS[i] for i in evicted))
    located = directory.locate(pack(KEYS[:3]))
    assert located.run == left
    assert located.segments == ((Segment(left, (N1,)),) if left else ())


def test_stretches_of_the_same_holders_are_one_segment(directory):
    join(directory, N1, KEYS[:2])
    join(directory, N2, [KEYS[0], KEYS[2], KEYS[3]])
    join(directory, N3, KEYS[1:4])
    located = directory.locate(pack(KEYS[:5]))
    assert located == Located(3, (Segment(1, (N1, N2)), Segment(1, (N1, N3)), Segment(2, (N2, N3))))
    assert located.run == 4
    assert directory.copies(pack(KEYS[:5])) == bytes([2, 2, 2, 2, 0])
    assert directory.locate(pack(KEYS[4:])) == NOTHING and directory.locate(b"") == NOTHING


def test_tiers_of_a_node_and_what_all_share_are_places_of_their_own(directory):
    join(directory, N1, KEYS[:3])
    join(directory, DISK, KEYS[:2])
    directory.renew_shared(REDIS, 5, 0.0)
    directory.announce_shared(REDIS, 5, pack(KEYS[:1]), b"")
    assert directory.locate(pack(KEYS)).segments == (
        Segment(1, (REDIS, N1, DISK)),
        Segment(1, (N1, DISK)),
        Segment(1, (N1,)),
    )
    assert directory.copies(pack(KEYS[:4])) == bytes([3, 2, 1, 0])
    stats = directory.stats(0.0)
    assert stats.tiers == {"cpu": 3, "nvme": 2, "redis": 1}
    assert (stats.nodes, stats.keys, stats.entries) == (1, 3, 6)


def test_more_copies_than_a_byte_counts_are_255(directory):
    for node in range(260):
        join(directory, Place(f"n{node}", "cpu"), KEYS[:1])
    assert directory.copies(KEYS[0]) == b"\xff"
    assert len(directory.locate(KEYS[0]).segments[0].places) == 260


def test_blocks_are_found_by_the_beginning_of_their_keys(directory):
    twins = [bytes.fromhex(digits).ljust(32, b"\0") for digits in ("ab01", "ab02", "ab1000", "ac01")]
    join(directory, N1, twins)
    join(directory, N2, twins[1:2])

    def find(prefix, limit=10):
        return [(match.key[:4], match.places) for match in directory.find(prefix, limit)]

    assert find("ab0") == [("ab01", (N1,)), ("ab02", (N1, N2))]
    assert [key for key, _ in find("ab")] == ["ab01", "ab02", "ab10"]
    assert find("ab", limit=1) == [("ab01", (N1,))]
    assert find(twins[3].hex()) == [("ac01", (N1,))] and find("ad") == []
    directory.expire(LEASE_S)
    assert find("ab") == []


def test_half_a_digest_is_refused_and_changes_nothing(directory):
    join(directory, N1, KEYS[:1])
    for call in (
        lambda: directory.locate(KEYS[0][:31]),
        lambda: directory.copies(KEYS[0] + b"x"),
        lambda: directory.forget(N1, KEYS[0][:31]),
        lambda: split(KEYS[0][:31], 2),
    ):
        with pytest.raises(ValueError, match="digests"):
            call()
    assert run(directory) == 1


def test_o15_a_dead_node_keeps_no_entry_and_its_successor_starts_at_zero(directory):
    join(directory, N1, KEYS, incarnation=7)
    join(directory, DISK, KEYS, incarnation=7)
    join(directory, N2, KEYS[:1])
    assert directory.heartbeat("n2", 1, 5.0) is Outcome.OK
    assert directory.expire(9.9) == ()
    assert run(directory) == 50
    assert directory.expire(10.0) == ("n1",)
    assert directory.locate(pack(KEYS)).segments == (Segment(1, (N2,)),)
    assert directory.heartbeat("n1", 7, 10.5) is Outcome.UNKNOWN
    assert directory.announce(N1, 7, 2, pack(KEYS), b"") is Outcome.UNKNOWN
    assert directory.register(N1, 8, 11.0) is Outcome.OK
    assert directory.announce(DISK, 8, 2, pack(KEYS), b"") is Outcome.UNKNOWN, "each place registers"
    assert run(directory) == 1


def test_o15_a_restart_within_the_lease_drops_all_old_entries_at_once(directory):
    join(directory, N1, KEYS, incarnation=7)
    join(directory, DISK, KEYS, incarnation=7)
    assert directory.register(N1, 8, 1.0) is Outcome.OK
    assert directory.locate(pack(KEYS)) == NOTHING
    assert directory.announce(N1, 8, 1, pack(KEYS[:2]), b"") is Outcome.OK
    assert run(directory) == 2


@pytest.mark.parametrize("expired", [False, True])
def test_an_older_incarnation_is_fenced_even_after_its_successor_expired(directory, expired):
    join(directory, N1, KEYS, incarnation=8)
    if expired:
        directory.expire(100.0)
    assert directory.register(N1, 7, 100.0) is Outcome.STALE
    assert directory.register(DISK, 7, 100.0) is Outcome.STALE
    assert directory.heartbeat("n1", 7, 100.0) is Outcome.STALE
    assert directory.announce(N1, 7, 2, b"", pack(KEYS)) is Outcome.STALE
    assert resync(directory, N1, 2, (), incarnation=7) is Outcome.STALE
    assert directory.report("n1", 7, {"load": 1.0}, 100.0) is Outcome.STALE
    assert run(directory) == (0 if expired else 50)


def test_o13_a_forgotten_entry_is_a_miss_until_the_node_says_otherwise(directory):
    join(directory, N1, KEYS[:3])
    join(directory, N2, KEYS[:1])
    assert directory.forget(N1, pack([KEYS[1], KEYS[1], KEYS[9]])) == 1
    assert directory.forget(Place("nobody", "cpu"), pack(KEYS)) == 0
    assert directory.forget(DISK, pack(KEYS)) == 0, "another tier of the node"
    assert run(directory) == 1
    assert directory.announce(N1, 1, 2, b"", KEYS[1]) is Outcome.OK, "its own removal comes later"
    assert directory.announce(N1, 1, 3, KEYS[1], b"") is Outcome.OK
    assert run(directory) == 3
    assert directory.stats(0.0).forgotten_entries == 1


def test_o19_a_block_at_two_nodes_is_one_key_with_two_entries(directory):
    join(directory, N1, KEYS[:1])
    join(directory, N2, KEYS[:1])
    stats = directory.stats(0.0)
    assert (stats.nodes, stats.keys, stats.entries) == (2, 1, 2)
    directory.announce(N1, 1, 2, b"", KEYS[0])
    assert directory.locate(KEYS[0]).segments == (Segment(1, (N2,)),)


def test_registering_twice_renews_and_keeps_entries(directory):
    join(directory, N1, KEYS[:2])
    assert directory.register(N1, 1, 8.0, "agent") is Outcome.OK
    assert directory.expire(17.0) == ()
    assert run(directory) == 2


def test_addresses_are_those_of_living_nodes(directory):
    directory.register(N1, 1, 0.0, "agent one")
    directory.register(DISK, 1, 0.0)
    directory.register(N2, 1, 5.0, "agent two")
    directory.register(N3, 1, 5.0)
    assert directory.addresses() == {"n1": "agent one", "n2": "agent two"}
    directory.expire(10.0)
    assert directory.addresses() == {"n2": "agent two"}
    directory.register(N2, 2, 11.0, "its successor")
    assert directory.addresses() == {"n2": "its successor"}


def test_a_clock_that_steps_back_shortens_no_lease(directory):
    directory.register(N1, 1, 100.0)
    directory.heartbeat("n1", 1, 50.0)
    assert directory.expire(109.0) == () and directory.expire(110.0) == ("n1",)


def test_a_shared_place_is_known_when_somebody_has_listed_it(directory):
    assert directory.announce_shared(REDIS, 5, KEYS[0], b"") is Outcome.UNKNOWN
    assert directory.renew_shared(REDIS, 5, 0.0) is Outcome.UNKNOWN
    assert directory.announce_shared(REDIS, 5, KEYS[4], b"", whole=False) is Outcome.OK
    assert directory.renew_shared(REDIS, 5, 1.0) is Outcome.UNKNOWN, "a change is no list"
    for _ in range(2):  # two nodes list at the same time
        assert directory.announce_shared(REDIS, 5, pack(KEYS[:4]), b"") is Outcome.OK
    assert directory.renew_shared(REDIS, 5, 2.0) is Outcome.OK
    assert run(directory) == 5
    assert directory.announce_shared(REDIS, 5, b"", KEYS[1]) is Outcome.OK
    assert directory.announce_shared(REDIS, 5, b"", KEYS[1]) is Outcome.OK
    assert run(directory) == 1
    assert directory.forget(REDIS, KEYS[0]) == 1 and run(directory) == 0


def test_a_restarted_shared_store_is_empty_and_its_past_is_fenced(directory):
    directory.renew_shared(REDIS, 5, 0.0)
    directory.announce_shared(REDIS, 5, pack(KEYS), b"")
    assert directory.renew_shared(REDIS, 6, 1.0) is Outcome.UNKNOWN
    assert run(directory) == 0
    assert directory.renew_shared(REDIS, 5, 2.0) is Outcome.STALE
    assert directory.announce_shared(REDIS, 5, pack(KEYS), b"") is Outcome.STALE
    assert directory.announce_shared(REDIS, 6, b"", b"") is Outcome.OK
    assert directory.renew_shared(REDIS, 6, 2.0) is Outcome.OK


def test_a_shared_place_that_no_node_renews_is_gone(directory):
    directory.renew_shared(REDIS, 5, 0.0)
    directory.announce_shared(REDIS, 5, pack(KEYS), b"")
    directory.renew_shared(REDIS, 5, 5.0)
    directory.expire(14.0)
    assert run(directory) == 50
    assert directory.expire(15.0) == (), "it is no node"
    assert run(directory) == 0
    assert directory.renew_shared(REDIS, 4, 16.0) is Outcome.STALE
    assert directory.renew_shared(REDIS, 5, 16.0) is Outcome.UNKNOWN


def test_shared_places_and_those_of_nodes_are_not_confused(directory):
    with pytest.raises(ValueError, match="renewed"):
        directory.register(REDIS, 1, 0.0)
    with pytest.raises(ValueError, match="registered"):
        directory.renew_shared(N1, 1, 0.0)
    assert directory.announce(REDIS, 1, 1, KEYS[0], b"") is Outcome.UNKNOWN


def test_a_vanished_node_is_forgotten_at_once_and_swept_in_bounded_steps(directory):
    keys = pack(key.digest for key in block_keys(Fingerprint(bytes(32)), range(60_000), 1))
    directory.register(N1, 1, 0.0)
    directory.resync(N1, 1, 1, keys, True, True)
    join(directory, N2, KEYS)
    directory.register(N1, 2, 1.0)
    directory.heartbeat("n2", 1, 1.0)
    stats = directory.stats(1.0)
    assert (stats.keys, stats.entries, stats.unswept) == (50, 50, 60_000 - 50)
    assert directory.locate(keys) == Located(3, (Segment(50, (N2,)),))
    left = [stats.unswept]
    while left[-1]:
        directory.expire(1.0 + 0.25 * len(left))
        left.append(directory.stats(1.0).unswept)
        assert 0 < left[-2] - left[-1] < 6000
    directory.check()
    assert directory.stats(1.0).keys == 50 and run(directory) == 50


def test_what_remains_after_a_death_joins_what_was_alone_before(directory):
    keys = [key.digest for key in block_keys(Fingerprint(bytes(32)), range(3000), 1)]
    join(directory, N1, keys[:2000])
    join(directory, N2, keys)
    directory.register(N1, 2, 1.0)
    assert directory.locate(pack(keys)).segments == (Segment(3000, (N2,)),), "one stretch"
    for step in range(3):
        directory.check()
        directory.expire(1.0 + step)
    assert directory.stats(1.0).tiers == {"cpu": 3000}
    assert directory.forget(N2, pack(keys[:1500])) == 1500
    assert directory.stats(1.0).keys == 1500


def test_entries_that_come_back_before_the_sweep_stay(directory):
    join(directory, N1, KEYS)
    directory.register(N1, 2, 1.0)
    directory.announce(N1, 2, 1, pack(KEYS[:10]), b"")
    directory.expire(1.0)
    assert run(directory) == 10 and directory.stats(1.0).unswept == 0


def test_o42_each_source_has_its_own_load_value(directory):
    for now in range(5):
        directory.report("worker", 1, {"usage": 0.99}, now)
        directory.report("router 1", 1, {"usage": 0.02}, now)
        directory.report("router 2", 1, {"usage": 0.02}, now)
    assert directory.stats(5.0).reports == {
        "worker": {"usage": 0.99},
        "router 1": {"usage": 0.02},
        "router 2": {"usage": 0.02},
    }


def test_reports_vanish_with_their_source(directory):
    directory.register(N1, 1, 0.0)
    directory.report("n1", 1, {"queue": 4.0}, 0.0)
    directory.report("d1", 2, {"queue": 7.0}, 5.0)
    assert directory.report("d1", 1, {"queue": 1.0}, 6.0) is Outcome.STALE
    assert set(directory.stats(9.0).reports) == {"n1", "d1"}
    assert set(directory.stats(10.0).reports) == {"d1"}, "also before anybody calls expire"
    directory.expire(15.0)
    assert directory.stats(9.0).reports == {}
    directory.register(N1, 2, 16.0)
    directory.report("n1", 2, {"queue": 4.0}, 16.0)
    directory.register(N1, 3, 17.0)
    assert directory.stats(17.0).reports == {}


def test_reports_are_copies(directory):
    values = {"load": 1.0}
    directory.report("d1", 1, values, 0.0)
    values["load"] = 2.0
    directory.stats(0.0).reports["d1"]["load"] = 3.0
    assert directory.stats(0.0).reports["d1"]["load"] == 1.0


def test_a_lease_without_length_is_refused():
    with pytest.raises(ValueError):
        DirectoryState(0.0, epoch=1)
