"""The node agent and a replica's view of it, as plain classes: restarts, late answers, deaths, two agents on a node."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError, RayActorError

from deployments import directory as directory_module
from deployments import node as node_module
from deployments.agent_tier import AgentTier
from deployments.directory import end_process_on_failure
from deployments.node import NodeAgent, process_started
from kv_tiers.directory import DirectoryState
from kv_tiers.keys import BlockKey

SLOT = 4096
KEYS = [BlockKey(bytes([i]) * 32) for i in range(8)]


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
            result = getattr(self.target, name)(*args)
            result = await result if asyncio.iscoroutine(result) else result
            await self.pause.wait()
            if self.dead:
                raise RayActorError
            return result

        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run_coroutine_threadsafe(work(), self.loop)
        return work()


def wait(reference: concurrent.futures.Future[Any], *, timeout: float | None) -> Any:
    """`ray.get` for what `Actor` returns."""
    try:
        return reference.result(timeout)
    except concurrent.futures.TimeoutError as error:
        raise GetTimeoutError from error


class Directory:
    """`DirectoryActor` without an actor."""

    def __init__(self) -> None:
        self.state = DirectoryState(lease_s=60.0, epoch=1)

    def register(self, node, incarnation):
        return self.state.register(node, incarnation, time.monotonic())

    def heartbeat(self, node, incarnation):
        return self.state.heartbeat(node, incarnation, time.monotonic())

    def report(self, source, incarnation, values):
        return self.state.report(source, incarnation, values, time.monotonic())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.state, name)


class Node:
    """One node's directory, agents and replicas."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.directory = Actor(Directory())
        self.left: list[NodeAgent] = []
        self.agents: list[Actor] = []

    async def start(self, slots: int = 8) -> Actor:
        agent = NodeAgent.__new__(NodeAgent)
        await agent.__init__(  # Ray awaits it as well
            "app", "node-a", SLOT, slots * SLOT, str(self.folder),
            find_directory=lambda application: self.directory, leave=lambda: self.left.append(agent),
        )  # fmt: skip
        self.agents.append(Actor(agent))
        return self.agents[-1]

    def stop(self, actor: Actor) -> None:
        """As SIGKILL."""
        actor.dead = True
        actor.target._telling.cancel()
        actor.target._slab.close()

    async def replica(self, owner: str = "prefill") -> AgentTier:
        """Finds whichever agent was started last."""
        return await asyncio.to_thread(
            AgentTier, lambda: self.agents[-1], lambda: self.directory, "node-a", owner, wait
        )

    async def announced(self, keys: int) -> None:
        await until(lambda: self.directory.target.state.locate(KEYS).run == keys)


async def until(what: Callable[[], bool], within_s: float = 5.0) -> None:
    async with asyncio.timeout(within_s):
        while not what():
            await asyncio.sleep(0.01)


async def write(tier: AgentTier, keys: list[BlockKey]) -> int:
    """Blocks full of their number."""

    def work() -> int:
        lease = tier.prepare_write(keys, "prefill")
        for key, offset in lease.entries:
            tier.view(offset, SLOT)[:] = bytes([key.digest[0]]) * SLOT
        return len(tier.complete_write(lease.id, [entry.key for entry in lease.entries]))

    return await asyncio.to_thread(work)


async def read(tier: AgentTier, keys: list[BlockKey]) -> list[int]:
    """First byte of every block found."""

    def work() -> list[int]:
        lease = tier.prepare_read(keys, "prefill")
        found = [tier.view(entry.offset, SLOT)[0] for entry in lease.entries]
        tier.complete_read(lease.id)
        return found

    return await asyncio.to_thread(work)


@pytest.fixture
async def node(tmp_path, monkeypatch):
    monkeypatch.setattr(node_module, "HEARTBEAT_S", 0.02)
    made = Node(tmp_path)
    yield made
    for actor in made.agents:
        if not actor.dead:
            made.stop(actor)


async def test_what_one_replica_writes_another_reads(node):
    await node.start()
    first, second = await node.replica("a"), await node.replica("b")
    assert await write(first, KEYS[:3]) == 3
    await node.announced(3)
    assert await read(second, KEYS) == [0, 1, 2]
    assert "prepare_read" not in node.agents[0].calls[:2]
    node.agents[0].target._tier.check()


async def test_a_prompt_that_nobody_has_seen_costs_no_call_of_the_agent(node):
    agent = await node.start()
    tier = await node.replica()
    assert await read(tier, KEYS) == []
    assert agent.calls == ["attach"]


async def test_a_new_life_of_the_agent_is_attached_once_the_leases_of_the_old_one_are_over(node):
    old = await node.start()
    tier = await node.replica()
    await write(tier, KEYS[:2])
    await node.announced(2)
    lease = await asyncio.to_thread(tier.prepare_read, KEYS, "prefill")
    node.stop(old)
    await node.start()
    await node.announced(0)
    assert await write(tier, KEYS[2:4]) == 0, "a miss while a lease of the old slab is open"
    assert tier.view(lease.entries[1].offset, SLOT)[0] == 1, "the old slab is still mapped"
    await asyncio.to_thread(tier.complete_read, lease.id)
    assert await write(tier, KEYS[:2]) == 0, "notices the new life"
    assert await write(tier, KEYS[:2]) == 2
    await node.announced(2)
    assert await read(tier, KEYS) == [0, 1]


async def test_without_a_directory_everything_is_a_miss_until_there_is_one_again(node):
    await node.start()
    tier = await node.replica()
    await write(tier, KEYS[:2])
    await node.announced(2)
    node.directory.dead = True
    assert await read(tier, KEYS) == []
    node.directory = Actor(Directory())
    await node.announced(2)  # the agent registered with the new one and sent its manifest
    await asyncio.to_thread(tier._locate, KEYS)
    assert await read(tier, KEYS) == [0, 1]


@pytest.mark.parametrize("kind", ["read", "write"])
async def test_a_lease_that_comes_too_late_is_ended_when_it_comes(node, monkeypatch, kind):
    agent = await node.start()
    tier = await node.replica()
    await write(tier, KEYS[:2])
    await node.announced(2)
    monkeypatch.setattr(AgentTier, "CALL_S", 0.1)
    agent.pause.clear()
    if kind == "read":
        assert await read(tier, KEYS) == []
    else:
        assert await write(tier, KEYS[2:4]) == 0
    stats = agent.target._tier.stats()
    assert stats.read_leases + stats.write_leases == 1, "given, but nobody knows"
    agent.pause.set()
    await until(lambda: tier._open == 0)
    await until(lambda: not (s := agent.target._tier.stats()).read_leases and not s.write_leases)
    agent.target._tier.check()
    assert await read(tier, KEYS) == [0, 1]
    assert await write(tier, KEYS[2:4]) == 2


async def test_a_late_lease_of_an_agent_that_dies_is_not_waited_for_any_more(node, monkeypatch):
    agent = await node.start()
    tier = await node.replica()
    monkeypatch.setattr(AgentTier, "CALL_S", 0.1)
    agent.pause.clear()
    assert await write(tier, KEYS[:2]) == 0
    node.stop(agent)
    agent.pause.set()
    await until(lambda: tier._open == 0)
    await node.start()
    await write(tier, KEYS[:2])
    assert await write(tier, KEYS[:2]) == 2


async def test_what_a_dead_replica_held_is_reclaimed(node):
    agent = await node.start()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    attachment = await agent.target.attach("dying", process.pid)
    lease = await agent.target.prepare_write(attachment.incarnation, KEYS[:3], "dying")
    assert len(lease.entries) == 3
    await asyncio.sleep(0.1)
    assert agent.target._tier.stats().write_leases == 1, "alive, however slow"
    process.kill()
    process.wait()
    await until(lambda: agent.target._tier.stats().write_leases == 0)
    assert agent.target._tier.stats().free == 8


def test_a_process_that_ends_while_it_is_looked_at_is_dead(monkeypatch):
    assert process_started(os.getpid()) == process_started(os.getpid()) is not None

    def ended(path, **_):
        raise ProcessLookupError(3, "No such process")

    monkeypatch.setattr(Path, "read_text", ended)
    assert process_started(os.getpid()) is None


async def test_an_agent_whose_loop_fails_ends_its_process(node, monkeypatch, caplog):
    ended = []
    monkeypatch.setattr(directory_module.os, "_exit", ended.append)
    agent = await node.start()

    def fail():
        raise ZeroDivisionError

    agent.target._bury_the_dead = fail
    await until(lambda: bool(ended))
    assert ended == [1] and "loop failed" in caplog.text


async def test_a_loop_that_is_cancelled_ends_no_process(monkeypatch):
    ended = []
    monkeypatch.setattr(directory_module.os, "_exit", ended.append)
    task = asyncio.create_task(asyncio.sleep(10))
    task.add_done_callback(end_process_on_failure)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.sleep(0)
    assert not ended


async def test_the_newest_agent_owns_the_node_and_the_older_one_keeps_quiet_and_leaves(node, monkeypatch):
    old = await node.start()
    staying = await node.replica("old replica")
    await write(staying, KEYS[:4])
    await node.announced(4)
    await node.start(slots=4)
    await node.announced(0)
    await until(lambda: old.target._superseded)
    monkeypatch.setattr(node_module, "HEARTBEAT_S", 10.0)  # the new one is silent from now on
    await asyncio.sleep(0.1)
    said = len(node.directory.calls)
    await asyncio.sleep(0.2)
    assert len(node.directory.calls) == said, "the older agent still talks"
    monkeypatch.setattr(node_module, "HEARTBEAT_S", 0.02)
    assert await write(staying, KEYS[4:6]) == 2, "its replicas are served as before"
    assert node.directory.target.state.locate(KEYS).run == 0
    monkeypatch.setattr(node_module, "LINGER_S", 0.1)
    old.target._owners.clear()
    await until(lambda: old.target in node.left)


async def test_going_back_to_the_options_of_a_lingering_agent_gives_it_the_node_again(node):
    old = await node.start()
    tier = await node.replica()
    await write(tier, KEYS[:2])
    await node.start()
    await until(lambda: old.target._superseded)
    node.agents.append(old)
    again = await node.replica("redeployed")
    await node.announced(2)
    assert await read(again, KEYS) == [0, 1]
    assert await read(tier, KEYS) == [0, 1], "leases of before are good as well"
    node.agents.pop()
