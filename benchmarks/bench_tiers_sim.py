"""What eviction policies and admission make of recorded traffic: hits by capacity, and what a cascade writes in vain.

    python -m benchmarks.bench_tiers_sim [--quick] [--part policies|nodes] [--prefill TOKENS_PER_S]

Replays traces through the books of the CPU tier (`kv_tiers/books.py`) in simulated time, without bytes. A request
hits from its first block to the first one that is not there; then it takes in all of its blocks, and what the policy
ranks lowest goes, be it new. The cascade has a CPU tier over NVMe: what leaves the first is written to the second if
admission finds it worth that. The baselines are LRU and `admission=always`, in the same run.

Then whole nodes, one to a thousand of them: stores, write-down, announcers and the directory as they are, over links
and media that take simulated time and hold no bytes (`tiers_sim_nodes.py`). Requests come at the trace's times and go
where a router sends them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.result import Bound, print_result
from benchmarks.tiers_sim_cluster import ROUTING, compare_admission, compare_clusters, compare_routers
from benchmarks.tiers_sim_traces import Request, Trace, agents, mooncake
from kv_tiers.books import SlotBooks
from kv_tiers.keys import BlockKey
from policies.tiering import EvictionPolicy, make_admission, make_policy

LRU_COUNTS = {
    1_000: (6_644, 145_358),
    5_000: (17_252, 130_750),
    10_000: (31_903, 111_099),
    20_000: (42_800, 90_202),
    50_000: (52_293, 50_709),
    1_000_000: (52_871, 0),
}
"""Hits and evictions of LRU on the conversation trace by capacity, counted twice by others."""

CLAIRVOYANT = {1_000: 17.8, 5_000: 32.6, 10_000: 34.6}
"""Percent of the conversation's blocks that a cache would hit which knows the future."""

PROMISED = {1_000: 8.5, 5_000: 16.0, 10_000: 23.0}
CAPACITIES = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000)
AGENT_CAPACITIES = (1_000, 5_000, 20_000)
CASCADES = ((2_000, 20_000), (5_000, 50_000))
_OWNER = "bench"


class Count(NamedTuple):
    """Blocks hit; blocks that had to go or found no room."""

    hits: int
    evictions: int


class Clock:
    """Simulated seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class SimulatedTier:
    """Books, their clock and no bytes."""

    def __init__(self, capacity: int, policy: str) -> None:
        self._clock = Clock()
        chosen: EvictionPolicy[BlockKey] = make_policy(policy, capacity)
        self.books = SlotBooks(capacity, 1, policy=chosen, clock=self._clock)

    def request(self, request: Request) -> None:
        """The policy hears of a request."""
        self._clock.now = request.time
        self.books.accessed(request.chain)

    def take(self, keys: Sequence[BlockKey], *, bypass: bool) -> None:
        """Write blocks that are not there."""
        lease = self.books.reserve(keys, _OWNER, bypass=bypass)
        self.books.complete_write(lease.id, [entry.key for entry in lease.entries])


def replay(trace: Trace, capacity: int, policy: str) -> Count:
    """One tier alone."""
    tier = SimulatedTier(capacity, policy)
    hits = 0
    for request in trace.requests:
        hits += tier.books.longest_run(request.chain)
        tier.request(request)
        tier.take(request.chain, bypass=True)
    stats = tier.books.stats()
    return Count(hits, stats.blocks_evicted + stats.blocks_refused)


def _leaving(books: SlotBooks, count: int, spare: set[BlockKey]) -> list[BlockKey]:
    """The next `count` victims that are not in `spare`."""
    found: list[BlockKey] = []
    look = count
    while len(found) < count:
        coldest = books.coldest(look)
        found = [key for key in coldest if key not in spare][:count]
        if len(coldest) < look or look == count + len(spare):
            break
        look = min(2 * look, count + len(spare))
    return found


class Cascade(NamedTuple):
    """Blocks hit in each tier, blocks written to the lower one, those of them that nobody read there."""

    upper: int
    lower: int
    written: int
    unread: int


def replay_cascade(trace: Trace, capacities: tuple[int, int], policy: str, admission: str) -> Cascade:
    """A CPU tier over NVMe. What must go is looked at before it goes."""
    upper, lower = (SimulatedTier(capacity, policy) for capacity in capacities)
    gate = make_admission(admission, capacities[1])
    hits = [0, 0]
    written, useful = 0, 0
    fresh: set[BlockKey] = set()  # copies below that nobody has read yet
    for request in trace.requests:
        for key in request.chain:
            if upper.books.holds(key):
                hits[0] += 1
            elif lower.books.holds(key):
                hits[1] += 1
                useful += key in fresh
                fresh.discard(key)
            else:
                break
        for tier in (upper, lower):
            tier.request(request)
        gate.accessed(request.chain, request.time)
        chain = set(request.chain)
        missing = sum(not upper.books.holds(key) for key in chain)
        needed = missing - upper.books.stats().free
        going = _leaving(upper.books, needed, chain)
        leaving = [key for key in going if not lower.books.holds(key)]
        worth = gate.worth(leaving, request.time)
        down = [key for key, worthy in zip(reversed(leaving), reversed(worth), strict=True) if worthy]
        lower.take(down, bypass=False)
        fresh.update(down)
        written += len(down)
        upper.take(request.chain, bypass=False)
    return Cascade(hits[0], hits[1], written, written - useful)


def compare_policies(traces: Sequence[Trace], capacities: Sequence[int], figures: dict[str, float]) -> None:
    """The table of hits, and the figures that have a target."""
    print(f"{'trace':<18} {'blocks':>7} {'lru':>8} {'reuse':>8} {'more':>7}   percent of blocks asked for")
    least = figures.get("least_gain_points", 100.0)
    for trace in traces:
        for capacity in capacities:
            shares = {
                policy: 100 * replay(trace, capacity, policy).hits / trace.blocks
                for policy in ("lru", "reuse")
            }
            more = shares["reuse"] - shares["lru"]
            least = min(least, more)
            known = CLAIRVOYANT.get(capacity) if trace.name == "conversation" else None
            beside = "" if known is None else f"   clairvoyant {known:.1f}"
            print(
                f"{trace.name:<18} {capacity:>7,} {shares['lru']:>8.2f} {shares['reuse']:>8.2f} {more:>+7.2f}{beside}",
                flush=True,
            )
            if trace.name == "conversation" and capacity in PROMISED:
                figures[f"conversation_{capacity}_percent"] = round(shares["reuse"], 2)
    figures["least_gain_points"] = round(least, 3)


def check_lru(trace: Trace, figures: dict[str, float]) -> None:
    """Count how many capacities give exactly the published numbers."""
    exact = 0
    for capacity, expected in LRU_COUNTS.items():
        count = replay(trace, capacity, "lru")
        exact += tuple(count) == expected
        print(f"lru at {capacity:>9,}: {count.hits:,} hits, {count.evictions:,} evictions; known {expected}")
    figures["lru_exact_capacities"] = exact


def compare_admissions(
    trace: Trace, cascades: Sequence[tuple[int, int]], policies: Sequence[str], figures: dict[str, float]
) -> None:
    """The table of what admission saves and loses."""
    print(
        f"{'cpu':>6} {'nvme':>7} {'policy':<6} {'admission':<11} {'cpu hits':>8} {'nvme hits':>9} {'written':>8} unread"
    )
    worst = 0.0
    for capacities in cascades:
        for policy in policies:
            found = {}
            for admission in ("always", "second_use", "auto"):
                found[admission] = result = replay_cascade(trace, capacities, policy, admission)
                print(
                    f"{capacities[0]:>6,} {capacities[1]:>7,} {policy:<6} {admission:<11} {result.upper:>8,}"
                    f" {result.lower:>9,} {result.written:>8,} {result.unread:>7,}",
                    flush=True,
                )
            worst = max(worst, found["auto"].unread / found["always"].unread)
    figures["unread_share_of_always"] = round(worst, 3)


def compare_all_policies(conversation: Trace, quick: bool, figures: dict[str, float]) -> dict[str, Bound]:
    """The first part, tier by tier; → its targets."""
    check_lru(conversation, figures)
    print()
    compare_policies([conversation], CAPACITIES[:1] if quick else CAPACITIES, figures)
    if not quick:
        compare_policies([mooncake("synthetic")], CAPACITIES, figures)
        compare_policies([agents(30.0)], AGENT_CAPACITIES, figures)
    print()
    if quick:
        compare_admissions(conversation, CASCADES[:1], ("lru",), figures)
    else:
        compare_admissions(conversation, CASCADES, ("lru", "reuse"), figures)
    targets: dict[str, Bound] = {
        "lru_exact_capacities": {"at_least": len(LRU_COUNTS)},
        "least_gain_points": {"at_least": 0.0},
        "unread_share_of_always": {"at_most": 0.5},
    }
    for capacity, promised in PROMISED.items():
        name = f"conversation_{capacity}_percent"
        if name in figures:
            targets[name] = {"at_least": promised}
    return targets


def compare_all_nodes(
    conversation: Trace, quick: bool, prefill: float, figures: dict[str, float]
) -> dict[str, Bound]:
    """The second part, whole nodes; → its targets."""
    print()
    compare_routers(conversation, list(ROUTING)[:1] if quick else list(ROUTING), figures)
    print()
    compare_clusters(quick, prefill, figures)
    targets: dict[str, Bound] = {"routing_farthest_points": {"at_most": 0.3}}
    if not quick:
        compare_admission(conversation, prefill, figures)
        targets["store_unread_share_of_always"] = {"at_most": 0.5}
    return targets


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="one capacity, one cascade, three small clusters"
    )
    parser.add_argument("--part", choices=("policies", "nodes"), help="only this part")
    parser.add_argument(
        "--prefill",
        type=float,
        default=10_000.0,
        help="tokens that a request computes per second (default: 10,000)",
    )
    args = parser.parse_args()
    conversation = mooncake("conversation")
    figures: dict[str, float] = {}
    targets: dict[str, Bound] = {}
    if args.part != "nodes":
        targets |= compare_all_policies(conversation, args.quick, figures)
    if args.part != "policies":
        targets |= compare_all_nodes(conversation, args.quick, args.prefill, figures)
    print_result(
        "tiers_sim",
        "recorded traces through books, stores and directory, simulated time, no bytes"
        + (", quick" if args.quick else ""),
        "LRU, admission=always and other routers in the same run",
        figures,
        targets,
    )


if __name__ == "__main__":
    main()
