"""Node agents with tiers below their slabs, and with neighbours: warm restarts, two nodes, tiers that come and go."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
from agent_stand import KEYS, OPTIONS, Cluster, read_blocks, until, write_blocks
from redis_server import RedisServer
from slab_blocks import SLOT_BYTES

from deployments import directory as directory_module
from deployments import node as node_module
from deployments import node_tiers
from deployments.api.metrics import GAUGES, TIER_GAUGES
from deployments.node_figures import gauges
from deployments.node_idle import IdleShare
from kv_tiers.books import SlotBooks
from kv_tiers.directory import Outcome, Place
from kv_tiers.memory import MemoryTier
from kv_tiers.store_ports import Cleared
from policies.tiering.speed import PRIORS

CPU, NVME, REDIS = Place("node-a", "cpu"), Place("node-a", "nvme"), Place("", "redis")
NVME_BYTES = 40 * SLOT_BYTES
WORTH_S = 30.0


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
            assert actor.target._store.stats().lent == 0
            await made.kill(actor)


def redis_tier() -> MemoryTier:
    tier = MemoryTier(SlotBooks(100, SLOT_BYTES))
    tier.name = "redis"
    tier.incarnation = 7
    return tier


def test_o23_applications_that_share_a_folder_share_no_file(tmp_path):
    names = ["org/model/name", "org/model-SEP-name", "org/model", "Org/model", "../x", "x" * 300, "mödel", ""]
    made = [OPTIONS, *(replace(OPTIONS, slot_bytes=size * SLOT_BYTES) for size in (2, 12))]
    paths = [
        node_tiers.tier_makers(
            replace(each, application=name, nvme_bytes=1 << 24, nvme_folder=str(tmp_path)),
            None,
            time.monotonic,
        )["nvme"]().path
        for name in names
        for each in made
    ]
    assert len({str(path).lower() for path in paths}) == len(names) * len(made)
    assert all(path.resolve().parent == tmp_path.resolve() and len(path.name) < 64 for path in paths)


async def nvme_of(agent) -> object:
    await until(lambda: bool(agent.target._store.lower))
    return agent.target._store.lower[0]


async def test_blocks_on_nvme_survive_the_agent(cluster):
    agent = await cluster.start(nvme_bytes=NVME_BYTES, admission="always")
    tier = await cluster.replica()
    await nvme_of(agent)
    await write_blocks(tier, KEYS)
    await agent.target.write_down()
    await cluster.announced(CPU, NVME, run=8)
    await cluster.kill(agent)
    agent = await cluster.start(nvme_bytes=NVME_BYTES, admission="always")
    await cluster.announced(CPU, run=0)
    await cluster.announced(NVME, run=8)
    tier = await cluster.replica()
    assert await read_blocks(tier) == 0
    assert await read_blocks(tier, worth_s=WORTH_S) == 8
    await cluster.announced(CPU, NVME, run=8)
    figures = await agent.target.tier_stats()
    assert figures["nvme"]["hits"] == 8 and figures["cpu"]["blocks"] == 8
    assert set(figures["nvme"]) == {*TIER_GAUGES, "slot_bytes"}
    assert set(figures["cpu"]) == set(figures["nvme"]) - {"read_latency_s", "read_bytes_per_s"}
    speed = agent.target._store.stats().speeds["nvme"]
    assert figures["nvme"]["read_bytes_per_s"] == pytest.approx(speed.bytes_per_s, rel=0.05)
    assert abs(figures["nvme"]["read_bytes_per_s"] / PRIORS["nvme"].bytes_per_s - 1) > 0.001, "as measured"
    told = gauges(agent.target._store)
    assert told["nvme_tier_read_bytes_per_s"] > 0 and set(told) <= set(GAUGES)


async def test_what_no_longer_fits_the_slab_comes_back_from_nvme(cluster):
    agent = await cluster.start(nvme_bytes=NVME_BYTES, cpu_bytes=4 * SLOT_BYTES, admission="always")
    tier = await cluster.replica()
    await nvme_of(agent)
    for first in (0, 4):
        assert await write_blocks(tier, KEYS[first : first + 4]) == 4
        await agent.target.write_down()
    assert await read_blocks(tier, KEYS[:4], worth_s=WORTH_S) == 4
    assert await read_blocks(tier, KEYS[4:], worth_s=WORTH_S) == 4


async def test_a_neighbour_reads_from_our_slab_and_through_it_from_our_nvme(cluster):
    ours = await cluster.start("node-a", nvme_bytes=NVME_BYTES, admission="always")
    tier = await cluster.replica("a", ours)
    await nvme_of(ours)
    await write_blocks(tier, KEYS, "a")
    await ours.target.write_down()
    assert await ours.target.evict(KEYS[4:], ["cpu"]) == {"cpu": 4}
    await cluster.announced(CPU, run=4)
    await cluster.announced(NVME, run=8)
    theirs = await cluster.start("node-b")
    await until(lambda: "node-a" in theirs.target._peers._addresses)
    other = await cluster.replica("b", theirs)
    assert await read_blocks(other, worth_s=WORTH_S, owner="b") == 8
    sources = theirs.target._store.stats().sources
    assert (sources["peer"].hits, sources["peer+nvme"].hits) == (4, 4)
    await cluster.announced(Place("node-b", "cpu"), run=8)
    assert "remote_blocks_read" in GAUGES


async def test_a_neighbour_that_dies_is_a_miss_and_forgotten(cluster):
    ours = await cluster.start("node-a")
    await write_blocks(await cluster.replica("a", ours), KEYS, "a")
    await cluster.announced(CPU, run=8)
    theirs = await cluster.start("node-b")
    await until(lambda: "node-a" in theirs.target._peers._addresses)
    await cluster.kill(ours)
    other = await cluster.replica("b", theirs)
    assert await read_blocks(other, worth_s=WORTH_S, owner="b") == 0
    assert await write_blocks(other, KEYS[:2], "b") == 2


async def test_a_second_agent_of_a_node_gets_the_nvme_file_from_the_first(cluster):
    old = await cluster.start(nvme_bytes=NVME_BYTES, admission="always")
    tier = await cluster.replica("old", old)
    await nvme_of(old)
    await write_blocks(tier, KEYS[:4], "old")
    await old.target.write_down()
    new = await cluster.start(nvme_bytes=NVME_BYTES, cpu_bytes=4 * SLOT_BYTES, admission="always")
    await nvme_of(new)
    assert old.target._superseded and not old.target._store.lower
    assert await read_blocks(await cluster.replica("new", new), KEYS[:4], WORTH_S, "new") == 4
    assert await read_blocks(tier, owner="old") == 4, "still served from its slab"


async def test_a_tier_that_cannot_start_is_left_out_and_tried_again(cluster, caplog, tmp_path):
    blocked = tmp_path / "folder"
    blocked.write_text("a file where a folder should be")
    agent = await cluster.start(nvme_bytes=NVME_BYTES, nvme_folder=str(blocked), admission="always")
    tier = await cluster.replica()
    assert await write_blocks(tier, KEYS[:4]) == 4
    await asyncio.sleep(0.3)
    assert caplog.text.count("cannot start") == 1
    figures = (await agent.target.tier_stats())["nvme"]
    speeds = {"read_latency_s", "read_bytes_per_s"}
    assert figures["open"] == 1 and set(figures) == {*TIER_GAUGES, "slot_bytes"} - speeds
    blocked.unlink()
    await nvme_of(agent)
    assert await write_blocks(tier, KEYS[4:]) == 4
    await agent.target.write_down()
    assert (await agent.target.where(KEYS))["nvme"][4:] == [True] * 4


async def test_commands_reach_every_tier(cluster):
    agent = await cluster.start(nvme_bytes=NVME_BYTES, admission="always")
    tier = await cluster.replica()
    await nvme_of(agent)
    await write_blocks(tier, KEYS[:4])
    await agent.target.write_down()
    assert await agent.target.pin(KEYS[:2], 60.0) == {"cpu": 2, "nvme": 2}
    assert await agent.target.unpin(KEYS[:2]) == {"cpu": 2, "nvme": 2}
    assert await agent.target.evict(KEYS[:4], ["cpu"]) == {"cpu": 4}
    assert await agent.target.prefetch(KEYS) == 4
    assert await agent.target.where(KEYS[3:5]) == {"cpu": [True, False], "nvme": [True, False]}
    cleared = await agent.target.flush(["cpu", "nvme", "redis"])
    assert cleared == {"cpu": Cleared(4, 0), "nvme": Cleared(4, 0)}
    await cluster.announced(CPU, NVME, run=0)
    assert await read_blocks(tier, worth_s=WORTH_S) == 0


async def test_a_directory_that_dies_is_told_everything_again(cluster):
    cluster.makers = lambda options, memory, clock: {"redis": redis_tier}
    agent = await cluster.start(admission="always")
    tier = await cluster.replica()
    await until(lambda: bool(agent.target._store.lower))
    await write_blocks(tier, KEYS[:5])
    await agent.target.write_down()
    await cluster.announced(CPU, REDIS, run=5)
    for _ in range(3):
        cluster.directory.dead = True
        await write_blocks(tier, KEYS[5:6])
        await cluster.start_directory()
        await agent.target.write_down()
        await cluster.announced(CPU, REDIS, run=6)
        cluster.directory.target._state.check()
    assert cluster.directory.target._state.renew_shared(REDIS, 6, 0.0) is Outcome.STALE


async def test_what_one_node_wrote_to_redis_another_reads_until_redis_starts_empty(cluster):
    server = RedisServer(Path(tempfile.mkdtemp(prefix="kvtide-redis-")))  # short: it holds a socket
    options = {"redis_url": server.url, "redis_bytes": 40 * SLOT_BYTES, "admission": "always"}
    try:
        ours = await cluster.start("node-a", **options)
        await until(lambda: bool(ours.target._store.lower))
        await write_blocks(await cluster.replica("a", ours), KEYS[:6], "a")
        await ours.target.write_down()
        await cluster.announced(CPU, REDIS, run=6)
        await cluster.kill(ours)
        theirs = await cluster.start("node-b", **options)
        tier = await cluster.replica("b", theirs)
        await until(lambda: bool(theirs.target._store.lower))
        assert await read_blocks(tier, worth_s=WORTH_S, owner="b") == 6
        assert theirs.target._store.stats().sources["redis"].hits == 6
        ours = await cluster.start("node-a", **options)
        await cluster.announced(REDIS, run=6)
        server.stop()
        await asyncio.sleep(1.1)  # a run of Redis is known by the second in which it began
        server.start()
        await until(lambda: cluster.run_at(REDIS) == 0)
        assert await read_blocks(tier, owner="b") == 6, "its own slab has them still"
        assert (await ours.target.where(KEYS))["redis"] == [False] * 8
    finally:
        server.stop()
        shutil.rmtree(server.folder)


async def test_a_redis_that_is_gone_is_shown_as_left_alone_until_it_is_back(cluster):
    server = RedisServer(Path(tempfile.mkdtemp(prefix="kvtide-redis-")))
    try:
        agent = await cluster.start(redis_url=server.url, redis_bytes=40 * SLOT_BYTES, admission="always")
        await until(lambda: bool(agent.target._store.lower) and agent.target._store.lower[0].incarnation > 0)
        tier = await cluster.replica()
        await write_blocks(tier, KEYS)
        await agent.target.write_down()

        async def shown() -> float:
            return (await agent.target.tier_stats())["redis"]["open"]

        assert await shown() == 0 == gauges(agent.target._store)["redis_tier_open"]
        await agent.target.evict(KEYS, ["cpu"])
        server.stop()
        for _ in range(3):
            await agent.target.prefetch(KEYS)
        assert await shown() == 1 == gauges(agent.target._store)["redis_tier_open"]
        server.start()
        async with asyncio.timeout(30):
            while await shown():  # the next write that is let through closes the breaker
                await agent.target.evict(KEYS, ["cpu"])
                await write_blocks(tier, KEYS)
                await agent.target.write_down()
                await asyncio.sleep(0.1)
        assert (await agent.target.where(KEYS))["redis"] == [True] * 8
    finally:
        server.stop()
        shutil.rmtree(server.folder)


async def test_a_lost_message_is_made_up_for(cluster):
    await cluster.start()
    tier = await cluster.replica()
    await write_blocks(tier, KEYS[:2])
    await cluster.announced(CPU, run=2)
    announce = cluster.directory.target._state.announce
    lost = []

    def lose(*args):
        lost.append(args)
        return Outcome.OK

    cluster.directory.target._state.announce = lose
    await write_blocks(tier, KEYS[2:4])
    await until(lambda: bool(lost))
    cluster.directory.target._state.announce = announce
    await write_blocks(tier, KEYS[4:6])
    await cluster.announced(CPU, run=6)


async def test_only_options_make_tiers(cluster):
    clock = asyncio.get_running_loop().time
    assert node_tiers.tier_makers(OPTIONS, None, clock) == {}
    both = node_tiers.tier_makers(
        node_tiers.NodeOptions(
            "app", 4096, 1 << 20, nvme_bytes=1 << 20, redis_url="redis://h", redis_bytes=1 << 20
        ),
        None,
        clock,
    )
    assert list(both) == ["nvme", "redis"], "the fastest first"


def test_the_idle_share_lies_between_none_and_all():
    share = IdleShare()
    share._looked -= 1
    assert 0.0 <= share() <= 1.0
