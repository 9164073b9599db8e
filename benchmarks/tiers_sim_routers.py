"""Which node gets a request: pure rules, and what they are worth over caches that are plain LRU."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from benchmarks.tiers_sim_traces import Trace
from kv_tiers.directory import Located
from kv_tiers.keys import BlockKey

Router = Callable[[Mapping[int, int], Sequence[int], int], int]
"""(leading blocks of the request on each node that has any, blocks computed per node so far, the request's number)
→ a node's number."""

ALLOWED = 1.1
"""A node with more than so many times the mean work gets nothing for its prefixes."""


def round_robin(runs: Mapping[int, int], work: Sequence[int], number: int) -> int:
    """One after the other."""
    return number % len(work)


def longest_prefix(runs: Mapping[int, int], work: Sequence[int], number: int) -> int:
    """Who has most of it; of equals the first."""
    return min(runs, key=lambda node: (-runs[node], node), default=0)


def balanced(runs: Mapping[int, int], work: Sequence[int], number: int) -> int:
    """Who has most of it among those that have not worked much more than the mean; of equals who worked least."""
    most = ALLOWED * sum(work) / len(work)
    idlest = min(range(len(work)), key=work.__getitem__)
    allowed = [node for node in runs if work[node] <= most and node != idlest]
    return min((idlest, *allowed), key=lambda node: (-runs.get(node, 0), work[node], node))


ROUTERS: dict[str, Router] = {
    "round robin": round_robin,
    "longest prefix": longest_prefix,
    "balanced": balanced,
}


def runs_by_node(located: Located, numbers: Mapping[str, int]) -> dict[int, int]:
    """Leading blocks on each node, in whichever of its tiers; what all share is nobody's."""
    runs: dict[int, int] = {}
    holders: set[str] | None = None
    end = 0
    for segment in located.segments:
        here = {place.node for place in segment.places if place.node}
        holders = here if holders is None else holders & here
        if not holders:
            break
        end += segment.count
        for node in holders:
            runs[numbers[node]] = end
    return runs


class Routed(NamedTuple):
    """`found`: share of the blocks that were on the chosen node; `imbalance`: most work of a node over the mean."""

    found: float
    imbalance: float


def route_over_lru(trace: Trace, nodes: int, blocks: int, router: Router) -> Routed:
    """Every node is one LRU of so many blocks, and its contents are known at once."""
    caches: list[OrderedDict[BlockKey, None]] = [OrderedDict() for _ in range(nodes)]
    work = [0] * nodes
    for number, request in enumerate(trace.requests):
        runs = {node: run for node, cache in enumerate(caches) if (run := leading(request.chain, cache))}
        chosen = router(runs, work, number)
        work[chosen] += len(request.chain) - runs.get(chosen, 0)
        take(request.chain, caches[chosen], blocks)
    return Routed(1 - sum(work) / trace.blocks, max(work) * nodes / sum(work))


def leading(chain: Sequence[BlockKey], cache: OrderedDict[BlockKey, None]) -> int:
    """How many leading blocks are there."""
    for run, key in enumerate(chain):
        if key not in cache:
            return run
    return len(chain)


def take(chain: Sequence[BlockKey], cache: OrderedDict[BlockKey, None], blocks: int) -> None:
    """Touch a chain from its last block to its first, then let the least recent go."""
    for key in reversed(chain):
        cache[key] = None
        cache.move_to_end(key)
    while len(cache) > blocks:
        cache.popitem(last=False)
