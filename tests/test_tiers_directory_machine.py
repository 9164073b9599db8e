"""The directory, whole and in shards, against sets of what it was told, with lost, repeated and late messages."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kv_tiers.directory import DirectoryState, Located, Outcome, Place
from kv_tiers.keys import Fingerprint, block_keys
from kv_tiers.shards import join_bytes, join_located, join_outcomes, join_stats, parts, split

LEASE_S = 10.0
KEYS = [key.digest for key in block_keys(Fingerprint(bytes(32)), range(8), 1)]
NODES = ("n1", "n2")
PLACES = (Place("n1", "cpu"), Place("n1", "nvme"), Place("n2", "cpu"))
REDIS = Place("", "redis")
SHARDS = 3

places = st.sampled_from(PLACES)
keysets = st.sets(st.sampled_from(KEYS))


def pack(keys):
    return b"".join(keys)


class Both:
    """One directory, and as many messages and questions again to three shards; all answers must be the same."""

    def __init__(self):
        self.whole = DirectoryState(LEASE_S, epoch=1)
        self.shards = [DirectoryState(LEASE_S, epoch=1) for _ in range(SHARDS)]

    def tell(self, method, *args):
        outcome = getattr(self.whole, method)(*args)
        assert join_outcomes([getattr(shard, method)(*args) for shard in self.shards]) is outcome
        return outcome

    def deal(self, method, *args, keys, more=()):
        """`keys` follow `args`, each dealt out; then `more`."""
        outcome = getattr(self.whole, method)(*args, *map(pack, keys), *more)
        dealt = zip(*(split(pack(some), SHARDS).keys for some in keys), strict=True)
        answers = [
            getattr(shard, method)(*args, *part, *more)
            for shard, part in zip(self.shards, dealt, strict=True)
        ]
        assert (sum(answers) if isinstance(outcome, int) else join_outcomes(answers)) == outcome
        return outcome

    def locate(self, keys):
        parted = split(keys, SHARDS)
        answers = [shard.locate(part) for shard, part in zip(self.shards, parted.keys, strict=True)]
        located = self.whole.locate(keys)
        assert join_located(parted, answers) == located
        return located

    def copies(self, keys):
        parted = split(keys, SHARDS)
        answers = [shard.copies(part) for shard, part in zip(self.shards, parted.keys, strict=True)]
        assert join_bytes(parted, answers) == self.whole.copies(keys)
        return self.whole.copies(keys)

    def stats(self, now):
        stats = self.whole.stats(now)
        joined = join_stats([shard.stats(now) for shard in self.shards])
        for gauge in ("epoch", "nodes", "nodes_in_gap", "keys", "entries", "tiers", "forgotten_entries"):
            assert getattr(joined, gauge) == getattr(stats, gauge)
        return stats

    def check(self):
        for state in (self.whole, *self.shards):
            state.check()


class Told:
    """What the directory must know of one place: numbers, entries, and those of a resync under way."""

    def __init__(self):
        self.applied = self.heard = 0
        self.torn = False
        self.entries = set()
        self.coming = None
        self.coming_seq = 0

    def outcome(self):
        return Outcome.GAP if self.torn or self.applied < self.heard else Outcome.OK


class DirectoryMachine(RuleBasedStateMachine):
    """Two nodes, one with two tiers, and a store that they share. The network garbles what they say of their blocks."""

    @initialize()
    def build(self):
        self.directory = Both()
        self.now = 0.0
        # The nodes' own truth.
        self.incarnation = dict.fromkeys(NODES, 1)
        self.seq = dict.fromkeys(PLACES, 0)
        self.holds = {place: set() for place in PLACES}
        self.sent = {place: [] for place in PLACES}  # (incarnation, seq, added, removed)
        self.store = 1  # the shared store's incarnation
        # What the directory must know.
        self.newest = {}
        self.leases = {}  # node: (incarnation, end)
        self.told = {}
        self.forgotten = {place: set() for place in PLACES}
        self.parts = {place: [] for place in PLACES}  # of a resync under way
        self.missed = {place: set() for place in PLACES}  # in it
        self.shared = None  # (incarnation, end, entries, listed)
        self.newest_store = 0
        for place in PLACES:
            self.register(place, 0)

    def find(self, node, incarnation):
        if incarnation < self.newest.get(node, 0):
            return Outcome.STALE
        return None if self.leases.get(node, (0,))[0] == incarnation else Outcome.UNKNOWN

    def find_place(self, place, incarnation):
        missing = None if place in self.told else Outcome.UNKNOWN
        return self.find(place.node, incarnation) or missing

    def lose(self, node):
        self.leases.pop(node, None)
        for place in PLACES:
            if place.node == node:
                self.told.pop(place, None)
                self.forgotten[place].clear()

    def expected(self):
        """Pairs of block and place."""
        pairs = set()
        for place, told in self.told.items():
            pairs |= {(key, place) for key in told.entries | (told.coming or set())}
        return pairs | ({(key, REDIS) for key in self.shared[2]} if self.shared else set())

    def deliver(self, place, message):
        incarnation, seq, added, removed = message
        expected = self.find_place(place, incarnation)
        if expected is None:
            told = self.told[place]
            told.heard = max(told.heard, seq)
            if seq == told.heard == told.applied + 1 and not told.torn:
                told.applied, told.coming = seq, None
                told.entries = told.entries - removed | added
                self.forgotten[place] -= added | removed
            expected = told.outcome()
        args = ("announce", place, incarnation, seq)
        assert self.directory.deal(*args, keys=(added, removed)) is expected

    @rule(place=places, older=st.integers(0, 1))
    def register(self, place, older):
        node, incarnation = place.node, self.incarnation[place.node] - older
        expected = self.find(node, incarnation)
        if expected is not Outcome.STALE:
            if expected is Outcome.UNKNOWN:
                self.lose(node)
            self.newest[node] = incarnation
            self.leases[node] = incarnation, max(self.leases.get(node, (0, 0))[1], self.now + LEASE_S)
            expected = self.told.setdefault(place, Told()).outcome()
        assert self.directory.tell("register", place, incarnation, self.now) is expected

    @rule(node=st.sampled_from(NODES))
    def restart_node(self, node):
        """Its disk keeps what it has; all messages of its former life may still arrive."""
        self.incarnation[node] += 1
        for place in PLACES:
            if place.node == node:
                self.seq[place] = 0
                if place.tier == "cpu":
                    self.holds[place] = set()

    @rule(place=places, keys=keysets.filter(bool), lost=st.booleans())
    def change(self, place, keys, lost):
        added, removed = keys - self.holds[place], keys & self.holds[place]
        self.holds[place] = self.holds[place] ^ keys
        self.seq[place] += 1
        message = (self.incarnation[place.node], self.seq[place], added, removed)
        self.sent[place].append(message)
        if not lost:
            self.deliver(place, message)

    @rule(data=st.data(), place=places)
    def an_old_message_arrives(self, data, place):
        if self.sent[place]:
            self.deliver(place, data.draw(st.sampled_from(self.sent[place])))

    def send_part(self, place, incarnation, seq, keys, first, last):
        expected = self.find_place(place, incarnation)
        if first:
            self.missed[place].clear()
        if expected is None:
            told = self.told[place]
            if seq < told.applied:
                told.coming, expected = None, told.outcome()
            elif not first and (told.coming is None or told.coming_seq != seq):
                told.torn, expected = True, Outcome.GAP
            else:
                told.coming = (set() if first else told.coming) | keys
                told.coming_seq, expected = seq, Outcome.OK
                if last:
                    told.entries, told.coming = told.coming, None
                    told.applied, told.heard, told.torn = seq, max(told.heard, seq), False
                    self.forgotten[place] = set(self.missed[place])
                    expected = told.outcome()
        args = ("resync", place, incarnation, seq)
        assert self.directory.deal(*args, keys=(keys,), more=(first, last)) is expected

    @rule(place=places)
    def resync(self, place):
        self.send_part(
            place, self.incarnation[place.node], self.seq[place], self.holds[place], first=True, last=True
        )

    @rule(place=places, size=st.integers(1, 3))
    def begin_resync_in_parts(self, place, size):
        manifest = pack(sorted(self.holds[place]))
        start = self.incarnation[place.node], self.seq[place]
        self.parts[place] = [(*start, *part) for part in parts(manifest, part_keys=size)]

    @rule(place=places, lost=st.sampled_from([False, False, True]))
    def send_next_part(self, place, lost):
        if not self.parts[place]:
            return
        incarnation, seq, manifest, first, last = self.parts[place].pop(0)
        keys = {manifest[at : at + 32] for at in range(0, len(manifest), 32)}
        if lost:
            self.missed[place] |= keys  # but for the first, nobody notices: misses
        else:
            self.send_part(place, incarnation, seq, keys, first, last)

    @rule(node=st.sampled_from(NODES))
    def heartbeat(self, node):
        expected = self.find(node, self.incarnation[node])
        if expected is None:
            self.leases[node] = self.incarnation[node], max(self.leases[node][1], self.now + LEASE_S)
            gap = any(
                told.outcome() is Outcome.GAP for place, told in self.told.items() if place.node == node
            )
            expected = Outcome.GAP if gap else Outcome.OK
        assert self.directory.tell("heartbeat", node, self.incarnation[node], self.now) is expected

    @rule()
    def restart_store(self):
        self.store += 1

    @rule(older=st.integers(0, 1))
    def renew_store(self, older):
        incarnation = self.store - older
        if incarnation < self.newest_store:
            expected = Outcome.STALE
        else:
            if self.shared is None or self.shared[0] != incarnation:
                self.shared = incarnation, 0.0, set(), False
            self.newest_store = incarnation
            self.shared = incarnation, max(self.shared[1], self.now + LEASE_S), *self.shared[2:]
            expected = Outcome.OK if self.shared[3] else Outcome.UNKNOWN
        assert self.directory.tell("renew_shared", REDIS, incarnation, self.now) is expected

    @rule(older=st.integers(0, 1), added=keysets, removed=keysets, whole=st.booleans())
    def announce_store(self, older, added, removed, whole):
        incarnation, expected = self.store - older, Outcome.OK
        if incarnation < self.newest_store:
            expected = Outcome.STALE
        elif self.shared is None or self.shared[0] != incarnation:
            expected = Outcome.UNKNOWN
        else:
            entries = self.shared[2] - removed | added
            self.shared = incarnation, self.shared[1], entries, self.shared[3] or whole
        args = ("announce_shared", REDIS, incarnation)
        assert self.directory.deal(*args, keys=(added, removed), more=(whole,)) is expected

    @rule(seconds=st.floats(0, 6))
    def time_passes(self, seconds):
        self.now += seconds
        gone = {node for node, (_, end) in self.leases.items() if end <= self.now}
        if self.shared and self.shared[1] <= self.now:
            self.shared = None
        for state in (self.directory.whole, *self.directory.shards):
            assert set(state.expire(self.now)) == gone
        for node in gone:
            self.lose(node)

    @rule(place=st.sampled_from((*PLACES, REDIS)), keys=keysets)
    def a_reader_trips(self, place, keys):
        pairs = self.expected()
        forgotten = self.directory.deal("forget", place, keys=(keys,))
        assert forgotten == len({(key, place) for key in keys} & pairs)
        if place is REDIS:
            if self.shared:
                self.shared[2].difference_update(keys)
            return
        self.forgotten[place] |= keys
        self.missed[place] |= keys
        if place in self.told:
            told = self.told[place]
            told.entries = told.entries - keys
            told.coming = told.coming and told.coming - keys

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=8))
    def locate(self, keys):
        pairs = self.expected()
        holders = [tuple(sorted(place for held, place in pairs if held == key)) for key in keys]
        hole = holders.index(()) if () in holders else len(keys)
        located = self.directory.locate(pack(keys))
        assert [
            places for segment in located.segments for places in [segment.places] * segment.count
        ] == holders[:hole]
        assert located.run == hole
        neighbours = zip(located.segments, located.segments[1:], strict=False)
        assert all(left.places != right.places for left, right in neighbours)
        assert self.directory.copies(pack(keys)) == bytes(map(len, holders))

    @invariant()
    def the_books_agree(self):
        if not hasattr(self, "directory"):
            return
        self.directory.check()
        pairs = self.expected()
        stats = self.directory.stats(self.now)
        assert (stats.entries, stats.keys) == (len(pairs), len({key for key, _ in pairs}))
        assert stats.nodes == len(self.leases)

    @invariant()
    def what_lost_no_message_is_exact(self):
        """The point of the numbers: where nothing is missing, the entries are what the node holds."""
        if not hasattr(self, "directory"):
            return
        for place, told in self.told.items():
            current = self.leases[place.node][0] == self.incarnation[place.node]
            if current and told.applied == told.heard == self.seq[place] > 0:
                assert told.entries | self.forgotten[place] >= self.holds[place]
                assert told.entries <= self.holds[place]

    def teardown(self):
        if not hasattr(self, "directory"):
            return
        for place in PLACES:
            self.register(place, 0)
            self.resync(place)
        for place in PLACES:
            assert self.told[place].entries == self.holds[place]
        self.locate(KEYS)


TestDirectory = DirectoryMachine.TestCase
TestDirectory.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


@settings(max_examples=30, deadline=None)
@given(
    shards=st.integers(1, 64),
    held=st.lists(st.tuples(places, st.integers(0, 199)), max_size=300),
    run=st.integers(0, 200),
)
def test_any_number_of_shards_answers_as_one_directory(shards, held, run):
    chain = [key.digest for key in block_keys(Fingerprint(bytes(range(32))), range(200), 1)]
    whole = DirectoryState(LEASE_S, epoch=1)
    states = [DirectoryState(LEASE_S, epoch=1 + shard) for shard in range(shards)]
    for place in PLACES:
        keys = pack(chain[at] for at in range(200) if (place, at) in held or at < run)
        dealt = split(keys, shards).keys
        for state, part in zip((whole, *states), (keys, *dealt), strict=True):
            state.register(place, 1, 0.0)
            state.resync(place, 1, 1, part, True, True)
    parted = split(pack(chain), shards)
    assert sorted(pack(parted.keys)) == sorted(pack(chain))
    answers = [state.locate(part) for state, part in zip(states, parted.keys, strict=True)]
    assert join_located(parted, answers) == Located(shards, whole.locate(pack(chain)).segments)
    copies = [state.copies(part) for state, part in zip(states, parted.keys, strict=True)]
    assert join_bytes(parted, copies) == whole.copies(pack(chain))
