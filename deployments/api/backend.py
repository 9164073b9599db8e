"""What the HTTP edge needs from whatever serves the model, and from the tiers of its nodes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from engine.request import Event, GenerationRequest
from kv_tiers.directory import DirectoryStats
from kv_tiers.keys import BlockKey, Fingerprint

TIERS = ("cpu", "nvme", "redis")
"""Tiers by name, the fastest first."""

SHARED_TIERS = frozenset({"redis"})
"""Tiers that all nodes share: a block there is at no node."""

DIRECTORY = "directory"
"""How the directory is called where parts that did not answer are named."""


@dataclass(frozen=True)
class Readiness:
    """Whether a request sent now would be served, and what each part says about itself."""

    ready: bool
    detail: dict[str, str] = field(default_factory=dict)


class Backend(Protocol):
    """Runs requests. All methods are called on the gateway's event loop, many at a time."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[list[Event], None]:
        """Batches of events of one request, as an async generator (`async def` with `yield`).

        The first event is a `PromptEvent`; then come the choices' `TokenEvent`s, each choice's indices
        contiguous from 0 and its last one with a finish reason. Raises types of `engine.errors`
        (`InvalidRequest`, `Overloaded`, ...); anything else becomes a 500. Closing or cancelling the
        generator releases everything behind it. It is not read ahead of the client by more than a bounded
        number of events.
        """
        ...

    async def ready(self) -> Readiness:
        """Readiness now; a call that raises or outlasts `probe_timeout_s` counts as not ready."""
        ...

    async def stats(self) -> Mapping[str, Mapping[str, float]]:
        """Source (a replica's name) to gauge name to value; names are listed in `metrics.GAUGES`."""
        ...


@dataclass(frozen=True)
class BlockIdentity:
    """What a prompt's block keys are made of beside its tokens and tenant, and a block's size (bytes) in memory."""

    fingerprint: Fingerprint
    block_tokens: int
    block_bytes: int


class TierPlace(NamedTuple):
    """Where a block is; `node` None: in a tier that all nodes share."""

    node: str | None
    tier: str


class Silence(NamedTuple):
    """A part that did not answer: a node's name or `DIRECTORY`, and why in a few words."""

    source: str
    reason: str


@dataclass(frozen=True)
class NodeCounts:
    """Node to tier to number of blocks. A node that did not answer is in `silent` only."""

    nodes: Mapping[str, Mapping[str, int]]
    silent: tuple[Silence, ...] = ()


@dataclass(frozen=True)
class Pinned:
    """Node to tier to blocks pinned; and nodes where pins had no room for any, with the reason."""

    nodes: Mapping[str, Mapping[str, int]]
    refused: Mapping[str, str] = field(default_factory=dict)
    silent: tuple[Silence, ...] = ()


@dataclass(frozen=True)
class Whereabouts:
    """`places[i]`: where block `keys[i]` is, as far as nodes answered."""

    keys: tuple[BlockKey, ...]
    places: tuple[tuple[TierPlace, ...], ...]
    silent: tuple[Silence, ...] = ()


class FoundBlock(NamedTuple):
    """A block the directory knows: the leading hexadecimal digits of its key that it keeps, and where it is."""

    key: str
    places: tuple[TierPlace, ...]


@dataclass(frozen=True)
class Matches:
    """Blocks by key; `cut`: there are more than these."""

    blocks: tuple[FoundBlock, ...]
    silent: tuple[Silence, ...] = ()
    cut: bool = False


@dataclass(frozen=True)
class Prefetched:
    """`node`: where it was tried, None if there is no node. `blocks`: leading ones in its CPU tier afterwards."""

    node: str | None
    blocks: int
    silent: tuple[Silence, ...] = ()


class NotCleared(NamedTuple):
    """A tier of a node (or a part as a whole, `tier` None) that holds, or may hold, something after a flush."""

    source: str
    tier: str | None
    reason: str


@dataclass(frozen=True)
class Flushed:
    """What a flush made invisible, per node and tier, and what it did not: nothing where all is clear."""

    nodes: Mapping[str, Mapping[str, int]]
    not_cleared: tuple[NotCleared, ...] = ()


@dataclass(frozen=True)
class TierReport:
    """Node to tier to figure to value, named as in `tier_figures.py`; and the directory's own, None: no answer."""

    nodes: Mapping[str, Mapping[str, Mapping[str, float]]]
    directory: DirectoryStats | None
    directory_shards: int
    silent: tuple[Silence, ...] = ()


class TierControl(Protocol):
    """Commands over the tiers of all nodes. Called on the gateway's event loop.

    Nothing here is needed for a right answer to any prompt, and nothing makes one wrong. Each call asks all nodes at
    once, each for a bounded time; a node that does not answer is named in the result and never an exception.
    """

    async def identity(self) -> BlockIdentity:
        """Of the model that is served now. Raises `ModelUnavailable` or `Overloaded` while nobody can tell."""
        ...

    async def pin(self, keys: Sequence[BlockKey], ttl_s: float | None = None) -> Pinned:
        """Keep these blocks wherever they are, for `ttl_s` or until `unpin`. Pins are counted, and bounded per node."""
        ...

    async def unpin(self, keys: Sequence[BlockKey]) -> NodeCounts:
        """End one pin of each block in each tier; → how many there were."""
        ...

    async def prefetch(self, keys: Sequence[BlockKey], node: str | None = None) -> Prefetched:
        """Bring the longest leading run that somebody has into the CPU tier of `node`, or of the one that has most.

        `InvalidRequest` with field `node` for one that is not there.
        """
        ...

    async def evict(self, keys: Sequence[BlockKey], tiers: Sequence[str] = TIERS) -> NodeCounts:
        """Make these blocks invisible in these tiers, pinned or not; → how many were visible.

        What leaves the CPU tier, but not all tiers below it, is written down first.
        """
        ...

    async def flush(self, tiers: Sequence[str] = TIERS) -> Flushed:
        """Make everything in these tiers invisible, pinned or not, and wait until the directory has heard of it."""
        ...

    async def where(self, keys: Sequence[BlockKey]) -> Whereabouts:
        """Where these blocks are now."""
        ...

    async def find(self, prefix: str, limit: int) -> Matches:
        """At most `limit` blocks that the directory knows, whose key begins with these hexadecimal digits."""
        ...

    async def report(self) -> TierReport:
        """What every node says of its tiers now."""
        ...
