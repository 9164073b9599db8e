"""The ticket: what prefill hands to decode so that decode can pull one packed buffer, and the messages that
end it.

Everything here crosses a process border, so it is strict binary with a version, limits and a trailing
xxh3_64: no pickle, nothing executed, unknown or damaged bytes refused (`TicketError`). Deadlines travel as
remaining seconds, never as a wall clock. Little-endian throughout.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import xxhash

TICKET_MAGIC = b"KVTK"
TICKET_VERSION = 1
MESSAGE_MAGIC = b"KVTM"
SEAL_MAGIC = b"KVSEAL01"
SEAL_BYTES = 64

MAX_TICKET_BYTES = 1 << 20
MAX_REQUEST_ID_BYTES = 512
MAX_ENDPOINT_BYTES = 128
MAX_FINGERPRINT_BYTES = 64
MAX_METADATA_BYTES = 1 << 18
MAX_PAYLOAD_BYTES = 1 << 40
MAX_TTL_S = 86_400.0

_U32 = (1 << 32) - 1
_U64 = (1 << 64) - 1
_PREFIX = struct.Struct("<4sHI")  # magic, version, bytes of the whole ticket
_FIXED = struct.Struct("<IQQQQQd")  # attempt, generation, incarnation, address, nbytes, checksum, ttl_s
_LENGTH = struct.Struct("<I")
_SUM = struct.Struct("<Q")
_MESSAGE = struct.Struct("<4sBQQQ")  # magic, kind, incarnation, generation, xxh3_64 of what precedes
_SEAL = struct.Struct("<8sQQQQI")  # magic, incarnation, generation, nbytes, checksum, attempt


class TicketError(ValueError):
    """Bytes that are no ticket or message, or a value outside a ticket's limits; the text says which."""


class PeerId(NamedTuple):
    """One life of one endpoint: the same name with another incarnation is another peer (its old memory is
    gone).
    """

    endpoint: str
    incarnation: int


@dataclass(frozen=True)
class Ticket:
    """The right to pull one packed buffer of `nbytes` bytes once or more, until it is ended or `ttl_s` runs
    out.

    `generation` numbers the publications of one source incarnation and is never reused. `address` is where
    the buffer starts in terms of the source's transport (virtual address for NIXL, arena offset for local).
    `checksum` is the xxh3_64 of the buffer. `fingerprint` says what the bytes mean (model, dtype, layout: 1
    to 64 bytes); a reader that expects another one refuses before it reads. `metadata` is the transport's
    own description of the source.
    """

    request_id: str
    attempt: int
    generation: int
    fingerprint: bytes
    endpoint: str
    incarnation: int
    address: int
    nbytes: int
    checksum: int
    ttl_s: float
    metadata: bytes = b""

    def __post_init__(self) -> None:
        _bounded("request_id", len(self.request_id.encode()), 1, MAX_REQUEST_ID_BYTES)
        _bounded("endpoint", len(self.endpoint.encode()), 1, MAX_ENDPOINT_BYTES)
        _bounded("fingerprint", len(self.fingerprint), 1, MAX_FINGERPRINT_BYTES)
        _bounded("metadata", len(self.metadata), 0, MAX_METADATA_BYTES)
        _bounded("attempt", self.attempt, 0, _U32)
        _bounded("nbytes", self.nbytes, 1, MAX_PAYLOAD_BYTES)
        for name in ("generation", "incarnation", "address", "checksum"):
            _bounded(name, getattr(self, name), 0, _U64)
        if not (math.isfinite(self.ttl_s) and 0.0 <= self.ttl_s <= MAX_TTL_S):
            raise TicketError(f"ttl_s is {self.ttl_s}, allowed is 0 to {MAX_TTL_S}")

    @property
    def peer(self) -> PeerId:
        """The source's life that published this ticket."""
        return PeerId(self.endpoint, self.incarnation)

    def to_bytes(self) -> bytes:
        """Encode; the inverse of `from_bytes`."""
        fields = (self.request_id.encode(), self.endpoint.encode(), self.fingerprint, self.metadata)
        body = _FIXED.pack(
            self.attempt,
            self.generation,
            self.incarnation,
            self.address,
            self.nbytes,
            self.checksum,
            self.ttl_s,
        ) + b"".join(_LENGTH.pack(len(field)) + field for field in fields)
        total = _PREFIX.size + len(body) + _SUM.size
        front = _PREFIX.pack(TICKET_MAGIC, TICKET_VERSION, total) + body
        return front + _SUM.pack(xxhash.xxh3_64_intdigest(front))

    @classmethod
    def from_bytes(cls, data: bytes) -> Ticket:
        """Decode exactly one ticket; TicketError for anything else (wrong length, version, checksum,
        limits).
        """
        body = _checked_body(data)
        attempt, generation, incarnation, address, nbytes, checksum, ttl_s = _FIXED.unpack_from(body)
        request_id, endpoint, fingerprint, metadata = _fields(body[_FIXED.size :], count=4)
        try:
            names = (request_id.decode(), endpoint.decode())
        except UnicodeDecodeError as error:
            raise TicketError("ticket name is not UTF-8") from error
        return cls(
            request_id=names[0],
            attempt=attempt,
            generation=generation,
            fingerprint=fingerprint,
            endpoint=names[1],
            incarnation=incarnation,
            address=address,
            nbytes=nbytes,
            checksum=checksum,
            ttl_s=ttl_s,
            metadata=metadata,
        )

    def seal(self) -> bytes:
        """The 64 bytes that stand behind the buffer while the ticket is open; a reader compares them at the
        end.
        """
        packed = _SEAL.pack(
            SEAL_MAGIC, self.incarnation, self.generation, self.nbytes, self.checksum, self.attempt
        )
        return packed.ljust(SEAL_BYTES, b"\0")


class MessageKind(Enum):
    """What a destination can tell the source about a ticket."""

    ACKNOWLEDGE = 1
    REFUSE = 2


class Message(NamedTuple):
    """An end of a ticket on its way to the source."""

    kind: MessageKind
    incarnation: int
    generation: int

    def to_bytes(self) -> bytes:
        """Encode; the inverse of `from_bytes`."""
        front = _MESSAGE.pack(MESSAGE_MAGIC, self.kind.value, self.incarnation, self.generation, 0)[
            : -_SUM.size
        ]
        return front + _SUM.pack(xxhash.xxh3_64_intdigest(front))

    @classmethod
    def from_bytes(cls, data: bytes) -> Message:
        """Decode exactly one message; TicketError for anything else."""
        if len(data) != _MESSAGE.size:
            raise TicketError(f"message of {len(data)} bytes, expected {_MESSAGE.size}")
        magic, kind, incarnation, generation, checksum = _MESSAGE.unpack(data)
        if magic != MESSAGE_MAGIC or checksum != xxhash.xxh3_64_intdigest(data[: -_SUM.size]):
            raise TicketError("not a transfer message")
        try:
            return cls(MessageKind(kind), incarnation, generation)
        except ValueError as error:
            raise TicketError(f"unknown message kind {kind}") from error


def _bounded(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise TicketError(f"{name} is {value}, allowed is {low} to {high}")


def _checked_body(data: bytes) -> bytes:
    """The part between prefix and checksum, after both were verified."""
    if not _PREFIX.size + _FIXED.size + _SUM.size <= len(data) <= MAX_TICKET_BYTES:
        raise TicketError(f"ticket of {len(data)} bytes is outside the limits")
    magic, version, total = _PREFIX.unpack_from(data)
    if magic != TICKET_MAGIC:
        raise TicketError("not a ticket")
    if version != TICKET_VERSION:
        raise TicketError(f"ticket version {version}, this process speaks {TICKET_VERSION}")
    if total != len(data):
        raise TicketError(f"ticket says {total} bytes and has {len(data)}")
    front, (checksum,) = data[: -_SUM.size], _SUM.unpack(data[-_SUM.size :])
    if checksum != xxhash.xxh3_64_intdigest(front):
        raise TicketError("ticket checksum does not match")
    return front[_PREFIX.size :]


def _fields(data: bytes, *, count: int) -> list[bytes]:
    """`count` length-delimited fields that fill `data` exactly."""
    fields, at = [], 0
    for _ in range(count):
        if at + _LENGTH.size > len(data):
            raise TicketError("ticket is truncated")
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if at + length > len(data):
            raise TicketError("ticket field is longer than the ticket")
        fields.append(bytes(data[at : at + length]))
        at += length
    if at != len(data):
        raise TicketError("ticket has bytes behind its last field")
    return fields
