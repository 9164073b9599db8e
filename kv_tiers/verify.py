"""Whether bytes are a whole block, for tiers that move blocks without knowing their layout."""

from __future__ import annotations

from collections.abc import Sequence

from kernels.blocks import BlockForm, Found
from kv_tiers import block_copy
from kv_tiers.block import BlockFault, read_sealed_header
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


class BlockCheck:
    """`whole_blocks` again and again: of what form blocks are is read once. Thread safe."""

    def __init__(self) -> None:
        self._form: BlockForm | None = None

    def whole(self, views: BlockViews, keys: Sequence[BlockKey]) -> list[bool]:
        """Of each buffer, whether it holds the block of its key."""
        form = self._form
        if form is None:
            header = read_sealed_header(views[0])
            form = self._form = None if isinstance(header, BlockFault) else header.layout.form
        good = [True] * len(keys)
        left: Sequence[int] = range(len(keys))
        if form is not None:
            marks = block_copy.chosen().check(views, None, form, b"".join([key.digest for key in keys]))
            if marks.count(Found.GOOD) == len(keys):
                return good
            left = [index for index, mark in enumerate(marks) if mark != Found.GOOD]
        # Of another form, or bad.
        faults = _faults(views.pick(left), None, [keys[index] for index in left])
        for index, fault in zip(left, faults, strict=True):
            good[index] = fault is None
        return good


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
    """The layout is taken from a block, and all that have it are checked in one call, so that a thread that waits for
    others to let it run does so once; nearly always that is all of them.
    """
    assert len(sources) == len(keys)
    assert targets is None or [*sources.sizes] == [*targets.sizes], "copies are of the same size"
    faults: list[BlockFault | None] = [None] * len(keys)
    left: Sequence[int] = range(len(keys))
    while left:
        header = read_sealed_header(sources[left[0]])
        if isinstance(header, BlockFault):
            faults[left[0]], left = header, left[1:]
            continue
        digests = b"".join([keys[index].digest for index in left])
        into = None if targets is None else targets.pick(left)
        found = block_copy.chosen().check(sources.pick(left), into, header.layout.form, digests)
        others = []
        for index, what in zip(left, found, strict=True):
            if what == Found.OTHER_FORM and index != left[0]:
                others.append(index)
            elif what != Found.GOOD:
                faults[index] = _fault(sources[index], keys[index])
        left = others
    return faults


def _fault(view: memoryview, key: BlockKey) -> BlockFault:
    """Why bytes are not the block of that key. They may have become it meanwhile."""
    header = read_sealed_header(view)
    if isinstance(header, BlockFault):
        return header
    return BlockFault.CORRUPT if header.key == key.digest else BlockFault.KEY
