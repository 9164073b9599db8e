"""How long a document takes that was seen before, from each tier: the first half of `bench_tiers`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from benchmarks.bare_forward import BareForward
from benchmarks.corpus import Corpus
from benchmarks.own_service import OwnService
from benchmarks.running_service import Processes
from benchmarks.streams import Kv, Stream, body, run_alone

FULL: Kv = {"policy": "full"}
_TOKENS = 8
_ALL = ("cpu", "nvme", "redis")
_BLOCK = 16


@dataclass
class Recall:
    """Readings of one source; seconds, one entry per document. `same`: the tokens of the cold answer came back."""

    source: str
    ttft_s: list[float] = field(default_factory=list)
    of_cold: list[float] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Median over documents of its time to first token over the same document's cold one."""
        return statistics.median(self.of_cold)


@dataclass
class Document:
    """Token ids under a tenant of their own, and the cold answer."""

    ids: list[int]
    salt: str
    cold: Stream | None = None


class RecallBench:
    """Documents of `size` tokens asked cold, then again, each from one source only."""

    def __init__(
        self,
        service: OwnService,
        tokenizer: PreTrainedTokenizerBase,
        size: int,
        rounds: int,
        sources: Sequence[str],
    ) -> None:
        """`rounds` documents for each of `sources`, which are names of the report."""
        self.service = service
        self.size = size
        self._corpus = Corpus(tokenizer)
        run = time.time_ns()
        self.documents = {
            source: [
                Document(self._corpus.take(size), f"recall-{run}-{source}-{number}")
                for number in range(rounds)
            ]
            for source in sources
        }
        self.recalls: dict[str, Recall] = {}

    def cold(self, bare: BareForward) -> list[float]:
        """Every document for the first time, the first of each round beside a bare forward; → ratios of the two."""
        self._warm_up()
        ratios = []
        for number, documents in enumerate(self.documents.values()):
            for document in documents:
                self._idle()
                document.cold = self._ask(document)
                if number == 0:
                    ratios.append(document.cold.ttft_s / bare.run(document.ids).wall_s)
        return ratios

    def wait_written(self, tiers: Sequence[str] = _ALL) -> None:
        """Until the documents' blocks are in all those tiers."""
        documents = sum(map(len, self.documents.values()))
        self.service.wait_written(documents * (self.size // _BLOCK), tiers)

    def keep_only(self, source: str, tier: str) -> None:
        """Take the documents of a source out of every other tier."""
        others = [name for name in _ALL if name != tier]
        for document in self.documents[source]:
            self.service.evict(document.ids, document.salt, others)

    def again(self, source: str) -> None:
        """Ask the documents of a source again."""
        self._warm_up()
        for document in self.documents[source]:
            self._again(source, document)

    def _again(self, source: str, document: Document) -> None:
        self._idle()
        stream = self._ask(document)
        assert document.cold is not None
        recall = self.recalls.setdefault(source, Recall(source))
        recall.ttft_s.append(stream.ttft_s)
        recall.of_cold.append(stream.ttft_s / document.cold.ttft_s)
        details = stream.usage["prompt_tokens_details"]
        assert isinstance(details, dict)
        recall.cached.append(details["cached_tokens"])
        recall.same.append("".join(stream.texts()) == "".join(document.cold.texts()))

    def _ask(self, document: Document) -> Stream:
        return run_alone(
            self.service.service(), body(self.service.service(), document.ids, _TOKENS, FULL, document.salt)
        )

    def _warm_up(self) -> None:
        """New processes pay for allocations and connections once; that is not what is measured."""
        for size in (64, 600):
            salt = f"warm-up-{time.time_ns()}"
            run_alone(
                self.service.service(), body(self.service.service(), self._corpus.take(size), 4, FULL, salt)
            )

    def _idle(self) -> None:
        self.service.service().wait_idle()


def niceness_of(service: OwnService) -> int:
    """Scheduling niceness of the prefill replica, for a fair baseline."""
    return Processes.of_pool(service.service(), "Prefill").niceness()
