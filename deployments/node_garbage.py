"""Keeps Python's garbage collector from stopping a node agent for hundreds of milliseconds.

The books of large tiers are millions of objects that live long, and a full collection looks at each of them, again
whenever a quarter has come anew. Nearly all of them end without a collector, as their last reference goes.
"""

import gc
import time
from collections.abc import Callable

ALL_S = 3600.0
"""How often everything is looked at all the same."""


class OldObjects:
    """Sets aside what has survived one full collection, so that the next one looks only at what came since."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._all_at = clock() + ALL_S

    def set_aside(self) -> None:
        """Collect what came since the last call, and take the rest for old. To be called every second or so."""
        if self._clock() >= self._all_at:
            self._all_at = self._clock() + ALL_S
            gc.unfreeze()
        gc.collect()
        gc.freeze()
