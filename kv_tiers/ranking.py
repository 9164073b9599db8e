"""Which idle blocks a tier gives up next: by its policy, protected ones after all others."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import islice

from kv_tiers.keys import BlockKey
from policies.tiering import EvictionPolicy

_NOTHING: frozenset[BlockKey] = frozenset()


class Ranking:
    """A policy's order with soft protection on top. Keys are idle (may be given up) or held, as in `EvictionPolicy`.

    A protected key that comes up is set aside, so that it is passed over once and not in every search: the policy takes
    it for held, and it keeps its place among those set aside before and after it. Used again, it goes back to the
    policy.
    """

    def __init__(self, policy: EvictionPolicy[BlockKey]) -> None:
        self._policy = policy
        self._protected: set[BlockKey] = set()
        self._aside: dict[BlockKey, None] = {}  # protected, the policy's least worth first
        self._first: dict[
            BlockKey, None
        ] = {}  # were aside and are protected no more: worth less than all others

    def accessed(self, chain: Sequence[BlockKey], now: float) -> None:
        """A request had this chain."""
        if self._aside or self._first:
            for key in reversed(chain):
                if self._return(key):
                    self._policy.release(key, now)
        self._policy.accessed(chain, now)

    def add(self, key: BlockKey, now: float) -> None:
        """`key`, new here, is idle."""
        self._policy.add(key, now)

    def hold(self, key: BlockKey) -> None:
        """The idle `key` may not be given up."""
        if not self._return(key):
            self._policy.hold(key)

    def release(self, key: BlockKey, now: float) -> None:
        """The held `key` is idle again."""
        self._policy.release(key, now)

    def touch(self, key: BlockKey, now: float) -> None:
        """As a hold that ends at once."""
        self.hold(key)
        self.release(key, now)

    def remove(self, key: BlockKey) -> None:
        """`key`, idle or held, is gone, and its protection with it."""
        self._return(key)
        self._protected.discard(key)
        self._policy.remove(key)

    def protect(self, key: BlockKey) -> None:
        """Put `key`, idle or held, after all that are not protected."""
        self._protected.add(key)
        if key in self._first:
            del self._first[key]
            self._aside[key] = None

    def unprotect(self, key: BlockKey) -> None:
        """Put `key` where the policy has it; nothing changes for one that is not protected."""
        self._protected.discard(key)
        if key in self._aside:
            del self._aside[key]
            self._first[key] = None

    def lowest(self, count: int, now: float, spare: Collection[BlockKey] = _NOTHING) -> list[BlockKey]:
        """Up to `count` idle keys not in `spare`, least worth first. They stay; the caller removes what it takes."""
        if count <= 0:
            return []
        found = list(islice((key for key in self._first if key not in spare), count))
        if len(found) < count:
            found += self._unprotected(count - len(found), now, spare)
        if len(found) < count:
            found += islice((key for key in self._aside if key not in spare), count - len(found))
        return found

    def check(self, idle: Collection[BlockKey], all_keys: Collection[BlockKey], now: float) -> None:
        """Assert that exactly the `idle` keys are on offer and only present ones are protected."""
        offered = [*self._first, *self._aside, *self._policy.victims(now)]
        assert sorted(offered) == sorted(idle), "idle blocks are on offer, once"
        assert self._aside.keys() <= self._protected and not self._first.keys() & self._protected
        assert all(key in all_keys for key in self._protected)

    def _unprotected(self, count: int, now: float, spare: Collection[BlockKey]) -> list[BlockKey]:
        found: list[BlockKey] = []
        passed: list[BlockKey] = []
        for key in self._policy.victims(now):
            if key in self._protected:
                passed.append(key)
            elif key not in spare:
                found.append(key)
                if len(found) == count:
                    break
        for key in passed:
            self._policy.hold(key)
            self._aside[key] = None
        return found

    def _return(self, key: BlockKey) -> bool:
        """Whether `key` had been set aside; the policy has it as held then."""
        if key in self._aside:
            del self._aside[key]
            return True
        if key in self._first:
            del self._first[key]
            return True
        return False
