"""What is known of a prompt's parts: named spans, the chat template's tail, and lines of code found by their text."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from policies.recipe_checks import Range, merge

_LONGEST_LINE = 400
_LONGEST_SIGNATURE = 48

_WORDS = (
    r"(?:(?:public|private|protected|internal|static|final|abstract|virtual|inline|constexpr|explicit|override|extern|"
    r"export|default|async|unsafe|pub(?:\([a-z ]*\))?|sealed|readonly|open|suspend|synchronized|template\s*+<[^<>]*>)"
    r"\s++)"
)

# White space is taken whole (possessively): no line makes the search go back over every way of splitting it.
_STRUCTURAL = re.compile(
    "|".join(
        (
            # Python, Ruby, Scala; then Rust, Go, Swift, Kotlin, JavaScript
            rf"{_WORDS}*def\s++[\w.?!]+\s*+[(\[:].*",
            rf"{_WORDS}*(?:fn|func|fun|function)\s*+\*?\s*+(?:\([^()]*\)\s*+)?[\w$.]*+\s*+[(<\[].*",
            # types: they end in what opens their body, or stand alone above it
            rf"{_WORDS}*class\s++\w+\s*+(?:\(.*)?:\s*+(?:#.*)?",
            rf"{_WORDS}*(?:class|struct|enum|union|interface|trait|impl|namespace|module|record|object|protocol)\b[^;]*\{{.*",
            r"type\s++\w+(?:\[[^\[\]]*\])?\s++(?:struct|interface)\b.*",
            rf"{_WORDS}*type\s++\w+(?:<[^<>]*>)?\s*+=.*",
            # imports
            r"from\s++[\w.]+\s++import\s++[\w.*(].*",
            r"import\s++(?:static\s++)?[\w.]+(?:\.\*)?(?:\s++as\s++\w+)?(?:\s*+,\s*+[\w.]+(?:\s++as\s++\w+)?)*\s*+;?\s*+(?:#.*|//.*)?",
            r"import\s++(?:type\s++)?(?:[\"'({*].*|\w+\s*+(?:,\s*+\{.*\}\s*+)?from\s*+[\"'].*)",
            r"(?:pub\s++)?use\s++\w+(?:::.*)?;",
            r"(?:package|using|mod|pub mod)\s++[\w.:=\s]++;",
            r"#\s*+(?:include\s*+[<\"]|define\s++\w|if(?:n?def)?\s|endif\b|pragma\s).*",
            # decorators and annotations, with nothing behind them
            r"@[A-Za-z_][\w.]*(?:\(.*)?",
            r"#\[\w.*\]",
            r"template\s*+<.*>",
            # functions bound to a name; C, C++, Java, C#: types, a name, parameters, and an opening brace or more lines
            rf"{_WORDS}*(?:const|let|var)\s++[\w$]+\s*+=\s*+(?:async\s*+)?(?:function\b|\([^()]*\)\s*+(?::[^=]*)?=>|[\w$]+\s*+=>).*",
            rf"{_WORDS}++[\w<>\[\],.:*&?\s]*[\w~]\([^;]*[{{(,;)]\s*+",
            r"(?!(?:else|if|for|while|switch|return|catch|do|try|new|throw|case)\b)"
            r"[A-Za-z_][\w:<>,*&\[\]]*(?:\s++[\w:<>,*&\[\]~]++)+\([^;{}]*\)[\w\s]*\{",
        )
    )
)


@dataclass(frozen=True)
class PromptMap:
    """The parts of one prompt of `tokens` tokens.

    spans: name -> [start, stop), for instance "system" and "question"; tail: last tokens, which the chat template adds
    after the question; pieces: text of every token, in order, None where nobody needs it.
    """

    tokens: int
    spans: Mapping[str, Range] = field(default_factory=dict)
    tail: int = 0
    pieces: Sequence[str] | None = None

    def __post_init__(self) -> None:
        assert all(0 <= start <= stop <= self.tokens for start, stop in self.spans.values()), self.spans
        assert 0 <= self.tail <= self.tokens and (self.pieces is None or len(self.pieces) == self.tokens)


def structural_ranges(pieces: Sequence[str]) -> tuple[Range, ...]:
    """Tokens on lines of code that define or import something, their indentation included: [start, stop), ascending.

    pieces: text of every token in order. A line counts by its form alone, in the manner of a dozen common languages
    (definitions, types, imports, decorators, and the further lines of a signature up to its closing bracket): prose has
    no such lines. Linear in the text.
    """
    starts = list(accumulate((len(piece) for piece in pieces), initial=0))
    found = []
    for start, stop in _structural_lines("".join(pieces)):
        # The token that reaches into the line's first character, and the one that holds its last.
        first = bisect_right(starts, start) - 1
        last = bisect_right(starts, stop - 1) - 1
        found.append((first, last + 1))
    return merge(found)


def _structural_lines(text: str) -> Iterator[Range]:
    """Characters [start, stop) of structural lines, without their ends of line."""
    start, open_brackets, signature_lines = 0, 0, 0
    for line in text.splitlines(keepends=True):
        content = line.rstrip()
        inside = open_brackets > 0 and signature_lines < _LONGEST_SIGNATURE
        if content and len(content) <= _LONGEST_LINE and (inside or _STRUCTURAL.fullmatch(content.lstrip())):
            open_brackets = max(0, (open_brackets if inside else 0) + _brackets(content))
            signature_lines = signature_lines + 1 if inside else 0
            yield (start, start + len(content))
        elif content:
            open_brackets = 0
        start += len(line)


def _brackets(line: str) -> int:
    """How many more round or square brackets a line opens than it closes."""
    return sum(line.count(mark) for mark in "([") - sum(line.count(mark) for mark in ")]")
