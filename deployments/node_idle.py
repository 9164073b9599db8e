"""How much of this machine's processors is idle, for work that should keep out of everybody's way."""

import time
from pathlib import Path

_STAT = Path("/proc/stat")
_SPAN_S = 0.2


class IdleShare:
    """Idle part of all cores since the last look, 0 to 1, at most every `_SPAN_S` seconds; 1 where nobody tells."""

    def __init__(self) -> None:
        self._looked = time.monotonic()
        self._before = _cpu_times()
        self._share = 1.0

    def __call__(self) -> float:
        now = time.monotonic()
        if now - self._looked >= _SPAN_S:
            idle, total = _cpu_times()
            if total > self._before[1]:
                self._share = (idle - self._before[0]) / (total - self._before[1])
            self._looked, self._before = now, (idle, total)
        return self._share


def _cpu_times() -> tuple[int, int]:
    """(idle and waiting for disks, all) in ticks since boot, see proc(5); zeros elsewhere than on Linux."""
    try:
        first = _STAT.read_text().split("\n", 1)[0].split()
    except OSError:
        return 0, 0
    times = [int(field) for field in first[1:9]]  # guest time is in user time already
    return times[3] + times[4], sum(times)
