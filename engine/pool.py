"""The page pool: every page belongs to one kv head of one layer and has one size in bytes.

One free list serves all layers, heads, sequences and formats, so a ragged cache (per-layer, per-head, per-sequence
lengths) costs exactly what it keeps, up to one partly filled page per head. Pages are reference-counted with
copy-on-write. The bytes inside a page are `kernels/`' business; this file only counts. One thread owns a pool.

Where the next token goes is a slot of its own (`write`): the end of a head that grows, the hole that an evicted token
left in one that does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.model import ModelSpec
from kernels import ops
from kernels.layout import PageLayout, min_page_bytes, page_layout

_ALIGN = 64
# Decode attention is summed up in splits of so many slots from slot 0: numbers that differ by a multiple of it give the
# same bits.
_SPLIT = 512
_NO_PAGE = -1


class OutOfPages(Exception):
    """Fewer free pages than asked for; nothing was changed. The scheduler preempts and tries again."""


@dataclass(frozen=True)
class PoolUse:
    """Pages by state."""

    total: int
    used: int

    @property
    def free(self) -> int:
        return self.total - self.used


def pool_page_bytes(spec: ModelSpec) -> int:
    """Smallest page that holds a 16-token tile of every layer's head size."""
    return max(min_page_bytes(layer.head_dim, spec.dtype) for layer in spec.layers)


class PagePool:
    """Pages, page tables and lengths of all sequences of one decode engine.

    `tables` int32 [rows, L, Hk, P], `lengths` int32 [rows, L, Hk] (slots in use, a hole included), `write` int32
    [rows, L, Hk] (the next token's slot: `lengths`, or the hole), `starts` int32 [rows, L] (first visible slot:
    windowed layers only). A row is one sequence. Layers with fewer kv heads than the widest leave the rest empty. Slots
    before `starts` hold no pages of their own, so numbers may begin anywhere.
    """

    def __init__(self, spec: ModelSpec, pages: int, rows: int, max_tokens: int) -> None:
        """`max_tokens`: slots that one head of one sequence can ever need (the context length)."""
        self.spec = spec
        self.page_bytes = pool_page_bytes(spec)
        self.layouts: list[PageLayout] = [
            page_layout(s.head_dim, spec.dtype, self.page_bytes) for s in spec.layers
        ]
        self.slots = np.array([layout.slots for layout in self.layouts], np.int32)
        self.memory = _aligned_bytes(pages, self.page_bytes)
        widest = -(-max_tokens // int(self.slots.min()))
        shape = (rows, len(spec.layers), spec.max_kv_heads)
        self._tables = np.full((*shape, widest), _NO_PAGE, np.int32)
        self._lengths = np.zeros(shape, np.int32)
        self._write = np.zeros(shape, np.int32)
        self._starts = np.zeros(shape[:2], np.int32)
        self.tables, self.lengths = torch.from_numpy(self._tables), torch.from_numpy(self._lengths)
        self.write, self.starts = torch.from_numpy(self._write), torch.from_numpy(self._starts)
        self.early_period = np.lcm(self.slots.astype(np.int64), _SPLIT)
        self._refs = np.zeros(pages, np.int32)
        self._free = np.arange(pages - 1, -1, -1, dtype=np.int32)
        self._free_count = pages
        self._free_rows = list(range(rows - 1, -1, -1))
        self._forked: set[int] = set()
        self._rewritten = np.zeros(rows, bool)  # every page is written to, not only the next token's
        self._ready = np.zeros(rows, bool)  # has room for one more token in every head
        self._heads = np.array([layer.kv_heads for layer in spec.layers], np.int32)
        self._head_mask = np.arange(spec.max_kv_heads)[None, :] < self._heads[:, None]
        self._windows = np.array([layer.window or 0 for layer in spec.layers], np.int32)
        self._windowed = np.flatnonzero(self._windows)
        self._scratch = torch.empty(0)
        self._layer, self._head = np.arange(len(spec.layers))[:, None], np.arange(spec.max_kv_heads)

    @property
    def use(self) -> PoolUse:
        return PoolUse(len(self._refs), len(self._refs) - self._free_count)

    @property
    def rows(self) -> int:
        return len(self._lengths)

    @property
    def free_rows(self) -> int:
        return len(self._free_rows)

    def pages_for(self, counts: NDArray[np.integer]) -> int:
        """Most pages that a new sequence with `counts` [L, Hk] slots takes, wherever its windowed layers begin."""
        slots = self.slots[:, None]
        straddling = np.where((self._windows[:, None] > 0) & (counts > 0), counts + slots - 1, counts)
        return int((-(-straddling // slots))[self._head_mask].sum())

    def pages_at(self, counts: NDArray[np.int32], more: int, most: NDArray[np.int64] | None = None) -> int:
        """Most pages that a sequence holds while `counts` [L, Hk] slots grow by `more` tokens each.

        Windowed layers stop growing at the window, the newest token included; `most` [L, Hk] bounds the slots of heads
        that evict while they grow.
        """
        grown = counts.astype(np.int64) + more
        if most is not None:
            grown = np.minimum(grown, most)
        windows = self._windows[:, None]
        return self.pages_for(np.where(windows > 0, np.minimum(grown, windows), grown))

    def open(self, counts: NDArray[np.int32], first_slots: NDArray[np.integer] | None = None) -> int:
        """A row with pages for `counts` [L, Hk] slots, contents undefined. Raises `OutOfPages`.

        Layer l uses slots from `first_slots`[l] (0 by default); no page lies wholly before it.
        """
        assert self._free_rows, "the scheduler admits no more sequences than there are rows"
        layers = len(self.slots)
        begin = (np.zeros(layers, np.int64) if first_slots is None else first_slots.astype(np.int64))[:, None]
        end, slots = np.where(self._head_mask, begin + counts, 0), self.slots[:, None]
        first, last = begin // slots, -(-end // slots)
        needed = np.where(self._head_mask & (counts > 0), last - first, 0)
        pages = self._take(int(needed.sum()))
        row = self._free_rows.pop()
        place = np.arange(self._tables.shape[3])[None, None, :]
        self._tables[row][(place >= first[..., None]) & (place < (first + needed)[..., None])] = pages
        self._lengths[row] = self._write[row] = end
        self._starts[row] = begin[:, 0]
        self._ready[row] = self._rewritten[row] = False
        return row

    def fork(self, row: int) -> int:
        """A second row that shares every page of `row`; whoever appends to a shared page copies it first."""
        assert self._free_rows, "the scheduler admits no more sequences than there are rows"
        copy = self._free_rows.pop()
        for array in (self._tables, self._lengths, self._write, self._starts, self._rewritten):
            array[copy] = array[row]
        held = self._tables[row][self._tables[row] >= 0]
        self._refs[held] += 1
        self._forked.update((row, copy))
        self._ready[[row, copy]] = False
        return copy

    def close(self, row: int) -> None:
        """Give a row and its pages back."""
        assert row not in self._free_rows, f"row {row} closed twice"
        self._release(self._tables[row][self._tables[row] >= 0])
        self._tables[row] = _NO_PAGE
        self._lengths[row] = self._write[row] = 0
        self._starts[row] = 0
        self._forked.discard(row)
        self._free_rows.append(row)

    def reserve_slot(self, rows: NDArray[np.int64]) -> None:
        """Make room for one more token in every head of `rows`: new pages at page ends, copies of shared ones.

        Copied is what the step writes to: the page of the next token's slot, every page of a row that is `rewrite`-n.
        Raises `OutOfPages` with nothing changed. Lengths stay as they are until `advance`; until then, asking again is
        free.
        """
        rows = rows[~self._ready[rows]]
        if not len(rows):
            return
        row = rows[:, None, None]
        index = self._write[rows] // self.slots[:, None]
        current = self._tables[row, self._layer, self._head, index]
        missing = np.argwhere((current < 0) & self._head_mask)
        shared = self._shared_pages(rows, index, current)
        pages = self._take(len(missing) + len(shared))
        for place, page in zip(shared, pages[len(missing) :], strict=True):
            old = self._tables[place]
            ops.copy_page(self.memory, int(old), int(page))
            self._tables[place] = page
            self._refs[old] -= 1
        batch, layers, heads = missing.T
        self._tables[rows[batch], layers, heads, index[batch, layers, heads]] = pages[: len(missing)]
        self._ready[rows] = True

    def _shared_pages(
        self, rows: NDArray[np.int64], index: NDArray[np.int32], current: NDArray[np.int32]
    ) -> list[tuple[int, int, int, int]]:
        """Places (row, layer, head, page index) about to be written whose page another row also holds.

        `index` and `current` [B, L, Hk] are page index and page of the next token's slots. One owner is left alone.
        """
        if not self._forked.intersection(rows.tolist()):
            return []
        written = []
        for b, layer, head in np.argwhere((current >= 0) & (self._refs[current] > 1)).tolist():
            if not self._rewritten[rows[b]]:
                written.append((int(rows[b]), layer, head, int(index[b, layer, head])))
        for row in rows[self._rewritten[rows]].tolist():
            held = self._tables[row]
            written += [(row, *place) for place in np.argwhere((held >= 0) & (self._refs[held] > 1)).tolist()]
        owners: dict[int, int] = {}
        copies = []
        for place in written:
            page = int(self._tables[place])
            left = owners.get(page, int(self._refs[page]))
            if left > 1:
                copies.append(place)
                left -= 1
            owners[page] = left
        return copies

    def rewrite(self, row: int) -> None:
        """From now on every step may write to every slot of `row`: `reserve_slot` leaves it no shared page."""
        self._rewritten[row] = True
        self._ready[row] = False

    def advance(self, rows: NDArray[np.int64]) -> None:
        """Count the token just appended, and drop pages that fell out of a windowed layer's sight."""
        ends = np.maximum(self._lengths[rows], self._write[rows] + 1) * self._head_mask
        self._lengths[rows] = self._write[rows] = ends
        self._ready[rows] = False
        if len(self._windowed):
            self.see_window(rows)

    def aim(self, row: int, layers: NDArray[np.int64], write: NDArray[np.int32]) -> None:
        """The next token of `layers` of a row goes to slots `write` [len(layers), Hk]: holes, or the end of a head."""
        assert (write <= self._lengths[row, layers]).all(), "a slot beyond the end"
        self._write[row, layers] = write
        self._ready[row] = False

    def early_slots(self, first_slots: NDArray[np.integer]) -> NDArray[np.int64]:
        """The lowest first slots [L] that windowed layers may have instead of these with the same results."""
        return first_slots.astype(np.int64) % self.early_period

    def slide(self, row: int) -> None:
        """Number a windowed layer's slots anew where the next one would lie behind the page table: rows without end."""
        table = self._tables[row]
        full = self._lengths[row, :, 0] >= table.shape[2] * self.slots
        for layer in self._windowed[full[self._windowed]].tolist():
            start = int(self._starts[row, layer])
            down = start - int(self.early_slots(self._starts[row])[layer])
            assert down > 0, "a page table that is too short for such a row"
            places = down // int(self.slots[layer])
            table[layer, :, :-places] = table[layer, :, places:].copy()
            table[layer, :, -places:] = _NO_PAGE
            self._starts[row, layer] = start - down
            for numbers in (self._lengths, self._write):
                numbers[row, layer] -= down * self._head_mask[layer]

    def part(self, row: int, layers: NDArray[np.int64], moves: NDArray[np.int64]) -> None:
        """Give a row pages of its own where slots are to be written to that lie in pages which others hold too.

        moves [len(layers), Hk, C]: where the new contents of each slot come from, -1 or itself where it is not written.
        Contents are copied. Raises `OutOfPages`, nothing changed.
        """
        if row not in self._forked:
            return
        layer, head, slot = np.nonzero((moves >= 0) & (moves != np.arange(moves.shape[-1])))
        page = slot // self.slots[layers[layer]]
        places = {(int(layers[i]), int(h), int(p)) for i, h, p in zip(layer, head, page, strict=True)}
        held = self._tables[row]
        shared = [place for place in sorted(places) if self._refs[held[place]] > 1]
        pages = self._take(len(shared))
        for place, page in zip(shared, pages, strict=True):
            old = held[place]
            ops.copy_page(self.memory, int(old), int(page))
            held[place] = page
            self._refs[old] -= 1

    def shrink(self, row: int, counts: NDArray[np.int32]) -> None:
        """Leave a row its first `counts` [L, Hk] slots and give the pages behind them back."""
        changed = (counts != self._lengths[row]) & self._head_mask
        assert (counts <= self._lengths[row]).all(), "heads do not grow by shrinking"
        assert not changed[self._windowed].any(), "windowed layers let go of pages by themselves"
        held = self._tables[row]
        inside = np.arange(held.shape[2]) < -(-counts // self.slots[:, None])[..., None]
        behind = ~inside & changed[..., None] & (held >= 0)
        gone = held[behind]
        held[behind] = _NO_PAGE
        self._release(gone)
        self._lengths[row] = self._write[row] = counts
        self._ready[row] = False

    def see_window(self, rows: NDArray[np.int64]) -> None:
        """Set `starts` of windowed layers for the next token, and free pages wholly before them."""
        layers, slots = self._windowed, self.slots[self._windowed]
        at = rows[:, None], layers
        old = self._starts[at]
        # The next token lands at slot `length` and sees window-1 slots before it.
        new = np.maximum(old, self._lengths[rows[:, None], layers, 0] - self._windows[layers] + 1)
        self._starts[at] = new
        before, after = old // slots, new // slots
        for b, i in np.argwhere(after > before).tolist():
            gone = self._tables[rows[b], layers[i], :, before[b, i] : after[b, i]]
            self._release(gone[gone >= 0])
            gone[...] = _NO_PAGE

    def scratch(self, *shape: int) -> Tensor:
        """f32 of `shape`, contents undefined, until it is asked for again: what a step writes down besides KV.

        Kept, because new memory of this size costs more than what is written there.
        """
        size = math.prod(shape)
        if self._scratch.numel() < size:
            self._scratch = torch.empty(size)
        return self._scratch[:size].view(shape)

    def pages(self, row: int, layer: int) -> Tensor:
        """Page table int32 [Hk, P] of one layer of a row."""
        return self.tables[row, layer, : self.spec.layers[layer].kv_heads]

    def counts(self, row: int) -> NDArray[np.int32]:
        """Slots in use, int32 [L, Hk] (a copy)."""
        return self._lengths[row].copy()

    def first_slots(self, row: int) -> NDArray[np.int32]:
        """First visible slot per layer, int32 [L] (a copy)."""
        return self._starts[row].copy()

    def check(self) -> None:
        """AssertionError unless pages are free or counted as often as tables name them, and lengths fit their pages."""
        named = np.bincount(self._tables[self._tables >= 0], minlength=len(self._refs))
        assert (named == self._refs).all(), "reference counts differ from the tables"
        free = self._free[: self._free_count]
        assert len(set(free.tolist())) == self._free_count, "a page is free twice"
        assert (self._refs[free] == 0).all(), "a free page is referenced"
        assert int((self._refs > 0).sum()) + self._free_count == len(self._refs), "a page is lost"
        assert len(set(self._free_rows)) == len(self._free_rows), "a row is free twice"
        for row in self._free_rows:
            assert (self._tables[row] < 0).all() and not self._lengths[row].any(), (
                f"free row {row} holds pages"
            )
        assert ((self._write >= 0) & (self._write <= self._lengths)).all(), "a token would leave a gap"
        first = self._starts[:, :, None] // self.slots[None, :, None]
        seen = self._lengths > self._starts[:, :, None]
        last = np.where(seen, -(-self._lengths // self.slots[None, :, None]), 0)
        place = np.arange(self._tables.shape[3])
        inside = (place >= first[..., None]) & (place < last[..., None]) & self._head_mask[None, :, :, None]
        assert (self._tables[inside] >= 0).all(), "a visible slot has no page"

    def _take(self, count: int) -> NDArray[np.int32]:
        if count > self._free_count:
            raise OutOfPages(f"{count} pages asked for, {self._free_count} of {len(self._refs)} free")
        self._free_count -= count
        pages = self._free[self._free_count : self._free_count + count].copy()
        self._refs[pages] = 1
        return pages

    def _release(self, pages: NDArray[np.int32]) -> None:
        """Drop one reference to each page; those without one become free."""
        self._refs[pages] -= 1
        assert (self._refs[pages] >= 0).all(), "a page was freed twice"
        empty = pages[self._refs[pages] == 0]
        self._free[self._free_count : self._free_count + len(empty)] = empty
        self._free_count += len(empty)


def _aligned_bytes(pages: int, page_bytes: int) -> Tensor:
    """uint8 [pages, page_bytes], 64-byte aligned; touched (and so committed) page by page as it is used."""
    assert page_bytes % _ALIGN == 0
    raw = torch.empty(pages * page_bytes + _ALIGN, dtype=torch.uint8)
    shift = -raw.data_ptr() % _ALIGN
    return raw[shift : shift + pages * page_bytes].view(pages, page_bytes)
