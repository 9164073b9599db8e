"""Transfer endpoints of a replica, and the task that keeps their tickets moving."""

import asyncio
from collections.abc import Callable

from engine.model import ModelSpec
from kv_tiers.transfer.endpoint import TransferEndpoint
from kv_tiers.transfer.local import LocalEndpoint
from kv_tiers.transfer.nixl import NixlEndpoint, unavailable

_MIB = 1 << 20
_LEAST_STAGING = 256 * _MIB


def staging_bytes(spec: ModelSpec, context: int, asked_gib: float | None) -> int:
    """Transfer memory of one replica: room for two full contexts with their metadata, unless asked otherwise."""
    if asked_gib is not None:
        return int(asked_gib * (1 << 30))
    whole = spec.kv_bytes_per_token * context
    return max(_LEAST_STAGING, 2 * (whole + whole // 16 + _MIB))


def open_endpoint(name: str, nbytes: int, transport: str) -> TransferEndpoint:
    """The endpoint of this process: NIXL where it exists, or within one process.

    `transport` is "nixl", "local" or "auto". Raises RuntimeError when nixl is demanded and does not work here.
    """
    reason = None if transport == "local" else unavailable()
    if transport == "nixl" and reason is not None:
        raise RuntimeError(f"transport nixl does not work here: {reason}")
    if transport == "local" or reason is not None:
        return LocalEndpoint(name, nbytes)
    return NixlEndpoint(name, nbytes)


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
