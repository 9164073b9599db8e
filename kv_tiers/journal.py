"""What a tier tells the directory: the net change of its visible blocks, numbered."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from kv_tiers.keys import BlockKey
from kv_tiers.tier import Changes


@dataclass(slots=True)
class Journal:
    """Net change of visibility since the last message; dicts for their order."""

    seq: int = 0
    added: dict[BlockKey, None] = field(default_factory=dict)
    removed: dict[BlockKey, None] = field(default_factory=dict)

    def appeared(self, key: BlockKey) -> None:
        """`key` became visible."""
        if key in self.removed:
            del self.removed[key]
        else:
            self.added[key] = None

    def vanished(self, key: BlockKey) -> None:
        """`key` is visible no more."""
        if key in self.added:
            del self.added[key]
        else:
            self.removed[key] = None

    def drain(self) -> Changes:
        """The message, which starts the next one."""
        if self.added or self.removed:
            self.seq += 1
        changes = Changes(self.seq, tuple(self.added), tuple(self.removed))
        self.added.clear()
        self.removed.clear()
        return changes

    def check(self, visible: Collection[BlockKey]) -> None:
        """Assert that what was added is visible and what was removed is not."""
        assert all(key in visible for key in self.added)
        assert not any(key in visible for key in self.removed)
