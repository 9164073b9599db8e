"""Where a node's memory file lies, and the removal of those that nobody owns any more."""

import shutil
import tempfile
import time
from pathlib import Path

from kv_tiers.slab import SUFFIX, remove_stale

_SWEEP_S = 3.0
_SWEEP_PAUSE_S = 0.2


def slab_folder(asked: str | None, nbytes: int) -> Path:
    """Where the memory file goes: as asked, else /dev/shm if it has that room, else the temporary folder."""
    if asked is not None:
        return Path(asked)
    shared = Path("/dev/shm")
    if shared.is_dir() and shutil.disk_usage(shared).free > nbytes:
        return shared
    return Path(tempfile.gettempdir())


def sweep_slabs(asked: str | None) -> None:
    """Remove the memory files of node agents that are dead: a tmpfs would keep their memory until the next start.

    Ray's processes end a moment after `serve run`, so this looks again for `_SWEEP_S` seconds while any file is left.
    """
    folders = {Path("/dev/shm"), Path(tempfile.gettempdir()), *([Path(asked)] if asked else [])}
    end = time.monotonic() + _SWEEP_S
    while any(any(folder.glob("*" + SUFFIX)) for folder in folders) and time.monotonic() < end:
        for folder in folders:
            remove_stale(folder)
        time.sleep(_SWEEP_PAUSE_S)
