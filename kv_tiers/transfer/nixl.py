"""Transfers between processes and machines over NIXL (UCX). Only this module imports nixl, and only on use.

What the code below works around, all of it seen with NIXL 1.5.1:
- A process that loaded UCX's InfiniBand module on a host without RDMA dies with SIGSEGV at exit. UCX reads
  UCX_MODULES when it is loaded, so it is set before the first import, and only where no RDMA device is.
- NIXL's progress thread spins a core; without it reads progress only while the source polls (`poll`).
- The default sync mode is not thread safe.
- A dead peer raises nixlRemoteDisconnectError only with error handling mode `peer`; a frozen one is never
  reported, so deadlines are ours, and a handle is never looked at after its release.
- A message sent on a connection that is not up yet waits for progress on OUR side (`Puller` greets first).
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import logging.config
import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from typing_extensions import override

from kv_tiers.transfer.staged import StagedEndpoint
from kv_tiers.transfer.staging import StagingArena
from kv_tiers.transfer.ticket import PeerId
from kv_tiers.transfer.wire import Read, Span, SpanTable, Step, Wire

# `nixl` is a meta package over one wheel per CUDA version; either wheel alone is enough, with or without
# CUDA.
_PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12")
_STEPS = {"DONE": Step.DONE, "PROC": Step.PENDING, "ERR": Step.FAILED}
_SLAB_WIRES = 2
_RDMA_DEVICES = Path("/sys/class/infiniband")


def unavailable() -> str | None:
    """Why NIXL cannot be used here, or None when it can. Imports nothing."""
    if sys.platform != "linux":
        return f"NIXL has no build for {sys.platform}"
    if not any(importlib.util.find_spec(package) for package in _PACKAGES):
        return "NIXL is not installed: pip install nixl-cu12"
    return None


def load_api() -> ModuleType:
    """Import NIXL with the environment it needs. What the user has set stays."""
    if not (_RDMA_DEVICES.is_dir() and any(_RDMA_DEVICES.iterdir())):
        os.environ.setdefault("UCX_MODULES", "^ib")
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    # Importing nixl configures logging for the whole process: it closes everyone's handlers (a
    # MemoryHandler loses its target) and turns logging.raiseExceptions off. Without its own handler its
    # records go to the root logger.
    configure, raise_exceptions = logging.config.dictConfig, logging.raiseExceptions
    logging.config.dictConfig = lambda config: None
    try:
        for package in _PACKAGES:
            if importlib.util.find_spec(package):
                return importlib.import_module(f"{package}._api")
    finally:
        logging.config.dictConfig, logging.raiseExceptions = configure, raise_exceptions
    raise ImportError(unavailable())


def api_failures(api: ModuleType) -> tuple[type[Exception], ...]:
    """What NIXL's calls raise when an operation fails."""
    errors = api.nixlBind
    return (
        errors.nixlRemoteDisconnectError,
        errors.nixlBackendError,
        errors.nixlNotFoundError,
        errors.nixlInvalidParamError,
        errors.nixlMismatchError,
        errors.nixlNotAllowedError,
        errors.nixlCancelledError,
        errors.nixlUnknownError,
    )


class _FailedRead:
    """A read that could not be posted."""

    def __init__(self, step: Step) -> None:
        self._step = step

    def state(self) -> Step:
        return self._step

    def close(self) -> None:
        """Nothing was allocated."""


def _agent_name(peer: PeerId) -> str:
    return f"{peer.endpoint}#{peer.incarnation:016x}"


class _NixlRead:
    """A posted transfer. Its handle is not touched after `close`, and its final state is remembered."""

    def __init__(
        self,
        wire: NixlWire,
        transfer: Callable[[], str],
        check: Callable[[], str],
        release: Callable[[], None],
    ) -> None:
        self._wire = wire
        self._check = check
        self._release = release
        self._state = self._ask(transfer)

    def state(self) -> Step:
        if self._state is Step.PENDING:
            self._state = self._ask(self._check)
        return self._state

    def close(self) -> None:
        if self._state is Step.PENDING:
            self._state = Step.FAILED
        # An active transfer that UCX cannot cancel raises; NIXL keeps its handle until the agent ends.
        with suppress(*self._wire.failures):
            self._release()

    def _ask(self, operation: Callable[[], str]) -> Step:
        try:
            return _STEPS[operation()]
        except self._wire.failures as error:
            return self._wire.step_of(error)


class NixlWire(Wire):
    """`Wire` over one NIXL agent. Agent names carry the incarnation, so lives of one endpoint are never
    mixed up.
    """

    def __init__(self, name: str, memory: torch.Tensor) -> None:
        """`memory`: uint8 CPU memory that peers may read and reads land in; registered here, once."""
        self._api = load_api()
        self._errors = self._api.nixlBind
        self.failures = api_failures(self._api)
        self.incarnation = secrets.randbits(64)
        self._self = PeerId(name, self.incarnation)
        self._base = memory.data_ptr()
        self._start = np.array([self._base, 0, 0], np.uint64)
        config = self._api.nixl_agent_config(
            enable_prog_thread=False,
            backends=[],
            sync_mode=self._api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        self._agent = self._api.nixl_agent(_agent_name(self._self), config)
        self._agent.create_backend("UCX", {"ucx_error_handling_mode": "peer"})
        self._region = self._agent.register_memory(memory)
        self.metadata: bytes = self._agent.get_agent_metadata()

    @override
    def address(self, offset: int) -> int:
        return self._base + offset

    @override
    def connect(self, peer: PeerId, metadata: bytes) -> Step:
        if peer == self._self:
            return Step.DONE
        try:
            name = self._agent.add_remote_agent(metadata)
        except self.failures as error:
            refused = isinstance(error, self._errors.nixlBackendError)  # the process is gone
            return Step.LOST if refused else self.step_of(error)
        found = name.decode() if isinstance(name, bytes) else name
        if found != _agent_name(peer):
            self._agent.remove_remote_agent(found)
            return Step.FAILED
        return Step.DONE

    @override
    def read(self, peer: PeerId, spans: Sequence[Span]) -> Read:
        table = SpanTable.of(spans)  # arrays, since NIXL takes lists apart item by item
        try:
            handle = self._agent.initialize_xfer(
                "READ",
                self._agent.get_xfer_descs(table.local + self._start, "DRAM"),
                self._agent.get_xfer_descs(table.remote, "DRAM"),
                _agent_name(peer),
                b"",
            )
        except self.failures as error:
            return _FailedRead(self.step_of(error))
        agent = self._agent
        return _NixlRead(
            self, lambda: agent.transfer(handle), lambda: agent.check_xfer_state(handle), handle.release
        )

    @override
    def send(self, peer: PeerId, message: bytes) -> Step:
        try:
            self._agent.send_notif(_agent_name(peer), message)
        except self.failures as error:
            return self.step_of(error)
        return Step.DONE

    @override
    def receive(self) -> list[bytes]:
        try:
            by_agent = self._agent.get_new_notifs()
        except self.failures:
            return []  # a peer's death met while progressing; whoever reads from it learns of it there
        return [message for messages in by_agent.values() for message in messages]

    @override
    def disconnect(self, peer: PeerId) -> None:
        if peer == self._self:
            return
        with suppress(*self.failures):  # NIXL may have dropped a dead peer itself
            self._agent.remove_remote_agent(_agent_name(peer))

    @override
    def close(self) -> None:
        self._agent.deregister_memory(self._region)
        del self._agent

    def step_of(self, error: Exception) -> Step:
        """LOST for a disconnected peer, FAILED for everything else."""
        return Step.LOST if isinstance(error, self._errors.nixlRemoteDisconnectError) else Step.FAILED


def slab_wires(name: str, memory: torch.Tensor) -> list[NixlWire]:
    """Wires over one slab: as many as read it at the same time, where there are processors for them."""
    return [NixlWire(name, memory) for _ in range(min(_SLAB_WIRES, len(os.sched_getaffinity(0))))]


class NixlEndpoint(StagedEndpoint):
    """`TransferEndpoint` over NIXL; `arena_bytes` of staging for both roles together, registered once.

    `name` is unique in the cluster (a replica's id); each life adds its own incarnation. Raises ImportError
    where NIXL is not available (`unavailable()` says why) and NIXL's own error when no UCX backend can be
    made.
    """

    def __init__(self, name: str, arena_bytes: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        arena = StagingArena(arena_bytes)
        super().__init__(name, arena, NixlWire(name, arena.memory), clock)
