"""Transfers between endpoints of one process: tests, machines without NIXL, and Serve's local testing mode.

Same contract and same code as NIXL from the ticket up; only the copying differs. Endpoints find each other
by name in a `LocalFabric`, which can also kill, freeze and thaw them, as a process can be.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
from typing_extensions import override

from kv_tiers.transfer.staged import StagedEndpoint
from kv_tiers.transfer.staging import StagingArena
from kv_tiers.transfer.ticket import PeerId
from kv_tiers.transfer.wire import Read, Span, Step, Wire


class LocalFabric:
    """The endpoints that can reach each other, by name. A new endpoint of a name takes the place of the old
    one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wires: dict[str, LocalWire] = {}

    def find(self, peer: PeerId) -> LocalWire | None:
        """The living endpoint of that name and incarnation."""
        with self._lock:
            wire = self._wires.get(peer.endpoint)
        return wire if wire is not None and wire.incarnation == peer.incarnation and not wire.dead else None

    def kill(self, name: str) -> None:
        """As SIGKILL: peers' reads and messages are lost from now on."""
        with self._lock:
            self._wires.pop(name).dead = True

    def freeze(self, name: str) -> None:
        """As SIGSTOP: peers' reads stay pending (and land after a thaw), messages wait."""
        with self._lock:
            self._wires[name].frozen = True

    def thaw(self, name: str) -> None:
        """As SIGCONT."""
        with self._lock:
            self._wires[name].frozen = False

    def join(self, name: str, wire: LocalWire) -> None:
        """Called by LocalWire."""
        with self._lock:
            replaced = self._wires.pop(name, None)
            if replaced is not None:
                replaced.dead = True
            self._wires[name] = wire

    def leave(self, name: str, wire: LocalWire) -> None:
        """Called by LocalWire."""
        wire.dead = True
        with self._lock:
            if self._wires.get(name) is wire:
                del self._wires[name]


PROCESS_FABRIC = LocalFabric()
"""The fabric of endpoints that were given none."""


class _LocalRead:
    """Copies at the first look at which the source is not frozen, so a late landing is as real as over a
    network.
    """

    def __init__(self, source: LocalWire | None, spans: Sequence[Span], memory: torch.Tensor) -> None:
        self._source = source
        self._spans = spans
        self._memory = memory
        self._final: Step | None = None

    def state(self) -> Step:
        if self._final is None:
            source = self._source
            if source is None or source.dead:
                self._final = Step.LOST
            elif source.frozen:
                return Step.PENDING
            else:
                self._final = self._copy(source.memory)
        return self._final

    def _copy(self, source: torch.Tensor) -> Step:
        for remote, local, nbytes in self._spans:
            if remote + nbytes > len(source):
                return Step.FAILED
            self._memory[local : local + nbytes].copy_(source[remote : remote + nbytes])
        return Step.DONE

    def close(self) -> None:
        self._final = Step.FAILED if self._final is None else self._final


class LocalWire(Wire):
    """`Wire` within one process, over uint8 `memory`."""

    def __init__(self, name: str, memory: torch.Tensor, fabric: LocalFabric) -> None:
        self.incarnation = secrets.randbits(64)
        self.metadata = b""
        self.memory = memory
        self.dead = False
        self.frozen = False
        self._name = name
        self._fabric = fabric
        self._inbox: deque[bytes] = deque()
        fabric.join(name, self)

    @override
    def address(self, offset: int) -> int:
        return offset

    @override
    def connect(self, peer: PeerId, metadata: bytes) -> Step:
        return Step.LOST if self._fabric.find(peer) is None else Step.DONE

    @override
    def read(self, peer: PeerId, spans: Sequence[Span]) -> Read:
        return _LocalRead(self._fabric.find(peer), spans, self.memory)

    @override
    def send(self, peer: PeerId, message: bytes) -> Step:
        target = self._fabric.find(peer)
        if target is None:
            return Step.LOST
        target._inbox.append(message)
        return Step.DONE

    @override
    def receive(self) -> list[bytes]:
        messages = []
        while self._inbox:
            messages.append(self._inbox.popleft())
        return messages

    def disconnect(self, peer: PeerId) -> None:
        """Nothing to do: reads copy only when looked at."""

    @override
    def close(self) -> None:
        self._fabric.leave(self._name, self)


class LocalEndpoint(StagedEndpoint):
    """`TransferEndpoint` within one process; `arena_bytes` of staging for both roles together."""

    def __init__(
        self,
        name: str,
        arena_bytes: int,
        *,
        fabric: LocalFabric = PROCESS_FABRIC,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        arena = StagingArena(arena_bytes)
        super().__init__(name, arena, LocalWire(name, arena.memory, fabric), clock)
