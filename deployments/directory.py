"""The directory as an actor: who holds which blocks, and what each live part last said of itself.

A correctness device but never needed for correctness: without it everything is a miss. It restarts empty with a new
epoch and is refilled by the node agents' manifests. Reached by name; a caller looks it up again after a failure.
"""

import asyncio
import time
from collections.abc import Sequence

import ray
from ray.actor import ActorHandle

from kv_tiers.directory import DirectoryState, DirectoryStats, Located, Outcome
from kv_tiers.keys import BlockKey

NAMESPACE = "kvtide"
LEASE_S = 5.0
HEARTBEAT_S = 1.0
# Without a word from anybody for this long, the application is gone and so is the need for a directory.
LINGER_S = 120.0


class DirectoryActor:
    """`DirectoryState` on this process's clock. An async actor: one event loop, so calls do not interleave."""

    async def __init__(self) -> None:  # type: ignore[misc]  # Ray awaits it
        self._state = DirectoryState(LEASE_S, epoch=time.time_ns())
        self._heard = time.monotonic()
        self._leaving = asyncio.create_task(self._leave_when_forgotten())

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

    async def locate(self, keys: Sequence[BlockKey]) -> Located:
        self._now()
        return self._state.locate(keys)

    async def forget(self, node: str, keys: Sequence[BlockKey]) -> int:
        return self._state.forget(node, keys)

    async def report(self, source: str, incarnation: int, values: dict[str, float]) -> Outcome:
        return self._state.report(source, incarnation, values, self._now())

    async def stats(self) -> DirectoryStats:
        return self._state.stats(self._now())

    def _now(self) -> float:
        self._heard = time.monotonic()
        self._state.expire(self._heard)
        return self._heard

    async def _leave_when_forgotten(self) -> None:
        """End this actor when nobody has called for `LINGER_S`."""
        while time.monotonic() - self._heard < LINGER_S:
            await asyncio.sleep(HEARTBEAT_S)
        ray.kill(ray.get_runtime_context().current_actor)


def directory_actor(application: str) -> ActorHandle:
    """The application's directory, created if there is none. Any replica or agent may be the first to ask."""
    remote = ray.remote(num_cpus=0, max_restarts=-1)(DirectoryActor)
    return remote.options(
        name=f"{application}:directory", namespace=NAMESPACE, lifetime="detached", get_if_exists=True
    ).remote()
