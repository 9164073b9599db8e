"""What a tier keeps: eviction policies and admission, pure. Keys are opaque, times seconds of the caller's clock."""

from __future__ import annotations

from policies.tiering.lru import Lru
from policies.tiering.policy import EvictionPolicy

__all__ = ["EvictionPolicy", "Lru"]
