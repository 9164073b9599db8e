"""What is known of past requests: a forest of block keys, in runs that their last request left alike."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import log2
from typing import Generic

from policies.tiering.ages import BINS, ENDS, bin_of, chance
from policies.tiering.curves import Curve, Curves
from policies.tiering.features import Part, kind_of
from policies.tiering.policy import Key
from policies.tiering.regression import Regression, SessionCounts

_HALF_LIFE = 1 << 16
"""Requests after which what was seen counts for half."""

_FADE_EVERY = 1 << 10

_PACE_MEMORY = 3
"""Turns over which a session's pace is averaged."""


@dataclass(frozen=True, slots=True, eq=False)
class Visit:
    """One request, itself and no equal of another.

    `turn` counts from 1, `pace_s` is the usual time from turn to turn (None for the first); `length` in blocks,
    `growth` those of them that no earlier request had.
    """

    time: float
    turn: int
    pace_s: float | None
    length: int
    growth: int


class Node(Generic[Key]):
    """A known block. `children` counts those that are in the cache."""

    __slots__ = ("age_s", "children", "key", "parent", "present", "run", "uses")

    def __init__(self, key: Key, parent: Node[Key] | None) -> None:
        self.key = key
        self.parent = parent
        self.run: Run[Key] | None = None
        self.children = 0
        self.uses = 0
        self.present = False
        self.age_s: float | None = None  # at its last reuse


class Run(Generic[Key]):
    """Blocks of one visit that have been of one kind since: `nodes` from head to tail, `present` of them cached."""

    __slots__ = (
        "age_bin",
        "blocked",
        "curve",
        "gap_s",
        "nodes",
        "part",
        "present",
        "priority",
        "serial",
        "share",
        "visit",
        "weight",
    )

    def __init__(self, visit: Visit, part: Part, share: int, gap_s: float | None) -> None:
        self.visit = visit
        self.part = part
        self.share = share
        self.gap_s = gap_s
        self.nodes: list[Node[Key]] = []
        self.curve: Curve | SessionCounts
        self.weight = 1.0
        self.age_bin = 0
        self.present = 0
        self.serial = 0
        self.priority = 0.0
        self.blocked = False


class Visits(Generic[Key]):
    """Learns from every request how blocks are used again. At most `ghosts` keys that are not cached are remembered."""

    def __init__(self, ghosts: int) -> None:
        self._shared = Curves()
        self._sessions = Regression()
        self._requests = 0
        self.relearned = 0
        """How often hazards of all sessions were estimated."""
        self.nodes: dict[Key, Node[Key]] = {}
        self.runs: dict[Run[Key], None] = {}
        self._most_ghosts = ghosts
        self._ghosts: OrderedDict[Key, Node[Key]] = OrderedDict()
        self._by_bin: list[deque[Run[Key]]] = [deque() for _ in range(BINS)]
        self._by_visit: dict[Visit, list[Run[Key]]] = {}
        self._serial = 0
        self.now = 0.0

    def visit(self, chain: Sequence[Key], now: float) -> list[Run[Key]]:
        """A request with these distinct keys; → runs whose kind is new, tails before heads. Time never runs back."""
        self.now = now = max(now, self.now)
        self._tick(now)
        self._age(now)
        path, known, head = self._walk(chain)
        before = head.run.visit if head is not None and head.run is not None else None
        visit = _next_visit(before, len(chain), len(known), now)
        left = self._take(known, now)
        changed = self._mark_stale(before, now) if before is not None and visit.turn > 1 else []
        for run in left:
            if not run.nodes:
                self._forget_run(run)
        changed += self._new_runs(path, visit, now)
        for node in reversed(path):
            if not node.present:
                self._ghosts[node.key] = node
                self._ghosts.move_to_end(node.key)
        self._forget_ghosts()
        return changed

    def came(self, node: Node[Key]) -> None:
        """The block is cached from now on."""
        node.present = True
        self._ghosts.pop(node.key, None)
        if node.parent is not None:
            node.parent.children += 1
        assert node.run is not None
        node.run.present += 1

    def went(self, node: Node[Key]) -> None:
        """The block is cached no more, only remembered."""
        node.present = False
        self._ghosts[node.key] = node
        if node.parent is not None:
            node.parent.children -= 1
        assert node.run is not None
        node.run.present -= 1

    def worth(self, run: Run[Key]) -> float:
        """Reuse per second of residence that its blocks promise now, between the values of its bin's two ends."""
        run.curve.learn()
        index = run.curve.index
        age_bin = run.age_bin
        if age_bin + 1 == BINS:
            return index[age_bin]
        start, end = (ENDS[age_bin - 1] if age_bin else 0.0), ENDS[age_bin]
        part = min(1.0, max(0.0, (self.now - run.visit.time - start) / (end - start)))
        return index[age_bin] + part * (index[age_bin + 1] - index[age_bin])

    def memory_s(self) -> float:
        """How long keys are remembered, seconds: the age of the oldest one that is not cached."""
        if not self._ghosts:
            return 0.0
        oldest = next(iter(self._ghosts.values()))
        assert oldest.run is not None
        return self.now - oldest.run.visit.time

    def chance(self, key: Key, horizon_s: float) -> float | None:
        """Chance that the block is asked for before it is `horizon_s` old; None for an unknown one."""
        node = self.nodes.get(key)
        if node is None or node.run is None:
            return None
        curve = node.run.curve
        curve.learn()
        return chance(curve.rates, self.now - node.run.visit.time, horizon_s)

    def _tick(self, now: float) -> None:
        self._requests += 1
        self._shared.tick(now)
        if self._requests % _FADE_EVERY == 0:
            keep = 0.5 ** (_FADE_EVERY / _HALF_LIFE)
            self._shared.fade(keep)
            self._sessions.fade(keep)
        self.relearned += self._sessions.tick(now)

    def _walk(self, chain: Sequence[Key]) -> tuple[list[Node[Key]], list[Node[Key]], Node[Key] | None]:
        """All nodes of the chain, those known before, the last of those that are known without a hole."""
        path: list[Node[Key]] = []
        known: list[Node[Key]] = []
        head: Node[Key] | None = None
        parent: Node[Key] | None = None
        for position, key in enumerate(chain):
            node = self.nodes.get(key)
            if node is None:
                node = self.nodes[key] = Node(key, parent)
            else:
                known.append(node)
                if len(known) == position + 1:
                    head = node
            path.append(node)
            parent = node
        return path, known, head

    def _take(self, known: Sequence[Node[Key]], now: float) -> list[Run[Key]]:
        """Take known blocks out of the runs of their last visits, and learn from that; → those runs."""
        taken: dict[Run[Key], int] = {}
        for node in known:
            run = node.run
            assert run is not None
            taken[run] = taken.get(run, 0) + 1
            run.present -= node.present
            node.run = None
            node.uses += 1
            node.age_s = now - run.visit.time
        for run, count in taken.items():
            weight = count * run.weight
            run.curve.leave(run.age_bin, weight, now)
            run.curve.reused(run.age_bin, weight)
            run.curve.saw_run(weight)
            run.nodes = [node for node in run.nodes if node.run is run]
        return list(taken)

    def _mark_stale(self, before: Visit, now: float) -> list[Run[Key]]:
        changed = []
        for run in self._by_visit.get(before, ()):
            if run.nodes and run.part is not Part.STALE:
                self._leave(run, now)
                run.part = Part.STALE
                self._enter(run, now)
                changed.append(run)
        return changed

    def _new_runs(self, path: Sequence[Node[Key]], visit: Visit, now: float) -> list[Run[Key]]:
        runs: list[Run[Key]] = []
        last_kind: tuple[Part, int, float | None] | None = None
        for position, node in enumerate(path):
            node.uses = max(1, node.uses)
            shared = node.uses > visit.turn
            share = 1 + int(log2(node.uses / visit.turn)) if shared else 0
            part = Part.LAST if position == len(path) - 1 and position > 0 else Part.PATH
            kind = part, share, node.age_s if shared else visit.pace_s
            if kind != last_kind:
                runs.append(Run(visit, *kind))
                last_kind = kind
            run = runs[-1]
            run.nodes.append(node)
            run.present += node.present
            node.run = run
        runs.reverse()
        for run in runs:
            run.weight = len(run.nodes) ** -0.5
            self._serial += 1
            run.serial = self._serial
            self.runs[run] = None
            self._by_bin[0].append(run)
            self._enter(run, now)
        self._by_visit[visit] = list(runs)
        return runs

    def _enter(self, run: Run[Key], now: float) -> None:
        visit = run.visit
        if run.share:
            run.curve = self._shared.of(_shared_kind(run))
        else:
            kind = kind_of(run.part, visit.turn, visit.pace_s, visit.length, visit.growth)
            run.curve = self._sessions.of(kind)
        run.curve.enter(run.age_bin, len(run.nodes) * run.weight, now)

    def _leave(self, run: Run[Key], now: float) -> None:
        run.curve.leave(run.age_bin, len(run.nodes) * run.weight, now)

    def _age(self, now: float) -> None:
        """Move runs on that have outgrown their bin. Each bin's queue is in the order of visits."""
        for age_bin in range(BINS - 2, -1, -1):
            queue = self._by_bin[age_bin]
            while queue:
                run = queue[0]
                if run.nodes:
                    age = now - run.visit.time
                    if age < ENDS[age_bin]:
                        break
                    reached = max(bin_of(age), age_bin + 1)
                    weight = len(run.nodes) * run.weight
                    while run.age_bin < reached:
                        crossed = run.visit.time + ENDS[run.age_bin]
                        run.curve.leave(run.age_bin, weight, crossed)
                        run.age_bin += 1
                        run.curve.enter(run.age_bin, weight, crossed)
                    self._by_bin[reached].append(run)
                queue.popleft()

    def _forget_ghosts(self) -> None:
        while len(self._ghosts) > self._most_ghosts:
            key, node = self._ghosts.popitem(last=False)
            del self.nodes[key]
            run = node.run
            assert run is not None
            run.curve.leave(run.age_bin, run.weight, self.now)
            if run.nodes[-1] is node:
                run.nodes.pop()
            else:
                run.nodes.remove(node)
            node.run = None
            if not run.nodes:
                self._forget_run(run)

    def _forget_run(self, run: Run[Key]) -> None:
        del self.runs[run]
        siblings = self._by_visit[run.visit]
        siblings.remove(run)
        if not siblings:
            del self._by_visit[run.visit]


def _next_visit(before: Visit | None, length: int, known: int, now: float) -> Visit:
    """A request that repeats more than half of an earlier one is the next turn of its session."""
    if before is None or before.length <= 1 or 2 * known <= before.length:
        return Visit(now, 1, None, length, length)
    pace_s = now - before.time
    if before.pace_s is not None:
        # Averaged as logarithms: one long pause does not make a slow session.
        share = max(1 / _PACE_MEMORY, 1 / before.turn)
        pace_s = (before.pace_s + 1) ** (1 - share) * (pace_s + 1) ** share - 1
    return Visit(now, before.turn + 1, pace_s, length, length - known)


def _shared_kind(run: Run[Key]) -> tuple[Hashable, ...]:
    """From coarse to fine. Of blocks that several sessions share only how often and when they were last used counts."""
    octave = -1 if run.gap_s is None else int(log2(run.gap_s + 1)) // 2
    return (run.part, run.share), octave
