"""What an NVMe tier's worker threads do for one call: read and verify, or write by the commit protocol."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kv_tiers.keys import BlockKey
from kv_tiers.nvme_file import NvmeFile
from kv_tiers.nvme_index import Placed, SlotIndex
from kv_tiers.nvme_io import FileEngine, FileSpan, Motion, not_begun
from kv_tiers.tier import Fetched
from kv_tiers.verify import verify_block


@dataclass(frozen=True)
class Medium:
    """An open tier's file, its index and what moves its bytes."""

    file: NvmeFile
    index: SlotIndex
    engine: FileEngine

    def span(self, slot: int, buffer: memoryview) -> FileSpan:
        """A whole slot."""
        geometry = self.index.geometry
        return FileSpan(geometry.data + slot * geometry.slot_bytes, buffer)


class ReadJob:
    """Reads blocks into buffers, each verified while others are still in flight.

    After `run`: `answers` (HIT, CORRUPT or FAILED) and `errors` per block. Records of corrupt blocks up to
    generation `upto` are void. The caller keeps the slots.
    """

    def __init__(
        self, medium: Medium, placed: Sequence[tuple[BlockKey, int]], into: Sequence[memoryview], upto: int
    ) -> None:
        self.answers = [Fetched.FAILED] * len(placed)
        self.errors: list[OSError | None] = [None] * len(placed)
        self._medium = medium
        self._placed = placed
        self._into = into
        self._upto = upto

    def run(self, stop: Callable[[], bool]) -> None:
        medium = self._medium
        spans = [
            medium.span(slot, buffer) for (_, slot), buffer in zip(self._placed, self._into, strict=True)
        ]
        medium.engine.run(Motion.READ, spans, self._ended, stop)
        corrupt = [
            (slot, key)
            for (key, slot), answer in zip(self._placed, self.answers, strict=True)
            if answer is Fetched.CORRUPT
        ]
        if corrupt:
            medium.index.retract(medium.engine, corrupt, self._upto)

    def _ended(self, index: int, error: OSError | None) -> None:
        if error is not None:
            self.errors[index] = error
        elif verify_block(self._into[index], self._placed[index][0]) is None:
            self.answers[index] = Fetched.HIT
        else:
            self.answers[index] = Fetched.CORRUPT


class WriteJob:
    """Writes blocks into slots that the caller owns: voids their records, writes, records those that were written.

    `errors` per block; before `run`, each has not begun. `generation`: the first of as many as there are blocks.
    """

    def __init__(
        self, medium: Medium, placed: Sequence[Placed], blocks: Sequence[memoryview], generation: int
    ) -> None:
        self.errors: list[OSError | None] = [not_begun()] * len(placed)
        self._medium = medium
        self._placed = placed
        self._blocks = blocks
        self._generation = generation

    def run(self, stop: Callable[[], bool]) -> None:
        medium = self._medium
        error = medium.index.blank(medium.engine, [place.slot for place in self._placed], stop)
        if error is not None:
            self.errors = [error] * len(self._placed)
            return
        spans = [
            medium.span(place.slot, block) for place, block in zip(self._placed, self._blocks, strict=True)
        ]
        medium.engine.run(Motion.WRITE, spans, self._ended, stop)
        written = [place for place, error in zip(self._placed, self.errors, strict=True) if error is None]
        if not written:
            return
        error = medium.file.sync() or medium.index.commit(medium.engine, written, self._generation, stop)
        if error is not None:
            self.errors = [error if old is None else old for old in self.errors]

    def _ended(self, index: int, error: OSError | None) -> None:
        self.errors[index] = error
