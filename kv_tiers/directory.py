"""The directory's state machine: which places hold which block. Pure: it reads no clock.

It may lose messages, restart empty, and be wrong for a while; readers verify what they load, so a wrong entry
costs a miss, never wrong bytes. Three rules keep it from staying wrong. Entries belong to an incarnation of a
node and vanish with it. The messages of each of a node's places are numbered, and a gap stops everything but a
full resync. A node that stops its heartbeat loses its entries when its lease ends.

A place that all nodes share belongs to none of them: any node renews it, and its messages are not numbered but
idempotent.

Times are seconds of one monotonic clock. Incarnations are numbers that grow with every start of a node, source or
shared store. Keys travel as their digests, one after another in one `bytes`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from kv_tiers.holders import Holders, Located, Match, Place, Segment

__all__ = ["DirectoryState", "DirectoryStats", "Located", "Match", "Outcome", "Place", "Segment"]


# A step takes ten milliseconds and more where there are ten million blocks: a small part of the time, whatever the
# traffic.
_SWEEP_EVERY_S = 0.25


class Outcome(Enum):
    """How a message was taken."""

    OK = "applied, or known already"
    GAP = "messages are missing: send a resync"
    STALE = "a newer incarnation of this name is known: stop"
    UNKNOWN = "not registered, or its lease has ended: register, then resync"


@dataclass(frozen=True)
class DirectoryStats:
    """Gauges, counters, and `reports`: what each live source last said of itself, each under its own name.

    `keys`: blocks that somebody holds; `entries`: pairs of block and place, `tiers`: the same by tier. `unswept`:
    entries of vanished places whose memory has not been taken back yet. `age_s`: how long it has been told things: one
    that is older than a lease knows every live node.
    """

    epoch: int
    age_s: float
    nodes: int
    nodes_in_gap: int
    keys: int
    entries: int
    tiers: dict[str, int]
    unswept: int
    gaps: int
    resyncs: int
    expired_nodes: int
    forgotten_entries: int
    reports: dict[str, dict[str, float]]


@dataclass(slots=True)
class _Held:
    """A place's numbers. `applied`: the last message in effect; `heard`: the highest seen. Apart means a gap.

    Its entries are those of `term`. A resync under way, as of message `next_seq`, fills `next_term` beside it. `torn`:
    a part of one has come without the first, which is a gap as well.
    """

    term: int
    applied: int = 0
    heard: int = 0
    torn: bool = False
    next_term: int | None = None
    next_seq: int = 0

    @property
    def in_gap(self) -> bool:
        return self.torn or self.applied < self.heard

    @property
    def terms(self) -> tuple[int, ...]:
        return (self.term,) if self.next_term is None else (self.term, self.next_term)


@dataclass(slots=True)
class _Node:
    """What has a lease: a node with its places by tier, or one shared place."""

    incarnation: int
    lease_end: float
    address: str = ""
    held: dict[str, _Held] = field(default_factory=dict)

    @property
    def in_gap(self) -> bool:
        return any(held.in_gap for held in self.held.values())


@dataclass(slots=True)
class _Shared:
    """`told`: somebody has announced its contents since it was found."""

    incarnation: int
    lease_end: float
    term: int
    told: bool = False


@dataclass(slots=True)
class _Report:
    incarnation: int
    lease_end: float
    values: dict[str, float]


@dataclass(slots=True)
class _Counters:
    gaps: int = 0
    resyncs: int = 0
    expired: int = 0
    forgotten: int = 0


class DirectoryState:
    """Holders per key, leases per node and shared place, load reports per source. One thread calls it.

    `epoch` names this start of the directory and travels with answers where a caller must notice a restart.
    """

    def __init__(self, lease_s: float, epoch: int, began: float = 0.0) -> None:
        """`began`: now."""
        if lease_s <= 0:
            raise ValueError(f"a lease lasts longer than {lease_s} s")
        self.lease_s = lease_s
        self.epoch = epoch
        self._began = began
        self._index = Holders()
        self._nodes: dict[str, _Node] = {}
        self._shared: dict[Place, _Shared] = {}
        self._reports: dict[str, _Report] = {}
        # Survives expiry, or a zombie could come back after its successor's lease has ended.
        self._newest: dict[str | Place, int] = {}
        self._counters = _Counters()
        self._next_sweep = -math.inf

    # Said by nodes of their own places.

    def register(self, place: Place, incarnation: int, now: float, address: str = "") -> Outcome:
        """A place of a node that (re)starts: a newer incarnation begins without entries and ends the older.

        The node's other places of an older incarnation end as well. `address`: where the node is asked for blocks. A
        place that is registered already keeps its entries, and its node's lease is renewed.
        """
        if not place.node:
            raise ValueError(f"all nodes share {place.tier}: it is renewed, not registered")
        if incarnation < self._newest.get(place.node, incarnation):
            return Outcome.STALE
        node = self._nodes.get(place.node)
        if node is None or node.incarnation != incarnation:
            if node is not None:
                self._remove(place.node)
            report = self._reports.get(place.node)
            if report is not None and report.incarnation < incarnation:
                del self._reports[place.node]
            self._newest[place.node] = incarnation
            node = self._nodes[place.node] = _Node(incarnation, now + self.lease_s)
        node.lease_end = max(node.lease_end, now + self.lease_s)
        node.address = address or node.address
        held = node.held.get(place.tier)
        if held is None:
            held = node.held[place.tier] = _Held(self._index.begin(place))
        return Outcome.GAP if held.in_gap else Outcome.OK

    def heartbeat(self, node: str, incarnation: int, now: float) -> Outcome:
        """Renew the lease of all places of a node. GAP reminds a node that owes a resync of one."""
        found = self._find(node, incarnation)
        if isinstance(found, Outcome):
            return found
        found.lease_end = max(found.lease_end, now + self.lease_s)
        return Outcome.GAP if found.in_gap else Outcome.OK

    def announce(self, place: Place, incarnation: int, seq: int, added: bytes, removed: bytes) -> Outcome:
        """Apply one message of a node's place. A repeat changes nothing; after a gap only a resync does."""
        held = self._find_place(place, incarnation)
        if isinstance(held, Outcome):
            return held
        if not held.in_gap and seq > held.applied + 1:
            self._counters.gaps += 1
        held.heard = max(held.heard, seq)
        if held.applied + 1 == held.heard == seq and not held.torn:
            self._abandon(held)  # a resync under way was older
            self._index.discard(removed, held.terms)
            self._index.add(added, held.term)
            held.applied = seq
        return Outcome.GAP if held.in_gap else Outcome.OK

    def resync(
        self, place: Place, incarnation: int, seq: int, keys: bytes, first: bool, last: bool
    ) -> Outcome:
        """Replace a place's entries by its manifest as of message `seq`, in one part or more, sent in order.

        What has come so far is known beside what was known before; `last` ends the latter. `first` begins anew. An
        outdated resync is ignored. GAP: the first part or a later message has been lost; send all parts of another.
        """
        held = self._find_place(place, incarnation)
        if isinstance(held, Outcome):
            return held
        if seq < held.applied:
            self._abandon(held)
            return Outcome.GAP if held.in_gap else Outcome.OK
        if first:
            self._abandon(held)
            held.next_term, held.next_seq = self._index.begin(place), seq
        elif held.next_term is None or held.next_seq != seq:
            held.torn = True
            return Outcome.GAP
        assert held.next_term is not None
        self._index.add(keys, held.next_term)
        if not last:
            return Outcome.OK
        self._index.end(held.term)
        held.term, held.next_term = held.next_term, None
        held.applied, held.heard, held.torn = seq, max(held.heard, seq), False
        self._counters.resyncs += 1
        return Outcome.GAP if held.in_gap else Outcome.OK

    # Said by any node of what all share.

    def renew_shared(self, place: Place, incarnation: int, now: float) -> Outcome:
        """Renew the lease of a place that all nodes share; a newer incarnation begins without entries.

        UNKNOWN: nobody has told its contents yet; the caller lists and announces them, also where there are none.
        """
        if place.node:
            raise ValueError(f"{place} belongs to a node: it is registered, not renewed")
        if incarnation < self._newest.get(place, incarnation):
            return Outcome.STALE
        known = self._shared.get(place)
        if known is None or known.incarnation != incarnation:
            if known is not None:
                self._index.end(known.term)
            self._newest[place] = incarnation
            known = _Shared(incarnation, now + self.lease_s, self._index.begin(place))
            self._shared[place] = known
        known.lease_end = max(known.lease_end, now + self.lease_s)
        return Outcome.OK if known.told else Outcome.UNKNOWN

    def announce_shared(
        self, place: Place, incarnation: int, added: bytes, removed: bytes, whole: bool = True
    ) -> Outcome:
        """Blocks appeared in a shared place or vanished. May be said by several nodes, repeatedly, in any order.

        `whole` is False in what does not complete a list of the contents: all parts of one but the last, and changes
        by a node that has not listed. UNKNOWN (and no change) before `renew_shared`.
        """
        if incarnation < self._newest.get(place, incarnation):
            return Outcome.STALE
        known = self._shared.get(place)
        if known is None or known.incarnation != incarnation:
            return Outcome.UNKNOWN
        self._index.discard(removed, (known.term,))
        self._index.add(added, known.term)
        known.told = known.told or whole
        return Outcome.OK

    # Asked and said by readers.

    def locate(self, keys: bytes) -> Located:
        """Who holds the leading keys. Call `expire` first if time has passed."""
        return Located(self.epoch, self._index.segments(keys))

    def copies(self, keys: bytes) -> bytes:
        """For each key, the number of places that hold it, 255 for more than that."""
        return self._index.copies(keys)

    def find(self, prefix: str, limit: int) -> list[Match]:
        """At most `limit` blocks whose key begins with these hexadecimal digits, by key; see `Holders.find`."""
        return self._index.find(prefix, limit)

    def forget(self, place: Place, keys: bytes) -> int:
        """A reader found these missing or corrupt at the place. Returns how many entries went."""
        terms: tuple[int, ...] = ()
        if place in self._shared:
            terms = (self._shared[place].term,)
        elif place.node in self._nodes and place.tier in self._nodes[place.node].held:
            terms = self._nodes[place.node].held[place.tier].terms
        forgotten = self._index.discard(keys, terms)
        self._counters.forgotten += forgotten
        return forgotten

    def addresses(self) -> dict[str, str]:
        """Addresses of the nodes that gave one."""
        return {name: node.address for name, node in self._nodes.items() if node.address}

    def expire(self, now: float) -> tuple[str, ...]:
        """Drop nodes, shared places and reports whose lease has ended; returns the nodes.

        Every now and then takes back some of the memory of what has vanished, in a bounded step.
        """
        gone = tuple(name for name, node in self._nodes.items() if node.lease_end <= now)
        for name in gone:
            self._remove(name)
        self._counters.expired += len(gone)
        for place in [place for place, shared in self._shared.items() if shared.lease_end <= now]:
            self._index.end(self._shared.pop(place).term)
        for source in [source for source, report in self._reports.items() if report.lease_end <= now]:
            del self._reports[source]
        if now >= self._next_sweep:
            self._index.sweep()
            self._next_sweep = now + _SWEEP_EVERY_S
        return gone

    def report(self, source: str, incarnation: int, values: Mapping[str, float], now: float) -> Outcome:
        """Take one source's gauges in place of its earlier ones; they vanish with its lease. STALE if older.

        A source is anything with a name of its own (node agent, replica); it need not be registered as a
        node.
        """
        earlier = self._reports.get(source)
        newest = max(self._newest.get(source, incarnation), earlier.incarnation if earlier else incarnation)
        if incarnation < newest:
            return Outcome.STALE
        self._reports[source] = _Report(incarnation, now + self.lease_s, dict(values))
        return Outcome.OK

    def stats(self, now: float) -> DirectoryStats:
        """Gauges and counters, with the reports of sources whose lease has not ended."""
        tiers = self._index.tiers()
        return DirectoryStats(
            epoch=self.epoch,
            age_s=max(0.0, now - self._began),
            nodes=len(self._nodes),
            nodes_in_gap=sum(node.in_gap for node in self._nodes.values()),
            keys=self._index.keys,
            entries=sum(tiers.values()),
            tiers=tiers,
            unswept=self._index.unswept,
            gaps=self._counters.gaps,
            resyncs=self._counters.resyncs,
            expired_nodes=self._counters.expired,
            forgotten_entries=self._counters.forgotten,
            reports={
                source: dict(report.values)
                for source, report in self._reports.items()
                if report.lease_end > now
            },
        )

    def check(self) -> None:
        """Assert that the index agrees with itself and with the places, and that no older incarnation is alive."""
        terms = [shared.term for shared in self._shared.values()]
        for name, node in self._nodes.items():
            assert node.held and node.incarnation == self._newest[name]
            for held in node.held.values():
                assert 0 <= held.applied <= held.heard
                terms.extend(held.terms)
        for place, shared in self._shared.items():
            assert shared.incarnation == self._newest[place]
        self._index.check(terms)

    def _find(self, node: str, incarnation: int) -> _Node | Outcome:
        if incarnation < self._newest.get(node, incarnation):
            return Outcome.STALE
        found = self._nodes.get(node)
        return found if found is not None and found.incarnation == incarnation else Outcome.UNKNOWN

    def _find_place(self, place: Place, incarnation: int) -> _Held | Outcome:
        found = self._find(place.node, incarnation)
        return found if isinstance(found, Outcome) else found.held.get(place.tier, Outcome.UNKNOWN)

    def _abandon(self, held: _Held) -> None:
        """End the resync under way, if there is one."""
        if held.next_term is not None:
            self._index.end(held.next_term)
            held.next_term = None

    def _remove(self, name: str) -> None:
        for held in self._nodes.pop(name).held.values():
            for term in held.terms:
                self._index.end(term)
