"""Tickets and messages: strict binary, no object deserialisation, garbage refused."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_tiers.transfer.ticket import MAX_TICKET_BYTES, Message, MessageKind, Ticket, TicketError

U64 = st.integers(0, (1 << 64) - 1)
TICKETS = st.builds(
    Ticket,
    request_id=st.text(min_size=1, max_size=40),
    attempt=st.integers(0, (1 << 32) - 1),
    generation=U64,
    fingerprint=st.binary(min_size=1, max_size=64),
    endpoint=st.text(min_size=1, max_size=20),
    incarnation=U64,
    address=U64,
    nbytes=st.integers(1, 1 << 40),
    checksum=U64,
    ttl_s=st.floats(0, 86_400),
    metadata=st.binary(max_size=2000),
)
PLAIN = Ticket("request-1", 2, 3, b"f" * 32, "prefill", 4, 5, 6, 7, 8.0, b"where")


@given(TICKETS)
def test_a_ticket_survives_its_encoding(ticket: Ticket) -> None:
    assert Ticket.from_bytes(ticket.to_bytes()) == ticket


@given(st.binary(max_size=300))
def test_random_bytes_are_refused(data: bytes) -> None:
    for decode in (Ticket.from_bytes, Message.from_bytes):
        with pytest.raises(TicketError):
            decode(data)


@given(st.integers(0, len(PLAIN.to_bytes()) - 1), st.integers(1, 255))
def test_any_damaged_byte_is_noticed(at: int, flip: int) -> None:
    data = bytearray(PLAIN.to_bytes())
    data[at] ^= flip
    with pytest.raises(TicketError):
        Ticket.from_bytes(bytes(data))


def test_every_truncation_and_every_extension_is_refused() -> None:
    data = PLAIN.to_bytes()
    for cut in range(len(data)):
        with pytest.raises(TicketError):
            Ticket.from_bytes(data[:cut])
    for extra in (b"\0", data):
        with pytest.raises(TicketError):
            Ticket.from_bytes(data + extra)


class _Bomb:
    exploded = False

    def __reduce__(self) -> tuple[object, ...]:
        return (setattr, (_Bomb, "exploded", True))


def test_pickles_and_oversized_lengths_are_refused_without_side_effects() -> None:
    for data in (
        pickle.dumps(_Bomb()),
        b"KVTK" + b"\xff" * 200,
        PLAIN.to_bytes()[:6] + b"\xff\xff\xff\x7f" * 40,
    ):
        for decode in (Ticket.from_bytes, Message.from_bytes):
            with pytest.raises(TicketError):
                decode(data)
    with pytest.raises(TicketError):
        Ticket.from_bytes(b"\0" * (MAX_TICKET_BYTES + 1))
    assert not _Bomb.exploded


@pytest.mark.parametrize(
    "change",
    [
        {"request_id": ""},
        {"request_id": "x" * 600},
        {"endpoint": ""},
        {"fingerprint": b""},
        {"fingerprint": b"x" * 65},
        {"attempt": -1},
        {"nbytes": 0},
        {"checksum": 1 << 64},
        {"ttl_s": float("nan")},
        {"ttl_s": -1.0},
        {"ttl_s": 1e9},
        {"metadata": b"x" * (1 << 19)},
    ],
)
def test_values_outside_the_limits_are_named(change: dict[str, object]) -> None:
    with pytest.raises(TicketError, match=next(iter(change))):
        replace(PLAIN, **change)


@given(st.sampled_from(MessageKind), U64, U64)
def test_a_message_survives_its_encoding(kind: MessageKind, incarnation: int, generation: int) -> None:
    message = Message(kind, incarnation, generation)
    assert Message.from_bytes(message.to_bytes()) == message


@given(st.integers(0, 28), st.integers(1, 255))
def test_a_damaged_message_is_refused(at: int, flip: int) -> None:
    data = bytearray(Message(MessageKind.REFUSE, 1, 2).to_bytes())
    data[at] ^= flip
    with pytest.raises(TicketError):
        Message.from_bytes(bytes(data))


def test_seals_differ_wherever_tickets_of_one_room_differ() -> None:
    changes = ({"generation": 9}, {"incarnation": 9}, {"nbytes": 9}, {"checksum": 9}, {"attempt": 9})
    seals = [PLAIN.seal(), *(replace(PLAIN, **change).seal() for change in changes)]
    assert len(set(seals)) == len(seals) and {len(seal) for seal in seals} == {64}
