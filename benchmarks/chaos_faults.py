"""What goes wrong in `bench_chaos_tiers`, and how it is put right again."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import redis

from benchmarks.own_service import OwnService
from benchmarks.redis_process import RedisProcess

_PAGE = 4096


class DelayProxy:
    """A unix socket in front of another, through which everything comes `delay_s` late. A thread of its own."""

    def __init__(self, listen: Path, target: Path) -> None:
        self.listen, self.target = listen, target
        self.delay_s = 0.0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; open connections end."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(asyncio.start_unix_server(self._serve, str(self.listen)))
        self._loop.run_forever()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            behind = await asyncio.open_unix_connection(str(self.target))
        except OSError:
            writer.close()
            return
        await asyncio.gather(self._pump(reader, behind[1]), self._pump(behind[0], writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while piece := await reader.read(1 << 20):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                writer.write(piece)
                await writer.drain()
        with suppress(OSError):
            writer.close()


@dataclass
class Chaos:
    """The service and its media, a seeded choice of faults, and a count of what was done."""

    service: OwnService
    redis: RedisProcess
    proxy: DelayProxy
    folder: Path
    random: random.Random
    done: dict[str, int] = field(default_factory=dict)

    def faults(self) -> dict[str, Callable[[], None]]:
        """Name → what does it; each returns when what it broke may work again (processes restart by themselves)."""
        return {
            "agent killed": lambda: self._kill("ray::NodeAgent"),
            "directory killed": lambda: self._kill("ray::DirectoryActor"),
            "prefill killed": lambda: self._kill_one("ray::ServeReplica:kvtide:Prefill"),
            "decode killed": lambda: self._kill_one("ray::ServeReplica:kvtide:Decode"),
            "redis killed, back empty": self._restart_redis,
            "redis frozen": self._freeze_redis,
            "redis link delayed": self._delay_redis,
            "bits flipped on disk": self._flip_disk,
            "bits flipped in redis": self._flip_redis,
            "disk full at agent start": self._fill_disk,
            "cpu tier flushed": lambda: self._flush("cpu"),
        }

    def step(self) -> str:
        """Do one fault, chosen at random; → its name."""
        name, act = self.random.choice(list(self.faults().items()))
        act()
        self.done[name] = self.done.get(name, 0) + 1
        return name

    def _kill(self, title: str) -> None:
        self.service.kill(title)

    def _kill_one(self, title: str) -> None:
        pids = self.service.pids(title)
        if len(pids) > 1:  # the last one of a pool would only make clients wait
            with suppress(ProcessLookupError):
                os.kill(self.random.choice(pids), 9)

    def _restart_redis(self) -> None:
        self.redis.kill()
        time.sleep(self.random.uniform(1, 4))
        self.redis.start()

    def _freeze_redis(self) -> None:
        self.redis.freeze(True)
        time.sleep(self.random.uniform(1, 5))
        self.redis.freeze(False)

    def _delay_redis(self) -> None:
        self.proxy.delay_s = self.random.uniform(0.05, 0.5)
        time.sleep(self.random.uniform(2, 6))
        self.proxy.delay_s = 0.0

    def _flip_disk(self) -> None:
        """Flip one bit in each of many random pages of the NVMe tier's file, behind its owner's back."""
        for path in self.folder.glob("*.kvnvme"):
            pages = path.stat().st_size // _PAGE
            with path.open("r+b", buffering=0) as file:
                for _ in range(max(20, pages // 50)):
                    at = self.random.randrange(pages) * _PAGE + self.random.randrange(_PAGE)
                    file.seek(at)
                    byte = file.read(1)
                    file.seek(at)
                    file.write(bytes([byte[0] ^ 1 << self.random.randrange(8)]))
                os.fsync(file.fileno())

    def _flip_redis(self) -> None:
        client = redis.Redis(unix_socket_path=str(self.redis.socket), socket_timeout=5)
        with suppress(redis.RedisError):
            for number, key in enumerate(client.scan_iter("kvtide:*", count=100)):
                if number >= 40:
                    break
                size = client.strlen(key)
                if size:
                    at = self.random.randrange(size)
                    byte = client.getrange(key, at, at)
                    if byte:
                        client.setrange(key, at, bytes([byte[0] ^ 1 << self.random.randrange(8)]))
        client.close()

    def _fill_disk(self) -> None:
        """An agent that starts on a full disk without its file serves without the tier, and gets it back later."""
        filler = self.folder / "filler"
        free = os.statvfs(self.folder)
        room = free.f_bavail * free.f_frsize
        if room > 4 << 30:  # not a file system of our own: filling it would hurt others
            raise NotHere
        for path in self.folder.glob("*.kvnvme"):
            path.unlink()
        self.service.kill("ray::NodeAgent")
        time.sleep(0.2)
        try:
            with filler.open("wb") as file:
                block = bytes(1 << 20)
                with suppress(OSError):
                    while True:
                        file.write(block)
            time.sleep(self.random.uniform(3, 8))
        finally:
            filler.unlink(missing_ok=True)

    def _flush(self, tier: str) -> None:
        with suppress(httpx.HTTPError):
            httpx.post(f"{self.service.url}/v1/kv/flush", json={"tiers": [tier]}, timeout=30)


class NotHere(Exception):
    """The fault cannot be made on this machine."""
