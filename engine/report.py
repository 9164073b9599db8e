"""What selection did to one prompt, in numbers: for a response's usage, metrics and `kvtide inspect`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SelectionReport:
    """The KV caches that a policy acts on (windowed ones keep their window, whatever the recipe), in order.

    layers: their indices; budgets: tokens per kv head that each was given; counts: tokens that each kv head kept (they
    differ from the budget where heads share it); entropy: of the counts over all layers and heads, in [0, 1], 1 where
    all keep the same; kept_mass: per layer, the share of the attention of the prompt's last queries (the recipe's
    window and what follows it) that falls on survivors, None where nobody asked for it and it would have cost a pass
    over the keys.
    """

    layers: tuple[int, ...]
    budgets: tuple[int, ...]
    counts: tuple[tuple[int, ...], ...]
    entropy: float
    kept_mass: tuple[float, ...] | None = None
