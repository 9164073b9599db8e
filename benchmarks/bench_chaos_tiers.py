"""Ten minutes of everything going wrong under load: every answer must be the fault-free one.

    python -m benchmarks.bench_chaos_tiers [--minutes 10] [--seed 1] [--clients 3]

Ends with one JSON line (result.py). Takes the minutes asked for and about three more.

A service with all tiers, each too small for the documents asked about, answers a fixed set of prompts (documents with
different questions, full KV and SnapKV, greedy, fp32) while a seeded choice of faults hits it: node agent, directory,
replicas and Redis killed; Redis frozen, emptied or far away; bits flipped on disk and in Redis; the disk full when an
agent starts; tiers flushed. A client takes an error or a broken stream as one (it is visible) and asks again; an answer
it does get must have the text that the same prompt had before the first fault.

The disk-full fault needs a small file system of its own: as root a tmpfs is mounted for the run, else it is left out
and the report says so.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import redis
from transformers import AutoTokenizer

from benchmarks.chaos_faults import Chaos, DelayProxy, NotHere
from benchmarks.corpus import Corpus
from benchmarks.own_service import OwnService
from benchmarks.redis_process import RedisProcess
from benchmarks.result import print_result
from engine.weights import ensure_weights

_DOCUMENTS, _QUESTIONS, _DOCUMENT_TOKENS, _QUESTION_TOKENS = 8, 3, 512, 24
_RECIPES = ({"policy": "full"}, {"policy": "snapkv", "budget": 128})
_GIB = 1 << 30
_CPU_GIB, _NVME_GIB, _REDIS_GIB = 0.1, 0.2, 0.15
_ZERO = (
    "queue", "running", "pages_used", "pages_owed", "tickets_open", "staged_bytes", "landing_bytes", "pulls_running",
    "spills_running", "prefill_tokens_owed", "quarantined_slots", "spill_queue",
)  # fmt: skip


@dataclass
class Tally:
    """What clients saw."""

    right: int = 0
    wrong: list[str] = field(default_factory=list)
    errors: int = 0
    broken_streams: int = 0
    slowest_s: float = 0.0


class Client:
    """Asks prompts of the set at random, again and again, and compares."""

    def __init__(self, url: str, prompts: list[dict[str, object]], seed: int) -> None:
        self.url, self.prompts = url, prompts
        self.expected: list[str] = []
        self.tally = Tally()
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def learn(self) -> None:
        """Answers without faults and without any cache: each prompt under a tenant of its own."""
        for number, prompt in enumerate(self.prompts):
            text = self._ask({**prompt, "cache_salt": f"fault-free-{number}"})
            assert text is not None, "an error before the first fault"
            self.expected.append(text)

    def ask_until_told(self, number: int, limit_s: float = 180.0) -> None:
        """One prompt, repeated while the service shows an error."""
        began = time.monotonic()
        while time.monotonic() - began < limit_s:
            text = self._ask(self.prompts[number])
            if text is not None:
                took = time.monotonic() - began
                with self._lock:
                    self.tally.slowest_s = max(self.tally.slowest_s, took)
                    if text == self.expected[number]:
                        self.tally.right += 1
                    else:
                        self.tally.wrong.append(f"{number}: {text!r} for {self.expected[number]!r}")
                return
            time.sleep(0.3)
        with self._lock:
            self.tally.wrong.append(f"{number}: no answer within {limit_s:g} s")

    def work(self, until: float) -> None:
        """Random prompts until then."""
        while time.monotonic() < until:
            with self._lock:
                number = self._random.randrange(len(self.prompts))
            self.ask_until_told(number)

    def _ask(self, body: dict[str, object]) -> str | None:
        """The whole text, or None for a visible error. A stream that ends without [DONE] or an error is wrong."""
        parts: list[str] = []
        try:
            with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=120) as answer:
                if answer.status_code != httpx.codes.OK:
                    answer.read()
                    return self._error()
                for line in answer.iter_lines():
                    if line == "data: [DONE]":
                        return "".join(parts)
                    if line.startswith("data: "):
                        event = json.loads(line.removeprefix("data: "))
                        if "error" in event:
                            return self._error()
                        parts += [choice["text"] for choice in event["choices"]]
        except httpx.HTTPError:
            return self._error()
        with self._lock:
            self.tally.broken_streams += 1
        return None

    def _error(self) -> None:
        with self._lock:
            self.tally.errors += 1


class Watch:
    """Looks every second whether a tier is larger than its bound."""

    def __init__(self, folder: Path, redis_process: RedisProcess) -> None:
        self.folder, self.redis = folder, redis_process
        self.exceeded: list[str] = []
        self.most_redis = 0
        self._empty = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(10)

    def _run(self) -> None:
        while not self._stop.wait(1.0):
            for path in self.folder.glob("*.kvnvme"):
                try:
                    taken = path.stat().st_blocks * 512
                except FileNotFoundError:
                    continue
                if taken > _NVME_GIB * _GIB + (1 << 20):
                    self.exceeded.append(f"{path.name}: {taken} bytes")
            self._look_at_redis()

    def _look_at_redis(self) -> None:
        client = redis.Redis(unix_socket_path=str(self.redis.socket), socket_timeout=0.5)
        try:
            info = client.info("memory")
        except redis.RedisError:
            return
        finally:
            client.close()
        # What an empty server takes, and buffers of clients, are not the tier's.
        taken = info["used_memory_dataset"] - info.get("mem_clients_normal", 0)
        self.most_redis = max(self.most_redis, taken)
        if taken > _REDIS_GIB * _GIB * 1.02:
            self.exceeded.append(f"redis: {taken} bytes")


def prompts_of(model: str) -> list[dict[str, object]]:
    """Bodies: every document with every question and recipe, greedy, streamed."""
    corpus = Corpus(AutoTokenizer.from_pretrained(ensure_weights("demo")))
    bodies: list[dict[str, object]] = []
    for _ in range(_DOCUMENTS):
        document = corpus.take(_DOCUMENT_TOKENS)
        for number in range(_QUESTIONS):
            question = corpus.take(_QUESTION_TOKENS)
            bodies.append(
                {
                    "model": model, "prompt": document + question, "max_tokens": 12, "temperature": 0,
                    "stream": True, "kv": _RECIPES[number % len(_RECIPES)],
                }
            )  # fmt: skip
    return bodies


@contextmanager
def small_disk() -> Iterator[Path]:
    """A folder on a file system of its own where that may be mounted, else a plain one."""
    with tempfile.TemporaryDirectory(prefix="kvtide-chaos-") as folder:
        place = Path(folder) / "disk"
        place.mkdir()
        size = f"size={int((_NVME_GIB + 0.05) * _GIB)}"
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", size, "tmpfs", str(place)], check=False, capture_output=True
        )
        try:
            yield place
        finally:
            if mounted.returncode == 0:
                subprocess.run(["umount", "-l", str(place)], check=False)


def run(minutes: float, seed: int, clients: int) -> dict[str, float]:
    """The whole run; → figures."""
    with small_disk() as disk, RedisProcess(disk.parent) as redis_process:
        proxy = DelayProxy(disk.parent / "link.sock", redis_process.socket)
        options = {
            "dtype": "float32", "threads": 1, "prefill_replicas": 2, "decode_replicas": 2, "max_context": 1024,
            "pool_gib": 0.5, "staging_gib": 0.25, "workspace_gib": 1, "cpu_tier_gib": _CPU_GIB,
            "nvme_tier_gib": _NVME_GIB, "nvme_tier_folder": disk, "redis_url": f"unix://{proxy.listen}",
            "redis_tier_gib": _REDIS_GIB, "admission": "always", "ticket_ttl_s": 8,
        }  # fmt: skip
        with OwnService(disk.parent, options) as service:
            client = Client(service.url, prompts_of(service.service().model), seed)
            client.learn()
            watch = Watch(disk, redis_process)
            chaos = Chaos(service, redis_process, proxy, disk, random.Random(seed))
            torment(chaos, client, minutes, clients)
            figures = afterwards(service, client)
            watch.stop()
        proxy.close()
    tally = client.tally
    for line in tally.wrong[:5]:
        print("WRONG", line)
    for line in watch.exceeded[:5]:
        print("BOUND", line)
    return figures | {
        "answers_right": tally.right,
        "answers_wrong": len(tally.wrong),
        "visible_errors": tally.errors,
        "streams_without_an_end": tally.broken_streams,
        "slowest_answer_s": round(tally.slowest_s, 1),
        "bounds_exceeded": len(watch.exceeded),
        "most_redis_mb": round(watch.most_redis / 1e6, 1),
        "faults": sum(chaos.done.values()),
    }


def torment(chaos: Chaos, client: Client, minutes: float, clients: int) -> None:
    """Load and faults side by side."""
    until = time.monotonic() + 60 * minutes
    workers = [threading.Thread(target=client.work, args=(until,)) for _ in range(clients)]
    for worker in workers:
        worker.start()
    while time.monotonic() < until:
        time.sleep(chaos.random.uniform(2, 9))
        try:
            name = chaos.step()
        except NotHere:
            continue
        left = until - time.monotonic()
        print(
            f"{left:6.0f} s left: {name}; {client.tally.right} right, {len(client.tally.wrong)} wrong",
            flush=True,
        )
    for worker in workers:
        worker.join(300)
    print("\n" + "\n".join(f"{count:4} {name}" for name, count in sorted(chaos.done.items())))


def afterwards(service: OwnService, client: Client) -> dict[str, float]:
    """With nothing broken any more: every prompt once more, and every gauge back at zero."""
    service.until(service.ready, 180, "recovery")
    time.sleep(10)
    for number in range(len(client.prompts)):
        client.ask_until_told(number)

    def at_rest() -> bool:
        gauges = service.gauges()
        return not any(gauges.get(name) for name in _ZERO)

    service.until(at_rest, 60, f"rest; gauges {[(n, service.gauges().get(n)) for n in _ZERO]}")
    gauges = service.gauges()
    return {
        "blocks_corrupt": gauges.get("prefix_blocks_corrupt", 0.0),
        "tokens_found": gauges.get("prefix_tokens_found", 0.0),
        "gauges_not_zero": sum(bool(gauges.get(name)) for name in _ZERO),
    }


def main() -> None:
    """Prints a line per fault, then one JSON line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=3)
    options = parser.parse_args()
    figures = run(options.minutes, options.seed, options.clients)
    zero = {"at_most": 0.0}
    print_result(
        "chaos_tiers",
        f"{options.minutes:g} minutes, seed {options.seed}, {options.clients} clients, one machine, fp32",
        "the same prompts before the first fault, nothing cached",
        figures,
        {
            "answers_wrong": zero, "streams_without_an_end": zero, "bounds_exceeded": zero, "gauges_not_zero": zero,
            "answers_right": {"at_least": 1.0},
        },
    )  # fmt: skip


if __name__ == "__main__":
    main()
