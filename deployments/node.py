"""The node agent: one per node, owns the CPU slab, keeps the books of the blocks in it, tells the directory.

Replicas on the node map the slab and copy bytes themselves; only small messages come here. It survives replica
restarts, so a replica that dies or is scaled down does not lose the cache. Without it everything is a miss.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deployments.directory import (
    AGENT,
    HEARTBEAT_S,
    LINGER_S,
    NAMESPACE,
    directory_actor,
    end_process_on_failure,
)
from deployments.slabs import slab_folder
from kv_tiers.books import SlotBooks
from kv_tiers.directory import Outcome
from kv_tiers.keys import BlockKey
from kv_tiers.slab import SUFFIX, Slab, remove_stale
from kv_tiers.tier import Changes, ReadLease, TierStats, WriteLease

_log = logging.getLogger("kvtide.node")


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
    except (FileNotFoundError, ProcessLookupError):  # the latter: it ended while we read
        if Path("/proc/self/stat").exists():
            return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    return "alive"


def _leave() -> None:
    ray.kill(ray.get_runtime_context().current_actor)


class NodeAgent:
    """`SlotBooks` and its slab on one node. An async actor: one event loop, so calls do not interleave.

    Replicas `attach` first and name the agent's incarnation in every later call, so that a lease of an earlier life
    (whose slab is gone) is never mistaken for one of this. None answers a call of another incarnation.

    Options that change the slab make another agent, under another actor name. In the directory the node's name belongs
    to the agent that was attached to last: told STALE, the older one says nothing more, serves the replicas it has, and
    leaves `LINGER_S` after the last of them has gone, like any other.
    """

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self,
        application: str,
        node: str,
        slot_bytes: int,
        nbytes: int,
        folder: str | None,
        find_directory: Callable[[str], ActorHandle] = directory_actor,
        leave: Callable[[], None] = _leave,
    ) -> None:
        self._node = node
        self._find_directory = partial(find_directory, application)
        self._leave = leave
        self._incarnation = self._term = time.time_ns()
        self._superseded = False
        place = slab_folder(folder, nbytes)
        remove_stale(place)
        self._slab = Slab.create(place / f"kvtide-{os.getpid()}-{self._incarnation}{SUFFIX}", nbytes)
        self._tier = SlotBooks.fitting(nbytes, slot_bytes)
        self._owners: dict[str, tuple[int, str | None]] = {}
        self._last_owner = time.monotonic()
        self._changed = asyncio.Event()
        self._telling = asyncio.create_task(self._tell_directory())
        self._telling.add_done_callback(end_process_on_failure)

    async def attach(self, owner: str, pid: int) -> Attachment:
        """A replica of this node comes to stay; its leases are reclaimed when its process is gone."""
        self._owners[owner] = (pid, process_started(pid))
        if self._superseded:  # back to the options of this agent: the node's name is its again
            self._superseded, self._term = False, time.time_ns()
            self._changed.set()
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
        directory, known = self._find_directory(), 0
        while True:
            if not self._superseded:
                try:
                    known = await self._speak(directory, known)
                except RayError as error:
                    _log.warning("directory unreachable: %s", type(error).__name__)
                    directory, known = self._find_directory(), 0
            self._bury_the_dead()
            if time.monotonic() - self._last_owner > LINGER_S:
                self._slab.unlink()
                self._leave()
            try:
                await asyncio.wait_for(self._changed.wait(), HEARTBEAT_S)
            except TimeoutError:
                continue
            self._changed.clear()

    async def _speak(self, directory: ActorHandle, known: int) -> int:
        """One round of messages; `known` is the term under which the directory knows us, 0 if it does not."""
        term = self._term
        if known != term:
            outcome = await directory.register.remote(self._node, term)
            if outcome is not Outcome.STALE:
                outcome = await self._resync(directory, term)
        else:
            outcome = await self._announce(directory, term)
        if outcome is Outcome.GAP:
            outcome = await self._resync(directory, term)
        if outcome is Outcome.STALE and term == self._term:
            _log.warning("another agent has taken the place of this one")
            self._superseded = True
        return 0 if outcome in (Outcome.UNKNOWN, Outcome.STALE) else term

    async def _announce(self, directory: ActorHandle, term: int) -> Outcome:
        changes: Changes = self._tier.drain_changes()
        outcome: Outcome = await directory.heartbeat.remote(self._node, term)
        if changes.added or changes.removed:
            outcome = await directory.announce.remote(
                self._node, term, changes.seq, changes.added, changes.removed
            )
        stats = self._tier.stats()
        gauges = {
            "cpu_tier_blocks": float(stats.visible),
            "cpu_tier_capacity": float(stats.capacity),
            "cpu_tier_evicted": float(stats.blocks_evicted),
        }
        if outcome is not Outcome.STALE:
            await directory.report.remote(f"{AGENT}{self._node}", term, gauges)
        return outcome

    async def _resync(self, directory: ActorHandle, term: int) -> Outcome:
        manifest = self._tier.manifest()
        outcome: Outcome = await directory.resync.remote(self._node, term, manifest.seq, manifest.keys)
        return outcome


def node_agent(application: str, slot_bytes: int, nbytes: int, folder: str | None) -> ActorHandle:
    """The agent of the node we run on for a slab of that size and place, created if there is none."""
    node = ray.get_runtime_context().get_node_id()
    remote = ray.remote(num_cpus=0, max_restarts=-1)(NodeAgent)
    return remote.options(
        name=f"{application}:node:{node}:{slot_bytes}:{nbytes}:{folder or ''}",
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
    ).remote(application, node, slot_bytes, nbytes, folder)
