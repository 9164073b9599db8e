"""The directory as an actor: who holds which blocks, and what each live part last said of itself.

A correctness device but never needed for correctness: without it everything is a miss. It restarts empty with a new
epoch and is refilled by the node agents' manifests. Reached by name; a caller looks it up again after a failure.
"""

import asyncio
import logging
import os
import time
from collections.abc import Sequence

import ray
from ray.actor import ActorHandle

from kv_tiers.directory import DirectoryState, DirectoryStats, Located, Outcome
from kv_tiers.keys import BlockKey

_log = logging.getLogger("kvtide.directory")

NAMESPACE = "kvtide"
AGENT = "node:"  # how an agent's name as a source of reports begins
LEASE_S = 5.0
HEARTBEAT_S = 1.0
# With no replica left for this long, the application is gone, and so is the need for its agents and its directory (a
# little later: an agent that loses its directory makes a new one).
LINGER_S = 120.0
_LATER_S = 10.0


def end_process_on_failure(task: asyncio.Task[None]) -> None:
    """For `add_done_callback`: an actor whose loop has failed must end, or Ray would not restart it."""
    if not task.cancelled() and task.exception() is not None:
        _log.critical("the actor's loop failed, its process ends", exc_info=task.exception())
        os._exit(1)


class DirectoryActor:
    """`DirectoryState` on this process's clock. An async actor: one event loop, so calls do not interleave."""

    async def __init__(self) -> None:  # type: ignore[misc]  # Ray awaits it
        self._state = DirectoryState(LEASE_S, epoch=time.time_ns())
        self._heard = time.monotonic()
        self._leaving = asyncio.create_task(self._leave_when_forgotten())
        self._leaving.add_done_callback(end_process_on_failure)

    # Said by node agents, which stay for a while without replicas.

    async def register(self, node: str, incarnation: int) -> Outcome:
        return self._state.register(node, incarnation, self._now())

    async def heartbeat(self, node: str, incarnation: int) -> Outcome:
        return self._state.heartbeat(node, incarnation, self._now())

    async def announce(
        self, node: str, incarnation: int, seq: int, added: Sequence[BlockKey], removed: Sequence[BlockKey]
    ) -> Outcome:
        self._now()
        return self._state.announce(node, incarnation, seq, added, removed)

    async def resync(self, node: str, incarnation: int, seq: int, keys: Sequence[BlockKey]) -> Outcome:
        self._now()
        return self._state.resync(node, incarnation, seq, keys)

    # Asked and said by replicas, except the reports of agents.

    async def locate(self, keys: Sequence[BlockKey]) -> Located:
        self._now()
        return self._state.locate(keys)

    async def forget(self, node: str, keys: Sequence[BlockKey]) -> int:
        return self._state.forget(node, keys)

    async def report(self, source: str, incarnation: int, values: dict[str, float]) -> Outcome:
        if not source.startswith(AGENT):
            self._heard = time.monotonic()
        return self._state.report(source, incarnation, values, self._now())

    async def stats(self) -> DirectoryStats:
        return self._state.stats(self._now())

    def _now(self) -> float:
        now = time.monotonic()
        self._state.expire(now)
        return now

    async def _leave_when_forgotten(self) -> None:
        """End this actor when no replica has reported for `LINGER_S`, and a little more."""
        while time.monotonic() - self._heard < LINGER_S + _LATER_S:
            await asyncio.sleep(HEARTBEAT_S)
        ray.kill(ray.get_runtime_context().current_actor)


def directory_actor(application: str) -> ActorHandle:
    """The application's directory, created if there is none. Any replica or agent may be the first to ask."""
    remote = ray.remote(num_cpus=0, max_restarts=-1)(DirectoryActor)
    return remote.options(
        name=f"{application}:directory", namespace=NAMESPACE, lifetime="detached", get_if_exists=True
    ).remote()
