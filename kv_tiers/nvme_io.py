"""Batches of reads and writes of one file, straight from and into the callers' buffers."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum
from typing import NamedTuple, Protocol

_JOINED_BYTES = 1 << 20  # one call moves so much at most, so that many threads share a batch of small blocks
_JOINED_SPANS = 256  # well below IOV_MAX


class Motion(Enum):
    """Direction of a batch."""

    READ = "read"
    WRITE = "write"


class FileSpan(NamedTuple):
    """`buffer` is read from, or written to, the file from byte `offset` on. O_DIRECT wants both page-aligned."""

    offset: int
    buffer: memoryview


Ended = Callable[[int, OSError | None], None]
"""`ended(i, error)`: nothing of span i is in flight any more; None: all of it was moved. From any thread, once each."""


class FileEngine(Protocol):
    """Moves bytes between one open file and buffers. Thread safe; blocks its caller, so not for an event loop."""

    name: str

    def run(self, motion: Motion, spans: Sequence[FileSpan], ended: Ended, stop: Callable[[], bool]) -> None:
        """Move every span and say so, each as it ends, while others are still in flight.

        Once `stop()` is true nothing more is begun; what was not begun ends with `not_begun()`. On return nothing is
        in flight: no buffer is touched any more. An operation that the kernel has begun cannot be called back, so a
        device that hangs keeps this call until it answers.
        """
        ...

    def close(self) -> None:
        """Give up threads and queues. No `run` is under way."""
        ...


def not_begun() -> OSError:
    """How a span ends that was stopped before it began."""
    return OSError(errno.ECANCELED, "stopped before it began")


class ThreadedEngine:
    """`FileEngine` of `os.preadv` and `os.pwritev`: the calling thread and up to `threads` - 1 more.

    Neighbours in the file are moved by one call, up to 1 MiB. The file stays the caller's.
    """

    name = "threads"

    def __init__(self, fd: int, threads: int = 8) -> None:
        assert threads >= 1
        self._fd = fd
        self._threads = threads
        self._pool = ThreadPoolExecutor(max(1, threads - 1), thread_name_prefix="kvtide-nvme-io")

    def run(self, motion: Motion, spans: Sequence[FileSpan], ended: Ended, stop: Callable[[], bool]) -> None:
        groups = list(_neighbours(spans))
        todo = iter(groups)
        turn = threading.Lock()

        def work() -> None:
            while True:
                with turn:
                    group = next(todo, None)
                if group is None:
                    return
                self._move(motion, spans, group, ended, stop)

        # One that finds the pool busy with other batches is cancelled: the calling thread gets on alone.
        others = [self._pool.submit(work) for _ in range(min(self._threads, len(groups)) - 1)]
        try:
            work()
        finally:
            _join(others)

    def close(self) -> None:
        self._pool.shutdown()

    def _move(
        self,
        motion: Motion,
        spans: Sequence[FileSpan],
        group: Sequence[int],
        ended: Ended,
        stop: Callable[[], bool],
    ) -> None:
        if stop():
            for index in group:
                ended(index, not_begun())
            return
        error = _transfer(self._fd, motion, spans[group[0]].offset, [spans[index].buffer for index in group])
        if error is None or len(group) == 1:
            for index in group:
                ended(index, error)
            return
        for index in group:  # to know which of them it was
            self._move(motion, spans, (index,), ended, stop)


def _neighbours(spans: Sequence[FileSpan]) -> Iterator[list[int]]:
    """Indices of spans that follow each other in the file, ordered by offset."""
    group: list[int] = []
    end = size = 0
    for index in sorted(range(len(spans)), key=lambda index: spans[index].offset):
        nbytes = len(spans[index].buffer)
        joins = spans[index].offset == end and size + nbytes <= _JOINED_BYTES and len(group) < _JOINED_SPANS
        if group and not joins:
            yield group
            group, size = [], 0
        group.append(index)
        size += nbytes
        end = spans[index].offset + nbytes
    if group:
        yield group


def _transfer(fd: int, motion: Motion, offset: int, buffers: Sequence[memoryview]) -> OSError | None:
    """Move all of it, in as many calls as the kernel makes of it."""
    move = os.preadv if motion is Motion.READ else os.pwritev
    left = list(buffers)
    while left:
        try:
            moved = move(fd, left, offset)
        except OSError as error:
            return error
        if moved == 0:
            return OSError(errno.EIO, f"the file ends at byte {offset}")
        offset += moved
        while left and moved >= len(left[0]):
            moved -= len(left.pop(0))
        if moved:
            left[0] = left[0][moved:]
    return None


def _join(others: Sequence[Future[None]]) -> None:
    for other in others:
        if not other.cancel():
            other.result()
