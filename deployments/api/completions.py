"""Answers of /v1/completions."""

from __future__ import annotations

from deployments.api.answer import Answer, Json
from deployments.api.card import ModelCard
from deployments.api.logprobs import CompletionLogprobs
from deployments.api.plan import Plan
from engine.request import FinishReason, PromptEvent, TokenEvent


class CompletionAnswer(Answer):
    """Chunks: the echoed prompt if asked for, then text with the finish reason in its last chunk."""

    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, card: ModelCard, plan: Plan, created: int) -> None:
        super().__init__(card, plan, created)
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._texts: dict[int, list[str]] = {}
        self._finish: dict[int, FinishReason | None] = {}

    def _opening(self, index: int, prompt: int, event: PromptEvent) -> list[Json]:
        self._open_logprobs(index, prompt, event)
        if not self.plan.echo:
            return []
        return [self._part(index, self.plan.echo[prompt], None)]

    def _delta(self, index: int, tokens: list[TokenEvent]) -> list[Json]:
        text = "".join(token.text for token in tokens)
        finish = tokens[-1].finish_reason
        if index in self._logprobs:
            self._logprobs[index].add(tokens)
        elif not text and finish is None:
            return []
        return [self._part(index, text, finish)]

    def _keep_opening(self, index: int, prompt: int, event: PromptEvent) -> None:
        self._open_logprobs(index, prompt, event)
        self._texts[index] = [self.plan.echo[prompt]] if self.plan.echo else []

    def _keep(self, index: int, tokens: list[TokenEvent]) -> None:
        self._texts[index] += [token.text for token in tokens]
        self._finish[index] = tokens[-1].finish_reason
        if index in self._logprobs:
            self._logprobs[index].add(tokens)

    def _choice(self, index: int) -> Json:
        finish = self._finish[index]
        assert finish is not None, "progress.py checks that every choice finishes"
        return self._part(index, "".join(self._texts[index]), finish)

    def _open_logprobs(self, index: int, prompt: int, event: PromptEvent) -> None:
        if self.plan.logprobs is None:
            return
        logprobs = self._logprobs[index] = CompletionLogprobs(self.card, self.plan.logprobs)
        if self.plan.echo:
            assert event.prompt_logprobs is not None, "progress.py checks it"
            ids = self.plan.requests[prompt].prompt
            logprobs.add_prompt(ids, event.prompt_logprobs, self.plan.prefix_tokens)

    def _part(self, index: int, text: str, finish: FinishReason | None) -> Json:
        logprobs = self._logprobs[index].take() if index in self._logprobs else None
        reason = finish.value if finish else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
