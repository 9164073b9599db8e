"""The tiers below a node's slab: made from options, started, retried when they cannot start, let go of in the end."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from deployments.node_options import NodeOptions
from engine.weights import default_cache
from kv_tiers.at_rest import AtRest
from kv_tiers.keys import BlockKey
from kv_tiers.lossy import LossyTier, Scratch
from kv_tiers.nvme import NvmeTier
from kv_tiers.nvme_file import nvme_path
from kv_tiers.redis import RedisTier
from kv_tiers.tier import Tier
from policies.tiering import EvictionPolicy, make_policy

_log = logging.getLogger("kvtide.node")

RETRY_S = 10.0

Make = Callable[[], Tier]


def tier_makers(
    options: NodeOptions, memory: tuple[int, int] | None, clock: Callable[[], float]
) -> dict[str, Make]:
    """Name → how to make it, the fastest first. `memory`: address and bytes of the slab that buffers lie in."""

    def policy(nbytes: int, slot_bytes: int) -> EvictionPolicy[BlockKey]:
        return make_policy(options.policy, max(1, nbytes // slot_bytes))

    def nvme() -> Tier:
        codec, slot_bytes = options.nvme_at_rest, options.nvme_slot_bytes or options.slot_bytes
        scratch = None if codec is AtRest.EXACT else Scratch(slot_bytes)
        folder = Path(options.nvme_folder) if options.nvme_folder else default_cache()
        folder.mkdir(parents=True, exist_ok=True)
        # One file, whatever the codec: the tier makes it anew when another one is configured.
        tier = NvmeTier(
            nvme_path(folder, f"{options.application}/{options.slot_bytes}"),
            options.nvme_bytes,
            slot_bytes,
            at_rest=codec,
            policy=policy(options.nvme_bytes, slot_bytes),
            clock=clock,
            ttl_s=options.ttl_s,
            tenant_share=options.tenant_share,
            memory=memory if scratch is None else scratch.place,
        )
        return tier if scratch is None else LossyTier(tier, codec, options.slot_bytes, scratch)

    def redis() -> Tier:
        assert options.redis_url is not None
        codec, slot_bytes = options.redis_at_rest, options.redis_slot_bytes or options.slot_bytes
        tier = RedisTier(
            options.redis_url,
            options.redis_bytes,
            slot_bytes,
            at_rest=codec,
            ttl_s=options.ttl_s,
            tenant_share=options.tenant_share,
            policy=policy(options.redis_bytes, slot_bytes),
            clock=clock,
            packing=options.redis_packing,
        )
        return tier if codec is AtRest.EXACT else LossyTier(tier, codec, options.slot_bytes)

    makers: dict[str, Make] = {}
    if options.nvme_bytes:
        makers["nvme"] = nvme
    if options.redis_url is not None:
        makers["redis"] = redis
    return makers


class LowerTiers:
    """Keeps every tier running that can. One that cannot start (no room, locked, away) is logged once and retried."""

    def __init__(self, makers: dict[str, Make], changed: Callable[[Sequence[Tier]], None]) -> None:
        """`changed` hears of the running tiers, the fastest first, whenever they change."""
        self._makers = makers
        self._changed = changed
        self._running: dict[str, Tier] = {}
        self._failed: dict[str, str] = {}
        self._wanted = True
        self._lock = asyncio.Lock()

    @property
    def failed(self) -> dict[str, str]:
        """Tiers that could not start, and why."""
        return dict(self._failed)

    async def keep_running(self) -> None:
        """Start what does not run, for ever."""
        while True:
            await self.start()
            await asyncio.sleep(RETRY_S)

    async def start(self) -> None:
        """Start what does not run and is wanted."""
        async with self._lock:
            for name, make in self._makers.items():
                if self._wanted and name not in self._running:
                    await self._start(name, make)

    async def release(self) -> None:
        """Close all, so that another process can have them; until `resume`."""
        self._wanted = False
        async with self._lock:
            closing, self._running = self._running, {}
            self._changed([])
            for tier in closing.values():
                await tier.close()

    def resume(self) -> None:
        """Start them again with the next look."""
        self._wanted = True

    async def _start(self, name: str, make: Make) -> None:
        try:
            tier = make()
            await tier.start()
        except (OSError, ValueError) as error:
            if self._failed.get(name) != str(error):
                _log.warning("the %s tier cannot start, tried again: %s", name, error)
            self._failed[name] = str(error)
            return
        self._failed.pop(name, None)
        self._running[name] = tier
        self._changed([self._running[name] for name in self._makers if name in self._running])
