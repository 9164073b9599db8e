"""What the books of a tier give up, and what they keep: competition, protection, pins, quotas, time, adoption."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest
from strict_policy import StrictPolicy
from tier_stands import KEYS, Clock

from kv_tiers.books import SlotBooks
from policies.tiering import Lru

A, B, C, D, E, F = KEYS[:6]


def make(slots, **options):
    return SlotBooks(slots, 64, policy=StrictPolicy(Lru()), **options)


def store(books, keys, tenant=None):
    """As a request that had these keys; what got a slot."""
    lease = books.prepare_write(keys, "w", tenant=tenant)
    return books.complete_write(lease.id, [entry.key for entry in lease.entries])


def here(books, keys=KEYS[:20]):
    return [key for key in keys if books.holds(key)]


class PlainLru:
    """The rule of a pure cache: count hits up to the first miss, touch all from last to first, then shrink."""

    def __init__(self, capacity):
        self.capacity, self.order, self.evicted = capacity, OrderedDict(), 0

    def request(self, chain):
        hits = next((i for i, key in enumerate(chain) if key not in self.order), len(chain))
        for key in reversed(chain):
            self.order[key] = None
            self.order.move_to_end(key)
        while len(self.order) > self.capacity:
            self.order.popitem(last=False)
            self.evicted += 1
        return hits


@pytest.mark.parametrize("capacity", [1, 3, 8, 30, 100])
def test_with_bypass_the_least_recently_used_policy_is_the_plain_rule(capacity):
    """Chains that share prefixes and are often longer than the tier: same hits and evictions, request by request."""
    books, plain = make(capacity), PlainLru(capacity)
    chance = random.Random(capacity)
    hits = 0
    for _ in range(400):
        branch = 50 * chance.randint(0, 5)
        chain = (
            KEYS[: chance.randint(0, 6)] + KEYS[10 + branch % 150 : 10 + branch % 150 + chance.randint(0, 40)]
        )
        run = books.longest_run(chain)
        assert run == plain.request(chain)
        hits += run
        books.accessed(chain)
        lease = books.reserve(chain, "sim", bypass=True)
        books.complete_write(lease.id, [entry.key for entry in lease.entries])
        assert set(books.manifest().keys) == set(plain.order)
        assert books.stats().blocks_evicted + books.stats().blocks_refused == plain.evicted
    books.check()
    assert hits > 0 and plain.evicted > 0


def test_without_bypass_a_new_block_always_gets_room_and_its_chain_is_spared():
    books = make(3)
    store(books, [A, B])
    store(books, [C])
    lease = books.reserve([A, B, D, E], "w")  # nobody said that A and B were asked for
    assert [entry.key for entry in lease.entries] == [D] and lease.no_room == (E,)
    assert here(books) == [A, B]


def test_with_bypass_new_blocks_give_way_to_what_is_worth_more():
    """A policy that thinks most of the oldest blocks: the new one comes up first."""

    class OldestLast(Lru):
        def victims(self, now):
            return iter(list(reversed(self._order)))

    books = SlotBooks(2, 64, policy=StrictPolicy(OldestLast()))
    store(books, [A])
    store(books, [B])
    lease = books.reserve([C], "w", bypass=True)
    assert (lease.entries, lease.no_room) == ((), (C,))
    assert books.complete_write(lease.id, ()) == ()
    assert here(books) == [A, B] and books.stats().blocks_refused == 1
    assert store(books, [C]) == (C,), "without it the tier makes room"
    books.check()


def test_coldest_looks_and_evict_takes_the_same():
    books = make(4)
    for key in (A, B, C, D):
        store(books, [key])
    reader = books.prepare_read([A], "r")
    assert books.coldest(2) == (B, C) and here(books) == [A, B, C, D]
    assert books.evict(2) == (B, C)
    assert books.evict(9) == (D,), "what is read stays"
    books.complete_read(reader.id)
    assert (books.stats().blocks_evicted, books.drain_changes().added) == (3, (A,))


def test_protected_blocks_go_last_and_in_the_policys_order():
    books = make(4)
    for key in (A, B, C, D):
        store(books, [key])
    books.protect([A, B, C])
    assert books.coldest(4) == (D, A, B, C)
    books.complete_read(books.prepare_read([A], "r").id)  # used: worth more again
    assert books.coldest(4) == (D, B, C, A)
    books.unprotect([C])
    assert books.coldest(4) == (C, D, B, A), "it had come up before D did"
    books.protect([C])
    assert books.coldest(4) == (D, B, A, C)
    books.unprotect([C])
    store(books, [E])
    assert here(books) == [A, B, D, E]
    assert store(books, KEYS[10:14]) == tuple(KEYS[10:14]), "protection is soft"
    books.check()


def test_protection_ends_with_the_block():
    books = make(2)
    store(books, [A])
    books.protect([A])
    books.drop([A])
    store(books, [A])
    store(books, [B])
    assert books.coldest(1) == (A,)


def test_a_pin_ends_with_its_block_and_leaves_its_share_to_another():
    books = make(2)
    store(books, [A, B])
    assert (books.pin([A]), books.pin([B])) == (1, 0)
    books.drop([A])
    assert books.pin([B]) == 1


def test_searches_pass_over_protected_blocks_once():
    """However many are protected, the next evictions do not look at them again."""

    class Counting(Lru):
        seen = 0

        def victims(self, now):
            for key in super().victims(now):
                self.seen += 1
                yield key

    policy = Counting()
    books = SlotBooks(200, 64, policy=policy)
    store(books, KEYS[:200])
    books.protect(KEYS[:100])
    books.accessed(KEYS[100:200])  # the protected ones come up first
    for key in KEYS[200:250]:
        store(books, [key])
    assert here(books, KEYS[:100]) == KEYS[:100]
    assert policy.seen <= 100 + 50


@pytest.mark.parametrize("share", [0.5, 0.26])
def test_a_tenant_never_has_more_than_its_share(share):
    books = make(10, tenant_share=share)
    bound, most = int(share * 10), 0
    chance = random.Random(0)
    for _ in range(200):
        tenant = chance.choice(["a", "b", None])
        keys = chance.sample(KEYS[:100] if tenant is None else KEYS[100 if tenant == "a" else 160 :][:60], 4)
        take = chance.choice([books.reserve, books.prepare_write])
        options = {"bypass": True} if take == books.reserve and chance.random() < 0.5 else {}
        lease = take(keys, "w", tenant=tenant, **options)
        counts = {who: count for who, count in books.tenants().items() if who is not None}
        assert all(count <= bound for count in counts.values())
        most += sum(count == bound for count in counts.values())
        books.complete_write(lease.id, [entry.key for entry in lease.entries if chance.random() < 0.9])
        books.check()
    assert most > 20, "the bound was reached, and held"


def test_a_tenant_that_cannot_give_up_its_own_gets_no_room():
    books = make(4, tenant_share=0.5)
    store(books, [A, B], tenant="s")
    reader = books.prepare_read([A, B], "r")
    lease = books.prepare_write([C], "w", tenant="s")
    assert lease.no_room == (C,) and books.stats().free == 2
    books.complete_write(lease.id, ())
    books.drop([A])
    assert books.tenants() == {"s": 2}, "a slot is charged until its last reader has gone"
    books.complete_read(reader.id)
    assert store(books, [C], tenant="s") == (C,) and here(books) == [B, C]


def test_a_read_that_began_in_time_keeps_an_old_block():
    clock = Clock()
    books = make(4, clock=clock, ttl_s=10.0)
    store(books, [A, B])
    reader = books.prepare_read([A], "r")
    clock.now += 11
    assert (books.expire(), here(books)) == (1, [A])
    books.complete_read(reader.id)
    clock.now += 10
    assert books.expire() == 0
    clock.now += 1
    assert (books.expire(), here(books)) == (1, [])
    books.check()


def test_a_block_that_grew_old_while_pinned_goes_with_its_pin():
    clock = Clock()
    books = make(4, clock=clock, ttl_s=10.0)
    store(books, [A])
    books.pin([A])
    clock.now += 6
    store(books, [B])
    clock.now += 5
    assert books.expire() == 0
    books.check()
    books.unpin([A])
    assert (books.expire(), here(books)) == (1, [B])


def test_adopted_blocks_lie_where_they_were_and_are_told():
    books = make(4, tenant_share=0.5)
    lease = books.reserve([D], "w")
    (taken,) = lease.entries
    slot = taken.offset // 64
    free = [other for other in range(4) if other != slot]
    pairs = [(A, free[0]), (B, free[0]), (A, free[1]), (C, slot), (D, free[1]), (E, 4), (F, free[2])]
    assert books.adopt(pairs, tenant="s") == 2
    assert (books.offset_of(A), books.offset_of(F)) == (64 * free[0], 64 * free[2])
    assert books.drain_changes().added == (A, F) and books.tenants() == {None: 1, "s": 2}
    books.complete_write(lease.id, [D])
    assert store(books, [B], tenant="s") == (B,) and here(books) == [B, D, F], "the first adopted goes first"
    books.check()


@pytest.mark.parametrize("bypass", [False, True])
def test_a_block_that_is_being_copied_may_go_but_its_slot_is_not_given_away(bypass):
    books = make(3)
    for key in (A, B, C):
        store(books, [key])
    copying = books.prepare_copy([A], "spill")
    assert books.coldest(1) == (A,), "a copy is no use of a block"
    lease = books.reserve([D], "w", bypass=bypass)
    assert here(books) == [C]
    assert [entry.offset for entry in lease.entries] != [copying.entries[0].offset]
    books.complete_write(lease.id, [D])
    assert (books.stats().free, books.stats().condemned) == (0, 1)
    books.complete_read(copying.id)
    assert (books.stats().free, books.stats().condemned, books.stats().blocks_read) == (1, 0, 0)
    books.check()


def test_a_tenants_slot_that_is_being_copied_is_charged_until_its_end():
    books = make(8, tenant_share=0.25)
    store(books, [A, B], tenant="s")
    copying = books.prepare_copy([B], "spill")
    lease = books.prepare_write([C], "w", tenant="s")
    assert here(books) == [] and [entry.key for entry in lease.entries] == [C]
    assert books.tenants() == {"s": 2}
    books.complete_read(copying.id)
    books.complete_write(lease.id, [C])
    assert books.tenants() == {"s": 1}
