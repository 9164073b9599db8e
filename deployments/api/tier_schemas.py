"""The bodies of the commands over tiers."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Len
from pydantic import Field

from deployments.api.schemas import CacheSalt, Fields, Message

MAX_TTL_S = 10 * 365 * 86_400

TierName = Literal["cpu", "nvme", "redis"]
Tiers = Annotated[list[TierName], Len(1)]


class PromptBlocks(Fields):
    """Which blocks: the full ones of one prompt, given as a generating request would give it."""

    model: str | None = Field(default=None, description="The served model's name; may be left out.")
    prompt: str | None = Field(default=None, description="As in /v1/completions, but one text only.")
    messages: list[Message] | None = Field(default=None, description="As in /v1/chat/completions.")
    tokens: list[int] | None = Field(default=None, description="Token ids, taken as they are.")
    add_generation_prompt: bool | None = Field(default=None, description="Of `messages`; default true.")
    continue_final_message: bool | None = Field(default=None, description="Of `messages`; default false.")
    cache_salt: CacheSalt | None = Field(default=None, description="The tenant that the prompt is asked for.")


class PinRequest(PromptBlocks):
    """POST /v1/kv/pin."""

    ttl_s: float | None = Field(
        default=None, gt=0, le=MAX_TTL_S, description="Ends the pin after so many seconds; default: never."
    )


class PrefetchRequest(PromptBlocks):
    """POST /v1/kv/prefetch."""

    node: str | None = Field(
        default=None, description="Where to; default: the node that has most of the prompt."
    )


class EvictRequest(PromptBlocks):
    """POST /v1/kv/evict."""

    tiers: Tiers | None = Field(default=None, description="From where; default: all tiers.")


class FlushRequest(Fields):
    """POST /v1/kv/flush."""

    tiers: Tiers | None = Field(default=None, description="Which; default: all tiers.")
