"""The fields of the two generating endpoints, as pydantic models, and the OpenAI fields that are refused.

Types are strict: "5" is no number, true is no integer. null always means "not given". Bounds that depend on
the server's settings or on the model are checked in validate.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Len
from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, WrapValidator
from pydantic_core import PydanticCustomError
from pydantic_core.core_schema import ValidatorFunctionWrapHandler

Neutral = dict[str, tuple[object, ...]]
"""Name of an unsupported field to the values that ask for nothing and are therefore let through."""

INT64 = 2**63
MAX_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKENS = 1024
MAX_BIASES = 1024
MAX_SALT_CHARS = 256


def _described(text: str) -> WrapValidator:
    """One sentence for a union, in place of one complaint per member."""

    def validate(value: Any, inner: ValidatorFunctionWrapHandler) -> Any:  # pydantic's own signature
        try:
            return inner(value)
        except ValidationError:
            raise PydanticCustomError("wrong_type", "must be {text}", {"text": text}) from None

    return WrapValidator(validate)


def _read_prompt(value: object) -> str | list[str] | list[int] | list[list[int]]:
    """By hand: a union would try each member on every one of perhaps 100,000 ids and collect all complaints."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and (_all(value, str) or _all(value, int)):
        return value
    if isinstance(value, list) and all(isinstance(part, list) and _all(part, int) for part in value):
        return value
    kinds = "a string, a list of strings, a list of token ids, or a list of lists of token ids"
    raise PydanticCustomError("wrong_type", "must be {kinds}", {"kinds": kinds})


def _all(values: list[object], kind: type) -> bool:
    return all(type(value) is kind for value in values)  # not isinstance: true is no token id


Prompt = Annotated[str | list[str] | list[int] | list[list[int]], PlainValidator(_read_prompt)]
StopText = Annotated[str, Len(1, MAX_STOP_CHARS)]
Stop = Annotated[
    StopText | Annotated[list[StopText], Len(0, MAX_STOPS)],
    _described(f"a string of 1 to {MAX_STOP_CHARS} characters, or a list of up to {MAX_STOPS} such strings"),
]


Kv = Annotated[
    str | dict[str, object], _described("a recipe's name or an object of recipe fields; see /v1/kv/recipes")
]


CacheSalt = Annotated[str, Len(1, MAX_SALT_CHARS)]


class Fields(BaseModel):
    """What all request bodies have in common."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class StreamOptions(Fields):
    """`stream_options`."""

    include_usage: bool | None = Field(default=None, description="Send a last chunk with the usage.")
    include_obfuscation: bool | None = Field(
        default=None, description="Accepted; chunks carry no padding either way."
    )


class Request(Fields):
    """The fields that both endpoints share."""

    model: str = Field(description="A served model's name.")
    stream: bool | None = Field(default=None, description="Answer as server-sent events.")
    stream_options: StreamOptions | None = Field(default=None, description="Only with `stream`.")
    temperature: float | None = Field(default=None, ge=0, le=2, description="0 is greedy; default 1.")
    top_p: float | None = Field(default=None, gt=0, le=1, description="Nucleus; default 1.")
    top_k: int | None = Field(default=None, ge=-1, lt=INT64, description="0 and -1 are off.")
    min_p: float | None = Field(
        default=None, ge=0, le=1, description="Least share of the best token's probability."
    )
    seed: int | None = Field(
        default=None, ge=-INT64, lt=INT64, description="Same seed, same request: same answer."
    )
    stop: Stop | None = Field(default=None, description="Texts that end a choice; not part of it.")
    stop_token_ids: list[int] | None = Field(
        default=None,
        max_length=MAX_STOP_TOKENS,
        description="Tokens that end a choice; not part of its text.",
    )
    ignore_eos: bool | None = Field(default=None, description="Go on past the model's end tokens.")
    max_tokens: int | None = Field(default=None, ge=1, lt=INT64, description="Most tokens per choice.")
    min_tokens: int | None = Field(
        default=None, ge=0, lt=INT64, description="No end before this many tokens."
    )
    n: int | None = Field(default=None, ge=1, description="Choices per prompt.")
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, gt=0, le=10, description="1 is off.")
    logit_bias: dict[str, float] | None = Field(
        default=None, max_length=MAX_BIASES, description="Token id, as a string, to a bias from -100 to 100."
    )
    kv: Kv | None = Field(
        default=None,
        description="Extension: a recipe's name, or its fields (see /v1/kv/recipes), `report` and `at_rest`.",
    )
    cache_salt: CacheSalt | None = Field(
        default=None, description="Extension: a tenant; prompts with different ones share no cached KV."
    )
    user: str | None = Field(default=None, description="Accepted, not used.")
    metadata: dict[str, object] | None = Field(default=None, description="Accepted, not used.")
    store: bool | None = Field(default=None, description="Accepted; nothing is stored.")
    safety_identifier: str | None = Field(default=None, description="Accepted, not used.")
    prompt_cache_key: str | None = Field(
        default=None, description="Accepted, not used: prefixes are found by content."
    )


class TextPart(Fields):
    """One part of a message's content."""

    type: Literal["text"]
    text: str


Content = Annotated[
    str | list[TextPart],
    _described('a string or a list of {"type": "text", "text": ...} parts; only text is supported'),
]


class Message(Fields):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: str | None = Field(default=None, description="Accepted, not used.")


class ChatRequest(Request):
    """POST /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: int | None = Field(
        default=None, ge=1, lt=INT64, description="The newer name of max_tokens."
    )
    logprobs: bool | None = Field(default=None, description="Log-probabilities of the chosen tokens.")
    top_logprobs: int | None = Field(
        default=None, ge=0, le=MAX_LOGPROBS, description="Alternatives per token."
    )
    add_generation_prompt: bool | None = Field(default=None, description="Extension: default true.")
    continue_final_message: bool | None = Field(
        default=None, description="Extension: go on with the last message."
    )


class CompletionRequest(Request):
    """POST /v1/completions."""

    prompt: Prompt
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS, description="Alternatives per token.")
    echo: bool | None = Field(
        default=None, description="Answer with the prompt first; with logprobs also for its tokens."
    )
    best_of: int | None = Field(default=None, ge=1, description="Only the value of n.")


NESTED: dict[str, type[BaseModel]] = {"messages": Message, "stream_options": StreamOptions}
"""Fields whose values have fields of their own."""

_BOTH: Neutral = {
    "functions": (None, []),
    "function_call": (None, "none"),
    "parallel_tool_calls": (None, True, False),
    "response_format": (None, {"type": "text"}),
    "service_tier": (None, "auto", "default"),
    "tools": (None, []),
    "tool_choice": (None, "none"),
    "use_beam_search": (None, False),
}
CHAT_UNSUPPORTED: Neutral = {
    **_BOTH,
    "audio": (None,),
    "best_of": (None, 1),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "documents": (None, []),
    "echo": (None, False),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "reasoning_effort": (None, "none"),
    "suffix": (None, ""),
    "verbosity": (None,),
    "web_search_options": (None,),
}
COMPLETION_UNSUPPORTED: Neutral = {**_BOTH, "suffix": (None, "")}
# Clients send a received assistant message back as it came, with its empty fields.
MESSAGE_UNSUPPORTED: Neutral = {
    "annotations": (None, []),
    "audio": (None,),
    "function_call": (None,),
    "reasoning_content": (None, ""),
    "refusal": (None,),
    "tool_call_id": (None,),
    "tool_calls": (None, []),
}
