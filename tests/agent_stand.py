"""Node agents, directory and replicas' views without Ray: plain classes behind handles that can hang and die."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray.exceptions import GetTimeoutError, RayActorError
from slab_blocks import SLOT_BYTES, block_keys_of, is_whole, write

from deployments.agent_tier import AgentTier
from deployments.directory import DirectoryActor, DirectoryClient
from deployments.node import NodeAgent
from deployments.node_options import NodeOptions
from deployments.node_tiers import tier_makers
from kv_tiers.directory import Place
from kv_tiers.keys import BlockKey
from kv_tiers.slab import Slab
from kv_tiers.store_ports import joined
from kv_tiers.transfer.local import LocalFabric, LocalWire
from kv_tiers.transfer.slab_peer import SlabExchange

KEYS = block_keys_of(range(8))
OPTIONS = NodeOptions("app", SLOT_BYTES, 8 * SLOT_BYTES, policy="lru")


class Actor:
    """A handle: calls of `target` as Ray makes them, each on the event loop. `pause` holds answers back."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.loop = asyncio.get_running_loop()
        self.dead = False
        self.pause = asyncio.Event()
        self.pause.set()
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        handle = self

        class Method:
            def remote(self, *args: Any) -> Any:
                return handle._call(name, args)

        return Method()

    def _call(self, name: str, args: tuple[Any, ...]) -> Any:
        async def work() -> Any:
            self.calls.append(name)
            if self.dead:
                raise RayActorError
            result = await getattr(self.target, name)(*args)
            await self.pause.wait()
            if self.dead:
                raise RayActorError
            return result

        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run_coroutine_threadsafe(work(), self.loop)
        return running.create_task(work())


def wait(reference: concurrent.futures.Future[Any], *, timeout: float | None) -> Any:
    """`ray.get` for what `Actor` returns."""
    try:
        return reference.result(timeout)
    except concurrent.futures.TimeoutError as error:
        raise GetTimeoutError from error


class Cluster:
    """One directory, and agents and replicas on nodes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fabric = LocalFabric()
        self.agents: list[Actor] = []
        self.names: dict[str, Actor] = {}
        self.left: list[NodeAgent] = []
        self.makers = tier_makers
        self.directories: list[Actor] = []

    @property
    def directory(self) -> Actor:
        return self.directories[-1]

    async def start_directory(self) -> Actor:
        actor = DirectoryActor.__new__(DirectoryActor)
        await actor.__init__(0, leave=lambda: None)  # Ray awaits it as well
        self.directories.append(Actor(actor))
        return self.directory

    async def start(self, node: str = "node-a", **options: Any) -> Actor:
        chosen = replace(
            OPTIONS, **{"cpu_folder": str(self.folder), "nvme_folder": str(self.folder), **options}
        )
        agent = NodeAgent.__new__(NodeAgent)
        await agent.__init__(  # Ray awaits it as well
            chosen,
            node,
            directory=DirectoryClient("app", 1, lambda application, shard: self.directory),
            leave=lambda: self.left.append(agent),
            makers=self.makers,
            exchange=self.exchange,
            find=lambda address: self.names[address],
        )
        self.agents.append(Actor(agent))
        self.names[chosen.actor_name(node)] = self.agents[-1]
        return self.agents[-1]

    def exchange(self, name: str, slab: Slab, slot_bytes: int) -> SlabExchange:
        import torch

        memory = torch.frombuffer(slab.view(0, slab.nbytes), dtype=torch.uint8)
        return SlabExchange(name, slab, slot_bytes, [LocalWire(name, memory, self.fabric)])

    async def kill(self, actor: Actor) -> None:
        """As SIGKILL, but that a killed process would leave its NVMe file as it is at any moment."""
        actor.dead = True
        agent = actor.target
        for task in agent._tasks:
            task.cancel()
        await asyncio.gather(*agent._tasks, return_exceptions=True)
        await agent._store.close()
        await agent._lower.release()
        agent._peers.close()
        agent._slab.close()

    async def replica(self, owner: str = "prefill", agent: Actor | None = None) -> AgentTier:
        """Finds `agent`, or whichever was started last."""
        return await asyncio.to_thread(AgentTier, lambda: agent or self.agents[-1], owner, wait)

    def known(self, keys: Sequence[BlockKey] = KEYS) -> list[tuple[Place, ...]]:
        """Per leading key, where the directory says that it is."""
        located = self.directory.target._state.locate(joined(keys))
        return [segment.places for segment in located.segments for _ in range(segment.count)]

    async def announced(self, *places: Place, run: int) -> None:
        """Wait until the directory knows exactly `run` leading keys at each of these places."""
        await until(lambda: all(self.run_at(place) == run for place in places))

    def run_at(self, place: Place) -> int:
        run = 0
        for places in self.known():
            if place not in places:
                break
            run += 1
        return run


async def until(what: Callable[[], bool], within_s: float = 10.0) -> None:
    async with asyncio.timeout(within_s):
        while not what():
            await asyncio.sleep(0.01)


async def write_blocks(tier: AgentTier, keys: Sequence[BlockKey], owner: str = "prefill") -> int:
    def work() -> int:
        lease = tier.prepare_write(keys, owner)
        for key, offset in lease.entries:
            write(tier.view(offset, SLOT_BYTES), key)
        return len(tier.complete_write(lease.id, [entry.key for entry in lease.entries]))

    return await asyncio.to_thread(work)


async def read_blocks(
    tier: AgentTier, keys: Sequence[BlockKey] = KEYS, worth_s: float = 0.0, owner: str = "prefill"
) -> int:
    """Leading blocks found; each is whole, and its key's."""

    def work() -> int:
        lease = tier.prepare_read(keys, owner, worth_s=worth_s)
        try:
            for entry in lease.entries:
                assert is_whole(tier.view(entry.offset, SLOT_BYTES), entry.key)
        finally:
            tier.complete_read(lease.id)
        return len(lease.entries)

    return await asyncio.to_thread(work)
