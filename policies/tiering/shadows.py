"""Caches without bytes: what a tier of some capacity would hold if a policy alone decided, and how well that does."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from typing import Generic, NamedTuple, Protocol

from policies.tiering.policy import Key
from policies.tiering.visits import Node, Run, Visits

GHOSTS_PER_BLOCK = 32
MOST_GHOSTS = 1 << 18

_RANKED_PER_REQUEST = 256
"""How many runs' worth a request may compute anew, on average: what blocks are worth changes as they age."""


class Step(NamedTuple, Generic[Key]):
    """`hits`: how many leading keys were there. `went`: what had to go afterwards, maybe just come."""

    hits: int
    went: list[Key]


class Shadow(Protocol[Key]):
    """A cache of keys."""

    def request(self, chain: Sequence[Key], now: float) -> Step[Key]:
        """A request with these distinct keys: count hits, take in all of it, give up what is too much."""
        ...

    def __contains__(self, key: Key) -> bool: ...

    def order(self) -> Iterator[Key]:
        """All keys, the next to go first. Nothing changes; nothing may be changed meanwhile."""
        ...


class LruShadow(Generic[Key]):
    """`Shadow`. A request touches its blocks from last to first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._keys: OrderedDict[Key, None] = OrderedDict()

    def __contains__(self, key: Key) -> bool:
        return key in self._keys

    def request(self, chain: Sequence[Key], now: float) -> Step[Key]:
        hits = 0
        for key in chain:
            if key not in self._keys:
                break
            hits += 1
        for key in reversed(chain):
            self._keys[key] = None
            self._keys.move_to_end(key)
        too_much = len(self._keys) - self._capacity
        return Step(hits, [self._keys.popitem(last=False)[0] for _ in range(too_much)])

    def order(self) -> Iterator[Key]:
        return iter(self._keys)


class ReuseShadow(Generic[Key]):
    """`Shadow` that gives up what promises least reuse per second of residence, tails before heads."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._visits: Visits[Key] = Visits(min(GHOSTS_PER_BLOCK * capacity, max(capacity, MOST_GHOSTS)))
        self._present = 0
        self._heap: list[tuple[float, int, Run[Key]]] = []
        self._work = 0  # that may be done before all priorities are computed anew
        self._relearned = 0

    def __contains__(self, key: Key) -> bool:
        node = self._visits.nodes.get(key)
        return node is not None and node.present

    @property
    def remembered(self) -> int:
        """Keys known, cached or not."""
        return len(self._visits.nodes)

    def request(self, chain: Sequence[Key], now: float) -> Step[Key]:
        hits = 0
        for key in chain:
            if key not in self:
                break
            hits += 1
        changed = self._visits.visit(chain, now)
        nodes = self._visits.nodes
        for key in chain:
            # A chain longer than all memory is known in part only.
            node = nodes.get(key)
            if node is not None and not node.present:
                self._visits.came(node)
                self._present += 1
        for run in changed:
            run.blocked = False
            self._queue(run)
        self._work += _RANKED_PER_REQUEST
        return Step(hits, self._give_up(self._present - self._capacity))

    def order(self) -> Iterator[Key]:
        heap = [(self._visits.worth(run), run.serial, run) for run in self._visits.runs if run.present]
        heapify(heap)
        passed: dict[Run[Key], int] = {}
        gone: dict[Node[Key], int] = {}  # children that came before
        waiting: dict[Run[Key], float] = {}
        while heap or waiting:
            force = not heap
            if force:
                run = next(iter(waiting))
                worth, serial = waiting.pop(run), run.serial
            else:
                worth, serial, run = heappop(heap)
            position = passed.get(run, len(run.nodes))
            while position:
                node = run.nodes[position - 1]
                if node.present:
                    if node.children > gone.get(node, 0) and not force:
                        waiting[run] = worth
                        break
                    force = False
                    yield node.key
                    parent = node.parent
                    if parent is not None:
                        gone[parent] = gone.get(parent, 0) + 1
                        above = parent.run
                        if above in waiting and gone[parent] == parent.children:
                            heappush(heap, (waiting.pop(above), above.serial, above))
                position -= 1
                if heap and heap[0][:2] < (worth, serial):
                    heappush(heap, (worth, serial, run))
                    break
            passed[run] = position

    def chance(self, key: Key, horizon_s: float) -> float | None:
        """As `Visits.chance`."""
        return self._visits.chance(key, horizon_s)

    def _queue(self, run: Run[Key]) -> None:
        if run.present:
            run.priority = self._visits.worth(run)
            heappush(self._heap, (run.priority, run.serial, run))

    def _reorder(self) -> None:
        """Compute all priorities anew."""
        self._work = 0
        self._relearned = self._visits.relearned
        self._heap = []
        for run in self._visits.runs:
            run.blocked = False
            if run.present:
                run.priority = self._visits.worth(run)
                self._heap.append((run.priority, run.serial, run))
        heapify(self._heap)

    def _give_up(self, count: int) -> list[Key]:
        went: list[Key] = []
        if count > 0 and (self._work >= len(self._heap) or self._relearned != self._visits.relearned):
            self._reorder()
        while len(went) < count:
            if not self._heap:
                # Keys that are no forest: everything waits for something. Break the circle.
                run = next(run for run in self._visits.runs if run.present)
                self._remove(next(node for node in run.nodes if node.present), went)
                self._reorder()
                continue
            priority, serial, run = heappop(self._heap)
            if run.present and not run.blocked and run.priority == priority:
                self._give_up_from(run, count, went)
                if run.present and not run.blocked:
                    heappush(self._heap, (priority, serial, run))
        return went

    def _give_up_from(self, run: Run[Key], count: int, went: list[Key]) -> None:
        """Tail first, until the run waits for a block behind it or another run is worth less."""
        mine = run.priority, run.serial
        for node in reversed(run.nodes):
            if len(went) == count:
                return
            if not node.present:
                continue
            if node.children:
                run.blocked = True
                return
            self._remove(node, went)
            if self._heap and self._heap[0][:2] < mine:
                return

    def _remove(self, node: Node[Key], went: list[Key]) -> None:
        self._visits.went(node)
        self._present -= 1
        went.append(node.key)
        parent = node.parent
        if parent is not None and not parent.children and parent.run is not None and parent.run.blocked:
            above = parent.run
            above.blocked = False
            heappush(self._heap, (above.priority, above.serial, above))
