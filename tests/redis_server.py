"""Real Redis servers for tests: free ports, unix sockets, nothing kept on disk, ended with the test process."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import redis


def free_port() -> int:
    """Low enough that a cluster's bus has a port 10,000 above it."""
    while True:
        port = random.randrange(20_000, 50_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _die_with_parent() -> None:
    """Also where the tests are killed and no exit function runs."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


class RedisServer:
    """One redis-server in `folder`, in a process group of its own. `options` as on its command line."""

    def __init__(self, folder: Path, *options: str, tls: Path | None = None) -> None:
        self.folder = folder
        self.options = options
        self.tls = tls
        self.port = free_port()
        self.socket = folder / "redis.sock"
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    @property
    def tcp_url(self) -> str:
        return f"{'rediss' if self.tls else 'redis'}://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, empty, and wait until it answers."""
        assert self.process is None
        ports = ["--port", str(self.port)]
        if self.tls is not None:
            names = ("cert", "key", "ca-cert")
            files = [("cert.pem", "key.pem", "cert.pem")[index] for index in range(3)]
            ports = ["--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "no"]
            for name, file in zip(names, files, strict=True):
                ports += [f"--tls-{name}-file", str(self.tls / file)]
        command = ["redis-server", *ports, "--bind", "127.0.0.1", "--unixsocket", str(self.socket)]
        command += ["--save", "", "--appendonly", "no", "--dir", str(self.folder), *self.options]
        with (self.folder / "redis.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, preexec_fn=_die_with_parent
            )
        until = time.monotonic() + 20
        while True:
            try:
                with socket.socket(socket.AF_UNIX) as probe:
                    probe.connect(str(self.socket))
                    return
            except OSError:
                assert self.process.poll() is None and time.monotonic() < until, (
                    self.folder / "redis.log"
                ).read_text()
                time.sleep(0.01)

    def client(self, **options) -> redis.Redis:
        return redis.Redis(unix_socket_path=str(self.socket), protocol=2, **options)

    def kill(self) -> None:
        """kill -9; what it held is gone."""
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process = None
        self.socket.unlink(missing_ok=True)

    def freeze(self) -> None:
        """It takes connections and bytes, and answers nothing."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def stop(self) -> None:
        if self.process is not None:
            self.kill()


@functools.cache
def shared_server() -> RedisServer:
    """One for the whole session. Whoever uses it empties it first."""
    folder = Path(
        tempfile.mkdtemp(prefix="kvtide-redis-")
    )  # short: a socket's path has 107 characters at most
    server = RedisServer(folder)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(server.stop)
    return server
