"""Log-probabilities in the two shapes that OpenAI's endpoints have."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from deployments.api.card import ModelCard
from engine.request import TokenEvent, TokenLogprob

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def chat_logprobs(card: ModelCard, events: Iterable[TokenEvent], top: int) -> list[dict[str, object]]:
    """One entry per token of a chat choice, with `top` alternatives."""
    entries: list[dict[str, object]] = []
    for event in events:
        assert event.logprob is not None, "progress.py checks that asked-for log-probabilities are there"
        entry = _chat_entry(card, event.logprob.token_id, event.logprob.logprob)
        entry["top_logprobs"] = [_chat_entry(card, *pair) for pair in event.logprob.top[:top]]
        entries.append(entry)
    return entries


def _chat_entry(card: ModelCard, token_id: int, logprob: float) -> dict[str, object]:
    raw = card.token_bytes(token_id)
    return {"token": card.token_label(token_id), "logprob": max(logprob, LOWEST), "bytes": list(raw)}


class CompletionLogprobs:
    """The arrays of one completions choice: `tokens`, `token_logprobs`, `top_logprobs`, `text_offset`.

    `text_offset` counts characters from the start of the choice's text (of the echoed prompt where there is
    one); a token in the middle of a character has the offset of that character. `take` returns what came
    since the last `take`, so one object serves a whole answer and a stream.
    """

    def __init__(self, card: ModelCard, top: int) -> None:
        self._card = card
        self._top = top
        self._offset = 0
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._clear()

    def _clear(self) -> None:
        self._tokens: list[str] = []
        self._logprobs: list[float | None] = []
        self._tops: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add_prompt(
        self, ids: Sequence[int], logprobs: Sequence[TokenLogprob | None], prefix_tokens: int
    ) -> None:
        """An echoed prompt. The first `prefix_tokens` stand for no text of the user's and get no width."""
        for i, (token_id, logprob) in enumerate(zip(ids, logprobs, strict=True)):
            self._add(token_id, logprob, wide=i >= prefix_tokens)

    def add(self, events: Iterable[TokenEvent]) -> None:
        """Generated tokens, in order."""
        for event in events:
            self._add(event.token_id, event.logprob, wide=True)

    def take(self) -> dict[str, object]:
        """The arrays since the last call."""
        taken: dict[str, object] = {
            "tokens": self._tokens,
            "token_logprobs": self._logprobs,
            "top_logprobs": self._tops if self._top else None,
            "text_offset": self._offsets,
        }
        self._clear()
        return taken

    def _add(self, token_id: int, logprob: TokenLogprob | None, *, wide: bool) -> None:
        label = self._card.token_label(token_id)
        self._tokens.append(label)
        self._offsets.append(self._offset)
        if wide:
            self._offset += len(self._characters.decode(self._card.token_bytes(token_id)))
        if logprob is None:  # the first token of a prompt has nothing before it
            self._logprobs.append(None)
            self._tops.append(None)
            return
        value = max(logprob.logprob, LOWEST)
        self._logprobs.append(value)
        tops: dict[str, float] = {}
        for other, its in logprob.top[: self._top]:
            tops.setdefault(
                self._card.token_label(other), max(its, LOWEST)
            )  # two ids may read the same: the better
        tops.setdefault(label, value)
        self._tops.append(tops)
