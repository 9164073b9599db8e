"""What a request is, and what a sequence says while it runs: the values that cross engine and replica borders."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from engine.report import SelectionReport
from kv_tiers.at_rest import AtRest
from policies.recipe import Recipe


class FinishReason(StrEnum):
    """Why a choice ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen. Values are already validated (the gateway names the field of a bad one).

    `temperature` 0 is greedy. `top_k` 0 and `min_p` 0 are off. `logprobs` is None (none wanted) or the number of top
    alternatives wanted beside the chosen token. `seed` is always set: the gateway draws one when the user gives none.
    `stop_token_ids` end a choice and are not part of its text; the model's own end tokens join them, unless
    `ignore_eos` says otherwise.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    n: int = 1
    max_tokens: int = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class GenerationRequest:
    """One request as the engine sees it: token ids in, choices out.

    `prompt_logprobs` is None or the number of top alternatives wanted for every prompt token (`echo` with logprobs).
    `tenant` salts every cache key. `attempt` counts retries: a newer attempt revokes what an older one left behind.
    `deadline_s` bounds queueing plus prefill, in seconds from admission. `report` asks what selection did, with the
    attention mass that it kept (a pass of the prompt's last queries over its keys). `at_rest` other than EXACT lets
    blocks of that codec stand in where no exact one is known: then the answer is not exact, and nothing of what was
    computed behind them is kept.
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    recipe: Recipe = field(default_factory=Recipe)
    tenant: str | None = None
    prompt_logprobs: int | None = None
    attempt: int = 0
    deadline_s: float = 600.0
    report: bool = False
    at_rest: AtRest = AtRest.EXACT


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability (natural log, from the raw logits) of one token and its `top` alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class PromptEvent:
    """First event of a stream: what the prompt cost.

    Of `cached_tokens`, `lossy_tokens` were decoded from lossy blocks.
    `kept_tokens` is the largest number of tokens that any kv head of a full-attention layer kept; `payload_bytes` the
    packed survivors' K and V alone, `shipped_bytes` the whole buffer that decode pulled (0 where nothing was shipped).
    `prompt_logprobs[i]` belongs to prompt token i; the first is None. `report` is what selection did, with the
    attention mass that it kept where the request asked, or where nothing was evicted.
    """

    prompt_tokens: int
    cached_tokens: int
    kept_tokens: int
    payload_bytes: int
    shipped_bytes: int
    recipe_id: str
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    report: SelectionReport | None = None
    lossy_tokens: int = 0


@dataclass(frozen=True)
class TokenEvent:
    """One generated token of one choice.

    `index` counts the choice's tokens from 0. `text` is what may be shown now: held back while it could still become
    part of a stop string or of a split character, so it may be empty or carry earlier tokens' characters.
    """

    choice: int
    index: int
    token_id: int
    text: str
    logprob: TokenLogprob | None = None
    finish_reason: FinishReason | None = None


Event = PromptEvent | TokenEvent
