"""Whether bytes are a whole block, for tiers that move blocks without knowing their layout."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from kv_tiers.block import BlockFault, Buffer, flat_bytes, read_header
from kv_tiers.keys import BlockKey


def verify_block(buf: Buffer, key: BlockKey) -> BlockFault | None:
    """Why `buf` (which may be longer) does not start with the block of that key; None if it does, to the last byte.

    Every layer's checksum is compared. Model and layout are for the reader who uses the block to compare.
    """
    header = read_header(buf)
    if isinstance(header, BlockFault):
        return header
    if header.key != key:
        return BlockFault.KEY
    view = flat_bytes(buf)
    layout = header.layout
    for layer, checksum in enumerate(header.checksums):
        start = layout.layer_offset(layer)
        if xxhash.xxh3_64_intdigest(view[start : start + layout.layer_bytes(layer)]) != checksum:
            return BlockFault.CORRUPT
    return None


def whole_blocks(bufs: Sequence[Buffer], keys: Sequence[BlockKey]) -> list[bool]:
    """Of each buffer, whether it holds the block of its key."""
    return [verify_block(buf, key) is None for buf, key in zip(bufs, keys, strict=True)]
