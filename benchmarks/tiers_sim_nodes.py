"""Simulated nodes: the real stores, policies, admission, announcers and directory over simulated time, links, media."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.tiers_sim_links import Copies, Link, NoBytes, RedisServer, SimNvme, SimRedis
from benchmarks.tiers_sim_routers import Router, runs_by_node
from benchmarks.tiers_sim_traces import Trace
from deployments.node_announcer import Announcer
from kv_tiers.booked import BookedTier
from kv_tiers.books import SlotBooks
from kv_tiers.directory import DirectoryState, Located, Outcome, Place
from kv_tiers.keys import BlockKey
from kv_tiers.store import TieredStore
from kv_tiers.store_ports import joined
from kv_tiers.tier import Fetched
from policies.tiering import make_admission, make_policy
from policies.tiering.speed import Speed, Speeds

SOURCES = ("cpu", "nvme", "redis", "peer", "computed")
"""Where a request's block came from: the own slab, a load into it, another node's tiers, or nowhere."""

LINKS: Mapping[str, Speed] = {
    "nvme": Speed(100e-6, 6e9),
    "redis": Speed(500e-6, 5e9),
    "peer": Speed(100e-6, 20e9),
    "peer+nvme": Speed(200e-6, 6e9),
}
"""An NVMe per node, one Redis for all behind 50 Gbit/s, 200 Gbit/s between nodes; nodes have measured them."""

ANNOUNCE_EVERY_S = 1.0
LEND_WORTH_S = 1.0  # as `deployments.node` has it
_DIRECTORY_S = 1e-3  # a question and its answer
_QUIET_S = 60.0  # after so long without a request or a borrower a node has nothing to say any more
_REPLICA = "replica"


@dataclass(frozen=True)
class Setup:
    """One run. Blocks per node, 0: no such tier. `prefill`: tokens computed per second, by one request; 0: at once."""

    nodes: int
    cpu: int
    nvme: int = 0
    redis: int = 0
    router: str = "balanced"
    policy: str = "reuse"
    admission: str = "auto"
    slot_bytes: int = 64 << 20
    block_tokens: int = 512
    prefill: float = 10_000.0

    def compute_s(self, blocks: int) -> float:
        """Seconds that so many blocks take."""
        return blocks * self.block_tokens / self.prefill if self.prefill else 0.0


class SimDirectory:
    """The directory's state behind a round trip, for stores; for announcers, which do not wait for it, without."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.state = DirectoryState(lease_s=1e9, epoch=1)
        self._clock = clock

    async def locate(self, keys: bytes) -> Located:
        await asyncio.sleep(_DIRECTORY_S)
        return self.state.locate(keys)

    async def forget(self, place: Place, keys: bytes) -> int:
        await asyncio.sleep(_DIRECTORY_S)
        return self.state.forget(place, keys)

    async def copies(self, keys: bytes) -> bytes:
        await asyncio.sleep(_DIRECTORY_S)
        return self.state.copies(keys)

    async def register(self, place: Place, incarnation: int, address: str = "") -> Outcome:
        return self.state.register(place, incarnation, self._clock(), address)

    async def heartbeat(self, node: str, incarnation: int) -> Outcome:
        return self.state.heartbeat(node, incarnation, self._clock())

    async def announce(
        self, place: Place, incarnation: int, seq: int, added: bytes, removed: bytes
    ) -> Outcome:
        return self.state.announce(place, incarnation, seq, added, removed)

    async def resync(
        self, place: Place, incarnation: int, seq: int, keys: bytes, first: bool, last: bool
    ) -> Outcome:
        return self.state.resync(place, incarnation, seq, keys, first, last)

    async def renew_shared(self, place: Place, incarnation: int) -> Outcome:
        return self.state.renew_shared(place, incarnation, self._clock())

    async def announce_shared(
        self, place: Place, incarnation: int, added: bytes, removed: bytes, whole: bool = True
    ) -> Outcome:
        return self.state.announce_shared(place, incarnation, added, removed, whole)


class _SimPeer:
    """`Peer`: another node's slab, read as `SlabPeer` reads it."""

    def __init__(self, lender: SimNode, borrower: SimNode) -> None:
        self._lender = lender
        self._borrower = borrower

    async def get(self, keys: Sequence[BlockKey], offsets: Sequence[int]) -> list[Fetched]:
        lender = self._lender
        lender.stir()
        loan = await lender.store.lend(keys, self._borrower.name, worth_s=LEND_WORTH_S)
        run = min(len(loan.offsets), len(keys))
        try:
            await lender.sends.carry(run * lender.store.slot_bytes)
        finally:
            kept = lender.store.give_back(loan.id)
        if kept:
            self._borrower.arrived("peer", keys[:run])
        answers = [Fetched.HIT if kept else Fetched.FAILED] * run
        first = [] if run == len(keys) else [Fetched.FAILED if loan.more else Fetched.MISS]
        return answers + first + [Fetched.FAILED] * (len(keys) - run - len(first))


class SimNode:
    """A node's store and its replicas' requests. `found`: blocks by source."""

    def __init__(self, name: str, setup: Setup, cluster: Cluster) -> None:
        clock = asyncio.get_running_loop().time
        self.name = name
        self.quiet_at = 0.0
        self.found: Counter[str] = Counter()
        self.sends = Link(LINKS["peer"])
        self.nvme_reads, self.nvme_writes = Link(LINKS["nvme"]), Link(LINKS["nvme"])
        self.nvme: SimNvme | None = None
        self._setup = setup
        self._cluster = cluster
        self._brought: dict[BlockKey, str] = {}

        def books(blocks: int) -> SlotBooks:
            policy = make_policy(setup.policy, blocks)
            return SlotBooks(blocks, setup.slot_bytes, policy=policy, clock=clock)

        self.lower: list[BookedTier] = []
        if setup.nvme:
            self.nvme = SimNvme(books(setup.nvme), self.nvme_reads, self.nvme_writes, self.arrived)
            self.lower.append(self.nvme)
        if setup.redis:
            self.lower.append(SimRedis(books(setup.redis), cluster.redis, self.arrived))
        self.books = books(setup.cpu)
        self.store = TieredStore(
            self.books,
            cluster.memory,
            self.lower,
            node=name,
            directory=cluster.directory,
            peers=self._peer,
            admission=make_admission(setup.admission, setup.cpu + setup.nvme + setup.redis),
            speeds=Speeds(LINKS),
            clock=clock,
            at_once=setup.admission == "always",
        )
        self.announcer = Announcer(cluster.directory, name, name, self.store.journals, lambda tier: 1)

    async def start(self) -> None:
        """Open the tiers and begin the write-down."""
        for tier in self.lower:
            await tier.start()
        self.store.start()
        await self.announcer.speak(1)

    async def serve(self, chain: Sequence[BlockKey]) -> None:
        """A request: read what there is, compute the rest, write it."""
        self.stir()
        here = self.books.longest_run(chain)
        worth_s = self._setup.compute_s(len(chain))
        lease = await self.store.prepare_read(chain, _REPLICA, worth_s=worth_s)
        run = len(lease.entries)
        self.found["cpu"] += here
        # What came meanwhile and nobody loaded was computed by another request: it is in the slab as well.
        self.found.update(self._brought.get(key, "cpu") for key in chain[here:run])
        self.found["computed"] += len(chain) - run
        self.store.complete_read(lease.id)
        if compute_s := self._setup.compute_s(len(chain) - run):
            await asyncio.sleep(compute_s)
        for key in chain[run:]:
            self._brought.pop(key, None)
        writes = await self.store.prepare_write(chain, _REPLICA)
        await self.store.complete_write(writes.id, [entry.key for entry in writes.entries])

    def stir(self) -> None:
        """Something is asked of the node."""
        self.quiet_at = asyncio.get_running_loop().time() + _QUIET_S

    def arrived(self, source: str, keys: Iterable[BlockKey]) -> None:
        """Blocks were loaded from there."""
        self._brought.update(dict.fromkeys(keys, source))

    def _peer(self, node: str) -> _SimPeer:
        return _SimPeer(self._cluster.by_name[node], self)


class Cluster:
    """All nodes, the directory they share, and the router before them. Make it in a running loop."""

    def __init__(self, setup: Setup, router: Router) -> None:
        clock = asyncio.get_running_loop().time
        self.memory = NoBytes(setup.slot_bytes)
        self.redis = RedisServer(LINKS["redis"])
        self.directory = SimDirectory(clock)
        self.nodes = [SimNode(f"node-{number}", setup, self) for number in range(setup.nodes)]
        self.by_name = {node.name: node for node in self.nodes}
        self._numbers = {node.name: number for number, node in enumerate(self.nodes)}
        self._router = router
        self._work = [0] * setup.nodes
        self._routed = 0

    async def replay(self, trace: Trace) -> None:
        """Serve every request at its time, and wait until all is at rest."""
        loop = asyncio.get_running_loop()
        for node in self.nodes:
            await node.start()
        speaking = loop.create_task(self._speak())
        began = loop.time()
        async with asyncio.TaskGroup() as requests:
            for request in trace.requests:
                if (pause := began + request.time - loop.time()) > 0:
                    await asyncio.sleep(pause)
                requests.create_task(self._route(request.chain).serve(request.chain))
        for node in self.nodes:
            await node.store.settle()
            await node.store.write_down()
            await node.store.close()
        speaking.cancel()
        await asyncio.gather(speaking, return_exceptions=True)
        for node in self.nodes:
            node.store.check()

    def _route(self, chain: Sequence[BlockKey]) -> SimNode:
        """By what the directory has heard."""
        located = self.directory.state.locate(joined(chain))
        runs = runs_by_node(located, self._numbers)
        chosen = self._router(runs, self._work, self._routed)
        self._work[chosen] += len(chain) - runs.get(chosen, 0)
        self._routed += 1
        return self.nodes[chosen]

    async def _speak(self) -> None:
        while True:
            await asyncio.sleep(ANNOUNCE_EVERY_S)
            now = asyncio.get_running_loop().time()
            for node in self.nodes:
                if now < node.quiet_at:
                    await node.announcer.speak(1, beat=False)
            self.directory.state.expire(now)

    def copies(self) -> dict[str, Copies]:
        """Writes to all nodes' NVMe together, and to Redis."""
        nvme = Copies()
        for node in self.nodes:
            if node.nvme is not None:
                nvme.written += node.nvme.copies.written
                nvme.useful += node.nvme.copies.useful
        return {"nvme": nvme, "redis": self.redis.copies}
