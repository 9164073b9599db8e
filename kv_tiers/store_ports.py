"""What a `TieredStore` needs of the world around it, and the records it answers with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kv_tiers.directory import Located, Place
from kv_tiers.keys import DIGEST_BYTES, BlockKey
from kv_tiers.tier import Changes, Fetched, Manifest, TierStats
from policies.tiering.speed import Speed

CPU = "cpu"
"""The tier's name of the store's own slab."""

SHARED = frozenset({"redis"})
"""Tiers that any node can read: in the directory they belong to none."""


class DirectoryPort(Protocol):
    """The directory as a store asks it. Keys are concatenated 32-byte digests. Nothing raises: no answer is empty."""

    async def locate(self, keys: bytes) -> Located:
        """Who holds the leading keys."""
        ...

    async def forget(self, place: Place, keys: bytes) -> int:
        """These were not at that place; returns how many entries went."""
        ...

    async def copies(self, keys: bytes) -> bytes:
        """Per key, how many places hold it; empty when there is no answer."""
        ...


class Peer(Protocol):
    """Another node's CPU slab."""

    async def get(self, keys: Sequence[BlockKey], offsets: Sequence[int]) -> list[Fetched]:
        """Copy blocks of the peer to offsets of our own memory and verify them; one answer per key, never raises.

        Returns in bounded time, and only when nothing of this call can land in the memory any more.
        """
        ...


class Journal(Protocol):
    """What a tier tells the directory of itself."""

    def drain_changes(self) -> Changes:
        """The net change of visibility since the last `drain_changes` or `manifest`."""
        ...

    def manifest(self) -> Manifest:
        """All visible keys; takes the place of the next `drain_changes`."""
        ...


@dataclass(slots=True)
class SourceCounters:
    """Totals of one source of loads. `blocks` = `hits` + `missing` + `corrupt` + `failed`; `nbytes` those of hits."""

    blocks: int = 0
    hits: int = 0
    missing: int = 0
    corrupt: int = 0
    failed: int = 0
    nbytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class SpillCounters:
    """Totals of the write-down, in blocks; `written` and `refused` count each lower tier's answer.

    `too_dear`: not written to a tier that is no faster than computing.
    """

    written: int = 0
    nbytes: int = 0
    refused: int = 0
    failed: int = 0
    unworthy: int = 0
    too_dear: int = 0
    copied_elsewhere: int = 0
    overflowed: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class StoreStats:
    """`tiers` and `sources` by name. `speeds`: what is expected of each lower tier, as measured.

    `asked`, `here`: blocks of prepare_read, and of those in the CPU tier then.

    `late`: reads that stopped waiting for a load. `unattended`: slots that loads still write to, though nobody waits
    for them. `queued`: blocks that wait for their write-down. `lent`: leases of other nodes. `pinned`: chains pinned by
    users.
    """

    tiers: dict[str, TierStats]
    speeds: dict[str, Speed]
    sources: dict[str, SourceCounters]
    spill: SpillCounters
    asked: int
    here: int
    late: int
    unattended: int
    queued: int
    lent: int
    pinned: int


class Cleared(NamedTuple):
    """One tier after a flush: how many blocks went, and how many it still shows (0, unless it could not be reached)."""

    blocks: int
    left: int


class PinRefused(NamedTuple):
    """Nothing was pinned, for it would have been more than pins may take."""

    reason: str


class Loan(NamedTuple):
    """Blocks lent to another node: `offsets[i]` is where key i of those asked for lies; ends after `ttl_s`.

    `more`: the next key is known here as well, but not in the slab now.
    """

    id: int
    offsets: tuple[int, ...]
    ttl_s: float
    more: bool


def joined(keys: Sequence[BlockKey]) -> bytes:
    """Keys as the directory takes them."""
    return b"".join(key.digest for key in keys)


def parted(digests: bytes) -> list[BlockKey]:
    """The inverse of `joined`. ValueError for a length that no list of keys has."""
    if len(digests) % DIGEST_BYTES:
        raise ValueError(f"{len(digests)} bytes are no list of {DIGEST_BYTES}-byte digests")
    return [BlockKey(digests[at : at + DIGEST_BYTES]) for at in range(0, len(digests), DIGEST_BYTES)]
