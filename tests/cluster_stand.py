"""A real kvtide service for tests: `kvtide serve` in a process of its own, and a look at its parts."""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import httpx

ROOT = Path(__file__).parents[1]
LICENCE = (ROOT / "LICENSE").read_text()
START_LIMIT_S = 300.0
MAX_SEQUENCES, MAX_QUEUED = 16, 24
TIERS = ("cpu", "nvme", "redis")
LOWER_TIER_GIB = 0.25
SCORER = "value_norm:ValueNorm"
"""A user's own policy: docs/examples/value_norm.py, on the Python path of the service."""
T = TypeVar("T")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


class Service:
    """`kvtide serve` with the given options, on a free port; `stop` ends it and everything it started."""

    def __init__(self, log: Path, *options: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        command = [sys.executable, "-m", "deployments.cli", "serve", "--port", str(self.port), *options]
        # As a user starts it, with Ray's token authentication, but not with the user's own token.
        token = log.with_name("ray_token")
        token.write_text(secrets.token_hex(32))
        environment = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"}
        environment["RAY_AUTH_TOKEN_PATH"] = str(token)
        paths = [str(ROOT / "docs/examples"), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=ROOT,
                start_new_session=True,
            )
        self.client = httpx.Client(base_url=self.url, timeout=120)

    def wait_announced(self) -> str:
        """What it prints once it is ready."""
        return self.until(lambda: self._announcement(), START_LIMIT_S, "an announcement of readiness")

    def _announcement(self) -> str | None:
        if self.process.poll() is not None:
            raise AssertionError(
                f"kvtide serve ended with {self.process.returncode}:\n{self.log.read_text()[-4000:]}"
            )
        found = re.search(r"kvtide serves .*(?s:.)*", self.log.read_text())
        return found.group(0) if found else None

    def until(self, look: Callable[[], T | None], limit_s: float, what: str) -> T:
        """The first thing that `look` finds; AssertionError naming what was missed after `limit_s` seconds."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            found = look()
            if found:
                return found
            time.sleep(0.1)
        raise AssertionError(f"no {what} within {limit_s:g} s\n{self.log.read_text()[-2000:]}")

    def gauges(self) -> dict[str, float]:
        """Gauges summed over sources, by name without prefix."""
        sums: dict[str, float] = {}
        for line in self.client.get("/metrics").text.splitlines():
            found = re.fullmatch(r'kvtide_(\w+)\{source="[^"]*"\} (\S+)', line)
            if found:
                sums[found.group(1)] = sums.get(found.group(1), 0.0) + float(found.group(2))
        return sums

    def outcomes(self) -> dict[str, float]:
        """Requests so far by how they ended."""
        found = re.findall(
            r'kvtide_requests_total\{.*outcome="(\w+)"\} (\S+)', self.client.get("/metrics").text
        )
        sums: dict[str, float] = {}
        for outcome, count in found:
            sums[outcome] = sums.get(outcome, 0.0) + float(count)
        return sums

    def wait_idle(self, limit_s: float) -> dict[str, float]:
        """Wait until nothing of any request is left anywhere; the gauges then."""
        return self.until(self._idle, limit_s, f"idle service; gauges {self.gauges()}")

    def _idle(self) -> dict[str, float] | None:
        gauges = self.gauges()
        watched = (
            "queue", "running", "active_requests", "pages_used", "pages_owed", "tickets_open", "staged_bytes",
            "landing_bytes", "pulls_running", "prefill_tokens_owed", "spills_running", "spill_queue",
            "quarantined_slots", *(f"{tier}_tier_pinned" for tier in TIERS),
        )  # fmt: skip
        return gauges if all(gauges.get(name) == 0 for name in watched) else None

    def replica(self, pool: str) -> int:
        """Process id of the replica of "Prefill", "Decode" or "Gateway" in this service's own cluster."""
        return self.until(lambda: self._find(f"ray::ServeReplica:kvtide:{pool}"), 60, f"{pool} replica")

    def actor(self, name: str) -> int:
        """Process id of one of our actors ("DirectoryActor", "NodeAgent")."""
        return self.until(lambda: self._find(f"ray::{name}"), 60, name)

    def _find(self, title: str) -> int | None:
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and title in (entry / "cmdline").read_text():
                    pid = int(entry.name)
                    while pid > 1:
                        if pid == self.process.pid:
                            return int(entry.name)
                        pid = _parent(pid)
            except (FileNotFoundError, ProcessLookupError):
                continue
        return None

    def logs(self) -> str:
        """What the replicas of this cluster wrote to standard error, which Ray keeps in its session folder."""
        raylet = self.until(lambda: self._find("/raylet/raylet"), 10, "raylet")
        session = re.search(r"session_[\w-]+", Path(f"/proc/{raylet}/cmdline").read_text())
        assert session is not None
        folder = Path("/tmp/ray") / session.group(0) / "logs"
        return "".join(path.read_text(errors="replace") for path in folder.glob("worker-*.err"))

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)

    def stop(self) -> int:
        """SIGTERM, as a user's Ctrl-C ends it; the exit status."""
        self.client.close()
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise


def start_service(folder: Path, redis_url: str) -> Service:
    """The service that all cluster tests share; not yet ready. Its log and its NVMe tier lie in `folder`."""
    return Service(
        folder / "serve.log", f"max_sequences={MAX_SEQUENCES}", f"max_queued={MAX_QUEUED}", "pool_gib=0.5",
        "cpu_tier_gib=0.5", "ticket_ttl_s=8", "slow_reader_timeout_s=3", "max_context=8192", "deadline_s=90",
        "threads=1", f"scorers={SCORER}", f"nvme_tier_gib={LOWER_TIER_GIB}", f"nvme_tier_folder={folder}",
        f"redis_url={redis_url}", f"redis_tier_gib={LOWER_TIER_GIB}", "admission=always",
    )  # fmt: skip


def sse(lines: list[str]) -> list[str]:
    """Payloads of the `data:` lines of an event stream."""
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
