"""From a request's bytes to a checked model; every complaint is an `InvalidRequest` that names its field."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import AsyncIterator, Mapping
from typing import NoReturn, TypeVar

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from deployments.api.errors import BodyTooLarge
from deployments.api.schemas import MESSAGE_UNSUPPORTED, NESTED, Neutral
from engine.errors import InvalidRequest

Model = TypeVar("Model", bound=BaseModel)

_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_SHOWN_NAME_CHARS = 64


async def read_body(chunks: AsyncIterator[bytes], declared: str | None, limit: int) -> bytes:
    """The whole body, at most `limit` bytes; `declared` is the Content-Length header, if any."""
    if declared is not None and declared.isdecimal() and int(declared) > limit:
        raise BodyTooLarge(f"The request body has {declared} bytes; at most {limit} are read.")
    parts = bytearray()
    async for chunk in chunks:
        parts += chunk
        if len(parts) > limit:
            raise BodyTooLarge(f"The request body has more than {limit} bytes, the most that are read.")
    return bytes(parts)


def parse_object(raw: bytes) -> dict[str, object]:
    """The JSON object in `raw`. Refuses NaN, Infinity and text that is not Unicode (lone surrogates)."""
    try:
        value = json.loads(raw, parse_constant=_refuse_constant)
    except RecursionError:
        raise InvalidRequest("The request body is nested too deeply.") from None
    except ValueError as error:
        raise InvalidRequest(f"The request body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest("The request body must be a JSON object.")
    if _SURROGATE_ESCAPE.search(raw):  # almost never; only then is the walk worth its time
        _refuse_surrogates(value, "")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _refuse_surrogates(value: object, path: str) -> None:
    """Half of a surrogate pair is no character: no tokenizer takes it and no UTF-8 answer could carry it."""
    if isinstance(value, str):
        if any("\ud800" <= char <= "\udfff" for char in value):
            raise InvalidRequest(
                f"{path or 'a field name'} is not valid Unicode text (lone surrogate).", path or None
            )
    elif isinstance(value, dict):
        for name, item in value.items():
            _refuse_surrogates(name, "")
            _refuse_surrogates(item, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _refuse_surrogates(item, f"{path}[{index}]")


def drop_neutral(fields: Mapping[str, object], unsupported: Neutral, path: str = "") -> dict[str, object]:
    """`fields` without those we do not support but that say "off"; any other value of them is refused."""
    kept: dict[str, object] = {}
    for name, value in fields.items():
        if name not in unsupported:
            kept[name] = value
        elif not any(value == off and type(value) is type(off) for off in unsupported[name]):
            offs = ", ".join(json.dumps(off) for off in unsupported[name])
            raise InvalidRequest(
                f"{path}{name} is not supported; leave it out or send {offs}.", f"{path}{name}"
            )
    return kept


def drop_neutral_in_messages(fields: dict[str, object]) -> dict[str, object]:
    """The same for the messages of a chat: clients send a received one back as it came, with its empty fields."""
    messages = fields.get("messages")
    if not isinstance(messages, list):
        return fields
    kept = [
        drop_neutral(each, MESSAGE_UNSUPPORTED, f"messages[{i}].") if isinstance(each, dict) else each
        for i, each in enumerate(messages)
    ]
    return {**fields, "messages": kept}


def check_model(model: type[Model], fields: Mapping[str, object], known: frozenset[str]) -> Model:
    """`fields` as a `model`. `known` are further names to suggest for a misspelt one."""
    for name in fields:
        if name not in model.model_fields:
            raise _unknown_field(name, sorted(model.model_fields), known)
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise _complaint(model, first) from None


def _unknown_field(name: str, valid: list[str], known: frozenset[str], parent: str = "") -> InvalidRequest:
    """`parent` is the path of the object that has the field, "" for the request itself."""
    name = ascii(name[:_SHOWN_NAME_CHARS])[1:-1]  # it goes into a message and perhaps a log
    path = f"{parent}.{name}" if parent else name
    near = difflib.get_close_matches(name, [*valid, *known], n=3)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    return InvalidRequest(f"Unknown field {path}.{hint} Valid fields: {', '.join(valid)}.", path)


def dotted(loc: tuple[int | str, ...]) -> str:
    """A pydantic location as a path: ("messages", 0, "role") is messages[0].role."""
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _complaint(model: type[BaseModel], first: ErrorDetails) -> InvalidRequest:
    path = dotted(first["loc"])
    if first["type"] == "missing":
        return InvalidRequest(f"{path} is required.", path)
    if first["type"] == "extra_forbidden":
        *parents, name = first["loc"]
        valid_names = sorted(NESTED[str(parents[0])].model_fields)
        return _unknown_field(str(name), valid_names, frozenset(), dotted(tuple(parents)))
    text = first["msg"][:1].lower() + first["msg"][1:]
    valid = valid_range(model, str(first["loc"][0]))
    return InvalidRequest(f"{path}: {text}{'; valid: ' + valid if valid else ''}.", path)


def valid_range(model: type[BaseModel], name: str) -> str:
    """The bounds of a field in words ("from 0 to 2", "above 0, to 1"), "" where it has none."""
    words: list[str] = []
    for bound in model.model_fields[name].metadata:
        if isinstance(bound, Ge):
            words.append(f"from {bound.ge}")
        elif isinstance(bound, Gt):
            words.append(f"above {bound.gt},")
        elif isinstance(bound, Le):
            words.append(f"to {bound.le}")
        elif isinstance(bound, Lt):
            words.append(f"below {bound.lt}")
    return " ".join(words).rstrip(",")
