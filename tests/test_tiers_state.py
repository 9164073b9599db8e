"""The CPU tier against a stupid simulation."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kv_tiers.books import SlotBooks
from kv_tiers.keys import Fingerprint, block_keys
from kv_tiers.tier import UnknownLease

SLOT_BYTES = 64
KEYS = block_keys(Fingerprint(bytes(32)), range(10), 1)
# Mostly prefixes of two chains, as in service; sometimes anything.
chains = st.one_of(
    st.builds(lambda start, length: KEYS[start : start + length], st.sampled_from([0, 5]), st.integers(0, 5)),
    st.lists(st.sampled_from(KEYS), max_size=6),
)
owners = st.sampled_from(["a", "b"])


class SlotBooksMachine(RuleBasedStateMachine):
    """The model keeps visible keys in one list, least recent first, and leases as plain dicts."""

    @initialize(slots=st.integers(1, 6))
    def build(self, slots):
        self.slots = slots
        self.tier = SlotBooks(slots, SLOT_BYTES)
        self.recency = []  # visible keys
        self.place = {}  # visible key -> offset
        self.reads = {}  # lease -> (owner, [(key, offset)])
        self.writes = {}  # lease -> (owner, chain, {key: offset})
        self.cancelled = set()  # (lease, key) of writes overtaken by a clear
        self.told = set()
        self.seq = 0

    def pinned(self):
        return {offset for _, entries in self.reads.values() for _, offset in entries}

    def taken(self):
        writing = {offset for _, _, entries in self.writes.values() for offset in entries.values()}
        return set(self.place.values()) | self.pinned() | writing

    def being_written(self):
        promised = {(lease, key) for lease, (_, _, entries) in self.writes.items() for key in entries}
        return {key for _, key in promised - self.cancelled}

    def touch(self, keys):
        for key in reversed(keys):
            if key in self.place and self.place[key] not in self.pinned():
                self.recency.remove(key)
                self.recency.append(key)

    def hide(self, key):
        self.recency.remove(key)
        del self.place[key]

    @rule(keys=chains)
    def look(self, keys):
        run = next((i for i, key in enumerate(keys) if key not in self.place), len(keys))
        assert self.tier.longest_run(keys) == run

    @rule(keys=chains, owner=owners)
    def prepare_read(self, keys, owner):
        self.begin_read(keys, owner)

    def begin_read(self, keys, owner):
        lease = self.tier.prepare_read(keys, owner)
        run = next((i for i, key in enumerate(keys) if key not in self.place), len(keys))
        assert list(lease.entries) == [(key, self.place[key]) for key in keys[:run]]
        self.reads[lease.id] = (owner, list(lease.entries))
        return lease.id

    @precondition(lambda self: self.reads)
    @rule(data=st.data())
    def complete_read(self, data):
        lease = data.draw(st.sampled_from(sorted(self.reads)))
        self.tier.complete_read(lease)
        self.end_read(lease)

    def end_read(self, lease):
        _, entries = self.reads.pop(lease)
        self.settle(entries)

    def settle(self, entries):
        # Unpinned blocks become most recent, in the order in which their last hold is given up: tail first.
        last_hold = {}
        for position, (key, offset) in enumerate(entries):
            last_hold.setdefault((key, offset), position)
        for (key, offset), _ in sorted(last_hold.items(), key=lambda item: -item[1]):
            if self.place.get(key) == offset and offset not in self.pinned():
                self.recency.remove(key)
                self.recency.append(key)

    @rule(keys=chains, owner=owners)
    def prepare_write(self, keys, owner):
        self.begin_write(keys, owner)

    def begin_write(self, keys, owner):
        lease = self.tier.prepare_write(keys, owner)
        self.touch(keys)
        present, being_written, no_room, expected = [], [], [], []
        writing = self.being_written()
        entries = dict(lease.entries)
        taken = self.taken()
        for key in keys:
            if key in self.place:
                present.append(key)
            elif key in writing:
                being_written.append(key)
            else:
                idle = [k for k in self.recency if self.place[k] not in self.pinned()]
                if len(taken) == self.slots and idle and idle[0] not in keys:
                    taken.discard(self.place[idle[0]])
                    self.hide(idle[0])
                if len(taken) == self.slots:
                    no_room.append(key)
                    continue
                assert entries[key] not in taken, "a slot has one owner"
                taken.add(entries[key])
                writing.add(key)
                expected.append(key)
        assert (list(entries), list(lease.present)) == (expected, present)
        assert (list(lease.being_written), list(lease.no_room)) == (being_written, no_room)
        assert set(entries.values()) <= {slot * SLOT_BYTES for slot in range(self.slots)}
        self.writes[lease.id] = (owner, keys, entries)
        return lease.id

    @rule(keys=chains, owner=owners)
    def store(self, keys, owner):
        lease = self.begin_write(keys, owner)
        written = list(self.writes[lease][2])
        assert list(self.tier.complete_write(lease, written)) == self.end_write(lease, written)

    @rule(keys=chains, owner=owners)
    def use(self, keys, owner):
        lease = self.begin_read(keys, owner)
        self.tier.complete_read(lease)
        self.end_read(lease)

    @precondition(lambda self: self.writes)
    @rule(data=st.data())
    def complete_write(self, data):
        lease = data.draw(st.sampled_from(sorted(self.writes)))
        owned = list(self.writes[lease][2])
        written = data.draw(st.lists(st.sampled_from(owned), unique=True) if owned else st.just([]))
        committed = self.tier.complete_write(lease, written)
        assert list(committed) == self.end_write(lease, written)

    def end_write(self, lease, written):
        _, chain, entries = self.writes.pop(lease)
        committed = [key for key in entries if key in written and (lease, key) not in self.cancelled]
        for key in reversed(committed):
            self.place[key] = entries[key]
            self.recency.append(key)
        self.touch(chain)
        return committed

    @rule(keys=chains)
    def drop(self, keys):
        gone = {key for key in keys if key in self.place}
        assert self.tier.drop(keys) == len(gone)
        for key in gone:
            self.hide(key)

    @rule(owner=owners)
    def owner_dies(self, owner):
        reads = [lease for lease, value in self.reads.items() if value[0] == owner]
        writes = [lease for lease, value in self.writes.items() if value[0] == owner]
        reclaimed = self.tier.release_owner(owner)
        assert reclaimed.leases == len(reads) + len(writes)
        for lease in sorted(reads + writes):
            if lease in self.reads:
                self.end_read(lease)
            else:
                self.end_write(lease, [])

    @rule()
    def clear(self):
        self.tier.clear()
        self.recency.clear()
        self.place.clear()
        self.cancelled |= {(lease, key) for lease, (_, _, entries) in self.writes.items() for key in entries}

    @rule(lease=st.integers(-1, 30))
    def complete_nothing(self, lease):
        if lease not in self.reads:
            with pytest.raises(UnknownLease):
                self.tier.complete_read(lease)
        if lease not in self.writes:
            with pytest.raises(UnknownLease):
                self.tier.complete_write(lease, [])

    @rule(whole=st.booleans())
    def tell(self, whole):
        self.seq += self.told != set(self.place)
        if whole:
            manifest = self.tier.manifest()
            assert (manifest.seq, set(manifest.keys)) == (self.seq, set(self.place))
        else:
            changes = self.tier.drain_changes()
            assert changes.seq == self.seq
            assert set(changes.added) == set(self.place) - self.told
            assert set(changes.removed) == self.told - set(self.place)
        self.told = set(self.place)

    @invariant()
    def books_agree(self):
        if not hasattr(self, "tier"):
            return
        self.tier.check()
        assert [key for key in KEYS if self.tier.longest_run([key])] == [
            key for key in KEYS if key in self.place
        ]
        stats = self.tier.stats()
        assert (stats.capacity, stats.free) == (self.slots, self.slots - len(self.taken()))
        assert stats.visible == len(self.place)
        assert stats.pinned == len(self.pinned() & set(self.place.values()))
        assert stats.writing == len(self.being_written())
        assert (stats.read_leases, stats.write_leases) == (len(self.reads), len(self.writes))
        assert stats.capacity == stats.free + stats.visible + stats.writing + stats.condemned

    def teardown(self):
        if not hasattr(self, "tier"):
            return
        for owner in ("a", "b"):
            self.tier.release_owner(owner)
        self.tier.clear()
        self.tier.check()
        assert self.tier.stats().free == self.slots


TestSlotBooks = SlotBooksMachine.TestCase
TestSlotBooks.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(("slots", "slot_bytes"), [(0, 64), (4, 0)])
def test_a_tier_without_room_is_refused(slots, slot_bytes):
    with pytest.raises(ValueError):
        SlotBooks(slots, slot_bytes)


def test_a_tier_fills_its_slab_with_whole_slots():
    assert SlotBooks.fitting(64 * 5 + 63, 64).slots == 5
    with pytest.raises(ValueError, match="63 bytes"):
        SlotBooks.fitting(63, 64)
