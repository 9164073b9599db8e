"""The node agent: one per node, owns the CPU slab, keeps the books of the blocks in it, tells the directory.

Replicas on the node map the slab and copy bytes themselves; only small messages come here. It survives replica
restarts, so a replica that dies or is scaled down does not lose the cache. Without it everything is a miss.
"""

import asyncio
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deployments.directory import HEARTBEAT_S, LINGER_S, NAMESPACE, directory_actor
from kv_tiers.cpu import CpuTier
from kv_tiers.directory import Located, Outcome
from kv_tiers.keys import BlockKey
from kv_tiers.slab import SUFFIX, Slab, remove_stale
from kv_tiers.tier import Changes, ReadLease, TierStats, WriteLease

_log = logging.getLogger("kvtide.node")
Answer = TypeVar("Answer")
Lease = TypeVar("Lease", ReadLease, WriteLease)


def slab_folder(asked: str | None, nbytes: int) -> Path:
    """Where the memory file goes: as asked, else /dev/shm if it has that room, else the temporary folder."""
    if asked is not None:
        return Path(asked)
    shared = Path("/dev/shm")
    if shared.is_dir() and shutil.disk_usage(shared).free > nbytes:
        return shared
    return Path(tempfile.gettempdir())


@dataclass(frozen=True)
class Attachment:
    """Where the slab is, and which life of the agent it belongs to."""

    incarnation: int
    slab: str


def process_started(pid: int) -> str | None:
    """When a process of this machine started, in a form that only its own life has; None: there is none.

    Linux tells the start time; elsewhere a process id that exists counts as the same process.
    """
    try:
        # Behind the name in brackets, which may hold anything, start time is field 22 of proc(5).
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    return "alive"


class NodeAgent:
    """`CpuTier` and its slab on one node. An async actor: one event loop, so calls do not interleave.

    Replicas `attach` first and name the agent's incarnation in every later call, so that a lease of an earlier life
    (whose slab is gone) is never mistaken for one of this. None answers a call of another incarnation.
    """

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, application: str, node: str, slot_bytes: int, nbytes: int, folder: str | None
    ) -> None:
        self._application = application
        self._node = node
        self._incarnation = time.time_ns()
        place = slab_folder(folder, nbytes)
        remove_stale(place)
        self._slab = Slab.create(place / f"kvtide-{os.getpid()}-{self._incarnation}{SUFFIX}", nbytes)
        self._tier = CpuTier.fitting(nbytes, slot_bytes)
        self._owners: dict[str, tuple[int, str | None]] = {}
        self._last_owner = time.monotonic()
        self._changed = asyncio.Event()
        self._telling = asyncio.create_task(self._tell_directory())

    async def attach(self, owner: str, pid: int) -> Attachment:
        """A replica of this node comes to stay; its leases are reclaimed when its process is gone."""
        self._owners[owner] = (pid, process_started(pid))
        return Attachment(self._incarnation, str(self._slab.path))

    async def prepare_read(self, incarnation: int, keys: Sequence[BlockKey], owner: str) -> ReadLease | None:
        return self._tier.prepare_read(keys, owner) if incarnation == self._incarnation else None

    async def complete_read(self, incarnation: int, lease_id: int) -> None:
        if incarnation == self._incarnation:
            self._tier.complete_read(lease_id)

    async def prepare_write(
        self, incarnation: int, keys: Sequence[BlockKey], owner: str
    ) -> WriteLease | None:
        return self._tier.prepare_write(keys, owner) if incarnation == self._incarnation else None

    async def complete_write(
        self, incarnation: int, lease_id: int, written: Sequence[BlockKey]
    ) -> tuple[BlockKey, ...]:
        if incarnation != self._incarnation:
            return ()
        visible = self._tier.complete_write(lease_id, written)
        self._changed.set()
        return visible

    async def drop(self, incarnation: int, keys: Sequence[BlockKey]) -> int:
        self._changed.set()
        return self._tier.drop(keys) if incarnation == self._incarnation else 0

    async def clear(self) -> None:
        self._tier.clear()
        self._changed.set()

    async def stats(self) -> TierStats:
        return self._tier.stats()

    def _bury_the_dead(self) -> None:
        """Reclaim what dead replicas held. A stalled one is not dead: nothing else fences its writes."""
        for owner, (pid, started) in list(self._owners.items()):
            if process_started(pid) != started:
                reclaimed = self._tier.release_owner(owner)
                _log.warning("%s died, %d leases reclaimed", owner, reclaimed.leases)
                del self._owners[owner]
        if self._owners:
            self._last_owner = time.monotonic()

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
            self._bury_the_dead()
            if time.monotonic() - self._last_owner > LINGER_S:
                self._slab.unlink()
                ray.kill(ray.get_runtime_context().current_actor)
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
    """`BlockStore` and block memory of this node's agent, for worker threads of a replica.

    What cannot be asked is a miss. Reads ask the directory first (a batch), so that a prompt nobody has seen costs no
    pin. An agent that restarted has a new slab: it is attached when no lease of the old one is open any more, and
    until then everything is a miss. Calls block for at most `CALL_S` seconds each.
    """

    CALL_S = 5.0

    def __init__(
        self, agent: Callable[[], ActorHandle], directory: Callable[[], ActorHandle], node: str, owner: str
    ) -> None:
        """`agent` and `directory` find the actor, or make it when there is none."""
        self._find_agent, self._find_directory = agent, directory
        self._agent = agent()
        self._directory = directory()
        self._node = node
        self._owner = owner
        self._lock = threading.Lock()
        self._open = 0
        self._slab: Slab | None = None
        self._incarnation = 0
        self._attach()

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Bytes of the slab that open leases refer to."""
        assert self._slab is not None, "only a lease gives offsets"
        return self._slab.view(offset, nbytes)

    def prepare_read(self, keys: Sequence[BlockKey], owner: str) -> ReadLease:
        located = self._locate(keys)
        if located is None or not any(run.node == self._node for run in located.node_runs):
            return _NOTHING_READ
        return self._prepare(
            lambda: self._agent.prepare_read.remote(self._incarnation, keys, owner), _NOTHING_READ
        )

    def complete_read(self, lease_id: int) -> None:
        if lease_id != _NO_LEASE:
            self._ask(self._agent.complete_read.remote(self._incarnation, lease_id), None)
            self._closed()

    def prepare_write(self, keys: Sequence[BlockKey], owner: str) -> WriteLease:
        refused = WriteLease(_NO_LEASE, (), (), (), tuple(keys))
        return self._prepare(
            lambda: self._agent.prepare_write.remote(self._incarnation, keys, owner), refused
        )

    def complete_write(self, lease_id: int, written: Sequence[BlockKey]) -> tuple[BlockKey, ...]:
        if lease_id == _NO_LEASE:
            return ()
        visible = self._ask(self._agent.complete_write.remote(self._incarnation, lease_id, written), ())
        self._closed()
        return visible

    def drop(self, keys: Sequence[BlockKey]) -> int:
        self._ask(self._directory.forget.remote(self._node, keys), 0)
        return self._ask(self._agent.drop.remote(self._incarnation, keys), 0)

    def _locate(self, keys: Sequence[BlockKey]) -> Located | None:
        located: Located | None = self._ask(self._directory.locate.remote(keys), None)
        if located is None:
            self._directory = self._find_directory()
        return located

    def _prepare(self, call: Callable[[], ray.ObjectRef], nothing: Lease) -> Lease:
        """A lease of the agent's present life, or `nothing`."""
        with self._lock:
            self._open += 1
        answer = self._ask(call(), None)
        if answer is not None:
            lease: Lease = answer
            return lease
        with self._lock:
            self._open -= 1
            if not self._open:
                self._attach()
        return nothing

    def _closed(self) -> None:
        with self._lock:
            self._open -= 1

    def _attach(self) -> None:
        """Map the slab of the agent's present life; a failure leaves the old one, and everything a miss."""
        self._agent = self._find_agent()
        found: Attachment | None = self._ask(self._agent.attach.remote(self._owner, os.getpid()), None)
        if found is None or found.incarnation == self._incarnation:
            return
        try:
            slab = Slab.attach(found.slab)
        except (OSError, ValueError) as error:
            _log.warning("slab of the node agent cannot be mapped: %s", error)
            return
        if self._slab is not None:
            self._slab.close()
        self._slab, self._incarnation = slab, found.incarnation

    def _ask(self, reference: ray.ObjectRef, otherwise: Answer) -> Answer:
        try:
            answer: Answer = ray.get(reference, timeout=self.CALL_S)
            return answer
        except RayError as error:
            _log.warning("node agent or directory: %s; taken as a miss", type(error).__name__)
            return otherwise


_NO_LEASE = -1
_NOTHING_READ = ReadLease(_NO_LEASE, ())
