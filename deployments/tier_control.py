"""Commands over the tiers of all nodes: asked of every node agent at once, each for a bounded time.

The gateway finds agents by the actor names that they have given to the directory. A node that does not answer is named
in the result; the others' answers count. While the directory is away the nodes that it knew last are asked.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from deployments.api.backend import (
    DIRECTORY,
    SHARED_TIERS,
    TIERS,
    BlockIdentity,
    Flushed,
    FoundBlock,
    Matches,
    NodeCounts,
    NotCleared,
    Pinned,
    Prefetched,
    Silence,
    TierPlace,
    TierReport,
    Whereabouts,
)
from deployments.directory import LEASE_S, NAMESPACE
from engine.errors import InvalidRequest
from kv_tiers.directory import DirectoryStats, Match
from kv_tiers.keys import BlockKey
from kv_tiers.store_ports import Cleared, PinRefused

_log = logging.getLogger("kvtide.tiers")
Answer = TypeVar("Answer")

_LOOK_S = 0.05
_AWAY = Silence(DIRECTORY, "it does not answer")
_EMPTY = Silence(DIRECTORY, "it names no node with tiers")
_YOUNG = Silence(DIRECTORY, "it has begun anew and may not know every node yet")


class TierAgent(Protocol):
    """What a node agent can be told about its tiers. Keys of a call are one chain, first block first."""

    async def pin(self, keys: Sequence[BlockKey], ttl_s: float | None) -> Mapping[str, int] | PinRefused:
        """Pin blocks in every tier that has them, for `ttl_s` at most; → tier to blocks pinned by this call."""
        ...

    async def unpin(self, keys: Sequence[BlockKey]) -> Mapping[str, int]:
        """End one pin per block and tier; → tier to pins ended."""
        ...

    async def prefetch(self, keys: Sequence[BlockKey]) -> int:
        """Bring the longest leading run that any tier or node has into the CPU tier; → leading blocks there now."""
        ...

    async def hold(self, name: str, keys: Sequence[BlockKey] | None, seconds: float) -> None:
        """Load none of these blocks (None: nothing) until `release` of that name, for `seconds` at most."""
        ...

    async def release(self, name: str) -> None:
        """End a hold, if there is one."""
        ...

    async def evict(self, keys: Sequence[BlockKey], tiers: Sequence[str]) -> Mapping[str, int]:
        """Make blocks invisible in those of these tiers that there are; → tier to blocks that were visible."""
        ...

    async def flush(self, tiers: Sequence[str]) -> Mapping[str, Cleared]:
        """Clear those of these tiers that there are; → tier to blocks that went and blocks still shown."""
        ...

    async def tier_stats(self) -> Mapping[str, Mapping[str, float]]:
        """Tier to figure to value; the figures are those of `metrics.TIER_GAUGES` and `slot_bytes`."""
        ...

    async def where(self, keys: Sequence[BlockKey]) -> Mapping[str, Sequence[bool]]:
        """Tier to one answer per key: whether it is there."""
        ...


class DirectoryView(Protocol):
    """The part of `DirectoryClient` that is needed here. Never raises; empty and of epoch 0 where it is away."""

    async def addresses(self) -> dict[str, str]:
        """Node to its agent's address."""
        ...

    async def stats(self) -> DirectoryStats:
        """The directory's figures, over all shards."""
        ...

    async def find(self, prefix: str, limit: int) -> list[Match]:
        """At most `limit` blocks whose key begins with these hexadecimal digits, by key."""
        ...


@dataclass(frozen=True)
class _Asked(Generic[Answer]):
    """Node to what it said, and who said nothing."""

    answers: dict[str, Answer]
    silent: tuple[Silence, ...]


class FanOut:
    """`TierControl` over the agents of all nodes."""

    def __init__(
        self,
        directory: DirectoryView,
        find_agent: Callable[[str], Awaitable[TierAgent]],
        identity: Callable[[], Awaitable[BlockIdentity]],
        *,
        configured: Sequence[str] = (),
        shards: int = 1,
        call_s: float = 5.0,
        long_call_s: float = 60.0,
        settle_s: float = LEASE_S,
    ) -> None:
        """`find_agent` finds an agent by its address; it, like calls, raises `RayError` or ValueError for one that is
        gone. `configured`: the tiers that every node should have. `shards`: of the directory. `call_s` bounds a
        call, `long_call_s` one that moves or removes blocks. `settle_s`: a directory that is so old has heard of every
        live node.
        """
        self._directory = directory
        self._find_agent = find_agent
        self._identity = identity
        self._configured = frozenset(configured)
        self._shards = shards
        self._call_s, self._long_call_s = call_s, long_call_s
        self._settle_s = settle_s
        self._known: Mapping[str, str] = {}

    async def identity(self) -> BlockIdentity:
        return await self._identity()

    async def pin(self, keys: Sequence[BlockKey], ttl_s: float | None = None) -> Pinned:
        asked = await self._ask_all(lambda agent: agent.pin(keys, ttl_s), self._call_s)
        return Pinned(
            {node: said for node, said in asked.answers.items() if not isinstance(said, PinRefused)},
            {node: said.reason for node, said in asked.answers.items() if isinstance(said, PinRefused)},
            asked.silent,
        )

    async def unpin(self, keys: Sequence[BlockKey]) -> NodeCounts:
        return _counts(await self._ask_all(lambda agent: agent.unpin(keys), self._call_s))

    async def evict(self, keys: Sequence[BlockKey], tiers: Sequence[str] = TIERS) -> NodeCounts:
        async with self._held(keys, tiers):
            return _counts(await self._ask_all(lambda agent: agent.evict(keys, tiers), self._long_call_s))

    async def prefetch(self, keys: Sequence[BlockKey], node: str | None = None) -> Prefetched:
        addresses, silent = await self._addresses(everybody=False)
        if node is not None and node not in addresses:
            addresses, silent = await self._addresses(everybody=True)
        if node is not None and node not in addresses:
            valid = ", ".join(sorted(addresses)) or "none, there is no node with tiers"
            raise InvalidRequest(f"node: {node[:128]!a} is no node with tiers; valid: {valid}.", "node")
        if node is None:
            held = await self._ask(addresses, lambda agent: agent.where(keys), self._call_s)
            silent += held.silent
            node = _richest(held.answers)
        if node is None:
            return Prefetched(None, 0, silent)
        there = {node: addresses[node]}
        loaded = await self._ask(there, lambda agent: agent.prefetch(keys), self._long_call_s)
        return Prefetched(node, loaded.answers.get(node, 0), silent + loaded.silent)

    async def flush(self, tiers: Sequence[str] = TIERS) -> Flushed:
        async with self._held(None, tiers):
            asked = await self._ask_all(lambda agent: agent.flush(tiers), self._long_call_s)
        nodes = {
            node: {tier: each.blocks for tier, each in cleared.items()}
            for node, cleared in asked.answers.items()
        }
        left = [
            NotCleared(node, tier, f"{each.left} blocks are left")
            for node, cleared in asked.answers.items()
            for tier, each in cleared.items()
            if each.left
        ]
        # One that could not start may find its blocks again when it does.
        left += [
            NotCleared(node, tier, "the tier does not run")
            for node, cleared in asked.answers.items()
            for tier in tiers
            if tier in self._configured and tier not in cleared
        ]
        silent = [NotCleared(each.source, None, each.reason) for each in asked.silent]
        return Flushed(nodes, tuple(dict.fromkeys((*left, *silent, *await self._remembered(tiers)))))

    async def where(self, keys: Sequence[BlockKey]) -> Whereabouts:
        asked = await self._ask_all(lambda agent: agent.where(keys), self._call_s, everybody=False)
        places: list[set[TierPlace]] = [set() for _ in keys]
        for node, held in asked.answers.items():
            for tier, flags in held.items():
                here = TierPlace(None if tier in SHARED_TIERS else node, tier)
                for at, flag in enumerate(flags):
                    if flag:
                        places[at].add(here)
        return Whereabouts(tuple(keys), tuple(map(_in_order, places)), asked.silent)

    async def find(self, prefix: str, limit: int) -> Matches:
        # One more than is shown tells whether there are more.
        found = await self._directory.find(prefix, limit + 1)
        shown = [
            FoundBlock(key, _in_order(TierPlace(place.node or None, place.tier) for place in places))
            for key, places in found[:limit]
        ]
        return Matches(tuple(shown), () if shown else await self._absence(), cut=len(found) > limit)

    async def report(self) -> TierReport:
        asked = await self._ask_all(lambda agent: agent.tier_stats(), self._call_s, everybody=False)
        stats = await self._directory.stats()
        silent, known = asked.silent, None
        if stats.epoch:
            known = stats
        else:
            silent = (*silent, _AWAY)
        return TierReport(asked.answers, known, self._shards, tuple(dict.fromkeys(silent)))

    @asynccontextmanager
    async def _held(self, keys: Sequence[BlockKey] | None, tiers: Sequence[str]) -> AsyncIterator[None]:
        """Inside, no node loads these (None: anything): one that has let go of a block would get it from one that has
        not yet.
        """
        if TIERS[0] not in tiers:  # loads go there only
            yield
            return
        name, most_s = secrets.token_hex(8), self._call_s + self._long_call_s
        addresses, _ = await self._addresses(everybody=True)
        try:
            await self._ask(addresses, lambda agent: agent.hold(name, keys, most_s), self._call_s)
            yield
        finally:
            await self._ask(addresses, lambda agent: agent.release(name), self._call_s)

    async def _absence(self) -> tuple[Silence, ...]:
        """Whether the directory is away."""
        return () if (await self._directory.stats()).epoch else (_AWAY,)

    async def _remembered(self, tiers: Sequence[str]) -> tuple[NotCleared, ...]:
        """What the directory still says of these tiers, after a bounded wait for the nodes' messages."""
        end = asyncio.get_running_loop().time() + self._call_s
        while True:
            stats = await self._directory.stats()
            if not stats.epoch:
                return (NotCleared(_AWAY.source, None, _AWAY.reason),)
            left = {tier: stats.tiers[tier] for tier in tiers if stats.tiers.get(tier)}
            if not left or asyncio.get_running_loop().time() > end:
                return tuple(
                    NotCleared(DIRECTORY, tier, f"it names {n} blocks still") for tier, n in left.items()
                )
            await asyncio.sleep(_LOOK_S)

    async def _addresses(self, *, everybody: bool) -> tuple[Mapping[str, str], tuple[Silence, ...]]:
        """Nodes and their agents; while the directory is away, those that it knew last.

        One that began anew is told of its nodes one after the other. Until all have spoken the old one's count as well.
        `everybody`: wait for that, for a bounded time; otherwise, and where there should be tiers and it names
        nobody, it is said.
        """
        end = asyncio.get_running_loop().time() + self._settle_s + self._call_s
        while True:
            # In this order: the list is of a directory that was so old already.
            stats = await self._directory.stats()
            found = await self._directory.addresses()
            if not stats.epoch:
                return self._known, (_AWAY,)
            young_s = self._settle_s - stats.age_s
            self._known = {**self._known, **found} if young_s > 0 else found
            if young_s <= 0:
                return self._known, (_EMPTY,) if self._configured and not self._known else ()
            left_s = end - asyncio.get_running_loop().time()
            if not everybody or left_s <= 0:
                return self._known, (_YOUNG,)
            await asyncio.sleep(min(young_s, left_s))

    async def _ask_all(
        self,
        call: Callable[[TierAgent], Awaitable[Answer]],
        seconds: float,
        *,
        everybody: bool = True,
    ) -> _Asked[Answer]:
        """`everybody`: also nodes that a directory which began anew has not heard of yet."""
        addresses, silent = await self._addresses(everybody=everybody)
        asked = await self._ask(addresses, call, seconds)
        return _Asked(asked.answers, silent + asked.silent)

    async def _ask(
        self,
        addresses: Mapping[str, str],
        call: Callable[[TierAgent], Awaitable[Answer]],
        seconds: float,
    ) -> _Asked[Answer]:
        async def one(node: str, address: str) -> Answer | Silence:
            try:
                async with asyncio.timeout(seconds):
                    return await call(await self._find_agent(address))
            except (RayError, TimeoutError, ValueError) as error:
                _log.warning("node %s does not answer: %s", node, type(error).__name__)
                return Silence(node, _reason(error, seconds))

        nodes = sorted(addresses)
        said = await asyncio.gather(*(one(node, addresses[node]) for node in nodes))
        return _Asked(
            {node: each for node, each in zip(nodes, said, strict=True) if not isinstance(each, Silence)},
            tuple(each for each in said if isinstance(each, Silence)),
        )


def _counts(asked: _Asked[Mapping[str, int]]) -> NodeCounts:
    return NodeCounts(asked.answers, asked.silent)


def _reason(error: Exception, seconds: float) -> str:
    """For the client: no text of ours or Ray's, which may hold anything."""
    return f"no answer within {seconds:g} s" if isinstance(error, TimeoutError) else "gone or failing"


def _in_order(places: Iterable[TierPlace]) -> tuple[TierPlace, ...]:
    """The fastest tier first, then by node."""
    return tuple(sorted(places, key=lambda place: (TIERS.index(place.tier), place.node or "")))


def _richest(held: Mapping[str, Mapping[str, Sequence[bool]]]) -> str | None:
    """The node that has most blocks in its CPU tier, then in any; of equal ones the first by name."""

    def amount(node: str) -> tuple[int, int]:
        return sum(held[node].get(TIERS[0], ())), sum(map(sum, held[node].values()))

    return max(sorted(held), key=amount, default=None)


class RemoteAgent:
    """`TierAgent` over an agent's actor."""

    def __init__(self, actor: ActorHandle) -> None:
        self._actor = actor

    @classmethod
    async def find(cls, address: str) -> "RemoteAgent":
        """The agent of that actor name. Raises ValueError when there is none."""
        return cls(await asyncio.to_thread(ray.get_actor, address, NAMESPACE))

    async def pin(self, keys: Sequence[BlockKey], ttl_s: float | None) -> Mapping[str, int] | PinRefused:
        pinned: Mapping[str, int] | PinRefused = await self._actor.pin.remote(keys, ttl_s)
        return pinned

    async def unpin(self, keys: Sequence[BlockKey]) -> Mapping[str, int]:
        unpinned: Mapping[str, int] = await self._actor.unpin.remote(keys)
        return unpinned

    async def prefetch(self, keys: Sequence[BlockKey]) -> int:
        return int(await self._actor.prefetch.remote(keys))

    async def hold(self, name: str, keys: Sequence[BlockKey] | None, seconds: float) -> None:
        await self._actor.hold.remote(name, keys, seconds)

    async def release(self, name: str) -> None:
        await self._actor.release.remote(name)

    async def evict(self, keys: Sequence[BlockKey], tiers: Sequence[str]) -> Mapping[str, int]:
        evicted: Mapping[str, int] = await self._actor.evict.remote(keys, tiers)
        return evicted

    async def flush(self, tiers: Sequence[str]) -> Mapping[str, Cleared]:
        cleared: Mapping[str, Cleared] = await self._actor.flush.remote(tiers)
        return cleared

    async def tier_stats(self) -> Mapping[str, Mapping[str, float]]:
        stats: Mapping[str, Mapping[str, float]] = await self._actor.tier_stats.remote()
        return stats

    async def where(self, keys: Sequence[BlockKey]) -> Mapping[str, Sequence[bool]]:
        held: Mapping[str, Sequence[bool]] = await self._actor.where.remote(keys)
        return held
