"""The directory's actors and their client without Ray: shards, restarts, failures, and when an actor leaves."""

from __future__ import annotations

import asyncio

import pytest
from ray.exceptions import ActorUnavailableError, RayActorError

from deployments import directory as directory_module
from deployments.directory import AGENT, HEARTBEAT_S, LEASE_S, LINGER_S, DirectoryActor, DirectoryClient
from deployments.telemetry import report_for_ever
from kv_tiers.directory import Located, Outcome, Place, Segment
from kv_tiers.keys import Fingerprint, block_keys
from kv_tiers.shards import parts, split

KEYS = [key.digest for key in block_keys(Fingerprint(bytes(32)), range(40), 1)]
CHAIN = b"".join(KEYS)
CPU, REDIS = Place("n1", "cpu"), Place("", "redis")
SHARDS = 3


class Actor:
    """An actor and what may befall it."""

    def __init__(self, target):
        self.target = target
        self.dead = False
        self.hiccups = 0  # so many calls fail on the way
        self.answering = asyncio.Event()
        self.answering.set()
        self.calls = 0

    async def call(self, name, args):
        self.calls += 1
        if self.dead:
            raise RayActorError
        if self.hiccups:
            self.hiccups -= 1
            raise ActorUnavailableError("a moment", None)
        await self.answering.wait()
        return await getattr(self.target, name)(*args)


class Handle:
    """What one look-up returns."""

    def __init__(self, actor):
        self.actor = actor

    def __getattr__(self, name):
        class Method:
            remote = staticmethod(lambda *args: self.actor.call(name, args))

        return Method()


class Cluster:
    """Ray's table of named actors. `now` is everybody's clock."""

    def __init__(self):
        self.now = 1000.0
        self.actors = {}
        self.lookups = 0
        self.broken = None  # what a look-up raises
        self.left = []

    async def start(self, shard):
        actor = DirectoryActor.__new__(DirectoryActor)
        await actor.__init__(shard, leave=lambda: self.left.append(shard), clock=lambda: self.now)
        self.actors[shard] = Actor(actor)
        return actor

    def find(self, application, shard):
        assert application == "app"
        self.lookups += 1
        if self.broken is not None:
            raise self.broken
        return Handle(self.actors[shard])

    def client(self, shards=SHARDS, **options):
        return DirectoryClient("app", shards, find=self.find, clock=lambda: self.now, **options)

    def state_of(self, shard):
        return self.actors[shard].target._state

    def stop(self):
        for actor in self.actors.values():
            actor.target._leaving.cancel()


@pytest.fixture
async def cluster(monkeypatch):
    monkeypatch.setattr(directory_module, "HEARTBEAT_S", 0.001)  # how often an actor looks at the clock
    cluster = Cluster()
    for shard in range(SHARDS):
        await cluster.start(shard)
    yield cluster
    for shard in cluster.actors:
        cluster.state_of(shard).check()
    cluster.stop()


async def fill(client, incarnation=1):
    """The node's agent tells of all blocks, in parts."""
    outcomes = [await client.register(CPU, incarnation, "agent")]
    outcomes += [await client.resync(CPU, incarnation, 4, *part) for part in parts(CHAIN, part_keys=16)]
    return outcomes


def first_of(shard):
    """How many blocks of the chain come before the shard's first."""
    return next(at for at, key in enumerate(KEYS) if split(key, SHARDS).keys[shard])


async def test_shards_together_are_one_directory(cluster):
    client = cluster.client()
    assert set(await fill(client)) == {Outcome.OK}
    assert all(0 < cluster.state_of(shard).stats(0).keys < 40 for shard in range(SHARDS))
    located = await client.locate(CHAIN)
    assert located.segments == (Segment(40, (CPU,)),)
    assert located.epoch == cluster.state_of(SHARDS - 1).epoch, "the youngest shard's"
    assert await client.announce(CPU, 1, 5, b"", KEYS[7]) is Outcome.OK
    assert (await client.locate(CHAIN)).run == 7
    assert await client.forget(CPU, KEYS[3] + KEYS[4] + KEYS[7]) == 2
    assert await client.copies(CHAIN) == bytes(at not in (3, 4, 7) for at in range(40))
    assert await client.renew_shared(REDIS, 9) is Outcome.UNKNOWN
    assert await client.announce_shared(REDIS, 9, KEYS[3] + KEYS[4], b"") is Outcome.OK
    assert await client.renew_shared(REDIS, 9) is Outcome.OK
    assert (await client.locate(CHAIN)).segments == (
        Segment(3, (CPU,)),
        Segment(2, (REDIS,)),
        Segment(2, (CPU,)),
    )
    assert await client.addresses() == {"n1": "agent"}
    assert await client.heartbeat("n1", 1) is Outcome.OK
    assert await client.heartbeat("n1", 0) is Outcome.STALE


async def test_stats_add_up_and_reports_are_with_the_first_shard(cluster):
    client = cluster.client()
    await fill(client)
    assert await client.report("decode", 1, {"rows": 2.0}) is Outcome.OK
    stats = await client.stats()
    assert (stats.nodes, stats.keys, stats.entries, stats.tiers) == (1, 40, 40, {"cpu": 40})
    assert stats.reports == {"decode": {"rows": 2.0}}
    assert cluster.state_of(1).stats(cluster.now).reports == {}


async def test_to_readers_the_keys_of_a_dead_shard_are_misses(cluster):
    client = cluster.client()
    await fill(client)
    cluster.actors[1].dead = True
    assert (await client.locate(CHAIN)).run == first_of(1)
    copies = await client.copies(CHAIN)
    assert copies == bytes(not split(key, SHARDS).keys[1] for key in KEYS)
    assert await client.forget(CPU, CHAIN) == sum(copies)
    assert await client.addresses() == {"n1": "agent"}
    assert (await client.stats()).nodes == 1


async def test_to_agents_a_dead_shard_is_one_that_does_not_know_them(cluster):
    client = cluster.client()
    await fill(client)
    cluster.actors[1].dead = True
    assert await client.heartbeat("n1", 1) is Outcome.UNKNOWN
    assert await client.announce(CPU, 1, 5, b"", KEYS[0]) is Outcome.UNKNOWN
    assert await client.register(CPU, 1) is Outcome.UNKNOWN
    assert await client.renew_shared(REDIS, 1) is Outcome.UNKNOWN


async def test_a_directory_that_is_gone_altogether_raises_nothing(cluster):
    client = cluster.client()
    cluster.broken = ValueError("no such actor")
    assert await client.locate(CHAIN) == Located(0, ())
    assert await client.copies(CHAIN) == bytes(40)
    assert await client.forget(CPU, CHAIN) == 0
    assert await client.addresses() == {}
    assert await client.report("decode", 1, {}) is Outcome.UNKNOWN
    stats = await client.stats()
    assert (stats.epoch, stats.nodes, stats.keys, stats.reports) == (0, 0, 0, {})


async def test_o16_a_shard_that_comes_back_empty_is_refilled_by_the_manifest(cluster):
    client = cluster.client()
    await fill(client)
    epoch = (await client.locate(CHAIN)).epoch
    cluster.actors[1].target._leaving.cancel()
    cluster.actors[1].dead = True
    await cluster.start(1)
    assert (await client.locate(CHAIN)).run == first_of(1), "found at once, and empty"
    assert (await client.locate(CHAIN)).epoch > epoch
    assert await client.heartbeat("n1", 1) is Outcome.UNKNOWN
    assert set(await fill(client)) == {Outcome.OK}
    assert (await client.locate(CHAIN)).run == 40


async def test_one_call_lost_on_its_way_is_not_noticed(cluster):
    client = cluster.client()
    await fill(client)
    for actor in cluster.actors.values():
        actor.hiccups = 1
    assert (await client.locate(CHAIN)).run == 40
    cluster.actors[0].hiccups = 1
    assert await client.announce(CPU, 1, 5, b"", KEYS[0]) is Outcome.OK


async def test_a_dead_shard_is_looked_up_a_bounded_number_of_times(cluster):
    client = cluster.client(1)
    await fill(client)
    actor = cluster.actors[0]
    actor.dead = True
    before, calls = cluster.lookups, actor.calls
    for _ in range(100):
        assert await client.locate(CHAIN) == Located(0, ())
    assert cluster.lookups - before <= 2 and actor.calls - calls <= 2
    cluster.now += HEARTBEAT_S
    actor.dead = False
    assert (await client.locate(CHAIN)).run == 40


async def test_many_calls_that_fail_together_look_the_actor_up_together(cluster):
    client = cluster.client(1)
    await fill(client)
    cluster.actors[0].dead = True
    before = cluster.lookups
    found = await asyncio.gather(*(client.locate(CHAIN) for _ in range(50)))
    assert {located.run for located in found} == {0}
    assert cluster.lookups - before <= 2


async def test_a_frozen_shard_is_a_miss_within_the_readers_time(cluster):
    client = cluster.client(reader_s=0.1)
    await fill(client)
    cluster.actors[2].answering.clear()
    assert (await client.locate(CHAIN)).run == first_of(2)
    calls = cluster.actors[2].calls
    assert (await client.locate(CHAIN)).run == first_of(2)
    assert cluster.actors[2].calls == calls, "left alone for a while"
    cluster.actors[2].answering.set()
    cluster.now += HEARTBEAT_S
    assert (await client.locate(CHAIN)).run == 40


async def test_a_busy_shard_that_readers_give_up_still_hears_the_agents(cluster):
    client = cluster.client(1, reader_s=0.05)
    await client.register(CPU, 1)
    cluster.actors[0].answering.clear()
    telling = asyncio.create_task(fill(client))
    assert (await client.locate(CHAIN)).run == 0
    more = asyncio.create_task(client.heartbeat("n1", 1))
    await asyncio.sleep(0)
    cluster.actors[0].answering.set()
    assert set(await telling) == {Outcome.OK} and await more is Outcome.OK


async def test_a_cancelled_call_says_nothing_about_the_shard(cluster):
    client = cluster.client(1)
    await fill(client)
    cluster.actors[0].answering.clear()
    asking = asyncio.create_task(client.locate(CHAIN))
    while cluster.actors[0].calls < 5:
        await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    cluster.actors[0].answering.set()
    assert (await client.locate(CHAIN)).run == 40


async def test_a_node_that_sends_a_long_manifest_keeps_its_lease(cluster):
    client = cluster.client()
    await client.register(CPU, 1)
    for part in parts(CHAIN, part_keys=4):
        cluster.now += LEASE_S * 0.6
        assert await client.resync(CPU, 1, 1, *part) is Outcome.OK
    assert (await client.locate(CHAIN)).run == 40
    cluster.now += LEASE_S
    assert (await client.locate(CHAIN)).run == 0


async def test_the_first_shard_stays_while_replicas_report_and_the_others_while_agents_speak(cluster):
    client = cluster.client()

    async def later(seconds):
        cluster.now += seconds
        for _ in range(10):
            await asyncio.sleep(0.001)

    for _ in range(5):
        await client.report("decode", 1, {})
        await client.heartbeat("n1", 1)
        await later(LINGER_S)
    assert cluster.left == []
    await client.heartbeat("n1", 1)
    await client.report(f"{AGENT}n1", 1, {})  # agents linger, and must not keep alive what keeps them
    await later(LINGER_S)
    assert set(cluster.left) == {0}
    await later(LINGER_S)
    assert set(cluster.left) == {0, 1, 2}


async def test_reports_go_on_when_the_directory_has_been_away(cluster, monkeypatch):
    monkeypatch.setattr("deployments.telemetry.HEARTBEAT_S", 0.001)
    monkeypatch.setattr("deployments.telemetry.DirectoryClient", lambda application: cluster.client(1))
    cluster.actors[0].dead = True
    telling = asyncio.create_task(report_for_ever("app", "decode", lambda: {"rows": 1.0}))
    while cluster.actors[0].calls < 2:
        await asyncio.sleep(0.001)
    assert not telling.done()
    cluster.actors[0].dead = False
    cluster.now += HEARTBEAT_S
    async with asyncio.timeout(5):
        while not cluster.state_of(0).stats(cluster.now).reports:
            await asyncio.sleep(0.001)
    telling.cancel()
