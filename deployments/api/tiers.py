"""Commands over the tiers of full KV blocks: pin, prefetch, evict, flush, and what is where."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from typing import NamedTuple, TypeVar

from fastapi import FastAPI
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from deployments.api.backend import (
    TIERS,
    BlockIdentity,
    Silence,
    TierControl,
    TierPlace,
    TierReport,
    Whereabouts,
)
from deployments.api.body import check_model, drop_neutral_in_messages, parse_object, read_body
from deployments.api.card import ModelCard
from deployments.api.errors import ClientDisconnected, ModelNotFound, Outcome, api_error
from deployments.api.exchange import Edge
from deployments.api.prompts import chat_prompt, check_token_ids, completion_prompt
from deployments.api.schemas import ChatRequest, Fields
from deployments.api.tier_schemas import EvictRequest, FlushRequest, PinRequest, PrefetchRequest, PromptBlocks
from engine.errors import ContextOverflow, InvalidRequest
from kv_tiers.at_rest import AtRest
from kv_tiers.keys import BlockKey, block_keys

Json = dict[str, object]
Body = TypeVar("Body", bound=Fields)

MAX_FOUND = 1000
"""Most blocks that one look by prefix answers with."""

_PREFIX = re.compile(r"[0-9a-f]{4,64}")
_WAYS = ("prompt", "messages", "tokens")


def add_tiers(application: FastAPI, edge: Edge, tiers: TierControl) -> None:
    """The paths under /v1/kv that command tiers. All are for every user who has the API key."""
    commands = _Commands(edge, tiers)
    posts = (commands.pin, commands.unpin, commands.prefetch, commands.evict, commands.flush)
    for command in posts:
        application.post(f"/v1/kv/{command.__name__}")(_counted(edge, command.__name__, command))

    @application.get("/v1/kv/stats")
    async def stats() -> Response:
        return JSONResponse(_report_body(await tiers.report()))

    @application.get("/v1/kv/blocks/{prefix}")
    async def blocks(prefix: str) -> Response:
        return JSONResponse(await commands.find(prefix))


def _counted(
    edge: Edge, name: str, command: Callable[[Request], Awaitable[Json]]
) -> Callable[[Request], Awaitable[Response]]:
    """`command` as an endpoint, with its outcome in `kvtide_requests_total`."""

    async def endpoint(request: Request) -> Response:
        outcome = Outcome.OK
        try:
            return JSONResponse(await command(request))
        except Exception as raised:
            outcome = api_error(raised).outcome
            raise
        finally:
            edge.metrics.requests.labels(f"kv/{name}", outcome.value).inc()

    return endpoint


class _Commands:
    def __init__(self, edge: Edge, tiers: TierControl) -> None:
        self._edge = edge
        self._tiers = tiers

    async def pin(self, request: Request) -> Json:
        asked = await self._read(request, PinRequest)
        prompt = await self._prompt(asked)
        done = await self._tiers.pin(prompt.keys, asked.ttl_s)
        if done.refused and not any(any(counts.values()) for counts in done.nodes.values()):
            field = next(way for way in _WAYS if getattr(asked, way) is not None)
            reasons = "; ".join(sorted(set(done.refused.values())))
            raise InvalidRequest(
                f"{field}: its {len(prompt.keys)} blocks are not pinned anywhere. {reasons}.", field
            )
        refused = [{"source": node, "reason": reason} for node, reason in sorted(done.refused.items())]
        return {"pinned": done.nodes, "refused": refused, **await self._places(prompt, done.silent)}

    async def unpin(self, request: Request) -> Json:
        prompt = await self._prompt(await self._read(request, PromptBlocks))
        counts = await self._tiers.unpin(prompt.keys)
        return {"unpinned": counts.nodes, **await self._places(prompt, counts.silent)}

    async def prefetch(self, request: Request) -> Json:
        asked = await self._read(request, PrefetchRequest)
        prompt = await self._prompt(asked)
        done = await self._tiers.prefetch(prompt.keys, asked.node)
        there: Json = {"node": done.node, "blocks_loaded": done.blocks}
        return {**there, **await self._places(prompt, done.silent)}

    async def evict(self, request: Request) -> Json:
        asked = await self._read(request, EvictRequest)
        prompt = await self._prompt(asked)
        counts = await self._tiers.evict(prompt.keys, _named(asked.tiers))
        return {"evicted": counts.nodes, **await self._places(prompt, counts.silent)}

    async def flush(self, request: Request) -> Json:
        asked = await self._read(request, FlushRequest)
        flushed = await self._tiers.flush(_named(asked.tiers))
        return {
            "complete": not flushed.not_cleared,
            "cleared": flushed.nodes,
            "not_cleared": [each._asdict() for each in flushed.not_cleared],
        }

    async def find(self, prefix: str) -> Json:
        digits = prefix.lower()
        if not _PREFIX.fullmatch(digits):
            raise InvalidRequest(
                f"prefix: {prefix[:64]!a} is no beginning of a key; valid: 4 to 64 hexadecimal digits.",
                "prefix",
            )
        found = await self._tiers.find(digits, MAX_FOUND)
        return {
            "blocks": [{"key": each.key, "places": _places_body(each.places)} for each in found.blocks],
            "more": found.cut,
            "unanswered": _silence_body(found.silent),
        }

    async def _read(self, request: Request, model: type[Body]) -> Body:
        declared, limit = request.headers.get("content-length"), self._edge.settings.max_body_bytes
        try:
            raw = await read_body(request.stream(), declared, limit)
        except ClientDisconnect:
            raise ClientDisconnected from None
        fields = drop_neutral_in_messages(parse_object(raw)) if raw else {}
        return check_model(model, fields, frozenset())

    async def _prompt(self, asked: PromptBlocks) -> _Prompt:
        """In a thread: tokenizer, chat template and hashing block."""
        tokens = await asyncio.to_thread(prompt_tokens, self._edge.card, asked)
        identity = await self._tiers.identity()
        keys = await asyncio.to_thread(
            block_keys, identity.fingerprint, tokens, identity.block_tokens, tenant=asked.cache_salt
        )
        return _Prompt(len(tokens), identity, keys)

    async def _places(self, prompt: _Prompt, silent: Sequence[Silence]) -> Json:
        """Where the prompt's blocks are after a command."""
        there = await self._tiers.where(prompt.keys) if prompt.keys else Whereabouts((), ())
        return {
            "prompt_tokens": prompt.tokens,
            "block_tokens": prompt.identity.block_tokens,
            "block_bytes": prompt.identity.block_bytes,
            "blocks": [
                {"key": key.digest.hex(), "places": _places_body(places)}
                for key, places in zip(there.keys, there.places, strict=True)
            ],
            "unanswered": _silence_body((*silent, *there.silent)),
        }


class _Prompt(NamedTuple):
    """A prompt's number of tokens, and the keys of its full blocks."""

    tokens: int
    identity: BlockIdentity
    keys: Sequence[BlockKey]


def prompt_tokens(card: ModelCard, asked: PromptBlocks) -> tuple[int, ...]:
    """Token ids, exactly those of a generating request for the same. Blocks. Raises `InvalidRequest` and its kinds."""
    if asked.model is not None and asked.model not in card.names:
        raise ModelNotFound(
            f"The model {asked.model[:128]!r} does not exist; served: {', '.join(card.names)}.", "model"
        )
    given = [name for name in _WAYS if getattr(asked, name) is not None]
    if len(given) != 1:
        problem = f"{' and '.join(given)} are given" if given else "no prompt is given"
        raise InvalidRequest(f"{problem}; valid: exactly one of {', '.join(_WAYS)}.", (given or _WAYS)[0])
    (field,) = given
    for name in ("add_generation_prompt", "continue_final_message"):
        if getattr(asked, name) is not None and field != "messages":
            raise InvalidRequest(f"{name} is only allowed with messages.", name)
    tokens = _tokens(card, asked, field)
    if len(tokens) > card.max_prompt_tokens:
        raise ContextOverflow(
            f"The prompt has {len(tokens)} tokens; at most {card.max_prompt_tokens} are accepted.", field
        )
    return tokens


def _tokens(card: ModelCard, asked: PromptBlocks, field: str) -> tuple[int, ...]:
    if asked.messages is not None:
        chat = ChatRequest(
            model=card.names[0],
            messages=asked.messages,
            add_generation_prompt=asked.add_generation_prompt,
            continue_final_message=asked.continue_final_message,
        )
        return chat_prompt(card, chat).tokens
    given = asked.prompt if asked.tokens is None else asked.tokens
    if not given:
        raise InvalidRequest(f"{field} is empty; it needs at least one token.", field)
    if isinstance(given, list):
        check_token_ids(card, given, field)
    return completion_prompt(card, given, field).tokens


def _named(tiers: Sequence[str] | None) -> tuple[str, ...]:
    return TIERS if tiers is None else tuple(tier for tier in TIERS if tier in tiers)


def _places_body(places: Sequence[TierPlace]) -> list[Json]:
    return [place._asdict() for place in places]


def _silence_body(silent: Sequence[Silence]) -> list[Json]:
    return [each._asdict() for each in dict.fromkeys(silent)]


def _report_body(report: TierReport) -> Json:
    directory = None
    if report.directory is not None:
        directory = {**asdict(report.directory), "shards": report.directory_shards}
        del directory["reports"]  # of all parts: they are in /metrics
    return {
        "nodes": [
            {"node": node, "tiers": [_tier_body(tier, tiers[tier]) for tier in TIERS if tier in tiers]}
            for node, tiers in sorted(report.nodes.items())
        ],
        "directory": directory,
        "unanswered": _silence_body(report.silent),
    }


def _tier_body(tier: str, figures: Mapping[str, float]) -> Json:
    """Figures as the node names them, whole numbers as such, and the codec by its name."""
    body: Json = {name: int(value) if value == int(value) else value for name, value in figures.items()}
    if "codec" in figures:
        body["codec"] = AtRest(int(figures["codec"])).label
    return {"tier": tier, **body}
