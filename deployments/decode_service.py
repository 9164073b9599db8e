"""The decode side of a replica, without Ray: ask a prefill replica, pull the survivors, join the batch, stream tokens."""

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Protocol

from deployments.loop import EngineLoop
from deployments.reply import PrefillReply
from deployments.shipping import poll_for_ever
from engine.batch import DecodeEngine, StepResult
from engine.errors import GenerationFailed, KvtideError, Overloaded, ReplicaLost
from engine.request import Event, GenerationRequest, TokenEvent
from engine.sequence import Choice
from engine.snapshot import SnapshotError, parse_snapshot
from engine.text import TokenPieces
from kv_tiers.transfer.endpoint import Outcome, Pull, Scope, TransferEndpoint
from kv_tiers.transfer.staging import StagingLease
from kv_tiers.transfer.ticket import Ticket

_log = logging.getLogger("kvtide.decode")

# A pull moves at least some 100 MB/s even over slow TCP; a frozen peer must not hold a request for its whole deadline.
_PULL_FLOOR_BYTES_PER_S = 50e6
_PULL_LEAST_S = 5.0
_RETRY_PAUSE_S = 0.25


class PrefillClient(Protocol):
    """How decode reaches the prefill pool."""

    async def prefill(self, request: GenerationRequest) -> PrefillReply:
        """As `PrefillService.prefill`. Raises `ReplicaLost` when the replica died; cancelling cancels it there."""
        ...


class _Stream:
    """Events of one request on their way from the engine's thread to its generator."""

    def __init__(self) -> None:
        self._arrived = asyncio.Event()
        self._events: list[Event] = []
        self._error: KvtideError | None = None

    def put(self, events: Sequence[Event], error: KvtideError | None = None) -> None:
        self._events.extend(events)
        self._error = self._error or error
        self._arrived.set()

    async def take(self) -> list[Event]:
        """All events that have come since the last call, at least one; raises what the engine reported."""
        await self._arrived.wait()
        self._arrived.clear()
        events, self._events = self._events, []
        if not events and self._error is not None:
            raise self._error
        if self._error is not None:
            self._arrived.set()
        return events


class _Journey:
    """Attempts of one request and the deadline of its first token."""

    def __init__(self, request: GenerationRequest, attempts: int, deadline: float) -> None:
        self.request = request
        self.deadline = deadline
        self.used = 0
        self._attempts = attempts

    @property
    def attempts_left(self) -> int:
        return self._attempts - self.used

    def next_attempt(self) -> GenerationRequest:
        """The request under the next attempt number, which revokes what earlier ones left behind."""
        self.used += 1
        return replace(self.request, attempt=self.request.attempt + self.used - 1)


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
    ) -> None:
        """`max_requests`: running and waiting together; `attempts`: prefills per request before giving up."""
        self.engine = engine
        self.endpoint = endpoint
        self._pieces = pieces
        self._prefill = prefill
        self._max_requests = max_requests
        self._attempts = attempts
        self._event_loop = asyncio.get_running_loop()
        self._streams: dict[str, _Stream] = {}
        self._active = 0
        self._pulling = 0
        self._kept_tokens: dict[str, int] = {}
        self._totals = {"generated_tokens": 0.0, "recomputes": 0.0}
        self._pulled = asyncio.Event()
        self._loop = EngineLoop(
            "decode", engine.step, lambda: not engine.idle, self._delivered, self._failed, threads
        )
        self._poller = asyncio.create_task(poll_for_ever(endpoint, self._pulled, lambda: None))

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[list[Event], None]:
        """Events of a request in batches, a `PromptEvent` first; each choice ends with a finish reason.

        Raises `Overloaded`, `InvalidRequest`, `ReplicaLost`, `GenerationFailed`. Closing it frees everything.
        """
        if self._active >= self._max_requests:
            raise Overloaded(f"{self._active} requests run or wait already", retry_after_s=1.0)
        if request.request_id in self._streams:
            raise GenerationFailed(f"request id {request.request_id} is in use")
        self._active += 1
        stream = self._streams[request.request_id] = _Stream()
        journey = _Journey(request, self._attempts, self._event_loop.time() + request.deadline_s)
        open_choices: set[int] = set()
        try:
            reply = await self._ask(journey)
            choices = [
                Choice(request, index, self._pieces, self.engine.model.spec.end_tokens)
                for index in range(request.sampling.n)
            ]
            events = [choice.accept(first) for choice, first in zip(choices, reply.first, strict=True)]
            open_choices.update(event.choice for event in events if event.finish_reason is None)
            self._kept_tokens[request.request_id] = reply.prompt.kept_tokens
            yield [reply.prompt, *events]
            if not open_choices:
                await self._refuse(reply)
                return
            await self._join(journey, choices, reply)
            while open_choices:
                batch = await stream.take()
                for event in batch:
                    if isinstance(event, TokenEvent) and event.finish_reason is not None:
                        open_choices.discard(event.choice)
                self._totals["generated_tokens"] += len(batch)
                yield batch
        finally:
            self._active -= 1
            del self._streams[request.request_id]
            self._kept_tokens.pop(request.request_id, None)
            if open_choices:
                self.engine.abort(request.request_id)
                self._loop.wake()

    def health(self) -> None:
        """Raises RuntimeError when this replica should be replaced."""
        if self._loop.broken:
            raise RuntimeError("the decode engine fails every step")

    def stats(self) -> dict[str, float]:
        """Gauges and totals for the directory's report."""
        use, counters = self.engine.use, self.endpoint.counters
        return {
            "queue": float(self._active - len(self._kept_tokens) + self.engine.waiting),
            "running": float(self.engine.running),
            "active_requests": float(self._active),
            "pages_used": float(use.used),
            "pages_total": float(use.total),
            "pages_owed": float(self.engine.pages_owed),
            "landing_bytes": float(self.endpoint.used_bytes),
            "pulls_running": float(self._pulling),
            "kept_tokens": float(sum(self._kept_tokens.values())),
            "preemptions": float(self.engine.preemptions),
            "shipped_bytes": float(counters.bytes_pulled),
            **{f"pulls_{outcome}": float(count) for outcome, count in counters.pulls.items() if count},
            **self._totals,
        }

    async def close(self) -> None:
        """Stop the engine thread and the endpoint."""
        self._poller.cancel()
        await asyncio.to_thread(self._loop.stop)
        self.endpoint.close()

    async def _ask(self, journey: _Journey) -> PrefillReply:
        """Have the prompt prefilled, again elsewhere when a replica dies over it."""
        while True:
            attempt = journey.next_attempt()
            try:
                async with asyncio.timeout_at(journey.deadline):
                    return await self._prefill.prefill(attempt)
            except ReplicaLost:
                if not journey.attempts_left:
                    raise
                _log.warning("prefill of %s was lost, attempt %d", attempt.request_id, attempt.attempt)
                await asyncio.sleep(_RETRY_PAUSE_S)
            except TimeoutError:
                raise Overloaded(
                    f"no first token within {journey.request.deadline_s:g} s", retry_after_s=5.0
                ) from None

    async def _join(self, journey: _Journey, choices: Sequence[Choice], reply: PrefillReply) -> None:
        """Fetch the survivors and queue the choices; a failed fetch is a recompute, counted."""
        while True:
            assert reply.ticket is not None, "prefill stages whatever decodes on"
            ticket = Ticket.from_bytes(reply.ticket)
            lease = await self._fetch(journey, ticket)
            if lease is not None:
                self._add(choices, lease)
                return
            self._totals["recomputes"] += 1
            if not journey.attempts_left:
                raise ReplicaLost(f"survivors could not be fetched in {journey.used} attempts")
            reply = await self._ask(journey)

    async def _fetch(self, journey: _Journey, ticket: Ticket) -> StagingLease | None:
        """Pull and acknowledge; None when this ticket cannot be had (the reason is counted)."""
        while True:
            pull = await self._pull(ticket)
            if pull.lease is not None:
                self.endpoint.acknowledge(ticket)
                self._pulled.set()
                return pull.lease
            if pull.outcome is Outcome.NO_ROOM and self._event_loop.time() < journey.deadline:
                await asyncio.sleep(_RETRY_PAUSE_S)  # admission of what has landed makes room
                continue
            _log.warning("pull for %s: %s %s", ticket.request_id, pull.outcome, pull.detail)
            if pull.scope is Scope.PEER:
                await asyncio.to_thread(self.endpoint.remove_peer, ticket.endpoint)
            else:
                await asyncio.to_thread(self.endpoint.refuse, ticket)
            return None

    async def _pull(self, ticket: Ticket) -> Pull:
        gone = threading.Event()
        self._pulling += 1
        work = asyncio.ensure_future(
            asyncio.to_thread(
                self.endpoint.pull,
                ticket,
                fingerprint=self.engine.model.spec.fingerprint.digest,
                timeout_s=_PULL_LEAST_S + ticket.nbytes / _PULL_FLOOR_BYTES_PER_S,
                cancelled=gone.is_set,
            )
        )
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            gone.set()
            pull = await work
            if pull.lease is not None:
                pull.lease.release()
            await asyncio.to_thread(self.endpoint.refuse, ticket)
            raise
        finally:
            self._pulling -= 1

    def _add(self, choices: Sequence[Choice], lease: StagingLease) -> None:
        """Hand landed survivors to the engine, from landing memory if they can be scattered now."""
        try:
            layout = parse_snapshot(self.engine.model.spec, lease.buffer)
            if self.engine.waiting:
                # Others wait for pages already: landing memory is for transfers, not for queueing.
                self.engine.add(choices, layout, lease.buffer.clone(), lambda: None)
                lease.release()
            else:
                self.engine.add(choices, layout, lease.buffer, lease.release)
        except (SnapshotError, KvtideError) as error:
            lease.release()
            if isinstance(error, KvtideError):
                raise
            raise GenerationFailed(f"a verified snapshot cannot be read: {error}") from error
        self._loop.wake()

    async def _refuse(self, reply: PrefillReply) -> None:
        """Nobody will pull: a stop string ended every choice with its first token."""
        if reply.ticket is not None:
            await asyncio.to_thread(self.endpoint.refuse, Ticket.from_bytes(reply.ticket))

    # Called in the engine's thread.

    def _delivered(self, results: list[StepResult]) -> None:
        self._event_loop.call_soon_threadsafe(self._hand_out, results)

    def _failed(self, error: Exception) -> None:
        failure = GenerationFailed(f"decode failed: {type(error).__name__}")
        lost = [StepResult(name, (), failure) for name in self.engine.fail_all()]
        self._event_loop.call_soon_threadsafe(self._hand_out, lost)

    # Called in the event loop.

    def _hand_out(self, results: list[StepResult]) -> None:
        for result in results:
            stream = self._streams.get(result.request_id)
            if stream is not None:
                stream.put(result.events, result.error)
