"""A replica's view of its node's agent: `BlockStore` and block memory over calls that may fail or come late."""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError

from deployments.node import Attachment
from kv_tiers.keys import BlockKey
from kv_tiers.slab import Slab
from kv_tiers.tier import ReadLease, WriteLease

_log = logging.getLogger("kvtide.node")
Answer = TypeVar("Answer")
Lease = TypeVar("Lease", ReadLease, WriteLease)


class Wait(Protocol):
    """How an answer is waited for, `ray.get` or a test's own."""

    def __call__(self, reference: Any, *, timeout: float | None) -> Any:
        """The answer; raises `GetTimeoutError`, or another `RayError` when there will be none."""
        ...


class AgentTier:
    """`BlockStore` and block memory of this node's agent, for worker threads of a replica.

    What cannot be asked is a miss. An agent that restarted has a new slab: it is attached when no lease of the old one
    is open any more, and until then everything is a miss. Calls block for at most `CALL_S` seconds each, and a read for
    what its blocks are worth on top; a lease that comes later is ended when it comes, and until then no other is asked
    for: an agent that hangs costs one wait, not one per prompt.
    """

    CALL_S = 5.0
    START_S = 60.0
    """Longest that a new agent may take to start; a replica that is made waits for it."""

    def __init__(self, agent: Callable[[], ActorHandle], owner: str, wait: Wait = ray.get) -> None:
        """`agent` finds the actor, or makes it when there is none. `owner`: this replica, as leases name it."""
        self._wait = wait
        self._find_agent = agent
        self._agent = agent()
        self._owner = owner
        self._lock = threading.Lock()
        self._open = self._late = 0
        self._slab: Slab | None = None
        self._incarnation = 0
        self._attach(self.START_S)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Bytes of the slab that open leases refer to."""
        assert self._slab is not None, "only a lease gives offsets"
        return self._slab.view(offset, nbytes)

    def prepare_read(self, keys: Sequence[BlockKey], owner: str, *, worth_s: float = 0.0) -> ReadLease:
        def end(agent: ActorHandle, incarnation: int, lease: ReadLease) -> None:
            agent.complete_read.remote(incarnation, lease.id)

        return self._prepare(
            lambda agent, incarnation: agent.prepare_read.remote(incarnation, keys, owner, worth_s),
            end,
            _NOTHING_READ,
            self.CALL_S + worth_s,
        )

    def complete_read(self, lease_id: int) -> None:
        if lease_id != _NO_LEASE:
            self._ask(self._agent.complete_read.remote(self._incarnation, lease_id), None)
            self._closed()

    def prepare_write(self, keys: Sequence[BlockKey], owner: str, *, tenant: str | None = None) -> WriteLease:
        def end(agent: ActorHandle, incarnation: int, lease: WriteLease) -> None:
            agent.complete_write.remote(incarnation, lease.id, ())

        return self._prepare(
            lambda agent, incarnation: agent.prepare_write.remote(incarnation, keys, owner, tenant),
            end,
            WriteLease(_NO_LEASE, (), (), (), tuple(keys)),
            self.CALL_S,
        )

    def complete_write(self, lease_id: int, written: Sequence[BlockKey]) -> tuple[BlockKey, ...]:
        if lease_id == _NO_LEASE:
            return ()
        visible = self._ask(self._agent.complete_write.remote(self._incarnation, lease_id, written), ())
        self._closed()
        return visible

    def drop(self, keys: Sequence[BlockKey]) -> int:
        return self._ask(self._agent.drop.remote(self._incarnation, keys), 0)

    def _prepare(
        self,
        call: Callable[[ActorHandle, int], ray.ObjectRef],
        end: Callable[[ActorHandle, int, Lease], None],
        nothing: Lease,
        within_s: float,
    ) -> Lease:
        """A lease of the agent's present life, or `nothing`; `end` ends one that came too late to be used."""
        with self._lock:
            if self._late:
                return nothing
            self._open += 1
            agent, incarnation = self._agent, self._incarnation
        reference = call(agent, incarnation)
        answer: Lease | None = None
        try:
            answer = self._wait(reference, timeout=within_s)
        except GetTimeoutError:
            _log.warning("the node agent did not answer within %g s; taken as a miss", within_s)
            with self._lock:
                self._late += 1

            def outwait() -> None:
                late: Lease | None = None
                try:
                    late = self._wait(reference, timeout=None)
                except RayError as error:
                    _log.warning("node agent: %s", type(error).__name__)
                if late is not None:
                    end(agent, incarnation, late)
                with self._lock:
                    self._late -= 1
                    self._open -= 1

            threading.Thread(target=outwait, name="late-lease", daemon=True).start()
            return nothing
        except RayError as error:
            _log.warning("node agent: %s; taken as a miss", type(error).__name__)
        if answer is not None:
            return answer
        with self._lock:
            self._open -= 1
            if not self._open:
                self._attach(self.CALL_S)
        return nothing

    def _closed(self) -> None:
        with self._lock:
            self._open -= 1

    def _attach(self, within_s: float) -> None:
        """Map the slab of the agent's present life; a failure leaves the old one, and everything a miss."""
        try:
            self._agent = self._find_agent()
        except (RayError, ValueError) as error:  # Ray could not look it up or make it
            _log.warning("node agent: %s; taken as a miss", type(error).__name__)
            return
        found: Attachment | None = self._ask(
            self._agent.attach.remote(self._owner, os.getpid()), None, within_s
        )
        if found is None or found.incarnation == self._incarnation:
            return
        try:
            slab = Slab.attach(found.slab)
        except (OSError, ValueError) as error:
            _log.warning("slab of the node agent cannot be mapped: %s", error)
            return
        if self._slab is not None:
            self._slab.close()
        self._slab, self._incarnation = slab, found.incarnation

    def _ask(self, reference: ray.ObjectRef, otherwise: Answer, within_s: float | None = None) -> Answer:
        try:
            answer: Answer = self._wait(reference, timeout=within_s or self.CALL_S)
            return answer
        except RayError as error:
            _log.warning("node agent: %s; taken as a miss", type(error).__name__)
            return otherwise


_NO_LEASE = -1
_NOTHING_READ = ReadLease(_NO_LEASE, ())
