"""What the Redis tier asks of whoever speaks to Redis: small commands (`Client`) and blocks moved (`BlockLanes`)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from enum import Enum
from typing import NamedTuple, Protocol, TypeVar

from kv_tiers.keys import BlockKey
from kv_tiers.packing import Frame, FrameHeader
from kv_tiers.tier import Fetched

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")


class Unreachable(Exception):
    """Redis did not answer, refused, or was too late."""


class Client(Protocol):
    """Small commands, each within the deadline. Unreachable from all of them."""

    async def headers(self, keys: Sequence[BlockKey]) -> list[FrameHeader | None]:
        """How the values of these blocks start; None for no value, or none of ours."""
        ...

    async def remove(self, names: Sequence[bytes]) -> None:
        """UNLINK each."""
        ...

    async def renew(self, names: Sequence[bytes]) -> None:
        """Start the tier's time to live again."""
        ...

    async def lives(self, names: Sequence[bytes]) -> list[int]:
        """Milliseconds to live; negative for no end, or no value."""
        ...

    def names(self) -> AsyncIterator[list[bytes]]:
        """All names that may be ours, in pages; one may come twice. What is there all the while is not left out."""
        ...

    async def incarnation(self) -> int:
        """A number of this run of Redis; a later run has a larger one."""
        ...

    async def close(self) -> None:
        """Let go of the connections."""
        ...


class Sent(Enum):
    """What became of one block that was sent. After UNKNOWN some or all of it may be there."""

    STORED = "there, whole"
    FULL = "Redis is at its memory limit"
    UNKNOWN = "not answered, refused, or too late"


class Wanted(NamedTuple):
    """A block to fetch, and the caller's buffer."""

    key: BlockKey
    into: memoryview


class Outgoing(NamedTuple):
    """A block to store."""

    key: BlockKey
    frame: Frame


class BlockLanes(Protocol):
    """Moves blocks; a cancelled call has let go of the buffers when it returns."""

    async def fetch(self, wanted: Sequence[Wanted]) -> list[Fetched]:
        """One answer per block. HIT means verified."""
        ...

    async def store(self, outgoing: Sequence[Outgoing]) -> list[Sent]:
        """One answer per block, in place of what had its name before."""
        ...

    async def compute(self, action: Callable[[Item], Outcome], items: Sequence[Item]) -> list[Outcome]:
        """`action` of each item in threads."""
        ...

    def disconnect(self) -> None:
        """Drop idle connections."""
        ...

    async def close(self) -> None:
        """End threads and connections."""
        ...
