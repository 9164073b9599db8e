"""Commands over tiers at the HTTP edge: pin, prefetch, evict, flush, and what is where."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from api_stub import MODEL, StubBackend, application, make_card, make_tokenizer, post
from api_tiers_stand import ASK, KEYS, OTHER, TOKENS, app_of, command, get, hexes, keys_of, nodes
from ray.exceptions import RayActorError
from service_stand import network, prompt_of, tokenizer
from tier_stub import IDENTITY, StubAgent, StubNodes

from deployments.api.backend import BlockIdentity
from engine.errors import ModelUnavailable, Overloaded
from engine.model import load_model
from engine.prefix import PrefixCache
from kv_tiers.keys import block_keys


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("completions", {"prompt": "hello world, again and again"}),
        (
            "chat/completions",
            {"messages": [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]},
        ),
        (
            "chat/completions",
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                    {"role": "assistant", "content": "yes", "refusal": None},
                ],
                "add_generation_prompt": False,
                "continue_final_message": True,
            },
        ),
        ("completions", {"prompt": TOKENS}),
    ],
    ids=["text", "chat", "chat that goes on", "tokens"],
)
@pytest.mark.parametrize("salt", [{}, {"cache_salt": "tenant"}], ids=["", "salted"])
async def test_a_prompts_blocks_are_those_of_a_request_for_it(path: str, prompt: dict, salt: dict) -> None:
    backend, stand = StubBackend(), nodes()
    card = make_card(tokenizer=make_tokenizer(begin=True), context_length=200, max_prompt_tokens=190)
    app = application(backend, card, stand.control)
    assert (await post(app, f"/v1/{path}", {"model": MODEL, **prompt, **salt})).status_code == 200
    (request,) = backend.requests
    expected = block_keys(IDENTITY.fingerprint, request.prompt, IDENTITY.block_tokens, tenant=request.tenant)
    asked = {"tokens": prompt["prompt"]} if prompt.get("prompt") == TOKENS else prompt
    body = (await post(app, "/v1/kv/pin", {**asked, **salt})).json()
    assert keys_of(body) == hexes(expected) and len(expected) >= 5
    assert body["prompt_tokens"] == len(request.prompt) and body["block_tokens"] == 4


def test_replicas_that_load_the_same_folder_make_the_same_keys(tmp_path: Path) -> None:
    network().save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    prefill, decode = (load_model(tmp_path, "auto", 16).spec for _ in range(2))
    prompt = prompt_of(100)
    of_prefill = PrefixCache(prefill, None, None, "r").keys(prompt, "tenant")  # type: ignore[arg-type]
    told = BlockIdentity(decode.fingerprint, decode.blocks.block_tokens, decode.blocks.nbytes)
    assert block_keys(told.fingerprint, prompt, told.block_tokens, tenant="tenant") == of_prefill


async def test_pin_holds_blocks_in_every_tier_and_unpin_lets_go() -> None:
    stand = nodes()
    body = await command(stand, "pin", {**ASK, "ttl_s": 60})
    assert body["pinned"] == {
        "a": {"cpu": 3, "nvme": 5, "redis": 1},
        "b": {"cpu": 2, "nvme": 0, "redis": 1},
    }
    assert stand.agents["b"].pins == [(tuple(KEYS), 60.0)]
    assert body["blocks"][1]["places"] == [
        {"node": "a", "tier": "cpu"},
        {"node": "b", "tier": "cpu"},
        {"node": "a", "tier": "nvme"},
    ]
    assert body["blocks"][4]["places"][-1] == {"node": None, "tier": "redis"}
    assert body["unanswered"] == [] and body["block_bytes"] == 1000
    body = await command(stand, "unpin")
    assert body["unpinned"]["a"] == {"cpu": 3, "nvme": 5, "redis": 1}
    assert not stand.agents["a"].pins and not stand.agents["b"].pins
    assert (await command(stand, "unpin"))["unpinned"]["a"] == {"cpu": 0, "nvme": 0, "redis": 0}


async def test_prefetch_goes_to_the_node_that_has_most_or_to_the_one_that_is_named() -> None:
    stand = nodes()
    body = await command(stand, "prefetch")
    assert (body["node"], body["blocks_loaded"]) == ("a", 5)
    assert all({"node": "a", "tier": "cpu"} in block["places"] for block in body["blocks"])
    assert "prefetch" not in stand.agents["b"].calls
    body = await command(stand, "prefetch", {**ASK, "node": "b"})
    assert (body["node"], body["blocks_loaded"]) == ("b", 2)
    refused = await post(app_of(stand), "/v1/kv/prefetch", {**ASK, "node": "c"})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "node") and "a, b" in error["message"]
    assert (await command(StubNodes(), "prefetch"))["node"] is None


async def test_evict_takes_blocks_out_of_the_named_tiers_and_says_where_they_still_are() -> None:
    stand = nodes()
    body = await command(stand, "evict", {**ASK, "tiers": ["cpu", "redis"]})
    assert body["evicted"] == {"a": {"cpu": 3, "redis": 1}, "b": {"cpu": 2, "redis": 1}}
    assert all(block["places"] == [{"node": "a", "tier": "nvme"}] for block in body["blocks"])
    body = await command(stand, "evict")
    assert body["evicted"]["a"] == {"cpu": 0, "nvme": 5, "redis": 0}
    assert not any(block["places"] for block in body["blocks"])
    assert stand.agents["a"].tiers["nvme"] == set(OTHER), "other prompts stay"


async def test_after_a_flush_every_tier_misses_and_the_directory_is_empty() -> None:
    """CASES O-43."""
    stand = nodes()
    app = app_of(stand)
    body = (await post(app, "/v1/kv/flush", {})).json()
    assert body == {
        "complete": True,
        "cleared": {"a": {"cpu": 3, "nvme": 15, "redis": 1}, "b": {"cpu": 2, "nvme": 0, "redis": 1}},
        "not_cleared": [],
    }
    stats = (await get(app, "/v1/kv/stats")).json()
    assert stats["directory"]["entries"] == 0 and not any(stats["directory"]["tiers"].values())
    places = (await command(stand, "pin"))["blocks"]
    assert places and not any(block["places"] for block in places)
    assert (await get(app, f"/v1/kv/blocks/{KEYS[0].digest.hex()}")).json()["blocks"] == []


@pytest.mark.parametrize(("name", "body"), [("flush", {}), ("evict", ASK)])
async def test_no_node_loads_while_others_have_yet_to_obey(name: str, body: dict[str, object]) -> None:
    stand = nodes()
    free = asyncio.Event()
    agents = list(stand.agents.values())

    def late(agent: StubAgent, call: Callable[..., Awaitable[object]]) -> Callable[..., Awaitable[object]]:
        async def answer(*args: object) -> object:
            assert all(len(each.holds) == 1 for each in agents), "every node waits before one obeys"
            await free.wait()
            return await call(*args)

        return answer

    slow = agents[-1]
    setattr(slow, name, late(slow, getattr(slow, name)))
    asked = asyncio.create_task(command(stand, name, body))
    await asyncio.sleep(0.05)
    assert all(len(each.holds) == 1 for each in agents) and name in agents[0].calls
    free.set()
    await asked
    assert not any(each.holds for each in agents)


async def test_a_command_that_is_given_up_holds_no_node() -> None:
    stand = nodes()
    first, *_, last = stand.agents.values()

    async def never(*args: object) -> None:
        await asyncio.Event().wait()

    last.hold = never  # type: ignore[method-assign]
    last.release = lambda name: asyncio.sleep(0)  # type: ignore[method-assign,assignment]
    asked = asyncio.create_task(stand.control.flush())
    async with asyncio.timeout(10):
        while not first.holds:
            await asyncio.sleep(0.01)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    assert asked.cancelled() and not first.holds and "flush" not in first.calls


async def test_a_flush_of_one_tier_leaves_the_others() -> None:
    stand = nodes()
    body = await command(stand, "flush", {"tiers": ["nvme"]})
    assert body["complete"] and body["cleared"] == {"a": {"nvme": 15}, "b": {"nvme": 0}}
    assert stand.agents["a"].tiers["cpu"] == set(KEYS[:3])


async def test_a_flush_names_what_it_did_not_clear() -> None:
    """CASES O-43."""
    stand = nodes(c=StubAgent(cpu=KEYS))
    stand.agents["a"].stuck.add("redis")
    stand.agents["b"].hangs = True
    stand.control = stand.made(call_s=1.0)
    stand.agents["c"].trouble = RayActorError()
    body = await command(stand, "flush", {})
    assert not body["complete"]
    left = {(each["source"], each["tier"]): each["reason"] for each in body["not_cleared"]}
    assert left.keys() == {
        ("a", "redis"), ("b", None), ("c", None), ("directory", "cpu"), ("directory", "redis")
    }  # fmt: skip
    assert "1 blocks" in left["a", "redis"] and "1 s" in left["b", None]
    assert "names 7 blocks" in left["directory", "cpu"], "those of b and c"
    assert body["cleared"] == {"a": {"cpu": 3, "nvme": 15, "redis": 0}}


async def test_a_flush_names_a_tier_that_should_be_there_and_does_not_run() -> None:
    """Its blocks would come back with it."""
    stand = StubNodes(a=StubAgent(cpu=KEYS, nvme=KEYS), b=StubAgent(cpu=[]))
    stand.control = stand.made(call_s=30, configured=["cpu", "nvme"])
    body = await command(stand, "flush", {})
    assert body["not_cleared"] == [{"source": "b", "tier": "nvme", "reason": "the tier does not run"}]
    assert (await command(stand, "flush", {"tiers": ["cpu"]}))["complete"]


async def test_a_directory_that_is_away_is_named_and_the_nodes_it_knew_last_are_asked() -> None:
    stand = nodes()
    app = app_of(stand)
    assert (await post(app, "/v1/kv/pin", ASK)).json()["unanswered"] == []
    stand.directory.away = True
    body = (await post(app, "/v1/kv/evict", ASK)).json()
    assert body["evicted"].keys() == {"a", "b"} and not any(block["places"] for block in body["blocks"])
    away = {"source": "directory", "reason": "it does not answer"}
    assert body["unanswered"] == [away]
    assert (await post(app, "/v1/kv/flush", {})).json()["not_cleared"] == [{**away, "tier": None}]
    stats = (await get(app, "/v1/kv/stats")).json()
    assert stats["directory"] is None and stats["unanswered"] == [away] and len(stats["nodes"]) == 2
    assert (await get(app, "/v1/kv/blocks/abcd")).json() == {
        "blocks": [],
        "more": False,
        "unanswered": [away],
    }


async def test_a_directory_that_began_anew_hides_no_node_from_a_flush() -> None:
    stand = nodes()
    stand.control = stand.made(call_s=30.0, settle_s=0.2)
    await get(app_of(stand), "/v1/kv/stats")
    agents = stand.directory.agents
    stand.directory.begin_anew()
    body = (await get(app_of(stand), "/v1/kv/stats")).json()
    assert len(body["nodes"]) == 2 and "begun anew" in body["unanswered"][0]["reason"]
    flushing = asyncio.create_task(command(stand, "flush", {}))
    await asyncio.sleep(0.1)
    assert "flush" not in stand.agents["a"].calls, "not all may have spoken"
    stand.directory.agents = agents  # they speak with their next heartbeat
    assert set((await flushing)["cleared"]) == {"a", "b"}
    assert not any(map(any, (agent.tiers.values() for agent in stand.agents.values())))
    stand.directory.begin_anew()
    stand.control = stand.made(call_s=30.0, configured=("cpu",), settle_s=0.2)  # a gateway that began with it
    said = await command(stand, "flush", {})
    assert (said["complete"], said["not_cleared"][0]["source"]) == (False, "directory")
    stand.directory.begin_anew()
    pinning = asyncio.create_task(command(stand, "pin"))
    await asyncio.sleep(0.1)
    stand.directory.agents = agents
    assert (await pinning)["pinned"].keys() == {"a", "b"}


async def test_what_pins_have_no_room_for_is_refused_by_its_field() -> None:
    stand = nodes()
    stand.agents["b"].full = "pins take at most half of a tier: cpu has room for 1 of 2 blocks"
    body = await command(stand, "pin")
    assert body["pinned"].keys() == {"a"}
    assert body["refused"] == [{"source": "b", "reason": stand.agents["b"].full}]
    stand.agents["a"].full = stand.agents["b"].full
    answer = await post(app_of(stand), "/v1/kv/pin", ASK)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tokens"
    assert "room for 1 of 2" in answer.json()["error"]["message"]
    stand.agents["a"].full = None
    stand.agents["a"].tiers = {"cpu": set()}
    answer = await post(app_of(stand), "/v1/kv/pin", ASK)
    assert answer.status_code == 400, "nothing is pinned anywhere"


async def test_a_node_that_is_gone_is_named_once_and_the_others_count() -> None:
    stand = nodes()
    stand.gone.add("b")
    body = await command(stand, "pin")
    assert body["pinned"].keys() == {"a"}
    assert body["unanswered"] == [{"source": "b", "reason": "gone or failing"}]


@pytest.mark.parametrize(
    ("path", "body", "param", "part"),
    [
        ("pin", {}, "prompt", "exactly one of prompt, messages, tokens"),
        ("pin", b"", "prompt", "exactly one of"),
        ("pin", b"[]", None, "JSON object"),
        ("evict", {"prompt": "a", "tokens": [4]}, "prompt", "prompt and tokens are given"),
        ("pin", {"prompt": ["a", "b"]}, "prompt", "string"),
        ("pin", {"tokens": "a"}, "tokens", "list"),
        ("pin", {"tokens": [4, 100_000]}, "tokens[1]", "out of vocabulary"),
        ("pin", {"tokens": [True]}, "tokens[0]", "integer"),
        ("pin", {"tokens": []}, "tokens", "empty"),
        ("pin", {"prompt": ""}, "prompt", "empty"),
        ("prefetch", {"messages": []}, "messages", "empty"),
        ("prefetch", {"messages": [{"role": "user", "content": "x", "nam": 1}]}, "messages[0].nam", "mean name?"),
        ("prefetch", {"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "messages[0].tool_calls", ""),
        ("pin", {"prompt": "a" * 99}, "prompt", "99 tokens; at most 60"),
        ("pin", {"prompt": "a", "model": "gpt"}, "model", "served: tiny, org/tiny"),
        ("pin", {**ASK, "ttl_s": 0}, "ttl_s", "above 0"),
        ("pin", {**ASK, "ttl_s": "60"}, "ttl_s", "number"),
        ("unpin", {**ASK, "ttl_s": 5}, "ttl_s", "Valid fields: "),
        ("pin", {**ASK, "tiers": ["cpu"]}, "tiers", "Valid fields: "),
        ("evict", {**ASK, "tiers": ["gpu"]}, "tiers[0]", "'cpu', 'nvme' or 'redis'"),
        ("evict", {**ASK, "tiers": []}, "tiers", "at least 1"),
        ("flush", {"tier": "cpu"}, "tier", "Did you mean tiers?"),
        ("flush", {"tiers": "cpu"}, "tiers", "list"),
        ("flush", b"{", None, "not valid JSON"),
        ("pin", {**ASK, "cache_salt": ""}, "cache_salt", "at least 1"),
        ("pin", {**ASK, "cache_salt": "x" * 257}, "cache_salt", "at most 256"),
        ("pin", {**ASK, "add_generation_prompt": True}, "add_generation_prompt", "only allowed with messages"),
    ],
)  # fmt: skip
async def test_a_wrong_command_names_its_field_and_touches_nothing(
    path: str, body: object, param: str | None, part: str
) -> None:
    stand = nodes()
    answer = await post(app_of(stand), f"/v1/kv/{path}", body)
    assert answer.status_code in (400, 404)
    error = answer.json()["error"]
    assert error["param"] == param and part in error["message"] and error["type"] == "invalid_request_error"
    assert not any(agent.calls for agent in stand.agents.values())


async def test_an_empty_body_flushes_everything() -> None:
    stand = nodes()
    assert (await command(stand, "flush", b""))["complete"]
    assert not any(agent.tiers["cpu"] for agent in stand.agents.values())


async def test_a_prompt_without_a_full_block_has_none() -> None:
    stand = nodes()
    body = await command(stand, "pin", {"tokens": [4, 5, 6]})
    assert body["blocks"] == [] and body["prompt_tokens"] == 3
    assert body["pinned"]["a"] == {"cpu": 0, "nvme": 0, "redis": 0}


@pytest.mark.parametrize(
    ("trouble", "status"), [(ModelUnavailable("no decode replica"), 503), (Overloaded("full"), 429)]
)
async def test_keys_wait_for_a_replica_that_knows_the_model(trouble: Exception, status: int) -> None:
    stand = nodes()
    stand.identity = trouble  # type: ignore[assignment]
    answer = await post(app_of(stand), "/v1/kv/pin", ASK)
    assert answer.status_code == status and "retry-after" in answer.headers
    assert (await command(stand, "flush", {}))["complete"], "which needs no key"


async def test_the_key_guards_the_commands() -> None:
    stand = nodes()
    app = app_of(stand, api_key="secret")
    assert (await post(app, "/v1/kv/flush", {})).status_code == 401
    assert (await get(app, "/v1/kv/stats")).status_code == 401
    assert stand.agents["a"].tiers["cpu"] and not stand.agents["a"].calls
    assert (await post(app, "/v1/kv/flush", {}, authorization="Bearer secret")).status_code == 200


async def test_without_tiers_there_are_no_such_paths() -> None:
    assert (await post(application(StubBackend()), "/v1/kv/flush", {})).status_code == 404


async def test_commands_are_counted_by_their_outcome() -> None:
    app = app_of(nodes())
    await post(app, "/v1/kv/pin", ASK)
    await post(app, "/v1/kv/pin", {})
    text = (await get(app, "/metrics")).text
    assert 'kvtide_requests_total{endpoint="kv/pin",outcome="ok"} 1.0' in text
    assert 'kvtide_requests_total{endpoint="kv/pin",outcome="invalid"} 1.0' in text
