"""What the write-down costs streams that decode meanwhile: a part of `bench_tiers`."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from benchmarks.corpus import Corpus
from benchmarks.own_service import OwnService
from benchmarks.streams import Kv, Stream, body, client_of, run_alone

FULL: Kv = {"policy": "full"}
_LOWER = ("nvme", "redis")
_WINDOW_S_PER_TOKEN = 5e-4


def measure_spill(
    spilling: OwnService, control: OwnService, tokenizer: PreTrainedTokenizerBase, size: int, rounds: int
) -> dict[str, float]:
    """Time per token of one stream while a document is written to all tiers, over the same where nothing is written.

    Counted from the document's first token on, for as long as most of its write-down takes beside a stream; nobody
    polls meanwhile, and the rest is over before the next turn. `control` differs in `admission=never` only, and the two
    take turns: what else a document brings (its own step, the copy into the slab, pages) is in both. Figures:
    `step_slowdown_while_spilling` (ratio of medians over rounds), `step_ms_control`, `spilled_mb` and `spilled_share`
    (in a round's window, to both lower tiers; of the document's blocks).
    """
    corpus = Corpus(tokenizer)
    seconds = size * _WINDOW_S_PER_TOKEN
    found: dict[OwnService, list[_Round]] = {spilling: [], control: []}
    for number in range(rounds):
        for service, list_ in list(found.items())[:: -1 if number % 2 else 1]:
            salt = f"spill-{time.time_ns()}-{number}"
            list_.append(asyncio.run(_round(service, corpus, size, salt, seconds)))
    spilled = statistics.median(each.nbytes for each in found[spilling])
    during, otherwise = (statistics.median(each.step_s for each in list_) for list_ in found.values())
    return {
        "step_slowdown_while_spilling": round(during / otherwise, 3),
        "step_ms_control": round(1e3 * otherwise, 1),
        "spilled_mb": round(spilled / 1e6, 1),
        "spilled_share": round(spilled / statistics.median(each.whole for each in found[spilling]), 2),
    }


class _Round(NamedTuple):
    """Mean time per token in a window, the bytes that were written in it, and those of the whole document."""

    step_s: float
    nbytes: float
    whole: float


async def _round(service: OwnService, corpus: Corpus, size: int, salt: str, seconds: float) -> _Round:
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
        await asyncio.sleep(seconds)
        ended = time.perf_counter()
        after = service.gauges()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    gaps = _gaps(stream.times, began, ended)
    if not gaps:
        raise SystemExit(f"the stream ended too early, after {len(stream.times)} tokens")
    await asyncio.to_thread(service.wait_written, 0, _LOWER)
    at_last = service.gauges()
    return _Round(
        statistics.mean(gaps), _written(after) - _written(before), _written(at_last) - _written(before)
    )


def _written(gauges: Mapping[str, float]) -> float:
    return sum(gauges.get(f"{tier}_tier_bytes_written", 0) for tier in _LOWER)


def _gaps(times: Sequence[float], began: float, ended: float) -> list[float]:
    return [now - before for before, now in pairwise(times) if began <= before and now <= ended]
