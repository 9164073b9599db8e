"""The directory's state machine: which incarnation of which node holds which block. Pure: it reads no clock.

It may lose messages, restart empty, and be wrong for a while; readers verify what they load, so a wrong entry
costs a miss, never wrong bytes. Three rules keep it from staying wrong. Entries belong to an incarnation of a
node and vanish with it. A node's messages are numbered, and a gap stops everything but a full resync. A node
that stops its heartbeat loses its entries when its lease ends.

Times are seconds of one monotonic clock. Incarnations are numbers that grow with every start of a node or
source.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kv_tiers.keys import BlockKey


class Outcome(Enum):
    """How a message was taken."""

    OK = "applied, or known already"
    GAP = "messages are missing: send a resync"
    STALE = "a newer incarnation of this name is known: stop"
    UNKNOWN = "not registered, or its lease has ended: register, then resync"


@dataclass(frozen=True)
class NodeRun:
    """A node and how many leading keys it holds all by itself."""

    node: str
    run: int


@dataclass(frozen=True)
class Located:
    """`run`: leading keys that somebody holds, cut at the first hole. `holders[i]`: who holds key i < run.

    `node_runs`: nodes by the length of their own leading run, longest first, equal ones by name; empty if run
    is 0.
    """

    run: int
    holders: tuple[tuple[str, ...], ...]
    node_runs: tuple[NodeRun, ...]


@dataclass(frozen=True)
class DirectoryStats:
    """Gauges, counters, and `reports`: what each live source last said of itself, each under its own name."""

    epoch: int
    nodes: int
    nodes_in_gap: int
    keys: int
    entries: int
    gaps: int
    resyncs: int
    expired_nodes: int
    forgotten_entries: int
    reports: dict[str, dict[str, float]]


@dataclass(slots=True)
class _Node:
    """`applied`: number of the last message in effect; `heard`: the highest seen. Apart means a gap."""

    incarnation: int
    lease_end: float
    applied: int = 0
    heard: int = 0
    keys: set[BlockKey] = field(default_factory=set)

    @property
    def in_gap(self) -> bool:
        return self.applied < self.heard


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
    """Holders per key, leases per node, load reports per source. One thread calls it.

    `epoch` names this start of the directory and travels with answers where a caller must notice a restart.
    """

    def __init__(self, lease_s: float, epoch: int) -> None:
        if lease_s <= 0:
            raise ValueError(f"a lease lasts longer than {lease_s} s")
        self.lease_s = lease_s
        self.epoch = epoch
        self._nodes: dict[str, _Node] = {}
        # Inner dicts for their order: equal histories give equal answers in every process.
        self._holders: dict[BlockKey, dict[str, None]] = {}
        self._reports: dict[str, _Report] = {}
        # Survives expiry, or a zombie could come back after its successor's lease has ended.
        self._newest: dict[str, int] = {}
        self._counters = _Counters()

    def register(self, node: str, incarnation: int, now: float) -> Outcome:
        """A node (re)starts: a newer incarnation begins without entries and ends the older."""
        if incarnation < self._newest.get(node, incarnation):
            return Outcome.STALE
        known = self._nodes.get(node)
        if known is not None and known.incarnation == incarnation:
            return self.heartbeat(node, incarnation, now)
        if known is not None:
            self._remove(node)
        report = self._reports.get(node)
        if report is not None and report.incarnation < incarnation:
            del self._reports[node]
        self._newest[node] = incarnation
        self._nodes[node] = _Node(incarnation, now + self.lease_s)
        return Outcome.OK

    def heartbeat(self, node: str, incarnation: int, now: float) -> Outcome:
        """Renew the lease. GAP reminds a node that owes a resync."""
        found = self._find(node, incarnation)
        if isinstance(found, Outcome):
            return found
        found.lease_end = max(found.lease_end, now + self.lease_s)
        return Outcome.GAP if found.in_gap else Outcome.OK

    def announce(
        self,
        node: str,
        incarnation: int,
        seq: int,
        added: Iterable[BlockKey],
        removed: Iterable[BlockKey],
    ) -> Outcome:
        """Apply one message of a node's tier. A repeat changes nothing; after a gap only a resync does."""
        found = self._find(node, incarnation)
        if isinstance(found, Outcome):
            return found
        if not found.in_gap and seq > found.applied + 1:
            self._counters.gaps += 1
        found.heard = max(found.heard, seq)
        if found.applied + 1 == found.heard == seq:
            for key in removed:
                self._discard(node, found, key)
            for key in added:
                self._add(node, found, key)
            found.applied = seq
        return Outcome.GAP if found.in_gap else Outcome.OK

    def resync(self, node: str, incarnation: int, seq: int, keys: Iterable[BlockKey]) -> Outcome:
        """Replace a node's entries by its manifest as of message `seq`; an outdated one is ignored.

        GAP: a later message has been lost as well; send another.
        """
        found = self._find(node, incarnation)
        if isinstance(found, Outcome):
            return found
        if seq >= found.applied:
            held = set(keys)
            for key in found.keys - held:
                self._discard(node, found, key)
            for key in held - found.keys:
                self._add(node, found, key)
            found.applied = seq
            found.heard = max(found.heard, seq)
            self._counters.resyncs += 1
        return Outcome.GAP if found.in_gap else Outcome.OK

    def locate(self, keys: Sequence[BlockKey]) -> Located:
        """Who holds the leading keys. Call `expire` first if time has passed."""
        holders: list[tuple[str, ...]] = []
        runs: dict[str, int] = {}
        unbroken: set[str] = set()
        for key in keys:
            nodes = self._holders.get(key)
            if nodes is None:
                break
            unbroken = unbroken.intersection(nodes) if holders else set(nodes)
            holders.append(tuple(nodes))
            for node in unbroken:
                runs[node] = len(holders)
        ranked = sorted(runs.items(), key=lambda item: (-item[1], item[0]))
        return Located(len(holders), tuple(holders), tuple(NodeRun(node, run) for node, run in ranked))

    def forget(self, node: str, keys: Iterable[BlockKey]) -> int:
        """A reader found these missing or corrupt at the node. Returns how many entries went."""
        found = self._nodes.get(node)
        if found is None:
            return 0
        before = len(found.keys)
        for key in keys:
            self._discard(node, found, key)
        forgotten = before - len(found.keys)
        self._counters.forgotten += forgotten
        return forgotten

    def expire(self, now: float) -> tuple[str, ...]:
        """Drop nodes and reports whose lease has ended; returns the nodes."""
        gone = tuple(node for node, state in self._nodes.items() if state.lease_end <= now)
        for node in gone:
            self._remove(node)
        self._counters.expired += len(gone)
        for source in [source for source, report in self._reports.items() if report.lease_end <= now]:
            del self._reports[source]
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
        return DirectoryStats(
            epoch=self.epoch,
            nodes=len(self._nodes),
            nodes_in_gap=sum(node.in_gap for node in self._nodes.values()),
            keys=len(self._holders),
            entries=sum(len(node.keys) for node in self._nodes.values()),
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
        """Assert that both directions of the index agree and that no older incarnation is alive."""
        pairs = {(key, node) for key, nodes in self._holders.items() for node in nodes}
        assert pairs == {(key, name) for name, node in self._nodes.items() for key in node.keys}
        assert all(self._holders.values()), "a key without holders is no entry"
        for name, node in self._nodes.items():
            assert 0 <= node.applied <= node.heard
            assert node.incarnation == self._newest[name]

    def _find(self, node: str, incarnation: int) -> _Node | Outcome:
        if incarnation < self._newest.get(node, incarnation):
            return Outcome.STALE
        found = self._nodes.get(node)
        return found if found is not None and found.incarnation == incarnation else Outcome.UNKNOWN

    def _add(self, name: str, node: _Node, key: BlockKey) -> None:
        node.keys.add(key)
        self._holders.setdefault(key, {})[name] = None

    def _discard(self, name: str, node: _Node, key: BlockKey) -> None:
        if key not in node.keys:
            return
        node.keys.remove(key)
        holders = self._holders[key]
        del holders[name]
        if not holders:
            del self._holders[key]

    def _remove(self, name: str) -> None:
        node = self._nodes[name]
        for key in list(node.keys):
            self._discard(name, node, key)
        del self._nodes[name]
