"""The FastAPI application over a backend."""

import asyncio
import logging
from collections.abc import Sequence

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from deployments.api.backend import Backend, Readiness, TierControl
from deployments.api.card import ModelCard
from deployments.api.catalogue import catalogue
from deployments.api.errors import ModelNotFound, api_error, http_error
from deployments.api.exchange import CHAT, COMPLETIONS, Edge, Exchange
from deployments.api.metrics import ApiMetrics
from deployments.api.middleware import BearerKey, RequestIds, error_response
from deployments.api.settings import ApiSettings
from deployments.api.tiers import add_tiers
from engine.errors import KvtideError

_log = logging.getLogger("kvtide.api")


def build_application(
    backend: Backend,
    card: ModelCard,
    settings: ApiSettings | None = None,
    *,
    tiers: TierControl | None = None,
    answer_request_ids: bool = True,
) -> FastAPI:
    """The OpenAI-compatible API for one model. No global state: every call makes its own application.

    `tiers` None: without the paths that command tiers. `answer_request_ids` False where the server itself puts
    x-request-id on responses (Ray Serve).
    """
    edge = Edge(backend, card, settings or ApiSettings(), ApiMetrics())
    application = FastAPI(
        title="kvtide", version=card.version, docs_url=None, redoc_url=None, openapi_url=None
    )
    application.state.edge = edge
    _add_generation(application, edge)
    _add_models(application, card)
    _add_recipes(application, card, edge.settings.at_rest)
    if tiers is not None:
        add_tiers(application, edge, tiers)
    _add_operations(application, edge)
    application.add_exception_handler(KvtideError, _refuse)
    application.add_exception_handler(HTTPException, _refuse_http)
    application.add_exception_handler(Exception, _refuse)
    if edge.settings.api_key is not None:
        application.add_middleware(BearerKey, key=edge.settings.api_key.get_secret_value())
    application.add_middleware(
        RequestIds, answer=answer_request_ids
    )  # added last, so outermost: refusals carry an id too
    return application


async def _refuse(request: Request, raised: Exception) -> Response:
    return error_response(api_error(raised))


async def _refuse_http(request: Request, raised: Exception) -> Response:
    assert isinstance(raised, HTTPException)
    return error_response(
        http_error(raised.status_code, f"{raised.detail}: {request.method} {request.url.path}")
    )


def _add_generation(application: FastAPI, edge: Edge) -> None:
    @application.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return Exchange(edge, CHAT, request.state.request_id)

    @application.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return Exchange(edge, COMPLETIONS, request.state.request_id)


def _add_models(application: FastAPI, card: ModelCard) -> None:
    def entry(name: str) -> dict[str, object]:
        return {
            "id": name,
            "object": "model",
            "created": card.created,
            "owned_by": "kvtide",
            "max_model_len": card.context_length,
            "max_prompt_tokens": card.max_prompt_tokens,
            "end_token_ids": list(card.end_token_ids),
            "default_recipe": card.recipes.label,
        }

    @application.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [entry(name) for name in card.names]})

    @application.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        if name not in card.names:
            raise ModelNotFound(
                f"The model {name[:128]!r} does not exist; served: {', '.join(card.names)}.", "model"
            )
        return JSONResponse(entry(name))


def _add_recipes(application: FastAPI, card: ModelCard, codecs: Sequence[str]) -> None:
    @application.get("/v1/kv/recipes")
    async def recipes() -> Response:
        return JSONResponse(catalogue(card.recipes, codecs))


def _add_operations(application: FastAPI, edge: Edge) -> None:
    @application.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @application.get("/ready")
    async def ready() -> Response:
        readiness = await _readiness(edge)
        body = {"ready": readiness.ready, "detail": readiness.detail}
        return JSONResponse(
            body, 200 if readiness.ready else 503, None if readiness.ready else {"Retry-After": "1"}
        )

    @application.get("/version")
    async def version() -> Response:
        return JSONResponse({"version": edge.card.version, "fingerprint": edge.card.fingerprint})

    @application.get("/metrics")
    async def metrics() -> Response:
        await _refresh_gauges(edge)
        return Response(edge.metrics.render(), media_type=CONTENT_TYPE_LATEST)


async def _readiness(edge: Edge) -> Readiness:
    try:
        async with asyncio.timeout(edge.settings.probe_timeout_s):
            return await edge.backend.ready()
    except TimeoutError:
        return Readiness(False, {"backend": f"no answer within {edge.settings.probe_timeout_s} s"})
    except Exception:  # noqa: BLE001 - whatever it raised, a backend that cannot answer is not ready
        _log.exception("readiness could not be asked")
        return Readiness(False, {"backend": "failed; the server's log has it"})


async def _refresh_gauges(edge: Edge) -> None:
    """Old gauges would lie, so a failed report leaves none; the edge's own series are shown either way."""
    try:
        async with asyncio.timeout(edge.settings.probe_timeout_s):
            edge.metrics.replicas.report = await edge.backend.stats()
    except Exception:  # noqa: BLE001 - the scrape must not fail with the backend
        _log.exception("gauges could not be asked")
        edge.metrics.stats_failures.inc()
        edge.metrics.replicas.report = {}
