"""What a transport must be able to do: one-sided reads from a peer's arena, small messages to it, nothing
else.

`StagedEndpoint` builds tickets, deadlines, quarantine and verification on top, once for all transports.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple, Protocol, overload

import numpy as np

from kv_tiers.transfer.ticket import PeerId


class Step(Enum):
    """State of one transport operation. All but PENDING are final."""

    DONE = "done"
    PENDING = "pending"
    LOST = "lost"  # the peer is gone
    FAILED = "failed"  # this operation cannot be done; the peer may be well


class Span(NamedTuple):
    """`nbytes` to read from the peer's `remote` address to the own arena's `local` offset."""

    remote: int
    local: int
    nbytes: int


class SpanTable(Sequence[Span]):
    """Many spans as arrays, which a wire takes as they are: `remote` u64 [n, 3] of (address, bytes, 0), and `local`
    likewise of (offset, bytes, 0).
    """

    def __init__(self, remote: np.ndarray, local: np.ndarray) -> None:
        self.remote = remote
        self.local = local

    @classmethod
    def of(cls, spans: Sequence[Span]) -> SpanTable:
        """The same spans; a table as it is."""
        if isinstance(spans, SpanTable):
            return spans
        rows = np.array(spans, np.uint64).reshape(-1, 3)
        return cls.columns(rows[:, 0], rows[:, 1], rows[:, 2])

    @classmethod
    def columns(
        cls, remote: Sequence[int] | np.ndarray, local: Sequence[int] | np.ndarray, nbytes: int | np.ndarray
    ) -> SpanTable:
        """Spans by column; `nbytes` may be one size for all."""
        tables = np.zeros((2, len(remote), 3), np.uint64)
        tables[0, :, 0], tables[1, :, 0] = remote, local
        tables[:, :, 1] = nbytes
        return cls(*tables)

    def __len__(self) -> int:
        return len(self.remote)

    @overload
    def __getitem__(self, index: int) -> Span: ...
    @overload
    def __getitem__(self, index: slice) -> SpanTable: ...
    def __getitem__(self, index: int | slice) -> Span | SpanTable:
        if isinstance(index, slice):
            return SpanTable(self.remote[index], self.local[index])
        remote, nbytes, _ = self.remote[index].tolist()
        return Span(remote, int(self.local[index, 0]), nbytes)


class Read(Protocol):
    """A posted one-sided read. Used by one thread at a time."""

    def state(self) -> Step:
        """Where it is now; makes progress. While PENDING, bytes may land at any time. Does not block for
        long.
        """
        ...

    def close(self) -> None:
        """Free the handle. Only after a final state, or directly before `Wire.disconnect` of its peer."""
        ...


class Wire(Protocol):
    """One endpoint's side of a transport. Thread safe. Reports failures as values, never as exceptions."""

    incarnation: int
    """Random 64-bit number of this life of the endpoint."""

    metadata: bytes
    """What a peer needs to connect; travels in every ticket and loan."""

    def address(self, offset: int) -> int:
        """What peers call the arena's byte `offset`."""
        ...

    def connect(self, peer: PeerId, metadata: bytes) -> Step:
        """Make a peer known by its wire's `metadata`: DONE, LOST or FAILED. Up to 0.1 s; never called twice at once."""
        ...

    def read(self, peer: PeerId, spans: Sequence[Span]) -> Read:
        """Post one read of a connected peer; may copy synchronously. A failure is the handle's state."""
        ...

    def send(self, peer: PeerId, message: bytes) -> Step:
        """Send a small message to a connected peer: DONE (on its way, not: arrived), LOST or FAILED."""
        ...

    def receive(self) -> list[bytes]:
        """Make progress for both roles and return the messages that arrived, from anyone."""
        ...

    def disconnect(self, peer: PeerId) -> None:
        """Forget a peer. Afterwards nothing of it lands in the arena any more."""
        ...

    def close(self) -> None:
        """Leave the transport; the arena is no longer readable by peers."""
        ...
