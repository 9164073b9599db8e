"""`kvtide tiers`: asks a running service about its tiers, and tells it what to do with them."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from deployments.tiers_view import table

ACTIONS = ("pin", "unpin", "prefetch", "evict", "flush")
DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLE = "KVTIDE_API_KEY"

_TIMEOUT_S = 90.0
_WATCH_S = 1.0
_CLEAR = "\x1b[H\x1b[J"

# What was done, and the field of the answer that counts it.
_DONE = {"pin": "pinned", "unpin": "unpinned", "evict": "evicted", "flush": "cleared"}


class ServiceSays(RuntimeError):
    """The service is away or refuses; one line for the user."""


@dataclass(frozen=True)
class TiersCommand:
    """What is asked: `action` None shows the tiers. `fields`: of the request's body."""

    url: str = DEFAULT_URL
    action: str | None = None
    fields: Mapping[str, object] = field(default_factory=dict)
    watch: bool = False
    as_json: bool = False


def make_command(
    words: list[str], fields: Mapping[str, object], *, watch: bool, as_json: bool
) -> TiersCommand:
    """`words`: a URL and an action, in any order, each or none. ValueError for others, or for fields nobody reads."""
    actions = [word for word in words if word in ACTIONS]
    urls = [word for word in words if word not in ACTIONS]
    if len(actions) > 1 or len(urls) > 1:
        raise ValueError(f"one URL and one of {', '.join(ACTIONS)} at most, not {' '.join(words)}")
    action = actions[0] if actions else None
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"{url!r} is no URL (http://…) and not one of {', '.join(ACTIONS)}")
    if action is None and fields:
        raise ValueError(f"{', '.join(sorted(fields))}: what to do? Valid: {', '.join(ACTIONS)}")
    if action is not None and watch:
        raise ValueError(f"--watch shows tiers; it does not go with {action}")
    url = urls[0].rstrip("/").removesuffix("/v1") if urls else DEFAULT_URL
    return TiersCommand(url, action, fields, watch, as_json)


def run(command: TiersCommand, api_key: str | None) -> int:
    """Print what the service answers; → exit status, 1 where a command was not carried out everywhere."""
    key = api_key or os.environ.get(KEY_VARIABLE)
    if command.action is not None:
        answer = call(f"{command.url}/v1/kv/{command.action}", key, command.fields)
        print(json.dumps(answer) if command.as_json else "\n".join(summary(command.action, answer)))
        return 1 if answer.get("not_cleared") or answer.get("unanswered") else 0
    if command.watch:
        _watch(command, key)
    body = call(f"{command.url}/v1/kv/stats", key)
    print(json.dumps(body) if command.as_json else table(body))
    return 0


def call(url: str, key: str | None, body: Mapping[str, object] | None = None) -> dict[str, Any]:
    """The answer to a GET, or to a POST of `body`. Raises ServiceSays."""
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url, data, headers)
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            decoded = json.load(answer)
    except urllib.error.HTTPError as error:
        raise ServiceSays(_refusal(url, error)) from None
    except (OSError, ValueError) as error:  # no connection, no HTTP, no JSON
        reason = getattr(error, "reason", error)
        raise ServiceSays(f"no kvtide answers at {url}: {reason}") from None
    if not isinstance(decoded, dict):
        raise ServiceSays(f"no kvtide answers at {url}: that is other JSON")
    return decoded


def _refusal(url: str, error: urllib.error.HTTPError) -> str:
    try:
        said = str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError, OSError):
        said = f"{error.code} {error.reason}"
    if error.code == 401:
        return f"{url} wants an API key: give api_key=… or set {KEY_VARIABLE}"
    return f"{url} refuses: {said}"


def summary(action: str, answer: Mapping[str, Any]) -> Iterator[str]:
    """What a command did, a line per node."""
    if action == "prefetch":
        yield f"{answer['blocks_loaded']} of {len(answer['blocks'])} blocks in the CPU tier of {answer['node']}"
    for node, tiers in sorted(answer.get(_DONE.get(action, ""), {}).items()):
        counts = ", ".join(f"{blocks} in {tier}" for tier, blocks in tiers.items()) or "nothing"
        yield f"{node}: {_DONE[action]} {counts}"
    if "blocks" in answer:
        known = sum(bool(block["places"]) for block in answer["blocks"])
        yield f"{answer['prompt_tokens']} tokens, {len(answer['blocks'])} blocks, {known} of them in a tier"
    for each in answer.get("not_cleared", []):
        yield f"not cleared: {each['source']}{' ' + each['tier'] if each['tier'] else ''}: {each['reason']}"
    for each in answer.get("unanswered", []):
        yield f"no answer: {each['source']}: {each['reason']}"


def _watch(command: TiersCommand, key: str | None) -> None:
    """Until the user interrupts. A service that is away for a while is waited for."""
    before: dict[str, Any] | None = None
    then = 0.0
    while True:
        try:
            body = call(f"{command.url}/v1/kv/stats", key)
            now = time.monotonic()
            text = json.dumps(body) if command.as_json else table(body, before, now - then)
            before, then = body, now
        except ServiceSays as error:
            before, text = None, str(error)
        print(text if command.as_json else _CLEAR + text, flush=True)
        time.sleep(_WATCH_S)
