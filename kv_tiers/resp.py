"""One blocking connection to a Redis server that receives values straight into the caller's memory.

For worker threads: a blocking socket is twice as fast here as asyncio, and several times as fast as a client that
collects replies first. Only what GET and SET of large values need of the protocol (RESP2); whatever else arrives, and
any length beyond the limits, ends the connection. So does every command that is late or aborted: its reply can reach
nobody, nor be written into memory that its owner has taken back.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kv_tiers.redis_address import RedisAddress

Argument: TypeAlias = bytes | tuple[bytes | memoryview, ...]
"""Of a command; a tuple's pieces are sent as one argument."""

MAX_LINE_BYTES = 1024
_BUFFER_BYTES = 4096
_MAX_DIGITS = 12
_TIMEVAL = struct.Struct("@ll")


class LinkDown(Exception):
    """The connection is of no more use: refused, closed, late, aborted, or it spoke nonsense."""


class TooLate(LinkDown):
    """The deadline passed first."""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """The server answered, and refused. `code`: the message's first word ("OOM", "WRONGTYPE", "LOADING" ...)."""

    code: str
    message: str


class RespConnection:
    """For one thread at a time, but for `abort`. Deadlines are `time.monotonic()` seconds. LinkDown is final."""

    def __init__(self, sock: socket.socket, max_bulk_bytes: int) -> None:
        self._sock = sock
        self._max_bulk = max_bulk_bytes
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0
        self.commands = 0
        """How many were sent since the login: a fresh connection that fails says more than an old one."""

    def open(self, address: RedisAddress, deadline: float) -> None:
        """Connect a `new_socket`, TLS and login included."""
        self._sock.settimeout(self._left(deadline))
        try:
            self._sock.connect(address.path if address.path is not None else (address.host, address.port))
            if address.tls is not None:
                self._sock = address.tls.wrap_socket(
                    self._sock, server_hostname=address.host, do_handshake_on_connect=False
                )
                self._sock.do_handshake()
            self._sock.settimeout(None)
        except TimeoutError as late:
            raise TooLate("no connection in time") from late
        except (OSError, ValueError) as error:
            raise LinkDown(str(error)) from error
        self._log_in(address, deadline)

    def send(self, arguments: Sequence[Argument], deadline: float) -> None:
        """One command, complete. Large pieces are not copied."""
        self.commands += 1
        head = bytearray(b"*%d\r\n" % len(arguments))
        for argument in arguments:
            pieces = argument if isinstance(argument, tuple) else (argument,)
            head += b"$%d\r\n" % sum(map(len, pieces))
            for piece in pieces:
                if len(piece) < _BUFFER_BYTES:
                    head += piece
                else:
                    self._send_bytes(head, deadline)
                    self._send_bytes(piece, deadline)
                    head = bytearray()
            head += b"\r\n"
        self._send_bytes(head, deadline)

    def read_reply(self, deadline: float) -> int | str | ErrorReply | None:
        """A status, a number, "no such key", or a refusal; a value here is nonsense."""
        line = self._line(deadline)
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest.decode(errors="replace")
        if kind == b"-":
            return _refusal(rest)
        if kind == b":":
            return _number(rest)
        if line == b"$-1":
            return None
        raise LinkDown(f"unexpected reply {line[:32]!r}")

    def read_bulk_head(self, deadline: float) -> int | ErrorReply | None:
        """The length of the value that follows; None for no such key. Then: `read_into` that much, `end_bulk`."""
        line = self._line(deadline)
        if line == b"$-1":
            return None
        if line[:1] == b"-":
            return _refusal(line[1:])
        if line[:1] != b"$":
            raise LinkDown(f"no value: {line[:32]!r}")
        length = _number(line[1:])
        if not 0 <= length <= self._max_bulk:
            raise LinkDown(f"a value of {length} bytes; {self._max_bulk} are the limit")
        return length

    def read_into(self, target: memoryview, deadline: float) -> None:
        """Fill `target` with the next bytes."""
        done = min(self._end - self._start, len(target))
        target[:done] = self._view[self._start : self._start + done]
        self._start += done
        while done < len(target):
            done += self._receive(target[done:], deadline, whole=True)

    def end_bulk(self, deadline: float) -> None:
        """The two bytes behind a value."""
        end = bytearray(2)
        self.read_into(memoryview(end), deadline)
        if end != b"\r\n":
            raise LinkDown(f"a value ends in {bytes(end)!r}")

    def abort(self) -> None:
        """From any thread, any number of times: whoever waits on this connection gets LinkDown at once."""
        with contextlib.suppress(OSError):  # closed already, or never connected
            # Not SSLSocket's own, which also takes the TLS session from under the thread that reads.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """By the thread that used it, or when no thread does."""
        self._sock.close()

    def _log_in(self, address: RedisAddress, deadline: float) -> None:
        """AUTH and SELECT as the address says. LinkDown if the server wants others."""
        if address.password is not None:
            names = [address.username] if address.username else []
            self._expect_ok(
                [b"AUTH", *(name.encode() for name in names), address.password.encode()], deadline
            )
        if address.db:
            self._expect_ok([b"SELECT", b"%d" % address.db], deadline)
        self.commands = 0

    def _expect_ok(self, command: Sequence[bytes], deadline: float) -> None:
        self.send(command, deadline)
        reply = self.read_reply(deadline)
        if reply != "OK":
            reason = reply.code if isinstance(reply, ErrorReply) else "an odd reply"
            raise LinkDown(f"{command[0].decode()} was refused: {reason}")

    def _line(self, deadline: float) -> bytes:
        """The next line without its end."""
        searched = 0
        while True:
            end = self._buffer.find(b"\r\n", self._start + searched, self._end)
            if end >= 0:
                line = bytes(self._view[self._start : end])
                self._start = end + 2
                return line
            held = self._end - self._start
            if held > MAX_LINE_BYTES:
                raise LinkDown("a line without end")
            searched = max(0, held - 1)
            self._buffer[:held] = self._buffer[self._start : self._end]
            self._start, self._end = 0, held
            self._end += self._receive(self._view[held:], deadline)

    def _receive(self, target: memoryview, deadline: float, *, whole: bool = False) -> int:
        """Some bytes; with `whole` usually all, in one system call: a server writes large values in many pieces."""
        left = self._left(deadline)
        try:
            if isinstance(self._sock, ssl.SSLSocket):
                self._sock.settimeout(left)
                count = self._sock.recv_into(target)
            else:
                self._bound_by_kernel(socket.SO_RCVTIMEO, left)
                count = self._sock.recv_into(target, 0, socket.MSG_WAITALL if whole else 0)
        except (TimeoutError, BlockingIOError) as late:
            raise TooLate("no reply in time") from late
        except (OSError, ValueError) as error:
            raise LinkDown(str(error)) from error
        if count == 0:
            raise LinkDown("closed by the server")
        return count

    def _send_bytes(self, data: bytes | bytearray | memoryview, deadline: float) -> None:
        left = self._left(deadline)
        try:
            if len(data) < _BUFFER_BYTES and not isinstance(self._sock, ssl.SSLSocket):
                # Usually fits into the socket's buffer; behind a large piece that nobody reads it does not.
                self._bound_by_kernel(socket.SO_SNDTIMEO, left)
                self._sock.sendall(data)
                return
            self._sock.settimeout(left)
            self._sock.sendall(data)
            self._sock.settimeout(None)
        except (TimeoutError, BlockingIOError) as late:
            raise TooLate("not taken in time") from late
        except (OSError, ValueError) as error:
            raise LinkDown(str(error)) from error

    def _bound_by_kernel(self, option: int, seconds: float) -> None:
        """The kernel's own timeout bounds a system call as a whole; Python's would poll before each piece."""
        micros = max(1000, int(seconds * 1e6))
        self._sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(*divmod(micros, 1_000_000)))

    def _left(self, deadline: float) -> float:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TooLate("the deadline passed")
        return left


def new_socket(address: RedisAddress) -> socket.socket:
    """Not connected yet, so that the caller can make it known to whoever may have to abort it."""
    if address.path is not None:
        return socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        family = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0][0]
    except OSError as error:
        raise LinkDown(f"{address.host}: {error}") from error
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _refusal(rest: bytes) -> ErrorReply:
    message = rest.decode(errors="replace")
    return ErrorReply(message.partition(" ")[0], message)


def _number(digits: bytes) -> int:
    sign, unsigned = (-1, digits[1:]) if digits[:1] == b"-" else (1, digits)
    if not unsigned.isdigit() or len(unsigned) > _MAX_DIGITS:
        raise LinkDown(f"no number: {digits[:32]!r}")
    return sign * int(unsigned)
