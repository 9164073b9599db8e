"""Lossy codecs at rest from a request to the disk and back: who sees such blocks, and what is kept of their answers."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import golden_engine as ge
import pytest
import torch
from agent_stand import Cluster, until
from redis_server import shared_server
from tiny_models import FULL, local_engine, one_thread, request, snapkv, tiny, tokens_of  # noqa: F401

from deployments import directory as directory_module
from deployments import node as node_module
from deployments import node_tiers
from deployments.config import AppArgs
from deployments.node_options import NodeOptions
from engine.prefix import PrefixCache
from kv_tiers.at_rest import AtRest
from kv_tiers.block import BlockLayout
from kv_tiers.books import SlotBooks
from kv_tiers.directory import Place
from kv_tiers.keys import is_kept_as, lossy_key
from kv_tiers.nvme_index import Geometry
from kv_tiers.slab import Slab
from kv_tiers.store_ports import joined

MODEL = tiny("llama").model
BLOCK = MODEL.spec.blocks
PROMPT = tokens_of(330)
KEYS = PrefixCache(MODEL.spec, None, None, "").keys(PROMPT, None)
INT8 = AtRest.INT8


@pytest.fixture
async def cluster(tmp_path, monkeypatch):
    monkeypatch.setattr(node_module, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr(directory_module, "PAUSE_S", 0.02)
    monkeypatch.setattr(node_tiers, "RETRY_S", 0.05)
    made = Cluster(tmp_path)
    await made.start_directory()
    yield made
    for actor in made.agents:
        if not actor.dead:
            await actor.target._store.settle()
            await actor.target._store.write_down()
            actor.target._store.check()
            assert_only_named(actor)
            await made.kill(actor)


def assert_only_named(actor):
    """Every tier tells of keys of its own codec only; a slab has both kinds."""
    for tier in actor.target._store.lower:
        assert all(is_kept_as(key, tier.at_rest) for key in tier.manifest().keys)


def options_of(spec=MODEL.spec, **given):
    """Options of an agent as a replica would name it, with room for a hundred blocks."""
    args = AppArgs(**{"admission": "always", "tier_policy": "lru", "cpu_tier_gib": 1.0, **given})
    made = NodeOptions.of("app", args, spec.blocks)
    fields = {**vars(made), "cpu_bytes": 100 * made.slot_bytes}
    if made.nvme_bytes:
        fields["nvme_bytes"] = 100 * made.slot_bytes
    del fields["cpu_folder"], fields["nvme_folder"]
    return fields


async def node(cluster, name="node-a", model=MODEL, **given):
    """A running agent with its lower tier, and a replica's prefix cache there."""
    agent = await cluster.start(name, **options_of(model.spec, **given))
    lower = bool(given.get("nvme_tier_gib") or given.get("redis_url"))
    await until(lambda: bool(agent.target._store.lower) == lower)
    tier = await cluster.replica("prefill", agent)
    return agent, PrefixCache(model.spec, tier, tier, "prefill")


async def ask(cache, prompt=PROMPT, at_rest=AtRest.EXACT, recipe=FULL, model=MODEL):
    """A finished request, whose blocks were stored as far as they may be."""
    wanted = replace(request("a", prompt, recipe), at_rest=at_rest)

    def work():
        engine = local_engine(model, prefix=cache)
        engine.prefill._pace.note([(0, 16)], 100.0)  # computing is slow: what is known is worth its load
        return engine.generate([wanted])["a"]

    return await asyncio.to_thread(work)


async def only_below(agent, keys=KEYS):
    """Write down what is in the slab, and take it away from there."""
    await agent.target.write_down()
    await agent.target._store.settle()
    agent.target._store._books.clear()
    assert await agent.target.where(keys)


def in_slab(agent, keys):
    return [agent.target._store._books.holds(key) for key in keys]


def made(keys, codec=INT8):
    return [lossy_key(key, codec) for key in keys]


@pytest.mark.parametrize("codec", ["fp8", "int8", "int4"])
async def test_only_who_allows_it_gets_lossy_blocks_and_nothing_of_it_is_kept_as_exact(cluster, codec):
    agent, cache = await node(cluster, nvme_tier_gib=1, nvme_tier_codec=codec)
    kind = AtRest.named(codec)
    cold = await ask(cache)
    assert cold.prompt.cached_tokens == 0 and all(in_slab(agent, KEYS))
    await only_below(agent)
    assert (await agent.target.where(KEYS))["nvme"] == [True] * 20
    warm = await ask(cache, PROMPT + tokens_of(100, seed=1), kind)
    assert (warm.prompt.cached_tokens, warm.prompt.lossy_tokens) == (320, 320)
    longer = cache.keys(PROMPT + tokens_of(100, seed=1), None)
    assert not any(in_slab(agent, longer)), "computed behind lossy KV"
    assert all(in_slab(agent, made(KEYS, kind))) and cache.counters.tokens_lossy == 320
    assert cache.counters.blocks_written == 20, "the cold request's"
    exact = await ask(cache)
    assert exact.prompt.cached_tokens == exact.prompt.lossy_tokens == 0
    assert exact.tokens == cold.tokens and all(in_slab(agent, KEYS))
    again = await ask(cache, at_rest=kind)
    assert (again.prompt.cached_tokens, again.prompt.lossy_tokens) == (320, 0), "exact ones are preferred"
    assert again.tokens == cold.tokens


async def test_where_the_exact_run_ends_the_lossy_one_goes_on_and_the_exact_part_stays_exact(cluster):
    agent, cache = await node(cluster, nvme_tier_gib=1, nvme_tier_codec="int8")
    await ask(cache)
    await agent.target.write_down()
    agent.target._store._books.drop(KEYS[7:])
    mixed = await ask(cache, at_rest=INT8)
    assert (mixed.prompt.cached_tokens, mixed.prompt.lossy_tokens) == (320, 320 - 7 * 16)
    assert in_slab(agent, KEYS) == [True] * 7 + [False] * 13
    assert in_slab(agent, made(KEYS)) == [False] * 7 + [True] * 13
    kept = await ask(cache)
    assert kept.prompt.cached_tokens == 7 * 16


@pytest.mark.parametrize("recipe", [FULL, snapkv(30)], ids=["full", "snapkv"])
async def test_other_codecs_and_lossless_servers_have_nothing_for_such_a_request(cluster, recipe):
    agent, cache = await node(cluster, nvme_tier_gib=1, nvme_tier_codec="int8")
    await ask(cache, recipe=recipe)
    await only_below(agent)
    for other in (AtRest.INT4, AtRest.FP8):
        found = await ask(cache, at_rest=other, recipe=recipe)
        assert found.prompt.cached_tokens == 0
        await only_below(agent)
    assert (await ask(cache, at_rest=INT8, recipe=recipe)).prompt.lossy_tokens > 0


async def test_a_corrupt_lossy_block_ends_the_run_and_what_is_computed_from_the_exact_part_is_kept(cluster):
    agent, cache = await node(cluster, nvme_tier_gib=1, nvme_tier_codec="int8")
    cold = await ask(cache)
    await agent.target.write_down()
    agent.target._store._books.drop(KEYS[5:])
    await ask(cache, at_rest=INT8)  # lossy blocks are in the slab now
    books = agent.target._store._books
    offset = books.offset_of(lossy_key(KEYS[5], INT8))
    agent.target._slab.view(offset + BLOCK.header_bytes, 1)[0] ^= 1
    found = await ask(cache, at_rest=INT8)
    assert (found.prompt.cached_tokens, found.prompt.lossy_tokens) == (5 * 16, 0)
    assert found.tokens == cold.tokens, "all of it was computed, or exact"
    assert all(in_slab(agent, KEYS)), "and is kept"
    assert cache.counters.blocks_corrupt == 1


async def test_a_restart_finds_the_lossy_blocks_and_one_with_another_codec_does_not(cluster):
    agent, cache = await node(cluster, nvme_tier_gib=1, nvme_tier_codec="int8")
    await ask(cache)
    await agent.target.write_down()
    await cluster.kill(agent)
    agent, cache = await node(cluster, nvme_tier_gib=1, nvme_tier_codec="int8")
    assert (await ask(cache, at_rest=INT8)).prompt.lossy_tokens == 320
    await cluster.kill(agent)
    for codec, kind in (("int4", AtRest.INT4), ("exact", AtRest.EXACT)):
        agent, cache = await node(cluster, nvme_tier_gib=1, nvme_tier_codec=codec)
        figures = (await agent.target.tier_stats())["nvme"]
        assert (figures["blocks"], figures["codec"]) == (0, kind)
        for asked in (INT8, kind):
            assert (await ask(cache, at_rest=asked)).prompt.cached_tokens == 0
            await agent.target.flush(["cpu", "nvme"])
        await cluster.kill(agent)


def test_a_lossy_tier_holds_more_blocks_in_the_same_bytes():
    layout = BlockLayout(layers=((3, 64),) * 30, dtype=torch.bfloat16)
    slots = {}
    for codec in ("exact", "fp8", "int8", "int4"):
        args = AppArgs(nvme_tier_gib=1, nvme_tier_codec=codec)
        made = NodeOptions.of("app", args, layout)
        geometry = Geometry.within(made.nvme_bytes, made.nvme_slot_bytes, made.nvme_at_rest)
        assert made.slot_bytes == NodeOptions.of("app", AppArgs(), layout).slot_bytes
        assert geometry.nbytes <= 1 << 30 and abs(geometry.slots - made.lower_slots) < 8
        slots[codec] = geometry.slots
    assert [round(slots[codec] / slots["exact"], 2) for codec in slots] == [1.0, 1.98, 1.9, 2.84]


async def test_another_nodes_lossy_blocks_serve_lossy_requests_only(cluster):
    ours, cache = await node(cluster, nvme_tier_gib=1, nvme_tier_codec="int8")
    await ask(cache)
    await only_below(ours)
    located = lambda keys: cluster.directory.target._state.locate(joined(keys)).segments  # noqa: E731
    await until(lambda: bool(located(made(KEYS))) and not located(KEYS))
    assert located(made(KEYS))[0].places == (Place("node-a", "nvme"),)
    theirs, other = await node(cluster, "node-b")
    await until(lambda: "node-a" in theirs.target._peers._addresses)
    assert (await ask(other)).prompt.cached_tokens == 0
    theirs.target._store._books.clear()
    found = await ask(other, at_rest=INT8)
    assert (found.prompt.cached_tokens, found.prompt.lossy_tokens) == (320, 320)
    assert not any(in_slab(theirs, KEYS))


async def test_commands_of_users_concern_what_was_made_of_a_prompt_too(cluster):
    agent, cache = await node(cluster, nvme_tier_gib=1, nvme_tier_codec="int8")
    await ask(cache)
    await only_below(agent)
    assert (await agent.target.pin(KEYS))["nvme"] == 20
    assert (await agent.target.unpin(KEYS))["nvme"] == 20
    await ask(cache, at_rest=INT8)
    assert all(in_slab(agent, made(KEYS)))
    evicted = await agent.target.evict(KEYS, ["cpu", "nvme"])
    assert evicted["nvme"] == 20 and not any(in_slab(agent, made(KEYS)))
    assert (await ask(cache, at_rest=INT8)).prompt.cached_tokens == 0
    await agent.target.flush(["cpu", "nvme"])


async def test_lossy_blocks_leave_the_slab_unwritten(cluster):
    agent, cache = await node(cluster, nvme_tier_gib=1, nvme_tier_codec="int8")
    await ask(cache)
    await only_below(agent)
    written = agent.target._store.stats().spill.written
    await ask(cache, at_rest=INT8)
    await agent.target._store._spill.write_down(made(KEYS))
    assert agent.target._store.stats().spill.written == written


async def test_redis_keeps_codecs_apart(cluster):
    """Nodes of one Redis with different codecs: none serves the other's, and the newer removes what it cannot use."""
    server = shared_server()
    with server.client() as client:
        client.flushall()
    url = server.url
    agent, cache = await node(cluster, redis_url=url, redis_tier_codec="int8", redis_tier_packing="zstd")
    await ask(cache)
    await only_below(agent)
    assert (await ask(cache, at_rest=INT8)).prompt.lossy_tokens == 320
    assert (await agent.target.tier_stats())["redis"]["codec"] == INT8
    await cluster.kill(agent)
    agent, cache = await node(cluster, redis_url=url, redis_tier_codec="exact")
    await until(lambda: agent.target._store.lower[0].incarnation > 0)
    for asked in (INT8, AtRest.EXACT):
        assert (await ask(cache, at_rest=asked)).prompt.cached_tokens == 0
        await agent.target.flush(["cpu", "redis"])
    with server.client() as client:
        left = [name for name in client.keys("kvtide:b1:*") if name.endswith(b"6b766c6f73737902")]
    assert left == []


async def test_beside_a_lossy_tier_an_exact_one_still_answers_exactly(cluster):
    server = shared_server()
    with server.client() as client:
        client.flushall()
    agent, cache = await node(
        cluster, nvme_tier_gib=1, nvme_tier_codec="int4", redis_url=server.url, redis_tier_codec="exact"
    )
    await until(lambda: len(agent.target._store.lower) == 2)
    cold = await ask(cache)
    await only_below(agent)
    where = await agent.target.where(KEYS)
    assert where["nvme"] == where["redis"] == [True] * 20
    for asked in (AtRest.EXACT, AtRest.INT4):
        found = await ask(cache, at_rest=asked)
        assert (found.prompt.cached_tokens, found.prompt.lossy_tokens) == (320, 0)
        assert found.tokens == cold.tokens
        agent.target._store._books.clear()
    await agent.target.evict(KEYS[8:], ["redis"])
    mixed = await ask(cache, at_rest=AtRest.INT4)
    assert (mixed.prompt.cached_tokens, mixed.prompt.lossy_tokens) == (320, 320 - 8 * 16)
    assert in_slab(agent, KEYS) == [True] * 8 + [False] * 12


@pytest.mark.parametrize("seed", [0, 1])
async def test_whatever_is_asked_the_blocks_under_exact_keys_are_as_computed(cluster, seed):
    """Exact and lossy requests over prompts that share beginnings, blocks leaving in between."""
    agent, cache = await node(cluster, nvme_tier_gib=1, nvme_tier_codec="int4")
    chance = random.Random(seed)
    prompts = [PROMPT[:cut] + tokens_of(60, seed=cut) for cut in (0, 64, 150, 270)]
    truth = {}
    for prompt in prompts:
        truth |= computed(prompt, cluster.folder / f"{len(prompt)}.kvslab")
    books, slab, lossy = agent.target._store._books, agent.target._slab, 0
    for _ in range(14):
        asked = chance.choice([AtRest.EXACT, AtRest.INT4, AtRest.INT4])
        prompt = chance.choice(prompts)
        found = await ask(cache, prompt, asked)
        lossy += found.prompt.lossy_tokens
        assert not found.prompt.lossy_tokens or asked is AtRest.INT4
        for key, expected in truth.items():
            if books.holds(key):
                assert torch.allclose(kv_of(books, slab, key), expected, rtol=0, atol=1e-4)
        await agent.target.write_down()
        if chance.random() < 0.7:
            books.drop([key for key in truth if chance.random() < 0.5])
    assert lossy > 300


def computed(prompt, path):
    """The numbers of a prompt's blocks, by key, when nothing is known of it."""
    books, slab = SlotBooks(50, BLOCK.nbytes), Slab.create(path, 50 * BLOCK.nbytes)
    cache = PrefixCache(MODEL.spec, books, slab, "test")
    local_engine(MODEL, prefix=cache).generate([request("a", prompt)])
    return {key: kv_of(books, slab, key) for key in cache.keys(prompt, None)}


def kv_of(books, slab, key):
    """All numbers of a block in a slab."""
    payload = slab.view(books.offset_of(key) + BLOCK.header_bytes, BLOCK.payload_bytes)
    return torch.frombuffer(bytearray(payload), dtype=BLOCK.dtype)


async def test_real_weights_answer_alike_from_int8_blocks_and_alike_exactly_without(cluster, smollm2_path):
    model = ge.model(smollm2_path, "float32")
    agent, cache = await node(cluster, model=model, nvme_tier_gib=1, nvme_tier_codec="int8")
    prompt = ge.prompt(4)[:150]
    keys = cache.keys(prompt, None)

    async def answer(at_rest=AtRest.EXACT):
        engine = ge.local_engine(smollm2_path, "float32", tokens=2000, prefix=cache)
        engine.prefill._pace.note([(0, 16)], 100.0)
        wanted = replace(ge.greedy("a", prompt, ge.FULL, 8), at_rest=at_rest)
        return (await asyncio.to_thread(engine.generate, [wanted]))["a"]

    cold = await answer()
    await only_below(agent, keys)
    lossy = await answer(INT8)
    assert (lossy.prompt.cached_tokens, lossy.prompt.lossy_tokens) == (144, 144)
    assert lossy.tokens[:4] == cold.tokens[:4]
    assert not any(in_slab(agent, keys))
    exact = await answer()
    assert exact.prompt.cached_tokens == 0 and exact.tokens == cold.tokens
