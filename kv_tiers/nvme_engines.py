"""Which engine moves the bytes of an NVMe tier's file."""

from __future__ import annotations

import logging
from typing import Literal, TypeAlias

from kv_tiers.nvme_io import FileEngine, ThreadedEngine
from kv_tiers.transfer.nixl_file import NixlFileEngine, NixlUnusable

_log = logging.getLogger(__name__)

EngineChoice: TypeAlias = Literal["auto", "nixl", "threads"]


def open_engine(choice: EngineChoice, fd: int, nbytes: int, memory: tuple[int, int] | None) -> FileEngine:
    """For a file of `nbytes`. "auto" and "nixl": NIXL where it works for `memory` (address, bytes), else threads."""
    threads = ThreadedEngine(fd)
    if choice == "threads":
        return threads
    if memory is None:
        if choice == "nixl":
            _log.warning("NIXL moves bytes of registered memory only, and there is none: threads move them")
        return threads
    try:
        return NixlFileEngine(fd, nbytes, memory, threads)
    except NixlUnusable as reason:
        _log.warning("NIXL's POSIX plugin does not work here (%s): threads move the bytes", reason)
        return threads
