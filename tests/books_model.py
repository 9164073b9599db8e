"""What the books of a tier should do, as stupidly as it can be said: lists, dicts and searches."""

from __future__ import annotations

import math


class BooksModel:
    """Keeps visible keys in one list, least recent first, and leases as plain dicts.

    The order of protected blocks among each other is not promised: once there were any, the model follows the victims
    that the books chose, after asserting that nothing unprotected was spared for them.
    """

    def begin(self, slots, share):
        """The machine brings `clock`."""
        self.slots = slots
        self.most = max(1, int(share * slots)) if share < 1 else math.inf
        self.recency = []  # visible keys
        self.place = {}  # visible key -> offset
        self.used_at = {}  # visible key -> time
        self.pins = {}  # visible key -> how often
        self.guarded = set()  # protected visible keys
        self.guarded_ever = False
        self.charged = {}  # offset -> tenant, also of offsets not taken any more
        self.reads = {}  # lease -> (owner, [(key, offset)])
        self.copies = {}  # lease -> (owner, [offset])
        self.writes = {}  # lease -> (owner, chain, {key: offset})
        self.cancelled = set()  # (lease, key) of writes overtaken by a clear
        self.told = set()
        self.seq = 0

    def held(self):
        return {offset for _, entries in self.reads.values() for _, offset in entries}

    def taken(self):
        writing = {offset for _, _, entries in self.writes.values() for offset in entries.values()}
        copied = {offset for _, offsets in self.copies.values() for offset in offsets}
        return set(self.place.values()) | self.held() | copied | writing

    def free(self):
        return self.slots - len(self.taken())

    def being_written(self):
        promised = {(lease, key) for lease, (_, _, entries) in self.writes.items() for key in entries}
        return {key for _, key in promised - self.cancelled}

    def idle(self):
        held = self.held()
        return [key for key in self.recency if self.place[key] not in held and not self.pins.get(key)]

    def room(self, tenant):
        if tenant is None:
            return math.inf
        return self.most - sum(self.charged[offset] == tenant for offset in self.taken())

    def touch(self, keys):
        idle = set(self.idle())
        for key in reversed(keys):
            if key in idle:
                self.recency.remove(key)
                self.recency.append(key)

    def hide(self, key):
        self.recency.remove(key)
        del self.place[key], self.used_at[key]
        self.pins.pop(key, None)
        self.guarded.discard(key)

    def choose(self, count, candidates, gone):
        """Of `candidates`, least recent first, those that have to be in `gone`, all that the books gave up."""
        count = max(0, min(count, len(candidates)))
        ranked = [key for key in candidates if key not in self.guarded]
        ranked += [key for key in candidates if key in self.guarded]
        if not self.guarded_ever:
            return ranked[:count]
        chosen = [key for key in ranked if key in gone][:count]
        assert len(chosen) == count
        plain = [key for key in candidates if key not in self.guarded]
        assert set(plain) <= set(chosen) or not self.guarded & set(chosen)
        return chosen

    def end_read(self, lease):
        _, entries = self.reads.pop(lease)
        # Idle blocks become most recent, in the order in which their last hold is given up: tail first.
        last_hold = {}
        for position, (key, offset) in enumerate(entries):
            last_hold.setdefault((key, offset), position)
        idle = set(self.idle())
        for (key, offset), _ in sorted(last_hold.items(), key=lambda item: -item[1]):
            if self.place.get(key) == offset:
                self.used_at[key] = self.clock.now
                if key in idle:
                    self.recency.remove(key)
                    self.recency.append(key)

    def make_room(self, keys, fresh, tenant, gone):
        def own():
            short = len(fresh) - self.room(tenant)
            mine = [key for key in self.idle() if self.charged[self.place[key]] == tenant and key not in keys]
            return self.choose(short, mine, gone) if short > 0 else []

        def others(wanted):
            others = [key for key in self.idle() if key not in keys]
            return self.choose(wanted - self.free(), others, gone)

        while victims := own():
            for key in victims:
                self.hide(key)
        wanted = max(0, min(len(fresh), self.room(tenant)))
        while victims := others(wanted):
            for key in victims:
                self.hide(key)
        return fresh[: min(wanted, self.free())]

    def compete(self, keys, fresh, tenant, gone):
        left = list(fresh)
        for key in reversed(keys):
            if key in left:
                order = [other for other in self.recency if other != key]
                self.recency = [*order, key]
            else:
                self.touch_one(key)

        def candidates(whose):
            idle = {key for key in self.place if self.is_idle(key)}
            for key in self.recency:
                owner = tenant if key in left else self.charged.get(self.place.get(key))
                if (key in left or key in idle) and whose in ("anybody", owner):
                    yield key

        def give_up(victims):
            for key in victims:
                if key in left:
                    left.remove(key)
                    self.recency.remove(key)
                else:
                    self.hide(key)

        while self.room(tenant) < len(left) and (own := list(candidates(tenant))):
            give_up(self.choose(len(left) - self.room(tenant), own, gone))
        while self.free() < len(left):
            give_up(self.choose(len(left) - self.free(), list(candidates("anybody")), gone))
        self.recency = [key for key in self.recency if key not in left]
        return left

    def is_idle(self, key):
        return self.place[key] not in self.held() and not self.pins.get(key)

    def touch_one(self, key):
        if key in self.place and self.is_idle(key):
            self.recency.remove(key)
            self.recency.append(key)

    def end_write(self, lease, written):
        _, chain, entries = self.writes.pop(lease)
        committed = [key for key in entries if key in written and (lease, key) not in self.cancelled]
        for key in reversed(committed):
            self.place[key] = entries[key]
            self.used_at[key] = self.clock.now
            self.recency.append(key)
        self.touch(chain)
        return committed
