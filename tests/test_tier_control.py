"""Commands over real node agents with slabs and NVMe files, and a real directory: all in this process, without Ray."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tier_stands import FINGERPRINT, KEYS, SLOT_BYTES, block

from deployments.api.backend import BlockIdentity, Flushed, TierPlace
from deployments.directory import LEASE_S, DirectoryActor, DirectoryClient
from deployments.node import NodeAgent
from deployments.node_options import NodeOptions
from deployments.tier_control import FanOut, RemoteAgent
from kv_tiers.slab import Slab

CHAIN = KEYS[:6]


class Actor:
    """A handle whose calls run in this event loop, as Ray makes them."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        class Method:
            remote = getattr(self._target, name)

        return Method


class Redirected:
    """A handle of whichever actor was made last."""

    def __init__(self, actors: list[Any]) -> None:
        self._actors = actors

    def __getattr__(self, name: str) -> Any:
        return getattr(Actor(self._actors[-1]), name)


async def started(kind: type, *args: Any, **options: Any) -> Any:
    """An actor's object; Ray awaits its __init__ as well."""
    made = kind.__new__(kind)
    await made.__init__(*args, **options)
    return made


async def until(what: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):
        while not await what():
            await asyncio.sleep(0.01)


class Cluster:
    """Nodes a and b, each with room for eight blocks in its slab and an NVMe file."""

    def __init__(
        self,
        agents: dict[str, NodeAgent],
        control: FanOut,
        restart: Callable[[], Awaitable[FanOut]],
    ) -> None:
        self.agents = agents
        self.control = control
        self._restart = restart

    async def begin_anew(self) -> None:
        """Directory and gateway start again and know nothing."""
        self.control = await self._restart()

    async def write(self, node: str) -> None:
        """As a replica that has computed the chain."""
        agent = self.agents[node]
        life = await agent.attach("replica", os.getpid())
        lease = await agent.prepare_write(life.incarnation, CHAIN, "replica")
        assert lease is not None
        with Slab.attach(life.slab) as slab:
            for entry in lease.entries:
                slab.view(entry.offset, SLOT_BYTES)[:] = block(entry.key)
        await agent.complete_write(life.incarnation, lease.id, CHAIN)

    async def counts(self, tier: str) -> dict[str, int]:
        """Node to blocks of the chain in that tier."""
        held = (await self.control.where(CHAIN)).places
        return {node: sum(TierPlace(node, tier) in places for places in held) for node in self.agents}


@asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[Cluster]:
    actors = [await started(DirectoryActor, 0, lambda: None)]

    def client() -> DirectoryClient:
        return DirectoryClient("app", 1, lambda application, shard: Redirected(actors))

    directory = client()
    options, agents = {}, {}
    for node in ("a", "b"):
        options[node] = NodeOptions(
            "app", SLOT_BYTES, 8 * SLOT_BYTES, str(folder), 1 << 20, str(folder / node), admission="always"
        )
        agents[node] = await started(
            NodeAgent, options[node], node, directory, lambda: None, exchange=lambda *_: None
        )
    by_address = {options[node].actor_name(node): agents[node] for node in agents}

    async def find(address: str) -> RemoteAgent:
        return RemoteAgent(Actor(by_address[address]))

    async def identity() -> BlockIdentity:
        return BlockIdentity(FINGERPRINT, 4, SLOT_BYTES)

    def gateway(settle_s: float) -> FanOut:
        tiers = ["cpu", "nvme"]
        return FanOut(client(), find, identity, configured=tiers, call_s=30.0, settle_s=settle_s)

    async def restart() -> FanOut:
        actors.append(await started(DirectoryActor, 0, lambda: None))
        return gateway(LEASE_S)

    control = gateway(0.2)

    async def runs() -> bool:
        figures = (await control.report()).nodes
        return len(figures) == 2 and all(each.get("nvme", {}).get("capacity") for each in figures.values())

    try:
        await until(runs)
        yield Cluster(agents, control, restart)
    finally:
        for actor in actors:
            actor._leaving.cancel()
        for agent in agents.values():
            await agent.close()


async def test_blocks_go_down_and_come_up_and_are_where_it_is_said(tmp_path: Path) -> None:
    async with cluster(tmp_path) as nodes:
        await nodes.write("a")
        evicted = await nodes.control.evict(CHAIN, ["cpu"])
        assert evicted.nodes == {"a": {"cpu": 6}, "b": {"cpu": 0}} and not evicted.silent
        assert await nodes.counts("cpu") == {"a": 0, "b": 0}
        assert await nodes.counts("nvme") == {"a": 6, "b": 0}, "written down first"
        fetched = await nodes.control.prefetch(CHAIN)
        assert (fetched.node, fetched.blocks) == ("a", 6)
        assert await nodes.counts("cpu") == {"a": 6, "b": 0}


async def test_commands_reach_every_node_though_the_directory_and_the_gateway_have_just_begun(
    tmp_path: Path,
) -> None:
    """Nodes tell a new directory of themselves with their next heartbeats, one after the other."""
    async with cluster(tmp_path) as nodes:
        await nodes.write("a")
        await nodes.write("b")
        await nodes.begin_anew()
        young = await nodes.control.report()
        assert not young.nodes and "begun anew" in young.silent[0].reason
        evicted = await nodes.control.evict(CHAIN, ["cpu"])
        assert evicted.nodes == {node: {"cpu": 6} for node in ("a", "b")} and not evicted.silent


async def test_pins_are_counted_in_every_tier(tmp_path: Path) -> None:
    async with cluster(tmp_path) as nodes:
        await nodes.write("a")
        await nodes.agents["a"].write_down()
        # At most half of a tier is pinned.
        assert (await nodes.control.pin(CHAIN, 60.0)).nodes == {
            "a": {"cpu": 4, "nvme": 6},
            "b": {"cpu": 0, "nvme": 0},
        }
        assert (await nodes.control.unpin(CHAIN)).nodes["a"] == {"cpu": 4, "nvme": 6}
        assert (await nodes.control.unpin(CHAIN)).nodes["a"] == {"cpu": 0, "nvme": 0}


async def test_after_a_flush_nobody_has_anything_and_the_directory_knows(tmp_path: Path) -> None:
    """CASES O-43."""
    async with cluster(tmp_path) as nodes:
        await nodes.write("a")
        await nodes.write("b")
        for agent in nodes.agents.values():
            await agent.write_down()
        prefix = CHAIN[0].digest.hex()[:8]

        async def announced() -> bool:
            found = (await nodes.control.find(prefix, 10)).blocks
            return bool(found) and len(found[0].places) == 4

        await until(announced)
        flushed = await nodes.control.flush()
        assert flushed == Flushed({node: {"cpu": 6, "nvme": 6} for node in ("a", "b")})
        for tier in ("cpu", "nvme"):
            assert await nodes.counts(tier) == {"a": 0, "b": 0}
        assert (await nodes.control.prefetch(CHAIN)).blocks == 0
        assert (await nodes.control.find(prefix, 10)).blocks == ()
        report = await nodes.control.report()
        assert report.directory is not None and report.directory.entries == 0
        assert report.nodes["a"]["nvme"]["blocks"] == 0
