"""The environment that a Ray cluster of our own starts with.

`kvtide serve` hands it to the process that starts Ray. `serve run deployments:app` is such a process itself: it calls
our builder just before it starts Ray, and what Ray starts (controller, proxy, replicas) reads its settings at its own
beginning. So the builder is where they can still be set.
"""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

import ray

from deployments.config import cluster_environment
from deployments.proxy import own_ports, proxy_binary


def local_environment(folder: Path) -> dict[str, str]:
    """Every variable of a cluster of our own; what the user has set stays. `folder` gets HAProxy's wrapper."""
    wanted = {**own_ports(), **cluster_environment(), **proxy_binary(folder)}
    return {name: os.environ.get(name, value) for name, value in wanted.items()}


def prepare_environment() -> None:
    """Set those variables in this process, unless Ray runs here already or `RAY_ADDRESS` names a running one.

    All but RAY_AUTH_MODE: this process has read it when it imported Ray. Ray itself turns token authentication on for
    a cluster that it starts, but not (and then refuses itself) where the variable has been set in between.

    Where Ray joins a running cluster all the same (`serve run --address`), nothing here reads the variables any more.
    """
    if ray.is_initialized() or "RAY_ADDRESS" in os.environ:
        return
    folder = tempfile.mkdtemp(prefix="kvtide-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name, value in local_environment(Path(folder)).items():
        if name != "RAY_AUTH_MODE":
            os.environ[name] = value
