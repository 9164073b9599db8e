"""Answers of /v1/chat/completions."""

from __future__ import annotations

from deployments.api.answer import Answer, Json
from deployments.api.card import ModelCard
from deployments.api.logprobs import chat_logprobs
from deployments.api.plan import Plan
from engine.request import PromptEvent, TokenEvent


class ChatAnswer(Answer):
    """Chunks: the role, then text (one chunk for all tokens of a batch), then the finish reason by itself."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, card: ModelCard, plan: Plan, created: int) -> None:
        super().__init__(card, plan, created)
        self._tokens: dict[int, list[TokenEvent]] = {}

    def _opening(self, index: int, prompt: int, event: PromptEvent) -> list[Json]:
        return [_chunk_choice(index, {"role": "assistant", "content": ""})]

    def _delta(self, index: int, tokens: list[TokenEvent]) -> list[Json]:
        made: list[Json] = []
        text = "".join(token.text for token in tokens)
        logprobs = self._logprobs(tokens)
        if text or logprobs is not None:
            made.append(_chunk_choice(index, {"content": text}, logprobs))
        finish = tokens[-1].finish_reason
        if finish is not None:
            made.append(_chunk_choice(index, {}, finish=finish.value))
        return made

    def _keep_opening(self, index: int, prompt: int, event: PromptEvent) -> None:
        self._tokens[index] = []

    def _keep(self, index: int, tokens: list[TokenEvent]) -> None:
        self._tokens[index] += tokens

    def _choice(self, index: int) -> Json:
        tokens = self._tokens[index]
        finish = tokens[-1].finish_reason
        assert finish is not None, "progress.py checks that every choice finishes"
        text = "".join(token.text for token in tokens)
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self._logprobs(tokens),
            "finish_reason": finish.value,
        }

    def _logprobs(self, tokens: list[TokenEvent]) -> Json | None:
        if self.plan.logprobs is None:
            return None
        return {"content": chat_logprobs(self.card, tokens, self.plan.logprobs), "refusal": None}


def _chunk_choice(index: int, delta: Json, logprobs: Json | None = None, finish: str | None = None) -> Json:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
