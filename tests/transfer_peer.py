"""The other side of a transfer for the contract tests: in this process over a fabric, or a real process over NIXL.

Run as a program it is the real process: `python transfer_peer.py NAME ARENA_BYTES`, one JSON command a line on stdin,
one JSON answer a line on stdout, a thread that polls.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from kv_tiers.transfer import Ticket, TransferEndpoint, payload_checksum
from kv_tiers.transfer.local import LocalEndpoint, LocalFabric

FINGERPRINT = b"f" * 32
ROOT = Path(__file__).resolve().parent.parent


def bare_environment() -> dict[str, str]:
    """What a user's process would have: nothing of what conftest.py sets for NIXL and UCX."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("UCX_MODULES", "NIXL_"))
    }
    return kept | {"PYTHONPATH": str(ROOT)}


def payload(nbytes: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8))


def wait_until(condition: Callable[[], bool], timeout_s: float = 5.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


class Serving:
    """An endpoint with a thread that polls it as its contract asks."""

    def __init__(self, endpoint: TransferEndpoint) -> None:
        self.endpoint = endpoint
        self.ends: list[tuple[str, int, str]] = []
        self.polling = threading.Event()
        self.polling.set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        while not self._stop.is_set():
            if self.polling.is_set():
                self.ends += [(e.request_id, e.attempt, e.reason.value) for e in self.endpoint.poll()]
            time.sleep(min(self.endpoint.wait_hint(), 0.001))

    def publish(
        self,
        request_id: str,
        nbytes: int,
        *,
        attempt: int = 0,
        seed: int = 0,
        ttl_s: float = 60.0,
        skew: int = 0,
    ) -> Ticket:
        lease = self.endpoint.reserve(nbytes)
        assert lease is not None
        lease.buffer.copy_(payload(nbytes, seed))
        return self.endpoint.publish(
            lease,
            request_id=request_id,
            attempt=attempt,
            fingerprint=FINGERPRINT,
            checksum=payload_checksum(lease.buffer) ^ skew,
            ttl_s=ttl_s,
        )

    def scribble(self, nbytes: int) -> None:
        """Take the lowest free room, overwrite it, give it back."""
        lease = self.endpoint.reserve(nbytes)
        assert lease is not None
        lease.buffer.fill_(0xEE)
        lease.release()

    def revoke(self, request_id: str) -> bool:
        return self.endpoint.revoke(request_id)

    def gauges(self) -> dict[str, int]:
        self.endpoint.check()
        return {
            "open": self.endpoint.open_tickets,
            "staged": self.endpoint.staged_bytes,
            "used": self.endpoint.used_bytes,
            "ignored": self.endpoint.counters.messages_ignored,
        }

    def ended(self) -> list[tuple[str, int, str]]:
        return list(self.ends)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        self.endpoint.close()


class LocalPeer(Serving):
    """The source side within this process."""

    def __init__(self, name: str, arena_bytes: int, fabric: LocalFabric) -> None:
        super().__init__(LocalEndpoint(name, arena_bytes, fabric=fabric))
        self.name = name
        self._fabric = fabric

    def kill(self) -> None:
        self._fabric.kill(self.name)

    def freeze(self) -> None:
        self._fabric.freeze(self.name)

    def thaw(self) -> None:
        self._fabric.thaw(self.name)


class ProcessPeer:
    """The source side in a process of its own, over NIXL."""

    def __init__(self, name: str, arena_bytes: int) -> None:
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, __file__, name, str(arena_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=bare_environment(),
        )
        assert self.process.stdout is not None
        assert json.loads(self.process.stdout.readline()) == "ready"

    def ask(self, op: str, **arguments: object) -> object:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def publish(self, request_id: str, nbytes: int, **arguments: object) -> Ticket:
        answer = self.ask("publish", request_id=request_id, nbytes=nbytes, **arguments)
        assert isinstance(answer, str)
        return Ticket.from_bytes(bytes.fromhex(answer))

    def scribble(self, nbytes: int) -> None:
        self.ask("scribble", nbytes=nbytes)

    def revoke(self, request_id: str) -> bool:
        return bool(self.ask("revoke", request_id=request_id))

    def gauges(self) -> dict[str, int]:
        answer = self.ask("gauges")
        assert isinstance(answer, dict)
        return answer

    def ended(self) -> list[tuple[str, int, str]]:
        answer = self.ask("ended")
        assert isinstance(answer, list)
        return [tuple(end) for end in answer]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> int:
        """End it in an orderly way (or collect it); returns its exit code."""
        if self.process.poll() is None:
            self.ask("stop")
        code = self.process.wait(timeout=20)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        return code


def main() -> None:
    from kv_tiers.transfer.nixl import NixlEndpoint

    torch.set_num_threads(1)
    name, arena_bytes = sys.argv[1], int(sys.argv[2])
    serving = Serving(NixlEndpoint(name, arena_bytes))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        op = command.pop("op")
        if op == "stop":
            serving.stop()
            print(json.dumps(True), flush=True)
            return
        if op == "publish":
            answer: object = serving.publish(**command).to_bytes().hex()
        elif op == "pull":
            ticket = Ticket.from_bytes(bytes.fromhex(command["ticket"]))
            answer = serving.endpoint.pull(ticket, fingerprint=FINGERPRINT, timeout_s=5.0).outcome.value
        else:
            answer = getattr(serving, op)(**command)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
