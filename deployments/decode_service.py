"""The decode side of a replica, without Ray: ask a prefill replica, pull survivors, join the batch, stream tokens."""

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from deployments.blocking import BlockingCalls, outlast
from deployments.forecast import survivor_layout
from deployments.journey import EventStream, Journey
from deployments.loop import EngineLoop
from deployments.reply import PrefillReply
from deployments.shipping import poll_for_ever
from engine.batch import DecodeEngine, StepResult
from engine.errors import (
    ContextOverflow,
    GenerationFailed,
    InvalidRequest,
    KvtideError,
    Overloaded,
    ReplicaLost,
)
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
_PULL_THREADS = 8
_WORD_THREADS = 2


class PrefillClient(Protocol):
    """How decode reaches the prefill pool."""

    async def prefill(self, request: GenerationRequest) -> PrefillReply:
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
    ) -> None:
        """`max_requests`: running and waiting together; `attempts`: prefills per request before giving up."""
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
        self._pulling = 0
        self._kept_tokens: dict[str, int] = {}
        self._totals = {"generated_tokens": 0.0, "recomputes": 0.0}
        self._pulled = asyncio.Event()
        self._pulls = BlockingCalls("pull", _PULL_THREADS)
        self._words = BlockingCalls("word", _WORD_THREADS)
        self._loop = EngineLoop(
            "decode", engine.step, lambda: not engine.idle, self._delivered, self._failed, threads
        )
        self._poller = asyncio.create_task(poll_for_ever(endpoint, self._pulled, lambda: None))

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
            "pulls_running": float(self._pulling),
            "kept_tokens": float(sum(self._kept_tokens.values())),
            "preemptions": float(self.engine.preemptions),
            "shipped_bytes": float(counters.bytes_pulled),
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
        await self._pulls.close()
        await self._words.close()
        self._poller.cancel()
        self.endpoint.close()

    def _refuse_impossible(self, request: GenerationRequest) -> None:
        """Refuse before prefill works for it what this replica could never decode."""
        spec, tokens, more = self.engine.model.spec, len(request.prompt), request.sampling.max_tokens
        if not tokens:
            raise InvalidRequest("the prompt is empty", "prompt")
        if tokens + more > spec.context_length:
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
        """From prompt to running choices; first tokens are streamed on the way."""
        journey = Journey(request, self._attempts, self._event_loop.time() + request.deadline_s)
        reply = await self._ask(journey)
        own = replace(request, request_id=name)
        ends = self.engine.model.spec.end_tokens
        choices = [Choice(own, index, self._pieces, ends) for index in range(request.sampling.n)]
        try:
            events = [choice.accept(first) for choice, first in zip(choices, reply.first, strict=True)]
        except GenerationFailed:
            self._refuse(reply)
            raise
        self._kept_tokens[name] = reply.prompt.kept_tokens
        stream.put([reply.prompt, *events])
        if all(choice.finish_reason is not None for choice in choices):
            self._refuse(reply)  # a stop string ended every choice, which prefill does not look for
        else:
            await self._join(journey, choices, reply)

    async def _ask(self, journey: Journey) -> PrefillReply:
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

    async def _join(self, journey: Journey, choices: Sequence[Choice], reply: PrefillReply) -> None:
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

    async def _fetch(self, journey: Journey, ticket: Ticket) -> StagingLease | None:
        """Pull and acknowledge; None when this ticket cannot be had (the reason is counted)."""
        try:
            while True:
                pull = await self._pull(ticket)
                if pull.outcome is not Outcome.NO_ROOM:
                    break
                if ticket.nbytes > self.endpoint.capacity:
                    raise InvalidRequest(
                        f"what the recipe keeps of the prompt takes {ticket.nbytes} bytes, landing memory holds"
                        f" {self.endpoint.capacity}; lower kv.budget or raise staging_gib",
                        "kv.budget",
                    )
                if self._event_loop.time() >= journey.deadline:
                    break
                await asyncio.sleep(_RETRY_PAUSE_S)  # admission of what has landed makes room
        except (asyncio.CancelledError, InvalidRequest):
            self._words.post(partial(self.endpoint.refuse, ticket))
            raise
        if pull.lease is not None:
            return pull.lease
        _log.warning("pull for %s: %s %s", ticket.request_id, pull.outcome, pull.detail)
        if pull.scope is Scope.PEER:
            await self._words.run(partial(self.endpoint.remove_peer, ticket.endpoint))
        else:
            self._words.post(partial(self.endpoint.refuse, ticket))
        return None

    async def _pull(self, ticket: Ticket) -> Pull:
        """Pull in a thread, and acknowledge there what has landed."""
        gone = threading.Event()

        def pull() -> Pull:
            landed = self.endpoint.pull(
                ticket,
                fingerprint=self.engine.model.spec.fingerprint.digest,
                timeout_s=_PULL_LEAST_S + ticket.nbytes / _PULL_FLOOR_BYTES_PER_S,
                cancelled=gone.is_set,
            )
            if landed.ok:
                self.endpoint.acknowledge(ticket)
            return landed

        self._pulling += 1
        try:
            return await self._pulls.run(pull, stop=gone.set, discard=_give_up)
        finally:
            self._pulling -= 1
            self._pulled.set()

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

    def _refuse(self, reply: PrefillReply) -> None:
        """Nobody will pull."""
        if reply.ticket is not None:
            self._words.post(partial(self.endpoint.refuse, Ticket.from_bytes(reply.ticket)))

    # Called in the engine's thread.

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

    def _hand_out(self, results: list[StepResult]) -> None:
        for result in results:
            stream = self._streams.get(result.request_id)
            if stream is not None:
                stream.put(result.events, result.error)


def _give_up(pull: Pull) -> None:
    """What landed after all is not wanted any more."""
    if pull.lease is not None:
        pull.lease.release()
