"""An endpoint that misbehaves on purpose, by script or by seeded chance, around any other endpoint.

FaultyEndpoint(endpoint, [FaultRule(Fault.DROP_ACKNOWLEDGE, nth={0}), FaultRule(Fault.CORRUPT,
rate=0.1)], seed=7)
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from enum import Enum

from typing_extensions import override

from kv_tiers.transfer.endpoint import Counters, Outcome, Pull, Scope, TicketEnd, TransferEndpoint
from kv_tiers.transfer.staging import StagingLease, payload_checksum
from kv_tiers.transfer.ticket import Ticket


class Fault(Enum):
    """What goes wrong; the value is the call it strikes."""

    FULL = ("reserve", "no room")
    DELAY = ("pull", "wait `amount` seconds before")
    FAIL = ("pull", "transport error before anything is read")
    FAIL_PIECE = ("pull", "transport error at the `amount`-th look between reads")
    LOSE_PEER = ("pull", "peer lost at the `amount`-th look between reads")
    CORRUPT = ("pull", "the landed byte at `amount` (modulo size) is flipped")
    DROP_ACKNOWLEDGE = ("acknowledge", "the message is lost")
    DROP_REFUSE = ("refuse", "the message is lost")

    @property
    def call(self) -> str:
        """The endpoint method it strikes."""
        return str(self.value[0])


@dataclass(frozen=True)
class FaultRule:
    """Strike the calls whose index (from 0, counted for each method) is in `nth`, and others with chance
    `rate`.
    """

    fault: Fault
    nth: AbstractSet[int] = frozenset()
    rate: float = 0.0
    amount: float = 0.0


class FaultyEndpoint(TransferEndpoint):
    """Wraps `inner`; everything not struck by a rule is passed on. Closing closes `inner`.

    A fault that strikes in the middle of a pull does so through `cancelled`, where the endpoint looks
    between reads: the inner endpoint cleans up as for a cancelled transfer. Same rules, seed and order of
    calls: same faults.
    """

    def __init__(self, inner: TransferEndpoint, rules: Iterable[FaultRule], *, seed: int = 0) -> None:
        self.inner = inner
        self._rules = tuple(rules)
        self._random = random.Random(seed)
        self._calls: Counter[str] = Counter()
        self._pulls: Counter[Outcome] = Counter()
        self._lock = threading.Lock()
        self.injected: Counter[Fault] = Counter()

    @override
    def reserve(self, nbytes: int) -> StagingLease | None:
        return None if self._struck("reserve") else self.inner.reserve(nbytes)

    @override
    def publish(
        self,
        lease: StagingLease,
        *,
        request_id: str,
        attempt: int,
        fingerprint: bytes,
        checksum: int,
        ttl_s: float,
    ) -> Ticket:
        return self.inner.publish(
            lease,
            request_id=request_id,
            attempt=attempt,
            fingerprint=fingerprint,
            checksum=checksum,
            ttl_s=ttl_s,
        )

    @override
    def revoke(self, request_id: str, attempt: int | None = None) -> bool:
        return self.inner.revoke(request_id, attempt)

    @override
    def poll(self, now: float | None = None) -> list[TicketEnd]:
        return self.inner.poll(now)

    @override
    def wait_hint(self) -> float:
        return self.inner.wait_hint()

    @override
    def pull(
        self,
        ticket: Ticket,
        *,
        fingerprint: bytes,
        timeout_s: float,
        cancelled: Callable[[], bool] | None = None,
    ) -> Pull:
        faults = self._struck("pull")
        if Fault.DELAY in faults:
            time.sleep(min(faults[Fault.DELAY], timeout_s))
        if Fault.FAIL in faults:
            pull = Pull(Outcome.TRANSPORT_ERROR, detail="injected")
        else:
            ambush = _Ambush(faults, cancelled)
            pull = self.inner.pull(ticket, fingerprint=fingerprint, timeout_s=timeout_s, cancelled=ambush)
            pull = ambush.result or _corrupted(pull, ticket, faults)
        with self._lock:
            self._pulls[pull.outcome] += 1
        return pull

    @override
    def acknowledge(self, ticket: Ticket) -> None:
        if not self._struck("acknowledge"):
            self.inner.acknowledge(ticket)

    @override
    def refuse(self, ticket: Ticket) -> None:
        if not self._struck("refuse"):
            self.inner.refuse(ticket)

    @override
    def remove_peer(self, endpoint: str) -> int:
        return self.inner.remove_peer(endpoint)

    @property
    @override
    def capacity(self) -> int:
        return self.inner.capacity

    @property
    @override
    def open_tickets(self) -> int:
        return self.inner.open_tickets

    @property
    @override
    def staged_bytes(self) -> int:
        return self.inner.staged_bytes

    @property
    @override
    def used_bytes(self) -> int:
        return self.inner.used_bytes

    @property
    @override
    def quarantined_bytes(self) -> int:
        return self.inner.quarantined_bytes

    @property
    def counters(self) -> Counters:
        """The inner endpoint's, with the pulls as they were reported from here."""
        with self._lock:
            return replace(self.inner.counters, pulls={outcome: self._pulls[outcome] for outcome in Outcome})

    @override
    def check(self) -> None:
        self.inner.check()

    @override
    def close(self) -> None:
        self.inner.close()

    def _struck(self, call: str) -> dict[Fault, float]:
        """The faults that strike this call, with their amounts."""
        with self._lock:
            index = self._calls[call]
            self._calls[call] += 1
            struck = {}
            for rule in self._rules:
                if rule.fault.call == call and (index in rule.nth or self._random.random() < rule.rate):
                    struck[rule.fault] = rule.amount
                    self.injected[rule.fault] += 1
            return struck


class _Ambush:
    """Stands in for `cancelled`; at the scripted look it stops the pull and says what the caller sees."""

    def __init__(self, faults: dict[Fault, float], cancelled: Callable[[], bool] | None) -> None:
        self._faults = faults
        self._cancelled = cancelled
        self._looks = 0
        self.result: Pull | None = None

    def __call__(self) -> bool:
        look, self._looks = self._looks, self._looks + 1
        if self._faults.get(Fault.LOSE_PEER) == look:
            self.result = Pull(Outcome.PEER_LOST, Scope.PEER, detail="injected")
        elif self._faults.get(Fault.FAIL_PIECE) == look:
            self.result = Pull(Outcome.TRANSPORT_ERROR, detail="injected")
        return self.result is not None or (self._cancelled is not None and self._cancelled())


def _corrupted(pull: Pull, ticket: Ticket, faults: dict[Fault, float]) -> Pull:
    """Flip a landed byte and verify again, as the endpoint would have."""
    if pull.lease is None or Fault.CORRUPT not in faults:
        return pull
    pull.lease.buffer[int(faults[Fault.CORRUPT]) % ticket.nbytes] ^= 0xFF
    if payload_checksum(pull.lease.buffer) == ticket.checksum:
        return pull
    pull.lease.release()
    return Pull(Outcome.CORRUPT, detail="injected")
