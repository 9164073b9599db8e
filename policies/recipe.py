"""Recipes: which tokens of a prompt stay in the decode cache, and which leave later, as plain checked data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from fractions import Fraction
from functools import cached_property
from types import MappingProxyType

from policies import recipe_checks as checks
from policies.decode_recipe import SLOT_RULES, DecodeRecipe, make_decode_recipe
from policies.recipe_checks import (
    MAX_KERNEL,
    MAX_SINKS,
    MAX_TOKENS,
    MAX_WINDOW,
    Band,
    Check,
    Range,
    RecipeError,
    merge,
)
from policies.recipe_id import recipe_id as build_recipe_id
from policies.recipe_options import CONDITIONS, DEFAULTS, HISTORY_ONLY, OPTIONS, evicting_options
from policies.recipe_rules import (
    budgets_hold_protected_tokens,
    decode_rule_fits_the_recipe,
    fields_are_read_by_what_is_chosen,
    option_not_read,
    scissorhands_keeps_few_sums,
    unknown_policy,
)

DEFAULT_BUDGET = 1024
"""Tokens kept per kv head by an evicting policy when the recipe names no budget."""

STRUCTURE_SHARE = 0.15
"""Most of a layer's budget that structural tokens may take by being structural."""


@dataclass(frozen=True, eq=False)
class Recipe:
    """One way of choosing survivors. Always valid and canonical: the constructor raises `RecipeError` otherwise.

    policy: name in `policies.POLICIES`.
    budget: tokens kept per kv head of a layer, protected ones included (int); the fraction of the prompt kept (float
        in (0, 1], rounded half up, never fewer than the protected tokens); or the bytes of K and V that all
        survivors of the prompt may take, as text ("64MiB", held as "67108864B"). None for "full" only.
    window: last prompt tokens (before `tail`) whose queries are observed. Always kept, except by scissorhands and
        tova, for which they are the history that is looked back over.
    kernel: odd width of the pooling over neighbouring positions, 1 for none. 13 is measured: narrower
        kernels lose digits of pass keys when the tokenizer splits numbers digit by digit.
    pool: "avg" (counts the zero padding at the ends) or "max".
    sinks: first prompt tokens, always kept; 0 reproduces the published SnapKV.
    tail: prompt tokens after the window, always kept and not observed: the chat template's end.
    recent: last prompt tokens always kept, `tail` included: tokens, or fraction of the layer's budget (rounded down).
        None becomes the policy's default: 0.5 for h2o, 10 for scissorhands, 1 for tova, else 0.
    group, order: how the query heads of a kv head are joined, before or after the pooling.
    normalize: h2o: "visible_count" divides a key's sum by the queries that saw it, "none" does not.
    threshold: scissorhands: "uniform" counts attention below 1/t, a float below that percentile of the row.
    future, epsilon, covariance, value_norm: expected_attention: positions ahead that are averaged over, what is added
        before the value norm multiplies, and whether the two factors take part.
    seed: random.
    critical, critical_share: CriticalKV around any score: the share of the budget that goes by the plain score.
    layers, beta: "pyramid" gives the last layer 1/beta of the mean and the first what that frees.
    bands: (first layer, last layer included, budget) where layers get budgets of their own; others have `budget`.
    heads, alpha: "ada" shares a layer's budget out among its heads; alpha of the budget is each head's own.
    protect: what was asked to be protected: "code", span names, ranges. `policies.named.choose_recipe` turns it
        into `spans` (token ranges that always stay) and `structure` (preferred, within `STRUCTURE_SHARE`).
    decode: what leaves while decoding; positions: "absolute", or "slot" for keys turned to their place in the cache.

    Fields that the policy does not read keep their defaults, so what is not read keeps no two recipes apart. Two
    recipes are equal when all fields are, 1 and 1.0 being different budgets.
    """

    policy: str = "full"
    budget: int | float | str | None = None
    window: int = 32
    kernel: int = 13
    pool: str = "avg"
    sinks: int = 4
    tail: int = 0
    recent: int | float | None = None
    group: str = "mean"
    order: str = "reduce_pool"
    normalize: str = "visible_count"
    threshold: str | float = "uniform"
    future: int = 512
    epsilon: float = 0.0
    covariance: bool = True
    value_norm: bool = True
    seed: int = 0
    critical: bool = False
    critical_share: float = 0.5
    layers: str = "uniform"
    beta: int = 20
    bands: tuple[Band, ...] = ()
    heads: str = "uniform"
    alpha: float = 0.2
    protect: tuple[str | Range, ...] = ()
    spans: tuple[Range, ...] = ()
    structure: tuple[Range, ...] = ()
    decode: DecodeRecipe = field(default_factory=DecodeRecipe)
    positions: str = "absolute"

    def __post_init__(self) -> None:
        if not isinstance(self.policy, str) or self.policy not in OPTIONS:
            raise unknown_policy(self.policy)
        for name in FIELDS[1:]:
            object.__setattr__(self, name, self._canonical(name))
        object.__setattr__(self, "decode", self.decode.with_sinks(self.sinks))
        fields_are_read_by_what_is_chosen(self)
        decode_rule_fits_the_recipe(self)
        if self.evicts:
            budgets_hold_protected_tokens(self)
        scissorhands_keeps_few_sums(self)
        # Made here, because it travels: a process that unpickles the recipe may not know a user's policy yet.
        _ = self.recipe_id

    def _canonical(self, name: str) -> object:
        """A field's value, checked; the policy's default where the policy does not read it or it was not given."""
        value, default = getattr(self, name), default_of(self.policy, name)
        if name not in OPTIONS[self.policy]:
            if value not in (default, _DEFAULTS[name]):
                raise option_not_read(name, self.policy)
            return default
        return default if value is None and default is not None else CHECKS[name](name, value)

    @cached_property
    def recipe_id(self) -> str:
        """Stable readable identity, for instance "snapkv:b512:w32:k13:avg:s4"; part of survivor keys.

        Covers everything that survivors depend on: `spans` and `structure`, not the `protect` they came from.
        """
        return build_recipe_id(self)

    @property
    def evicts(self) -> bool:
        """Whether the policy may drop prompt tokens."""
        return "budget" in OPTIONS[self.policy]

    @property
    def kept_window(self) -> int:
        """Tokens of the observed window that are always kept (0 where none is observed or kept)."""
        kept = "window" in OPTIONS[self.policy] and self.policy not in HISTORY_ONLY
        return self.window if kept else 0

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a user should be told about this recipe, though it is valid."""
        told = []
        if self.policy in SLOT_RULES and self.sinks == 0:
            told.append(f"policy {self.policy!r} without sinks: {_NO_SINKS}")
        if self.decode.rule in SLOT_RULES and self.decode.sinks == 0:
            told.append(f"decode rule {self.decode.rule!r} without sinks: {_NO_SINKS}")
        return tuple(told)

    def is_default(self, name: str) -> bool:
        """Whether a field has the value that the policy gives it when it is not named."""
        return repr(getattr(self, name)) == repr(default_of(self.policy, name))

    def budget_tokens(self, n: int) -> int:
        """Tokens that a token or fraction budget keeps per kv head of an `n`-token prompt, at most `n`.

        What single layers get is for `policies.budget.plan_budgets` to say, and so is what bytes come to.
        """
        return n if self.budget is None else self.tokens_of(self.budget, n)

    def tokens_of(self, budget: int | float | str, n: int) -> int:
        """As `budget_tokens`, of another budget of the same recipe."""
        assert n >= 0 and not isinstance(budget, str), "bytes depend on the model's shape"
        if isinstance(budget, int):
            return min(n, budget)
        # Exact arithmetic on the number as written: 0.145 of 100 is 14.5, which rounds up to 15.
        rounded = int(Fraction(repr(budget)) * n + Fraction(1, 2))
        return min(n, max(rounded, self.least_tokens(n)))

    def protected_tokens(self, n: int) -> int:
        """Tokens of an `n`-token prompt that any budget must hold: sinks, spans, window and tail, whole `recent`."""
        return checks.length(self._protected(n, self.last_tokens))

    def least_tokens(self, n: int) -> int:
        """The smallest budget that an `n`-token prompt can be given: its protected tokens, and never nothing."""
        return min(n, max(1, self.protected_tokens(n)))

    def protected_ranges(self, n: int, budget: int) -> tuple[Range, ...]:
        """Ranges that survive whatever they score where a kv head keeps `budget` of `n` tokens, merged, ascending.

        At most `budget` tokens if it is at least `protected_tokens(n)`: a `recent` fraction takes what is left.
        """
        last = self.last_tokens
        if isinstance(self.recent, float):
            room = budget - checks.length(self._protected(n, 0))
            last = max(last, min(checks.share(self.recent, budget), room))
        return self._protected(n, last)

    @property
    def last_tokens(self) -> int:
        """Last prompt tokens that any budget must hold; a `recent` fraction is not among them."""
        return max(self.tail + self.kept_window, self.recent if isinstance(self.recent, int) else 0)

    def _protected(self, n: int, last: int) -> tuple[Range, ...]:
        if not self.evicts:
            return ()
        given = [(0, self.sinks), *self.spans, (max(0, n - last), n)]
        return merge((start, min(stop, n)) for start, stop in given)

    def as_fields(self) -> dict[str, object]:
        """The fields that matter for this policy, JSON-able: `make_recipe(**recipe.as_fields()) == recipe`."""
        values: dict[str, object] = {"policy": self.policy}
        for name in OPTIONS[self.policy]:
            if name != "decode" and (name in _ALWAYS_SHOWN or not self.is_default(name)):
                values[name] = checks.as_json(name, getattr(self, name))
        if self.decode.evicts:
            values["decode"] = self.decode.as_fields(self.sinks)
        return values

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Recipe) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self.recipe_id)

    @property
    def _identity(self) -> tuple[object, ...]:
        return (self.recipe_id, self.protect, self.spans, self.structure)


FIELDS = tuple(each.name for each in fields(Recipe))
"""Names of the fields, in order."""

CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        "budget": checks.budget,
        "window": checks.whole(1, MAX_WINDOW),
        "kernel": checks.whole(1, MAX_KERNEL, odd=True),
        "pool": checks.one_of(*checks.POOLS),
        "sinks": checks.whole(0, MAX_SINKS),
        "tail": checks.whole(0, MAX_TOKENS),
        "recent": checks.tokens_or_fraction(MAX_TOKENS),
        "group": checks.one_of("mean", "max"),
        "order": checks.one_of("reduce_pool", "pool_reduce"),
        "normalize": checks.one_of("visible_count", "none"),
        "threshold": checks.threshold("uniform"),
        "future": checks.whole(1, 1 << 20),
        "epsilon": checks.number(0.0, 1e6),
        "covariance": checks.switch,
        "value_norm": checks.switch,
        "seed": checks.whole(0, 2**63 - 1),
        "critical": checks.switch,
        "critical_share": checks.number(0.0, 1.0),
        "layers": checks.one_of("uniform", "pyramid"),
        "beta": checks.whole(1, 1_000_000),
        "bands": checks.bands,
        "heads": checks.one_of("uniform", "ada"),
        "alpha": checks.number(0.0, 1.0),
        "protect": checks.protect,
        "spans": checks.ranges,
        "structure": checks.ranges,
        "decode": lambda name, value: make_decode_recipe(value),
        "positions": checks.one_of("absolute", "slot"),
    }
)
"""Field -> what checks it and makes it canonical."""

_DEFAULTS = {
    each.name: DecodeRecipe() if each.default is MISSING else each.default for each in fields(Recipe)
}
_ALWAYS_SHOWN = ("budget", "window", "kernel", "pool", "sinks")
_NO_SINKS = (
    "full-attention layers lose the thread as soon as the first token leaves (perplexity 5158 against 5.40 with "
    "4 sinks, arXiv 2309.17453)"
)


def default_of(policy: str, name: str) -> object:
    """Value of a field that was not given, for this policy. `recent` is None only where nothing is evicted."""
    own = DEFAULTS.get(policy, {})
    if name == "recent" and name in OPTIONS[policy]:
        return own.get(name, 0)
    return own.get(name, _DEFAULTS[name])


def make_recipe(**given: object) -> Recipe:
    """Build a recipe from named fields; a field given as None counts as not given.

    An evicting policy without a budget gets `DEFAULT_BUDGET` tokens. Raises `RecipeError` for an unknown
    field or policy, a value out of range, and a field that the policy does not read.
    """
    for name in given:
        if name not in FIELDS:
            raise RecipeError(name, "unknown field", ", ".join(FIELDS))
    present = {name: value for name, value in given.items() if value is not None}
    policy = present.setdefault("policy", "full")
    if not isinstance(policy, str) or policy not in OPTIONS:
        raise unknown_policy(policy)
    for name in present:
        if name != "policy" and name not in OPTIONS[policy]:
            raise option_not_read(name, policy)
    filled = {name: default_of(policy, name) for name in OPTIONS[policy]} | present
    if "budget" not in present and "budget" in filled:
        filled["budget"] = DEFAULT_BUDGET
    return Recipe(**filled)  # type: ignore[arg-type]  # the constructor checks every value's type


def merge_fields(base: Mapping[str, object], given: Mapping[str, object]) -> dict[str, object]:
    """Fields of `base` with those of `given` put over them; None in `given` counts as not given.

    What `base` says of fields that no longer matter is dropped: those that a newly named policy does not read, and
    those tied to a choice that `given` changes (`alpha` of `heads`, slot positions of a decode rule, …).
    """
    present = {name: value for name, value in given.items() if value is not None}
    made = {**base, **present}
    policy = made.get("policy", "full")
    options = OPTIONS.get(policy, FIELDS) if isinstance(policy, str) else FIELDS
    rule = made.get("decode", "grow")
    rule = rule.get("rule") if isinstance(rule, Mapping) else rule
    stale = {name for name, (switch, value) in CONDITIONS.items() if made.get(switch, value) != value}
    stale |= {name for name in base if name != "policy" and name not in options}
    stale |= {"positions"} if isinstance(rule, str) and rule not in SLOT_RULES else set()
    stale |= {"bands"} if present.get("layers") == "pyramid" else set()
    return {name: value for name, value in made.items() if name in present or name not in stale}


def register_options(
    policy: str, own: Sequence[str], defaults: Mapping[str, int | float] | None = None
) -> None:
    """Make `policy` a name that recipes accept, reading the fields `own` besides those of every evicting policy.

    ValueError where `own` names no field of `Recipe`. Asking twice with the same answer is fine.
    """
    unknown = [name for name in own if name not in FIELDS]
    if unknown:
        raise ValueError(
            f"{policy}: no such recipe fields: {', '.join(unknown)}; valid: {', '.join(FIELDS[1:])}"
        )
    OPTIONS[policy] = evicting_options(own)
    if defaults:
        DEFAULTS[policy] = MappingProxyType(dict(defaults))
