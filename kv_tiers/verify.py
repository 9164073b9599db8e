"""Whether bytes are a whole block, for tiers that move blocks without knowing their layout."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

from kernels.blocks import Found, Turn
from kv_tiers import block_copy
from kv_tiers.block import BlockFault, read_sealed_header
from kv_tiers.block_copy import BlockViews, Buffer, Landing
from kv_tiers.keys import BlockKey


def verify_block(buf: Buffer, key: BlockKey) -> BlockFault | None:
    """Why `buf` (which may be longer) does not start with the block of that key; None if it does, to the last byte.

    Every layer's checksum is compared. Model and layout are for the reader who uses the block to compare.
    """
    return _faults(BlockViews([buf]), None, [key])[0]


def whole_blocks(bufs: Sequence[Buffer], keys: Sequence[BlockKey]) -> list[bool]:
    """Of each buffer, whether it holds the block of its key."""
    return [fault is None for fault in _faults(BlockViews(bufs), None, keys)]


class LandingBlocks:
    """`whole_blocks` of what lands in order, in pieces: one thread says so, and another may `follow`, with one call.

    The one that lands them does what the other does not get round to, while the bytes are still in a cache.
    """

    def __init__(self, views: BlockViews, keys: Sequence[BlockKey], step: int) -> None:
        """`step`: blocks that land at once."""
        assert len(views) == len(keys)
        self._views = views
        self._keys = keys
        self._step = step
        self._copies = block_copy.chosen()
        self._turn = Turn()
        self._landing: Landing | None = None
        self._opened = threading.Event()

    def landed(self, count: int) -> None:
        """So many leading blocks are there now."""
        if self._landing is None:
            self._landing = self._open()
            self._opened.set()
        self._copies.landed(self._turn, count, over=False)
        if self._turn.landed - self._turn.taken >= 2 * self._step:
            self._catch_up()

    def end(self) -> None:
        """No more will land. Returns when all that has is checked, but for the block that a follower is at."""
        self._copies.landed(self._turn, self._turn.landed, over=True)
        self._opened.set()
        self._catch_up()

    def follow(self) -> None:
        """Check what lands until the end. For another thread."""
        self._opened.wait()
        if self._landing is not None:
            self._copies.check_landed(self._landing, self._turn, wait=True)

    def whole(self) -> list[bool]:
        """Of those that have landed, whether they are the blocks of their keys. After the end."""
        count = self._turn.landed
        marks = bytes(count) if self._landing is None else bytes(self._landing.found[:count])
        good = [True] * count
        if marks.count(Found.GOOD) == count:
            return good
        # The rest is of another form, not finished, or bad.
        rest = [index for index, mark in enumerate(marks) if mark != Found.GOOD]
        for index, fault in zip(rest, self._faults_of(rest), strict=True):
            good[index] = fault is None
        return good

    def _catch_up(self) -> None:
        if self._landing is not None:
            self._copies.check_landed(self._landing, self._turn, wait=False)

    def _faults_of(self, indexes: Sequence[int]) -> list[BlockFault | None]:
        return _faults(self._views.pick(indexes), None, [self._keys[index] for index in indexes])

    def _open(self) -> Landing | None:
        """The first block says of what form they are. None: it is no block, so they are looked at one by one."""
        header = read_sealed_header(self._views[0])
        if isinstance(header, BlockFault):
            return None
        keys = b"".join([key.digest for key in self._keys])
        return Landing(self._views, header.layout.form, keys, (ctypes.c_uint8 * len(self._keys))())


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
