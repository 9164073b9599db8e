"""Batches of reads and writes of one file over NIXL's POSIX plugin: many in flight from one thread, hardly any CPU.

What NIXL 1.5.1 asks of its user, from its source and seen here:
- All requests of an agent share one queue. An error belongs to the queue, not to a request: completions fetched
  beside it are lost, and whose IO is still in flight is unknown. So after the first error the agent is destroyed:
  with Linux AIO the kernel returns from that only when nothing is in flight. The batches that were under way are
  done again by the fallback engine, which knows errors per operation, and NIXL is not used any more.
- With io_uring the same error leaves completions that are processed twice, and the end of the queue does not wait.
  AIO measured as fast as io_uring, and containers block it less often. So AIO it is.
- The pool of operations must not run dry: a request is then posted by half.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from kv_tiers.nvme_io import Ended, FileEngine, FileSpan, Motion, not_begun
from kv_tiers.transfer.nixl import api_failures, load_api, unavailable

_log = logging.getLogger(__name__)

_REQUEST_BYTES = 4 << 20
_REQUEST_SPANS = 32
_REQUESTS = 8  # of one batch: while one is verified, others are in flight, also when the thread gets no core for 10 ms
_POOL = "4096"
_POLL_S = 0.0003
_PAGE = 4096


class NixlUnusable(RuntimeError):
    """Why files cannot be moved by NIXL here."""


class _Posted(NamedTuple):
    """A request by number: a reference to its handle would keep the agent alive, and so its queue."""

    number: int
    spans: range


class NixlFileEngine:
    """`FileEngine` over `memory` (address, bytes), registered once; other buffers go to `fallback`.

    Reads the file's first page to see that it works; NixlUnusable if not. Closes `fallback` with itself.
    """

    name = "nixl"

    def __init__(self, fd: int, nbytes: int, memory: tuple[int, int], fallback: FileEngine) -> None:
        reason = unavailable()
        if reason is not None:
            raise NixlUnusable(reason)
        self._api = load_api()
        self._failures = api_failures(self._api)
        self._fd = fd
        self._memory = range(memory[0], memory[0] + memory[1])
        self._fallback = fallback
        self._turn = threading.Lock()
        self._handles: dict[int, Any] = {}
        self._posted = 0
        self._agent: Any = None
        try:
            self._open(nbytes, memory)
        except self._failures as error:
            self._agent = None
            raise NixlUnusable(f"{type(error).__name__}: {error}") from error

    def run(self, motion: Motion, spans: Sequence[FileSpan], ended: Ended, stop: Callable[[], bool]) -> None:
        addresses = [_address(span.buffer) for span in spans]
        inside = [
            index
            for index, span in enumerate(spans)
            if addresses[index] in self._memory and addresses[index] + len(span.buffer) <= self._memory.stop
        ]
        failed = self._run_inside(motion, spans, addresses, inside, ended, stop) if inside else []
        registered = set(inside)
        rest = [index for index in range(len(spans)) if index not in registered] + failed
        if rest:
            self._fallback.run(
                motion, [spans[index] for index in rest], lambda at, error: ended(rest[at], error), stop
            )

    def close(self) -> None:
        with self._turn:
            self._retire()
        self._fallback.close()

    def _open(self, nbytes: int, memory: tuple[int, int]) -> None:
        config = self._api.nixl_agent_config(
            enable_prog_thread=False,
            backends=[],
            sync_mode=self._api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        self._name = f"nvme#{secrets.token_hex(8)}"
        self._agent = self._api.nixl_agent(self._name, config)
        self._agent.create_backend("POSIX", {"use_aio": "true", "ios_pool_size": _POOL})
        page = memoryview(mmap.mmap(-1, _PAGE))
        self._agent.register_memory([(memory[0], memory[1], 0, "")], "DRAM")
        self._agent.register_memory([(_address(page), _PAGE, 0, "")], "DRAM")
        self._agent.register_memory([(0, nbytes, self._fd, "")], "FILE")
        self._probe(page)

    def _probe(self, page: memoryview) -> None:
        expected = memoryview(mmap.mmap(-1, _PAGE))
        os.preadv(self._fd, [expected], 0)
        posted = self._post(Motion.READ, [FileSpan(0, page)], [_address(page)], range(1))
        deadline = time.monotonic() + 5.0
        while not self._done(posted):
            if time.monotonic() > deadline:
                raise NixlUnusable("reading the file's first page took more than 5 s")
            time.sleep(_POLL_S)
        if page != expected:
            raise NixlUnusable("it read something else than the file's first page")

    def _run_inside(
        self,
        motion: Motion,
        spans: Sequence[FileSpan],
        addresses: Sequence[int],
        inside: Sequence[int],
        ended: Ended,
        stop: Callable[[], bool],
    ) -> list[int]:
        """Move the registered ones; returns those that are not done, with nothing in flight: do them otherwise."""
        todo = _requests([len(spans[index].buffer) for index in inside])
        picked = [spans[index] for index in inside]
        where = [addresses[index] for index in inside]
        posted: list[_Posted] = []
        landed: list[_Posted] = []

        def tell(requests: Iterable[range], error: OSError | None) -> None:
            for request in requests:
                for at in request:
                    ended(inside[at], error)

        while todo or posted or landed:
            failure = ""
            try:
                while todo and len(posted) < _REQUESTS and not stop():
                    posted.append(self._post(motion, picked, where, todo[0]))
                    todo.pop(0)
            except self._failures as error:
                failure = f"{type(error).__name__}: {error}"
            tell((request.spans for request in landed), None)  # takes its time, while others are in flight
            landed = []
            try:
                for request in () if failure else posted:
                    if self._done(request):
                        landed.append(request)
            except self._failures as error:
                failure = f"{type(error).__name__}: {error}"
            posted = [request for request in posted if request not in landed]
            if failure:  # the traceback, which holds the agent, is gone by now
                self._give_up(failure)
                tell((request.spans for request in landed), None)
                return [inside[at] for request in [*(one.spans for one in posted), *todo] for at in request]
            if not landed and not posted:  # stopped
                tell(todo, not_begun())
                return []
            if not landed:
                time.sleep(_POLL_S)
        return []

    def _post(
        self, motion: Motion, spans: Sequence[FileSpan], addresses: Sequence[int], chosen: range
    ) -> _Posted:
        memory = np.array([(addresses[at], len(spans[at].buffer), 0) for at in chosen], dtype=np.uint64)
        file = np.array(
            [(spans[at].offset, len(spans[at].buffer), self._fd) for at in chosen], dtype=np.uint64
        )
        with self._turn:
            if self._agent is None:
                raise self._failures[1]("given up")
            handle = self._agent.initialize_xfer(
                motion.name,
                self._agent.get_xfer_descs(memory, "DRAM"),
                self._agent.get_xfer_descs(file, "FILE"),
                self._name,
                b"",
            )
            self._posted += 1
            self._handles[self._posted] = handle
            if self._agent.transfer(handle) == "ERR":
                del handle
                raise self._failures[1]("not posted")
            return _Posted(self._posted, chosen)

    def _done(self, posted: _Posted) -> bool:
        with self._turn:
            if self._agent is None:
                raise self._failures[1]("given up")
            state = self._agent.check_xfer_state(self._handles[posted.number])
            if state == "ERR":
                raise self._failures[1]("transfer failed")
            if state != "DONE":
                return False
            self._handles.pop(posted.number).release()
            return True

    def _give_up(self, failure: str) -> None:
        with self._turn:
            if self._agent is not None:
                _log.warning(
                    "NIXL failed on the tier's file (%s); from now on: %s", failure, self._fallback.name
                )
            self._retire()

    def _retire(self) -> None:
        """Destroy the agent; the kernel returns from that when nothing of it is in flight."""
        if self._agent is None:
            return
        while self._handles:
            with suppress(*self._failures):
                self._handles.popitem()[1].release()
        self._agent = None


def _requests(sizes: Sequence[int]) -> list[range]:
    """Cut a batch into requests of some megabytes each."""
    requests: list[range] = []
    start = nbytes = 0
    for index, size in enumerate(sizes):
        full = nbytes + size > _REQUEST_BYTES or index - start >= _REQUEST_SPANS
        if index > start and full:
            requests.append(range(start, index))
            start, nbytes = index, 0
        nbytes += size
    requests.append(range(start, len(sizes)))
    return requests


def _address(buffer: memoryview) -> int:
    return int(np.frombuffer(buffer, dtype=np.uint8).ctypes.data)
