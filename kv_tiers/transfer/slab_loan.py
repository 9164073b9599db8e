"""The message by which one node lends blocks of its CPU slab to another: strict binary, little-endian, no pickle.

magic 4s, version u16, bytes of all u32 | incarnation u64, lease u64, slot bytes u64, ttl f64, blocks u32, more u8
| endpoint, metadata (u32 length, bytes) | address u64 per block | xxh3_64 of all that
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import xxhash

from kv_tiers.transfer.ticket import MAX_ENDPOINT_BYTES, MAX_METADATA_BYTES, PeerId

MAGIC = b"KVLN"
VERSION = 1
MAX_BLOCKS = 1 << 16
MAX_SLOT_BYTES = 1 << 34
MAX_TTL_S = 3600.0

_PREFIX = struct.Struct("<4sHI")
_FIXED = struct.Struct("<QQQdIB")
_LENGTH = struct.Struct("<I")
_SUM = struct.Struct("<Q")


class LoanError(ValueError):
    """Bytes that are no loan, or a value outside a loan's limits; the text says which."""


@dataclass(frozen=True)
class SlabLoan:
    """The right to read slots of a peer's slab for `ttl_s` seconds: the leading blocks of those asked for.

    `addresses[i]`: where block i lies, `slot_bytes` long. `more`: the peer has the next block too, but not in its slab
    now. `metadata` describes the peer's `wire.Wire`.
    """

    endpoint: str
    incarnation: int
    lease: int
    ttl_s: float
    slot_bytes: int
    addresses: tuple[int, ...]
    metadata: bytes
    more: bool = False

    def __post_init__(self) -> None:
        _bounded("endpoint", len(self.endpoint.encode()), 1, MAX_ENDPOINT_BYTES)
        _bounded("metadata", len(self.metadata), 0, MAX_METADATA_BYTES)
        _bounded("blocks", len(self.addresses), 0, MAX_BLOCKS)
        _bounded("slot bytes", self.slot_bytes, 1, MAX_SLOT_BYTES)
        if not (math.isfinite(self.ttl_s) and 0 <= self.ttl_s <= MAX_TTL_S):
            raise LoanError(f"ttl is {self.ttl_s}, allowed is 0 to {MAX_TTL_S}")

    @property
    def peer(self) -> PeerId:
        """The lender's life that lent."""
        return PeerId(self.endpoint, self.incarnation)

    def to_bytes(self) -> bytes:
        """Encode; the inverse of `from_bytes`."""
        fixed = _FIXED.pack(
            self.incarnation, self.lease, self.slot_bytes, self.ttl_s, len(self.addresses), self.more
        )
        texts = b"".join(_LENGTH.pack(len(text)) + text for text in (self.endpoint.encode(), self.metadata))
        body = fixed + texts + struct.pack(f"<{len(self.addresses)}Q", *self.addresses)
        front = _PREFIX.pack(MAGIC, VERSION, _PREFIX.size + len(body) + _SUM.size) + body
        return front + _SUM.pack(xxhash.xxh3_64_intdigest(front))

    @classmethod
    def from_bytes(cls, data: bytes) -> SlabLoan:
        """Decode exactly one loan; LoanError for anything else."""
        if len(data) < _PREFIX.size + _FIXED.size + _SUM.size:
            raise LoanError(f"{len(data)} bytes are too few for a loan")
        magic, version, total = _PREFIX.unpack_from(data)
        if magic != MAGIC or version != VERSION or total != len(data):
            raise LoanError("not a loan of this version and length")
        front, (checksum,) = data[: -_SUM.size], _SUM.unpack(data[-_SUM.size :])
        if checksum != xxhash.xxh3_64_intdigest(front):
            raise LoanError("the loan's checksum does not match")
        incarnation, lease, slot_bytes, ttl_s, blocks, more = _FIXED.unpack_from(front, _PREFIX.size)
        at = _PREFIX.size + _FIXED.size
        endpoint, at = _text(front, at)
        metadata, at = _text(front, at)
        if blocks > MAX_BLOCKS or len(front) - at != 8 * blocks or more > 1:
            raise LoanError("the loan's blocks do not fill it")
        addresses = struct.unpack_from(f"<{blocks}Q", front, at)
        try:
            name = endpoint.decode()
        except UnicodeDecodeError as error:
            raise LoanError("the lender's name is not UTF-8") from error
        return cls(name, incarnation, lease, ttl_s, slot_bytes, addresses, metadata, bool(more))


def _text(data: bytes, at: int) -> tuple[bytes, int]:
    """A length-delimited field and where it ends."""
    if at + _LENGTH.size > len(data):
        raise LoanError("the loan is truncated")
    start = at + _LENGTH.size
    end = start + int(_LENGTH.unpack_from(data, at)[0])
    if end > len(data):
        raise LoanError("a field is longer than the loan")
    return data[start:end], end


def _bounded(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise LoanError(f"{name} is {value}, allowed is {low} to {high}")
