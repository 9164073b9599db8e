"""Which recipe fields each policy reads, and the defaults that depend on the policy.

A user's own scorers are added at run time, through `policies.recipe.register_options`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

SELECTION = (
    "sinks",
    "tail",
    "recent",
    "critical",
    "critical_share",
    "layers",
    "beta",
    "bands",
    "heads",
    "alpha",
    "protect",
    "spans",
    "structure",
)
"""Besides `budget`: fields of every policy that evicts, whatever its score."""

EVERYWHERE = ("decode", "positions")
"""Fields accepted with every policy."""

_OWN: dict[str, tuple[str, ...]] = {
    "snapkv": ("window", "kernel", "pool", "group", "order"),
    "h2o": ("normalize",),
    "scissorhands": ("window", "threshold"),
    "tova": ("window",),
    "expected_attention": ("future", "epsilon", "covariance", "value_norm"),
    "keydiff": (),
    "knorm": (),
    "streaming_llm": (),
    "sliding_window": (),
    "random": ("seed",),
}


def evicting_options(own: Sequence[str], without: Sequence[str] = ()) -> tuple[str, ...]:
    """Fields of an evicting policy that reads `own` besides the common ones."""
    ordered = ("budget", *own, *SELECTION, *EVERYWHERE)
    return tuple(dict.fromkeys(name for name in ordered if name not in without))


OPTIONS: dict[str, tuple[str, ...]] = {
    "full": EVERYWHERE,
    **{policy: evicting_options(own) for policy, own in _OWN.items()},
    "sliding_window": evicting_options((), without=("sinks",)),
}
"""Policy name -> the recipe fields that it reads. Any other field is refused for it."""

DEFAULTS: dict[str, Mapping[str, int | float]] = {
    "h2o": MappingProxyType({"recent": 0.5}),
    "scissorhands": MappingProxyType({"window": 400, "recent": 10}),
    "tova": MappingProxyType({"window": 1, "recent": 1}),
    "sliding_window": MappingProxyType({"sinks": 0}),
}
"""Policy name -> defaults that differ from the fields' own."""

HISTORY_ONLY = frozenset({"scissorhands", "tova"})
"""Policies that observe `window` without keeping it: how far they look back, not how much of the question. What they
keep of the newest tokens is `recent`."""

CONDITIONS: Mapping[str, tuple[str, object]] = MappingProxyType(
    {
        "beta": ("layers", "pyramid"),
        "alpha": ("heads", "ada"),
        "critical_share": ("critical", True),
        "epsilon": ("value_norm", True),
    }
)
"""Field -> the other field and its value with which alone it is read."""
