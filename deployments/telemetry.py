"""What a replica tells the directory about itself, once a second: its gauges, under its own name and incarnation."""

import asyncio
import time
from collections.abc import Callable

from deployments.directory import HEARTBEAT_S, DirectoryClient


async def report_for_ever(application: str, source: str, gauges: Callable[[], dict[str, float]]) -> None:
    """Report until cancelled. A report lapses with its lease, so a dead replica's gauges vanish by themselves.

    What `gauges` raises ends it: `require_running` tells the health check.
    """
    incarnation = time.time_ns()
    directory = DirectoryClient(application)  # reports need no other shard than the first
    while True:
        await directory.report(source, incarnation, gauges())
        await asyncio.sleep(HEARTBEAT_S)


def require_running(telling: asyncio.Task[None]) -> None:
    """Raises RuntimeError when a replica's reports have ended: without them it counts as gone."""
    if telling.done():
        reason = "cancelled" if telling.cancelled() else repr(telling.exception())
        raise RuntimeError(f"the telemetry task died: {reason}")
