"""Every tier against a stupid model: what may be there is in a dict, what must be gone is not."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tier_stands import KEYS, STANDS, Clock, Stand, at_rest, get, put, visible

from kv_tiers.tier import Fetched, Stored

SOME = KEYS[:10]
# Mostly prefixes of two chains, as in service; sometimes anything.
chains = st.one_of(
    st.builds(lambda start, length: SOME[start : start + length], st.sampled_from([0, 5]), st.integers(1, 5)),
    st.lists(st.sampled_from(SOME), min_size=1, max_size=5),
)
TTL_S = 10.0


class TierMachine(RuleBasedStateMachine):
    """The model is a directory: it hears the journal and the answers of its own calls, and knows what rotted.

    `known` are the keys that are visible by what was told, `used_at` says when they were used last, `pins` how often
    they are pinned, `rotten` are those with a wrong bit. Which block is evicted is the policy's affair.
    """

    stand_type: type[Stand]

    @initialize(slots=st.integers(2, 6))
    def build(self, slots):
        self.runner = asyncio.Runner()
        self.folder = tempfile.TemporaryDirectory()
        self.clock = Clock()
        self.slots = slots
        self.stand = self.stand_type(slots, Path(self.folder.name), clock=self.clock, ttl_s=TTL_S)
        self.run(self.stand.__aenter__())
        self.known = set()
        self.used_at = {}
        self.pins = {}
        self.rotten = set()
        self.seq = 0

    def run(self, call):
        return self.runner.run(call)

    @property
    def tier(self):
        return self.stand.tier

    def forget(self, keys):
        for key in keys:
            self.known.discard(key)
            self.rotten.discard(key)
            self.used_at.pop(key, None)
            self.pins.pop(key, None)

    def hear(self):
        """Take in the journal: the keys that vanished must not have been pinned."""
        changes = self.tier.drain_changes()
        assert changes.seq == self.seq + bool(changes.added or changes.removed)
        assert self.known.issuperset(changes.removed) and self.known.isdisjoint(changes.added)
        self.seq = changes.seq
        self.known |= set(changes.added)
        gone = set(changes.removed)
        self.known -= gone
        return gone

    @rule(keys=chains)
    def store(self, keys):
        before = set(self.known)
        answers = self.run(put(self.tier, keys))
        gone = self.hear()
        assert not gone & self.pins.keys(), "pinned blocks are not evicted"
        self.forget(gone)
        stored = {key for key, answer in zip(keys, answers, strict=True) if answer is Stored.STORED}
        refused = {key for key, answer in zip(keys, answers, strict=True) if answer is Stored.NO_ROOM}
        assert Stored.FAILED not in answers
        assert stored == self.known - before
        assert not refused & self.known and set(keys) == stored | refused | (before & set(keys))
        assert not refused or len(self.known) == self.slots, "none is refused while a slot is free"
        self.used_at.update(dict.fromkeys(stored, self.clock.now))

    @rule(keys=chains)
    def fetch(self, keys):
        answers = self.run(get(self.tier, keys))
        for key, answer in zip(keys, answers, strict=True):
            if key not in self.known:
                assert answer is Fetched.MISS
            else:
                assert answer is (Fetched.CORRUPT if key in self.rotten else Fetched.HIT)
        rotten = self.rotten & set(keys)
        assert self.hear() == rotten
        self.forget(rotten)
        self.used_at.update({key: self.clock.now for key in keys if key in self.known})

    @rule(keys=chains)
    def look(self, keys):
        run = next((i for i, key in enumerate(keys) if key not in self.known), len(keys))
        assert self.tier.longest_run(keys) == run

    @rule(keys=chains)
    def access(self, keys):
        self.tier.accessed(keys)

    @rule(keys=chains)
    def drop(self, keys):
        gone = self.known & set(keys)
        assert self.run(self.tier.drop(keys)) == len(gone)
        assert self.hear() == gone
        self.forget(gone)

    @rule(keys=chains)
    def pin(self, keys):
        pinned = self.tier.pin(keys)
        for key in keys[:pinned]:
            assert key in self.known
            self.pins[key] = self.pins.get(key, 0) + 1
        full = len(self.pins) == self.slots // 2
        assert (
            pinned == len(keys) or keys[pinned] not in self.known or (full and keys[pinned] not in self.pins)
        )
        assert len(self.pins) <= self.slots // 2

    @rule(keys=chains)
    def unpin(self, keys):
        ended = 0
        for key in keys:
            if key in self.pins:
                ended += 1
                self.pins[key] -= 1
                if not self.pins[key]:
                    del self.pins[key]
        assert self.tier.unpin(keys) == ended

    @rule(seconds=st.integers(1, 6))
    def time_passes(self, seconds):
        self.clock.now += seconds

    @rule()
    def expire(self):
        old = {
            key for key, at in self.used_at.items() if self.clock.now - at > TTL_S and key not in self.pins
        }
        assert self.tier.expire() == len(old)
        assert self.hear() == old
        self.forget(old)

    @precondition(lambda self: self.known - self.rotten)
    @rule(data=st.data())
    def rot(self, data):
        key = data.draw(st.sampled_from(sorted(self.known - self.rotten)))
        self.run(self.stand.corrupt(key))
        self.rotten.add(key)

    @rule(one=chains, other=chains, cancel=st.booleans())
    def put_while_reading(self, one, other, cancel):
        """Hits are compared; then the tier is as the journal says."""

        async def both():
            calls = [asyncio.ensure_future(get(self.tier, one)), asyncio.ensure_future(put(self.tier, other))]
            await asyncio.sleep(0)
            if cancel:
                calls[1].cancel()
            await asyncio.wait(calls)
            assert all(call.cancelled() or call.exception() is None for call in calls)
            put_answers = [] if calls[1].cancelled() else list(zip(other, calls[1].result(), strict=True))
            return calls[0].result(), put_answers

        fetched, stored = self.run(both())
        for key, answer in zip(one, fetched, strict=True):
            assert answer is Fetched.MISS or key in self.known, "what was not there before the call is no hit"
            assert (answer is Fetched.HIT) <= (key not in self.rotten)
        before = set(self.known)
        gone = self.hear()
        corrupt = {key for key, answer in zip(one, fetched, strict=True) if answer is Fetched.CORRUPT}
        assert not (gone - corrupt) & self.pins.keys()
        self.forget(gone)
        new = self.known - before
        assert new <= set(other)
        again = corrupt & self.known  # dropped, and stored anew at once
        self.rotten -= again
        assert {key for key, answer in stored if answer is Stored.STORED} <= self.known
        hits = {key for key, answer in zip(one, fetched, strict=True) if answer is Fetched.HIT}
        self.used_at.update(dict.fromkeys((new | again | hits) & self.known, self.clock.now))

    @rule()
    def clear(self):
        before = set(self.known)
        self.run(self.tier.clear())
        assert self.hear() == before
        self.forget(before)

    @rule()
    def restart(self):
        self.run(self.stand.reopen())
        self.seq = 0
        told = set(self.tier.drain_changes().added)
        expected = self.known if self.stand.warm else set()
        assert expected - self.rotten <= told <= expected
        self.seq = bool(told)
        self.rotten &= told
        self.known, self.pins = told, {}
        self.used_at = dict.fromkeys(told, self.clock.now)

    @rule()
    def list_all(self):
        manifest = self.tier.manifest()
        assert (manifest.seq, set(manifest.keys)) == (self.seq, self.known)

    @invariant()
    def tier_agrees(self):
        if not hasattr(self, "stand"):
            return
        self.tier.check()
        assert set(visible(self.tier, SOME)) == self.known
        stats = self.tier.stats()
        assert (stats.capacity, stats.visible) == (self.slots, len(self.known))
        assert stats.free == self.slots - len(self.known)
        assert stats.pinned == len(self.pins)

    def teardown(self):
        if not hasattr(self, "stand"):
            return
        try:
            self.run(get(self.tier, sorted(self.rotten)))  # dropped
            self.run(at_rest(self.tier))
            self.run(self.stand.__aexit__(None, None, None))
        finally:
            self.runner.close()
            self.folder.cleanup()


EXAMPLES = {"memory": 30, "cpu": 12, "nvme": 8, "redis": 8}


@pytest.mark.parametrize("stand", STANDS, ids=[stand.name for stand in STANDS])
def test_a_tier_does_what_the_model_says(stand):
    machine = type("Machine", (TierMachine,), {"stand_type": stand})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=EXAMPLES[stand.name], stateful_step_count=30, deadline=None)
    )
