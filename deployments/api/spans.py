"""Where the parts of a prompt are: messages found again in the rendered chat, and tokens in its text.

Nothing here runs for a request whose recipe does not ask: a map is worked out when it is looked at.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from engine.errors import InvalidRequest
from policies.recipe_checks import Range
from policies.spans import PromptMap

NO_MESSAGES = "a text completion has no messages; give [start, stop) token ranges"
REWRITTEN = (
    "this model's chat template rewrites messages, so that they are not found in the prompt; "
    "give [start, stop) token ranges"
)

Message = Mapping[str, str]
"""A message as the template gets it: `role` and `content`."""


class Parts(NamedTuple):
    """Parts of a prompt in tokens. spans: name -> [start, stop); tail: last tokens, behind the question.

    more_system: system messages behind the first ones, which "system" also means. missing: why there are no spans, ""
    where there are.
    """

    spans: Mapping[str, Range]
    tail: int = 0
    more_system: tuple[Range, ...] = ()
    missing: str = ""


class LazyPromptMap(PromptMap):
    """A prompt's map that is worked out when somebody looks: most recipes ask nothing of it."""

    def __init__(self, tokens: int, parts: Callable[[], Parts], pieces: Callable[[], Sequence[str]]) -> None:
        # Not the base's __init__: it would look.
        object.__setattr__(self, "tokens", tokens)
        self.__dict__["_find"] = parts
        self.__dict__["_read"] = pieces

    @property
    def looked_at(self) -> bool:
        """Whether anybody has asked for spans or the tail."""
        return "parts" in self.__dict__

    @cached_property
    def parts(self) -> Parts:
        """Everything that is known of the prompt's parts."""
        found: Parts = self.__dict__["_find"]()
        return found

    @property
    def spans(self) -> Mapping[str, Range]:
        """Name -> [start, stop)."""
        return self.parts.spans

    @property
    def tail(self) -> int:
        """Tokens that the template adds behind the question."""
        return self.parts.tail

    @property
    def pieces(self) -> Sequence[str]:
        """Text of every token."""
        read: Sequence[str] = self.__dict__["_read"]()
        return read


def text_map(tokens: int, pieces: Callable[[], Sequence[str]]) -> LazyPromptMap:
    """The map of a prompt without messages."""
    return LazyPromptMap(tokens, lambda: Parts({}, missing=NO_MESSAGES), pieces)


def chat_parts(
    render: Callable[[list[dict[str, str]]], str],
    messages: Sequence[Message],
    text: str,
    offsets: Sequence[Range],
) -> Parts:
    """The parts of a chat that `render` has made `text` of; `offsets` are its tokens' characters [start, stop).

    "system" is the contents of the system messages, "question" that of the last user message; the tail is what follows
    the question where nothing else was said after it.
    """
    placed = _place(render, messages, text)
    if placed is None:
        return Parts({}, missing=REWRITTEN)
    tokens = _Tokens(offsets)
    found = [None if chars is None else tokens.of(chars) for chars in placed]
    spans: dict[str, Range] = {}
    system = _indices(messages, "system")
    lead = [i for place, i in enumerate(system) if i == place]  # those that open the chat are one span
    first = _hull([found[i] for i in lead or system[:1]])
    if first is not None:
        spans["system"] = first
    more = [span for i in system[max(1, len(lead)) :] if (span := found[i]) is not None]
    users = _indices(messages, "user")
    question = found[users[-1]] if users else None
    if question is None:
        return Parts(spans, more_system=tuple(more), missing="" if spans else REWRITTEN)
    spans["question"] = question
    said_last = users[-1] == max(i for i, message in enumerate(messages) if message["content"])
    return Parts(spans, len(offsets) - question[1] if said_last else 0, tuple(more))


def _indices(messages: Sequence[Message], role: str) -> list[int]:
    return [i for i, message in enumerate(messages) if message["role"] == role and message["content"]]


def _hull(ranges: Sequence[Range | None]) -> Range | None:
    known = [each for each in ranges if each is not None]
    if not known or len(known) < len(ranges):
        return None
    return min(start for start, _ in known), max(stop for _, stop in known)


def _place(
    render: Callable[[list[dict[str, str]]], str], messages: Sequence[Message], text: str
) -> list[Range | None] | None:
    """Characters of each message's content in `text`, None for one that was rewritten; None if nothing is certain.

    A content may well occur in the template's own words ("user"), so we do not search for it: the template is rendered
    once more with marks in the contents' places, and what stands between the marks must stand in `text` too.
    """
    nonce = f"zq{secrets.token_hex(8)}"
    marked = [
        {**message, "content": f"{nonce}{i:06d}z" if message["content"] else ""}
        for i, message in enumerate(messages)
    ]
    try:
        skeleton = render(marked)
    except InvalidRequest:  # it refuses messages by what they say
        return None
    literal, *rest = re.split(f"{nonce}([0-9]{{6}})z", skeleton)
    if not text.startswith(literal):
        return None
    at = len(literal)
    placed: list[Range | None] = [None] * len(messages)
    for number, behind in zip(map(int, rest[::2]), rest[1::2], strict=True):
        content = messages[number]["content"]
        length = _length_at(text, at, content, behind)
        if length is None:
            # Rewritten, as an answer without its reasoning: it ends where the template's next words begin.
            stop = text.find(behind, at) if behind else len(text)
            if stop < 0:
                return None
            at = stop + len(behind)
        else:
            placed[number] = (at, at + length)
            at += length + len(behind)
    return placed if at == len(text) else None


def _length_at(text: str, at: int, content: str, behind: str) -> int | None:
    """Characters of `content`, perhaps stripped by the template, at a place of `text` before `behind`."""
    for form in (content, content.strip(), content.rstrip(), content.lstrip()):
        if text.startswith(form, at) and text.startswith(behind, at + len(form)):
            return len(form)
    return None


class _Tokens:
    """Characters to tokens."""

    def __init__(self, offsets: Sequence[Range]) -> None:
        self._stops = [stop for _, stop in offsets]
        # Some tokenizers trim white space off their offsets: it belongs to the token that ends behind it.
        before = [0, *self._stops]
        self._starts = [min(start, stop) for (start, _), stop in zip(offsets, before, strict=False)]

    def of(self, chars: Range) -> Range | None:
        """Tokens that have characters of a range; None for none (the tokenizer dropped them)."""
        first, stop = bisect_right(self._stops, chars[0]), bisect_left(self._starts, chars[1])
        return (first, stop) if first < stop else None
