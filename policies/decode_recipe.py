"""Decode recipes: which tokens leave a sequence's cache while it is generated, as plain checked data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from policies import recipe_checks as checks
from policies.recipe_checks import MAX_KERNEL, MAX_SINKS, MAX_TOKENS, MAX_WINDOW, Check, RecipeError

DECODE_OPTIONS: dict[str, tuple[str, ...]] = {
    "grow": (),
    "h2o": ("budget", "recent", "every", "normalize", "sinks"),
    "scissorhands": ("budget", "window", "recent", "every", "threshold", "sinks"),
    "streaming_llm": ("budget", "sinks"),
    "sliding_window": ("budget",),
    "tova": ("budget", "sinks"),
    "snapkv": ("budget", "window", "kernel", "pool", "every", "sinks"),
}
"""Decode rule -> the fields that it reads. Any other field is refused for it."""

DECODE_DEFAULTS: dict[str, dict[str, int | float | str]] = {
    "grow": {},
    "h2o": {"recent": 0.5, "every": 1, "normalize": "visible_count"},
    "scissorhands": {"window": 400, "recent": 10, "threshold": "uniform"},
    "streaming_llm": {},
    "sliding_window": {"sinks": 0},
    "tova": {},
    "snapkv": {"window": 32, "kernel": 13, "pool": "avg", "every": 128},
}

SLOT_RULES = ("streaming_llm", "sliding_window")
"""Rules whose keys may be turned to their slot: what they keep is one run of tokens after the sinks."""

_MAX_EVERY = 1 << 16

_CHECKS: dict[str, Check] = {
    "budget": checks.whole(1, MAX_TOKENS),
    "recent": checks.tokens_or_fraction(MAX_TOKENS),
    "window": checks.whole(1, MAX_WINDOW),
    "every": checks.whole(1, _MAX_EVERY),
    "normalize": checks.one_of("visible_count", "none"),
    "threshold": checks.threshold("uniform", "now"),
    "kernel": checks.whole(1, MAX_KERNEL, odd=True),
    "pool": checks.one_of(*checks.POOLS),
    "sinks": checks.whole(0, MAX_SINKS),
}


@dataclass(frozen=True, eq=False)
class DecodeRecipe:
    """One way of forgetting while decoding. Always valid and canonical: `RecipeError` ("decode.…") otherwise.

    rule: name in `policies.decoding.RULES`; "grow" evicts nothing.
    budget: tokens cached per kv head of a full-attention layer, the newest included; None: what the prompt's
        selection left each head (the layer's budget where the prompt came whole).
    recent: newest tokens that stay whatever their score: tokens, or fraction of the cap, rounded down.
    window: snapkv: last queries scored with, and tokens always kept; scissorhands: queries looked back over.
    every: tokens between evictions, and how many go at once; None (scissorhands): half the cap (of a
        `budget` named here, at most 65536).
    normalize: h2o: "visible_count" divides by the queries that saw a key, "none" is the published sum.
    threshold: scissorhands: "uniform" is 1/t with t the keys that a row saw, "now" with the keys cached at the
        compression, a float the percentile of the row.
    kernel, pool: snapkv's pooling over neighbours in the cache.
    sinks: first prompt tokens that never leave; None: the recipe's own (filled in by `Recipe`).

    A field that the rule reads has its default filled in; the others are None.
    """

    rule: str = "grow"
    budget: int | None = None
    recent: int | float | None = None
    window: int | None = None
    every: int | None = None
    normalize: str | None = None
    threshold: str | float | None = None
    kernel: int | None = None
    pool: str | None = None
    sinks: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.rule, str) or self.rule not in DECODE_OPTIONS:
            raise RecipeError("decode.rule", f"unknown rule {self.rule!r:.64}", ", ".join(DECODE_OPTIONS))
        options, defaults = DECODE_OPTIONS[self.rule], DECODE_DEFAULTS[self.rule]
        for name in _FIELDS[1:]:
            value = getattr(self, name)
            if name not in options and value not in (None, defaults.get(name)):
                raise _not_read(name, self.rule)
            value = defaults.get(name) if value is None else _CHECKS[name](f"decode.{name}", value)
            object.__setattr__(self, name, value)
        self._check_budget()

    def _check_budget(self) -> None:
        if self.budget is None:
            return
        if self.rule == "scissorhands" and self.every is None:
            object.__setattr__(self, "every", _half(self.budget))
        held = self.always_kept + (self.sinks or 0)
        if self.budget < held:
            raise RecipeError(
                "decode.budget",
                f"{self.budget} tokens cannot hold the newest {self.always_kept} and {self.sinks or 0} sinks",
                f"at least {held}",
            )

    @property
    def evicts(self) -> bool:
        """Whether anything ever leaves."""
        return self.rule != "grow"

    @property
    def always_kept(self) -> int:
        """Newest tokens that must fit beside the sinks: at least the one just generated."""
        window = self.window if self.rule == "snapkv" else None
        recent = self.recent if isinstance(self.recent, int) else None
        return max(1, window or 0, recent or 0)

    def with_sinks(self, sinks: int) -> DecodeRecipe:
        """The same rule with the recipe's sinks where it names none of its own."""
        fill = self.sinks is None and "sinks" in DECODE_OPTIONS[self.rule]
        return replace(self, sinks=sinks) if fill else self

    def recent_tokens(self, cap: int) -> int:
        """Newest tokens that stay in a head of `cap` tokens."""
        return checks.share(self.recent or 0, cap)

    def text(self, sinks: int | None = None) -> str:
        """Stable identity inside a recipe's id, for instance "h2o,b512,r0.5,e1"; `sinks` of the recipe go unsaid."""
        if not self.evicts:
            return self.rule
        defaults = DECODE_DEFAULTS[self.rule]
        parts = [self.rule]
        for name, tag in (("budget", "b"), ("window", "w"), ("recent", "r"), ("every", "e"), ("kernel", "k")):
            value = getattr(self, name)
            if value is not None:
                parts.append(f"{tag}{value!r}")
        if self.pool is not None:
            parts.append(self.pool)
        for name, tag in (("normalize", "n-"), ("threshold", "th-")):
            if getattr(self, name) != defaults.get(name):
                parts.append(f"{tag}{getattr(self, name)}")
        if self.sinks != sinks and "sinks" in DECODE_OPTIONS[self.rule]:
            parts.append(f"s{self.sinks}")
        return ",".join(parts)

    def as_fields(self, sinks: int | None = None) -> str | dict[str, object]:
        """JSON form that `make_decode_recipe` takes back; `sinks` of the recipe go unsaid."""
        given: dict[str, object] = {"rule": self.rule}
        defaults = dict(DECODE_DEFAULTS[self.rule])
        if self.rule == "scissorhands" and self.budget is not None:
            defaults["every"] = _half(self.budget)
        for name in DECODE_OPTIONS[self.rule]:
            value, default = getattr(self, name), sinks if name == "sinks" else defaults.get(name)
            if repr(value) != repr(default):  # 1 and 1.0 are different things
                given[name] = value
        return self.rule if len(given) == 1 else given

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DecodeRecipe) and self.text() == other.text()

    def __hash__(self) -> int:
        return hash(self.text())


_FIELDS = tuple(field.name for field in fields(DecodeRecipe))


def _half(budget: int) -> int:
    return max(1, min(budget // 2, _MAX_EVERY))


def make_decode_recipe(given: object) -> DecodeRecipe:
    """From a rule's name, a mapping of fields (None counts as not given), or a `DecodeRecipe`."""
    if isinstance(given, DecodeRecipe):
        return given
    if isinstance(given, str):
        return DecodeRecipe(given)
    if not isinstance(given, Mapping):
        raise RecipeError(
            "decode", f"{given!r:.64} is no rule", 'a rule\'s name, or {"rule": name, "budget": tokens, …}'
        )
    present = {name: value for name, value in given.items() if value is not None}
    rule = present.get("rule", "grow")
    for name in present:
        if name not in _FIELDS:
            raise RecipeError(f"decode.{name}", "unknown field", ", ".join(_FIELDS))
        if isinstance(rule, str) and rule in DECODE_OPTIONS and name not in ("rule", *DECODE_OPTIONS[rule]):
            raise _not_read(name, rule)
    return DecodeRecipe(**present)


def _not_read(name: str, rule: str) -> RecipeError:
    readers = ", ".join(other for other, options in DECODE_OPTIONS.items() if name in options)
    options = ", ".join(DECODE_OPTIONS[rule]) or "no further field"
    return RecipeError(
        f"decode.{name}",
        f"rule {rule!r} has no {name}",
        f"{options} with {rule!r}; {name} with rule {readers}",
    )
