"""What decides a node agent's tiers: agents with other options are other agents, under other actor names."""

import hashlib
from dataclasses import astuple, dataclass, field
from typing import Literal

from deployments.config import GIB, AppArgs
from kv_tiers.at_rest import AtRest
from kv_tiers.block import BlockLayout

PAGE = 4096
"""Slots are whole pages: what lies in one can be read from and written to a disk past the page cache."""


@dataclass(frozen=True)
class NodeOptions:
    """Sizes in bytes; 0 and None: without that tier. Slots are multiples of `PAGE`; those of a tier whose blocks are
    encoded at rest have a size of their own (None: `slot_bytes`).
    """

    application: str
    slot_bytes: int
    cpu_bytes: int
    cpu_folder: str | None = None
    nvme_bytes: int = 0
    nvme_folder: str | None = None
    redis_url: str | None = field(default=None, repr=False)  # may hold a password
    redis_bytes: int = 0
    redis_packing: Literal["none", "zstd"] = "none"
    nvme_at_rest: AtRest = AtRest.EXACT
    nvme_slot_bytes: int | None = None
    redis_at_rest: AtRest = AtRest.EXACT
    redis_slot_bytes: int | None = None
    policy: Literal["reuse", "lru"] = "reuse"
    admission: Literal["auto", "always", "second_use", "never"] = "auto"
    ttl_s: float | None = None
    tenant_share: float = 1.0
    directory_shards: int = 1

    @classmethod
    def of(cls, application: str, args: AppArgs, blocks: BlockLayout) -> "NodeOptions | None":
        """For blocks like that; None where the CPU tier has no room for one: no prefix reuse."""

        def slot(codec: AtRest) -> int:
            return -(-blocks.kept_as(codec).nbytes // PAGE) * PAGE

        slot_bytes = slot(AtRest.EXACT)
        nvme, redis = AtRest.named(args.nvme_tier_codec), AtRest.named(args.redis_tier_codec)
        cpu_bytes = int(args.cpu_tier_gib * GIB)
        if cpu_bytes < slot_bytes:
            return None
        return cls(
            application=application,
            slot_bytes=slot_bytes,
            cpu_bytes=cpu_bytes,
            cpu_folder=args.cpu_tier_folder,
            nvme_bytes=int(args.nvme_tier_gib * GIB),
            nvme_folder=args.nvme_tier_folder,
            redis_url=None if args.redis_url is None else args.redis_url.get_secret_value(),
            redis_bytes=int(args.redis_tier_gib * GIB),
            redis_packing=args.redis_tier_packing,
            nvme_at_rest=nvme,
            nvme_slot_bytes=slot(nvme),
            redis_at_rest=redis,
            redis_slot_bytes=slot(redis),
            policy=args.tier_policy,
            admission=args.admission,
            ttl_s=args.tier_ttl_s,
            tenant_share=args.tenant_share,
            directory_shards=args.directory_shards,
        )

    @property
    def lower_slots(self) -> int:
        """Blocks that the tiers below the slab have room for, about."""
        nvme = self.nvme_bytes // (self.nvme_slot_bytes or self.slot_bytes)
        redis = self.redis_bytes // (self.redis_slot_bytes or self.slot_bytes)
        return nvme + (redis if self.redis_url else 0)

    def actor_name(self, node: str) -> str:
        """Of the agent of that node with these options. Shows none of them: a URL may hold a password."""
        digest = hashlib.blake2b(repr(astuple(self)).encode(), digest_size=8).hexdigest()
        return f"{self.application}:node:{node}:{digest}"
