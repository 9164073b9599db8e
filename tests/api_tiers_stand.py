"""Two nodes with tiers behind the HTTP edge: what the tests of commands and of what they show share."""

from __future__ import annotations

from api_stub import StubBackend, application, client, post
from fastapi import FastAPI
from httpx import Response
from tier_stub import IDENTITY, StubAgent, StubNodes

from kv_tiers.keys import BlockKey, block_keys

TOKENS = list(range(4, 26))  # five full blocks of four, and two tokens more
KEYS = block_keys(IDENTITY.fingerprint, TOKENS, IDENTITY.block_tokens)
OTHER = block_keys(IDENTITY.fingerprint, [*range(100, 140)], IDENTITY.block_tokens)
ASK = {"tokens": TOKENS}


def nodes(**changes: StubAgent) -> StubNodes:
    """Node a has three blocks of the prompt in its slab and all on NVMe, b two; Redis has the last one."""
    return StubNodes(
        **{
            "a": StubAgent(cpu=KEYS[:3], nvme=[*KEYS, *OTHER], redis=KEYS[4:]),
            "b": StubAgent(cpu=KEYS[:2], nvme=[], redis=KEYS[4:]),
            **changes,
        }
    )


def app_of(stand: StubNodes, **settings: object) -> FastAPI:
    return application(StubBackend(), tiers=stand.control, **settings)


async def command(stand: StubNodes, name: str, body: object = ASK) -> dict:
    answer = await post(app_of(stand), f"/v1/kv/{name}", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def get(app: FastAPI, path: str) -> Response:
    async with client(app) as http:
        return await http.get(path)


def keys_of(body: dict) -> list[str]:
    return [block["key"] for block in body["blocks"]]


def hexes(keys: list[BlockKey]) -> list[str]:
    return [key.digest.hex() for key in keys]
