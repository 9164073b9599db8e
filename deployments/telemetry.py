"""What a replica tells the directory about itself, once a second: its gauges, under its own name and incarnation."""

import asyncio
import logging
import time
from collections.abc import Callable

from ray.exceptions import RayError

from deployments.directory import HEARTBEAT_S, directory_actor

_log = logging.getLogger("kvtide.telemetry")


async def report_for_ever(application: str, source: str, gauges: Callable[[], dict[str, float]]) -> None:
    """Report until cancelled. A report lapses with its lease, so a dead replica's gauges vanish by themselves.

    What `gauges` raises ends it: `require_running` tells the health check.
    """
    incarnation = time.time_ns()
    directory = directory_actor(application)
    while True:
        try:
            await directory.report.remote(source, incarnation, gauges())
        except RayError as error:
            _log.warning("directory unreachable: %s", type(error).__name__)
            directory = directory_actor(application)
        await asyncio.sleep(HEARTBEAT_S)


def require_running(telling: asyncio.Task[None]) -> None:
    """Raises RuntimeError when a replica's reports have ended: without them it counts as gone."""
    if telling.done():
        reason = "cancelled" if telling.cancelled() else repr(telling.exception())
        raise RuntimeError(f"the telemetry task died: {reason}")
