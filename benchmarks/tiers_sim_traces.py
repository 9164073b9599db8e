"""Recorded requests as chains of block keys: what the tier simulation replays."""

from __future__ import annotations

import hashlib
import json
import lzma
from pathlib import Path
from typing import NamedTuple

from kv_tiers.keys import BlockKey

_DATA = Path(__file__).parent / "data"
_CONVERSATION = "mooncake_conversation_first_half.jsonl.xz"
_SYNTHETIC = "mooncake_synthetic_first1500.jsonl.xz"
_SESSIONS = "claude_code_sessions_33.jsonl.xz"
_PAUSE_S = 60.0  # between sessions that follow one another


class Request(NamedTuple):
    """`time` in seconds from the start of the trace; `chain` the prompt's blocks."""

    time: float
    chain: tuple[BlockKey, ...]


class Trace(NamedTuple):
    """Requests in the order of time."""

    name: str
    requests: list[Request]

    @property
    def blocks(self) -> int:
        """Blocks asked for."""
        return sum(len(request.chain) for request in self.requests)


def mooncake(name: str) -> Trace:
    """The trace "conversation" or "synthetic": blocks of 512 tokens."""
    keys = _Keys()
    file = {"conversation": _CONVERSATION, "synthetic": _SYNTHETIC}[name]
    return Trace(
        name,
        [
            Request(record["timestamp"] / 1000, tuple(keys.of(number) for number in record["hash_ids"]))
            for record in _records(file)
        ],
    )


def agents(spacing_s: float | None) -> Trace:
    """33 coding sessions, blocks of 64 tokens that no two sessions share.

    One session begins every `spacing_s` seconds; None: one after the other.
    """
    requests: list[Request] = []
    begin = 0.0
    for number, session in enumerate(_records(_SESSIONS)):
        keys = _Keys(number)
        timed = sorted(_requests_of(session["requests"]), key=lambda request: request[0])
        if spacing_s is not None:
            begin = number * spacing_s
        requests += [
            Request(begin + time, tuple(keys.of(number) for number in numbers)) for time, numbers in timed
        ]
        begin = requests[-1].time + _PAUSE_S
    requests.sort(key=lambda request: request.time)
    spacing = "in turn" if spacing_s is None else f"every {spacing_s:.0f} s"
    return Trace(f"agents {spacing}", requests)


def _records(file: str) -> list[dict]:
    with lzma.open(_DATA / file, "rt") as lines:
        return [json.loads(line) for line in lines]


def _requests_of(records: list[dict]) -> list[tuple[float, list[int]]]:
    """A session's requests and those of its sub-agents."""
    found: list[tuple[float, list[int]]] = []
    for record in records:
        if record.get("type") == "subagent":
            found += _requests_of(record["requests"])
        else:
            found.append((record["t"], record["hash_ids"]))
    return found


class _Keys:
    """Keys for the numbers of one scope."""

    def __init__(self, scope: int = 0) -> None:
        self._scope = scope
        self._keys: dict[int, BlockKey] = {}

    def of(self, number: int) -> BlockKey:
        key = self._keys.get(number)
        if key is None:
            # Hashed, as real ones: the directory tells blocks apart by a part of the digest.
            digest = hashlib.sha256(self._scope.to_bytes(16, "big") + number.to_bytes(16, "big")).digest()
            key = self._keys[number] = BlockKey(digest)
        return key
