"""The JSON line that every benchmark ends with."""

from __future__ import annotations

import json
from collections.abc import Mapping

Bound = dict[str, float]
"""{"at_most": x} or {"at_least": x}."""


def print_result(
    benchmark: str, regime: str, baseline: str, figures: Mapping[str, float], targets: Mapping[str, Bound]
) -> None:
    """Print the line. `targets` bound figures by name; `met` says of each whether this run kept it."""
    met = {
        name: figures[name] <= bound["at_most"] if "at_most" in bound else figures[name] >= bound["at_least"]
        for name, bound in targets.items()
    }
    line = {
        "benchmark": benchmark,
        "regime": regime,
        "baseline": baseline,
        "figures": figures,
        "targets": targets,
        "met": met,
    }
    print(json.dumps(line))
