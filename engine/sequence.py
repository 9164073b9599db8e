"""A choice of a running request: its token ids, and what follows from them (text, stop, finish)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from engine.errors import GenerationFailed
from engine.eviction import RowEviction
from engine.request import FinishReason, GenerationRequest, TokenEvent
from engine.sampler import Sampled, SampleRow, SamplingError, TokenIds
from engine.snapshot import SnapshotLayout, SnapshotMeta
from engine.text import Detokenizer, TextDelta, TextStream, TokenPieces


class Choice:
    """One of a request's `n` continuations. Everything in it is a function of its token ids.

    With `generated` it is the choice that drew these ids elsewhere: its text, stop and finish state are where they were
    after the last of them, and the next event has the next index. Nothing may follow the id that ended it.
    """

    def __init__(
        self,
        request: GenerationRequest,
        choice: int,
        pieces: TokenPieces,
        end_tokens: frozenset[int],
        generated: Sequence[int] = (),
    ) -> None:
        self.request = request
        self.choice = choice
        self.generated = list(generated)
        self.finish_reason: FinishReason | None = None
        sampling = request.sampling
        # Only this penalty reads the prompt, and then for every token: it is converted once.
        penalised = sampling.repetition_penalty != 1
        self._prompt: TokenIds = np.asarray(request.prompt, np.int64) if penalised else request.prompt
        self._text = TextStream(Detokenizer(pieces), sampling.stop, min_tokens=sampling.min_tokens)
        own = frozenset() if sampling.ignore_eos else end_tokens
        self._ends = own | frozenset(sampling.stop_token_ids)
        if self.generated:
            *before, last = self.generated
            assert self._ends.isdisjoint(before), "tokens after an end token"
            ended = last in self._ends
            self._settle(self._text.replay(before if ended else self.generated), ended)

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
            self.request.sampling, self.choice, len(self.generated), self._prompt, self.generated
        )

    def accept(self, drawn: Sampled | SamplingError) -> TokenEvent:
        """Take the next token; the event carries what may be shown and, at the end, why it ended.

        Raises `GenerationFailed` when there was no token to draw.
        """
        if isinstance(drawn, SamplingError):
            raise GenerationFailed(f"no token can be drawn: {drawn.reason}")
        assert self.finish_reason is None, "a finished choice draws no tokens"
        self.generated.append(drawn.token_id)
        ended = drawn.token_id in self._ends
        shown = TextDelta("") if ended else self._text.push(drawn.token_id)
        return self._event(drawn, self._settle(shown, ended))

    def _settle(self, shown: TextDelta, ended: bool) -> str:
        """Finish if the newest token was the last; → all text that may be shown, the end of a finished one included."""
        if shown.stopped:
            self.finish_reason = FinishReason.STOP
            return shown.text
        if not ended and len(self.generated) < self.request.sampling.max_tokens:
            return shown.text
        last = self._text.flush()
        self.finish_reason = FinishReason.STOP if ended or last.stopped else FinishReason.LENGTH
        return shown.text + last.text

    def _event(self, drawn: Sampled, text: str) -> TokenEvent:
        index = len(self.generated) - 1
        return TokenEvent(self.choice, index, drawn.token_id, text, drawn.logprob, self.finish_reason)


def next_position(meta: SnapshotMeta) -> int:
    """Position of the first input of whoever goes on from a snapshot, which is the number of tokens it has the KV of.

    A prompt's snapshot has all of them; one taken later has all but its newest token's.
    """
    return max(meta.prompt_tokens, len(meta.tokens) - 1)


def nothing_to_release() -> None:
    """The snapshot is plain host memory: dropping it frees it."""


@dataclass(eq=False)
class Pending:
    """Choices that wait for `pages` pages, with the snapshot they all start from.

    `buffer` (uint8) is the packed snapshot; `release` is called once, when it has been scattered or is not needed any
    more (it acknowledges a ticket or frees host memory).
    """

    order: int
    choices: Sequence[Choice]
    layout: SnapshotLayout
    buffer: Tensor
    release: Callable[[], None]
    pages: int

    @property
    def request_id(self) -> str:
        return self.choices[0].request.request_id


@dataclass(eq=False)
class Running:
    """A choice with a row in the page pool; `layout` is the snapshot its positions are counted from.

    `position` is that of the next input: the newest token's, or an earlier one's while known tokens are replayed.
    `eviction` is there where the recipe's decode rule evicts.
    """

    order: int
    choice: Choice
    row: int
    layout: SnapshotLayout
    position: int
    eviction: RowEviction | None = None

    @property
    def request_id(self) -> str:
        return self.choice.request.request_id

    @property
    def next_input(self) -> int:
        """Token id at `position`."""
        return self.choice.generated[self.position - len(self.choice.request.prompt)]

    @property
    def replaying(self) -> bool:
        """Whether what follows the next input is known already."""
        return self.position < self.choice.position

    @property
    def fed(self) -> list[int]:
        """Ids up to and with the next input: what a snapshot of the row says."""
        return self.choice.tokens[: self.position + 1]
