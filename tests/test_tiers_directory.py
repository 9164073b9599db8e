"""The directory: named cases, then a simulation with lost, repeated and late messages."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kv_tiers.books import SlotBooks
from kv_tiers.directory import DirectoryState, Located, NodeRun, Outcome
from kv_tiers.keys import Fingerprint, block_keys

KEYS = block_keys(Fingerprint(bytes(32)), range(50), 1)
LEASE_S = 10.0
NOTHING = Located(0, (), ())


@pytest.fixture
def directory():
    state = DirectoryState(LEASE_S, epoch=3)
    yield state
    state.check()


def join(directory, node, keys, incarnation=1, now=0.0):
    assert directory.register(node, incarnation, now) is Outcome.OK
    assert directory.announce(node, incarnation, 1, keys, ()) is Outcome.OK


@pytest.mark.parametrize(("evicted", "run"), [([0], 0), ([1], 1), ([2], 2), ([], 3), ([0, 2], 0)])
def test_o17_a_run_ends_at_the_first_hole(directory, evicted, run):
    join(directory, "n1", KEYS[:3])
    directory.announce("n1", 1, 2, (), [KEYS[i] for i in evicted])
    located = directory.locate(KEYS[:3])
    assert (located.run, len(located.holders)) == (run, run)
    assert located.node_runs == ((NodeRun("n1", run),) if run else ())


def test_a_run_may_change_hands_and_each_node_has_its_own(directory):
    join(directory, "n1", KEYS[:2])
    join(directory, "n2", [KEYS[0], KEYS[2], KEYS[3]])
    join(directory, "n3", KEYS[1:4])
    located = directory.locate(KEYS[:5])
    assert located.run == 4
    assert [set(nodes) for nodes in located.holders] == [
        {"n1", "n2"},
        {"n1", "n3"},
        {"n2", "n3"},
        {"n2", "n3"},
    ]
    assert located.node_runs == (NodeRun("n1", 2), NodeRun("n2", 1))
    assert directory.locate(KEYS[4:]) == NOTHING and directory.locate([]) == NOTHING


def test_o15_a_dead_node_keeps_no_entry_and_its_successor_starts_at_zero(directory):
    join(directory, "w1", KEYS, incarnation=7)
    join(directory, "w2", KEYS[:1])
    assert directory.heartbeat("w2", 1, 5.0) is Outcome.OK
    assert directory.expire(9.9) == ()
    assert directory.locate(KEYS).run == 50
    assert directory.expire(10.0) == ("w1",)
    assert directory.locate(KEYS).node_runs == (NodeRun("w2", 1),)
    assert directory.heartbeat("w1", 7, 10.5) is Outcome.UNKNOWN
    assert directory.announce("w1", 7, 2, KEYS, ()) is Outcome.UNKNOWN
    assert directory.register("w1", 8, 11.0) is Outcome.OK
    assert directory.locate(KEYS).run == 1


def test_o15_a_restart_within_the_lease_drops_the_old_entries_at_once(directory):
    join(directory, "w1", KEYS, incarnation=7)
    assert directory.register("w1", 8, 1.0) is Outcome.OK
    assert directory.locate(KEYS) == NOTHING
    assert directory.announce("w1", 8, 1, KEYS[:2], ()) is Outcome.OK
    assert directory.locate(KEYS).run == 2


@pytest.mark.parametrize("expired", [False, True])
def test_an_older_incarnation_is_fenced_even_after_its_successor_expired(directory, expired):
    join(directory, "w1", KEYS, incarnation=8)
    if expired:
        directory.expire(100.0)
    assert directory.register("w1", 7, 100.0) is Outcome.STALE
    assert directory.heartbeat("w1", 7, 100.0) is Outcome.STALE
    assert directory.announce("w1", 7, 2, (), KEYS) is Outcome.STALE
    assert directory.resync("w1", 7, 2, ()) is Outcome.STALE
    assert directory.report("w1", 7, {"load": 1.0}, 100.0) is Outcome.STALE
    assert directory.locate(KEYS).run == (0 if expired else 50)


def test_a_lost_message_stops_everything_but_a_resync(directory):
    join(directory, "n1", KEYS[:2])
    assert directory.announce("n1", 1, 3, [KEYS[3]], ()) is Outcome.GAP
    assert directory.announce("n1", 1, 4, [KEYS[4]], ()) is Outcome.GAP
    assert directory.announce("n1", 1, 2, [KEYS[2]], ()) is Outcome.GAP, "late: the later ones are lost"
    assert directory.heartbeat("n1", 1, 1.0) is Outcome.GAP
    assert directory.locate(KEYS).run == 2
    assert directory.resync("n1", 1, 3, KEYS[:4]) is Outcome.GAP, "message 4 is newer"
    assert directory.resync("n1", 1, 4, KEYS[1:5]) is Outcome.OK
    assert directory.locate(KEYS).run == 0 and directory.locate(KEYS[1:]).run == 4
    assert directory.announce("n1", 1, 5, [KEYS[0]], ()) is Outcome.OK
    assert directory.locate(KEYS).run == 5
    stats = directory.stats(0.0)
    assert (stats.gaps, stats.resyncs, stats.nodes_in_gap) == (1, 2, 0)


def test_an_empty_message_reveals_a_lost_one(directory):
    join(directory, "n1", KEYS[:2])
    assert directory.announce("n1", 1, 1, (), ()) is Outcome.OK
    assert directory.announce("n1", 1, 2, (), KEYS[:1]) is Outcome.OK
    assert directory.announce("n1", 1, 4, (), ()) is Outcome.GAP


def test_repeated_and_outdated_messages_change_nothing(directory):
    join(directory, "n1", KEYS[:2])
    assert directory.announce("n1", 1, 2, [KEYS[2]], [KEYS[0]]) is Outcome.OK
    assert directory.announce("n1", 1, 1, KEYS[:2], ()) is Outcome.OK
    assert directory.announce("n1", 1, 2, [KEYS[0]], [KEYS[2]]) is Outcome.OK
    assert directory.resync("n1", 1, 1, KEYS) is Outcome.OK
    assert directory.locate(KEYS[1:]).run == 2 and directory.locate(KEYS) == NOTHING


def test_o16_a_restarted_directory_is_refilled_by_manifests():
    tier = SlotBooks(4, 64)
    lease = tier.prepare_write(KEYS[:3], "w")
    tier.complete_write(lease.id, KEYS[:3])
    tier.drain_changes()
    restarted = DirectoryState(LEASE_S, epoch=4)
    assert restarted.heartbeat("n1", 1, 0.0) is Outcome.UNKNOWN
    assert restarted.announce("n1", 1, 1, KEYS[:3], ()) is Outcome.UNKNOWN
    assert restarted.register("n1", 1, 0.0) is Outcome.OK
    manifest = tier.manifest()
    assert restarted.resync("n1", 1, manifest.seq, manifest.keys) is Outcome.OK
    assert restarted.locate(KEYS).run == 3
    tier.drop(KEYS[2:3])
    changes = tier.drain_changes()
    assert restarted.announce("n1", 1, changes.seq, changes.added, changes.removed) is Outcome.OK
    assert restarted.locate(KEYS).run == 2
    assert restarted.stats(0.0).epoch == 4


def test_o13_a_forgotten_entry_is_a_miss_until_the_node_says_otherwise(directory):
    join(directory, "n1", KEYS[:3])
    join(directory, "n2", KEYS[:1])
    assert directory.forget("n1", [KEYS[1], KEYS[1], KEYS[9]]) == 1
    assert directory.forget("nobody", KEYS) == 0
    assert directory.locate(KEYS).run == 1
    assert directory.announce("n1", 1, 2, (), [KEYS[1]]) is Outcome.OK, "its own removal comes later"
    assert directory.announce("n1", 1, 3, [KEYS[1]], ()) is Outcome.OK
    assert directory.locate(KEYS).run == 3
    assert directory.stats(0.0).forgotten_entries == 1


def test_o19_a_block_at_two_nodes_is_one_key_with_two_entries(directory):
    join(directory, "n1", KEYS[:1])
    join(directory, "n2", KEYS[:1])
    stats = directory.stats(0.0)
    assert (stats.nodes, stats.keys, stats.entries) == (2, 1, 2)
    directory.announce("n1", 1, 2, (), KEYS[:1])
    assert directory.locate(KEYS[:1]).holders == (("n2",),)


def test_registering_twice_renews_and_keeps_entries(directory):
    join(directory, "n1", KEYS[:2])
    assert directory.register("n1", 1, 8.0) is Outcome.OK
    assert directory.expire(17.0) == ()
    assert directory.locate(KEYS).run == 2


def test_a_clock_that_steps_back_shortens_no_lease(directory):
    directory.register("n1", 1, 100.0)
    directory.heartbeat("n1", 1, 50.0)
    assert directory.expire(109.0) == () and directory.expire(110.0) == ("n1",)


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
    directory.register("n1", 1, 0.0)
    directory.report("n1", 1, {"queue": 4.0}, 0.0)
    directory.report("d1", 2, {"queue": 7.0}, 5.0)
    assert directory.report("d1", 1, {"queue": 1.0}, 6.0) is Outcome.STALE
    assert set(directory.stats(9.0).reports) == {"n1", "d1"}
    assert set(directory.stats(10.0).reports) == {"d1"}, "also before anybody calls expire"
    directory.expire(15.0)
    assert directory.stats(9.0).reports == {}
    directory.register("n1", 2, 16.0)
    directory.report("n1", 2, {"queue": 4.0}, 16.0)
    directory.register("n1", 3, 17.0)
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


NODES = ("n1", "n2")
nodes = st.sampled_from(NODES)


class DirectoryMachine(RuleBasedStateMachine):
    """Two nodes, and a network that loses, repeats and delays what they say.

    The model knows what each node holds and the numbers of the last message in effect and the last heard. Where nothing
    is missing, the directory's answers must be exact, but for what readers made it forget.
    """

    @initialize()
    def build(self):
        self.directory = DirectoryState(LEASE_S, epoch=1)
        self.now = 0.0
        self.incarnation = dict.fromkeys(NODES, 1)
        self.registered = dict.fromkeys(NODES, 0)  # the newest incarnation that the directory has seen
        self.lease_end = {}  # of nodes that the directory knows
        self.seq = dict.fromkeys(NODES, 0)
        self.applied = dict.fromkeys(NODES, 0)
        self.heard = dict.fromkeys(NODES, 0)
        self.holds = {node: set() for node in NODES}
        self.forgotten = {node: set() for node in NODES}
        self.sent = {node: [] for node in NODES}  # (incarnation, seq, added, removed)

    def known(self, node):
        return node in self.lease_end and self.registered[node] == self.incarnation[node]

    def exact(self, node):
        return self.known(node) and self.applied[node] == self.seq[node]

    def says(self, node):
        return self.holds[node] - self.forgotten[node]

    def expected(self, node):
        if not self.known(node):
            return Outcome.UNKNOWN
        return Outcome.OK if self.applied[node] == self.heard[node] else Outcome.GAP

    def deliver(self, node, message):
        incarnation, seq, added, removed = message
        outcome = self.directory.announce(node, *message)
        if incarnation < self.registered[node]:
            assert outcome is Outcome.STALE
        elif incarnation != self.incarnation[node]:
            assert outcome in (Outcome.OK, Outcome.GAP, Outcome.UNKNOWN)  # dead, and nobody has noticed yet
        else:
            if self.known(node):
                self.heard[node] = max(self.heard[node], seq)
                if seq == self.heard[node] == self.applied[node] + 1:
                    self.applied[node] = seq
                    self.forgotten[node] -= added | removed
            assert outcome is self.expected(node)

    @rule(node=nodes)
    def register(self, node):
        if not self.known(node):
            self.lease_end[node] = 0.0
            self.registered[node] = self.incarnation[node]
            self.applied[node] = self.heard[node] = 0
            self.forgotten[node].clear()
        self.lease_end[node] = max(self.lease_end[node], self.now + LEASE_S)
        assert self.directory.register(node, self.incarnation[node], self.now) is self.expected(node)

    @rule(node=nodes)
    def restart_node(self, node):
        self.incarnation[node] += 1
        self.seq[node] = 0
        self.holds[node] = set()

    @rule(node=nodes, keys=st.sets(st.sampled_from(KEYS[:6]), min_size=1), lost=st.booleans())
    def change(self, node, keys, lost):
        added, removed = keys - self.holds[node], keys & self.holds[node]
        self.holds[node] ^= keys
        self.seq[node] += 1
        message = (self.incarnation[node], self.seq[node], added, removed)
        self.sent[node].append(message)
        if not lost:
            self.deliver(node, message)

    @rule(data=st.data(), node=nodes)
    def repeat_an_old_message(self, data, node):
        if self.sent[node]:
            self.deliver(node, data.draw(st.sampled_from(self.sent[node])))

    @rule(node=nodes)
    def resync(self, node):
        outcome = self.directory.resync(node, self.incarnation[node], self.seq[node], self.holds[node])
        if self.known(node):
            self.applied[node] = self.heard[node] = self.seq[node]
            self.forgotten[node].clear()
        assert outcome is self.expected(node)

    @rule(node=nodes)
    def heartbeat(self, node):
        assert self.directory.heartbeat(node, self.incarnation[node], self.now) is self.expected(node)
        if self.known(node):
            self.lease_end[node] = max(self.lease_end[node], self.now + LEASE_S)

    @rule(seconds=st.floats(0, 6))
    def time_passes(self, seconds):
        self.now += seconds
        gone = {node for node, end in self.lease_end.items() if end <= self.now}
        assert set(self.directory.expire(self.now)) == gone
        for node in gone:
            del self.lease_end[node]

    @rule(node=nodes, keys=st.sets(st.sampled_from(KEYS[:6])))
    def a_reader_trips(self, node, keys):
        self.directory.forget(node, keys)
        self.forgotten[node] |= keys

    @rule(keys=st.lists(st.sampled_from(KEYS[:6]), max_size=6))
    def locate(self, keys):
        located = self.directory.locate(keys)
        assert len(located.holders) == located.run <= len(keys)
        assert {name for nodes in located.holders for name in nodes} <= self.lease_end.keys()
        runs = {entry.node: entry.run for entry in located.node_runs}
        assert list(runs.values()) == sorted(runs.values(), reverse=True)
        exact = [node for node in NODES if self.exact(node)]
        for node in exact:
            run = next((i for i, key in enumerate(keys) if key not in self.says(node)), len(keys))
            assert runs.get(node, 0) == run
            for key, holders in zip(keys, located.holders, strict=False):
                assert (node in holders) == (key in self.says(node))
        if len(exact) == len(NODES):
            held = set().union(*(self.says(node) for node in NODES))
            assert located.run == next((i for i, key in enumerate(keys) if key not in held), len(keys))

    @invariant()
    def books_agree(self):
        if hasattr(self, "directory"):
            self.directory.check()
            assert self.directory.stats(self.now).nodes == len(self.lease_end)

    def teardown(self):
        if not hasattr(self, "directory"):
            return
        for node in NODES:
            self.register(node)
            self.resync(node)
        self.locate(KEYS[:6])


TestDirectory = DirectoryMachine.TestCase
TestDirectory.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
