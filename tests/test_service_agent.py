"""The node agent and a replica's view of it, as plain classes: restarts, late answers, deaths, two agents on a node."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from agent_stand import KEYS, Cluster, read_blocks, until, write_blocks
from slab_blocks import SLOT_BYTES

from deployments import directory as directory_module
from deployments import node as node_module
from deployments.agent_tier import AgentTier
from deployments.config import GIB, AppArgs
from deployments.directory import end_process_on_failure
from deployments.node import process_started
from deployments.node_options import NodeOptions
from kv_tiers.block import BlockLayout
from kv_tiers.directory import Place

CPU = Place("node-a", "cpu")


@pytest.fixture
async def cluster(tmp_path, monkeypatch):
    monkeypatch.setattr(node_module, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr(directory_module, "PAUSE_S", 0.02)
    made = Cluster(tmp_path)
    await made.start_directory()
    yield made
    for actor in made.agents:
        if not actor.dead:
            actor.target._store.check()
            await made.kill(actor)


async def test_what_one_replica_writes_another_reads_without_the_directory(cluster):
    agent = await cluster.start()
    first, second = await cluster.replica("a"), await cluster.replica("b")
    assert await write_blocks(first, KEYS[:3], "a") == 3
    assert await read_blocks(second, owner="b") == 3
    await cluster.announced(CPU, run=3)
    assert "locate" not in cluster.directory.calls
    assert agent.calls == [
        "attach",
        "attach",
        "prepare_write",
        "complete_write",
        "prepare_read",
        "complete_read",
    ]


async def test_a_new_life_of_the_agent_is_attached_once_the_leases_of_the_old_one_are_over(cluster):
    old = await cluster.start()
    tier = await cluster.replica()
    await write_blocks(tier, KEYS[:2])
    await cluster.announced(CPU, run=2)
    lease = await asyncio.to_thread(tier.prepare_read, KEYS, "prefill")
    await cluster.kill(old)
    await cluster.start()
    await cluster.announced(CPU, run=0)
    assert await write_blocks(tier, KEYS[2:4]) == 0, "a miss while a lease of the old slab is open"
    assert tier.view(lease.entries[1].offset, 8).tobytes() == b"kvtideBK", "the old slab is still mapped"
    await asyncio.to_thread(tier.complete_read, lease.id)
    assert await write_blocks(tier, KEYS[:2]) == 0, "notices the new life"
    assert await write_blocks(tier, KEYS[:2]) == 2
    await cluster.announced(CPU, run=2)
    assert await read_blocks(tier) == 2


async def test_without_a_directory_a_node_has_what_it_has_and_tells_the_next_one(cluster):
    await cluster.start()
    tier = await cluster.replica()
    await write_blocks(tier, KEYS[:2])
    await cluster.announced(CPU, run=2)
    cluster.directory.dead = True
    assert await read_blocks(tier, worth_s=0.5) == 2
    assert await write_blocks(tier, KEYS[2:4]) == 2
    await cluster.start_directory()
    await cluster.announced(CPU, run=4)


@pytest.mark.parametrize("kind", ["read", "write"])
async def test_a_lease_that_comes_too_late_is_ended_when_it_comes(cluster, monkeypatch, kind):
    agent = await cluster.start()
    tier = await cluster.replica()
    await write_blocks(tier, KEYS[:2])
    monkeypatch.setattr(AgentTier, "CALL_S", 0.1)
    agent.pause.clear()
    if kind == "read":
        assert await read_blocks(tier) == 0
    else:
        assert await write_blocks(tier, KEYS[2:4]) == 0
    books = agent.target._store._books
    assert books.stats().read_leases + books.stats().write_leases == 1, "given, but nobody knows"
    agent.pause.set()
    await until(lambda: tier._open == 0)
    await until(lambda: not (s := books.stats()).read_leases and not s.write_leases)
    assert await read_blocks(tier) == 2
    assert await write_blocks(tier, KEYS[2:4]) == 2


async def test_a_late_lease_of_an_agent_that_dies_is_not_waited_for_any_more(cluster, monkeypatch):
    agent = await cluster.start()
    tier = await cluster.replica()
    monkeypatch.setattr(AgentTier, "CALL_S", 0.1)
    agent.pause.clear()
    assert await write_blocks(tier, KEYS[:2]) == 0
    await cluster.kill(agent)
    agent.pause.set()
    await until(lambda: tier._open == 0)
    await cluster.start()
    await write_blocks(tier, KEYS[:2])
    assert await write_blocks(tier, KEYS[:2]) == 2


async def test_a_frozen_agent_costs_one_wait_and_one_thread_however_many_ask(cluster, monkeypatch):
    agent = await cluster.start()
    tier = await cluster.replica()
    await write_blocks(tier, KEYS[:2])
    monkeypatch.setattr(AgentTier, "CALL_S", 0.1)
    agent.pause.clear()
    for _ in range(20):
        assert await read_blocks(tier) == 0 and await write_blocks(tier, KEYS[2:4]) == 0
    assert [thread.name for thread in threading.enumerate()].count("late-lease") == 1
    agent.pause.set()
    await until(lambda: tier._open == 0)
    assert await read_blocks(tier) == 2


async def test_an_agent_that_cannot_be_made_again_is_a_miss(cluster):
    agent = await cluster.start()
    tier = await cluster.replica()
    await write_blocks(tier, KEYS[:2])
    await cluster.kill(agent)

    def nobody():
        raise ValueError("no such actor")

    tier._find_agent = nobody
    for _ in range(2):
        assert await read_blocks(tier) == 0 and await write_blocks(tier, KEYS) == 0
    tier._find_agent = lambda: cluster.agents[-1]
    await cluster.start()
    await write_blocks(tier, KEYS[:2])
    assert await write_blocks(tier, KEYS[:2]) == 2


async def test_what_a_dead_replica_held_is_reclaimed(cluster):
    agent = await cluster.start()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    attachment = await agent.target.attach("dying", process.pid)
    lease = await agent.target.prepare_write(attachment.incarnation, KEYS[:3], "dying")
    assert len(lease.entries) == 3
    await asyncio.sleep(0.1)
    books = agent.target._store._books
    assert books.stats().write_leases == 1, "alive, however slow"
    process.kill()
    process.wait()
    await until(lambda: books.stats().write_leases == 0)
    assert books.stats().free == 8
    assert await agent.target.prepare_read(attachment.incarnation, KEYS, "dying") is None, (
        "asked before it died"
    )
    assert books.stats().read_leases == 0


async def test_what_a_dead_replica_asked_for_last_is_not_given_to_it(cluster):
    agent = await cluster.start()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    attachment = await agent.target.attach("dying", process.pid)
    process.kill()
    process.wait()
    await until(lambda: "dying" not in agent.target._owners)
    assert await agent.target.prepare_write(attachment.incarnation, KEYS[:3], "dying") is None
    assert await agent.target.prepare_read(attachment.incarnation, KEYS, "dying") is None
    assert agent.target._store._books.stats().free == 8
    await agent.target.attach("dead already", process.pid)
    await until(lambda: "dead already" not in agent.target._owners)


def test_a_process_that_ends_while_it_is_looked_at_is_dead(monkeypatch):
    assert process_started(os.getpid()) == process_started(os.getpid()) is not None

    def ended(path, **_):
        raise ProcessLookupError(3, "No such process")

    monkeypatch.setattr(Path, "read_text", ended)
    assert process_started(os.getpid()) is None


async def test_an_agent_whose_loop_fails_ends_its_process(cluster, monkeypatch, caplog):
    ended = []
    monkeypatch.setattr(directory_module.os, "_exit", ended.append)
    agent = await cluster.start()

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


async def test_the_newest_agent_owns_the_node_and_the_older_one_keeps_quiet_and_leaves(cluster, monkeypatch):
    old = await cluster.start()
    staying = await cluster.replica("old replica", old)
    await write_blocks(staying, KEYS[:4], "old replica")
    await cluster.announced(CPU, run=4)
    new = await cluster.start(cpu_bytes=4 * SLOT_BYTES)
    await cluster.announced(CPU, run=0)
    await until(lambda: old.target._superseded)
    for task in new.target._tasks:  # the new one is silent from now on
        task.cancel()
    await asyncio.sleep(0.1)
    said = len(cluster.directory.calls)
    await asyncio.sleep(0.2)
    assert len(cluster.directory.calls) == said, "the older agent still talks"
    assert await write_blocks(staying, KEYS[4:6], "old replica") == 2, "its replicas are served as before"
    assert cluster.run_at(CPU) == 0
    monkeypatch.setattr(node_module, "LINGER_S", 0.1)
    old.target._owners.clear()
    old.target._changed.set()
    await until(lambda: old.target in cluster.left)
    assert not old.target._slab.path.exists()


async def test_going_back_to_the_options_of_a_lingering_agent_gives_it_the_node_again(cluster):
    old = await cluster.start()
    tier = await cluster.replica()
    await write_blocks(tier, KEYS[:2])
    await cluster.start(cpu_bytes=4 * SLOT_BYTES)
    await until(lambda: old.target._superseded)
    again = await cluster.replica("redeployed", old)
    await cluster.announced(CPU, run=2)
    assert await read_blocks(again, owner="redeployed") == 2
    assert await read_blocks(tier) == 2, "leases of before are good as well"


BLOCKS = BlockLayout(layers=((4, 64),) * 6, dtype=torch.bfloat16)  # of 98,560 bytes


def node_options(**given) -> NodeOptions:
    options = NodeOptions.of("app", AppArgs(**given), BLOCKS)
    assert options is not None
    return options


def test_options_that_change_a_tier_name_another_agent_and_show_no_password():
    plain = node_options()
    assert plain.slot_bytes == 102_400 and plain.cpu_bytes == GIB
    assert plain.actor_name("n") == node_options().actor_name("n") != plain.actor_name("m")
    secret = node_options(redis_url="redis://:hunter2@host:6379/0")
    others = [secret, node_options(cpu_tier_gib=2), node_options(nvme_tier_gib=1), node_options(tier_ttl_s=5)]
    assert len({plain.actor_name("n"), *(other.actor_name("n") for other in others)}) == 5
    assert "hunter2" not in repr(secret) + secret.actor_name("n")
    assert NodeOptions.of("app", AppArgs(cpu_tier_gib=0), BLOCKS) is None
