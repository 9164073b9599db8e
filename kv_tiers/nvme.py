"""The NVMe tier: full blocks in the slots of one preallocated file, found again after a restart or a kill.

What is true on disk at every moment, so that a process may die at any: a slot's record is void before the slot is
written, and comes back after all of the block was. So a record that is whole names a block that was written whole.
A device that loses power may have reordered that, and bits rot, so every read is verified all the same.

What is true of buffers: `get` and `put` return when none of their IO is in flight any more, whether it succeeded,
was late, or the call was cancelled. The kernel does not call a read back that it has begun, so there is no other way
to hand a buffer back. At the deadline nothing more is begun; what is in flight then is waited for, at most some
megabytes per thread, on a device that works a matter of milliseconds. On one that hangs those calls hang with it
(never the event loop), the breaker opens at their deadline, and later calls are answered at once. A caller who must
go on waits with `asyncio.wait` and gives the call's buffers to nobody until it has returned.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import xxhash

from kv_tiers.at_rest import AtRest
from kv_tiers.books import SlotBooks
from kv_tiers.breaker import Breaker
from kv_tiers.keys import BlockKey
from kv_tiers.nvme_calls import Deadline, Ended, Stop, WorkerCalls
from kv_tiers.nvme_engines import EngineChoice, open_engine
from kv_tiers.nvme_file import NvmeFile
from kv_tiers.nvme_index import Found, Geometry, Placed, SlotIndex
from kv_tiers.nvme_io import FileEngine
from kv_tiers.nvme_jobs import Medium, ReadJob, WriteJob
from kv_tiers.over_books import OverBooks
from kv_tiers.tier import Fetched, Stored, one_each
from policies.tiering import EvictionPolicy

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_OWNER = "nvme"
_DEADLINE = Deadline()
_CALLS = 4  # batches under way at once
_ADOPT_AT_ONCE = 2_000
_BREAKER_FAILURES = 3
_BREAKER_PAUSE_S = 5.0
_MOST_UNREADABLE = 4096


@dataclass
class NvmeFaults:
    """What went wrong since the start, in blocks but for `late` (calls) and `recreated` (files)."""

    recreated: int = 0
    dropped_at_start: int = 0
    read_errors: int = 0
    corrupt: int = 0
    write_errors: int = 0
    late: int = 0
    refused: int = 0
    """Answered FAILED at once, since the breaker was open or the tier closed."""


class NvmeTier(OverBooks):
    """`Tier` over the file at `path` (`nvme_path` makes one), which has `nbytes` at most, metadata included.

    `slot_bytes`: a multiple of 4096. `at_rest`: of the blocks that it is given. `policy`, `clock`, `ttl_s`,
    `tenant_share`: as in `SlotBooks`; new blocks compete with old ones. `engine`: see `open_engine`; `memory` (address,
    bytes) is where most buffers lie, for NIXL to register. `deadline` bounds a call, `breaker_pause_s` is how long the
    device is left alone after failures in a row. `direct`: whether to try O_DIRECT. `wrap` wraps the engine (faults,
    measurements). ValueError: nothing fits, or not whole pages.

    What was evicted or expired may be found again after a kill (not after `close`) until its slot is written anew.
    """

    name = "nvme"

    def __init__(
        self,
        path: Path | str,
        nbytes: int,
        slot_bytes: int,
        *,
        at_rest: AtRest = AtRest.EXACT,
        policy: EvictionPolicy[BlockKey] | None = None,
        clock: Callable[[], float] = time.monotonic,
        ttl_s: float | None = None,
        tenant_share: float = 1.0,
        engine: EngineChoice = "auto",
        memory: tuple[int, int] | None = None,
        deadline: Deadline = _DEADLINE,
        breaker_pause_s: float = _BREAKER_PAUSE_S,
        direct: bool = True,
        wrap: Callable[[FileEngine], FileEngine] | None = None,
    ) -> None:
        self.geometry = Geometry.within(nbytes, slot_bytes, at_rest)
        super().__init__(
            SlotBooks(
                self.geometry.slots,
                slot_bytes,
                policy=policy,
                clock=clock,
                ttl_s=ttl_s,
                tenant_share=tenant_share,
            )
        )
        self.slot_bytes = slot_bytes
        self.path = Path(path)
        self.faults = NvmeFaults()
        self._clock = clock
        self._engine_choice: EngineChoice = engine
        self._memory = memory
        self._direct = direct
        self._wrap = wrap
        self._reading = Breaker(_BREAKER_FAILURES, breaker_pause_s)
        self._writing = Breaker(_BREAKER_FAILURES, breaker_pause_s)
        self._medium: Medium | None = None
        self._generation = 1  # of the next block
        self._unreadable: dict[BlockKey, int] = {}
        self._calls = WorkerCalls(_CALLS, "kvtide-nvme", deadline)

    @property
    def engine(self) -> str:
        """What moves the bytes, "nixl" or "threads"; "" while closed."""
        return self._medium.engine.name if self._medium else ""

    @property
    def direct(self) -> bool:
        """Whether the page cache is bypassed."""
        return self._medium is not None and self._medium.file.direct

    async def start(self) -> None:
        """Find or make the file. OSError as `NvmeFile.open`: locked by another process, no room, not ours."""
        assert self._medium is None, "started before"
        medium, found = await asyncio.to_thread(self._open)
        self.faults.recreated += medium.file.recreated
        self.faults.dropped_at_start += found.dropped
        self._generation = found.last_generation + 1
        for tenant, run in itertools.groupby(found.placed, key=lambda placed: placed.tenant):
            while pairs := [(placed.key, placed.slot) for placed in itertools.islice(run, _ADOPT_AT_ONCE)]:
                self._books.adopt(pairs, tenant=_tenant_name(tenant))
                await asyncio.sleep(0)
        self._medium = medium

    async def get(self, keys: Sequence[BlockKey], into: Sequence[memoryview]) -> list[Fetched]:
        """As in `Tier`. Buffers page-aligned. A block that came whole but late is a HIT all the same."""
        assert len(keys) == len(into) and all(len(buffer) == self.slot_bytes for buffer in into)
        there = [index for index, key in enumerate(keys) if self._books.holds(key)]
        answers = [Fetched.MISS] * len(keys)
        if not there:
            return answers
        if self._medium is None or not self._reading.allow(self._clock()):
            self.faults.refused += len(there)
            for index in there:
                answers[index] = Fetched.FAILED
            return answers
        with self._calls.call():
            lease = self._books.prepare_scattered([keys[index] for index in there], _OWNER)
            placed = [(entry.key, entry.offset // self.slot_bytes) for entry in lease.entries]
            job = ReadJob(self._medium, placed, [into[index] for index in there], self._generation - 1)
            try:
                ended = await self._work(job.run, len(there) * self.slot_bytes, self._reading, may_skip=True)
                self._judge_read(job, placed, late=ended.late)
            finally:
                self._books.complete_read(lease.id)
            ended.resume()
        for index, answer in zip(there, job.answers, strict=True):
            answers[index] = answer
        return answers

    async def put(
        self, keys: Sequence[BlockKey], blocks: Sequence[memoryview], *, tenant: str | None = None
    ) -> list[Stored]:
        """As in `Tier`. Buffers page-aligned. What the device refused is tried once more, in other slots."""
        assert len(keys) == len(blocks) and all(len(block) == self.slot_bytes for block in blocks)
        buffers = dict(zip(reversed(keys), reversed(blocks), strict=True))
        answers = dict.fromkeys(keys, Stored.PRESENT)
        new = [key for key in buffers if not self._books.holds(key)]
        if new and (self._medium is None or not self._writing.allow(self._clock())):
            self.faults.refused += len(new)
            answers.update(dict.fromkeys(new, Stored.FAILED))
        elif self._medium is not None:
            with self._calls.call():
                chain = tuple(dict.fromkeys(keys))
                refused = await self._put(chain, buffers, answers, tenant, last=False)
                if refused and self._medium is not None:
                    self._books.evict(len(refused))
                    await self._put(refused, buffers, answers, tenant, last=True)
        return one_each(keys, answers)

    @property
    def left_alone(self) -> bool:
        """Whether reading or writing has failed of late."""
        return self._reading.is_open or self._writing.is_open

    async def drop(self, keys: Sequence[BlockKey]) -> int:
        gone = [(self._slot_of(key), key) for key in dict.fromkeys(keys) if self._books.holds(key)]
        dropped = self._books.drop(keys)
        # Behind an open breaker the records stay until `close` or until their slots are written anew.
        if gone and self._medium is not None and not self._writing.is_open:
            with self._calls.call():
                await self._retract(gone)
        return dropped

    async def clear(self) -> None:
        self._books.clear()
        medium, upto = self._medium, self._generation - 1
        if medium is None:
            return
        medium.index.overtake(upto)
        with self._calls.call():
            ended = await self._work(
                lambda stop: medium.index.retract_all(medium.engine, upto),
                self.geometry.data,
                self._writing,
            )
            ended.resume()

    def check(self) -> None:
        """Books and index agree."""
        self._books.check()
        if self._medium is not None and not self._calls.open:
            for key in self._books.coldest(self.geometry.slots):
                assert self._medium.index.key_of(self._slot_of(key)) == key

    async def close(self) -> None:
        """Stop what is under way, leave exactly the visible blocks on disk, let go of the file.

        A call that hangs in the device keeps the file, locked, for as long as the process lives.
        """
        medium, self._medium = self._medium, None
        if medium is None:
            return
        if not await self._calls.finish():
            _log.error("%s: %d calls hang in the device; the file stays locked", self.path, self._calls.open)
            self._calls.close()
            return
        if not self._writing.is_open:
            kept = [self._slot_of(key) for key in self._books.manifest().keys]
            await self._work(
                lambda stop: medium.index.retract_all(medium.engine, self._generation, kept),
                self.geometry.data,
                self._writing,
            )
        medium.engine.close()
        medium.file.close()
        self._calls.close()

    def _open(self) -> tuple[Medium, Found]:
        file = NvmeFile.open(self.path, self.geometry, direct=self._direct)
        try:
            index = SlotIndex(self.geometry, file.salt)
            found = index.load(file.fd, file.whole_slots)
            engine = open_engine(self._engine_choice, file.fd, self.geometry.nbytes, self._memory)
        except BaseException:
            file.close()
            raise
        return Medium(file, index, engine if self._wrap is None else self._wrap(engine)), found

    def _slot_of(self, key: BlockKey) -> int:
        return self._books.offset_of(key) // self.slot_bytes

    def _judge_read(self, job: ReadJob, placed: Sequence[tuple[BlockKey, int]], *, late: bool) -> None:
        """Drop what is corrupt, or failed to be read for the second time."""
        errors = [key for (key, _), error in zip(placed, job.errors, strict=True) if _of_device(error)]
        self._unread += sum(answer is not Fetched.HIT for answer in job.answers)
        self.faults.read_errors += len(errors)
        bad = [place for place, answer in zip(placed, job.answers, strict=True) if answer is Fetched.CORRUPT]
        self.faults.corrupt += len(bad)
        for (key, _), answer in zip(placed, job.answers, strict=True):
            if answer is Fetched.HIT:
                self._unreadable.pop(key, None)
        for key in errors:
            self._unreadable[key] = self._unreadable.get(key, 0) + 1
            if self._unreadable[key] > 1:
                bad += [place for place in placed if place[0] == key]
        for key, slot in bad:
            self._unreadable.pop(key, None)
            if self._books.holds(key) and self._slot_of(key) == slot:
                self._books.drop([key])
        if len(self._unreadable) > _MOST_UNREADABLE:
            self._unreadable.clear()
        if not late:
            moved = any(answer is not Fetched.FAILED for answer in job.answers)
            self._count(self._reading, moved, next((error for error in job.errors if error), None))

    async def _put(
        self,
        chain: Sequence[BlockKey],
        buffers: dict[BlockKey, memoryview],
        answers: dict[BlockKey, Stored],
        tenant: str | None,
        *,
        last: bool,
    ) -> tuple[BlockKey, ...]:
        """Write what is new of `chain` and fill in `answers`; returns what the device refused.

        The breaker hears of a success, and of failures when it was the `last` try.
        """
        assert self._medium is not None
        number = _tenant_number(tenant)
        lease = self._books.reserve(chain, _OWNER, tenant=_tenant_name(number), bypass=True)
        answers.update(dict.fromkeys(lease.no_room, Stored.NO_ROOM))
        placed = [Placed(entry.offset // self.slot_bytes, entry.key, number) for entry in lease.entries]
        job = WriteJob(self._medium, placed, [buffers[place.key] for place in placed], self._generation)
        self._generation += len(placed)
        visible: tuple[BlockKey, ...] = ()
        written: list[BlockKey] = []
        try:
            if placed:
                ended = await self._work(job.run, len(placed) * self.slot_bytes, self._writing, may_skip=True)
                written = [
                    place.key for place, error in zip(placed, job.errors, strict=True) if error is None
                ]
        finally:
            visible = self._books.complete_write(lease.id, written)
        for place in placed:
            answers[place.key] = Stored.FAILED
        answers.update(dict.fromkeys(visible, Stored.STORED))
        if not placed:
            return ()
        self.faults.write_errors += len(placed) - len(written)
        if (written or last) and not ended.late and not ended.cancelled:
            self._count(self._writing, bool(written), next((e for e in job.errors if e is not None), None))
        ended.resume()
        if ended.late:
            return ()
        return tuple(place.key for place, error in zip(placed, job.errors, strict=True) if error is not None)

    async def _retract(self, gone: Sequence[tuple[int, BlockKey]]) -> None:
        medium, upto = self._medium, self._generation - 1
        assert medium is not None
        ended = await self._work(
            lambda stop: medium.index.retract(medium.engine, gone, upto), 0, self._writing
        )
        ended.resume()

    async def _work(
        self, work: Callable[[Stop], _T], nbytes: int, breaker: Breaker, *, may_skip: bool = False
    ) -> Ended[_T]:
        def late() -> None:
            self.faults.late += 1
            breaker.failed(self._clock())

        return await self._calls.run(work, nbytes, late, may_skip=may_skip)

    def _count(self, breaker: Breaker, moved: bool, error: OSError | None) -> None:
        """A call ended in time: with some success, or with nothing but errors."""
        if moved or error is None:
            breaker.succeeded()
            return
        was_open = breaker.is_open
        breaker.failed(self._clock())
        if breaker.is_open and not was_open:
            what = "reading" if breaker is self._reading else "writing"
            _log.warning("NVMe tier %s: %s fails (%s); tried again now and then", self.path, what, error)


def _of_device(error: OSError | None) -> bool:
    """A failure of the device, not one of ours to begin in time."""
    return error is not None and error.errno != errno.ECANCELED


def _tenant_number(tenant: str | None) -> int:
    """What a record says instead of the name, which may have any length."""
    return 0 if tenant is None else xxhash.xxh3_64_intdigest(tenant.encode()) or 1


def _tenant_name(number: int) -> str | None:
    return f"{number:016x}" if number else None
