"""The books of a tier against a stupid simulation."""

from __future__ import annotations

import pytest
from books_model import BooksModel
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from strict_policy import StrictPolicy
from tier_stands import Clock

from kv_tiers.books import SlotBooks
from kv_tiers.keys import Fingerprint, block_keys
from kv_tiers.tier import UnknownLease
from policies.tiering import Lru

SLOT_BYTES = 64
KEYS = block_keys(Fingerprint(bytes(32)), range(10), 1)
# Mostly prefixes of two chains, as in service; sometimes anything.
chains = st.one_of(
    st.builds(lambda start, length: KEYS[start : start + length], st.sampled_from([0, 5]), st.integers(0, 5)),
    st.lists(st.sampled_from(KEYS), max_size=6),
)
owners = st.sampled_from(["a", "b"])
tenants = st.sampled_from([None, "s", "t"])


class SlotBooksMachine(BooksModel, RuleBasedStateMachine):
    """Every call is made of the books and of the model."""

    @initialize(
        slots=st.integers(1, 6), ttl_s=st.sampled_from([None, 10.0]), share=st.sampled_from([1.0, 0.5])
    )
    def build(self, slots, ttl_s, share):
        self.ttl_s = ttl_s
        self.clock = Clock()
        self.tier = SlotBooks(
            slots,
            SLOT_BYTES,
            policy=StrictPolicy(Lru()),
            clock=self.clock,
            ttl_s=ttl_s,
            tenant_share=share,
        )
        self.begin(slots, share)

    @rule(keys=chains)
    def look(self, keys):
        run = next((i for i, key in enumerate(keys) if key not in self.place), len(keys))
        assert self.tier.longest_run(keys) == run

    @rule(seconds=st.integers(1, 6))
    def time_passes(self, seconds):
        self.clock.now += seconds

    @rule(keys=chains)
    def access(self, keys):
        self.tier.accessed(keys)
        self.touch(keys)

    @rule(keys=chains, owner=owners, scattered=st.booleans())
    def prepare_read(self, keys, owner, scattered):
        self.begin_read(keys, owner, scattered)

    def begin_read(self, keys, owner, scattered=False):
        if scattered:
            lease = self.tier.prepare_scattered(keys, owner)
            found = [key for key in keys if key in self.place]
        else:
            lease = self.tier.prepare_read(keys, owner)
            found = keys[: next((i for i, key in enumerate(keys) if key not in self.place), len(keys))]
        assert list(lease.entries) == [(key, self.place[key]) for key in found]
        assert all(self.tier.offset_of(key) == self.place[key] for key in found)
        self.reads[lease.id] = (owner, list(lease.entries))
        return lease.id

    @precondition(lambda self: self.reads)
    @rule(data=st.data())
    def complete_read(self, data):
        lease = data.draw(st.sampled_from(sorted(self.reads)))
        self.tier.complete_read(lease)
        self.end_read(lease)

    @rule(keys=chains, owner=owners)
    def prepare_copy(self, keys, owner):
        lease = self.tier.prepare_copy(keys, owner)
        assert list(lease.entries) == [(key, self.place[key]) for key in keys if key in self.place]
        self.copies[lease.id] = (owner, [entry.offset for entry in lease.entries])

    @precondition(lambda self: self.copies)
    @rule(data=st.data())
    def complete_copy(self, data):
        lease = data.draw(st.sampled_from(sorted(self.copies)))
        self.tier.complete_read(lease)
        del self.copies[lease]

    @rule(keys=chains, owner=owners, tenant=tenants)
    def prepare_write(self, keys, owner, tenant):
        self.begin_write(keys, owner, tenant)

    @rule(keys=chains, owner=owners, tenant=tenants, bypass=st.booleans())
    def reserve(self, keys, owner, tenant, bypass):
        self.begin_write(keys, owner, tenant, access=False, bypass=bypass)

    def begin_write(self, keys, owner, tenant, access=True, bypass=False):
        was_writing = self.being_written()
        fresh = [key for key in dict.fromkeys(keys) if key not in self.place and key not in was_writing]
        if access:
            lease = self.tier.prepare_write(keys, owner, tenant=tenant)
            self.touch(keys)
        else:
            lease = self.tier.reserve(keys, owner, tenant=tenant, bypass=bypass)
        gone = {key for key in self.place if not self.tier.holds(key)}
        gone |= {key for key in fresh if key not in dict(lease.entries)}
        granted = (self.compete if bypass else self.make_room)(keys, fresh, tenant, gone)
        present, being_written, no_room, first = [], [], [], set(granted)
        for key in keys:
            if key in self.place:
                present.append(key)
            elif key in first:
                first.discard(key)
            else:
                (being_written if key in was_writing or key in granted else no_room).append(key)
        entries = dict(lease.entries)
        assert (list(entries), list(lease.present)) == (granted, present)
        assert (list(lease.being_written), list(lease.no_room)) == (being_written, no_room)
        offsets = set(entries.values())
        assert len(offsets) == len(entries) and not offsets & self.taken(), "a slot has one owner"
        assert offsets <= {slot * SLOT_BYTES for slot in range(self.slots)}
        self.charged.update(dict.fromkeys(offsets, tenant))
        self.writes[lease.id] = (owner, keys, entries)
        return lease.id

    @rule(keys=chains, owner=owners, tenant=tenants)
    def store(self, keys, owner, tenant):
        lease = self.begin_write(keys, owner, tenant)
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

    @rule(count=st.integers(0, 6), stay=st.booleans())
    def give_up(self, count, stay):
        if stay:
            victims = self.tier.coldest(count)
            assert all(self.tier.holds(key) for key in victims)
        else:
            victims = self.tier.evict(count)
        expected = self.choose(count, self.idle(), set(victims))
        assert set(victims) == set(expected) and len(victims) == len(expected)
        assert self.guarded_ever or list(victims) == expected
        for key in () if stay else victims:
            self.hide(key)

    @rule(keys=chains, protect=st.booleans())
    def protect(self, keys, protect):
        if protect:
            self.tier.protect(keys)
            self.guarded |= set(keys) & set(self.place)
            self.guarded_ever = self.guarded_ever or bool(self.guarded)
        else:
            self.tier.unprotect(keys)
            self.guarded -= set(keys)

    @rule(keys=chains)
    def pin(self, keys):
        pinned = 0
        for key in keys:
            if key not in self.place or (key not in self.pins and len(self.pins) >= self.slots // 2):
                break
            self.pins[key] = self.pins.get(key, 0) + 1
            pinned += 1
        assert self.tier.pin(keys) == pinned

    @rule(keys=chains)
    def unpin(self, keys):
        ended = 0
        for key in keys:
            if key in self.pins:
                ended += 1
                self.pins[key] -= 1
                if not self.pins[key]:
                    del self.pins[key]
                    self.touch_one(key)
        assert self.tier.unpin(keys) == ended

    @rule()
    def expire(self):
        old = [key for key in self.idle() if self.ttl_s and self.clock.now - self.used_at[key] > self.ttl_s]
        assert self.tier.expire() == len(old)
        for key in old:
            self.hide(key)

    @rule(pairs=st.lists(st.tuples(st.sampled_from(KEYS), st.integers(0, 6)), max_size=4), tenant=tenants)
    def adopt(self, pairs, tenant):
        adopted = 0
        for key, slot in pairs:
            offset = slot * SLOT_BYTES
            known = key in self.place or key in self.being_written()
            if slot < self.slots and offset not in self.taken() and not known:
                self.place[key], self.charged[offset], self.used_at[key] = offset, tenant, self.clock.now
                self.recency.append(key)
                adopted += 1
        assert self.tier.adopt(pairs, tenant) == adopted

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
        copies = [lease for lease, value in self.copies.items() if value[0] == owner]
        assert reclaimed.leases == len(reads) + len(writes) + len(copies)
        for lease in copies:
            del self.copies[lease]
        for lease in sorted(reads + writes):
            if lease in self.reads:
                self.end_read(lease)
            else:
                self.end_write(lease, [])

    @rule()
    def clear(self):
        self.tier.clear()
        for key in list(self.place):
            self.hide(key)
        self.cancelled |= {(lease, key) for lease, (_, _, entries) in self.writes.items() for key in entries}

    @rule(lease=st.integers(-1, 30))
    def complete_nothing(self, lease):
        if lease not in self.reads and lease not in self.copies:
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
        assert stats.pinned == len(self.place) - len(self.idle())
        assert stats.writing == len(self.being_written())
        assert (stats.read_leases, stats.write_leases) == (
            len(self.reads) + len(self.copies),
            len(self.writes),
        )
        assert stats.capacity == stats.free + stats.visible + stats.writing + stats.condemned
        owned = [self.charged[offset] for offset in self.taken()]
        assert self.tier.tenants() == {tenant: owned.count(tenant) for tenant in owned}

    def teardown(self):
        if not hasattr(self, "tier"):
            return
        for owner in ("a", "b"):
            self.tier.release_owner(owner)
        self.tier.clear()
        self.tier.check()
        assert self.tier.stats().free == self.slots and self.tier.tenants() == {}


TestSlotBooks = SlotBooksMachine.TestCase
TestSlotBooks.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(("slots", "slot_bytes"), [(0, 64), (4, 0)])
def test_a_tier_without_room_is_refused(slots, slot_bytes):
    with pytest.raises(ValueError):
        SlotBooks(slots, slot_bytes)


@pytest.mark.parametrize(
    "option", [{"ttl_s": 0.0}, {"tenant_share": 0.0}, {"tenant_share": 1.1}, {"pin_share": -1}]
)
def test_impossible_limits_are_refused(option):
    with pytest.raises(ValueError):
        SlotBooks(4, 64, **option)


def test_a_tier_fills_its_slab_with_whole_slots():
    assert SlotBooks.fitting(64 * 5 + 63, 64).slots == 5
    with pytest.raises(ValueError, match="63 bytes"):
        SlotBooks.fitting(63, 64)
