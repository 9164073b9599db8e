"""The simulator of nodes: its clock, links and routers, small clusters counted by hand, what must hold in all."""

import asyncio
import time
from collections import OrderedDict

import pytest

from benchmarks.tiers_sim_cluster import ROUTING, scaled, simulate
from benchmarks.tiers_sim_links import Link
from benchmarks.tiers_sim_loop import run
from benchmarks.tiers_sim_nodes import SOURCES, Cluster, Setup
from benchmarks.tiers_sim_routers import (
    ROUTERS,
    balanced,
    longest_prefix,
    round_robin,
    route_over_lru,
    runs_by_node,
)
from benchmarks.tiers_sim_traces import Request, Trace, mooncake
from kv_tiers.directory import Located, Place, Segment
from kv_tiers.keys import BlockKey
from policies.tiering.speed import Speed

MIB = 1 << 20
CONVERSATION = mooncake("conversation")


def head(requests: int) -> Trace:
    return Trace("conversation", CONVERSATION.requests[:requests])


def trace(*timed: tuple[float, tuple[int, ...]]) -> Trace:
    """Requests by time; blocks by number."""
    return Trace(
        "by hand",
        [
            Request(time, tuple(BlockKey(number.to_bytes(2, "big") * 16) for number in numbers))
            for time, numbers in timed
        ],
    )


def by_hand(nodes: int, cpu: int, nvme: int = 0, redis: int = 0) -> Setup:
    """A block takes a second to compute and next to nothing to load."""
    return Setup(
        nodes,
        cpu,
        nvme,
        redis,
        router="round robin",
        policy="lru",
        admission="always",
        slot_bytes=MIB,
        prefill=512,
    )


def test_sleeps_end_in_the_order_of_simulated_time_and_take_none():
    ended: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        ended.append((name, asyncio.get_running_loop().time()))

    async def work() -> float:
        began = asyncio.get_running_loop().time()
        await asyncio.gather(sleeper("day", 86_400), sleeper("hour", 3_600), sleeper("instant", 0))
        return began

    wall = time.monotonic()
    began = run(work)
    assert time.monotonic() - wall < 60
    assert ended == [("instant", began), ("hour", began + 3_600), ("day", began + 86_400)]


def test_a_timeout_cuts_a_sleep_at_its_simulated_time():
    async def work() -> float:
        loop = asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(7):
                await asyncio.sleep(100)
        return loop.time() - began

    assert run(work) == 7


def test_waiting_for_what_never_comes_is_an_error():
    async def work() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="never comes"):
        run(work)


def test_transfers_share_a_link_one_after_the_other():
    async def work() -> tuple[list[float], int]:
        loop = asyncio.get_running_loop()
        link = Link(Speed(0.5, 100.0))
        began = loop.time()

        async def send(nbytes: int) -> float:
            await link.carry(nbytes)
            return loop.time() - began

        return await asyncio.gather(send(100), send(200), send(0)), link.nbytes

    assert run(work) == ([1.5, 3.5, 0.0], 300)


def test_routers_choose_by_turn_prefix_and_work():
    assert [round_robin({}, [0, 0, 0], number) for number in range(4)] == [0, 1, 2, 0]
    assert longest_prefix({2: 3, 1: 5, 0: 5}, [9, 9, 9], 7) == 0
    assert longest_prefix({}, [9, 9], 7) == 0
    assert balanced({0: 5}, [10, 10], 0) == 0
    assert balanced({0: 5}, [12, 8], 0) == 1, "above 1.1 x the mean of 10"
    assert balanced({0: 5, 1: 5}, [11, 9], 0) == 1, "of equals, who worked less"
    assert balanced({}, [3, 2, 2], 0) == 1


def test_a_node_has_the_run_that_all_its_tiers_have_together():
    located = Located(
        1,
        (
            Segment(2, (Place("", "redis"), Place("a", "cpu"), Place("b", "nvme"))),
            Segment(1, (Place("a", "nvme"),)),
            Segment(4, (Place("", "redis"),)),
            Segment(1, (Place("a", "cpu"),)),
        ),
    )
    assert runs_by_node(located, {"a": 0, "b": 1, "c": 2}) == {0: 3, 1: 2}


@pytest.mark.parametrize(("router", "known"), zip(ROUTERS, ROUTING[2, 5_000], strict=True))
def test_routing_over_plain_lru_finds_what_others_counted(router: str, known: float):
    found = route_over_lru(CONVERSATION, 2, 5_000, ROUTERS[router]).found
    assert 100 * found == pytest.approx(known, abs=0.1)


def test_two_nodes_by_hand():
    outcome = simulate(
        trace((0, (1, 2)), (10, (1, 2)), (20, (1, 2, 3)), (20.5, (4,)), (20.6, (1, 2, 3))), by_hand(2, cpu=8)
    )
    # Node 0 computes 1 and 2, node 1 reads them from there; node 0 has them still and computes 3; node 1 computes 4;
    # node 0 is asked again while 3 is being computed, so it does that twice.
    assert outcome.shares == {"cpu": 4 / 11, "nvme": 0, "redis": 0, "peer": 2 / 11, "computed": 5 / 11}
    assert outcome.moved == {
        "nvme read": 0,
        "nvme written": 0,
        "redis read": 0,
        "redis written": 0,
        "peers": 2 * MIB,
    }
    assert outcome.imbalance == 4 / 2.5


def test_what_left_the_slab_comes_back_from_nvme():
    outcome = simulate(trace((0, (1, 2)), (10, (3, 4)), (20, (1, 2))), by_hand(1, cpu=2, nvme=8))
    assert outcome.shares == {"cpu": 0, "nvme": 1 / 3, "redis": 0, "peer": 0, "computed": 2 / 3}
    assert (outcome.moved["nvme written"], outcome.moved["nvme read"]) == (4 * MIB, 2 * MIB)
    assert outcome.unread["nvme"] == 0.5, "3 and 4"


def test_what_one_node_wrote_to_redis_another_reads():
    outcome = simulate(trace((0, (1, 2)), (5, (9,)), (10, (3, 4)), (20, (1, 2))), by_hand(2, cpu=2, redis=8))
    assert outcome.shares == {"cpu": 0, "nvme": 0, "redis": 2 / 7, "peer": 0, "computed": 5 / 7}
    assert (outcome.moved["redis written"], outcome.moved["redis read"]) == (5 * MIB, 2 * MIB)
    assert outcome.unread["redis"] == 3 / 5


@pytest.mark.parametrize("policy", ["lru", "reuse"])
def test_every_block_of_every_request_has_one_source_and_every_load_went_over_a_link(policy: str):
    replayed = head(250)
    setup = scaled(4, Setup(1, cpu=800, nvme=2_000, redis=2_000, policy=policy, admission="second_use"))

    async def work() -> Cluster:
        cluster = Cluster(setup, ROUTERS[setup.router])
        await cluster.replay(replayed)
        return cluster

    cluster = run(work)
    found = {source: sum(node.found[source] for node in cluster.nodes) for source in SOURCES}
    assert sum(sum(node.found.values()) for node in cluster.nodes) == sum(found.values()) == replayed.blocks
    assert min(found["cpu"], found["computed"]) > 0
    for tier, nbytes in (
        ("nvme", sum(node.nvme_reads.nbytes for node in cluster.nodes)),
        ("redis", cluster.redis.reads.nbytes),
        ("peer", sum(node.sends.nbytes for node in cluster.nodes)),
    ):
        assert found[tier] * setup.slot_bytes <= nbytes, f"{tier} served what it did not carry"
    for copies in cluster.copies().values():
        assert 0 <= copies.useful <= copies.written
    nvme = sum(node.nvme_writes.nbytes for node in cluster.nodes)
    assert nvme == cluster.copies()["nvme"].written * setup.slot_bytes
    cluster.directory.state.check()


def test_one_node_with_one_lru_tier_is_a_plain_lru():
    replayed, capacity = head(600), 1_000
    cache: OrderedDict[BlockKey, None] = OrderedDict()
    hits = 0
    for request in replayed.requests:
        for key in request.chain:
            if key not in cache:
                break
            hits += 1
        for key in reversed(request.chain):
            cache[key] = None
            cache.move_to_end(key)
        while len(cache) > capacity:
            cache.popitem(last=False)
    outcome = simulate(replayed, Setup(1, cpu=capacity, policy="lru", prefill=0))
    assert round(outcome.shares["cpu"] * outcome.blocks) == hits > 500
    assert outcome.found == pytest.approx(hits / replayed.blocks)


def test_a_run_can_be_repeated():
    replayed, setup = head(80), scaled(2, Setup(1, cpu=200, nvme=400, redis=400))
    once, again = simulate(replayed, setup), simulate(replayed, setup)
    assert (once.shares, once.moved, once.unread) == (again.shares, again.moved, again.unread)
