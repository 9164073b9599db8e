"""Whether bytes are a whole block, for tiers that move blocks without knowing their layout."""

from __future__ import annotations

from collections.abc import Sequence

from kv_tiers import block_copy
from kv_tiers.block import BlockFault, SealedHeader, read_sealed_header
from kv_tiers.block_copy import BlockViews, Buffer
from kv_tiers.keys import BlockKey


def verify_block(buf: Buffer, key: BlockKey) -> BlockFault | None:
    """Why `buf` (which may be longer) does not start with the block of that key; None if it does, to the last byte.

    Every layer's checksum is compared. Model and layout are for the reader who uses the block to compare.
    """
    return _faults(BlockViews([buf]), None, [key])[0]


def whole_blocks(bufs: Sequence[Buffer], keys: Sequence[BlockKey]) -> list[bool]:
    """Of each buffer, whether it holds the block of its key."""
    return [fault is None for fault in _faults(BlockViews(bufs), None, keys)]


def copy_verified(source: Buffer, target: Buffer, key: BlockKey) -> BlockFault | None:
    """Copy a buffer, and say of the copy what `verify_block` would: the source may change meanwhile.

    Buffers are of one length and do not overlap. Of what is not that block the target gets some bytes or none.
    """
    return _faults(BlockViews([source]), BlockViews([target]), [key])[0]


def copy_whole_blocks(
    sources: Sequence[Buffer], targets: Sequence[Buffer], keys: Sequence[BlockKey]
) -> list[bool]:
    """`copy_verified` of many; of each, whether the target holds its block now."""
    return [fault is None for fault in _faults(BlockViews(sources), BlockViews(targets), keys)]


def _faults(
    sources: BlockViews, targets: BlockViews | None, keys: Sequence[BlockKey]
) -> list[BlockFault | None]:
    assert len(sources) == len(keys) and (targets is None or len(targets) == len(keys))
    faults: list[BlockFault | None] = [None] * len(keys)
    sealed: dict[int, SealedHeader] = {}
    for index, (view, key) in enumerate(zip(sources, keys, strict=True)):
        header = read_sealed_header(view)
        if isinstance(header, BlockFault):
            faults[index] = header
        elif header.key != key.digest:
            faults[index] = BlockFault.KEY
        else:
            sealed[index] = header
    for group in _same_layout(sealed):
        good = _check(group, {index: sealed[index] for index in group}, sources, targets)
        for index, whole in zip(group, good, strict=True):
            if not whole:
                faults[index] = BlockFault.CORRUPT
    return faults


def _check(
    group: Sequence[int], sealed: dict[int, SealedHeader], sources: BlockViews, targets: BlockViews | None
) -> list[bool]:
    """Layers of blocks of one layout: copied if there are targets, and verified. One call, so that a thread that
    waits for others to let it run does so once.
    """
    layout = sealed[group[0]].layout
    checksums = b"".join([sealed[index].checksums for index in group])
    if targets is None:
        return block_copy.chosen().check(sources.pick(group), None, layout.parts, checksums)
    end = layout.header_bytes + layout.payload_bytes
    for index in group:
        source, target = sources[index], targets[index]
        assert len(source) == len(target), f"{len(source)} bytes into {len(target)}"
        target[: layout.header_bytes] = sealed[index].raw
        target[end:] = source[end:]
    return block_copy.chosen().check(sources.pick(group), targets.pick(group), layout.parts, checksums)


def _same_layout(sealed: dict[int, SealedHeader]) -> list[list[int]]:
    """Indexes by layout; nearly always one list."""
    groups: dict[int, list[int]] = {}
    for index, header in sealed.items():
        groups.setdefault(id(header.layout), []).append(index)
    return list(groups.values())
