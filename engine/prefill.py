"""The prefill engine: prompts in, packed survivors and first tokens out.

One thread calls `step`; `add` and `abort` may come from others. A step runs one flattened batch of chunks from several
prompts (`schedule.plan_prefill`), so a short prompt never waits for a long one to end.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from engine.errors import ContextOverflow, GenerationFailed, InvalidRequest
from engine.model import Model
from engine.pace import PrefillPace
from engine.plan import PromptPlan, open_watches, plan_prompt
from engine.report import SelectionReport
from engine.request import GenerationRequest, TokenLogprob
from engine.sampler import Sampled, SampleRow, SamplingError, sample, token_logprob
from engine.schedule import PrefillNeed, plan_prefill
from engine.snapshot import SnapshotLayout, pack_prompt, prompt_meta
from engine.survivors import LayerSurvivors, select_survivors
from engine.workspace import PrefillPort, StepAbandoned, Workspace

_log = logging.getLogger("kvtide.engine")

# Attention of a prompt is computed in pieces that end at multiples of so many tokens (and at the prompt's end), and so
# do its chunks: its KV has the same bits whatever the chunks are, whoever shares its steps, and however much of its
# beginning was cached (a piece that is cached in part is computed as the end of a whole one: `causal_attention`).
_PIECE_TOKENS = 256
# While nothing can be computed, whoever aborts is noticed within this time.
_LOOK_AGAIN_S = 0.05


@dataclass
class PrefillJob:
    """One prompt on its way. `cached` leading tokens were in the workspace when it was added, or are arriving there.

    The engine lowers `cached` where fewer arrive.
    """

    request: GenerationRequest
    workspace: Workspace
    cached: int = 0
    order: int = 0
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, int]:
        """Request id and attempt."""
        return self.request.request_id, self.request.attempt

    @property
    def lossy(self) -> int:
        """How many of the cached tokens came from lossy blocks."""
        return max(0, self.cached - self.workspace.exact)

    @property
    def remaining(self) -> int:
        return self.workspace.tokens - self.workspace.filled


@dataclass(frozen=True)
class PrefillDone:
    """A finished prompt: first token of each choice, and survivors waiting in the workspace to be packed.

    `select_s` is the time that selection took at the end, in seconds; what observers took before that is not in it.
    """

    job: PrefillJob
    first: tuple[Sampled | SamplingError, ...]
    survivors: Sequence[LayerSurvivors]
    layout: SnapshotLayout
    report: SelectionReport
    select_s: float

    def pack(self, buffer: Tensor) -> None:
        """Write the snapshot into `buffer` (uint8 [layout.nbytes])."""
        pack_prompt(self.layout, buffer, self.job.workspace, self.survivors)


@dataclass(frozen=True)
class PrefillFailed:
    """A prompt that was computed, but not selected from or sampled; nothing of it is left in the engine."""

    job: PrefillJob
    error: GenerationFailed


PrefillResult = PrefillDone | PrefillFailed


class _Run(NamedTuple):
    """What a step computes of one prompt."""

    job: PrefillJob
    start: int
    tokens: int


class PrefillEngine:
    """Chunked prefill of several prompts at once; `chunk_tokens` bounds the tokens of one step."""

    def __init__(self, model: Model, *, chunk_tokens: int = 1024) -> None:
        self.model = model
        self.chunk_tokens = chunk_tokens
        self.piece_tokens = max(1, min(_PIECE_TOKENS, chunk_tokens // 2))
        self._pace = PrefillPace()
        self._lock = threading.Lock()
        self._running: list[PrefillJob] = []
        self._orders = 0
        self._aborted: set[tuple[str, int]] = set()

    def open_workspace(self, request: GenerationRequest) -> Workspace:
        """Room for a prompt's full KV, with what its recipe has to be shown of the queries.

        Raises `ContextOverflow` naming both numbers, `InvalidRequest` for a recipe that this model cannot meet, and
        `GenerationFailed` where the recipe's policy cannot cope with such a prompt.
        """
        tokens, limit = len(request.prompt), self.model.spec.context_length
        if tokens > limit:
            raise ContextOverflow(
                f"prompt of {tokens} tokens does not fit the context of {limit} tokens", "prompt"
            )
        plan = self._plan(request)
        try:
            watches = open_watches(self.model.spec, plan)
        except Exception as error:  # a policy may be anybody's
            raise _failed(request, error) from error
        return Workspace(self.model.spec, tokens, watches, self.piece_tokens)

    def must_compute(self, request: GenerationRequest) -> int:
        """How many last prompt tokens are computed even if their KV is known: the last one, and what selection reads.

        Cached tokens issue no queries and give no logits, so prompt log-probabilities and all-query scorers need all.
        Raises as `open_workspace`.
        """
        if request.prompt_logprobs is not None:
            return len(request.prompt)
        return self._plan(request).must_compute

    def add(self, job: PrefillJob) -> None:
        """Take a job whose workspace holds `job.cached` tokens, at most all but `must_compute`.

        They may still be on their way there (`Workspace.arrival`): steps wait for them.
        """
        # Of a load that has failed meanwhile, `filled` still tells what was expected; `step` puts it right.
        assert job.cached == job.workspace.filled <= job.workspace.tokens - self.must_compute(job.request)
        assert job.workspace.arrival is None or all(
            watch.observer is None for watch in job.workspace.watches.values()
        ), "an observer must meet every query once"
        with self._lock:
            job.order = self._orders
            self._orders += 1
            self._running.append(job)

    def abort(self, request_id: str, attempt: int) -> None:
        """Forget a job at the next step boundary; unknown ones are ignored (it may just have finished)."""
        with self._lock:
            self._aborted.add((request_id, attempt))

    def fail_all(self) -> list[GenerationRequest]:
        """Forget every job and name them: for a step that raised."""
        with self._lock:
            lost, self._running = [job.request for job in self._running], []
        return lost

    @property
    def queued(self) -> int:
        return len(self._running)

    @property
    def tokens_owed(self) -> int:
        """Tokens still to compute: the load that a router weighs."""
        return sum(job.remaining for job in list(self._running))

    def check(self) -> None:
        """AssertionError unless all jobs are in order and unfinished. For the thread that calls `step`."""
        with self._lock:
            running = list(self._running)
        orders = [job.order for job in running]
        assert orders == sorted(set(orders)), "prompts out of order"
        for job in running:
            assert job.cached <= job.workspace.filled < job.workspace.tokens, (
                f"{job.key} is done, and still here"
            )

    def seconds_for(self, start: int, stop: int) -> float:
        """Estimate of what computing a prompt's tokens from position `start` up to `stop` takes, in seconds."""
        return self._pace.seconds_for(start, stop)

    def step(self) -> list[PrefillResult]:
        """Run one batch of chunks; → the prompts that ended with it.

        Returns at once when there is nothing to do, and soon when all there is waits for a failed load to end.
        """
        with self._lock:
            self._running = [job for job in self._running if job.key not in self._aborted]
            self._aborted.clear()
            running = list(self._running)
        jobs = {job.order: job for job in running if _settled(job)}
        needs = [PrefillNeed(job.order, job.remaining, job.workspace.filled) for job in jobs.values()]
        plan = plan_prefill(needs, self.chunk_tokens, self.piece_tokens)
        if not plan:
            stuck = next((job.workspace.arrival for job in running), None)
            if stuck is not None:
                stuck.wait_ended(_LOOK_AGAIN_S)
            return []
        runs = [
            _Run(jobs[order], jobs[order].workspace.filled, count) for order, count in sorted(plan.items())
        ]
        try:
            logits = self._forward(runs)
        except StepAbandoned:
            return []  # the next step drops its jobs, or takes up what they have
        ended = [run.job for run in runs if run.job.remaining == 0]
        results = [self._result(job, row) for job, row in zip(ended, logits, strict=True)]
        # A prompt that its policy's observer could not cope with: the rest of it need not be computed.
        broken = {
            run.job.order: error for run in runs if run.job.remaining and (error := run.job.workspace.failure)
        }
        results += [
            PrefillFailed(jobs[order], _failed(jobs[order].request, error)) for order, error in broken.items()
        ]
        with self._lock:
            self._running = [job for job in self._running if job.remaining and job.order not in broken]
        return results

    def _forward(self, runs: Sequence[_Run]) -> list[Tensor]:
        """Compute the runs; → last-token logits [1, vocab] of each run that ends its prompt, in order.

        Runs behind a beginning that did not come whole make no progress.
        """
        tokens: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []
        for job, start, count in runs:
            first_wanted = len(tokens) + count - _rows(job, start, count)
            tokens.extend(job.request.prompt[start : start + count])
            positions.extend(range(start, start + count))
            wanted.extend(range(first_wanted, len(tokens)))
        alone = all(job.workspace.arrival is None for job, _, _ in runs)
        port = PrefillPort(
            [(job.workspace, start, count) for job, start, count in runs],
            # A chunk can take a second; a client that leaves frees everything sooner than that.
            lambda: all(job.key in self._aborted or job.workspace.short for job, _, _ in runs),
        )
        began = time.perf_counter()
        logits = self.model.forward(tokens, positions, port, wanted, prompts=True)
        if alone:  # others may have waited for what arrives
            self._pace.note([(start, count) for _, start, count in runs], time.perf_counter() - began)
        ends, at = [], 0
        for job, start, count in runs:
            own = logits[at : at + _rows(job, start, count)]
            at += len(own)
            if job.workspace.short:
                continue
            job.workspace.arrival = None  # every layer was waited for
            job.workspace.filled = start + count
            if job.request.prompt_logprobs is not None:
                self._note_prompt_logprobs(job, own, start)
            if job.remaining == 0:
                ends.append(own[-1:])
        return ends

    def _note_prompt_logprobs(self, job: PrefillJob, logits: Tensor, start: int) -> None:
        """Row i is the distribution of prompt token start+i+1; the first prompt token has none."""
        prompt, top = job.request.prompt, job.request.prompt_logprobs or 0
        if not job.prompt_logprobs:
            job.prompt_logprobs.append(None)
        following = prompt[start + 1 : start + 1 + len(logits)]
        # Not strict: the prompt's last row predicts the first new token.
        for row, token in zip(logits, following, strict=False):
            job.prompt_logprobs.append(token_logprob(row.float().numpy(), token, top))

    def _result(self, job: PrefillJob, logits: Tensor) -> PrefillResult:
        """A policy that cannot cope with one prompt fails that prompt, and not those that share its step."""
        try:
            return self._finish(job, logits)
        except Exception as error:  # noqa: BLE001 - whatever it was, the others have nothing to do with it
            return PrefillFailed(job, _failed(job.request, error))

    def _finish(self, job: PrefillJob, logits: Tensor) -> PrefillDone:
        request, spec = job.request, self.model.spec
        started = time.perf_counter()
        survivors = select_survivors(job.workspace, self._plan(request))
        took = time.perf_counter() - started
        meta = prompt_meta(spec, request.prompt, request.recipe.recipe_id, survivors.layers, survivors.arrays)
        rows = [
            SampleRow(request.sampling, choice, 0, request.prompt, ()) for choice in range(request.sampling.n)
        ]
        first = sample(logits.expand(len(rows), -1), rows, spec.end_tokens)
        return PrefillDone(
            job, tuple(first), survivors.layers, SnapshotLayout(spec, meta), survivors.report, took
        )

    def _plan(self, request: GenerationRequest) -> PromptPlan:
        try:
            return plan_prompt(self.model.spec, request)
        except InvalidRequest:
            raise
        except Exception as error:  # a policy may be anybody's
            raise _failed(request, error) from error


def _settled(job: PrefillJob) -> bool:
    """Whether a job can be computed; its beginning is what has come of it."""
    if not job.workspace.settle():
        return False
    job.cached = min(job.cached, job.workspace.filled)
    return True


def _rows(job: PrefillJob, start: int, count: int) -> int:
    """How many last tokens of a run give logits."""
    if job.request.prompt_logprobs is not None:
        return count
    return int(start + count == job.workspace.tokens)


def _failed(request: GenerationRequest, error: Exception) -> GenerationFailed:
    """What a prompt's client hears of an error in its policy; the log has the rest."""
    _log.error("the prompt of %s failed", request.request_id, exc_info=error)
    return GenerationFailed(f"prefill failed: {type(error).__name__}: {error}")


def run_to_end(engine: PrefillEngine) -> Iterator[PrefillDone]:
    """Step until nothing is left, for callers that add nothing in between. Raises a prompt's `GenerationFailed`."""
    while engine.queued:
        for result in engine.step():
            if isinstance(result, PrefillFailed):
                raise result.error
            yield result
