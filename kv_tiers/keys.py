"""Names of KV: the same bytes get the same key in every process and on every machine, and nothing else does.

Two kinds of key, never confused. A `BlockKey` names the full KV of one block of a prompt: a hash chain over
the tokens up to the block's end, whatever recipe is used later. A `SurvivorKey` names what one recipe kept of
one exact prompt. What a lossy codec made of a block is another block: its `lossy_key` follows from the exact one, and
shows that it is one, so that nobody takes it for exact whatever way it came.

Every field that is hashed is tagged, says whether it is there, and is length-delimited, so no two different
field lists share an encoding; `None` differs from the empty string. The encoding is FINAL: golden values in
the tests pin it, and changing it means a new domain string.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kv_tiers.at_rest import AtRest

DIGEST_BYTES = 32

_FINGERPRINT_DOMAIN = b"kvtide/fingerprint/1"
_BLOCK_DOMAIN = b"kvtide/block/1"
_SURVIVOR_DOMAIN = b"kvtide/survivor/1"
_LOSSY_DOMAIN = b"kvtide/lossy/1"
_LOSSY_MARK = b"kvlossy"
_LOSSY_TAIL_BYTES = len(_LOSSY_MARK) + 1
"""A lossy key ends with the mark and its codec's number. An exact one does so by chance once in 2^64 blocks, and is
then only never written to an exact tier."""
_KNOWN_LOSSY = 1 << 16
_MAX_TOKEN = 2**32 - 1


def _check_digest(digest: bytes) -> None:
    if not isinstance(digest, bytes) or len(digest) != DIGEST_BYTES:
        raise ValueError(f"a digest is {DIGEST_BYTES} bytes, not {digest!r}")


@dataclass(frozen=True, order=True, slots=True)
class Fingerprint:
    """All but tokens and tenant that decides KV bytes: model, weights, dtype, layout, RoPE, adapter."""

    digest: bytes

    def __post_init__(self) -> None:
        _check_digest(self.digest)

    @classmethod
    def of(
        cls, *, config: str, weights: bytes, dtype: str, layout: str, rope: str, adapter: str | None
    ) -> Fingerprint:
        """Hash the named fields.

        `config` is the model's configuration as canonical JSON (sorted keys), `weights` a digest of the
        weight files, `layout` a `BlockLayout.layout_id`, `rope` the RoPE regime, `adapter` a content-defined
        adapter name or None.
        """
        fields = (
            _field(b"config", config.encode()),
            _field(b"weights", weights),
            _field(b"dtype", dtype.encode()),
            _field(b"layout", layout.encode()),
            _field(b"rope", rope.encode()),
            _field(b"adapter", None if adapter is None else adapter.encode()),
        )
        return cls(_hash(_FINGERPRINT_DOMAIN, *fields))


class _Digest(NamedTuple):
    digest: bytes


class BlockKey(_Digest):
    """Name of one block's full prompt KV. Made by `block_keys`, `lossy_key`; others only compare, sort and store it.

    A tuple, for books look keys up some fifty times per block, and a dataclass hashes and compares in Python.
    """

    __slots__ = ()

    def __new__(cls, digest: bytes) -> BlockKey:
        _check_digest(digest)
        return super().__new__(cls, digest)

    def __repr__(self) -> str:
        return f"BlockKey({self.digest[:6].hex()})"


@dataclass(frozen=True, order=True, slots=True)
class SurvivorKey:
    """Name of one recipe's survivors of one exact prompt. Made by `survivor_key`."""

    digest: bytes

    def __post_init__(self) -> None:
        _check_digest(self.digest)

    def __repr__(self) -> str:
        return f"SurvivorKey({self.digest[:6].hex()})"


def block_keys(
    fingerprint: Fingerprint,
    tokens: Sequence[int] | np.ndarray,
    block_tokens: int,
    *,
    tenant: str | None = None,
) -> list[BlockKey]:
    """One key per FULL block of `tokens`, in order; a key depends on every token up to its block's end.

    A trailing partial block has no key. Raises ValueError for a token outside u32 or a block size below 1.
    """
    if block_tokens < 1:
        raise ValueError(f"block_tokens must be at least 1, not {block_tokens}")
    packed = _pack_tokens(tokens)
    block_bytes = 4 * block_tokens
    # Fields that do not change along the chain are absorbed once; each block continues from a copy of that.
    shared = _start(
        _BLOCK_DOMAIN,
        _field(b"fingerprint", fingerprint.digest),
        _field(b"tenant", None if tenant is None else tenant.encode()),
        _field(b"block_tokens", struct.pack("<I", block_tokens)),
    )
    parent_head = _field_head(b"parent", DIGEST_BYTES)
    tokens_head = _field_head(b"tokens", block_bytes)
    parent = _field(b"parent", None)
    keys: list[BlockKey] = []
    for end in range(block_bytes, len(packed) + 1, block_bytes):
        state = shared.copy()
        state.update(parent + tokens_head + packed[end - block_bytes : end])
        digest = state.digest()
        keys.append(BlockKey(digest))
        parent = parent_head + digest
    return keys


@functools.lru_cache(maxsize=_KNOWN_LOSSY)
def lossy_key(key: BlockKey, codec: AtRest) -> BlockKey:
    """Key of what a lossy codec makes of the block of an exact key. The codec's version is the domain's."""
    assert codec is not AtRest.EXACT and is_exact(key), "only what was computed is encoded"
    fields = (_field(b"block", key.digest), _field(b"codec", codec.label.encode()))
    body = _start(_LOSSY_DOMAIN, *fields, size=DIGEST_BYTES - _LOSSY_TAIL_BYTES).digest()
    return BlockKey(body + _LOSSY_MARK + bytes((codec,)))


def is_exact(key: BlockKey) -> bool:
    """Whether a block of that key holds KV as computed."""
    return key.digest[-_LOSSY_TAIL_BYTES:-1] != _LOSSY_MARK


def is_kept_as(key: BlockKey, codec: AtRest) -> bool:
    """Whether blocks of that key are what this codec makes."""
    if codec is AtRest.EXACT:
        return is_exact(key)
    return key.digest[-_LOSSY_TAIL_BYTES:] == _LOSSY_MARK + bytes((codec,))


def kept_as(key: BlockKey, codec: AtRest) -> BlockKey:
    """The key under which a tier of this codec keeps the block of an exact key; a lossy one is what it is."""
    return key if codec is AtRest.EXACT or not is_exact(key) else lossy_key(key, codec)


def survivor_key(
    fingerprint: Fingerprint,
    tokens: Sequence[int] | np.ndarray,
    recipe_id: str,
    *,
    tenant: str | None = None,
    at_rest: AtRest = AtRest.EXACT,
) -> SurvivorKey:
    """Key of what `recipe_id` keeps of exactly these tokens (no prefix of them, no longer prompt).

    `at_rest`: the codec that some of the prompt's KV came through; those survivors are others.
    """
    fields = [
        _field(b"fingerprint", fingerprint.digest),
        _field(b"tenant", None if tenant is None else tenant.encode()),
        _field(b"recipe", recipe_id.encode()),
        _field(b"tokens", _pack_tokens(tokens)),
    ]
    if at_rest is not AtRest.EXACT:
        fields.append(_field(b"at_rest", at_rest.label.encode()))
    return SurvivorKey(_hash(_SURVIVOR_DOMAIN, *fields))


def _pack_tokens(tokens: Sequence[int] | np.ndarray) -> bytes:
    """Token ids as little-endian u32, without truncating one that does not fit."""
    if len(tokens) == 0:
        return b""
    ids = np.asarray(tokens)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"tokens must be a flat list of integers, not {ids.dtype} of shape {ids.shape}")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high > _MAX_TOKEN:
        raise ValueError(f"token ids must lie in 0..{_MAX_TOKEN}, found {low if low < 0 else high}")
    return ids.astype("<u4").tobytes()


def _field_head(tag: bytes, length: int) -> bytes:
    """Tag length and tag, 1 for "present", value length (u64)."""
    return bytes((len(tag),)) + tag + b"\x01" + struct.pack("<Q", length)


def _field(tag: bytes, value: bytes | None) -> bytes:
    if value is None:
        return bytes((len(tag),)) + tag + b"\x00"
    return _field_head(tag, len(value)) + value


def _start(domain: bytes, *fields: bytes, size: int = DIGEST_BYTES) -> hashlib.blake2b:
    return hashlib.blake2b(_field(b"domain", domain) + b"".join(fields), digest_size=size)


def _hash(domain: bytes, *fields: bytes) -> bytes:
    return _start(domain, *fields).digest()
