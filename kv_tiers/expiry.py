"""Which blocks nobody used for their time to live."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from kv_tiers.keys import BlockKey


class LastUses:
    """When each visible key was used last, oldest first; `ttl_s` None: nothing expires and nothing is remembered.

    Constant time per use. `now` never goes back.
    """

    def __init__(self, ttl_s: float | None) -> None:
        if ttl_s is not None and ttl_s <= 0:
            raise ValueError(f"a time to live is positive, not {ttl_s} s")
        self._ttl_s = ttl_s
        self._order: OrderedDict[BlockKey, float] = OrderedDict()
        self._overdue: dict[BlockKey, float] = {}  # old enough, but held or pinned when their time had come

    def used(self, key: BlockKey, now: float) -> None:
        """`key` was written or read; its time starts anew."""
        if self._ttl_s is None:
            return
        self._overdue.pop(key, None)
        self._order[key] = now
        self._order.move_to_end(key)

    def idle(self, key: BlockKey) -> None:
        """`key` is neither held nor pinned any more: an overdue one is next."""
        if (used_at := self._overdue.pop(key, None)) is not None:
            self._order[key] = used_at
            self._order.move_to_end(key, last=False)

    def forget(self, key: BlockKey) -> None:
        """`key` is gone."""
        self._order.pop(key, None)
        self._overdue.pop(key, None)

    def expired(self, now: float, kept: Collection[BlockKey]) -> list[BlockKey]:
        """Forget and return the keys whose time is over, but for those `kept`: they wait for `idle`."""
        gone: list[BlockKey] = []
        if self._ttl_s is None:
            return gone
        while self._order:
            key, used_at = next(iter(self._order.items()))
            if now - used_at <= self._ttl_s:
                break
            del self._order[key]
            if key in kept:
                self._overdue[key] = used_at
            else:
                gone.append(key)
        return gone

    def check(self, visible: Collection[BlockKey], kept: Collection[BlockKey]) -> None:
        """Assert that every visible key has one last use, in order, and only kept ones are overdue."""
        known = [*self._order, *self._overdue]
        assert sorted(known) == (sorted(visible) if self._ttl_s is not None else [])
        assert all(key in kept for key in self._overdue)
        if self._ttl_s is not None and self._order:
            # What `idle` put in front has expired before the rest was used, so this is all of the order.
            times = list(self._order.values())
            newest = times[-1]
            assert all(used_at <= newest for used_at in times)
