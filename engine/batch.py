"""The decode engine: continuous batching over the page pool, admission by free pages, preemption through snapshots.

One thread calls `step`; `add` and `abort` may come from others.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from torch import Tensor

from engine.carried import refuse_contradictions
from engine.decode import decode_step
from engine.errors import GenerationFailed, InvalidRequest
from engine.eviction import open_eviction, settled_counts
from engine.fit import refuse_impossible
from engine.model import Model
from engine.pool import OutOfPages, PagePool, PoolUse
from engine.request import TokenEvent
from engine.restore import restore, take_snapshot
from engine.sampler import sample
from engine.schedule import Waiting, admit, preemption_victim
from engine.sequence import Choice, Pending, Running, next_position, nothing_to_release
from engine.snapshot import SnapshotLayout


@dataclass(frozen=True)
class StepResult:
    """What one step did for one request: its new tokens, or why it cannot go on (then nothing of it is left)."""

    request_id: str
    events: tuple[TokenEvent, ...]
    error: GenerationFailed | None = None


class TakenOut(NamedTuple):
    """A choice that left an engine: `add` takes it into another one, with this snapshot (host memory).

    To go on in another process it is made anew there, with the same request and `choice.generated`.
    """

    choice: Choice
    layout: SnapshotLayout
    buffer: Tensor


class DecodeEngine:
    """Runs choices of different lengths and recipes in one batch.

    Waiting entries are admitted in order of arrival (preempted ones keep theirs). When pages run out, the youngest
    running choice is packed into a snapshot in host memory, gives its pages back and waits.

    A choice whose recipe has a decode rule that evicts has a `RowEviction` beside its row: it goes into snapshots with
    it, and replaying evicts again what was evicted.

    A choice that has more generated tokens than its snapshot replays them: they run through the same steps as everybody
    else's, nothing is drawn and no event is given until the newest is the next input. That rebuilds a lost sequence
    from its prompt's snapshot and its ids.
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
        self,
        choices: Sequence[Choice],
        layout: SnapshotLayout,
        buffer: Tensor,
        release: Callable[[], None] = nothing_to_release,
    ) -> None:
        """Queue the unfinished choices of a request on one snapshot. Ownership of `buffer` until `release` is called.

        The snapshot is the prompt's, or was taken from a running choice: what it says beyond the prompt must be the
        beginning of the generated tokens of all of them. Each has at least one.

        Raises, and does not take the buffer: `InvalidRequest` when the pool could not hold one choice at its end, or
        has fewer rows than there are choices; `SnapshotError` when the recipe's decode rule cannot go on from it.
        """
        live = [choice for choice in choices if choice.finish_reason is None]
        assert live, "nothing to decode"
        _assert_continues(live, layout)
        refuse_contradictions(self.pool.spec, live[0].request.recipe, layout.meta)
        self.refuse_impossible(live[0], layout)
        if len(live) > self.pool.rows:
            raise InvalidRequest(
                f"the decode pool runs {self.pool.rows} choices at once, not {len(live)}", "n"
            )
        with self._lock:
            self._waiting.append(self._pending(self._orders, live, layout, buffer, release))
            self._orders += 1

    def refuse_impossible(self, choice: Choice, layout: SnapshotLayout) -> None:
        """Raise `InvalidRequest` when even an empty pool could not hold one choice with all its tokens.

        `ContextOverflow` where the context or the pool's page tables are too short, with both numbers.
        """
        refuse_impossible(self.pool, choice.request, layout)

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
        return sum(entry.pages for entry in list(self._waiting))

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
            [entry.next_input for entry in batch],
            [entry.position for entry in batch],
            [entry.eviction for entry in batch],
        )
        drawing = [index for index, entry in enumerate(batch) if not entry.replaying]
        for entry in batch:
            entry.position += 1
        return self._draw([batch[index] for index in drawing], logits[drawing])

    def _draw(self, batch: Sequence[Running], logits: Tensor) -> list[StepResult]:
        """Next token of each of `batch`; logits [len(batch), vocab]."""
        drawn = sample(logits, [entry.choice.sample_row() for entry in batch], self.model.spec.end_tokens)
        results: dict[str, list[TokenEvent]] = {}
        errors: dict[str, GenerationFailed] = {}
        for entry, outcome in zip(batch, drawn, strict=True):
            events = results.setdefault(entry.request_id, [])
            try:
                events.append(entry.choice.accept(outcome))
            except GenerationFailed as error:
                errors[entry.request_id] = error
        self._retire(set(errors))
        return [StepResult(key, tuple(events), errors.get(key)) for key, events in results.items()]

    def take_out(self, request_id: str, choice: int) -> TakenOut:
        """Remove one running or waiting choice, to go on elsewhere. For the thread that calls `step`, between steps.

        Raises LookupError when it is not here (any more).
        """
        for index, running in enumerate(self._running):
            if (running.request_id, running.choice.choice) == (request_id, choice):
                return self._pack(self._running.pop(index))
        with self._lock:
            waiting = [entry for entry in self._waiting if entry.request_id == request_id]
        for entry in waiting:
            for found in entry.choices:
                if found.choice == choice:
                    taken = TakenOut(found, entry.layout, entry.buffer.clone())
                    entry.choices = [other for other in entry.choices if other is not found]
                    if not entry.choices:
                        self._stop_waiting(entry)
                    return taken
        raise LookupError(f"choice {choice} of {request_id} is not decoded here")

    def fail_all(self) -> list[str]:
        """Free everything and name the requests that were lost: for a step that raised."""
        with self._lock:
            names = {entry.request_id for entry in self._running}
            names.update(entry.request_id for entry in self._waiting)
            self._aborted.update(names)
        self._drop_aborted()
        return sorted(names)

    def check(self) -> None:
        """AssertionError unless the pool's books are right, exactly the running choices hold rows, and all is in order.

        For the thread that calls `step`, between steps.
        """
        self.pool.check()
        rows = {entry.row for entry in self._running}
        assert len(rows) == len(self._running), "two choices share a row"
        assert len(rows) + self.pool.free_rows == self.pool.rows, "a row is held by nobody"
        for entry in self._running:
            if entry.eviction is not None:
                entry.eviction.check(self.pool)
        with self._lock:
            orders = [entry.order for entry in self._waiting]
            assert all(entry.choices for entry in self._waiting), "nobody waits for a snapshot"
        assert orders == sorted(orders), "those who wait are out of order"

    def _drop_aborted(self) -> None:
        with self._lock:
            aborted, self._aborted = self._aborted, set()
            if not aborted:
                return
            gone = [entry for entry in self._waiting if entry.request_id in aborted]
            self._waiting = [entry for entry in self._waiting if entry.request_id not in aborted]
        for entry in gone:
            entry.release()
        for running in self._running:
            if running.request_id in aborted:
                self.pool.close(running.row)
        self._running = [entry for entry in self._running if entry.request_id not in aborted]

    def _retire(self, failed: set[str]) -> None:
        """Close the rows of finished and failed choices."""
        keep = []
        for entry in self._running:
            if entry.choice.finish_reason is not None or entry.request_id in failed:
                self.pool.close(entry.row)
            else:
                keep.append(entry)
        self._running = keep
        with self._lock:
            self._aborted.update(failed)  # waiting siblings go at the next step

    def _admit(self) -> None:
        free_rows = self.pool.free_rows
        with self._lock:
            waiting = self._waiting[:free_rows]  # each takes a row at least
        wishes = (Waiting(e.pages, len(e.choices), self._headroom(e)) for e in waiting)
        count = admit(wishes, self.pool.use.free, free_rows, len(self._running))
        for entry in waiting[:count]:
            request, layout = entry.choices[0].request, entry.layout
            most = len(request.prompt) + request.sampling.max_tokens
            eviction = open_eviction(self.pool.spec, request.recipe, layout, entry.buffer, most)
            row = restore(self.pool, layout, entry.buffer, eviction)
            rows = [row, *(self.pool.fork(row) for _ in entry.choices[1:])]
            start = next_position(layout.meta)
            for choice, own in zip(entry.choices, rows, strict=True):
                forked = eviction if eviction is None or own == row else eviction.fork(own)
                self._running.append(Running(entry.order, choice, own, layout, start, forked))
            # From here on it is running and no longer waiting, whatever becomes of the entries behind it.
            self._stop_waiting(entry)

    def _stop_waiting(self, entry: Pending) -> None:
        with self._lock:
            self._waiting.remove(entry)
        entry.release()

    def _make_room(self) -> list[Running]:
        """Preempt until every running choice can take one more token."""
        while self._running:
            try:
                for entry in self._running:
                    if entry.eviction is not None:
                        entry.eviction.settle(self.pool)
                self.pool.reserve_slot(np.array([entry.row for entry in self._running], np.int64))
                return list(self._running)
            except OutOfPages:
                assert len(self._running) > 1, "add() refuses what cannot fit alone"
                self.preempt(preemption_victim([entry.order for entry in self._running]))
        return []

    def preempt(self, index: int) -> None:
        """Pack running choice `index` into a snapshot in host memory and let it wait for pages again."""
        entry = self._running.pop(index)
        _, layout, buffer = self._pack(entry)
        self.preemptions += 1
        waiting = self._pending(entry.order, [entry.choice], layout, buffer, nothing_to_release)
        with self._lock:
            insort(self._waiting, waiting, key=attrgetter("order"))

    def _pack(self, entry: Running) -> TakenOut:
        """Pack a choice that runs no more into host memory and give its pages back."""
        layout, buffer = take_snapshot(self.pool, entry.row, entry.layout.meta, entry.fed, entry.eviction)
        self.pool.close(entry.row)
        return TakenOut(entry.choice, layout, buffer)

    def _pending(
        self,
        order: int,
        choices: Sequence[Choice],
        layout: SnapshotLayout,
        buffer: Tensor,
        release: Callable[[], None],
    ) -> Pending:
        recipe = choices[0].request.recipe
        pages = self.pool.pages_for(settled_counts(self.pool.spec, recipe, layout.meta))
        return Pending(order, choices, layout, buffer, release, pages)

    def _headroom(self, entry: Pending) -> int:
        """Pages that choices take soon after admission: one per head, and copies of what they may not share."""
        heads = sum(layer.kv_heads for layer in self.pool.spec.layers)
        others = len(entry.choices) - 1 if entry.choices[0].request.recipe.positions == "slot" else 0
        return heads * len(entry.choices) + others * entry.pages


def _assert_continues(choices: Sequence[Choice], layout: SnapshotLayout) -> None:
    """AssertionError unless the choices' tokens begin with the snapshot's and go on with a next input."""
    known = layout.meta.tokens
    for choice in choices:
        if choice.request.recipe.decode.evicts:
            assert choice.request.recipe.recipe_id == layout.meta.recipe_id, "the snapshot of another recipe"
        assert len(choice.request.prompt) == layout.meta.prompt_tokens, "the snapshot of another prompt"
        assert choice.position >= next_position(layout.meta), "a choice without a next input"
        own = np.asarray(choice.tokens[: len(known)], np.uint32)
        assert np.array_equal(own, known), "the snapshot of another text"
