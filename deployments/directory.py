"""The directory as actors: who holds which blocks, and what each live part last said of itself.

One actor, or several shards of the keys. A correctness device but never needed for correctness: without it everything
is a miss. A shard restarts empty with a new epoch and is refilled by the node agents' manifests. `DirectoryClient`
reaches them by name and looks them up again after a failure.
"""

import asyncio
import heapq
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from kv_tiers.directory import DirectoryState, DirectoryStats, Located, Match, Outcome, Place
from kv_tiers.keys import DIGEST_BYTES
from kv_tiers.shards import join_bytes, join_located, join_outcomes, join_stats, split

_log = logging.getLogger("kvtide.directory")

NAMESPACE = "kvtide"
AGENT = "node:"  # how an agent's name as a source of reports begins
LEASE_S = 5.0
HEARTBEAT_S = 1.0
# With no replica left for this long, the application is gone, and so is the need for its agents and its directory (a
# little later: an agent that loses its directory makes a new one).
LINGER_S = 120.0
_LATER_S = 10.0
# A prompt waits for `locate`, so a shard that is slower counts as gone. An agent's message may wait for the manifests
# of others: a directory that refills must not be told everything again because it is busy.
READER_S = 2.0
AGENT_S = 30.0
PAUSE_S = HEARTBEAT_S  # how long a shard that failed is left alone

Answer = TypeVar("Answer")


def end_process_on_failure(task: asyncio.Task[None]) -> None:
    """For `add_done_callback`: an actor whose loop has failed must end, or Ray would not restart it."""
    if not task.cancelled() and task.exception() is not None:
        _log.critical("the actor's loop failed, its process ends", exc_info=task.exception())
        os._exit(1)


def _leave() -> None:
    ray.kill(ray.get_runtime_context().current_actor)


class DirectoryActor:
    """`DirectoryState` on this process's clock. An async actor: one event loop, so calls do not interleave.

    Shard 0 takes the reports and is needed while replicas report; the others are needed while agents speak.
    """

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self,
        shard: int = 0,
        leave: Callable[[], None] = _leave,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._state = DirectoryState(LEASE_S, epoch=time.time_ns(), began=clock())
        self._shard = shard
        self._leave = leave
        self._heard = self._clock()
        self._leaving = asyncio.create_task(self._leave_when_forgotten())
        self._leaving.add_done_callback(end_process_on_failure)

    # Said by node agents, which stay for a while without replicas. Whatever a node says renews its lease: it is alive
    # while it sends a long manifest.

    async def register(self, place: Place, incarnation: int, address: str = "") -> Outcome:
        return self._state.register(place, incarnation, self._hear_agent(), address)

    async def heartbeat(self, node: str, incarnation: int) -> Outcome:
        now = self._hear_agent()
        outcome = self._state.heartbeat(node, incarnation, now)
        self._state.expire(now)
        return outcome

    async def announce(
        self, place: Place, incarnation: int, seq: int, added: bytes, removed: bytes
    ) -> Outcome:
        await self.heartbeat(place.node, incarnation)
        return self._state.announce(place, incarnation, seq, added, removed)

    async def resync(
        self, place: Place, incarnation: int, seq: int, keys: bytes, first: bool, last: bool
    ) -> Outcome:
        await self.heartbeat(place.node, incarnation)
        return self._state.resync(place, incarnation, seq, keys, first, last)

    async def renew_shared(self, place: Place, incarnation: int) -> Outcome:
        return self._state.renew_shared(place, incarnation, self._hear_agent())

    async def announce_shared(
        self, place: Place, incarnation: int, added: bytes, removed: bytes, whole: bool = True
    ) -> Outcome:
        self._hear_agent()
        return self._state.announce_shared(place, incarnation, added, removed, whole)

    # Asked by agents for their replicas.

    async def locate(self, keys: bytes) -> Located:
        self._now()
        return self._state.locate(keys)

    async def copies(self, keys: bytes) -> bytes:
        self._now()
        return self._state.copies(keys)

    async def forget(self, place: Place, keys: bytes) -> int:
        return self._state.forget(place, keys)

    async def addresses(self) -> dict[str, str]:
        self._now()
        return self._state.addresses()

    async def find(self, prefix: str, limit: int) -> list[Match]:
        self._now()
        return self._state.find(prefix, limit)

    # Said by replicas and agents, asked by gateways.

    async def report(self, source: str, incarnation: int, values: dict[str, float]) -> Outcome:
        if not source.startswith(AGENT):
            self._heard = self._clock()
        return self._state.report(source, incarnation, values, self._now())

    async def stats(self) -> DirectoryStats:
        return self._state.stats(self._now())

    def _now(self) -> float:
        now = self._clock()
        self._state.expire(now)
        return now

    def _hear_agent(self) -> float:
        now = self._clock()
        if self._shard:
            self._heard = now
        return now

    async def _leave_when_forgotten(self) -> None:
        """End this actor when nobody who needs it has spoken for `LINGER_S`, and a little more."""
        while self._now() - self._heard < LINGER_S + _LATER_S:
            await asyncio.sleep(HEARTBEAT_S)
        self._leave()


def directory_actor(application: str, shard: int = 0) -> ActorHandle:
    """A shard of the application's directory, created if there is none. Any replica or agent may be the first."""
    remote = ray.remote(num_cpus=0, max_restarts=-1)(DirectoryActor)
    return remote.options(
        name=f"{application}:directory" + (f":{shard}" if shard else ""),
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
    ).remote(shard)


class _Shard:
    """One actor, found when it is first needed and again when it has failed."""

    def __init__(self, name: str, find: Callable[[], ActorHandle], clock: Callable[[], float]) -> None:
        self._name = name
        self._find = find
        self._clock = clock
        self._found: ActorHandle | None = None
        self._finding = asyncio.Lock()
        self._resume = self._slow_until = -math.inf
        self._slow_s = 0.0

    async def ask(self, method: str, args: Sequence[Any], otherwise: Answer, within_s: float) -> Answer:
        """The actor's answer, or `otherwise` when there is none in time, or was none a moment ago.

        A call that failed is repeated once, with the actor looked up again: all calls may arrive twice. One that took
        too long keeps those away that would not wait longer.
        """
        now = self._clock()
        if now < self._resume or (now < self._slow_until and within_s <= self._slow_s):
            return otherwise
        failed: ActorHandle | None = None
        reason = ""
        try:
            async with asyncio.timeout(within_s):
                for _ in range(2):
                    handle = await self._handle(failed)
                    if handle is None:
                        return otherwise
                    try:
                        answer: Answer = await getattr(handle, method).remote(*args)
                        return answer
                    except RayError as error:
                        failed, reason = handle, repr(error)
        except TimeoutError:
            _log.warning("%s did not answer %s within %g s", self._name, method, within_s)
            self._slow_until, self._slow_s = self._clock() + PAUSE_S, within_s
            return otherwise
        except (RayError, ValueError) as error:  # Ray could not look it up or make it
            reason = repr(error)
        if self._clock() >= self._resume:  # the first of those that failed together
            _log.warning("%s is unreachable: %s", self._name, reason)
        self._found, self._resume = None, self._clock() + PAUSE_S
        return otherwise

    async def _handle(self, failed: ActorHandle | None) -> ActorHandle | None:
        """The actor, found anew if it is `failed`; None if others have found out meanwhile that it is away."""
        async with self._finding:
            if self._clock() < self._resume:
                return None
            if self._found is None or self._found is failed:
                self._found = await asyncio.to_thread(self._find)  # waits for Ray's own services
            return self._found


class DirectoryClient:
    """An application's directory, whatever the number of its shards; see `DirectoryState` for what the calls mean.

    One event loop calls it. It never raises for a shard that cannot be reached: to readers all of its keys are misses,
    to the others the outcome is UNKNOWN, after which a place is registered again.
    """

    def __init__(
        self,
        application: str,
        shards: int = 1,
        find: Callable[[str, int], ActorHandle] = directory_actor,
        clock: Callable[[], float] = time.monotonic,
        reader_s: float = READER_S,
    ) -> None:
        """`find` finds the actor of a shard, or makes it when there is none; `reader_s`: how long a reader waits."""
        self._reader_s = reader_s
        self._shards = [
            _Shard(f"directory shard {shard}", partial(find, application, shard), clock)
            for shard in range(shards)
        ]

    async def register(self, place: Place, incarnation: int, address: str = "") -> Outcome:
        return await self._tell("register", (place, incarnation, address))

    async def heartbeat(self, node: str, incarnation: int) -> Outcome:
        return await self._tell("heartbeat", (node, incarnation))

    async def announce(
        self, place: Place, incarnation: int, seq: int, added: bytes, removed: bytes
    ) -> Outcome:
        dealt = zip(self._split(added), self._split(removed), strict=True)
        return await self._tell_each("announce", [(place, incarnation, seq, *keys) for keys in dealt])

    async def resync(
        self, place: Place, incarnation: int, seq: int, keys: bytes, first: bool, last: bool
    ) -> Outcome:
        dealt = self._split(keys)
        return await self._tell_each(
            "resync", [(place, incarnation, seq, part, first, last) for part in dealt]
        )

    async def renew_shared(self, place: Place, incarnation: int) -> Outcome:
        return await self._tell("renew_shared", (place, incarnation))

    async def announce_shared(
        self, place: Place, incarnation: int, added: bytes, removed: bytes, whole: bool = True
    ) -> Outcome:
        dealt = zip(self._split(added), self._split(removed), strict=True)
        return await self._tell_each(
            "announce_shared", [(place, incarnation, *keys, whole) for keys in dealt]
        )

    async def locate(self, keys: bytes) -> Located:
        parted = split(keys, len(self._shards))
        calls = [(part,) for part in parted.keys]
        return join_located(parted, await self._ask("locate", calls, [_NOWHERE] * len(calls)))

    async def copies(self, keys: bytes) -> bytes:
        """0 also for the keys of a shard that cannot be reached."""
        parted = split(keys, len(self._shards))
        calls = [(part,) for part in parted.keys]
        nothing = [bytes(len(part) // DIGEST_BYTES) for part in parted.keys]
        return join_bytes(parted, await self._ask("copies", calls, nothing))

    async def forget(self, place: Place, keys: bytes) -> int:
        calls = [(place, part) for part in self._split(keys)]
        return sum(await self._ask("forget", calls, [0] * len(calls)))

    async def addresses(self) -> dict[str, str]:
        calls: list[tuple[()]] = [()] * len(self._shards)
        nothing: list[dict[str, str]] = [{}] * len(calls)
        merged: dict[str, str] = {}
        for addresses in await self._ask("addresses", calls, nothing):
            merged |= addresses
        return merged

    async def find(self, prefix: str, limit: int) -> list[Match]:
        """Of the shards that answer."""
        calls = [(prefix, limit)] * len(self._shards)
        nothing: list[list[Match]] = [[]] * len(calls)
        return heapq.nsmallest(limit, chain.from_iterable(await self._ask("find", calls, nothing)))

    async def report(self, source: str, incarnation: int, values: Mapping[str, float]) -> Outcome:
        """To shard 0, which has the reports of all sources."""
        args = (source, incarnation, dict(values))
        return await self._shards[0].ask("report", args, Outcome.UNKNOWN, self._reader_s)

    async def stats(self) -> DirectoryStats:
        """Of the shards that answer; epoch 0 and nothing in it where none does. Reports are shard 0's."""
        calls: list[tuple[()]] = [()] * len(self._shards)
        nothing: list[DirectoryStats | None] = [None] * len(calls)
        return join_stats(await self._ask("stats", calls, nothing))

    def _split(self, keys: bytes) -> tuple[bytes, ...]:
        return split(keys, len(self._shards)).keys

    async def _tell(self, method: str, args: tuple[Any, ...]) -> Outcome:
        return await self._tell_each(method, [args] * len(self._shards))

    async def _tell_each(self, method: str, calls: Sequence[tuple[Any, ...]]) -> Outcome:
        unknown = [Outcome.UNKNOWN] * len(calls)
        return join_outcomes(await self._ask(method, calls, unknown, AGENT_S))

    async def _ask(
        self,
        method: str,
        calls: Sequence[tuple[Any, ...]],
        otherwise: Iterable[Answer],
        within_s: float | None = None,
    ) -> list[Answer]:
        """Every shard's answer to its own call, or what stands for it."""
        limit = self._reader_s if within_s is None else within_s
        asked = zip(self._shards, calls, otherwise, strict=True)
        return await asyncio.gather(*(shard.ask(method, args, none, limit) for shard, args, none in asked))


_NOWHERE = Located(0, ())
