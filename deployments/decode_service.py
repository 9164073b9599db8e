"""The decode side of a replica, without Ray: ask a prefill replica, pull survivors, join the batch, stream tokens."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from torch import Tensor

from deployments.arrivals import Arrivals
from deployments.blocking import BlockingCalls, outlast
from deployments.forecast import snapshot_bytes, survivor_layout
from deployments.journey import EventStream, Journey
from deployments.loop import EngineLoop
from deployments.reply import PrefillReply
from deployments.room import Room
from deployments.shipping import poll_for_ever
from engine.batch import DecodeEngine, StepResult
from engine.errors import (
    ContextOverflow,
    GenerationFailed,
    InvalidRequest,
    Overloaded,
    ReplicaLost,
)
from engine.request import Event, GenerationRequest, TokenEvent
from engine.sequence import Choice
from engine.snapshot import SnapshotError, SnapshotLayout, parse_snapshot
from engine.support import refuse_recipe
from engine.text import TokenPieces
from kv_tiers.transfer.endpoint import TransferEndpoint
from kv_tiers.transfer.staging import StagingLease

_log = logging.getLogger("kvtide.decode")

_RETRY_PAUSE_S = 0.25
_READ_THREADS = 2


class PrefillClient(Protocol):
    """How decode reaches the prefill pool."""

    async def prefill(self, request: GenerationRequest, *, stage: bool) -> PrefillReply:
        """As `PrefillService.prefill`. Raises `ReplicaLost` when the replica died; cancelling cancels it there."""
        ...


class DecodeService:
    """Serves `generate` calls of one event loop; construct and close it there."""

    def __init__(
        self,
        engine: DecodeEngine,
        pieces: TokenPieces,
        endpoint: TransferEndpoint,
        prefill: PrefillClient,
        *,
        threads: int,
        max_requests: int,
        attempts: int,
        waiting_bytes: int,
    ) -> None:
        """`max_requests`: running and waiting together; `attempts`: prefills per request before giving up.

        `waiting_bytes`: most snapshot bytes of all requests between prefill and the batch (one request always fits);
        those behind wait before they are prefilled, where nothing is staged for them and no ticket runs out.
        """
        self.engine = engine
        self.endpoint = endpoint
        self._pieces = pieces
        self._prefill = prefill
        self._max_requests = max_requests
        self._attempts = attempts
        self._event_loop = asyncio.get_running_loop()
        self._serial = 0
        self._streams: dict[str, EventStream] = {}
        self._request_ids: set[str] = set()
        self._starts: set[asyncio.Task[None]] = set()
        self._closing = False
        self._kept_tokens: dict[str, int] = {}
        self._totals = {"generated_tokens": 0.0, "recomputes": 0.0}
        self._arrivals = Arrivals(endpoint, engine.model.spec.fingerprint.digest)
        self._room = Room(waiting_bytes)
        self._direct = 0
        self._reading = BlockingCalls("read", _READ_THREADS)
        self._loop = EngineLoop(
            "decode",
            engine.step,
            lambda: not engine.idle,
            self._delivered,
            self._failed,
            threads,
            engine.check,
        )
        self._poller = asyncio.create_task(poll_for_ever(endpoint, self._arrivals.pulled, lambda: None))

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[list[Event], None]:
        """Events of a request in batches, a `PromptEvent` first; each choice ends with a finish reason.

        Raises `Overloaded`, `InvalidRequest`, `ReplicaLost`, `GenerationFailed`. Closing it frees everything.
        """
        self._refuse_impossible(request)
        if self._closing or not self._loop.alive:
            raise ReplicaLost("this decode replica generates nothing any more")
        if len(self._streams) >= self._max_requests:
            raise Overloaded(f"{len(self._streams)} requests run or wait already", retry_after_s=1.0)
        if request.request_id in self._request_ids:
            raise GenerationFailed(f"request id {request.request_id} is in use")
        # Under a name of its own in the engine: a late abort or event must never hit another call of the same id.
        self._serial += 1
        name = f"{request.request_id}#{self._serial}"
        stream = self._streams[name] = EventStream()
        self._request_ids.add(request.request_id)
        # Survivors are fetched while the consumer takes the first tokens: a slow one must not outlast the ticket.
        start = asyncio.create_task(self._start(request, name, stream))
        self._starts.add(start)
        stream.follow(start)
        open_choices = set(range(request.sampling.n))
        try:
            while open_choices:
                batch = await stream.take()
                tokens = [event for event in batch if isinstance(event, TokenEvent)]
                open_choices.difference_update(e.choice for e in tokens if e.finish_reason is not None)
                self._totals["generated_tokens"] += len(tokens)
                yield batch
        finally:
            start.cancel()
            cancelled = await outlast(start)
            self._starts.discard(start)
            self._request_ids.discard(request.request_id)
            self._kept_tokens.pop(name, None)
            del self._streams[name]
            if open_choices:
                self.engine.abort(name)
                self._loop.wake()
            if cancelled:
                raise asyncio.CancelledError

    def health(self) -> None:
        """Raises RuntimeError when this replica should be replaced."""
        if self._loop.broken:
            raise RuntimeError("the decode engine fails every step")
        if self._poller.done():
            raise RuntimeError("transfers are not polled any more")

    def stats(self) -> dict[str, float]:
        """Gauges and totals for the directory's report."""
        use, counters = self.engine.use, self.endpoint.counters
        return {
            "queue": float(len(self._streams) - len(self._kept_tokens) + self.engine.waiting),
            "running": float(self.engine.running),
            "active_requests": float(len(self._streams)),
            "pages_used": float(use.used),
            "pages_total": float(use.total),
            "pages_owed": float(self.engine.pages_owed),
            "landing_bytes": float(self.endpoint.used_bytes),
            "pulls_running": float(self._arrivals.under_way),
            "kept_tokens": float(sum(self._kept_tokens.values())),
            "preemptions": float(self.engine.preemptions),
            "snapshot_bytes_waiting": float(self._room.held),
            "shipped_bytes": float(counters.bytes_pulled + self._arrivals.bytes_in_replies),
            **{f"pulls_{outcome}": float(count) for outcome, count in counters.pulls.items() if count},
            **self._totals,
        }

    async def close(self) -> None:
        """End every stream, stop the engine thread and the endpoint."""
        self._closing = True
        for start in list(self._starts):
            start.cancel()
        await asyncio.gather(*self._starts, return_exceptions=True)
        for stream in self._streams.values():
            stream.put((), ReplicaLost("the decode replica is closing"))
        await asyncio.to_thread(self._loop.stop)
        self.engine.fail_all()
        await self._arrivals.close()
        await self._reading.close()
        self._poller.cancel()
        self.endpoint.close()

    def _refuse_impossible(self, request: GenerationRequest) -> None:
        """Refuse before prefill works for it what this replica could never decode."""
        spec, tokens, more = self.engine.model.spec, len(request.prompt), request.sampling.max_tokens
        if not tokens:
            raise InvalidRequest("the prompt is empty", "prompt")
        refuse_recipe(spec, request.recipe)
        # Slot positions let an answer outgrow the context; the prompt has to fit all the same.
        streams = request.recipe.positions == "slot"
        if tokens + (1 if streams else more) > spec.context_length:
            raise ContextOverflow(
                f"prompt of {tokens} tokens and {more} new ones do not fit the context of {spec.context_length}"
                " tokens",
                "max_tokens",
            )
        if more == 1:
            return
        rows = len(self.engine.pool.tables)
        if request.sampling.n > rows:
            raise InvalidRequest(f"n {request.sampling.n} is more than the {rows} decoded at once", "n")
        choice = Choice(request, 0, self._pieces, spec.end_tokens)
        self.engine.refuse_impossible(choice, survivor_layout(spec, request))

    async def _start(self, request: GenerationRequest, name: str, stream: EventStream) -> None:
        """From prompt to queued choices, holding room for their snapshot; the engine gives it back."""
        journey = Journey(request, self._attempts, self._event_loop.time() + request.deadline_s)
        need = snapshot_bytes(self.engine.model.spec, request)
        await self._take_room(journey, need)
        queued = False
        try:
            queued = await self._bring(journey, name, stream, need)
        finally:
            if not queued:
                self._room.give(need)

    async def _take_room(self, journey: Journey, need: int) -> None:
        if need:
            try:
                async with asyncio.timeout_at(journey.deadline):
                    await self._room.take(need)
            except TimeoutError:
                raise _late(journey) from None

    async def _bring(self, journey: Journey, name: str, stream: EventStream, need: int) -> bool:
        """Stream the first tokens and queue the rest; → whether there is a rest."""
        reply = await self._ask(journey, stage=False)
        own = replace(journey.request, request_id=name)
        ends = self.engine.model.spec.end_tokens
        choices = [Choice(own, index, self._pieces, ends) for index in range(own.sampling.n)]
        try:
            events = [choice.accept(first) for choice, first in zip(choices, reply.first, strict=True)]
        except GenerationFailed:
            self._arrivals.refuse(reply)
            raise
        self._kept_tokens[name] = reply.prompt.kept_tokens
        stream.put([reply.prompt, *events])
        if all(choice.finish_reason is not None for choice in choices):
            self._arrivals.refuse(reply)  # a stop string ended every choice, which prefill does not look for
            return False
        await self._join(journey, choices, reply, need)
        return True

    async def _ask(self, journey: Journey, *, stage: bool) -> PrefillReply:
        """Have the prompt prefilled, again elsewhere when a replica dies over it."""
        while True:
            attempt = journey.next_attempt()
            try:
                async with asyncio.timeout_at(journey.deadline):
                    return await self._prefill.prefill(attempt, stage=stage)
            except ReplicaLost:
                if not journey.attempts_left:
                    raise
                _log.warning("prefill of %s was lost, attempt %d", attempt.request_id, attempt.attempt)
                await asyncio.sleep(_RETRY_PAUSE_S)
            except TimeoutError:
                raise _late(journey) from None

    async def _join(
        self, journey: Journey, choices: Sequence[Choice], reply: PrefillReply, need: int
    ) -> None:
        """Fetch the survivors and queue the choices; a failed fetch is a recompute, counted."""
        while True:
            lease = await self._arrivals.fetch(reply, journey.deadline)
            if lease is not None:
                await self._add(choices, lease, need)
                return
            self._totals["recomputes"] += 1
            if not journey.attempts_left:
                raise ReplicaLost(f"survivors could not be fetched in {journey.used} attempts")
            # The first tokens are out and stay: survivors are wanted whatever this attempt samples.
            reply = await self._ask(journey, stage=True)

    async def _add(self, choices: Sequence[Choice], lease: StagingLease, need: int) -> None:
        """Hand landed survivors to the engine, from landing memory if they can be scattered now."""
        # Landing memory is for transfers, not for queueing: one snapshot at most waits for its pages there.
        crowded = self._direct > 0 or self.engine.waiting > 0
        self._direct += not crowded
        handed = False
        try:
            layout, buffer = await self._reading.run(partial(self._read, lease, crowded))
            release = partial(self._admitted, need, None if crowded else lease)
            self.engine.add(choices, layout, buffer, release)
            handed = True
        except SnapshotError as error:
            raise GenerationFailed(f"a verified snapshot cannot be read: {error}") from error
        finally:
            if crowded or not handed:
                lease.release()
            if not crowded and not handed:
                self._direct -= 1
        self._loop.wake()

    def _read(self, lease: StagingLease, copy: bool) -> tuple[SnapshotLayout, Tensor]:
        layout = parse_snapshot(self.engine.model.spec, lease.buffer)
        return layout, lease.buffer.clone() if copy else lease.buffer

    # Called in the engine's thread.

    def _admitted(self, need: int, lease: StagingLease | None) -> None:
        """The engine is through with a snapshot; `lease` if it was in landing memory."""
        if lease is not None:
            lease.release()
        self._event_loop.call_soon_threadsafe(self._give_room, need, lease is not None)

    def _delivered(self, results: list[StepResult]) -> None:
        self._event_loop.call_soon_threadsafe(self._hand_out, results)

    def _failed(self, error: Exception) -> None:
        names = list(self._streams)  # whom to tell when the engine cannot even say who was lost
        try:
            names = self.engine.fail_all()
        finally:
            failure = GenerationFailed(f"decode failed: {type(error).__name__}")
            lost = [StepResult(name, (), failure) for name in names]
            self._event_loop.call_soon_threadsafe(self._hand_out, lost)

    # Called in the event loop.

    def _give_room(self, need: int, direct: bool) -> None:
        self._direct -= direct
        self._room.give(need)

    def _hand_out(self, results: list[StepResult]) -> None:
        for result in results:
            stream = self._streams.get(result.request_id)
            if stream is not None:
                stream.put(result.events, result.error)


def _late(journey: Journey) -> Overloaded:
    return Overloaded(f"no first token within {journey.request.deadline_s:g} s", retry_after_s=5.0)
