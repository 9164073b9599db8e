"""A redis-server of a benchmark's own, on a unix socket, without persistence unless asked for."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType


class RedisProcess:
    """Context manager. `url` stays the same over restarts."""

    def __init__(self, folder: Path, *, persistent: bool = False) -> None:
        """SystemExit where redis-server is not installed. `persistent`: an append-only file in `folder`."""
        if shutil.which("redis-server") is None:
            raise SystemExit("redis-server is not installed; make setup installs it")
        self.folder = folder
        self.persistent = persistent
        self.socket = folder / "redis.sock"
        self.url = f"unix://{self.socket}"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> RedisProcess:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def start(self) -> None:
        """Start it, and wait until it listens."""
        self.socket.unlink(missing_ok=True)
        words = ["redis-server", "--port", "0", "--unixsocket", str(self.socket), "--dir", str(self.folder)]
        words += ["--save", "", "--appendonly", "yes" if self.persistent else "no"]
        self._process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
        end = time.monotonic() + 20
        while not self._answers():
            if time.monotonic() > end:
                raise SystemExit("redis-server does not answer")
            time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL, frozen or not."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self, frozen: bool) -> None:
        """Stop it from running, or let it go on."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP if frozen else signal.SIGCONT)

    def _answers(self) -> bool:
        try:
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(1)
                client.connect(str(self.socket))
                client.sendall(b"PING\r\n")
                return client.recv(16).startswith((b"+PONG", b"-LOADING"))
        except OSError:
            return False
