"""A prefill and a decode service in one event loop, over a tiny random model and in-process transfers."""

from __future__ import annotations

import asyncio
import functools
import pickle
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from deployments.decode_service import DecodeService
from deployments.prefill_service import PrefillService
from deployments.reply import PrefillReply
from engine.batch import DecodeEngine
from engine.local import Completion, LocalEngine
from engine.model import Model, wrap_model
from engine.pool import PagePool
from engine.prefill import PrefillEngine
from engine.prefix import PrefixCache
from engine.request import Event, GenerationRequest, PromptEvent, SamplingParams
from engine.text import TokenPieces
from kv_tiers.books import SlotBooks
from kv_tiers.keys import BlockKey
from kv_tiers.slab import Slab
from kv_tiers.tier import ReadLease, WriteLease
from kv_tiers.transfer.endpoint import TransferEndpoint
from kv_tiers.transfer.faults import FaultRule, FaultyEndpoint
from kv_tiers.transfer.local import LocalEndpoint, LocalFabric
from policies.recipe import Recipe, make_recipe

VOCAB = 300
CONTEXT = 2048
END = 299
SNAPKV = make_recipe(policy="snapkv", budget=24, window=8, sinks=2, kernel=3)
FULL = Recipe()


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level: one token per byte, ids 0 to 255."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={sign: index for index, sign in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@functools.cache
def pieces() -> TokenPieces:
    return TokenPieces(tokenizer())


def network() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=CONTEXT, initializer_range=0.3,
        bos_token_id=298, eos_token_id=END,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return LlamaForCausalLM(config).to(torch.float32)


@functools.cache
def model() -> Model:
    return wrap_model(network(), frozenset({END}))


def prompt_of(tokens: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, 256, (tokens,), generator=generator).tolist())


def ask(
    name: str = "r",
    tokens: int = 60,
    *,
    seed: int = 0,
    recipe: Recipe = SNAPKV,
    deadline_s: float = 60.0,
    **sampling: Any,
) -> GenerationRequest:
    """A greedy request that runs to `max_tokens` unless told otherwise."""
    given = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **sampling}
    return GenerationRequest(
        name, prompt_of(tokens, seed), SamplingParams(**given), recipe, deadline_s=deadline_s
    )


@functools.cache
def expected(request: GenerationRequest) -> Completion:
    """What the engine alone makes of a request."""
    pool = PagePool(model().spec, 4000, 16, CONTEXT)
    engine = LocalEngine(model(), pieces(), pool, chunk_tokens=64)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the services' engines; more would only get in each other's way
    try:
        return engine.generate([request])[request.request_id]
    finally:
        torch.set_num_threads(threads)


class Direct:
    """`PrefillClient` that calls the service in this process; `before` and `after` run around each call."""

    def __init__(self) -> None:
        self.service: PrefillService | None = None
        self.asked: list[GenerationRequest] = []
        self.replies: list[PrefillReply] = []
        self.before: Callable[[GenerationRequest], Awaitable[None]] | None = None
        self.after: Callable[[GenerationRequest, PrefillReply], Awaitable[None]] | None = None

    async def prefill(self, request: GenerationRequest, *, stage: bool) -> PrefillReply:
        assert self.service is not None
        self.asked.append(request)
        if self.before is not None:
            await self.before(request)
        reply = pickle.loads(pickle.dumps(await self.service.prefill(request, stage=stage)))
        self.replies.append(reply)
        if self.after is not None:
            await self.after(request, reply)
        return reply


class LockedTier:
    """A CPU tier for several threads, as the node agent's event loop makes it; faults by overriding."""

    def __init__(self, inner: SlotBooks) -> None:
        self.inner = inner
        self._lock = threading.Lock()

    def prepare_read(self, keys: Sequence[BlockKey], owner: str, *, worth_s: float = 0.0) -> ReadLease:
        with self._lock:
            return self.inner.prepare_read(keys, owner, worth_s=worth_s)

    def complete_read(self, lease_id: int) -> None:
        with self._lock:
            self.inner.complete_read(lease_id)

    def prepare_write(self, keys: Sequence[BlockKey], owner: str, *, tenant: str | None = None) -> WriteLease:
        with self._lock:
            return self.inner.prepare_write(keys, owner, tenant=tenant)

    def complete_write(self, lease_id: int, written: Sequence[BlockKey]) -> tuple[BlockKey, ...]:
        with self._lock:
            return self.inner.complete_write(lease_id, written)

    def drop(self, keys: Sequence[BlockKey]) -> int:
        with self._lock:
            return self.inner.drop(keys)


def prefix_cache(folder: Path, tier: type[LockedTier] = LockedTier, slots: int = 400) -> PrefixCache:
    spec = model().spec
    slab = Slab.create(folder / "blocks.kvslab", slots * spec.blocks.nbytes)
    return PrefixCache(spec, tier(SlotBooks(slots, spec.blocks.nbytes)), slab, "prefill")


class Stand:
    """Both services, and what must be true of them at rest."""

    def __init__(self, prefill: PrefillService, decode: DecodeService, client: Direct) -> None:
        self.prefill = prefill
        self.decode = decode
        self.client = client

    async def run(self, request: GenerationRequest) -> Completion:
        """Everything a request yields; checks order and indices."""
        done: Completion | None = None
        async for batch in self.decode.generate(request):
            assert batch, "an empty batch"
            done = self._take(done, batch, request)
        assert done is not None
        assert all(len(tokens) for tokens in done.tokens)
        return done

    @staticmethod
    def _take(done: Completion | None, batch: list[Event], request: GenerationRequest) -> Completion:
        for event in batch:
            if isinstance(event, PromptEvent):
                assert done is None, "two prompt events"
                done = Completion(event, request.sampling.n)
            else:
                assert done is not None, "a token before the prompt event"
                done.take(event)
        assert done is not None
        return done

    def held(self) -> dict[str, float]:
        """Everything that must be zero when nothing runs."""
        prefill, decode = self.prefill, self.decode
        stats, other = prefill.stats(), decode.stats()
        return {
            "queue": stats["queue"],
            "workspace_bytes": stats["workspace_bytes"],
            "prefill_tokens_owed": stats["prefill_tokens_owed"],
            "tickets_open": stats["tickets_open"],
            "staged_bytes": stats["staged_bytes"],
            "spills_running": stats["spills_running"],
            "prefill_queued": prefill.engine.queued,
            "staging_used": prefill.endpoint.used_bytes,
            "decode_queue": other["queue"],
            "running": other["running"],
            "active_requests": other["active_requests"],
            "pages_used": other["pages_used"],
            "pages_owed": other["pages_owed"],
            "landing_bytes": other["landing_bytes"],
            "pulls_running": other["pulls_running"],
            "kept_tokens": other["kept_tokens"],
            "snapshot_bytes_waiting": other["snapshot_bytes_waiting"],
            "decode_busy": float(not decode.engine.idle),
            "quarantined": decode.endpoint.quarantined_bytes,
        }

    async def at_rest(self, within_s: float = 1.0) -> None:
        """Everything comes back within a second."""
        limit = asyncio.get_running_loop().time() + within_s
        while asyncio.get_running_loop().time() < limit and any(self.held().values()):
            await asyncio.sleep(0.005)
        left = {name: value for name, value in self.held().items() if value}
        assert not left, left
        self.prefill.endpoint.check()
        self.decode.endpoint.check()
        self.decode.engine.check()

    async def until(self, what: Callable[[], bool], within_s: float = 5.0) -> None:
        async with asyncio.timeout(within_s):
            while not what():
                await asyncio.sleep(0.002)


@asynccontextmanager
async def stand(
    *,
    prefix: PrefixCache | None = None,
    pages: int = 400,
    rows: int = 8,
    staging: int = 8 << 20,
    landing: int = 8 << 20,
    prefill_faults: Sequence[FaultRule] = (),
    decode_faults: Sequence[FaultRule] = (),
    max_queued: int = 200,
    max_requests: int = 200,
    workspace_bytes: int = 64 << 20,
    ticket_ttl_s: float = 30.0,
    attempts: int = 3,
    chunk_tokens: int = 64,
    waiting_bytes: int = 8 << 20,
    by_reply: bool = False,
) -> AsyncIterator[Stand]:
    """Services that must be at rest again when the body is over; closing them must leave no task behind."""
    before = asyncio.all_tasks()
    fabric = LocalFabric()
    # By reply, the two are as out of each other's reach as two processes.
    source: TransferEndpoint = LocalEndpoint("prefill", staging, fabric=LocalFabric() if by_reply else fabric)
    target: TransferEndpoint = LocalEndpoint("decode", landing, fabric=fabric)
    source = FaultyEndpoint(source, prefill_faults) if prefill_faults else source
    target = FaultyEndpoint(target, decode_faults) if decode_faults else target
    client = Direct()
    prefill = PrefillService(
        PrefillEngine(model(), chunk_tokens=chunk_tokens), source, prefix, threads=1, max_queued=max_queued,
        workspace_bytes=workspace_bytes, ticket_ttl_s=ticket_ttl_s, by_reply=by_reply,
    )  # fmt: skip
    client.service = prefill
    decode = DecodeService(
        DecodeEngine(model(), PagePool(model().spec, pages, rows, CONTEXT)), pieces(), target, client, threads=1,
        max_requests=max_requests, attempts=attempts, waiting_bytes=waiting_bytes,
    )  # fmt: skip
    made = Stand(prefill, decode, client)
    try:
        yield made
        await made.at_rest()
        made.prefill.health()
        made.decode.health()
    finally:
        await decode.close()
        await made.prefill.close()
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == before, "a task was left behind"


def slow_steps(engine: Any, pause: threading.Event, step_s: float = 0.0) -> None:
    """Make every forward pass of an engine wait for `pause` to be set (and then `step_s` more)."""
    step = engine.step

    def slow() -> Any:
        pause.wait(10)
        if step_s:
            threading.Event().wait(step_s)
        return step()

    engine.step = slow


async def hold(s: Stand, how: str) -> Callable[[], None]:
    """Make requests stay at the place; → lets go again."""
    gate = threading.Event()
    if how == "prefill":
        slow_steps(s.prefill.engine, gate)
        s.prefill._loop._step = s.prefill.engine.step
        return gate.set
    if how == "landing":
        lease = s.decode.endpoint.reserve(s.decode.endpoint.capacity - 4096)
        assert lease is not None
        return lease.release
    if how == "pages":
        engine = s.decode.engine
        admit, engine._admit = engine._admit, lambda: None
        return lambda: setattr(engine, "_admit", admit)
    gate.set()
    return gate.set
