"""Transfer endpoints of a replica, and the task that keeps their tickets moving."""

import asyncio
import logging
from collections.abc import Callable

from engine.model import ModelSpec
from kv_tiers.transfer.endpoint import TransferEndpoint
from kv_tiers.transfer.local import LocalEndpoint
from kv_tiers.transfer.nixl import NixlEndpoint, unavailable

_log = logging.getLogger("kvtide.replica")

_MIB = 1 << 20
_LEAST_STAGING = 256 * _MIB


def staging_bytes(spec: ModelSpec, context: int, asked_gib: float | None) -> int:
    """Transfer memory of one replica: room for two full contexts with their metadata, unless asked otherwise."""
    if asked_gib is not None:
        return int(asked_gib * (1 << 30))
    whole = spec.kv_bytes_per_token * context
    return max(_LEAST_STAGING, 2 * (whole + whole // 16 + _MIB))


def choose_transport(asked: str) -> str:
    """What to ship with, "nixl" or "local"; for "auto" whichever works here.

    `local` has no way between processes, so survivors travel inside the prefill reply, through Ray. Raises RuntimeError
    when nixl is demanded and does not work here.
    """
    reason = None if asked == "local" else unavailable()
    if asked == "nixl" and reason is not None:
        raise RuntimeError(f"transport nixl does not work here: {reason}; transport=local does without it")
    if reason is not None:
        _log.warning("%s; survivors travel in replies through Ray (transport=local)", reason)
    return "local" if asked == "local" or reason is not None else "nixl"


def open_endpoint(name: str, nbytes: int, transport: str) -> TransferEndpoint:
    """Endpoint of this process with `nbytes` of transfer memory; `transport` is what `choose_transport` chose."""
    return LocalEndpoint(name, nbytes) if transport == "local" else NixlEndpoint(name, nbytes)


async def poll_for_ever(endpoint: TransferEndpoint, wake: asyncio.Event, on_end: Callable[[], None]) -> None:
    """Poll until cancelled, as often as the endpoint says; `wake` cuts an idle wait short, `on_end` hears of ends."""
    while True:
        if endpoint.poll():
            on_end()
        hint = endpoint.wait_hint()
        if hint < 0.01:
            await asyncio.sleep(hint)
            continue
        try:
            async with asyncio.timeout(hint):  # wait_for can swallow a cancellation (Python 3.11)
                await wake.wait()
        except TimeoutError:
            continue
        wake.clear()
