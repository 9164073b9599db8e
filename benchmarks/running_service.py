"""The service under test: found at its URL or started for the run, its gauges, and what its processes take."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

_START_LIMIT_S = 300.0
_STOP_LIMIT_S = 60.0
_IDLE_LIMIT_S = 120.0
# Gauges are a heartbeat (1 s) old at most.
_HEARTBEAT_S = 1.1
_BUSY_GAUGES = ("queue", "running", "spills_running", "pages_used", "pulls_running")


@dataclass(frozen=True)
class Service:
    """A service that answers: its address, the model's name in the API, and its context length."""

    url: str
    model: str
    context: int

    def gauge(self, name: str) -> float:
        """Sum over the replicas that report `kvtide_<name>`."""
        return self._sums((name,))

    def wait_idle(self) -> None:
        """Return when no replica has anything to do. SystemExit when that takes longer than two minutes."""
        limit = time.monotonic() + _IDLE_LIMIT_S
        time.sleep(_HEARTBEAT_S)
        while self._sums(_BUSY_GAUGES):
            if time.monotonic() > limit:
                raise SystemExit(f"{self.url} is busy with other requests; a benchmark needs it to itself")
            time.sleep(0.25)

    def _sums(self, names: tuple[str, ...]) -> float:
        text = httpx.get(f"{self.url}/metrics", timeout=30).raise_for_status().text
        wanted = {f"kvtide_{name}" for name in names}
        families = [family for family in text_string_to_metric_families(text) if family.name in wanted]
        return sum(sample.value for family in families for sample in family.samples)


@dataclass(frozen=True)
class Processes:
    """The replica processes of one pool on this machine; empty where /proc is missing or the service is remote."""

    pids: tuple[int, ...]

    @classmethod
    def of_pool(cls, service: Service, pool: str) -> Processes:
        """What Ray has named after the pool's deployment ("Prefill", "Decode", "Gateway"), in the service's cluster.

        Workers are children of their node's raylet, and so is, at some remove, what listens on the service's port.
        """
        title = re.compile(rf"ServeReplica:[^:]+:{pool}\b")  # whatever the application is called
        raylets = {_raylet_above(pid) for pid in _listening(int(service.url.rpartition(":")[2]))} - {None}
        named = [pid for pid in _pids() if title.search(_title(pid))]
        return cls(tuple(pid for pid in named if _parent(pid) in raylets))

    def cpu_s(self) -> float:
        """Processor seconds used so far, user and system."""
        ticks = 0
        for pid in self.pids:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def pss_mb(self) -> float:
        """Proportional set size now, 10^6 bytes: shared pages are split between the processes that map them."""
        return sum(_kilobytes(pid, "smaps_rollup", "Pss:") for pid in self.pids) * 1024 / 1e6

    def peak_rss_mb(self) -> float:
        """Largest resident size since each process began, 10^6 bytes (shared tier memory included)."""
        return sum(_kilobytes(pid, "status", "VmHWM:") for pid in self.pids) * 1024 / 1e6

    def niceness(self) -> int:
        """Scheduling niceness of the first process; our own where there is none."""
        return os.getpriority(os.PRIO_PROCESS, self.pids[0]) if self.pids else os.nice(0)


def _pids() -> list[int]:
    return [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").partition("\0")[0]
    except OSError:  # ended meanwhile
        return ""


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _raylet_above(pid: int) -> int | None:
    while pid > 1:
        if _title(pid).endswith("/raylet"):
            return pid
        pid = _parent(pid)
    return None


def _listening(port: int) -> list[int]:
    """Processes of this machine that listen on a TCP port."""
    sockets = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:] if Path(table).exists() else []:
            fields = line.split()
            if int(fields[1].rpartition(":")[2], 16) == port and fields[3] == "0A":
                sockets.add(f"socket:[{fields[9]}]")
    found = []
    for pid in _pids():
        try:
            if any(os.readlink(link) in sockets for link in Path(f"/proc/{pid}/fd").iterdir()):
                found.append(pid)
        except OSError:  # ended meanwhile, or another user's
            continue
    return found


def _kilobytes(pid: int, file: str, label: str) -> int:
    for line in Path(f"/proc/{pid}/{file}").read_text().splitlines():
        if line.startswith(label):
            return int(line.split()[1])
    return 0


def find(url: str) -> Service | None:
    """The service at `url`, or None when nothing answers there."""
    try:
        card = httpx.get(f"{url}/v1/models", timeout=10).raise_for_status().json()["data"][0]
    except httpx.TransportError:
        return None
    return Service(url, card["id"], card["max_model_len"])


@contextmanager
def find_or_start(url: str, model: str, *, may_start: bool) -> Iterator[Service]:
    """The service at `url`; when nothing answers and it may, one of our own on a free port until the block ends."""
    found = find(url)
    if found is not None:
        print(f"service at {found.url}")
        yield found
        return
    if not may_start:
        raise SystemExit(f"no service answers at {url}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "deployments.cli", "serve", "--port", str(port), f"model={model}"]
    print(f"no service at {url}: starting one on port {port}", flush=True)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield _wait_ready(process, f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        process.wait(timeout=_STOP_LIMIT_S)


def _wait_ready(process: subprocess.Popen[bytes], url: str) -> Service:
    limit = time.monotonic() + _START_LIMIT_S
    while process.poll() is None and time.monotonic() < limit:
        try:
            if httpx.get(f"{url}/ready", timeout=5).status_code == httpx.codes.OK:
                found = find(url)
                assert found is not None
                return found
        except httpx.TransportError:
            pass  # not listening yet
        time.sleep(0.5)
    raise SystemExit("kvtide serve did not become ready; run it by itself to see why")
