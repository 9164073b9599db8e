"""The three Serve deployments: thin shells around the plain services."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace

import torch
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

from deployments.agent_tier import AgentTier
from deployments.api.application import build_application
from deployments.api.backend import BlockIdentity, Readiness
from deployments.config import GIB, AppArgs, resolve
from deployments.decode_service import DecodeService
from deployments.directory import DirectoryClient
from deployments.logs import configure_logs
from deployments.node import node_agent
from deployments.node_options import NodeOptions
from deployments.prefill_service import PrefillService
from deployments.reply import PrefillReply
from deployments.served_model import model_card, tokenizer_of
from deployments.shipping import choose_transport, open_endpoint, staging_bytes
from deployments.telemetry import report_for_ever, require_running
from deployments.tier_control import FanOut, RemoteAgent
from deployments.tier_options import without_effect
from engine.batch import DecodeEngine
from engine.environment import refuse_foreign_kernels
from engine.errors import ModelUnavailable, Overloaded, ReplicaLost
from engine.model import Model, load_model
from engine.pool import PagePool, pool_page_bytes
from engine.prefill import PrefillEngine
from engine.prefix import PrefixCache
from engine.request import Event, GenerationRequest
from engine.text import TokenPieces
from engine.weights import ensure_weights

_log = logging.getLogger("kvtide.replica")
_IDENTITY_S = 10.0


def _open_model(args: AppArgs) -> tuple[Model, int]:
    """Load the model with this replica's share of threads; → model and thread count."""
    configure_logs(args.log_level)
    refuse_foreign_kernels()
    args.load_scorers()
    threads = resolve(args).threads_per_replica
    torch.set_num_threads(threads)
    model = load_model(ensure_weights(args.model), args.dtype, args.block_tokens)
    model.spec = replace(model.spec, context_length=args.context_length(model.spec.context_length))
    return model, threads


def _replica() -> tuple[str, str]:
    """(application, this replica's unique name)."""
    context = serve.get_replica_context()
    return context.app_name, f"{context.deployment}:{context.replica_id.unique_id}"


class Prefill:
    """Prefill pool: prompts in, tickets out."""

    async def __init__(self, args: AppArgs) -> None:  # type: ignore[misc]  # Serve awaits it
        model, threads = await asyncio.to_thread(_open_model, args)
        application, name = _replica()
        transport = choose_transport(args.transport)
        endpoint = open_endpoint(
            name, staging_bytes(model.spec, model.spec.context_length, args.staging_gib), transport
        )
        self._service = PrefillService(
            PrefillEngine(model, chunk_tokens=args.chunk_tokens),
            endpoint,
            await self._prefix(args, model, application, name),
            threads=threads,
            max_queued=args.max_queued,
            workspace_bytes=int(args.workspace_gib * GIB),
            ticket_ttl_s=args.ticket_ttl_s,
            by_reply=transport == "local",
        )
        self._telling = asyncio.create_task(report_for_ever(application, name, self._service.stats))

    async def prefill(self, request: GenerationRequest, *, stage: bool) -> PrefillReply:
        return await self._service.prefill(request, stage=stage)

    async def check_health(self) -> None:
        self._service.health()
        require_running(self._telling)

    async def __del__(self) -> None:
        self._telling.cancel()
        await self._service.close()

    async def _prefix(self, args: AppArgs, model: Model, application: str, name: str) -> PrefixCache | None:
        options = NodeOptions.of(application, args, model.spec.blocks)
        if options is None:
            return None
        tier = await asyncio.to_thread(AgentTier, lambda: node_agent(options), name)
        return PrefixCache(model.spec, tier, tier, name)


class PrefillPool:
    """`PrefillClient` over the deployment handle."""

    def __init__(self, handle: DeploymentHandle) -> None:
        # As actor calls: Serve's gRPC between replicas drops answers beyond 4 MB, which snapshots and logprobs exceed.
        self._handle = handle.options(_by_reference=True)

    async def prefill(self, request: GenerationRequest, *, stage: bool) -> PrefillReply:
        response = self._handle.prefill.remote(request, stage=stage)
        try:
            return await response
        except asyncio.CancelledError:
            response.cancel()
            raise
        except BackPressureError as error:
            raise Overloaded("the prefill pool's queue is full") from error
        except (RayActorError, DeploymentUnavailableError) as error:
            raise ReplicaLost(f"the prefill replica died: {type(error).__name__}") from error


class Decode:
    """Decode pool: asks prefill, pulls survivors, streams tokens."""

    async def __init__(self, args: AppArgs, prefill: DeploymentHandle) -> None:  # type: ignore[misc]  # Serve awaits
        model, threads = await asyncio.to_thread(_open_model, args)
        application, name = _replica()
        spec = model.spec
        pages = max(1, int(args.pool_gib * GIB) // pool_page_bytes(spec))
        engine = DecodeEngine(model, PagePool(spec, pages, args.max_sequences, spec.context_length))
        tokenizer = await asyncio.to_thread(tokenizer_of, args)
        self._service = DecodeService(
            engine,
            TokenPieces(tokenizer),
            open_endpoint(
                name,
                staging_bytes(spec, spec.context_length, args.staging_gib),
                choose_transport(args.transport),
            ),
            PrefillPool(prefill),
            threads=threads,
            max_requests=args.max_sequences + args.max_queued,
            attempts=args.attempts,
            waiting_bytes=int(args.waiting_gib * GIB),
        )
        self._identity = BlockIdentity(spec.fingerprint, spec.blocks.block_tokens, spec.blocks.nbytes)
        self._telling = asyncio.create_task(report_for_ever(application, name, self._service.stats))

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[list[Event], None]:
        stream = self._service.generate(request)
        try:
            async for batch in stream:
                yield batch
        finally:
            await stream.aclose()

    async def identity(self) -> BlockIdentity:
        """For the gateway, which has no weights: prefill replicas load the same model and so make the same keys."""
        return self._identity

    async def check_health(self) -> None:
        self._service.health()
        require_running(self._telling)

    async def __del__(self) -> None:
        self._telling.cancel()
        await self._service.close()


class DecodePool:
    """`Backend` over the decode deployment's handle."""

    def __init__(self, handle: DeploymentHandle, attempts: int, directory: DirectoryClient) -> None:
        self._plain = handle
        self._handle = handle.options(stream=True)
        self._attempts = attempts
        self._directory = directory

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[list[Event], None]:
        """Events of the decode replica; one that is lost before its first event is replaced unseen."""
        for attempt in range(self._attempts):
            # Attempt numbers of the decode side's own retries lie between two of ours.
            stream = self._handle.generate.remote(replace(request, attempt=attempt * 1000))
            started = False
            try:
                async for batch in stream:
                    started = True
                    yield batch
                return
            except BackPressureError as error:
                raise Overloaded("the decode pool's queue is full") from error
            except (RayActorError, DeploymentUnavailableError, ReplicaLost) as error:
                if started or attempt + 1 == self._attempts:
                    raise ReplicaLost(f"the decode replica died: {type(error).__name__}") from error
                _log.warning("decode of %s was lost before its first token", request.request_id)
                await asyncio.sleep(0.5)
            finally:
                stream.cancel()

    async def ready(self) -> Readiness:
        """Ready when a replica of each pool has reported within its lease."""
        reports = (await self._directory.stats()).reports
        counts = {
            pool: sum(name.startswith(f"{pool}:") for name in reports) for pool in ("Prefill", "Decode")
        }
        detail = {pool.lower(): f"{count} alive" for pool, count in counts.items()}
        return Readiness(all(counts.values()), detail)

    async def stats(self) -> Mapping[str, Mapping[str, float]]:
        stats = await self._directory.stats()
        if not stats.epoch:
            raise ModelUnavailable("the directory does not answer")
        directory = {
            "directory_nodes": float(stats.nodes),
            "directory_blocks": float(stats.keys),
            **{f"directory_{tier}_entries": float(entries) for tier, entries in stats.tiers.items()},
        }
        return {**stats.reports, "directory": directory}

    async def identity(self) -> BlockIdentity:
        """Of the model that a decode replica has loaded. Raises `ModelUnavailable` or `Overloaded`."""
        try:
            async with asyncio.timeout(_IDENTITY_S):
                identity: BlockIdentity = await self._plain.identity.remote()
                return identity
        except BackPressureError as error:
            raise Overloaded("the decode pool's queue is full") from error
        except (RayActorError, DeploymentUnavailableError, TimeoutError) as error:
            raise ModelUnavailable(
                f"no decode replica says what it serves: {type(error).__name__}"
            ) from error


@serve.ingress()
class Gateway:
    """HTTP ingress: the OpenAI API over the decode pool."""

    def __init__(self, args: AppArgs, decode: DeploymentHandle) -> None:
        configure_logs(args.log_level)
        application, _ = _replica()
        self._args = args
        directory = DirectoryClient(application, args.directory_shards)
        self._backend = DecodePool(decode, args.attempts, directory)
        self._tiers = FanOut(
            directory,
            RemoteAgent.find,
            self._backend.identity,
            configured=[plan.tier for plan in resolve(args).tiers],
            shards=args.directory_shards,
        )

    def __serve_build_asgi_app__(self) -> FastAPI:
        card = model_card(self._args)
        for warning in card.recipes.warnings:
            _log.warning("default recipe: %s", warning)
        for warning in without_effect(self._args):
            _log.warning("%s", warning)
        settings = self._args.api_settings()
        return build_application(self._backend, card, settings, tiers=self._tiers, answer_request_ids=False)
