"""The page pool against a stupid simulation that keeps every value in a Python list."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tiny_models import one_thread, plain_spec  # noqa: F401

from engine.pool import OutOfPages, PagePool, pool_page_bytes
from kernels import ops

# (kv heads, head size, window): page sizes in slots differ, windows are smaller and larger than a page.
SPEC = plain_spec([(2, 32, None), (1, 16, 20), (3, 16, None), (2, 32, 5)])
HEADS = [layer.kv_heads for layer in SPEC.layers]
WINDOWS = [layer.window for layer in SPEC.layers]
ROWS, CONTEXT = 5, 300
PLACES = [(layer, head) for layer, heads in enumerate(HEADS) for head in range(heads)]


def vectors(numbers, dim):
    """Recognisable K and V [n, dim] of numbered tokens."""
    k = torch.tensor(numbers, dtype=torch.float32).view(-1, 1) + torch.arange(dim) / 64
    return k.contiguous(), -k - 1


class SimulatedPage:
    """A page is an object; who refers to it holds it."""

    def __init__(self, values=()):
        self.values = list(values)

    def put(self, place, value):
        self.values[place:] = [None] * (place - len(self.values)) + [value]


class PoolMachine(RuleBasedStateMachine):
    """Every call goes to the pool and to `self.rows`: row -> (layer, head) -> (length, {page index: page})."""

    @initialize(pages=st.integers(12, 70))
    def start(self, pages):
        self.pool = PagePool(SPEC, pages, ROWS, CONTEXT)
        self.pool.memory.fill_(255)  # NaN: what was not written shows
        self.slots = self.pool.slots.tolist()
        self.total = pages
        self.rows = {}
        self.lengths, self.begins = {}, {}
        self.token = 0

    def live_pages(self):
        return {page for row in self.rows.values() for pages in row.values() for page in pages.values()}

    def holders(self, page):
        return sum(page in pages.values() for row in self.rows.values() for pages in row.values())

    def numbers(self, count):
        self.token += count
        return list(range(self.token - count, self.token))

    @precondition(lambda self: len(self.rows) < ROWS)
    @rule(data=st.data())
    def open(self, data):
        counts = np.zeros((len(HEADS), max(HEADS)), np.int32)
        firsts = np.zeros(len(HEADS), np.int64)
        for layer, heads in enumerate(HEADS):
            window = WINDOWS[layer]
            if window is not None:
                counts[layer, :heads] = data.draw(st.integers(0, window - 1))
                firsts[layer] = data.draw(st.integers(0, 70))
            else:
                counts[layer, :heads] = data.draw(
                    st.lists(st.integers(1, 70), min_size=heads, max_size=heads)
                )
        places = {
            (layer, head): range(int(firsts[layer]), int(firsts[layer] + counts[layer, head]))
            for layer, head in PLACES
        }
        wanted = sum(
            len({slot // self.slots[layer] for slot in slots}) for (layer, _), slots in places.items()
        )
        straddling = sum(heads for heads, window in zip(HEADS, WINDOWS, strict=True) if window)
        assert wanted <= self.pool.pages_for(counts) <= wanted + straddling
        if wanted > self.total - len(self.live_pages()):
            self.refused(lambda: self.pool.open(counts, firsts))
            return
        row = self.pool.open(counts, firsts)
        assert row not in self.rows
        self.rows[row], self.lengths[row], self.begins[row] = {}, {}, firsts
        for layer, head in PLACES:
            numbers = self.numbers(int(counts[layer, head]))
            k, v = vectors(numbers, SPEC.layers[layer].head_dim)
            slots, size = places[layer, head], self.slots[layer]
            pages = self.pool.pages(row, layer)[head]
            ops.scatter(self.pool.memory, self.pool.layouts[layer], pages, k, v, slots.start)
            held = self.rows[row][layer, head] = {slot // size: SimulatedPage() for slot in slots}
            for slot, number in zip(slots, numbers, strict=True):
                held[slot // size].put(slot % size, number)
            self.lengths[row][layer, head] = slots.stop
        self.pool.see_window(np.array([row]))

    @precondition(lambda self: self.rows and len(self.rows) < ROWS)
    @rule(data=st.data())
    def fork(self, data):
        row = data.draw(st.sampled_from(sorted(self.rows)))
        copy = self.pool.fork(row)
        assert copy not in self.rows
        self.rows[copy] = {place: dict(pages) for place, pages in self.rows[row].items()}
        self.lengths[copy], self.begins[copy] = dict(self.lengths[row]), self.begins[row]

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def close(self, data):
        row = data.draw(st.sampled_from(sorted(self.rows)))
        self.pool.close(row)
        del self.rows[row], self.lengths[row]

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), steps=st.integers(1, 24))
    def decode(self, data, steps):
        batch = data.draw(st.lists(st.sampled_from(sorted(self.rows)), unique=True, min_size=1))
        for _ in range(steps):
            if max(length for row in batch for length in self.lengths[row].values()) >= CONTEXT:
                return
            if not self.reserve(batch):
                return
            self.append(batch)

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def a_step_that_reserved_and_failed(self, data):
        batch = data.draw(st.lists(st.sampled_from(sorted(self.rows)), unique=True, min_size=1))
        if max(length for row in batch for length in self.lengths[row].values()) < CONTEXT:
            self.reserve(batch)

    def reserve(self, batch):
        """Whether there was room for one more token of every row."""
        cost, left = 0, {}
        for row in batch:
            for layer, head in PLACES:
                page = self.rows[row][layer, head].get(self.lengths[row][layer, head] // self.slots[layer])
                if page is None:
                    cost += 1
                elif left.setdefault(page, self.holders(page)) > 1:
                    cost, left[page] = cost + 1, left[page] - 1
        index = np.array(batch, np.int64)
        if cost > self.total - len(self.live_pages()):
            self.refused(lambda: self.pool.reserve_slot(index))
            return False
        self.pool.reserve_slot(index)
        for row in batch:
            for layer, head in PLACES:
                pages = self.rows[row][layer, head]
                at = self.lengths[row][layer, head] // self.slots[layer]
                if at not in pages:
                    pages[at] = SimulatedPage()
                elif self.holders(pages[at]) > 1:
                    pages[at] = SimulatedPage(pages[at].values)
        return True

    def append(self, batch):
        rows = torch.tensor(batch, dtype=torch.int32)
        for layer, heads in enumerate(HEADS):
            numbers = self.numbers(len(batch) * heads)
            k, v = vectors(numbers, SPEC.layers[layer].head_dim)
            shape = (len(batch), heads, -1)
            tables, lengths = self.pool.tables[:, layer, :heads], self.pool.lengths[:, layer, :heads]
            ops.append(
                self.pool.memory,
                self.pool.layouts[layer],
                tables,
                lengths,
                rows,
                k.view(shape),
                v.view(shape),
            )
            for i, row in enumerate(batch):
                for head in range(heads):
                    place = (layer, head)
                    pages, size = self.rows[row][place], self.slots[layer]
                    at, offset = divmod(self.lengths[row][place], size)
                    pages[at].put(offset, numbers[i * heads + head])
                    self.lengths[row][place] += 1
        self.pool.advance(np.array(batch, np.int64))
        for row in batch:
            for layer, head in PLACES:
                first = self.first(row, layer, head)
                pages = self.rows[row][layer, head]
                for at in [at for at in pages if at < first // self.slots[layer]]:
                    del pages[at]

    def first(self, row, layer, head):
        """First slot that the next token still sees."""
        window, begin = WINDOWS[layer], int(self.begins[row][layer])
        return begin if window is None else max(begin, self.lengths[row][layer, head] - window + 1)

    def refused(self, call):
        before = [array.clone() for array in (self.pool.tables, self.pool.lengths, self.pool.starts)]
        use, rows = self.pool.use, self.pool.free_rows
        with pytest.raises(OutOfPages):
            call()
        after = (self.pool.tables, self.pool.lengths, self.pool.starts)
        assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
        assert (self.pool.use, self.pool.free_rows) == (use, rows)

    @invariant()
    def pool_holds_what_the_lists_hold(self):
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        assert self.pool.use.used == len(self.live_pages())
        assert self.pool.free_rows == ROWS - len(self.rows)
        for row, held in self.rows.items():
            counts, starts = self.pool.counts(row), self.pool.first_slots(row)
            for layer, head in PLACES:
                start, stop = self.first(row, layer, head), self.lengths[row][layer, head]
                assert (starts[layer], counts[layer, head]) == (start, stop)
                size = self.slots[layer]
                numbers = [held[layer, head][i // size].values[i % size] for i in range(start, stop)]
                wanted = vectors(numbers, SPEC.layers[layer].head_dim)
                found = torch.empty_like(wanted[0]), torch.empty_like(wanted[1])
                pages = self.pool.pages(row, layer)[head]
                ops.gather(self.pool.memory, self.pool.layouts[layer], pages, start, stop, *found)
                assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])

    def teardown(self):
        if not hasattr(self, "pool"):
            return
        for row in list(self.rows):
            self.pool.close(row)
        self.pool.check()
        assert self.pool.use.used == 0 and self.pool.free_rows == ROWS


TestPagePool = PoolMachine.TestCase
TestPagePool.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def grow(pool, row, tokens):
    """Most pages in use while a row grows."""
    peak = pool.use.used
    rows = np.array([row], np.int64)
    for _ in range(tokens):
        pool.reserve_slot(rows)
        peak = max(peak, pool.use.used)
        pool.advance(rows)
    return peak


@settings(max_examples=40, deadline=None)
@given(
    kept=st.lists(st.integers(1, 80), min_size=3, max_size=3),
    more=st.integers(0, 120),
    window=st.integers(1, 70),
    first=st.integers(0, 50),
)
def test_pages_at_is_the_most_that_a_growing_sequence_holds(kept, more, window, first):
    full = PagePool(plain_spec([(3, 32, None)]), 100, 1, 400)
    counts = np.array([kept], np.int32)
    assert grow(full, full.open(counts), more) == full.pages_at(counts, more)
    sliding = PagePool(plain_spec([(1, 32, window)]), 100, 1, 400)
    counts = np.array([[min(kept[0], window - 1)]], np.int32)
    peak = grow(sliding, sliding.open(counts, np.array([first])), more)
    bound = sliding.pages_at(counts, more)
    assert peak <= bound <= peak + 1
    if more > window + 32:
        assert peak == bound


def test_asking_for_the_same_slot_again_takes_nothing():
    pool = PagePool(SPEC, 40, 2, CONTEXT)
    row = pool.open(np.full((4, 3), 16, np.int32))
    pool.reserve_slot(np.array([row]))
    used = pool.use.used
    pool.reserve_slot(np.array([row]))
    assert pool.use.used == used
    copy = pool.fork(row)  # what was reserved is shared now
    pool.reserve_slot(np.array([row, copy]))
    assert pool.use.used == used + sum(HEADS)
    pool.check()


def test_pages_before_the_first_slot_are_not_taken():
    pool = PagePool(SPEC, 40, 2, CONTEXT)
    counts = np.array([[3, 3, 0], [3, 0, 0], [3, 3, 3], [3, 3, 0]], np.int32)
    row = pool.open(counts, np.array([0, 100, 0, 207]))
    assert pool.use.used == sum(HEADS) + HEADS[3]  # slots 207 to 209 straddle two pages of 16
    assert [np.flatnonzero(pool.pages(row, layer)[0] >= 0).tolist() for layer in (1, 3)] == [[3], [12, 13]]


def test_a_small_head_gets_more_slots_of_the_same_page():
    pool = PagePool(SPEC, 10, 2, CONTEXT)
    assert pool.slots.tolist() == [16, 32, 32, 16]
    assert pool.page_bytes == pool_page_bytes(SPEC) and pool.memory.shape == (10, pool.page_bytes)
    assert pool.memory.data_ptr() % 64 == 0


def test_a_row_closed_twice_is_our_mistake():
    pool = PagePool(SPEC, 20, 2, CONTEXT)
    row = pool.open(np.ones((4, 3), np.int32))
    pool.close(row)
    with pytest.raises(AssertionError):
        pool.close(row)


def filled(pool, counts):
    """A row whose slot s of every head holds number s."""
    row = pool.open(counts)
    for layer, head in PLACES:
        k, v = vectors(range(int(counts[layer, head])), SPEC.layers[layer].head_dim)
        ops.scatter(pool.memory, pool.layouts[layer], pool.pages(row, layer)[head], k, v, 0)
    return row


def contents(pool, row, layer, head):
    """Numbers in the slots of one head."""
    count = int(pool.counts(row)[layer, head])
    k, v = (torch.empty(count, SPEC.layers[layer].head_dim) for _ in "kv")
    ops.gather(pool.memory, pool.layouts[layer], pool.pages(row, layer)[head], 0, count, k, v)
    return k[:, 0].tolist()


FULL_LAYERS = np.array([0, 2])


def test_a_token_fills_the_hole_of_an_evicted_one_and_other_rows_keep_it():
    pool = PagePool(SPEC, 60, 2, CONTEXT)
    counts = np.array([[40, 40, 0], [4, 0, 0], [40, 40, 40], [4, 4, 0]], np.int32)
    row = filled(pool, counts)
    copy, used = pool.fork(row), pool.use.used
    write = np.array([[3, 40, 0], [39, 35, 40]], np.int32)
    pool.aim(row, FULL_LAYERS, write)
    pool.reserve_slot(np.array([row]))
    pool.check()
    # The pages of both holes and of both ends of layer 0 and 2, and what windowed layers write to.
    assert pool.use.used == used + 5 + 3
    rows = torch.tensor([row], dtype=torch.int32)
    for layer, heads in enumerate(HEADS):
        k, v = vectors([99] * heads, SPEC.layers[layer].head_dim)
        ops.append(
            pool.memory, pool.layouts[layer], pool.tables[:, layer, :heads], pool.write[:, layer, :heads], rows,
            k.unsqueeze(0), v.unsqueeze(0),
        )  # fmt: skip
    pool.advance(np.array([row]))
    assert pool.counts(row)[FULL_LAYERS].tolist() == [[40, 41, 0], [40, 40, 41]]
    numbers = [float(number) for number in range(40)]
    assert contents(pool, row, 0, 0) == [*numbers[:3], 99.0, *numbers[4:]]
    assert contents(pool, row, 0, 1) == [*numbers, 99.0]
    assert contents(pool, row, 2, 0) == [*numbers[:39], 99.0]
    assert all(
        contents(pool, copy, layer, head) == numbers for layer in (0, 2) for head in range(HEADS[layer])
    )
    assert torch.equal(pool.write[row], pool.lengths[row])
    pool.check()


def test_a_row_shrinks_and_gives_pages_back():
    counts = np.array([[40, 40, 0], [4, 0, 0], [40, 40, 40], [4, 4, 0]], np.int32)
    pool = PagePool(SPEC, 60, 2, CONTEXT)
    row = filled(pool, counts)
    used, less = pool.use.used, counts.copy()
    less[0] = [17, 16, 0]
    less[2] = [40, 5, 33]
    pool.shrink(row, less)
    assert (pool.counts(row) == less).all() and pool.use.used == used - 1 - 2 - 1
    assert contents(pool, row, 0, 0) == [float(number) for number in range(17)]
    pool.check()
    copy, rest = pool.fork(row), less.copy()
    rest[0, :2] = [16, 3]
    pool.shrink(row, rest)
    pool.check()
    assert (pool.counts(copy) == less).all() and contents(pool, copy, 0, 0)[-1] == 16.0


def test_a_row_gets_pages_of_its_own_for_what_it_writes_or_none_at_all():
    counts = np.array([[40, 40, 0], [4, 0, 0], [40, 40, 40], [4, 4, 0]], np.int32)
    pool = PagePool(SPEC, 60, 2, CONTEXT)
    row = filled(pool, counts)
    pool._take(pool.use.free - 2)
    layers, moves = np.array([0, 2]), np.tile(np.arange(40), (2, 3, 1))
    moves[0, 0, [3, 4, 17]], moves[0, 0, 30:], moves[1, 2, 39] = [30, 31, 32], -1, 0
    pool.part(row, layers, moves)  # nobody else holds them
    assert pool.use.free == 2
    copy = pool.fork(row)
    before = pool.tables.clone()
    with pytest.raises(OutOfPages):
        pool.part(row, layers, moves)  # takes three
    assert torch.equal(pool.tables, before)
    moves[0, 0, 17] = -1
    pool.part(row, layers, moves)
    changed = np.argwhere((pool.tables[row] != pool.tables[copy]).numpy())
    assert changed.tolist() == [[0, 0, 0], [2, 2, 39 // int(pool.slots[2])]]
    assert all(
        contents(pool, row, la, h) == contents(pool, copy, la, h) for la in (0, 2) for h in range(HEADS[la])
    )
    pool.part(row, layers, moves)
    assert pool.use.free == 0


def test_rows_that_rewrite_their_slots_share_nothing():
    pool = PagePool(SPEC, 60, 3, CONTEXT)
    row = filled(pool, np.array([[40, 40, 0], [4, 0, 0], [40, 40, 40], [4, 4, 0]], np.int32))
    pool.rewrite(row)
    copies = [pool.fork(row) for _ in range(2)]
    pool.reserve_slot(np.array([row, *copies]))
    pool.check()
    assert not (pool._refs > 1).any()
    for layer, head in ((0, 1), (2, 2)):
        assert all(contents(pool, r, layer, head) == contents(pool, row, layer, head) for r in copies)


def test_windowed_slots_are_numbered_anew_before_the_page_table_ends():
    pool = PagePool(SPEC, 60, 1, 600)
    counts = np.array([[3, 3, 0], [19, 0, 0], [3, 3, 3], [4, 4, 0]], np.int32)
    row = pool.open(counts, np.array([0, 589, 0, 604]))
    before = [pool.pages(row, layer).clone() for layer in (1, 3)]
    assert pool.tables.shape[3] * 16 == 608  # 19 places of 32 slots hold more
    pool.slide(row)
    assert pool.first_slots(row).tolist() == [0, 589, 0, 604 - 512]
    assert pool.counts(row)[[1, 3], 0].tolist() == [608, 608 - 512]
    assert torch.equal(pool.pages(row, 1), before[0])
    assert torch.equal(pool.pages(row, 3)[:, :6], before[1][:, 32:38])
    pool.check()
    assert pool.early_slots(np.array([0, 589, 0, 604])).tolist() == [0, 77, 0, 92]


def test_check_finds_a_lost_page_and_a_foreign_one():
    for damage in (-1, 3):
        pool = PagePool(SPEC, 20, 2, CONTEXT)
        row = pool.open(np.ones((4, 3), np.int32))
        pool.tables[row, 0, 0, 0] = damage if damage != int(pool.tables[row, 0, 0, 0]) else 4
        with pytest.raises(AssertionError):
            pool.check()
