"""Pieces of the Redis tier without a Redis: breaker, packing, names and sizes, addresses, the protocol reader."""

from __future__ import annotations

import pickle
import socket
import struct
import threading
import time

import numpy as np
import pytest
import torch
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_tiers.block import BlockLayout, write_block
from kv_tiers.keys import BlockKey, Fingerprint, block_keys
from kv_tiers.packing import FRAME_BYTES, Codec, packed_frame, raw_frame, read_frame_header, unpack_body
from kv_tiers.redis import RedisClient
from kv_tiers.redis_address import RedisAddress
from kv_tiers.redis_charges import Charges
from kv_tiers.redis_ports import Unreachable
from kv_tiers.redis_values import (
    VALUE_BYTES,
    allocator_class,
    charge_of,
    part_name,
    part_names,
    parts_of,
    read_name,
    value_name,
)
from kv_tiers.resp import MAX_LINE_BYTES, ErrorReply, LinkDown, RespConnection, TooLate

KEY = BlockKey(bytes(range(32)))
OTHER = BlockKey(bytes(32))


# Packing


@settings(deadline=None)
@given(
    st.one_of(
        st.binary(max_size=3000),
        st.builds(lambda unit, count: unit * count, st.binary(min_size=1, max_size=9), st.integers(0, 900)),
    ),
    st.sampled_from([1, 2, 4, 8]),
)
def test_packing_gives_back_every_byte_and_never_grows(content, width):
    frame = packed_frame(bytearray(content), width)
    assert frame.nbytes <= FRAME_BYTES + len(content)
    header = read_frame_header(frame.header)
    into = memoryview(bytearray(b"\xee" * (len(content) + 5)))
    assert unpack_body(header, frame.body, into)
    assert into[: len(content)] == content and into[len(content) :] == b"\xee" * 5


def kv_like(seed=0, count=20_000):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def test_bf16_shrinks_and_noise_stays_raw_without_a_copy():
    block = bytearray(kv_like().view(torch.uint8).numpy().tobytes())
    assert packed_frame(block, 2).nbytes < 0.85 * len(block)
    noise = bytearray(np.random.default_rng(0).bytes(10_000))
    frame = packed_frame(noise, 2)
    assert read_frame_header(frame.header).codec is Codec.RAW
    noise[0] ^= 1
    assert frame.body[0] == noise[0]


@settings(deadline=None)
@given(st.integers(0, FRAME_BYTES * 8 - 1))
def test_a_header_with_any_bit_flipped_is_none(bit):
    header = bytearray(packed_frame(bytearray(1000), 2).header)
    header[bit // 8] ^= 1 << bit % 8
    assert read_frame_header(header) is None


def test_a_packed_body_with_a_flipped_bit_is_refused():
    frame = packed_frame(bytearray(kv_like().view(torch.uint8).numpy().tobytes()), 2)
    header, into = read_frame_header(frame.header), memoryview(bytearray(40_000))
    for place in range(0, len(frame.body), 997):
        body = bytearray(frame.body)
        body[place] ^= 16
        assert not unpack_body(header, body, into)
    assert not unpack_body(header, frame.body[:-1], into)
    assert not unpack_body(header, frame.body, into[:-1])


def test_a_body_that_promises_more_than_its_header_is_not_decompressed():
    bomb = zstandard.ZstdCompressor().compress(bytes(50_000_000))
    header = raw_frame(bytearray(10)).header
    fields = struct.pack(
        "<4sBBBBIIQ", header[:4], 1, 1, 2, 0, 5000, len(bomb), xxhash.xxh3_64_intdigest(bomb)
    )
    forged = read_frame_header(fields + struct.pack("<Q", xxhash.xxh3_64_intdigest(fields)))
    assert forged.raw_bytes == 5000
    assert not unpack_body(forged, bomb, memoryview(bytearray(5000)))


@settings(deadline=None)
@given(st.binary(max_size=80))
def test_random_bytes_are_no_header(head):
    assert read_frame_header(head) is None


# Names and sizes


def test_names_come_back_as_their_keys_and_other_names_as_none():
    assert read_name(value_name(KEY)) == (KEY, 0)
    names = part_names(KEY, 3 * VALUE_BYTES)
    assert [read_name(name) for name in names] == [(KEY, 1), (KEY, 2)]
    assert value_name(KEY) == b"kvtide:b1:" + bytes(range(32)).hex().encode()
    ours = value_name(KEY)
    for foreign in (
        ours[:-1],
        ours + b"0",
        ours + b"\n",
        b"x" + ours,
        ours.upper(),
        part_name(KEY, 1)[1:],
        b"{" + ours + b"}:0",
    ):
        assert read_name(foreign) is None


@pytest.mark.parametrize(
    ("nbytes", "size"),
    [
        (1, 16),
        (16, 16),
        (17, 32),
        (65, 80),
        (129, 160),
        (4097, 5120),
        (81921, 98304),
        (2**20, 2**20),
        (2**20 + 1, 5 * 2**18),
    ],
)
def test_allocator_classes_are_jemallocs(nbytes, size):
    assert allocator_class(nbytes) == size


def test_a_full_part_costs_little_more_than_its_bytes():
    assert charge_of(VALUE_BYTES) / VALUE_BYTES < 1.001
    assert parts_of(VALUE_BYTES) == 1 and parts_of(VALUE_BYTES + 1) == 2
    assert charge_of(VALUE_BYTES + 1) == charge_of(VALUE_BYTES) + charge_of(1)


def test_charges_move_to_what_is_owed_and_never_pass_the_bound():
    charges = Charges(2 * charge_of(100), 4)
    charges.add(KEY, 0, 100)
    assert charges.fits(100) and not charges.fits(1000)
    charges.add(OTHER, 1, 100)
    assert not charges.fits(1)
    charges.give_up(KEY)
    charges.give_up(KEY)
    assert (
        KEY not in charges
        and charges.is_owed(KEY)
        and charges.fits(100)
        and list(charges.free_slots()) == [0, 2, 3]
    )
    charges.add(KEY, 0, 100)
    charges.check()
    charges.paid(charges.owed())
    assert not charges.is_owed(KEY) and KEY in charges


# Addresses


def test_an_address_reads_all_kinds_of_urls():
    one = RedisAddress.parse("redis://us%40er:p%3Aw@some.host:7000/3")
    assert (one.host, one.port, one.db, one.username, one.password) == ("some.host", 7000, 3, "us@er", "p:w")
    assert one.tls is None and not one.cluster and "p:w" not in repr(one)
    unix = RedisAddress.parse("unix://:secret@/run/redis.sock?db=2")
    assert (unix.path, unix.db, unix.username, unix.password) == ("/run/redis.sock", 2, None, "secret")
    assert RedisAddress.parse("rediss://h").tls.check_hostname
    assert not RedisAddress.parse("rediss://h?ssl_cert_reqs=none").tls.check_hostname
    for url in ("redis://h:1?cluster=1", "redis+cluster://h:1"):
        cluster = RedisAddress.parse(url)
        assert cluster.cluster and cluster.client_url == "redis://h:1"


@pytest.mark.parametrize(
    "url", ["http://h", "redis://h?socket_timeout=9", "unix://", "redis://h:1/2?cluster=1", "redis://h/x"]
)
def test_an_address_that_cannot_be_is_refused_without_its_password(url):
    with pytest.raises(ValueError) as refused:
        RedisAddress.parse(url.replace("://h", "://u:hunter2@h"))
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    "password",
    ["hun/ter2", "1234/hunter2", "hunter2#", "12#hunter2", "hunter?ter2=1", "[hunter2", "1?db=hunter2"],
)
def test_a_password_that_is_not_encoded_is_refused_and_no_piece_of_it_is_told(password):
    with pytest.raises(ValueError) as refused:
        RedisAddress.parse(f"redis://u:{password}@host:6379/0")
    assert "ter2" not in str(refused.value) and "hun" not in str(refused.value)
    assert "%2F" in str(refused.value)


async def test_a_server_that_does_not_tell_its_run_is_one_that_does_not_answer(monkeypatch):
    address = RedisAddress.parse("redis://localhost:1")
    client = RedisClient(address, connections=2, deadline_s=1.0, ttl_s=None)

    async def info(section):
        return {"redis_version": "7.0.0"}

    monkeypatch.setattr(client._redis, "info", info)
    with pytest.raises(Unreachable):
        await client.incarnation()
    await client.close()


# The protocol reader


def connection(sent=b"", *, close=True, limit=100):
    ours, theirs = socket.socketpair()
    theirs.sendall(sent)
    if close:
        theirs.close()
    return RespConnection(ours, limit), theirs


def soon():
    return time.monotonic() + 5


def test_replies_are_read_one_after_the_other_however_they_arrive():
    ours, theirs = connection(close=False)
    stream = b"+OK\r\n$5\r\nab\r\nc\r\n$-1\r\n:-12\r\n-OOM no more\r\n$0\r\n\r\n"

    def trickle():
        for byte in stream:
            theirs.sendall(bytes([byte]))
        theirs.close()

    thread = threading.Thread(target=trickle)
    thread.start()
    assert ours.read_reply(soon()) == "OK"
    into = bytearray(5)
    assert ours.read_bulk_head(soon()) == 5
    ours.read_into(memoryview(into), soon())
    ours.end_bulk(soon())
    assert into == b"ab\r\nc"
    assert ours.read_bulk_head(soon()) is None
    assert ours.read_reply(soon()) == -12
    assert ours.read_reply(soon()) == ErrorReply("OOM", "OOM no more")
    assert ours.read_bulk_head(soon()) == 0
    ours.end_bulk(soon())
    with pytest.raises(LinkDown):
        ours.read_reply(soon())
    thread.join()


@pytest.mark.parametrize(
    "nonsense",
    [
        b"$101\r\n",
        b"$99999999999999999999\r\n",
        b"$-2\r\n",
        b"$1x\r\n",
        b"$\r\n",
        b"*2\r\n",
        b"+OK\r\n",
        b"x" * (MAX_LINE_BYTES + 2),
        b"\r\n",
        pickle.dumps({"a": 1}),
    ],
)
def test_o44_nonsense_and_lengths_beyond_the_limit_end_the_connection(nonsense):
    ours, _ = connection(nonsense)
    with pytest.raises(LinkDown):
        ours.read_bulk_head(soon())


@settings(deadline=None)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=60),
            st.sampled_from(
                [b"$", b"*", b"+", b"-", b":", b"\r\n", b"-1", b"7", b"100", b"101", b"OK", b"_"]
            ),
        ),
        max_size=12,
    ).map(b"".join)
)
def test_o44_whatever_arrives_reading_ends_in_bounded_memory(stream):
    ours, _ = connection(stream)
    try:
        for _ in range(20):
            length = ours.read_bulk_head(soon())
            if isinstance(length, int):
                assert 0 <= length <= 100
                ours.read_into(memoryview(bytearray(length)), soon())
                ours.end_bulk(soon())
        raise AssertionError("twenty replies of nothing")
    except LinkDown:
        pass
    finally:
        ours.close()


def test_a_late_reply_and_an_abort_end_the_wait():
    ours, theirs = connection(b"$50\r\nhalf", close=False)
    assert ours.read_bulk_head(soon()) == 50
    with pytest.raises(TooLate):
        ours.read_into(memoryview(bytearray(50)), time.monotonic() + 0.02)
    ours, theirs = connection(close=False)
    threading.Timer(0.02, ours.abort).start()
    with pytest.raises(LinkDown):
        ours.read_reply(soon())
    assert theirs.recv(1) == b""


@pytest.mark.parametrize("nbytes", range(196_000, 224_000, 2_000))
def test_a_server_that_reads_nothing_costs_the_deadline_wherever_its_buffer_ends(nbytes):
    ours, theirs = connection(close=False)
    ended = threading.Event()

    def send():
        value = memoryview(bytearray(nbytes))
        try:
            while True:
                ours.send((b"SET", b"k" * 74, (b"h" * 32, value)), time.monotonic() + 0.05)
        except TooLate:
            ended.set()

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    assert ended.wait(5), "it waits for ever"
    ours.close()
    theirs.close()


def test_a_command_with_pieces_is_one_argument():
    ours, theirs = connection(close=False)
    large = bytes(range(256)) * 40
    ours.send((b"SET", b"k", (b"head", memoryview(large), b""), b"EX", b"5"), soon())
    ours.close()
    expected = (
        b"*5\r\n$3\r\nSET\r\n$1\r\nk\r\n$%d\r\nhead" % (4 + len(large))
        + large
        + b"\r\n$2\r\nEX\r\n$1\r\n5\r\n"
    )
    received = b""
    while chunk := theirs.recv(1 << 16):
        received += chunk
    assert received == expected


def test_a_packed_block_is_a_block_again():
    layout = BlockLayout(layers=((2, 64),) * 4, dtype=torch.bfloat16, block_tokens=16)
    fingerprint = Fingerprint(bytes(32))
    key = block_keys(fingerprint, range(16), 16)[0]
    rows = [kv_like(layer, 2 * 16 * 64).view(2, 16, 64) for layer in range(4)]
    block = bytearray(layout.nbytes)
    write_block(block, layout, fingerprint, key, rows, rows)
    frame = packed_frame(block, 2)
    assert frame.nbytes < len(block)
    into = bytearray(len(block))
    assert unpack_body(read_frame_header(frame.header), frame.body, memoryview(into)) and into == block
