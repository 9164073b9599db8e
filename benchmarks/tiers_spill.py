"""What the write-down costs streams that decode meanwhile: a part of `bench_tiers`."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise

from transformers import PreTrainedTokenizerBase

from benchmarks.corpus import Corpus
from benchmarks.own_service import OwnService
from benchmarks.streams import Kv, Stream, body, client_of, run_alone

FULL: Kv = {"policy": "full"}
_WINDOW_S = 1.5
"""From a document's first token on. Its write-down (130 MB to each tier for 6,144 tokens) begins there."""

_TIERS = ("cpu", "nvme", "redis")


def measure_spill(
    service: OwnService, tokenizer: PreTrainedTokenizerBase, size: int, rounds: int
) -> dict[str, float]:
    """Time per token of one stream in the time in which a document is written to all tiers, over the time after that.

    Figures: `step_slowdown_while_spilling` (median of rounds), `spilled_mb` (of one round, both lower tiers).
    """
    corpus = Corpus(tokenizer)
    ratios, written = [], []
    for number in range(rounds):
        found = asyncio.run(_round(service, corpus, size, f"spill-{time.time_ns()}-{number}"))
        ratios.append(found[0])
        written.append(found[1])
    return {
        "step_slowdown_while_spilling": round(statistics.median(ratios), 3),
        "spilled_mb": round(statistics.median(written), 1),
    }


async def _round(service: OwnService, corpus: Corpus, size: int, salt: str) -> tuple[float, float]:
    target = service.service()
    stream = Stream()
    async with client_of(target) as client:
        running = asyncio.create_task(
            stream.run(client, body(target, corpus.take(64), 6000, FULL, f"{salt}-stream"))
        )
        await stream.joined.wait()
        before = service.gauges()
        await asyncio.to_thread(run_alone, target, body(target, corpus.take(size), 1, FULL, salt))
        began = time.perf_counter()
        await asyncio.sleep(_WINDOW_S)
        ended = time.perf_counter()
        for tier in _TIERS:
            held = int(before.get(f"{tier}_tier_blocks", 0))
            await asyncio.to_thread(service.wait_written, held + size // 16 - 1, (tier,))
        quiet = time.perf_counter()
        await asyncio.sleep(2 * _WINDOW_S)
        after = service.gauges()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    during, later = _gaps(stream.times, began, ended), _gaps(stream.times, quiet, time.perf_counter())
    if not during or not later:
        raise SystemExit(f"the stream ended too early, after {len(stream.times)} tokens")
    names = [f"{tier}_tier_bytes_written" for tier in _TIERS[1:]]
    spilled = sum(after.get(name, 0) - before.get(name, 0) for name in names)
    return statistics.mean(during) / statistics.mean(later), spilled / 1e6


def _gaps(times: Sequence[float], began: float, ended: float) -> list[float]:
    return [now - before for before, now in pairwise(times) if began <= before and now <= ended]
