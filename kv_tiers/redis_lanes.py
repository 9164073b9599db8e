"""Moves blocks between Redis and the callers' buffers: worker threads, each with a connection of its own.

Measured on two cores, unix socket, blocks of 0.4 MB and 1 MB: blocking sockets with `recv_into` in threads 2.1 to 2.5
GB/s with every block verified, asyncio's BufferedProtocol 1.0 to 1.7, commands pipelined on one socket 1.0. So a thread
asks for one block at a time, verifies it while other threads receive, and takes the next.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic

from kv_tiers.packing import FRAME_BYTES, Codec, FrameHeader, read_frame_header, unpack_body
from kv_tiers.redis_address import RedisAddress
from kv_tiers.redis_ports import Item, Outcome, Outgoing, Sent, Wanted
from kv_tiers.redis_values import UNCOMMITTED_S, VALUE_BYTES, part_names, value_name
from kv_tiers.resp import ErrorReply, LinkDown, RespConnection, TooLate, new_socket
from kv_tiers.tier import Fetched
from kv_tiers.verify import verify_block


class Lanes:
    """`readers` and `writers` threads and as many connections, opened when needed; `deadline_s` for every block.

    One late or broken answer ends its batch: what is left of it fails at once. A connection is dropped with the command
    that fails on it or is cancelled, before the call returns.
    """

    def __init__(
        self, address: RedisAddress, *, readers: int, writers: int, deadline_s: float, ttl_s: float | None
    ) -> None:
        self._address = address
        self._deadline_s = deadline_s
        self._ttl = None if ttl_s is None else b"%d" % max(1, round(ttl_s))
        self._readers = ThreadPoolExecutor(readers, thread_name_prefix="redis-read")
        self._writers = ThreadPoolExecutor(writers, thread_name_prefix="redis-write")
        self._reader_count = readers
        self._writer_count = writers
        self._idle: list[RespConnection] = []
        self._lock = threading.Lock()

    async def fetch(self, wanted: Sequence[Wanted]) -> list[Fetched]:
        """One answer per block. HIT means verified."""
        return await self._spread(self._readers, self._reader_count, wanted, self._fetch, Fetched.FAILED)

    async def store(self, outgoing: Sequence[Outgoing]) -> list[Sent]:
        """One answer per block, in place of what had its name before."""
        return await self._spread(self._writers, self._writer_count, outgoing, self._store, Sent.UNKNOWN)

    async def compute(self, action: Callable[[Item], Outcome], items: Sequence[Item]) -> list[Outcome]:
        """`action` of each item in the writers' threads."""
        loop = asyncio.get_running_loop()
        return await asyncio.gather(*(loop.run_in_executor(self._writers, action, item) for item in items))

    async def close(self) -> None:
        """Ends threads and connections; no call may be under way."""
        await asyncio.to_thread(self._readers.shutdown)
        await asyncio.to_thread(self._writers.shutdown)
        self.disconnect()

    def disconnect(self) -> None:
        """Close the connections that are not in use, for the server behind them is another one now."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    async def _spread(
        self,
        threads: ThreadPoolExecutor,
        count: int,
        items: Sequence[Item],
        action: Callable[[RespConnection, Item, float], Outcome],
        failed: Outcome,
    ) -> list[Outcome]:
        batch = _Batch(items, failed, time.monotonic() + self._deadline_s)
        loop = asyncio.get_running_loop()
        workers = [
            loop.run_in_executor(threads, self._work, batch, action) for _ in range(min(count, len(items)))
        ]
        pending = set(workers)
        cancelled: asyncio.CancelledError | None = None
        while pending:
            try:
                _, pending = await asyncio.wait(pending)
            except asyncio.CancelledError as error:
                # The threads hold the caller's buffers: they are made to let go before the call returns.
                cancelled = error
                batch.abort()
        if cancelled is not None:
            raise cancelled
        for worker in workers:
            worker.result()  # which is None, or a mistake of ours
        return batch.outcomes

    def _work(
        self, batch: _Batch[Item, Outcome], action: Callable[[RespConnection, Item, float], Outcome]
    ) -> None:
        """One thread's share: the next item until there is none, on one connection."""
        connection: RespConnection | None = None
        if time.monotonic() > batch.start_by:
            return
        try:
            for index, item in batch.take():
                deadline = time.monotonic() + self._deadline_s
                while True:
                    try:
                        connection = connection or self._connect(batch, deadline)
                        batch.outcomes[index] = action(connection, item, deadline)
                        break
                    except LinkDown as fault:
                        # Answered before and closed now: the server restarted, or drops idle connections.
                        stale = (
                            connection is not None
                            and connection.commands > 1
                            and not isinstance(fault, TooLate)
                        )
                        if connection is not None:
                            batch.release(connection)
                            connection.close()
                            connection = None
                        if not stale or batch.stopped:
                            batch.abort()
                            return
        finally:
            if connection is not None:
                if batch.release(connection):
                    with self._lock:
                        self._idle.append(connection)
                else:
                    connection.close()

    def _connect(self, batch: _Batch[Item, Outcome], deadline: float) -> RespConnection:
        """An idle connection, or a new one. Known to the batch before anything can wait on it."""
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is not None:
            batch.hold(connection)
            return connection
        connection = RespConnection(new_socket(self._address), VALUE_BYTES)
        batch.hold(connection)
        try:
            connection.open(self._address, deadline)
        except LinkDown:
            batch.release(connection)
            connection.close()
            raise
        return connection

    def _fetch(self, connection: RespConnection, wanted: Wanted, deadline: float) -> Fetched:
        connection.send(self._get(value_name(wanted.key)), deadline)
        length = connection.read_bulk_head(deadline)
        if length is None:
            return Fetched.MISS
        if isinstance(length, ErrorReply):
            return _refused_get(length)
        head = bytearray(min(FRAME_BYTES, length))
        connection.read_into(memoryview(head), deadline)
        header = read_frame_header(head)
        body = None if header is None else _landing(header, wanted.into)
        if header is None or body is None or length != min(VALUE_BYTES, FRAME_BYTES + header.body_bytes):
            _skip(connection, length - len(head), deadline)
            return Fetched.CORRUPT
        done = length - FRAME_BYTES
        connection.read_into(body[:done], deadline)
        connection.end_bulk(deadline)
        for name in part_names(wanted.key, FRAME_BYTES + header.body_bytes):
            size = min(VALUE_BYTES, len(body) - done)
            answer = self._fetch_part(connection, name, body[done : done + size], deadline)
            if answer is not Fetched.HIT:
                return answer
            done += size
        if header.codec is not Codec.RAW and not unpack_body(header, body, wanted.into):
            return Fetched.CORRUPT
        whole = verify_block(wanted.into[: header.raw_bytes], wanted.key) is None
        return Fetched.HIT if whole else Fetched.CORRUPT

    def _fetch_part(
        self, connection: RespConnection, name: bytes, into: memoryview, deadline: float
    ) -> Fetched:
        connection.send(self._get(name), deadline)
        length = connection.read_bulk_head(deadline)
        if length is None:
            return Fetched.MISS
        if isinstance(length, ErrorReply):
            return _refused_get(length)
        if length != len(into):
            _skip(connection, length, deadline)
            return Fetched.CORRUPT
        connection.read_into(into, deadline)
        connection.end_bulk(deadline)
        return Fetched.HIT

    def _store(self, connection: RespConnection, outgoing: Outgoing, deadline: float) -> Sent:
        header, body = outgoing.frame
        names = part_names(outgoing.key, outgoing.frame.nbytes)
        first = VALUE_BYTES - FRAME_BYTES
        for part, name in enumerate(names):
            start = first + part * VALUE_BYTES
            piece = (body[start : start + VALUE_BYTES],)
            sent = _command(connection, (b"SET", name, piece, b"EX", b"%d" % UNCOMMITTED_S), deadline)
            if sent is not Sent.STORED:
                return sent
        expiry = () if self._ttl is None else (b"EX", self._ttl)
        sent = _command(
            connection, (b"SET", value_name(outgoing.key), (header, body[:first]), *expiry), deadline
        )
        for name in names if sent is Sent.STORED else ():
            # Two or so small commands per block of many megabytes.
            keep = (b"PERSIST", name) if self._ttl is None else (b"EXPIRE", name, self._ttl)
            sent = sent if _command(connection, keep, deadline) is Sent.STORED else Sent.UNKNOWN
        return sent

    def _get(self, name: bytes) -> tuple[bytes, ...]:
        """A use starts the time to live again."""
        return (b"GET", name) if self._ttl is None else (b"GETEX", name, b"EX", self._ttl)


class _Batch(Generic[Item, Outcome]):
    """Items that several threads share, and the connections they are waiting on.

    `start_by`: a thread that becomes free later (other batches hung) leaves the items to fail.
    """

    def __init__(self, items: Sequence[Item], failed: Outcome, start_by: float) -> None:
        self.start_by = start_by
        self._items = items
        self._next = 0
        self._held: set[RespConnection] = set()
        self._lock = threading.Lock()
        self.outcomes = [failed] * len(items)
        self.stopped = False

    def take(self) -> Iterator[tuple[int, Item]]:
        """Items that no other thread has, until all are gone or the batch is over."""
        while True:
            with self._lock:
                index = self._next
                if self.stopped or index >= len(self._items):
                    return
                self._next += 1
            yield index, self._items[index]

    def hold(self, connection: RespConnection) -> None:
        """From here on `abort` ends it. LinkDown if that has been."""
        with self._lock:
            if not self.stopped:
                self._held.add(connection)
                return
        connection.close()
        raise LinkDown("the batch is over")

    def release(self, connection: RespConnection) -> bool:
        """From here on `abort` leaves it alone. False: it has been aborted."""
        with self._lock:
            self._held.discard(connection)
            return not self.stopped

    def abort(self) -> None:
        """End the batch: threads that wait on a connection fail now, and take no further item."""
        with self._lock:
            self.stopped = True
            for connection in self._held:
                connection.abort()


def _landing(header: FrameHeader, into: memoryview) -> memoryview | None:
    """Where the body is received: in place where it is the block itself. None if the block does not fit."""
    if header.raw_bytes > len(into):
        return None
    return (
        into[: header.body_bytes] if header.codec is Codec.RAW else memoryview(bytearray(header.body_bytes))
    )


def _skip(connection: RespConnection, nbytes: int, deadline: float) -> None:
    """Read a value's rest that nobody wants; it is bounded by the longest value."""
    connection.read_into(memoryview(bytearray(nbytes)), deadline)
    connection.end_bulk(deadline)


def _refused_get(error: ErrorReply) -> Fetched:
    """Another type under our name is no block; anything else ("LOADING", "NOPERM") says nothing about the block."""
    return Fetched.CORRUPT if error.code == "WRONGTYPE" else Fetched.FAILED


def _command(
    connection: RespConnection, arguments: Sequence[bytes | tuple[bytes | memoryview, ...]], deadline: float
) -> Sent:
    connection.send(arguments, deadline)
    reply = connection.read_reply(deadline)
    if isinstance(reply, ErrorReply):
        return Sent.FULL if reply.code == "OOM" else Sent.UNKNOWN
    return Sent.STORED if reply in ("OK", 0, 1) else Sent.UNKNOWN
