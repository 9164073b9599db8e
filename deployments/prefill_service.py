"""The prefill side of a replica, without Ray: admission, prefix reuse, the engine thread, staging, tickets, spill."""

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch

from deployments.blocking import BlockingCalls
from deployments.forecast import prefill_bytes, snapshot_bytes
from deployments.loading import Loading
from deployments.loop import EngineLoop
from deployments.reply import PackedSnapshot, PrefillReply
from deployments.room import Room
from deployments.shipping import poll_for_ever
from engine.errors import (
    ContextOverflow,
    GenerationFailed,
    InvalidRequest,
    KvtideError,
    Overloaded,
    ReplicaLost,
)
from engine.local import prompt_event
from engine.prefill import PrefillDone, PrefillEngine, PrefillFailed, PrefillJob, PrefillResult
from engine.prefix import PrefixCache, PrefixLoad
from engine.request import GenerationRequest
from engine.sampler import Sampled
from engine.workspace import Workspace
from kv_tiers.keys import Fingerprint
from kv_tiers.transfer.endpoint import TransferEndpoint
from kv_tiers.transfer.staging import StagingLease, payload_checksum

_log = logging.getLogger("kvtide.prefill")

# Staging comes free when a ticket ends, which `poll` reports; this is for room that came free in another way.
_LOOK_AGAIN_S = 0.1
_TIER_THREADS = 4
_PACK_THREADS = 2


class PrefillService:
    """Serves `prefill` calls of one event loop; construct and close it there.

    What a request holds here ends with its call, except the ticket (which ends by acknowledgement, refusal, revocation
    or deadline) and the write of its blocks to the tier (which runs behind and holds the workspace).
    """

    def __init__(
        self,
        engine: PrefillEngine,
        endpoint: TransferEndpoint,
        prefix: PrefixCache | None,
        *,
        threads: int,
        max_queued: int,
        workspace_bytes: int,
        ticket_ttl_s: float,
        by_reply: bool = False,
    ) -> None:
        """`max_queued`: prompts taken at once, waiting and computed; `workspace_bytes`: most full prompt KV, and what
        recipes read or note beside it, in memory at once, spills included (one prompt always fits); `by_reply`:
        survivors travel inside the reply, because no other process can reach `endpoint`.
        """
        self.engine = engine
        self.endpoint = endpoint
        self.prefix = prefix
        self._max_queued = max_queued
        self._workspaces = Room(workspace_bytes)
        self._ticket_ttl_s = ticket_ttl_s
        self._by_reply = by_reply
        self._event_loop = asyncio.get_running_loop()
        self._serial = 0
        self._waiters: dict[str, asyncio.Future[PrefillDone]] = {}
        self._waiting = 0
        self._closing = False
        self._staging_line = asyncio.Lock()  # first come, first served
        self._staging_freed = asyncio.Event()
        self._staged = asyncio.Event()
        self._spills: set[asyncio.Task[None]] = set()
        self._tier_calls = BlockingCalls("tier", _TIER_THREADS)
        self._packing = BlockingCalls("pack", _PACK_THREADS)
        self._totals = {"prefilled_prompts": 0.0, "prefilled_tokens": 0.0, "selection_seconds": 0.0}
        self._loop = EngineLoop(
            "prefill",
            engine.step,
            lambda: bool(engine.queued),
            self._delivered,
            self._failed,
            threads,
            engine.check,
        )
        self._poller = asyncio.create_task(poll_for_ever(endpoint, self._staged, self._staging_freed.set))

    async def prefill(self, request: GenerationRequest, *, stage: bool = False) -> PrefillReply:
        """Compute a prompt; → first tokens and the ticket of its survivors (`stage`: even if no choice goes on).

        Raises `InvalidRequest` (does not fit), `Overloaded` (queue full, or `deadline_s` over), `GenerationFailed`,
        `ReplicaLost` (closing, or beyond repair). Cancelling frees everything.
        """
        self._refuse_impossible(request)
        self._refuse_if_gone()
        if self._waiting >= self._max_queued:
            raise Overloaded(f"{self._waiting} prompts wait already", retry_after_s=1.0)
        need = prefill_bytes(self.engine.model.spec, request)
        self._waiting += 1
        held = 0
        try:
            async with asyncio.timeout(request.deadline_s):
                await self._workspaces.take(need)
                held = need
                done, loading = await self._compute(request)
                reply = await self._stage(request, done, stage)
            self._count(done)
            if self.prefix is not None and loading is not None and not self._closing:
                self._in_background(self._spill(self.prefix, request, done, loading, held))
                held = 0  # the spill gives it back
            return reply
        except TimeoutError:
            raise Overloaded(
                f"prefill was not done within {request.deadline_s:g} s", retry_after_s=5.0
            ) from None
        finally:
            self._waiting -= 1
            self._workspaces.give(held)

    def health(self) -> None:
        """Raises RuntimeError when this replica should be replaced."""
        if self._loop.broken:
            raise RuntimeError("the prefill engine fails every step")
        if self._poller.done():
            raise RuntimeError("transfers are not polled any more")

    def stats(self) -> dict[str, float]:
        """Gauges and totals for the directory's report."""
        gauges = {
            "queue": float(self._waiting),
            "prefill_tokens_owed": float(self.engine.tokens_owed),
            "tickets_open": float(self.endpoint.open_tickets),
            "staged_bytes": float(self.endpoint.staged_bytes),
            "workspace_bytes": float(self._workspaces.held),
            "spills_running": float(len(self._spills)),
            **self._totals,
        }
        if self.prefix is not None:
            counters = self.prefix.counters
            gauges |= {
                "prefix_tokens_asked": float(counters.tokens_asked),
                "prefix_tokens_found": float(counters.tokens_found),
                "prefix_tokens_lossy": float(counters.tokens_lossy),
                "prefix_blocks_corrupt": float(counters.blocks_corrupt),
                "prefix_blocks_written": float(counters.blocks_written),
                "prefix_loads_late": float(counters.loads_late),
            }
        return gauges

    async def close(self) -> None:
        """Stop the engine thread, fail what waits for it, wait for running spills, end every ticket."""
        self._closing = True
        await asyncio.to_thread(self._loop.stop)
        self.engine.fail_all()
        self._reject(list(self._waiters), ReplicaLost("the prefill replica is closing"))
        await asyncio.gather(*self._spills, return_exceptions=True)
        await self._tier_calls.close()
        await self._packing.close()
        self._poller.cancel()
        self.endpoint.close()

    def _refuse_impossible(self, request: GenerationRequest) -> None:
        """Refuse before it queues what no waiting makes fit."""
        spec, tokens = self.engine.model.spec, len(request.prompt)
        if not tokens:
            raise InvalidRequest("the prompt is empty", "prompt")
        if tokens > spec.context_length:
            raise ContextOverflow(
                f"prompt of {tokens} tokens does not fit the context of {spec.context_length} tokens",
                "prompt",
            )
        if request.sampling.max_tokens > 1:
            self._refuse_unstageable(snapshot_bytes(spec, request))

    def _refuse_unstageable(self, nbytes: int) -> None:
        if nbytes > self.endpoint.capacity:
            raise InvalidRequest(
                f"what the recipe keeps of the prompt takes up to {nbytes} bytes, transfer memory holds"
                f" {self.endpoint.capacity}; lower kv.budget, raise kv.decode.every or staging_gib",
                "kv.budget",
            )

    def _refuse_if_gone(self) -> None:
        if self._closing or not self._loop.alive:
            raise ReplicaLost("this prefill replica computes nothing any more")

    async def _compute(self, request: GenerationRequest) -> tuple[PrefillDone, Loading | None]:
        """A finished prompt, and the load that it began with, which may still be ending its lease."""
        workspace = self.engine.open_workspace(request)
        if self.prefix is None:
            return await self._run(request, workspace), None
        limit = len(request.prompt) - self.engine.must_compute(request)
        load = PrefixLoad(self.prefix, request, workspace, limit, self.engine.seconds_for(0, limit))
        loading = Loading(self._tier_calls, load, request.request_id)
        try:
            await loading.opened()
            return await self._run(request, workspace), loading
        except BaseException:
            if await loading.stop():
                raise asyncio.CancelledError from None
            raise

    async def _run(self, request: GenerationRequest, workspace: Workspace) -> PrefillDone:
        """Have the engine compute what is not in the workspace, nor arriving there."""
        engine = self.engine
        self._refuse_if_gone()
        # Under a name of its own in the engine: a late abort must never hit another call for the same request.
        self._serial += 1
        name = f"{request.request_id}#{self._serial}"
        job = PrefillJob(replace(request, request_id=name), workspace, workspace.filled)
        engine.add(job)
        waiter = self._waiters[name] = self._event_loop.create_future()
        self._loop.wake()
        try:
            return await waiter
        finally:
            del self._waiters[name]
            if waiter.cancelled():
                engine.abort(*job.key)
                self._loop.wake()

    async def _stage(self, request: GenerationRequest, done: PrefillDone, demanded: bool) -> PrefillReply:
        """Pack survivors into transfer memory and publish a ticket, unless no choice goes on."""
        if not demanded and all(self._ends(request, first) for first in done.first):
            return PrefillReply(prompt_event(done, 0), done.first)
        event = prompt_event(done, done.layout.nbytes)
        if self._by_reply:
            self._refuse_unstageable(done.layout.nbytes)
            packed = await self._packing.run(partial(_pack_apart, done, self.engine.model.spec.fingerprint))
            return PrefillReply(event, done.first, snapshot=packed)
        lease = await self._reserve(done.layout.nbytes)
        try:
            checksum = await self._packing.run(partial(_pack, done, lease))
            self._refuse_if_gone()
            ticket = self.endpoint.publish(
                lease,
                request_id=request.request_id,
                attempt=request.attempt,
                fingerprint=self.engine.model.spec.fingerprint.digest,
                checksum=checksum,
                ttl_s=self._ticket_ttl_s,
            )
        except BaseException:
            lease.release()
            self._staging_freed.set()
            raise
        self._staged.set()
        return PrefillReply(event, done.first, ticket.to_bytes())

    async def _reserve(self, nbytes: int) -> StagingLease:
        """Transfer memory, waiting for tickets to end while there is none."""
        self._refuse_unstageable(nbytes)
        async with self._staging_line:
            while (lease := self.endpoint.reserve(nbytes)) is None:
                self._staging_freed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_AGAIN_S):
                        await self._staging_freed.wait()
                self._refuse_if_gone()
            return lease

    def _ends(self, request: GenerationRequest, first: object) -> bool:
        """Whether a choice is over with its first token (a stop string is the decode side's to find)."""
        if not isinstance(first, Sampled) or request.sampling.max_tokens == 1:
            return True
        own = frozenset() if request.sampling.ignore_eos else self.engine.model.spec.end_tokens
        return first.token_id in own or first.token_id in request.sampling.stop_token_ids

    async def _spill(
        self, prefix: PrefixCache, request: GenerationRequest, done: PrefillDone, loading: Loading, held: int
    ) -> None:
        """Write full blocks behind the reply; whatever becomes of them, the request never notices."""
        try:
            await loading.ended()
            workspace, keys = done.job.workspace, loading.keys
            await self._tier_calls.run(partial(prefix.store, workspace, keys, request.tenant))
        except (KvtideError, LookupError, OSError, ValueError, RuntimeError) as error:
            _log.warning("blocks of %s were not kept: %s", request.request_id, error)
        finally:
            self._workspaces.give(held)

    def _in_background(self, spill: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(spill)
        self._spills.add(task)
        task.add_done_callback(self._spills.discard)

    def _count(self, done: PrefillDone) -> None:
        self._totals["prefilled_prompts"] += 1
        self._totals["prefilled_tokens"] += len(done.job.request.prompt) - done.job.cached
        self._totals["selection_seconds"] += done.select_s

    # Called in the engine's thread.

    def _delivered(self, results: list[PrefillResult]) -> None:
        self._event_loop.call_soon_threadsafe(self._resolve, results)

    def _failed(self, error: Exception) -> None:
        # Who waits now is in the engine, or just was: a step can also fail over prompts it had finished.
        lost = set(self._waiters)
        try:
            lost.update(request.request_id for request in self.engine.fail_all())
        finally:
            failure = GenerationFailed(f"prefill failed: {type(error).__name__}")
            self._event_loop.call_soon_threadsafe(self._reject, lost, failure)

    # Called in the event loop.

    def _resolve(self, results: list[PrefillResult]) -> None:
        for result in results:
            name = result.job.request.request_id
            if isinstance(result, PrefillFailed):
                self._reject([name], result.error)
            elif (waiter := self._waiters.get(name)) is not None and not waiter.done():
                waiter.set_result(result)

    def _reject(self, lost: Iterable[str], failure: KvtideError) -> None:
        for name in lost:
            waiter = self._waiters.get(name)
            if waiter is not None and not waiter.done():
                waiter.set_exception(failure)


def _pack(done: PrefillDone, lease: StagingLease) -> int:
    """Write the snapshot into its lease; → its checksum."""
    done.pack(lease.buffer)
    return payload_checksum(lease.buffer)


def _pack_apart(done: PrefillDone, fingerprint: Fingerprint) -> PackedSnapshot:
    """The snapshot in memory of its own."""
    buffer = torch.empty(done.layout.nbytes, dtype=torch.uint8)
    done.pack(buffer)
    return PackedSnapshot(fingerprint.digest, payload_checksum(buffer), buffer.numpy())
