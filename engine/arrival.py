"""The loaded beginning of a prompt while it comes in: a loader lands it layer by layer, the engine computes behind it.

The engine takes a prompt as soon as it is known how much of it lies in blocks, and waits, per layer, for that layer's
bytes. Where less comes than was found (a corrupt block, a load that is late or stopped), the step's results for that
prompt are void, and it goes on from what is there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

# A load is given up when it takes longer than computing the same; this much it may take in any case, because a busy
# machine delays threads, and a load that is given up is lost work.
LEAST_PATIENCE_S = 2.0


class Arrival:
    """How many leading blocks of one workspace are, or will be, in place, and in how many layers they are already.

    One loader thread calls `landed` and `end`, one engine thread `wait`; the rest is anybody's. `blocks` never grows.
    The loader writes to blocks below `blocks` only, as it stood before the layer, and to none after `end`.
    """

    def __init__(
        self, blocks: int, layers: int, worth_s: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`worth_s`: seconds that computing the blocks would take, which bounds how long anybody waits for them."""
        assert blocks > 0 and layers > 0, "nothing arrives"
        self._blocks, self._layers = blocks, layers
        self._landed = 0
        self._ended = self._late = False
        self._clock = clock
        self._patience_s = max(LEAST_PATIENCE_S, worth_s / layers)
        self._deadline = clock() + max(LEAST_PATIENCE_S, worth_s)
        self._changed = threading.Condition()

    @property
    def blocks(self) -> int:
        """Leading blocks that are in place or still to come."""
        return self._blocks

    @property
    def complete(self) -> bool:
        """Whether every layer of `blocks` is in place."""
        return self._landed == self._layers and self._blocks > 0

    @property
    def late(self) -> bool:
        """Whether it was given up because somebody waited too long."""
        return self._late

    @property
    def ended(self) -> bool:
        """Whether the loader has written its last byte."""
        return self._ended

    def wait(self, layer: int, blocks: int) -> bool:
        """Wait for a layer of the first `blocks` blocks; False: fewer are coming, or not in time.

        What is late is given up: then `blocks` is 0, and the loader may write until `ended`.
        """
        if self._landed > layer:
            return self._blocks >= blocks
        with self._changed:
            patience_s = min(self._patience_s, self._deadline - self._clock())
            settled = self._changed.wait_for(
                lambda: self._landed > layer or self._blocks < blocks, max(0.0, patience_s)
            )
            if not settled:
                self._late, self._blocks = True, 0
            return self._blocks >= blocks

    def wait_ended(self, timeout_s: float) -> bool:
        """Wait for the end of the load, for a while; → `ended`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._ended, timeout_s)

    def stop(self) -> None:
        """Nobody wants what has not come yet; the loader leaves after the layer that it is at."""
        with self._changed:
            self._give_up()

    def landed(self, layer: int, blocks: int) -> None:
        """The next layer is in place for the first `blocks` blocks: no more than those are whole."""
        with self._changed:
            assert layer == self._landed, "layers land in order"
            # In this order: `wait` looks without the lock, and whoever sees the layer must see what came of it.
            self._blocks = min(self._blocks, blocks)
            self._landed = layer + 1
            self._changed.notify_all()

    def end(self) -> None:
        """The loader writes no more. Layers that are missing now never come."""
        with self._changed:
            self._ended = True
            self._give_up()

    def _give_up(self) -> None:
        if self._landed < self._layers:
            self._blocks = 0
        self._changed.notify_all()
