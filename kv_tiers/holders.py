"""The directory's index: from a block's key to the places that hold it, in some hundred bytes a block.

Blocks with the same holders share one group, so a block costs its dictionary entry and a number. A term is one life of
a place (an incarnation, or what a resync brought); groups are sets of terms. A place that vanishes is taken out of the
groups at once, whatever the number of its blocks; blocks that are left in an empty group are misses from then on, and
`sweep` takes them out of the dictionaries bit by bit.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from kv_tiers.keys import DIGEST_BYTES

# Keys are found by their first bytes: two blocks of one directory that share 128 bits of hash do not occur, and would
# cost a miss, for the reader verifies the whole key.
KEPT_BYTES = 16

# Dictionaries by first byte. None gets so large that growing or sweeping it would hold up an answer for long.
_BUCKETS = 256
_SWEEP_KEYS = 4096  # how many keys a sweep looks at before it stops, at the end of a dictionary


class Place(NamedTuple):
    """Where blocks lie: a tier of a node. Node "": a tier that all nodes share."""

    node: str
    tier: str


@dataclass(frozen=True, slots=True)
class Segment:
    """`count` consecutive keys with the same holders; `places` in ascending order."""

    count: int
    places: tuple[Place, ...]


class Match(NamedTuple):
    """A block found by the beginning of its key: the hexadecimal digits that are kept of it, and its holders."""

    key: str
    places: tuple[Place, ...]


@dataclass(frozen=True)
class Located:
    """Who holds the leading keys, cut at the first that nobody holds. Neighbouring segments differ in their places.

    `epoch`: the start of the directory that says so; 0 where none was reached.
    """

    epoch: int
    segments: tuple[Segment, ...]

    @property
    def run(self) -> int:
        """How many leading keys somebody holds."""
        return sum(segment.count for segment in self.segments)


@dataclass(slots=True)
class _Group:
    """Blocks held by the same terms; `places` are those of the terms. `blocks`: how many entries name this group."""

    terms: tuple[int, ...]
    places: tuple[Place, ...]
    blocks: int = 0


@dataclass(slots=True)
class _Term:
    place: Place
    groups: set[int] = field(default_factory=set)


class Holders:
    """Terms per key. Keys come as concatenated digests; ValueError for part of one."""

    def __init__(self) -> None:
        # Numbers instead of the groups themselves: such dictionaries do not concern the garbage collector.
        self._buckets: list[dict[bytes, int]] = [{} for _ in range(_BUCKETS)]
        self._groups: dict[int, _Group] = {}
        self._by_terms: dict[tuple[int, ...], int] = {}
        # Groups that have become empty or equal to another. Their entries still name them.
        self._stale: set[int] = set()
        self._terms: dict[int, _Term] = {}
        self._last_term = self._last_group = 0
        self._cursor = 0

    def begin(self, place: Place) -> int:
        """A new life of a place, without blocks yet."""
        self._last_term += 1
        self._terms[self._last_term] = _Term(place)
        return self._last_term

    def end(self, term: int) -> None:
        """Nobody finds anything under this term any more."""
        for number in self._terms.pop(term).groups:
            group = self._groups[number]
            if number not in self._stale:
                del self._by_terms[group.terms]
            rest = tuple(other for other in group.terms if other != term)
            group.terms, group.places = rest, self._places(rest)
            if rest and rest not in self._by_terms:
                self._by_terms[rest] = number
                self._stale.discard(number)
            else:
                self._stale.add(number)

    def add(self, keys: bytes, term: int) -> None:
        """Blocks are there under this term, or were already."""
        self._rewrite(keys, (term,), ())

    def discard(self, keys: bytes, terms: Collection[int]) -> int:
        """Blocks are not there under any of these terms of one place. Returns how many had been."""
        return self._rewrite(keys, (), terms) if terms else 0

    def segments(self, keys: bytes) -> tuple[Segment, ...]:
        """The leading keys that have a holder, in stretches of the same places."""
        _check(keys)
        buckets, groups = self._buckets, self._groups
        found: list[Segment] = []
        places: tuple[Place, ...] = ()
        before, begin, end = -1, 0, len(keys)
        for at in range(0, end, DIGEST_BYTES):
            number = buckets[keys[at]].get(keys[at : at + KEPT_BYTES], 0)
            if number == before:
                continue
            before = number
            here = groups[number].places if number else ()
            if here == places and here:
                continue
            if places:
                found.append(Segment((at - begin) // DIGEST_BYTES, places))
            begin, places = at, here
            if not here:  # the first hole
                break
        if places:
            found.append(Segment((end - begin) // DIGEST_BYTES, places))
        return tuple(found)

    def copies(self, keys: bytes) -> bytes:
        """Places per key, capped at 255."""
        _check(keys)
        buckets, groups = self._buckets, self._groups
        numbers = [
            buckets[keys[at]].get(keys[at : at + KEPT_BYTES], 0) for at in range(0, len(keys), DIGEST_BYTES)
        ]
        counts = {number: min(len(groups[number].places), 255) for number in {*numbers} - {0}}
        return bytes(counts.get(number, 0) for number in numbers)

    def find(self, prefix: str, limit: int) -> list[Match]:
        """At most `limit` blocks whose key begins with these hexadecimal digits (two or more, lower case), by key.

        A longer prefix than what is kept of a key finds what agrees as far as it is kept. Looks at a 256th of all keys.
        """
        shown = prefix[: 2 * KEPT_BYTES]
        bucket = self._buckets[int(shown[:2], 16)]
        found = ((key.hex(), self._groups[number].places) for key, number in bucket.items())
        matches = (Match(key, places) for key, places in found if places and key.startswith(shown))
        return heapq.nsmallest(limit, matches)

    def sweep(self) -> None:
        """Take entries of stale groups out of some dictionaries: of the next few thousand keys."""
        seen = 0
        for _ in range(_BUCKETS):
            if not self._stale or seen >= _SWEEP_KEYS:
                return
            seen += len(self._buckets[self._cursor])
            self._sweep_bucket(self._cursor)
            self._cursor = (self._cursor + 1) % _BUCKETS

    @property
    def keys(self) -> int:
        """Blocks with a holder."""
        return sum(group.blocks for group in self._groups.values() if group.terms)

    @property
    def unswept(self) -> int:
        """Entries that stand for nothing any more."""
        return sum(self._groups[number].blocks for number in self._stale if not self._groups[number].terms)

    def tiers(self) -> dict[str, int]:
        """Pairs of block and place, by the place's tier."""
        pairs: dict[str, int] = {}
        for group in self._groups.values():
            for place in group.places:
                pairs[place.tier] = pairs.get(place.tier, 0) + group.blocks
        return dict(sorted(pairs.items()))

    def check(self, terms: Collection[int]) -> None:
        """Assert that counts, groups and terms agree, and that `terms` are the living ones."""
        assert self._terms.keys() == set(terms) and len(terms) == len(self._terms)
        blocks: dict[int, int] = {}
        for first, bucket in enumerate(self._buckets):
            for key, number in bucket.items():
                assert key[0] == first and len(key) == KEPT_BYTES
                blocks[number] = blocks.get(number, 0) + 1
        assert blocks == {number: group.blocks for number, group in self._groups.items()}
        assert self._stale <= self._groups.keys()
        proper = {number: group for number, group in self._groups.items() if number not in self._stale}
        assert self._by_terms == {group.terms: number for number, group in proper.items()}
        for number, group in self._groups.items():
            assert group.places == self._places(group.terms)
            assert number in self._stale or group.terms
        for term, life in self._terms.items():
            assert life.groups == {number for number, group in self._groups.items() if term in group.terms}

    def _rewrite(self, keys: bytes, plus: Collection[int], minus: Collection[int]) -> int:
        """Move keys to the groups with or without terms; returns how many changed their terms."""
        _check(keys)
        buckets = self._buckets
        after: dict[int, int] = {}
        moved: dict[int, int] = {}
        for at in range(0, len(keys), DIGEST_BYTES):
            key = keys[at : at + KEPT_BYTES]
            bucket = buckets[keys[at]]
            number = bucket.get(key, 0)
            target = after.get(number)
            if target is None:
                target = after[number] = self._target(number, plus, minus)
            if target == number:
                continue
            if target:
                bucket[key] = target
            else:
                del bucket[key]
            moved[number] = moved.get(number, 0) + 1
        changed = 0
        for number, count in moved.items():
            if self._terms_of(number) != self._terms_of(after[number]):
                changed += count
        for number, count in moved.items():
            self._count(after[number], count)
        for number, count in moved.items():
            self._count(number, -count)
        return changed

    def _target(self, number: int, plus: Collection[int], minus: Collection[int]) -> int:
        """Number of the group with the terms of another, and some more or less; 0 for no terms."""
        return self._group({*self._terms_of(number), *plus} - {*minus})

    def _terms_of(self, number: int) -> tuple[int, ...]:
        return self._groups[number].terms if number else ()

    def _group(self, terms: Collection[int]) -> int:
        ordered = tuple(sorted(terms))
        if not ordered:
            return 0
        number = self._by_terms.get(ordered)
        if number is None:
            number = self._last_group = self._last_group + 1
            self._groups[number] = _Group(ordered, self._places(ordered))
            self._by_terms[ordered] = number
            for term in ordered:
                self._terms[term].groups.add(number)
        return number

    def _places(self, terms: Collection[int]) -> tuple[Place, ...]:
        return tuple(sorted({self._terms[term].place for term in terms}))

    def _count(self, number: int, change: int) -> None:
        """More or fewer entries name a group; without any it goes."""
        if number == 0:
            return
        group = self._groups[number]
        group.blocks += change
        if group.blocks:
            return
        del self._groups[number]
        if number in self._stale:
            self._stale.remove(number)
        else:
            del self._by_terms[group.terms]
        for term in group.terms:
            self._terms[term].groups.remove(number)

    def _sweep_bucket(self, index: int) -> None:
        bucket = self._buckets[index]
        blocks = Counter(bucket.values())
        target = {number: self._group(self._terms_of(number)) for number in blocks.keys() & self._stale}
        if not target:
            return
        # Built anew, for a dictionary does not shrink by itself.
        self._buckets[index] = {
            key: now for key, number in bucket.items() if (now := target.get(number, number))
        }
        for number, now in target.items():
            self._count(now, blocks[number])
            self._count(number, -blocks[number])


def _check(keys: bytes) -> None:
    if len(keys) % DIGEST_BYTES:
        raise ValueError(f"{len(keys)} bytes are no whole digests of {DIGEST_BYTES}")
