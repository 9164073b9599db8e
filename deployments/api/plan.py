"""What validate.py makes of a request: the engine's requests and how the answer is to be worded."""

from __future__ import annotations

from dataclasses import dataclass

from engine.request import GenerationRequest


@dataclass(frozen=True)
class Plan:
    """One HTTP request. `requests[p]` is prompt p; choice c of prompt p is the answer's choice `p * n + c`.

    `logprobs` is None or the number of alternatives beside each token. `report` asks what selection did. `echo` holds
    the prompts' texts, or nothing where none is wanted. `prefix_tokens` of every prompt stand for no text of the
    user's.
    """

    answer_id: str
    requests: tuple[GenerationRequest, ...]
    stream: bool = False
    include_usage: bool = False
    logprobs: int | None = None
    report: bool = False
    echo: tuple[str, ...] = ()
    prefix_tokens: int = 0

    @property
    def n(self) -> int:
        """Choices per prompt."""
        return self.requests[0].sampling.n
