"""Checks of recipe fields: each takes a field's name and what was given and returns its one canonical form.

Canonical forms matter because recipes are compared and hashed by their ids: a budget of "64MiB" and one of
"67108864B", bands as a mapping and as tuples, ranges in any order must come to the same recipe.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from itertools import pairwise
from math import isfinite

MAX_TOKENS = 2**31 - 1
MAX_BYTES = 2**50
MAX_WINDOW = 1024
MAX_KERNEL = 255
MAX_SINKS = 1024
MAX_PROTECTED_NAMES = 64

POOLS = ("avg", "max")

Range = tuple[int, int]
"""Tokens [start, stop) of a prompt."""

Band = tuple[int, int, int | float]
"""Layers first … last, both included, and their budget: tokens or fraction of the prompt."""

Check = Callable[[str, object], object]

_UNITS = {"B": 1}
_UNITS |= {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_BYTES = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([A-Za-z]{1,3})")
_LAYERS = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")


class RecipeError(ValueError):
    """A recipe was refused. `field` names the offending field, `valid` says in words what it accepts.

    Fields of the decode rule are named with a dot: "decode.every".
    """

    def __init__(self, field: str, problem: str, valid: str) -> None:
        super().__init__(f"recipe field {field!r}: {problem}; valid: {valid}")
        self.field = field
        self.problem = problem
        self.valid = valid

    def __reduce__(self) -> tuple[type[RecipeError], tuple[str, str, str]]:
        # Crosses process borders inside Ray; the default reduce would call us with the message alone.
        return (type(self), (self.field, self.problem, self.valid))


def whole(low: int, high: int, *, odd: bool = False) -> Check:
    """An integer from `low` to `high`."""
    valid = f"an odd integer from {low} to {high}" if odd else f"an integer from {low} to {high}"

    def check(name: str, value: object) -> int:
        if type(value) is not int:  # bool is an int to isinstance, and never what the caller meant
            raise RecipeError(name, f"{value!r} is not an integer", valid)
        if not low <= value <= high or (odd and value % 2 == 0):
            raise RecipeError(name, f"{value} is not allowed", valid)
        return value

    return check


def number(low: float, high: float) -> Check:
    """A number from `low` to `high`, as float."""
    valid = f"a number from {low} to {high}"

    def check(name: str, value: object) -> float:
        if type(value) not in (int, float):
            raise RecipeError(name, f"{value!r} is not a number", valid)
        assert isinstance(value, int | float)
        if not low <= value <= high:  # false for nan too
            raise RecipeError(name, f"{value} is out of range", valid)
        return float(value) + 0.0  # no -0.0: it would have an id of its own

    return check


def one_of(*choices: str) -> Check:
    """One of these words."""

    def check(name: str, value: object) -> str:
        if not isinstance(value, str) or value not in choices:
            raise RecipeError(name, f"{value!r} is no choice", ", ".join(choices))
        return value

    return check


def switch(name: str, value: object) -> bool:
    """true or false."""
    if type(value) is not bool:
        raise RecipeError(name, f"{value!r} is neither true nor false", "true, false")
    return value


def threshold(*words: str) -> Check:
    """One of these words, or a percentile of the row strictly between 0 and 1."""
    valid = ", ".join([*words, "or a percentile between 0 and 1 (both excluded)"])

    def check(name: str, value: object) -> str | float:
        if isinstance(value, str) and value in words:
            return value
        if type(value) is float and 0.0 < value < 1.0:
            return value
        raise RecipeError(name, f"{value!r} is no threshold", valid)

    return check


def tokens_or_fraction(high: int, low: int = 0) -> Check:
    """A number of tokens (int from `low` to `high`) or a fraction (float in (0, 1])."""
    valid = f"a whole number of tokens from {low} to {high}, or a fraction of the budget, 0 < f <= 1.0"

    def check(name: str, value: object) -> int | float:
        if type(value) is int:
            if low <= value <= high:
                return value
        elif type(value) is float and 0.0 < value <= 1.0:
            return value
        raise RecipeError(name, f"{value!r} is not allowed", valid)

    return check


def budget(name: str, value: object) -> int | float | str:
    """Tokens (int), a fraction of the prompt (float), or bytes as canonical text, "67108864B"."""
    valid = (
        f"a whole number of tokens from 1 to {MAX_TOKENS}, or a fraction of the prompt, 0 < f <= 1.0, "
        'or bytes for all survivors, like "64MiB"'
    )
    if isinstance(value, str):
        match = _BYTES.fullmatch(value)
        size = int(Fraction(match[1]) * _UNITS.get(match[2], 0)) if match else 0
        if not 1 <= size <= MAX_BYTES:
            raise RecipeError(name, f"{value[:64]!r} is no size in bytes", valid)
        return f"{size}B"
    return _tokens_or_share(name, value, valid)


def _tokens_or_share(name: str, value: object, valid: str) -> int | float:
    if type(value) is int:
        if not 1 <= value <= MAX_TOKENS:
            raise RecipeError(name, f"{value} is out of range", valid)
        return value
    if type(value) is float:
        if not isfinite(value) or not 0.0 < value <= 1.0:
            raise RecipeError(name, f"{value} is out of range for a fraction", valid)
        return value
    raise RecipeError(name, f"{value!r} is not a number", valid)


def budget_bytes(text: str) -> int:
    """Bytes of a canonical byte budget."""
    return int(text.removesuffix("B"))


def bands(name: str, value: object) -> tuple[Band, ...]:
    """Layer bands from {"0-1": 1.0, "2-15": 256, "20": 64} or from (first, last, budget) triples, ascending."""
    valid = 'layers and their budgets, like {"0-1": 1.0, "2-15": 256}, without overlap'
    made: list[Band] = []
    for layers, given in _band_items(name, value, valid):
        match = _LAYERS.fullmatch(layers) if isinstance(layers, str) else None
        if match is None:
            raise RecipeError(name, f"{layers!r} names no layers", valid)
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last:
            raise RecipeError(name, f"{layers!r} ends before it starts", valid)
        try:
            made.append((first, last, _tokens_or_share(name, given, valid)))
        except RecipeError as error:
            raise RecipeError(name, f"layers {layers}: {error.problem}", valid) from None
    made.sort(key=lambda band: band[:2])
    for one, following in pairwise(made):
        if following[0] <= one[1]:
            raise RecipeError(name, f"layer {following[0]} is in two bands", valid)
    return tuple(made)


def _band_items(name: str, value: object, valid: str) -> Iterable[tuple[object, object]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple) and all(isinstance(b, list | tuple) and len(b) == 3 for b in value):
        return [(f"{first}-{last}", given) for first, last, given in value]
    raise RecipeError(name, f"{value!r:.64} is no mapping of layers to budgets", valid)


def ranges(name: str, value: object) -> tuple[Range, ...]:
    """Token ranges [start, stop), merged and ascending."""
    if not isinstance(value, list | tuple):
        raise RecipeError(name, f"{value!r:.64} is no list of ranges", "a list of [start, stop) token ranges")
    return merge(token_range(name, one) for one in value)


def token_range(name: str, value: object) -> Range:
    """One range [start, stop) of tokens, not empty."""
    if (
        isinstance(value, list | tuple)
        and len(value) == 2
        and all(type(end) is int for end in value)
        and 0 <= value[0] < value[1] <= MAX_TOKENS
    ):
        return (value[0], value[1])
    raise RecipeError(name, f"{value!r:.64} is no token range", "[start, stop) with 0 <= start < stop")


def protect(name: str, value: object) -> tuple[str | Range, ...]:
    """Names of spans and explicit token ranges; one name may come alone."""
    entries = [value] if isinstance(value, str) else value
    valid = 'a list of "code", span names like "system", and [start, stop) token ranges'
    if not isinstance(entries, list | tuple) or len(entries) > MAX_PROTECTED_NAMES:
        raise RecipeError(name, f"{value!r:.64} is no list of at most {MAX_PROTECTED_NAMES} spans", valid)
    made: list[str | Range] = []
    for entry in entries:
        if isinstance(entry, str):
            if not 0 < len(entry) <= 64:
                raise RecipeError(name, f"{entry!r:.80} is no name of a span", valid)
            made.append(entry)
        else:
            made.append(token_range(name, entry))
    return tuple(dict.fromkeys(made))


def merge(given: Iterable[Range]) -> tuple[Range, ...]:
    """Ranges merged where they overlap or touch, ascending, empty ones left out."""
    made: list[Range] = []
    for start, stop in sorted(given):
        if start >= stop:
            continue
        if made and start <= made[-1][1]:
            made[-1] = (made[-1][0], max(made[-1][1], stop))
        else:
            made.append((start, stop))
    return tuple(made)


def length(given: Iterable[Range]) -> int:
    """Tokens in merged ranges."""
    return sum(stop - start for start, stop in given)


def share(value: int | float, whole_tokens: int) -> int:
    """Tokens of a number that is tokens (int) or a fraction of `whole_tokens` (float), rounded down.

    Exact arithmetic on the number as written: 0.29 of 100 is 29, although 0.29 * 100 is 28.999999999999996.
    """
    return value if isinstance(value, int) else int(Fraction(repr(value)) * whole_tokens)


def as_json(name: str, value: object) -> object:
    """A canonical value as JSON would hold it, in the form that its check takes."""
    if name == "bands":
        assert isinstance(value, tuple)
        return {f"{first}-{last}": given for first, last, given in value}
    return [as_json("", entry) for entry in value] if isinstance(value, tuple) else value
