"""The decode engine: continuous batching over the page pool, admission by free pages, preemption through snapshots.

One thread calls `step`; `add` and `abort` may come from others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from engine.decode import decode_step
from engine.errors import GenerationFailed, InvalidRequest
from engine.model import Model
from engine.pool import OutOfPages, PagePool, PoolUse
from engine.request import TokenEvent
from engine.restore import restore, take_snapshot
from engine.sampler import sample
from engine.schedule import Waiting, admit, preemption_victim
from engine.sequence import Choice, Pending, Running
from engine.snapshot import SnapshotLayout


@dataclass(frozen=True)
class StepResult:
    """What one step did for one request: its new tokens, or why it cannot go on (then nothing of it is left)."""

    request_id: str
    events: tuple[TokenEvent, ...]
    error: GenerationFailed | None = None


class DecodeEngine:
    """Runs choices of different lengths and recipes in one batch.

    Waiting entries are admitted in order of arrival (preempted ones keep theirs). When pages run out, the youngest
    running choice is packed into a snapshot in host memory, gives its pages back and waits.
    """

    def __init__(self, model: Model, pool: PagePool) -> None:
        self.model = model
        self.pool = pool
        self.preemptions = 0
        self._lock = threading.Lock()
        self._waiting: list[Pending] = []
        self._running: list[Running] = []
        self._aborted: set[str] = set()
        self._orders = 0

    def add(
        self, choices: Sequence[Choice], layout: SnapshotLayout, buffer: Tensor, release: Callable[[], None]
    ) -> None:
        """Queue the unfinished choices of a request on one snapshot. Ownership of `buffer` until `release` is called.

        Raises `InvalidRequest` (and does not take the buffer) when the pool could not hold one choice at its end, or
        has fewer rows than there are choices.
        """
        live = [choice for choice in choices if choice.finish_reason is None]
        assert live, "nothing to decode"
        self.refuse_impossible(live[0], layout)
        if len(live) > self.pool.rows:
            raise InvalidRequest(
                f"the decode pool runs {self.pool.rows} choices at once, not {len(live)}", "n"
            )
        with self._lock:
            self._waiting.append(Pending(self._orders, live, layout, buffer, release))
            self._orders += 1

    def refuse_impossible(self, choice: Choice, layout: SnapshotLayout) -> None:
        """Raise `InvalidRequest` when even an empty pool could not hold one choice with all its tokens."""
        more = choice.request.sampling.max_tokens - len(choice.generated)
        needed, total = self.pool.pages_at(layout.meta.counts, more), self.pool.use.total
        if needed > total:
            raise InvalidRequest(
                f"keeping {layout.kept_tokens} prompt tokens and {more} new ones takes {needed} pages of"
                f" {self.pool.page_bytes} bytes, the decode pool has {total}; lower max_tokens or kv.budget",
                "max_tokens",
            )

    def abort(self, request_id: str) -> None:
        """Free everything of a request at the next step boundary; unknown ids are ignored."""
        with self._lock:
            self._aborted.add(request_id)

    @property
    def waiting(self) -> int:
        """Choices that wait for pages."""
        return sum(len(entry.choices) for entry in list(self._waiting))

    @property
    def pages_owed(self) -> int:
        """Pages that waiting choices need before they can run."""
        return sum(self.pool.pages_for(entry.layout.meta.counts) for entry in list(self._waiting))

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._running and not self._aborted

    @property
    def use(self) -> PoolUse:
        return self.pool.use

    def step(self) -> list[StepResult]:
        """Admit, run one token of every running choice, apply. Returns at once when there is nothing to run."""
        self._drop_aborted()
        self._admit()
        batch = self._make_room()
        if not batch:
            return []
        logits = decode_step(
            self.model,
            self.pool,
            [entry.row for entry in batch],
            [entry.choice.generated[-1] for entry in batch],
            [entry.choice.position for entry in batch],
        )
        drawn = sample(logits, [entry.choice.sample_row() for entry in batch], self.model.spec.end_tokens)
        results: dict[str, list[TokenEvent]] = {}
        errors: dict[str, GenerationFailed] = {}
        for entry, outcome in zip(batch, drawn, strict=True):
            request_id = entry.choice.request.request_id
            try:
                results.setdefault(request_id, []).append(entry.choice.accept(outcome))
            except GenerationFailed as error:
                errors[request_id] = error
        self._retire(set(errors))
        return [StepResult(key, tuple(events), errors.get(key)) for key, events in results.items()]

    def fail_all(self) -> list[str]:
        """Free everything and name the requests that were lost: for a step that raised."""
        with self._lock:
            names = {entry.choice.request.request_id for entry in self._running}
            names.update(choice.request.request_id for entry in self._waiting for choice in entry.choices)
            self._aborted.update(names)
        self._drop_aborted()
        return sorted(names)

    def check(self) -> None:
        """The pool's own invariants, and: exactly the running choices hold rows."""
        self.pool.check()
        rows = [entry.row for entry in self._running]
        assert len(set(rows)) == len(rows), "two choices share a row"

    def _drop_aborted(self) -> None:
        with self._lock:
            aborted, self._aborted = self._aborted, set()
            if not aborted:
                return
            gone = [entry for entry in self._waiting if entry.choices[0].request.request_id in aborted]
            self._waiting = [entry for entry in self._waiting if entry not in gone]
        for entry in gone:
            entry.release()
        for running in self._running:
            if running.choice.request.request_id in aborted:
                self.pool.close(running.row)
        self._running = [e for e in self._running if e.choice.request.request_id not in aborted]

    def _retire(self, failed: set[str]) -> None:
        """Close the rows of finished and failed choices."""
        keep = []
        for entry in self._running:
            if entry.choice.finish_reason is not None or entry.choice.request.request_id in failed:
                self.pool.close(entry.row)
            else:
                keep.append(entry)
        self._running = keep
        with self._lock:
            self._aborted.update(failed)  # waiting siblings go at the next step

    def _admit(self) -> None:
        with self._lock:
            waiting = sorted(self._waiting, key=lambda entry: entry.order)
        heads = sum(layer.kv_heads for layer in self.pool.spec.layers)
        wishes = [
            Waiting(self.pool.pages_for(e.layout.meta.counts), len(e.choices), heads * len(e.choices))
            for e in waiting
        ]
        count = admit(wishes, self.pool.use.free, self.pool.free_rows, len(self._running))
        for entry in waiting[:count]:
            row = restore(self.pool, entry.layout, entry.buffer)
            rows = [row, *(self.pool.fork(row) for _ in entry.choices[1:])]
            self._running.extend(
                Running(entry.order, choice, own, entry.layout)
                for choice, own in zip(entry.choices, rows, strict=True)
            )
            # From here on it is running and no longer waiting, whatever becomes of the entries behind it.
            with self._lock:
                self._waiting = [other for other in self._waiting if other is not entry]
            entry.release()

    def _make_room(self) -> list[Running]:
        """Preempt until every running choice can take one more token."""
        while self._running:
            try:
                self.pool.reserve_slot(np.array([entry.row for entry in self._running], np.int64))
                return list(self._running)
            except OutOfPages:
                assert len(self._running) > 1, "add() refuses what cannot fit alone"
                self.preempt(preemption_victim([entry.order for entry in self._running]))
        return []

    def preempt(self, index: int) -> None:
        """Pack running choice `index` into a snapshot in host memory and let it wait for pages again."""
        entry = self._running.pop(index)
        layout, buffer = take_snapshot(self.pool, entry.row, entry.layout.meta, entry.choice.tokens)
        self.pool.close(entry.row)
        self.preemptions += 1
        with self._lock:
            self._waiting.append(Pending(entry.order, [entry.choice], layout, buffer, _nothing))


def _nothing() -> None:
    """A preempted choice's snapshot is plain host memory: dropping it frees it."""
