"""The node agent: one per node, owns the CPU slab and the tiers below it, tells the directory, lends to other nodes.

Replicas on the node map the slab and copy bytes themselves; only small messages come here. It survives replica
restarts, so a replica that dies or is scaled down does not lose the cache. Without it everything is a miss.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deployments.directory import (
    AGENT,
    HEARTBEAT_S,
    LINGER_S,
    NAMESPACE,
    DirectoryClient,
    end_process_on_failure,
)
from deployments.node_announcer import Announcer, Listener
from deployments.node_figures import gauges, tier_figures
from deployments.node_garbage import OldObjects
from deployments.node_idle import IdleShare
from deployments.node_options import NodeOptions
from deployments.node_tiers import LowerTiers, Make, tier_makers
from deployments.peers import Peers, find_agent, open_exchange
from deployments.slabs import slab_folder
from kv_tiers.books import SlotBooks
from kv_tiers.directory import Outcome
from kv_tiers.keys import BlockKey
from kv_tiers.slab import SUFFIX, Slab, remove_stale
from kv_tiers.store import TieredStore
from kv_tiers.store_ports import Cleared, DirectoryPort, PinRefused, parted
from kv_tiers.tier import ReadLease, WriteLease
from kv_tiers.transfer.slab_peer import SlabExchange
from policies.tiering import make_admission, make_policy
from policies.tiering.speed import Speeds

_log = logging.getLogger("kvtide.node")

LEND_WORTH_S = 1.0
"""What a borrower's blocks are worth to us: so long, at most, their load from our lower tiers may take."""

_GATHER_S = 0.05
"""Changes within so long are one message to the directory."""


class NodeDirectory(DirectoryPort, Listener, Protocol):
    """What an agent needs of `DirectoryClient`."""

    async def addresses(self) -> dict[str, str]: ...
    async def report(self, source: str, incarnation: int, values: Mapping[str, float]) -> Outcome: ...


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
    """A `TieredStore` and its slab on one node. An async actor: one event loop, so calls do not interleave.

    Replicas `attach` first and name the agent's incarnation in every later call, so that a lease of an earlier life
    (whose slab is gone) is never mistaken for one of this. None answers a call of another incarnation.

    Other options make another agent, under another actor name. In the directory the node's name belongs to the agent
    that was attached to last: told STALE, the older one says nothing more, lets go of the tiers below its slab, serves
    the replicas it has, and leaves `LINGER_S` after the last of them has gone, like any other.
    """

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self,
        options: NodeOptions,
        node: str,
        directory: NodeDirectory | None = None,
        leave: Callable[[], None] = _leave,
        makers: Callable[[NodeOptions, tuple[int, int], Callable[[], float]], dict[str, Make]] = tier_makers,
        exchange: Callable[[str, Slab, int], SlabExchange | None] = open_exchange,
        find: Callable[[str], ActorHandle] = find_agent,
    ) -> None:
        self._options = options
        self._node = node
        self._leave = leave
        self._incarnation = self._term = time.time_ns()
        self._superseded = False
        clock = asyncio.get_running_loop().time
        self._slab = _make_slab(options, self._incarnation)
        self._directory: NodeDirectory = directory or DirectoryClient(
            options.application, options.directory_shards
        )
        name = f"{node}#{os.getpid()}"
        self._peers = Peers(node, lambda: exchange(name, self._slab, options.slot_bytes), find)
        slots = options.cpu_bytes // options.slot_bytes
        books = SlotBooks(
            slots,
            options.slot_bytes,
            policy=make_policy(options.policy, slots),
            clock=clock,
            ttl_s=options.ttl_s,
            tenant_share=options.tenant_share,
        )
        self._store = TieredStore(
            books,
            self._slab,
            [],
            node=node,
            directory=self._directory,
            peers=self._peers.of,
            admission=make_admission(options.admission, slots + options.lower_slots),
            speeds=Speeds(),
            clock=clock,
            at_once=options.admission == "always",
            idle_share=IdleShare(),
        )
        self._announcer = Announcer(
            self._directory, node, options.actor_name(node), self._store.journals, self._shared_incarnation
        )
        self._lower = LowerTiers(
            makers(options, (self._slab.address, self._slab.nbytes), clock), self._store.set_lower
        )
        self._owners: dict[str, tuple[int, str | None]] = {}
        self._last_owner = time.monotonic()
        self._changed = asyncio.Event()
        self._tasks = [
            self._store.start(),
            asyncio.create_task(self._lower.keep_running()),
            asyncio.create_task(self._keep_house()),
            asyncio.create_task(self._tell_directory()),
        ]
        for task in self._tasks:
            task.add_done_callback(end_process_on_failure)

    # What replicas use.

    async def attach(self, owner: str, pid: int) -> Attachment:
        """A replica of this node comes to stay; its leases are reclaimed when its process is gone."""
        self._owners[owner] = (pid, process_started(pid))
        if self._superseded:  # back to the options of this agent: the node's name is its again
            self._superseded, self._term = False, time.time_ns()
            self._lower.resume()
            self._changed.set()
        return Attachment(self._incarnation, str(self._slab.path))

    async def prepare_read(
        self, incarnation: int, keys: Sequence[BlockKey], owner: str, worth_s: float = 0.0
    ) -> ReadLease | None:
        if not self._serves(incarnation, owner):
            return None
        lease = await self._store.prepare_read(keys, owner, worth_s=worth_s)
        if owner not in self._owners:  # it died while we loaded: nobody would end this lease
            self._store.complete_read(lease.id)
            return None
        return lease

    async def complete_read(self, incarnation: int, lease_id: int) -> None:
        if incarnation == self._incarnation:
            self._store.complete_read(lease_id)

    async def prepare_write(
        self, incarnation: int, keys: Sequence[BlockKey], owner: str, tenant: str | None = None
    ) -> WriteLease | None:
        if not self._serves(incarnation, owner):
            return None
        lease = await self._store.prepare_write(keys, owner, tenant=tenant)
        if owner not in self._owners:  # it died meanwhile: nobody would end this lease
            await self._store.complete_write(lease.id, ())
            return None
        return lease

    async def complete_write(
        self, incarnation: int, lease_id: int, written: Sequence[BlockKey]
    ) -> tuple[BlockKey, ...]:
        if incarnation != self._incarnation:
            return ()
        visible = await self._store.complete_write(lease_id, written)
        self._changed.set()
        return visible

    async def drop(self, incarnation: int, keys: Sequence[BlockKey]) -> int:
        """Also from the tiers below; of an earlier life's slab nothing is left to drop."""
        return await self._store.drop(keys) if incarnation == self._incarnation else 0

    # What other nodes' agents use.

    async def lend(self, keys: bytes, borrower: str) -> bytes | None:
        """A `SlabLoan` of the leading run; None where slabs cannot be read from outside, or for no list of keys."""
        exchange = await self._peers.exchange()
        try:
            wanted = parted(keys)
        except ValueError:
            return None
        if exchange is None:
            return None
        loan = await self._store.lend(wanted, f"{AGENT}{borrower}", worth_s=LEND_WORTH_S)
        self._peers.lent(self._store.stats().lent)
        return exchange.loan(loan)

    async def give_back(self, lease: int) -> None:
        self._store.give_back(lease)
        self._peers.lent(self._store.stats().lent)

    # What users command, through the gateway. Keys of a call are one chain.

    async def pin(self, keys: Sequence[BlockKey], ttl_s: float | None = None) -> dict[str, int] | PinRefused:
        return self._store.pin(keys, ttl_s)

    async def unpin(self, keys: Sequence[BlockKey]) -> dict[str, int]:
        return self._store.unpin(keys)

    async def prefetch(self, keys: Sequence[BlockKey]) -> int:
        loaded = await self._store.prefetch(keys)
        self._changed.set()
        return loaded

    async def hold(self, name: str, keys: Sequence[BlockKey] | None, seconds: float) -> None:
        self._store.hold(name, keys, seconds)

    async def release(self, name: str) -> None:
        self._store.release(name)

    async def evict(self, keys: Sequence[BlockKey], tiers: Sequence[str]) -> dict[str, int]:
        """What leaves the slab is written down first if a tier below is not named."""
        keep = "cpu" in tiers and any(tier.name not in tiers for tier in self._store.lower)
        evicted = await self._store.evict(keys, tiers, keep=keep)
        self._changed.set()
        return evicted

    async def flush(self, tiers: Sequence[str]) -> dict[str, Cleared]:
        cleared = await self._store.flush(tiers)
        self._changed.set()
        return cleared

    async def write_down(self) -> None:
        """Return when what is queued for the tiers below is there."""
        await self._store.write_down()

    async def tier_stats(self) -> dict[str, dict[str, float]]:
        """Per tier the figures of `metrics.TIER_GAUGES`, and `slot_bytes`."""
        return tier_figures(self._store, self._options.slot_bytes, self._lower.failed)

    async def where(self, keys: Sequence[BlockKey]) -> dict[str, list[bool]]:
        return self._store.holds(keys)

    # Its own life.

    def _serves(self, incarnation: int, owner: str) -> bool:
        """Whether a lease would be ended: of this life, for an owner whose death would be noticed."""
        return incarnation == self._incarnation and owner in self._owners

    async def close(self) -> None:
        """Let go of everything; the tiers below keep what they have."""
        for task in self._tasks:
            task.cancel()
        await self._store.close()
        await self._lower.release()
        self._peers.close()
        self._slab.unlink()

    def _bury_the_dead(self) -> None:
        """Reclaim what dead replicas held. A stalled one is not dead: nothing else fences its writes."""
        for owner, (pid, started) in list(self._owners.items()):
            if started is None or process_started(pid) != started:  # None: dead before it was attached
                del self._owners[owner]
                reclaimed = self._store.release_owner(owner)
                _log.warning("%s died, %d leases reclaimed", owner, reclaimed.leases)
        if self._owners:
            self._last_owner = time.monotonic()

    async def _keep_house(self) -> None:
        """Once per heartbeat: end what has had its time; leave when forgotten."""
        old = OldObjects()
        while time.monotonic() - self._last_owner <= LINGER_S:
            old.set_aside()
            self._bury_the_dead()
            self._store.sweep()
            self._peers.lent(self._store.stats().lent)
            await asyncio.sleep(HEARTBEAT_S)
        self._tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        await self.close()
        self._leave()

    async def _tell_directory(self) -> None:
        """Tell it of changes as they come, and once per heartbeat that we live."""
        beat_at = 0.0
        while True:
            beat = time.monotonic() >= beat_at
            if beat:
                beat_at = time.monotonic() + HEARTBEAT_S
            if not self._superseded:
                await self._speak(beat)
            try:
                async with asyncio.timeout(beat_at - time.monotonic()):
                    await self._changed.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(min(_GATHER_S, HEARTBEAT_S))
            self._changed.clear()

    async def _speak(self, beat: bool) -> None:
        """One round of messages; told that a newer agent has our node, be quiet from then on."""
        term = self._term
        outcome = await self._announcer.speak(term, beat=beat)
        if outcome is Outcome.STALE:
            if term == self._term:
                _log.warning("another agent has taken the place of this one")
                self._superseded = True
                await self._lower.release()
        elif beat:
            self._peers.heard_of(await self._directory.addresses())
            await self._directory.report(f"{AGENT}{self._node}", term, gauges(self._store))

    def _shared_incarnation(self, name: str) -> int | None:
        tier = next((tier for tier in self._store.lower if tier.name == name), None)
        return getattr(tier, "incarnation", 0) or None


def _make_slab(options: NodeOptions, incarnation: int) -> Slab:
    place = slab_folder(options.cpu_folder, options.cpu_bytes)
    remove_stale(place)
    return Slab.create(place / f"kvtide-{os.getpid()}-{incarnation}{SUFFIX}", options.cpu_bytes)


def node_agent(options: NodeOptions) -> ActorHandle:
    """The agent of the node we run on with these options, created if there is none."""
    node = ray.get_runtime_context().get_node_id()
    remote = ray.remote(num_cpus=0, max_restarts=-1)(NodeAgent)
    return remote.options(
        name=options.actor_name(node),
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
    ).remote(options, node)
