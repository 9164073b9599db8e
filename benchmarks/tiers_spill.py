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
_AWHILE_S = 1.5


def measure_spill(
    service: OwnService, tokenizer: PreTrainedTokenizerBase, size: int, rounds: int
) -> dict[str, float]:
    """Time per token of one stream while a document's blocks are written to all tiers, over the time after that.

    Figures: `step_slowdown_while_spilling` (median of rounds), `spill_s` (how long the write-down took).
    """
    corpus = Corpus(tokenizer)
    ratios, durations = [], []
    for number in range(rounds):
        found = asyncio.run(_round(service, corpus, size, f"spill-{time.time_ns()}-{number}"))
        ratios.append(found[0])
        durations.append(found[1])
    return {
        "step_slowdown_while_spilling": round(statistics.median(ratios), 3),
        "spill_s": round(statistics.median(durations), 2),
    }


async def _round(service: OwnService, corpus: Corpus, size: int, salt: str) -> tuple[float, float]:
    target = service.service()
    stream = Stream()
    async with client_of(target) as client:
        running = asyncio.create_task(
            stream.run(client, body(target, corpus.take(64), 6000, FULL, f"{salt}-stream"))
        )
        await stream.joined.wait()
        await asyncio.to_thread(run_alone, target, body(target, corpus.take(size), 1, FULL, salt))
        began = time.perf_counter()
        await asyncio.to_thread(service.wait_written, size // 16, ("cpu", "nvme", "redis"))
        ended = time.perf_counter()
        await asyncio.sleep(_AWHILE_S + max(3.0, ended - began))
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    during = _gaps(stream.times, began, ended)
    after = _gaps(stream.times, ended + _AWHILE_S, time.perf_counter())
    if not during or not after:
        raise SystemExit("the stream ended before the write-down did")
    return statistics.mean(during) / statistics.mean(after), ended - began


def _gaps(times: Sequence[float], began: float, ended: float) -> list[float]:
    return [now - before for before, now in pairwise(times) if began <= before and now <= ended]
