"""The prefill side of a replica, without Ray: admission, prefix reuse, the engine thread, staging, tickets, spill."""

import asyncio
import logging

from deployments.loop import EngineLoop
from deployments.reply import PrefillReply
from deployments.shipping import poll_for_ever
from engine.errors import GenerationFailed, InvalidRequest, KvtideError, Overloaded
from engine.local import prompt_event
from engine.prefill import PrefillDone, PrefillEngine, PrefillJob
from engine.prefix import PrefixCache
from engine.request import GenerationRequest
from engine.sampler import Sampled
from kv_tiers.keys import BlockKey
from kv_tiers.transfer.endpoint import TransferEndpoint
from kv_tiers.transfer.staging import payload_checksum

_log = logging.getLogger("kvtide.prefill")


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
    ) -> None:
        """`workspace_bytes`: most full prompt KV in memory at once, spills included (one prompt always fits)."""
        self.engine = engine
        self.endpoint = endpoint
        self.prefix = prefix
        self._max_queued = max_queued
        self._workspace_bytes = workspace_bytes
        self._held_bytes = 0
        self._ticket_ttl_s = ticket_ttl_s
        self._event_loop = asyncio.get_running_loop()
        self._waiters: dict[tuple[str, int], asyncio.Future[PrefillDone]] = {}
        self._room = asyncio.Condition()
        self._waiting = 0
        self._staged = asyncio.Event()
        self._background: set[asyncio.Task[None]] = set()
        self._totals = {"prefilled_prompts": 0.0, "prefilled_tokens": 0.0, "selection_seconds": 0.0}
        self._loop = EngineLoop(
            "prefill", engine.step, lambda: bool(engine.queued), self._delivered, self._failed, threads
        )
        self._poller = asyncio.create_task(poll_for_ever(endpoint, self._staged, self._room_changed))

    async def prefill(self, request: GenerationRequest) -> PrefillReply:
        """Compute a prompt; → first tokens and the ticket of its survivors.

        Raises `InvalidRequest` (does not fit), `Overloaded` (queue full, or `deadline_s` over), `GenerationFailed`.
        Cancelling frees everything.
        """
        if self._waiting >= self._max_queued:
            raise Overloaded(f"{self._waiting} prompts wait already", retry_after_s=1.0)
        self._refuse_unstageable(request)
        self._waiting += 1
        need = len(request.prompt) * self.engine.model.spec.kv_bytes_per_token
        held = 0
        try:
            async with asyncio.timeout(request.deadline_s):
                async with self._room:
                    await self._room.wait_for(lambda: self._fits(need))
                    self._held_bytes += need
                held = need
                done, keys = await self._compute(request)
                reply = await self._stage(done)
            self._count(done)
            if self.prefix is not None:
                self._in_background(self._spill(self.prefix, done, keys, held))
                held = 0  # the spill gives it back
            return reply
        except TimeoutError:
            raise Overloaded(f"prefill was not done within {request.deadline_s:g} s", retry_after_s=5.0) from None
        finally:
            self._waiting -= 1
            self._give_back(held)

    def health(self) -> None:
        """Raises RuntimeError when this replica should be replaced."""
        if self._loop.broken:
            raise RuntimeError("the prefill engine fails every step")

    def stats(self) -> dict[str, float]:
        """Gauges and totals for the directory's report."""
        gauges = {
            "queue": float(self._waiting),
            "prefill_tokens_owed": float(self.engine.tokens_owed),
            "tickets_open": float(self.endpoint.open_tickets),
            "staged_bytes": float(self.endpoint.staged_bytes),
            "spills_running": float(len(self._background)),
            **self._totals,
        }
        if self.prefix is not None:
            counters = self.prefix.counters
            gauges |= {
                "prefix_tokens_asked": float(counters.tokens_asked),
                "prefix_tokens_found": float(counters.tokens_found),
                "prefix_blocks_corrupt": float(counters.blocks_corrupt),
                "prefix_blocks_written": float(counters.blocks_written),
            }
        return gauges

    async def close(self) -> None:
        """Stop the engine thread, end every ticket, wait for running spills."""
        self._poller.cancel()
        await asyncio.to_thread(self._loop.stop)
        await asyncio.gather(*self._background, return_exceptions=True)
        self.endpoint.close()

    def _refuse_unstageable(self, request: GenerationRequest) -> None:
        spec = self.engine.model.spec
        kept = request.recipe.budget_tokens(len(request.prompt))
        if kept * spec.kv_bytes_per_token > self.endpoint.capacity:
            raise InvalidRequest(
                f"{kept} kept tokens take {kept * spec.kv_bytes_per_token} bytes, transfer memory holds"
                f" {self.endpoint.capacity}; lower kv.budget or raise staging_gib",
                "kv.budget",
            )

    async def _compute(self, request: GenerationRequest) -> tuple[PrefillDone, list[BlockKey]]:
        engine = self.engine
        workspace = engine.open_workspace(request)
        keys: list[BlockKey] = []
        cached = 0
        if self.prefix is not None:
            keys = await asyncio.to_thread(self.prefix.keys, request.prompt, request.tenant)
            limit = len(request.prompt) - engine.must_compute(request)
            cached = await asyncio.to_thread(self.prefix.load, workspace, keys, limit)
        job = PrefillJob(request, workspace, cached)
        waiter: asyncio.Future[PrefillDone] = self._event_loop.create_future()
        self._waiters[job.key] = waiter
        try:
            engine.add(job)
            self._loop.wake()
            return await waiter, keys
        finally:
            del self._waiters[job.key]
            if not waiter.done() or waiter.cancelled():
                engine.abort(*job.key)
                self._loop.wake()

    async def _stage(self, done: PrefillDone) -> PrefillReply:
        """Pack survivors into transfer memory and publish a ticket, unless no choice goes on."""
        request = done.job.request
        if all(self._ends(request, first) for first in done.first):
            return PrefillReply(prompt_event(done, 0), done.first, None)
        nbytes = done.layout.nbytes
        lease = self.endpoint.reserve(nbytes)
        while lease is None:
            async with self._room:
                await self._room.wait()
            lease = self.endpoint.reserve(nbytes)
        packing = asyncio.ensure_future(asyncio.to_thread(done.pack, lease.buffer))
        try:
            await asyncio.shield(packing)
            checksum = await asyncio.to_thread(payload_checksum, lease.buffer)
        except asyncio.CancelledError:
            await asyncio.wait([packing])  # the thread still writes into the lease
            lease.release()
            raise
        ticket = self.endpoint.publish(
            lease,
            request_id=request.request_id,
            attempt=request.attempt,
            fingerprint=self.engine.model.spec.fingerprint.digest,
            checksum=checksum,
            ttl_s=self._ticket_ttl_s,
        )
        self._staged.set()
        return PrefillReply(prompt_event(done, nbytes), done.first, ticket.to_bytes())

    def _ends(self, request: GenerationRequest, first: object) -> bool:
        """Whether a choice is over with its first token (a stop string is the decode side's to find)."""
        if not isinstance(first, Sampled) or request.sampling.max_tokens == 1:
            return True
        own = frozenset() if request.sampling.ignore_eos else self.engine.model.spec.end_tokens
        return first.token_id in own or first.token_id in request.sampling.stop_token_ids

    async def _spill(self, prefix: PrefixCache, done: PrefillDone, keys: list[BlockKey], held: int) -> None:
        """Write full blocks behind the reply; whatever becomes of them, the request never notices."""
        try:
            await asyncio.to_thread(prefix.store, done.job.workspace, keys)
        except (KvtideError, KeyError) as error:
            _log.warning("blocks of %s were not kept: %s", done.job.request.request_id, error)
        finally:
            self._give_back(held)

    def _in_background(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _fits(self, nbytes: int) -> bool:
        return not self._held_bytes or self._held_bytes + nbytes <= self._workspace_bytes

    def _give_back(self, nbytes: int) -> None:
        self._held_bytes -= nbytes
        self._room_changed()

    async def _notify_room(self) -> None:
        async with self._room:
            self._room.notify_all()

    def _room_changed(self) -> None:
        self._in_background(self._notify_room())

    def _count(self, done: PrefillDone) -> None:
        self._totals["prefilled_prompts"] += 1
        self._totals["prefilled_tokens"] += len(done.job.request.prompt) - done.job.cached
        self._totals["selection_seconds"] += done.select_s

    # Called in the engine's thread.

    def _delivered(self, results: list[PrefillDone]) -> None:
        self._event_loop.call_soon_threadsafe(self._resolve, results)

    def _failed(self, error: Exception) -> None:
        lost = self.engine.fail_all()
        self._event_loop.call_soon_threadsafe(self._reject, lost, error)

    # Called in the event loop.

    def _resolve(self, results: list[PrefillDone]) -> None:
        for done in results:
            waiter = self._waiters.get(done.job.key)
            if waiter is not None and not waiter.done():
                waiter.set_result(done)

    def _reject(self, lost: list[GenerationRequest], error: Exception) -> None:
        for request in lost:
            waiter = self._waiters.get((request.request_id, request.attempt))
            if waiter is not None and not waiter.done():
                waiter.set_exception(GenerationFailed(f"prefill failed: {type(error).__name__}"))
