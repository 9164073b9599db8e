"""A choice of a running request: its token ids, and what follows from them (text, stop, finish)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from engine.errors import GenerationFailed
from engine.request import FinishReason, GenerationRequest, TokenEvent
from engine.sampler import Sampled, SampleRow, SamplingError
from engine.snapshot import SnapshotLayout
from engine.text import Detokenizer, TextStream, TokenPieces


class Choice:
    """One of a request's `n` continuations. Everything in it is a function of its token ids."""

    def __init__(
        self, request: GenerationRequest, choice: int, pieces: TokenPieces, end_tokens: frozenset[int]
    ) -> None:
        self.request = request
        self.choice = choice
        self.generated: list[int] = []
        self.finish_reason: FinishReason | None = None
        sampling = request.sampling
        self._text = TextStream(Detokenizer(pieces), sampling.stop, min_tokens=sampling.min_tokens)
        own = frozenset() if request.sampling.ignore_eos else end_tokens
        self._ends = own | frozenset(request.sampling.stop_token_ids)

    @property
    def position(self) -> int:
        """Position of the newest token, which is the next step's input."""
        return len(self.request.prompt) + len(self.generated) - 1

    @property
    def tokens(self) -> list[int]:
        """Prompt and generated ids."""
        return [*self.request.prompt, *self.generated]

    def sample_row(self) -> SampleRow:
        return SampleRow(
            self.request.sampling, self.choice, len(self.generated), self.request.prompt, self.generated
        )

    def accept(self, drawn: Sampled | SamplingError) -> TokenEvent:
        """Take the next token; the event carries what may be shown and, at the end, why it ended.

        Raises `GenerationFailed` when there was no token to draw.
        """
        if isinstance(drawn, SamplingError):
            raise GenerationFailed(f"no token can be drawn: {drawn.reason}")
        assert self.finish_reason is None, "a finished choice draws no tokens"
        self.generated.append(drawn.token_id)
        text = ""
        if drawn.token_id in self._ends:
            self.finish_reason = FinishReason.STOP
        else:
            delta = self._text.push(drawn.token_id)
            text = delta.text
            if delta.stopped:
                self.finish_reason = FinishReason.STOP
                return self._event(drawn, text)
        if self.finish_reason is None and len(self.generated) >= self.request.sampling.max_tokens:
            self.finish_reason = FinishReason.LENGTH
        if self.finish_reason is not None:
            last = self._text.flush()
            text += last.text
            if last.stopped:
                self.finish_reason = FinishReason.STOP
        return self._event(drawn, text)

    def _event(self, drawn: Sampled, text: str) -> TokenEvent:
        index = len(self.generated) - 1
        return TokenEvent(self.choice, index, drawn.token_id, text, drawn.logprob, self.finish_reason)


@dataclass(eq=False)
class Pending:
    """Choices that wait for pages, with the snapshot they all start from.

    `buffer` (uint8) is the packed snapshot; `release` is called once, when it has been scattered or is not needed any
    more (it acknowledges a ticket or frees host memory).
    """

    order: int
    choices: Sequence[Choice]
    layout: SnapshotLayout
    buffer: Tensor
    release: Callable[[], None]


@dataclass(eq=False)
class Running:
    """A choice with a row in the page pool; `layout` is the snapshot its positions are counted from."""

    order: int
    choice: Choice
    row: int
    layout: SnapshotLayout
