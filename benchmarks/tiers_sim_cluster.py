"""Runs of simulated clusters, as rows of a table: where blocks were found, what was moved for that, who worked."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.tiers_sim_loop import run
from benchmarks.tiers_sim_nodes import SOURCES, Cluster, Setup
from benchmarks.tiers_sim_routers import ROUTERS, route_over_lru
from benchmarks.tiers_sim_traces import Trace, agents, mooncake

ROUTING = {
    (2, 5_000): (13.1, 11.3, 20.8),
    (4, 5_000): (12.0, 11.3, 27.9),
    (8, 5_000): (10.5, 11.3, 33.6),
    (4, 20_000): (17.1, 28.0, 34.5),
}
"""Percent of the conversation's blocks on the chosen worker, counted by others: by workers and blocks, per router."""

ONE = Setup(1, cpu=4_000, nvme=16_000, redis=16_000)
"""One node: 256 GiB of slab, 1 TiB of NVMe and of Redis, where a block of 512 tokens takes 64 MiB."""

CONVERSATION = 2_000
SYNTHETIC = 1_000
AGENTS = 300
"""Requests of each trace that clusters replay; what only they do not see is the end of the trace."""


@dataclass(frozen=True)
class Outcome:
    """`shares` of the blocks by source; `moved` in bytes by link; `unread`: share of a medium's writes never read.

    `imbalance`: blocks computed by the node that computed most, over the mean. `seconds` of real CPU time.
    """

    blocks: int
    shares: dict[str, float]
    moved: dict[str, int]
    unread: dict[str, float]
    imbalance: float
    seconds: float

    @property
    def found(self) -> float:
        """Share of the blocks that nobody had to compute."""
        return 1.0 - self.shares["computed"]


def simulate(trace: Trace, setup: Setup) -> Outcome:
    """Replay a trace over a cluster."""

    async def work() -> Cluster:
        cluster = Cluster(setup, ROUTERS[setup.router])
        await cluster.replay(trace)
        return cluster

    began = time.process_time()
    cluster = run(work)
    seconds = time.process_time() - began
    found: Counter[str] = Counter()
    for node in cluster.nodes:
        found.update(node.found)
    blocks = found.total()
    assert blocks == trace.blocks, "every block has one source"
    computed = [node.found["computed"] for node in cluster.nodes]
    return Outcome(
        blocks=blocks,
        shares={source: found[source] / blocks for source in SOURCES},
        moved={
            "nvme read": sum(node.nvme_reads.nbytes for node in cluster.nodes),
            "nvme written": sum(node.nvme_writes.nbytes for node in cluster.nodes),
            "redis read": cluster.redis.reads.nbytes,
            "redis written": cluster.redis.writes.nbytes,
            "peers": sum(node.sends.nbytes for node in cluster.nodes),
        },
        unread={name: copies.unread / max(1, copies.written) for name, copies in cluster.copies().items()},
        imbalance=max(computed) * len(computed) / max(1, sum(computed)),
        seconds=seconds,
    )


HEAD = (
    f"{'trace':<15} {'nodes':>5} {'cpu':>6} {'nvme':>6} {'redis':>6} {'router':<14} {'policy':<6} {'admission':<10}"
    f" | {'cpu':>5} {'nvme':>5} {'redis':>5} {'peer':>5} {'comp.':>5}"
    f" | {'nvme':>6} {'':>6} {'redis':>6} {'':>6} {'peers':>6} | {'nvme':>5} {'redis':>5} | {'work':>5} {'cpu':>5}\n"
    f"{'':<15} {'':>5} {'blocks a node':>20} {'':<14} {'':<6} {'':<10}"
    f" | {'% of blocks asked for':>29}"
    f" | {'read':>6} {'writ.':>6} {'read':>6} {'writ.':>6} {'GB':>6} | {'% unread':>11} | {'m/avg':>5} {'s':>5}"
)


def row(trace: Trace, setup: Setup, outcome: Outcome) -> str:
    """A line under `HEAD`."""
    shares = " ".join(f"{100 * share:>5.1f}" for share in outcome.shares.values())
    moved = " ".join(f"{nbytes / 1e9:>6,.0f}" for nbytes in outcome.moved.values())
    unread = " ".join(f"{100 * share:>5.1f}" for share in outcome.unread.values())
    return (
        f"{trace.name:<15} {setup.nodes:>5,} {setup.cpu:>6,} {setup.nvme:>6,} {setup.redis:>6,} {setup.router:<14}"
        f" {setup.policy:<6} {setup.admission:<10} | {shares} | {moved} | {unread}"
        f" | {outcome.imbalance:>5.2f} {outcome.seconds:>5.1f}"
    )


def scaled(nodes: int, setup: Setup = ONE) -> Setup:
    """So many nodes that have together what one has."""
    return replace(
        setup,
        nodes=nodes,
        cpu=max(1, setup.cpu // nodes),
        nvme=max(1, setup.nvme // nodes),
        redis=max(1, setup.redis // nodes),
    )


def fixed(nodes: int, setup: Setup = ONE) -> Setup:
    """So many nodes of which each has what one has."""
    return replace(setup, nodes=nodes)


def plan(quick: bool, prefill: float) -> list[tuple[Trace, list[Setup]]]:
    """What is run."""
    one = replace(ONE, prefill=prefill)
    conversation = head_of(mooncake("conversation"), 500 if quick else CONVERSATION)
    if quick:
        return [(conversation, [one, scaled(8, one), fixed(8, one)])]
    short = replace(
        one, slot_bytes=8 << 20, block_tokens=64, cpu=8 * one.cpu, nvme=8 * one.nvme, redis=8 * one.redis
    )
    return [
        (
            conversation,
            [
                *(
                    replace(one, policy=policy, admission=admission)
                    for policy in ("lru", "reuse")
                    for admission in ("always", "auto")
                ),
                *(replace(scaled(8, one), router=router) for router in ROUTERS),
                scaled(100, one),
                scaled(1_000, one),
                fixed(8, one),
                fixed(100, one),
                fixed(1_000, one),
            ],
        ),
        (head_of(mooncake("synthetic"), SYNTHETIC), [one, scaled(8, one)]),
        (head_of(agents(30.0), AGENTS), [short, scaled(8, short)]),
    ]


def head_of(trace: Trace, requests: int) -> Trace:
    """The first requests of a trace."""
    return Trace(trace.name, trace.requests[:requests])


def compare_clusters(quick: bool, prefill: float, figures: dict[str, float]) -> None:
    """The table of clusters, and its figures."""
    print(HEAD)
    for trace, setups in plan(quick, prefill):
        for setup in setups:
            outcome = simulate(trace, setup)
            print(row(trace, setup, outcome), flush=True)
            figures |= _figures(trace, setup, outcome)


def compare_admission(trace: Trace, prefill: float, figures: dict[str, float]) -> None:
    """One node, the whole trace: NVMe bytes that nobody read again with `auto`, as a share of those with `always`."""
    print(f"\n{HEAD}")
    worst = 0.0
    for policy in ("lru", "reuse"):
        unread = {}
        for admission in ("always", "auto"):
            setup = replace(ONE, prefill=prefill, policy=policy, admission=admission)
            outcome = simulate(trace, setup)
            print(row(trace, setup, outcome), flush=True)
            unread[admission] = outcome.unread["nvme"] * outcome.moved["nvme written"]
        worst = max(worst, unread["auto"] / unread["always"])
    figures["store_unread_share_of_always"] = round(worst, 3)


def _figures(trace: Trace, setup: Setup, outcome: Outcome) -> dict[str, float]:
    words = (trace.name, str(setup.nodes), str(setup.cpu), setup.router, setup.policy, setup.admission)
    name = "_".join(words).replace(" ", "_").replace("._", "_")
    values = {f"{source}_percent": 100 * share for source, share in outcome.shares.items()}
    values |= {f"{link.replace(' ', '_')}_gb": nbytes / 1e9 for link, nbytes in outcome.moved.items()}
    values |= {f"{medium}_unread_percent": 100 * share for medium, share in outcome.unread.items()}
    values |= {"imbalance": outcome.imbalance, "cpu_s": outcome.seconds}
    return {f"{name}_{what}": round(value, 2) for what, value in values.items()}


def compare_routers(trace: Trace, cases: Sequence[tuple[int, int]], figures: dict[str, float]) -> None:
    """Routers over plain LRU caches, beside what others have counted."""
    print(f"{'workers':>7} {'blocks':>7} {'router':<15} {'found %':>7} {'known':>6} {'work max/mean':>14}")
    farthest = 0.0
    for nodes, blocks in cases:
        for (name, router), known in zip(ROUTERS.items(), ROUTING[nodes, blocks], strict=True):
            routed = route_over_lru(trace, nodes, blocks, router)
            found = 100 * routed.found
            farthest = max(farthest, abs(found - known))
            print(
                f"{nodes:>7} {blocks:>7,} {name:<15} {found:>7.2f} {known:>6.1f} {routed.imbalance:>14.2f}",
                flush=True,
            )
    figures["routing_farthest_points"] = round(farthest, 2)
