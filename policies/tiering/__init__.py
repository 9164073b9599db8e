"""What a tier keeps: eviction policies and admission, pure. Keys are opaque, times seconds of the caller's clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from policies.tiering.admission import Admission, Always, Learned, Never, SecondUse
from policies.tiering.lru import Lru
from policies.tiering.policy import EvictionPolicy
from policies.tiering.reuse import Reuse

__all__ = [
    "ADMISSIONS",
    "TIER_POLICIES",
    "Admission",
    "EvictionPolicy",
    "Lru",
    "make_admission",
    "make_policy",
]

TIER_POLICIES: dict[str, Callable[[int], EvictionPolicy[Any]]] = {
    "reuse": Reuse,
    "lru": lambda capacity: Lru(),
}
"""Eviction policies by name; each is made for a tier of so many blocks."""

ADMISSIONS: dict[str, Callable[[int], Admission[Any]]] = {
    "auto": Learned,
    "always": lambda capacity: Always(),
    "second_use": SecondUse,
    "never": lambda capacity: Never(),
}
"""Admissions by name; each is made for slower tiers of so many blocks together."""


def make_policy(name: str, capacity: int) -> EvictionPolicy[Any]:
    """The eviction policy of that name for a tier of `capacity` blocks. KeyError lists the choices."""
    if name not in TIER_POLICIES:
        raise KeyError(f"no tier policy {name!r}; there are {', '.join(TIER_POLICIES)}")
    return TIER_POLICIES[name](capacity)


def make_admission(name: str, capacity: int) -> Admission[Any]:
    """The admission of that name, for slower tiers of `capacity` blocks. KeyError lists the choices."""
    if name not in ADMISSIONS:
        raise KeyError(f"no admission {name!r}; there are {', '.join(ADMISSIONS)}")
    return ADMISSIONS[name](capacity)
