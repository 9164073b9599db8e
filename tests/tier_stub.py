"""Nodes with tiers for the tests of their commands: agents that hold sets of keys, and a real directory that hears of
them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from deployments.api.backend import BlockIdentity
from deployments.tier_control import FanOut, TierAgent
from engine.errors import KvtideError
from kv_tiers.directory import DirectoryState, DirectoryStats, Match, Place
from kv_tiers.keys import BlockKey, Fingerprint
from kv_tiers.shards import join_stats
from kv_tiers.store_ports import Cleared, PinRefused, joined

IDENTITY = BlockIdentity(Fingerprint(bytes(range(32))), 4, 1000)


class StubAgent:
    """`TierAgent` whose tiers are sets of keys of any size, and remembers pins.

    `trouble` is what every call raises; `hangs`: none answers. `stuck`: tiers that do not let go of anything. `full`:
    why nothing can be pinned.
    """

    def __init__(self, **tiers: Sequence[BlockKey]) -> None:
        self.tiers: dict[str, set[BlockKey]] = {name: set(keys) for name, keys in tiers.items()}
        self.pins: list[tuple[tuple[BlockKey, ...], float | None]] = []
        self.trouble: Exception | None = None
        self.hangs = False
        self.stuck: set[str] = set()
        self.full: str | None = None
        self.calls: list[str] = []
        self.holds: list[str] = []

    async def pin(self, keys: Sequence[BlockKey], ttl_s: float | None) -> dict[str, int] | PinRefused:
        await self._heard("pin")
        if self.full is not None:
            return PinRefused(self.full)
        self.pins.append((tuple(keys), ttl_s))
        return self._count(keys, self.tiers)

    async def unpin(self, keys: Sequence[BlockKey]) -> dict[str, int]:
        await self._heard("unpin")
        chains = [chain for chain, _ in self.pins]
        if tuple(keys) not in chains:
            return dict.fromkeys(self.tiers, 0)
        del self.pins[chains.index(tuple(keys))]
        return self._count(keys, self.tiers)

    async def prefetch(self, keys: Sequence[BlockKey]) -> int:
        await self._heard("prefetch")
        below = set().union(*self.tiers.values())
        for run, key in enumerate(keys):
            if key not in below:
                return run
            self.tiers["cpu"].add(key)
        return len(keys)

    async def hold(self, name: str, keys: Sequence[BlockKey] | None, seconds: float) -> None:
        await self._heard("hold")
        self.holds.append(name)

    async def release(self, name: str) -> None:
        await self._heard("release")
        self.holds.remove(name)

    async def evict(self, keys: Sequence[BlockKey], tiers: Sequence[str]) -> dict[str, int]:
        await self._heard("evict")
        there = [name for name in tiers if name in self.tiers]
        counts = self._count(keys, there)
        for name in there:
            self.tiers[name] -= set(keys)
        return counts

    async def flush(self, tiers: Sequence[str]) -> dict[str, Cleared]:
        await self._heard("flush")
        cleared = {}
        for name in [name for name in tiers if name in self.tiers]:
            held = len(self.tiers[name])
            cleared[name] = Cleared(0, held) if name in self.stuck else Cleared(held, 0)
            if name not in self.stuck:
                self.tiers[name].clear()
        return cleared

    async def tier_stats(self) -> dict[str, dict[str, float]]:
        await self._heard("tier_stats")
        return {
            name: {
                "blocks": len(keys),
                "capacity": 100,
                "slot_bytes": 4096,
                "hits": 3,
                "misses": 1,
                "open": 0.0,
            }
            for name, keys in self.tiers.items()
        }

    async def where(self, keys: Sequence[BlockKey]) -> dict[str, list[bool]]:
        await self._heard("where")
        return {name: [key in held for key in keys] for name, held in self.tiers.items()}

    async def _heard(self, call: str) -> None:
        self.calls.append(call)
        if self.hangs:
            await asyncio.Event().wait()
        if self.trouble is not None:
            raise self.trouble

    def _count(self, keys: Sequence[BlockKey], tiers: Sequence[str] | Mapping[str, object]) -> dict[str, int]:
        return {name: sum(key in self.tiers[name] for key in keys) for name in tiers}


class StubDirectory:
    """`DirectoryView` over a real `DirectoryState` that is told of the agents' tiers whenever it is asked.

    `away`: does not answer.
    """

    def __init__(self, agents: Mapping[str, StubAgent]) -> None:
        self.agents = agents
        self.away = False
        self._state = DirectoryState(5.0, epoch=9, began=-1e3)
        self._seq = 0

    def begin_anew(self) -> None:
        """Another life of it, which no node has told anything."""
        now = asyncio.get_running_loop().time()
        self.agents, self._state = {}, DirectoryState(5.0, epoch=10, began=now)

    async def addresses(self) -> dict[str, str]:
        return {} if self.away else self._told().addresses()

    async def stats(self) -> DirectoryStats:
        now = asyncio.get_running_loop().time()
        return join_stats([None if self.away else self._told().stats(now)])

    async def find(self, prefix: str, limit: int) -> list[Match]:
        return [] if self.away else self._told().find(prefix, limit)

    def _told(self) -> DirectoryState:
        self._seq += 1
        shared: set[BlockKey] = set()
        for node, agent in self.agents.items():
            for tier, keys in agent.tiers.items():
                if tier == "redis":
                    shared |= keys
                    continue
                self._state.register(Place(node, tier), 1, 0.0, f"agent of {node}")
                self._state.resync(Place(node, tier), 1, self._seq, joined(sorted(keys)), True, True)
        self._state.renew_shared(Place("", "redis"), self._seq, 0.0)
        self._state.announce_shared(Place("", "redis"), self._seq, joined(sorted(shared)), b"")
        return self._state


class StubNodes:
    """A real `FanOut` over stub agents by node name. `identity` may be an error to raise."""

    def __init__(self, **agents: StubAgent) -> None:
        self.agents = agents
        self.directory = StubDirectory(agents)
        self.identity: BlockIdentity | KvtideError = IDENTITY
        self.gone: set[str] = set()
        self.control = self.made(call_s=30.0)

    def made(self, *, call_s: float, configured: Sequence[str] = (), settle_s: float = 5.0) -> FanOut:
        """Commands over these nodes, with so much patience."""
        return FanOut(
            self.directory,
            self._find,
            self._identity,
            configured=configured,
            settle_s=settle_s,
            shards=2,
            call_s=call_s,
            long_call_s=call_s,
        )

    async def _find(self, address: str) -> TierAgent:
        node = address.removeprefix("agent of ")
        if node in self.gone:
            raise ValueError(f"no actor {address}")
        return self.agents[node]

    async def _identity(self) -> BlockIdentity:
        if isinstance(self.identity, KvtideError):
            raise self.identity
        return self.identity
