"""Eviction policies and admission against stupid models, and LRU against counts that others made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.tiers_sim_traces import mooncake
from policies.tiering import ADMISSIONS, TIER_POLICIES, EvictionPolicy, Lru, make_admission, make_policy
from policies.tiering.reuse import Reuse
from policies.tiering.shadows import GHOSTS_PER_BLOCK, LruShadow, ReuseShadow

Chain = tuple[int, ...]
often = settings(max_examples=60, deadline=None)


def session(root: int, length: int) -> Chain:
    """A prompt of session `root`: block 0 is everybody's."""
    return (0, *(100 * (root + 1) + place for place in range(length)))


CHAINS = st.builds(session, st.integers(0, 5), st.integers(0, 6))
ANY_KEYS = st.lists(st.integers(0, 9), max_size=6).map(tuple)
REQUESTS = st.lists(st.tuples(CHAINS | ANY_KEYS, st.floats(0, 100)), max_size=40)
POLICIES = st.sampled_from(sorted(TIER_POLICIES))
CAPACITIES = st.integers(1, 12)


class Cache:
    """A tier as a pure cache: takes in all of a request, then gives up what the policy ranks lowest."""

    def __init__(self, policy: EvictionPolicy[Any], capacity: int) -> None:
        self.policy = policy
        self.capacity = capacity
        self.keys: set[Any] = set()
        self.hits = self.evictions = 0

    def request(self, chain: Sequence[Any], now: float) -> list[Any]:
        for key in chain:
            if key not in self.keys:
                break
            self.hits += 1
        self.policy.accessed(chain, now)
        for key in reversed(dict.fromkeys(chain)):
            if key not in self.keys:
                self.keys.add(key)
                self.policy.add(key, now)
        gone = list(islice(self.policy.victims(now), max(0, len(self.keys) - self.capacity)))
        for key in gone:
            self.keys.remove(key)
            self.policy.remove(key)
        self.evictions += len(gone)
        return gone


def timed(requests: Sequence[tuple[Chain, float]]) -> Iterator[tuple[Chain, float]]:
    now = 0.0
    for chain, gap in requests:
        now += gap
        yield chain, now


@often
@given(REQUESTS, CAPACITIES)
def test_lru_gives_up_what_was_asked_for_longest_ago(requests, capacity):
    cache = Cache(Lru(), capacity)
    recency: list[int] = []
    for chain, now in timed(requests):
        gone = cache.request(chain, now)
        # Those that are there are touched, tail first, then the new ones come.
        for key in [key for key in reversed(chain) if key in recency]:
            recency.remove(key)
            recency.append(key)
        recency += [key for key in reversed(dict.fromkeys(chain)) if key not in recency]
        expected = recency[: max(0, len(recency) - capacity)]
        recency = recency[len(expected) :]
        assert gone == expected


@often
@given(POLICIES, REQUESTS, CAPACITIES, st.data())
def test_victims_are_the_resident_keys_that_nobody_holds(name, requests, capacity, data):
    cache = Cache(make_policy(name, capacity), capacity)
    held: set[int] = set()
    for chain, now in timed(requests):
        cache.request(chain, now)
        held &= cache.keys
        if cache.keys:
            key = data.draw(st.sampled_from(sorted(cache.keys)))
            if key in held:
                cache.policy.release(key, now)
                held.remove(key)
            elif len(held) + len(chain) < capacity:
                cache.policy.hold(key)
                held.add(key)
        assert sorted(cache.policy.victims(now)) == sorted(cache.keys - held)


@often
@given(POLICIES, REQUESTS, CAPACITIES)
def test_equal_histories_give_equal_victims(name, requests, capacity):
    one, two = (Cache(make_policy(name, capacity), capacity) for _ in range(2))
    for chain, now in timed(requests):
        assert one.request(chain, now) == two.request(chain, now)
        assert list(one.policy.victims(now)) == list(two.policy.victims(now))


@often
@given(st.lists(st.tuples(CHAINS, st.floats(0, 100)), max_size=40), CAPACITIES)
def test_reuse_gives_up_tails_before_heads(requests, capacity):
    shadow: ReuseShadow[int] = ReuseShadow(capacity)
    for chain, now in timed(requests):
        shadow.request(chain, now)
        present = [key in shadow for key in chain]
        assert present == sorted(present, reverse=True), "no hole in front of a block"
        ranked = list(shadow.order())
        for other, _ in requests:
            places = [ranked.index(key) for key in other if key in ranked]
            assert places == sorted(places, reverse=True)


@often
@given(REQUESTS, CAPACITIES)
def test_what_reuse_remembers_is_bounded_by_its_capacity(requests, capacity):
    policy: Reuse[int] = Reuse(capacity)
    for chain, now in timed(requests):
        policy.accessed(chain, now)
        assert policy.remembered <= (GHOSTS_PER_BLOCK + 1) * capacity


@often
@given(REQUESTS, CAPACITIES)
def test_the_order_of_a_shadow_is_what_goes(requests, capacity):
    for shadow in (LruShadow(capacity), ReuseShadow(capacity)):
        for chain, now in timed(requests):
            distinct = list(dict.fromkeys(chain))
            shadow.request(distinct, now)
            ranked = list(shadow.order())
            assert len(ranked) == len(set(ranked)) <= capacity
            assert all(key in shadow for key in ranked)


def test_reuse_keeps_the_sessions_that_come_back():
    """Two in three prompts never return, and they come too fast for LRU; the others return after a minute each time."""
    counts = {}
    for name in TIER_POLICIES:
        cache = Cache(make_policy(name, 60), 60)
        new = 1_000
        for minute in range(60):
            for part in range(4):
                chain = session(part, 4 + minute // 10)
                cache.request(chain, 60.0 * minute + 15 * part)
                for once in range(8):
                    new += 1
                    cache.request(session(new, 6), 60.0 * minute + 15 * part + once + 1)
        counts[name] = cache.hits
    everywhere = 60 * 4 * 9
    assert counts["reuse"] - everywhere > 2 * max(1, counts["lru"] - everywhere)


@often
@given(REQUESTS, CAPACITIES)
def test_reuse_is_lru_until_what_it_learned_has_had_more_hits(requests, capacity):
    policy: Reuse[Any] = Reuse(capacity)
    cache, led = Cache(policy, capacity), False
    for chain, now in timed(requests):
        cache.request(chain, now)
        led |= policy._lead > 0
        assert policy.follows_lru or led


@pytest.fixture(scope="module")
def recorded() -> list[tuple[float, tuple[bytes, ...]]]:
    requests = mooncake("conversation").requests
    return [(request.time, tuple(key.digest for key in request.chain)) for request in requests]


@pytest.mark.parametrize(
    ("capacity", "hits", "evictions"), [(1_000, 6_644, 145_358), (10_000, 31_903, 111_099)]
)
def test_lru_counts_on_recorded_traffic_are_those_of_others(recorded, capacity, hits, evictions):
    cache = Cache(Lru(), capacity)
    for now, chain in recorded:
        cache.request(chain, now)
    assert (cache.hits, cache.evictions) == (hits, evictions)


@pytest.mark.parametrize(("capacity", "lru", "least"), [(1_000, 6_644, 0.085), (10_000, 31_903, 0.23)])
def test_reuse_beats_lru_on_recorded_traffic(recorded, capacity, lru, least):
    """The shares of the whole trace's blocks that docs/tiers.md promises."""
    cache = Cache(make_policy("reuse", capacity), capacity)
    for now, chain in recorded:
        cache.request(chain, now)
    assert cache.hits > lru
    assert cache.hits >= least * sum(len(chain) for _, chain in recorded)


@often
@given(st.sampled_from(sorted(ADMISSIONS)), REQUESTS, CAPACITIES)
def test_admission_answers_for_every_key_and_alike_for_equal_histories(name, requests, capacity):
    one, two = make_admission(name, capacity), make_admission(name, capacity)
    for chain, now in timed(requests):
        for admission in (one, two):
            admission.accessed(chain, now)
        answers = one.worth(chain, now)
        assert len(answers) == len(chain) and answers == two.worth(chain, now)


def test_second_use_writes_what_two_requests_had():
    admission = make_admission("second_use", 10)
    admission.accessed((1, 2, 3), 0.0)
    admission.accessed((1, 2, 4), 1.0)
    assert admission.worth((1, 2, 3, 4, 5), 2.0) == [True, True, False, False, False]


@pytest.mark.parametrize("returning", [1, 4])
def test_auto_writes_the_sessions_that_return_rather_than_those_that_never_do(returning):
    admission = make_admission("auto", 2_000)
    written = {True: 0, False: 0}
    asked = {True: 0, False: 0}
    new = 1_000
    for minute in range(40):
        for part in range(returning):
            admission.accessed(session(part, 5), 60.0 * minute)
        for _ in range(6):
            new += 1
            admission.accessed(session(new, 5), 60.0 * minute + 1)
        for returns, roots in ((True, range(returning)), (False, range(new - 5, new + 1))):
            for root in roots:
                answers = admission.worth(session(root, 5)[1:], 60.0 * minute + 30)
                written[returns] += sum(answers)
                asked[returns] += len(answers)
    assert written[True] / asked[True] > 1.5 * written[False] / asked[False] > 0


@pytest.mark.parametrize("make", [make_policy, make_admission])
def test_an_unknown_name_is_answered_with_the_choices(make):
    with pytest.raises(KeyError, match="there are"):
        make("fifo", 10)
