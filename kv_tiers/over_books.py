"""The part of `Tier` that is answered from the books alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kv_tiers.at_rest import AtRest
from kv_tiers.books import SlotBooks
from kv_tiers.keys import BlockKey
from kv_tiers.tier import Changes, Manifest, TierStats


class OverBooks:
    """What every tier over `SlotBooks` does alike; a subclass moves the bytes. Contracts: `kv_tiers.tier.Tier`."""

    at_rest = AtRest.EXACT
    """What is handed down is kept as it is; `LossyTier` hands down what it encoded."""

    def __init__(self, books: SlotBooks) -> None:
        self._books = books
        self._unread = 0
        """Blocks that a read lease was taken for in vain: the books count them as read."""

    @property
    def left_alone(self) -> bool:
        """Memory always answers."""
        return False

    def accessed(self, chain: Sequence[BlockKey]) -> None:
        self._books.accessed(chain)

    def longest_run(self, keys: Sequence[BlockKey]) -> int:
        return self._books.longest_run(keys)

    def pin(self, keys: Sequence[BlockKey]) -> int:
        return self._books.pin(keys)

    def unpin(self, keys: Sequence[BlockKey]) -> int:
        return self._books.unpin(keys)

    def expire(self) -> int:
        return self._books.expire()

    def drain_changes(self) -> Changes:
        return self._books.drain_changes()

    def manifest(self) -> Manifest:
        return self._books.manifest()

    def stats(self) -> TierStats:
        """Of the books; `blocks_read` counts hits."""
        stats = self._books.stats()
        return replace(stats, blocks_read=stats.blocks_read - self._unread)
