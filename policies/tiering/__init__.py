"""What a tier keeps: eviction policies and admission, pure. Keys are opaque, times seconds of the caller's clock."""

from __future__ import annotations

from typing import Any

from policies.tiering.admission import Admission, Constant, SecondUse
from policies.tiering.lru import Lru
from policies.tiering.policy import EvictionPolicy

__all__ = ["Admission", "EvictionPolicy", "Lru", "make_admission", "make_policy"]


def make_policy(name: str, capacity: int) -> EvictionPolicy[Any]:
    """The eviction policy of that name for a tier of `capacity` blocks."""
    return Lru()


def make_admission(name: str, capacity: int) -> Admission[Any]:
    """The admission of that name; `capacity`: blocks of all tiers together."""
    if name in ("always", "never"):
        return Constant(name == "always")
    return SecondUse(4 * capacity)
