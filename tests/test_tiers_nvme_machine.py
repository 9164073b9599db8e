"""The NVMe tier with restarts, kills and a failing device against a plain dict."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from nvme_stand import KEYS, Arena, block_bytes, io_error, nbytes_for, no_space, started

from kv_tiers.nvme_io import Motion
from kv_tiers.tier import Fetched, Stored

ARENA = Arena(16)
chains = st.one_of(
    st.builds(
        lambda start, length: KEYS[start : start + length], st.sampled_from([0, 5, 10]), st.integers(1, 5)
    ),
    st.lists(st.sampled_from(KEYS[:15]), min_size=1, max_size=6),
)


class NvmeMachine(RuleBasedStateMachine):
    """`model`: what is visible, and so what a restart after `close` finds. A kill may bring back older blocks."""

    @initialize(slots=st.integers(1, 8), engine=st.sampled_from(["threads", "nixl"]))
    def build(self, slots, engine):
        self.runner = asyncio.Runner()
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
        self.path = self.folder / "tier.kvnvme"
        self.slots = slots
        self.engine_choice = engine
        self.model = set()
        self.open()

    def open(self):
        self.tier, self.engine = self.run(
            started(
                self.path, self.slots, engine=self.engine_choice, memory=ARENA.place, breaker_pause_s=1e-9
            )
        )

    def run(self, call):
        return self.runner.run(call)

    def learn(self):
        """Follow the tier's own account of what came and went; it is compared with the bytes in `same`."""
        changes = self.tier.drain_changes()
        assert self.model.isdisjoint(changes.added) and self.model >= set(changes.removed)
        self.model = (self.model - set(changes.removed)) | set(changes.added)
        assert len(self.model) <= self.slots

    @rule(keys=chains)
    def put(self, keys):
        before = set(self.model)
        answers = self.run(self.tier.put(keys, ARENA.filled(keys)))
        self.learn()
        stored = {key for key, answer in zip(keys, answers, strict=True) if answer is Stored.STORED}
        assert stored == self.model - before
        for key, answer in zip(keys, answers, strict=True):
            assert (answer is Stored.PRESENT) <= (key in before | stored)
            assert answer is not Stored.FAILED
        assert len(self.model) >= min(self.slots, len(before | set(keys)))

    @rule(keys=chains)
    def get(self, keys):
        buffers = ARENA.scratch(len(keys))
        answers = self.run(self.tier.get(keys, buffers))
        assert answers == [Fetched.HIT if key in self.model else Fetched.MISS for key in keys]
        for key, buffer, answer in zip(keys, buffers, answers, strict=True):
            assert answer is Fetched.MISS or buffer == block_bytes(key)

    @rule(keys=chains)
    def drop(self, keys):
        assert self.run(self.tier.drop(keys)) == len(self.model & set(keys))
        expected = self.model - set(keys)
        self.learn()
        assert self.model == expected

    @rule()
    def clear(self):
        self.run(self.tier.clear())
        self.learn()
        assert not self.model

    @rule()
    def restart(self):
        self.run(self.tier.close())
        self.open()
        assert set(self.tier.manifest().keys) == self.model

    @rule()
    def restart_from_what_a_kill_leaves(self):
        copy = self.folder / "copy"
        shutil.copy(self.path, copy)
        self.run(self.tier.close())
        copy.chmod(0o600)
        copy.rename(self.path)
        self.open()
        found = set(self.tier.manifest().keys)
        assert found >= self.model and len(found) <= self.slots
        self.model = found

    @rule(keys=chains, fault=st.sampled_from([no_space, io_error]))
    def put_on_a_failing_device(self, keys, fault):
        self.engine.fault = fault
        before = set(self.model)
        answers = self.run(self.tier.put(keys, ARENA.filled(keys)))
        del self.engine.fault
        self.learn()
        assert self.model <= before
        assert {answer for key, answer in zip(keys, answers, strict=True) if key not in before} <= {
            Stored.FAILED,
            Stored.NO_ROOM,
        }

    @rule(keys=chains)
    def get_on_a_failing_device(self, keys):
        self.engine.fault = lambda motion, span: OSError(errno.EIO, "") if motion is Motion.READ else None
        answers = self.run(self.tier.get(keys, ARENA.scratch(len(keys))))
        del self.engine.fault
        assert answers == [Fetched.FAILED if key in self.model else Fetched.MISS for key in keys]
        self.learn()

    @invariant()
    def same(self):
        if hasattr(self, "tier"):
            self.tier.check()
            stats = self.tier.stats()
            assert stats.visible == len(self.model) == stats.capacity - stats.free
            assert all(self.tier.longest_run([key]) == (key in self.model) for key in KEYS[:15])
            assert self.path.stat().st_size == nbytes_for(self.slots)

    def teardown(self):
        if hasattr(self, "tier"):
            self.run(self.tier.close())
            self.runner.close()
            shutil.rmtree(self.folder)


TestNvmeMachine = pytest.mark.timeout(100)(NvmeMachine.TestCase)
TestNvmeMachine.settings = settings(max_examples=15, stateful_step_count=15, deadline=None)
