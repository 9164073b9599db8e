"""The node agent: one per node, owns the CPU slab, keeps the books of the blocks in it, tells the directory.

Replicas on the node map the slab and copy bytes themselves; only small messages come here. It survives replica
restarts, so a replica that dies or is scaled down does not lose the cache. Without it everything is a miss.
"""

import asyncio
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deployments.directory import HEARTBEAT_S, LINGER_S, NAMESPACE, directory_actor
from kv_tiers.cpu import CpuTier
from kv_tiers.directory import Outcome
from kv_tiers.keys import BlockKey
from kv_tiers.slab import SUFFIX, Slab, remove_stale
from kv_tiers.tier import Changes, ReadLease, Reclaimed, TierStats, WriteLease

_log = logging.getLogger("kvtide.node")


def slab_folder(asked: str | None, nbytes: int) -> Path:
    """Where the memory file goes: as asked, else /dev/shm if it has that room, else the temporary folder."""
    if asked is not None:
        return Path(asked)
    shared = Path("/dev/shm")
    if shared.is_dir() and shutil.disk_usage(shared).free > nbytes:
        return shared
    return Path(tempfile.gettempdir())


class NodeAgent:
    """`CpuTier` and its slab on one node. Async actor: every method runs on one event loop, so calls do not interleave."""

    async def __init__(self, application: str, node: str, slot_bytes: int, nbytes: int, folder: str | None) -> None:
        self._application = application
        self._node = node
        self._incarnation = time.time_ns()
        place = slab_folder(folder, nbytes)
        remove_stale(place)
        self._slab = Slab.create(place / f"kvtide-{os.getpid()}-{self._incarnation}{SUFFIX}", nbytes)
        self._tier = CpuTier.fitting(nbytes, slot_bytes)
        self._heard = time.monotonic()
        self._changed = asyncio.Event()
        self._telling = asyncio.create_task(self._tell_directory())

    async def slab_path(self) -> str:
        return str(self._slab.path)

    async def longest_run(self, keys: Sequence[BlockKey]) -> int:
        return self._tier.longest_run(keys)

    async def prepare_read(self, keys: Sequence[BlockKey], owner: str) -> ReadLease:
        self._heard = time.monotonic()
        return self._tier.prepare_read(keys, owner)

    async def complete_read(self, lease_id: int) -> None:
        self._tier.complete_read(lease_id)

    async def prepare_write(self, keys: Sequence[BlockKey], owner: str) -> WriteLease:
        self._heard = time.monotonic()
        return self._tier.prepare_write(keys, owner)

    async def complete_write(self, lease_id: int, written: Sequence[BlockKey]) -> tuple[BlockKey, ...]:
        visible = self._tier.complete_write(lease_id, written)
        self._changed.set()
        return visible

    async def drop(self, keys: Sequence[BlockKey]) -> int:
        self._changed.set()
        return self._tier.drop(keys)

    async def release_owner(self, owner: str) -> Reclaimed:
        """A replica is proven dead: reclaim what its leases held."""
        return self._tier.release_owner(owner)

    async def clear(self) -> None:
        self._tier.clear()
        self._changed.set()

    async def stats(self) -> TierStats:
        return self._tier.stats()

    async def keep(self) -> None:
        """A replica on this node is alive and will want the cache."""
        self._heard = time.monotonic()

    async def _tell_directory(self) -> None:
        """Announce changes as they come, heartbeat, answer every gap with a manifest, leave when forgotten."""
        directory = directory_actor(self._application)
        known = False
        while True:
            try:
                if not known:
                    await directory.register.remote(self._node, self._incarnation)
                    outcome = await self._resync(directory)
                    known = True
                else:
                    outcome = await self._announce(directory)
                if outcome is Outcome.GAP:
                    outcome = await self._resync(directory)
                known = outcome is not Outcome.UNKNOWN
            except RayError as error:
                _log.warning("directory unreachable: %s", type(error).__name__)
                directory, known = directory_actor(self._application), False
            if time.monotonic() - self._heard > LINGER_S:
                self._slab.unlink()
                ray.actor.exit_actor()
            try:
                await asyncio.wait_for(self._changed.wait(), HEARTBEAT_S)
            except TimeoutError:
                continue
            self._changed.clear()

    async def _announce(self, directory: ActorHandle) -> Outcome:
        changes: Changes = self._tier.drain_changes()
        outcome: Outcome = await directory.heartbeat.remote(self._node, self._incarnation)
        if changes.added or changes.removed:
            outcome = await directory.announce.remote(
                self._node, self._incarnation, changes.seq, changes.added, changes.removed
            )
        stats = self._tier.stats()
        gauges = {
            "cpu_tier_blocks": float(stats.visible),
            "cpu_tier_capacity": float(stats.capacity),
            "cpu_tier_evicted": float(stats.blocks_evicted),
        }
        await directory.report.remote(f"node:{self._node}", self._incarnation, gauges)
        return outcome

    async def _resync(self, directory: ActorHandle) -> Outcome:
        manifest = self._tier.manifest()
        outcome: Outcome = await directory.resync.remote(
            self._node, self._incarnation, manifest.seq, manifest.keys
        )
        return outcome


def node_agent(application: str, slot_bytes: int, nbytes: int, folder: str | None) -> ActorHandle:
    """The agent of the node we run on, created if there is none."""
    node = ray.get_runtime_context().get_node_id()
    remote = ray.remote(num_cpus=0, max_restarts=-1)(NodeAgent)
    return remote.options(
        name=f"{application}:node:{node}:{slot_bytes}",
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
    ).remote(application, node, slot_bytes, nbytes, folder)


class AgentTier:
    """`Tier` over the node's agent, for worker threads of a replica: what cannot be asked is a miss.

    Reads ask the directory first (a batch), so that a prompt nobody has seen costs no pin. Calls block for at most
    `CALL_S` seconds.
    """

    CALL_S = 5.0

    def __init__(self, agent: ActorHandle, directory: ActorHandle, node: str) -> None:
        self._agent = agent
        self._directory = directory
        self._node = node

    def longest_run(self, keys: Sequence[BlockKey]) -> int:
        return int(self._ask(self._agent.longest_run.remote(keys), 0))

    def prepare_read(self, keys: Sequence[BlockKey], owner: str) -> ReadLease:
        located = self._ask(self._directory.locate.remote(keys), None)
        if located is None or not any(run.node == self._node for run in located.node_runs):
            return _NOTHING_READ
        return self._ask(self._agent.prepare_read.remote(keys, owner), _NOTHING_READ)

    def complete_read(self, lease_id: int) -> None:
        if lease_id != _NOTHING_READ.id:
            self._ask(self._agent.complete_read.remote(lease_id), None)

    def prepare_write(self, keys: Sequence[BlockKey], owner: str) -> WriteLease:
        refused = WriteLease(_NOTHING_READ.id, (), (), (), tuple(keys))
        return self._ask(self._agent.prepare_write.remote(keys, owner), refused)

    def complete_write(self, lease_id: int, written: Sequence[BlockKey]) -> tuple[BlockKey, ...]:
        if lease_id == _NOTHING_READ.id:
            return ()
        return self._ask(self._agent.complete_write.remote(lease_id, written), ())

    def drop(self, keys: Sequence[BlockKey]) -> int:
        self._ask(self._directory.forget.remote(self._node, keys), 0)
        return int(self._ask(self._agent.drop.remote(keys), 0))

    def release_owner(self, owner: str) -> Reclaimed:
        return self._ask(self._agent.release_owner.remote(owner), Reclaimed(0, 0, 0))

    def _ask(self, reference: object, otherwise: object):  # type: ignore[no-untyped-def]  # as the call returns
        try:
            return ray.get(reference, timeout=self.CALL_S)  # type: ignore[call-overload]
        except RayError as error:
            _log.warning("node agent or directory: %s; taken as a miss", type(error).__name__)
            return otherwise


_NOTHING_READ = ReadLease(-1, ())
