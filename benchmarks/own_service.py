"""A service that a benchmark owns: started with options of its own, killed in parts, restarted, robbed of its tiers."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import httpx

from benchmarks.running_service import Service, find

_START_LIMIT_S = 300.0
_STOP_LIMIT_S = 90.0


class OwnService:
    """`kvtide serve` under one set of options, on one port, over any number of lives."""

    def __init__(self, folder: Path, options: Mapping[str, object]) -> None:
        """`folder` keeps its log and Ray token; `options` as `kvtide serve name=value` takes them."""
        self.folder = folder
        self.options = dict(options)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None
        self._token = folder / "ray_token"
        self._token.write_text(secrets.token_hex(32))

    def __enter__(self) -> OwnService:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> Service:
        """Start and wait until it is ready. SystemExit with the end of its log when it does not get there."""
        words = [f"{name}={value}" for name, value in self.options.items()]
        command = [sys.executable, "-m", "deployments.cli", "serve", "--port", str(self.port), *words]
        environment = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"}
        environment["RAY_AUTH_TOKEN_PATH"] = str(self._token)
        with (self.folder / "serve.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        self.until(self.ready, _START_LIMIT_S, "a service that is ready")
        return self.service()

    def service(self) -> Service:
        """The service as clients see it."""
        found = find(self.url)
        assert found is not None
        return found

    def stop(self) -> None:
        """End every process of it, as a user's Ctrl-C does."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process = None

    def ready(self) -> bool:
        """Whether every pool has a live replica. SystemExit when the service has ended by itself."""
        assert self._process is not None
        if self._process.poll() is not None:
            raise SystemExit(f"kvtide serve ended:\n{self.log()[-4000:]}")
        try:
            return httpx.get(f"{self.url}/ready", timeout=5).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def log(self) -> str:
        """What it printed, over all lives."""
        return (self.folder / "serve.log").read_text(errors="replace")

    def until(self, what: Callable[[], bool], limit_s: float, name: str) -> None:
        """Wait for `what`; SystemExit after `limit_s`."""
        end = time.monotonic() + limit_s
        while not what():
            if time.monotonic() > end:
                raise SystemExit(f"no {name} within {limit_s:g} s:\n{self.log()[-4000:]}")
            time.sleep(0.1)

    def pids(self, title: str) -> list[int]:
        """Its processes whose title begins like that, e.g. "ray::NodeAgent"."""
        return [pid for pid in self._descendants() if _title(pid).startswith(title)]

    def kill(self, title: str) -> list[int]:
        """SIGKILL those processes; → their ids."""
        killed = self.pids(title)
        for pid in killed:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        return killed

    def drop_pools(self) -> None:
        """Kill all replicas that hold KV and wait for their successors."""
        dead = set(
            self.kill("ray::ServeReplica:kvtide:Prefill") + self.kill("ray::ServeReplica:kvtide:Decode")
        )

        def replaced() -> bool:
            pools = [set(self.pids(f"ray::ServeReplica:kvtide:{pool}")) for pool in ("Prefill", "Decode")]
            return all(pool and not pool & dead for pool in pools) and self.ready()

        self.until(replaced, _START_LIMIT_S, "new replicas")
        time.sleep(6.0)  # a dead replica's report, which says "ready", lives as long as its lease

    def post(self, path: str, body: Mapping[str, object], timeout_s: float = 120.0) -> dict[str, object]:
        """An answer of the API; SystemExit with what it says when it refuses."""
        answer = httpx.post(f"{self.url}{path}", json=body, timeout=timeout_s)
        if answer.status_code != httpx.codes.OK:
            raise SystemExit(f"{path}: HTTP {answer.status_code}: {answer.text}")
        found: dict[str, object] = answer.json()
        return found

    def gauges(self) -> dict[str, float]:
        """Sum of each gauge over its sources, without the prefix `kvtide_`."""
        sums: dict[str, float] = {}
        for line in httpx.get(f"{self.url}/metrics", timeout=30).text.splitlines():
            name, bracket, rest = line.partition('{source="')
            if bracket and not line.startswith("#"):
                key = name.removeprefix("kvtide_")
                sums[key] = sums.get(key, 0.0) + float(rest.rpartition(" ")[2])
        return sums

    def evict(self, ids: Sequence[int], salt: str, tiers: Sequence[str]) -> None:
        """Drop the blocks of a prompt from the named tiers."""
        self.post("/v1/kv/evict", {"tokens": list(ids), "cache_salt": salt, "tiers": list(tiers)})

    def wait_written(self, blocks: int, tiers: Sequence[str], limit_s: float = 60.0) -> None:
        """Until the named tiers hold at least so many blocks each, and nothing is on its way down."""

        def written() -> bool:
            gauges = self.gauges()
            held = all(gauges.get(f"{tier}_tier_blocks", 0) >= blocks for tier in tiers)
            return held and not gauges.get("spill_queue") and not gauges.get("spills_running")

        self.until(written, limit_s, f"{blocks} blocks in {', '.join(tiers)}")

    def _descendants(self) -> list[int]:
        if self._process is None:
            return []
        parents = {pid: _parent(pid) for pid in map(int, filter(str.isdigit, os.listdir("/proc")))}

        def ours(pid: int) -> bool:
            while pid > 1:
                if pid == self._process.pid:  # type: ignore[union-attr]
                    return True
                pid = parents.get(pid, 0)
            return False

        return [pid for pid in parents if ours(pid)]


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").partition("\0")[0]
    except OSError:
        return ""


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
