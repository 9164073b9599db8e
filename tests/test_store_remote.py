"""Blocks from another node's slab: the loan's message, reads within this process, and from a real process by NIXL."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from slab_blocks import SLOT_BYTES, block_keys_of, is_whole, write
from transfer_peer import bare_environment

from kv_tiers.books import SlotBooks
from kv_tiers.keys import BlockKey
from kv_tiers.slab import Slab
from kv_tiers.store_lend import Loans
from kv_tiers.store_ports import parted
from kv_tiers.tier import Fetched
from kv_tiers.transfer import slab_peer, slab_reader
from kv_tiers.transfer.local import LocalFabric, LocalWire
from kv_tiers.transfer.nixl import slab_wires, unavailable
from kv_tiers.transfer.slab_loan import LoanError, SlabLoan
from kv_tiers.transfer.slab_peer import SlabExchange, SlabPeer
from kv_tiers.transfer.wire import Span, SpanTable

KEYS = block_keys_of(range(8))
HIT, MISS, FAILED, CORRUPT = Fetched.HIT, Fetched.MISS, Fetched.FAILED, Fetched.CORRUPT
LOAN = SlabLoan("node-b#7", 2**63 + 5, 17, 12.5, SLOT_BYTES, (4096, 2**47), b"meta", more=True)


def test_a_loan_is_what_it_was_after_a_trip_as_bytes():
    assert SlabLoan.from_bytes(LOAN.to_bytes()) == LOAN
    assert SlabLoan.from_bytes(replace(LOAN, addresses=(), metadata=b"").to_bytes()).addresses == ()


def test_anything_but_a_loan_is_refused():
    data = LOAN.to_bytes()
    for at in range(len(data)):
        with pytest.raises(LoanError):
            SlabLoan.from_bytes(data[:at])
        with pytest.raises(LoanError):
            SlabLoan.from_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
    for wrong in (b"", os.urandom(300), pickle.dumps(LOAN), data + b"\0", b"KVLN" + b"\xff" * 200):
        with pytest.raises(LoanError):
            SlabLoan.from_bytes(wrong)
    for field in ({"ttl_s": float("nan")}, {"ttl_s": -1.0}, {"slot_bytes": 0}, {"endpoint": ""}):
        with pytest.raises(LoanError):
            replace(LOAN, **field)


class Memory:
    def __init__(self, slots: int) -> None:
        self.tensor = torch.full((slots * SLOT_BYTES,), 0xEE, dtype=torch.uint8)

    def view(self, offset: int, nbytes: int) -> memoryview:
        return memoryview(self.tensor.numpy()).cast("B")[offset : offset + nbytes]


class LocalNode:
    """A lender in this process, and its agent's calls (`Lender`)."""

    def __init__(self, fabric: LocalFabric, slots: int = 8) -> None:
        self.memory = Memory(slots)
        self.books = SlotBooks(slots, SLOT_BYTES)
        self.loans = Loans(self.books, time.monotonic)
        self.exchange = SlabExchange(
            "b", self.memory, SLOT_BYTES, [LocalWire("b", self.memory.tensor, fabric)]
        )
        self.given_back: list[int] = []
        self.change = lambda loan: loan

    def fill(self, keys: list[BlockKey]) -> None:
        lease = self.books.reserve(keys, "test")
        for entry in lease.entries:
            write(self.memory.view(entry.offset, SLOT_BYTES), entry.key)
        self.books.complete_write(lease.id, [entry.key for entry in lease.entries])

    async def lend(self, keys: bytes) -> bytes | None:
        lease = self.books.prepare_read(parted(keys), "a")
        return self.change(self.exchange.loan(self.loans.take(lease, more=False)))

    def give_back(self, lease: int) -> None:
        self.given_back.append(lease)
        self.loans.give_back(lease)


@pytest.fixture
def fabric():
    return LocalFabric()


@pytest.fixture
def lender(fabric):
    node = LocalNode(fabric)
    node.fill(KEYS[:5])
    yield node
    node.exchange.close()


def borrower_of(fabric: LocalFabric, wires: int) -> Iterator[SlabExchange]:
    memory = Memory(8)
    lanes = [LocalWire(f"a{index}", memory.tensor, fabric) for index in range(wires)]
    exchange = SlabExchange("a0", memory, SLOT_BYTES, lanes)
    exchange.memory = memory
    yield exchange
    exchange.close()


@pytest.fixture(params=[1, 2])
def borrower(fabric, request):
    yield from borrower_of(fabric, request.param)


@pytest.fixture
def one_by_one(fabric, monkeypatch):
    """A borrower with one wire, that reads block by block."""
    monkeypatch.setattr(slab_reader, "READ_BYTES", SLOT_BYTES)
    yield from borrower_of(fabric, 1)


@pytest.fixture
def two(fabric, monkeypatch):
    """A borrower with two wires, that reads block by block."""
    monkeypatch.setattr(slab_reader, "READ_BYTES", SLOT_BYTES)
    yield from borrower_of(fabric, 2)


def break_third(data: bytes) -> bytes:
    """A loan whose third address is nowhere."""
    loan = SlabLoan.from_bytes(data)
    return replace(loan, addresses=(*loan.addresses[:2], 1 << 40, *loan.addresses[3:])).to_bytes()


def offsets(count: int) -> list[int]:
    return [slot * SLOT_BYTES for slot in range(count)]


def whole(memory, count: int) -> list[bool]:
    return [is_whole(memory.view(slot * SLOT_BYTES, SLOT_BYTES), KEYS[slot]) for slot in range(count)]


async def test_blocks_come_whole_and_the_loan_goes_back(lender, borrower):
    peer = SlabPeer(borrower, lender)
    assert await peer.get(KEYS[:4], offsets(4)) == [HIT] * 4
    assert whole(borrower.memory, 4) == [True] * 4
    assert lender.given_back and lender.books.stats().read_leases == 0 and borrower.links == 1


async def test_of_what_is_not_lent_only_the_first_is_known_to_be_missing(lender, borrower):
    assert await SlabPeer(borrower, lender).get(KEYS[3:8], offsets(5)) == [HIT, HIT, MISS, FAILED, FAILED]
    lender.change = lambda data: replace(SlabLoan.from_bytes(data), more=True).to_bytes()
    assert await SlabPeer(borrower, lender).get(KEYS[3:8], offsets(5)) == [HIT, HIT, *[FAILED] * 3]


async def test_a_block_that_is_not_whole_or_another_is_no_hit(lender, borrower):
    lender.memory.view(lender.books.offset_of(KEYS[1]) + 5000, 1)[0] ^= 1
    wrong = lender.books.offset_of(KEYS[2])
    write(lender.memory.view(wrong, SLOT_BYTES), KEYS[7])
    assert await SlabPeer(borrower, lender).get(KEYS[:4], offsets(4)) == [HIT, CORRUPT, CORRUPT, HIT]


async def test_a_first_block_that_is_none_says_nothing_of_the_others(lender, borrower, monkeypatch):
    monkeypatch.setattr(slab_reader, "READ_BYTES", 2 * SLOT_BYTES)
    lender.memory.view(lender.books.offset_of(KEYS[0]), 8)[:] = bytes(8)
    assert await SlabPeer(borrower, lender).get(KEYS[:5], offsets(5)) == [CORRUPT, *[HIT] * 4]


async def test_many_loans_at_once_do_not_meet(lender, borrower, monkeypatch):
    monkeypatch.setattr(slab_reader, "READ_BYTES", SLOT_BYTES)
    lender.memory.view(lender.books.offset_of(KEYS[3]) + 5000, 1)[0] ^= 1
    peer = SlabPeer(borrower, lender)
    for _ in range(20):
        borrower.memory.tensor.fill_(0xEE)
        both = await asyncio.gather(peer.get(KEYS[:3], offsets(3)), peer.get(KEYS[3:5], offsets(5)[3:]))
        assert both == [[HIT] * 3, [CORRUPT, HIT]] and whole(borrower.memory, 3) == [True] * 3


async def test_readers_share_a_loan_and_each_verifies_its_part(two, lender, monkeypatch):
    both, took = threading.Barrier(2, timeout=10), []
    for wire in [reader._wire for reader in two._readers]:

        def read(peer, spans, post=wire.read, wire=wire):
            if wire not in took:
                both.wait()  # neither reads a second piece before the other has read one
            took.append(wire)
            return post(peer, spans)

        monkeypatch.setattr(wire, "read", read)
    lender.memory.view(lender.books.offset_of(KEYS[3]) + 5000, 1)[0] ^= 1
    expected = [HIT, HIT, HIT, CORRUPT, HIT]
    assert await SlabPeer(two, lender).get(KEYS[:5], offsets(5)) == expected
    assert len(set(took)) == 2 and len(took) == 5 and whole(two.memory, 3) == [True] * 3


async def test_a_reader_that_is_done_helps_the_other(two, lender, monkeypatch):
    first, second = [reader._wire for reader in two._readers]
    done, posts = threading.Event(), []
    post_slowly, post_quickly = first.read, second.read

    def slow(peer, spans):
        assert done.wait(10)
        return post_slowly(peer, spans)

    def quick(peer, spans):
        posts.append(spans)
        if len(posts) == 4:
            done.set()
        return post_quickly(peer, spans)

    monkeypatch.setattr(first, "read", slow)
    monkeypatch.setattr(second, "read", quick)
    assert await SlabPeer(two, lender).get(KEYS[:5], offsets(5)) == [HIT] * 5
    assert len(posts) == 4, "two pieces of its own, and two of the other's"


async def test_what_is_one_piece_has_one_reader_and_they_take_turns(two, lender, monkeypatch):
    took = []
    for wire in [reader._wire for reader in two._readers]:

        def read(peer, spans, post=wire.read, wire=wire):
            took.append(wire)
            return post(peer, spans)

        monkeypatch.setattr(wire, "read", read)
    for _ in range(4):
        assert await SlabPeer(two, lender).get(KEYS[:1], offsets(1)) == [HIT]
    assert took[:2] == took[2:] and took[0] is not took[1]


async def test_nobody_waits_for_a_reader_that_others_keep_busy(two, lender):
    busy = two._readers[1]
    with busy._posting:
        async with asyncio.timeout(5):
            assert await SlabPeer(two, lender).get(KEYS[:5], offsets(5)) == [HIT] * 5


async def test_a_read_that_waits_for_a_thread_has_its_time_when_it_gets_one(lender, two):
    free = threading.Event()
    waiting = [two._threads.submit(free.wait) for _ in range(2 * slab_peer._READING_AT_ONCE)]
    reading = asyncio.create_task(SlabPeer(two, lender, timeout_s=0.2).get(KEYS[:5], offsets(5)))
    await asyncio.sleep(0.4)
    assert not reading.done()
    free.set()
    assert await reading == [HIT] * 5 and all(each.done() for each in waiting)


async def test_where_no_thread_can_be_had_nothing_is_left_behind(two, lender, monkeypatch):
    submit, tried = two._threads.submit, []

    def second_fails(*what):
        tried.append(what)
        if len(tried) == 2:
            raise RuntimeError("can't start new thread")
        return submit(*what)

    monkeypatch.setattr(two._threads, "submit", second_fails)
    with pytest.raises(RuntimeError, match="new thread"):
        await SlabPeer(two, lender).get(KEYS[:5], offsets(5))
    assert lender.given_back and not lender.books.stats().read_leases
    assert all(not link.users for reader in two._readers for link in reader._links._links.values())


async def test_a_read_that_breaks_off_leaves_nobody_waiting(lender, borrower, monkeypatch):
    def broken(peer, spans):
        raise RuntimeError("not a transport's failure")

    with monkeypatch.context() as patch:
        patch.setattr(borrower._wire, "read", broken)
        with pytest.raises(RuntimeError, match="not a transport"):
            await SlabPeer(borrower, lender).get(KEYS[:5], offsets(5))
    assert await SlabPeer(borrower, lender).get(KEYS[:5], offsets(5)) == [HIT] * 5
    assert lender.books.stats().read_leases == 0


def test_a_table_of_spans_is_its_spans():
    spans = [Span(2**63 + 7, 4096, 10), Span(5, 0, 2**34)]
    table = SpanTable.of(spans)
    assert [*table] == spans and [*table[1:]] == spans[1:] and SpanTable.of(table) is table
    assert [*SpanTable.columns([9, 3], [0, 64], 64)] == [Span(9, 0, 64), Span(3, 64, 64)]
    assert table.remote.tolist() == [[2**63 + 7, 10, 0], [5, 2**34, 0]]
    assert table.local.tolist() == [[4096, 10, 0], [0, 2**34, 0]] and not SpanTable.of([])


async def test_pieces_behind_one_that_cannot_be_read_are_not_asked_for(lender, one_by_one):
    assert await SlabPeer(one_by_one, lender).get(KEYS[:5], offsets(5)) == [HIT] * 5
    one_by_one.memory.tensor.fill_(0xEE)
    lender.change = break_third
    assert await SlabPeer(one_by_one, lender).get(KEYS[:5], offsets(5)) == [HIT, HIT, *[FAILED] * 3]
    assert whole(one_by_one.memory, 2) == [True, True] and one_by_one.links == 0
    assert set(one_by_one.memory.view(2 * SLOT_BYTES, 3 * SLOT_BYTES)) == {0xEE}


async def test_what_lands_behind_a_piece_that_failed_is_not_taken_for_it(fabric, lender, one_by_one):
    lender.change = break_third
    fabric.freeze("b")  # so all pieces are posted before the first one is over
    reading = asyncio.create_task(SlabPeer(one_by_one, lender).get(KEYS[:5], offsets(5)))
    await asyncio.sleep(0.1)
    fabric.thaw("b")
    assert await reading == [HIT, HIT, *[FAILED] * 3] and one_by_one.links == 0
    assert set(one_by_one.memory.view(2 * SLOT_BYTES, 3 * SLOT_BYTES)) == {0xEE}


async def test_a_lender_that_freezes_between_two_pieces_leaves_what_came_before(
    fabric, lender, one_by_one, monkeypatch
):
    post, posted = one_by_one._wire.read, []

    def freeze_at_third(peer, spans):
        posted.append(spans)
        if len(posted) == 3:
            fabric.freeze("b")
        return post(peer, spans)

    monkeypatch.setattr(one_by_one._wire, "read", freeze_at_third)
    peer = SlabPeer(one_by_one, lender, timeout_s=0.2)
    assert await peer.get(KEYS[:5], offsets(5)) == [HIT, HIT, *[FAILED] * 3]
    assert len(posted) == 5, "nobody waits for one piece before the next is asked for"
    fabric.thaw("b")
    assert set(one_by_one.memory.view(2 * SLOT_BYTES, 3 * SLOT_BYTES)) == {0xEE} and one_by_one.links == 0


async def test_nonsense_from_a_lender_and_no_answer_are_failures(lender, borrower):
    for change in (lambda data: None, lambda data: b"nonsense", lambda data: pickle.dumps(data)):
        lender.change = change
        assert await SlabPeer(borrower, lender).get(KEYS[:2], offsets(2)) == [FAILED] * 2
    lender.change = lambda data: replace(SlabLoan.from_bytes(data), slot_bytes=4096).to_bytes()
    assert await SlabPeer(borrower, lender).get(KEYS[:2], offsets(2)) == [FAILED] * 2
    lender.change = lambda data: replace(SlabLoan.from_bytes(data), addresses=(1 << 40,) * 2).to_bytes()
    assert await SlabPeer(borrower, lender).get(KEYS[:2], offsets(2)) == [FAILED] * 2


async def test_a_loan_of_an_earlier_life_reads_nothing(fabric, lender, borrower):
    message = await lender.lend(b"".join(key.digest for key in KEYS[:2]))
    lender.exchange.close()
    again = LocalNode(fabric)
    lender.change = lambda data: message
    assert await SlabPeer(borrower, lender).get(KEYS[:2], offsets(2)) == [FAILED] * 2
    assert set(borrower.memory.view(0, SLOT_BYTES)) == {0xEE}, "not a byte was read"
    again.exchange.close()
    lender.exchange = again.exchange


async def test_a_loan_that_is_over_at_the_end_of_the_read_is_a_failure(lender, borrower, monkeypatch):
    landed = slab_reader.Reading.landed

    def late(reading, piece):
        landed(reading, piece)
        assert HIT in reading.answers
        time.sleep(0.06)

    monkeypatch.setattr(slab_reader.Reading, "landed", late)
    lender.change = lambda data: replace(SlabLoan.from_bytes(data), ttl_s=0.05).to_bytes()
    assert await SlabPeer(borrower, lender).get(KEYS[:2], offsets(2)) == [FAILED] * 2


async def test_a_frozen_lender_costs_a_deadline_and_nothing_lands_afterwards(fabric, lender, borrower):
    peer = SlabPeer(borrower, lender, timeout_s=0.2)
    fabric.freeze("b")
    began = time.monotonic()
    assert await peer.get(KEYS[:4], offsets(4)) == [FAILED] * 4
    assert time.monotonic() - began < 2 and borrower.links == 0
    fabric.thaw("b")
    assert set(borrower.memory.view(0, 4 * SLOT_BYTES)) == {0xEE}
    assert await peer.get(KEYS[:4], offsets(4)) == [HIT] * 4, "connected anew"


async def test_all_who_read_from_a_frozen_lender_wait_until_none_of_them_can_be_written_to(
    fabric, lender, one_by_one
):
    fabric.freeze("b")
    quick = asyncio.create_task(SlabPeer(one_by_one, lender, timeout_s=0.1).get(KEYS[:1], offsets(1)))
    slow = asyncio.create_task(SlabPeer(one_by_one, lender, timeout_s=0.5).get(KEYS[1:2], [SLOT_BYTES]))
    await asyncio.sleep(0.3)
    assert not quick.done(), "the peer is still connected for the other's sake"
    assert await quick == [FAILED] and await slow == [FAILED] and one_by_one.links == 0


async def test_a_cancelled_read_returns_only_when_it_is_over(fabric, lender, borrower):
    fabric.freeze("b")
    reading = asyncio.create_task(SlabPeer(borrower, lender, timeout_s=0.3).get(KEYS[:1], offsets(1)))
    await asyncio.sleep(0.1)
    reading.cancel()
    await asyncio.sleep(0.05)
    assert not reading.done()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert borrower.links == 0 and lender.given_back


class RemoteNode:
    """A lender in a process of its own, and its agent's calls (`Lender`)."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("slab_peer_process.py")), "b",
             str(folder / "b.kvslab"), "8"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=bare_environment() | {"PYTHONPATH": f"{Path(__file__).parents[1]}:{Path(__file__).parent}"},
        )  # fmt: skip
        self.loan: bytes | None = None

    def ask(self, **command: object) -> object:
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    async def lend(self, keys: bytes) -> bytes | None:
        if self.loan is None:
            self.loan = base64.b64decode(self.ask(do="lend", keys=base64.b64encode(keys).decode()))
        return self.loan

    def give_back(self, lease: int) -> None: ...


@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
async def test_blocks_come_by_nixl_from_a_process_that_may_freeze_and_die(tmp_path):
    lender = RemoteNode(tmp_path)
    slab = Slab.create(tmp_path / "a.kvslab", 8 * SLOT_BYTES)
    wires = slab_wires("a", torch.frombuffer(slab.view(0, slab.nbytes), dtype=torch.uint8))
    exchange = SlabExchange("a", slab, SLOT_BYTES, wires)
    try:
        assert lender.ask(do="write", blocks=list(range(6))) == 6
        peer = SlabPeer(exchange, lender, timeout_s=10)
        for _ in wires:  # they take turns: each is connected before the lender freezes
            slab.view(0, slab.nbytes)[:] = bytes(slab.nbytes)
            assert await peer.get(KEYS[:6], offsets(6)) == [HIT] * 6
            assert whole(slab, 6) == [True] * 6
        assert lender.ask(do="leases") == 1, "lent until it is given back or over"
        assert lender.ask(do="give back", lease=SlabLoan.from_bytes(lender.loan).lease)

        slab.view(0, slab.nbytes)[:] = bytes(slab.nbytes)
        os.kill(lender.process.pid, signal.SIGSTOP)
        began = time.monotonic()
        frozen = await SlabPeer(exchange, lender, timeout_s=0.5).get(KEYS[:6], offsets(6))
        took = time.monotonic() - began
        # On one machine the kernel copies for a frozen process; across machines nobody would answer.
        assert took < 5 and all(
            (answer is HIT) == there for answer, there in zip(frozen, whole(slab, 6), strict=True)
        )
        slab.view(0, slab.nbytes)[:] = bytes(slab.nbytes)
        os.kill(lender.process.pid, signal.SIGCONT)
        await asyncio.sleep(0.3)
        assert not any(slab.view(0, slab.nbytes)), "what was given up does not land later"

        lender.process.kill()
        lender.process.wait()
        slab.view(0, slab.nbytes)[:] = bytes(slab.nbytes)
        began = time.monotonic()
        assert await SlabPeer(exchange, lender, timeout_s=1.0).get(KEYS[:6], offsets(6)) == [FAILED] * 6
        assert time.monotonic() - began < 5
        assert not any(slab.view(0, slab.nbytes)), "of a dead process nothing is read"
    finally:
        lender.process.kill()
        lender.process.wait()
        exchange.close()
        slab.unlink()
        slab.close()
