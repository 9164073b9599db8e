"""The decode rule that evicts nothing: every generated token stays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from policies.decoding.rule import DecodeRule, LayerKeys
from policies.decoding.state import Change, DecodeState


class Grow(DecodeRule):
    """Caches grow by one token per step in every head."""

    evicts: ClassVar[bool] = False

    def settle(self, state: DecodeState, keys: Sequence[LayerKeys] | None = None) -> Change:
        state.settled = True
        return None

    def evict(self, state: DecodeState, keys: Sequence[LayerKeys] | None = None) -> Change:
        return None
