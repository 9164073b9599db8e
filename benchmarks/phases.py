"""The measurements of `bench_serving`: cold prompts against transformers, decoding together."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from benchmarks.bare_forward import BareForward, Forward
from benchmarks.corpus import Corpus
from benchmarks.running_service import Processes, Service
from benchmarks.streams import Kv, Stream, body, observe, run_alone, run_together

POLICIES: dict[str, Kv] = {
    "full": {"policy": "full"},
    "snapkv 512": {"policy": "snapkv", "budget": 512},
}
_QUESTION_TOKENS = 64
_COLD_TOKENS = 6
_LOAD_TOKENS = 1100


@dataclass
class Cold:
    """Readings of one prompt size, a list entry per round. Times in seconds; `handover_s`: first to second token."""

    size: int
    bare: list[Forward] = field(default_factory=list)
    ttft_s: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in POLICIES})
    cpu_s: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in POLICIES})
    handover_s: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in POLICIES})
    kept_tokens: dict[str, int] = field(default_factory=dict)
    shipped_bytes: dict[str, int] = field(default_factory=dict)
    same_token: list[bool] = field(default_factory=list)

    def ratio(self, policy: str) -> float:
        """Median over rounds of the round's own time to first token over its own bare forward."""
        pairs = zip(self.ttft_s[policy], self.bare, strict=True)
        return statistics.median(ttft / bare.wall_s for ttft, bare in pairs)

    def cpu_ratio(self, policy: str) -> float:
        """As `ratio`, in processor time of the prefill replica: steadier where others use the cores."""
        pairs = zip(self.cpu_s[policy], self.bare, strict=True)
        return statistics.median(cpu / bare.cpu_s for cpu, bare in pairs)


class Bench:
    """What every measurement needs, and the salts that keep their cached prefixes apart."""

    def __init__(
        self,
        service: Service,
        bare: BareForward,
        tokenizer: PreTrainedTokenizerBase,
        corpus: Corpus,
        more_until: float,
    ) -> None:
        """`more_until`: time.monotonic() after which nothing is repeated any more."""
        self.service = service
        self.bare = bare
        self.tokenizer = tokenizer
        self.corpus = corpus
        self.prefill = Processes.of_pool(service, "Prefill")
        self.decode = Processes.of_pool(service, "Decode")
        self._more_until = more_until
        self._run = time.time_ns()
        self._salts = 0

    def salt(self) -> str:
        """A tenant that no request has used."""
        self._salts += 1
        return f"bench-{self._run}-{self._salts}"

    def warm_up(self) -> None:
        """First requests and first forward pay for allocations and connections that later ones do not."""
        ids = self.corpus.take(1024)
        self.bare.run(ids)
        for kv in POLICIES.values():
            run_alone(self.service, body(self.service, ids, _COLD_TOKENS, kv, self.salt()))

    def cold(self, size: int, rounds: int) -> Cold:
        """Each round one prompt: bare forward and one request per policy, in turn, in alternating order."""
        cold = Cold(size)
        for number in self._rounds(rounds):
            ids = self.corpus.take(size)
            names = list(POLICIES) if number % 2 == 0 else list(reversed(POLICIES))
            if number % 2 == 0:
                self._forward(cold, ids)
            streams = {name: self._cold_request(cold, name, ids) for name in names}
            if number % 2 == 1:
                self._forward(cold, ids)
            likeliest = self.tokenizer.decode([cold.bare[-1].token])
            cold.same_token.append(streams["full"].texts()[0] == likeliest)
        return cold

    def _rounds(self, wanted: int) -> Iterator[int]:
        """The first round always, others while there is time for repeats."""
        for number in range(wanted):
            if number and time.monotonic() > self._more_until:
                return
            yield number

    def _forward(self, cold: Cold, ids: Sequence[int]) -> None:
        self.service.wait_idle()
        cold.bare.append(self.bare.run(ids))

    def _cold_request(self, cold: Cold, policy: str, ids: Sequence[int]) -> Stream:
        self.service.wait_idle()
        before = self.prefill.cpu_s()
        stream = run_alone(self.service, body(self.service, ids, _COLD_TOKENS, POLICIES[policy], self.salt()))
        cold.cpu_s[policy].append(self.prefill.cpu_s() - before)
        cold.ttft_s[policy].append(stream.ttft_s)
        cold.handover_s[policy].append(stream.times[1] - stream.times[0])
        kv = stream.usage["kv"]
        assert isinstance(kv, dict)
        cold.kept_tokens[policy] = kv["kept_tokens"]
        cold.shipped_bytes[policy] = kv["shipped_bytes"]
        return stream

    def loads(self, size: int, concurrency: Sequence[int], rounds: int, window_s: float) -> list[Load]:
        """Decoding at every concurrency: requests share a document that is cached and ask different questions."""
        document, salt = self.corpus.take(size - _QUESTION_TOKENS), self.salt()
        run_alone(self.service, body(self.service, document, 2, POLICIES["full"], salt))
        self.service.wait_idle()
        loads: list[Load] = []
        for count in concurrency:
            found = {name: Load(size, name, count) for name in POLICIES}
            for number in self._rounds(rounds):
                names = list(POLICIES) if number % 2 == 0 else list(reversed(POLICIES))
                for name in names:
                    self._load_round(found[name], document, salt, window_s)
            loads += found.values()
        return loads

    def _load_round(self, load: Load, document: Sequence[int], salt: str, window_s: float) -> None:
        room = min(_LOAD_TOKENS, self.service.context - load.size - 1)
        requests = [
            body(
                self.service,
                [*document, *self.corpus.take(_QUESTION_TOKENS)],
                room,
                POLICIES[load.policy],
                salt,
            )
            for _ in range(load.concurrency)
        ]
        together = asyncio.run(run_together(self.service, requests, window_s, self._memory))
        window = observe(together, self.tokenizer)
        load.gaps_s += window.gaps_s
        load.ttfts_s += window.ttfts_s
        load.tokens_per_s.append(window.tokens_per_s)
        load.generated.append(window.generated)
        load.memory.append(together.seen)
        time.sleep(0.5)  # aborted requests leave at the next step

    def _memory(self) -> Memory:
        prefill, decode = (pool.pss_mb() if pool.pids else None for pool in (self.prefill, self.decode))
        return Memory(self.service.gauge("pages_used"), prefill, decode)


@dataclass(frozen=True)
class Memory:
    """At the end of a window: pages of the decode pool in use, and both pools' resident memory (10^6 bytes, PSS).

    None where the pool's processes are not on this machine.
    """

    pages: float
    prefill_mb: float | None
    decode_mb: float | None


@dataclass
class Load:
    """Readings of one cell: prompt size, policy, requests at once. Times in seconds."""

    size: int
    policy: str
    concurrency: int
    gaps_s: list[float] = field(default_factory=list)
    ttfts_s: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    generated: list[float] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)

    def gap_s(self, percentile: float) -> float:
        """That percentile (0 to 100) of the seconds per token, over all rounds; nearest rank."""
        ranked = sorted(self.gaps_s)
        return ranked[min(len(ranked) - 1, int(len(ranked) * percentile / 100))]

    def most_mb(self, pool: str) -> float | None:
        """Largest size seen of "prefill" or "decode" (10^6 bytes); None where its processes were not found."""
        sizes = [each.prefill_mb if pool == "prefill" else each.decode_mb for each in self.memory]
        return max((size for size in sizes if size is not None), default=None)

    def floor_s(
        self, weight_bytes: int, kv_bytes_per_token: int, kept: int, read_bytes_per_s: float
    ) -> float:
        """A step's least time: every weight and every sequence's KV read once at the machine's bandwidth."""
        tokens = self.concurrency * (kept + statistics.mean(self.generated))
        return (weight_bytes + tokens * kv_bytes_per_token) / read_bytes_per_s
