"""Recipes: which tokens of a prompt stay in the decode cache, as plain checked data.

A recipe is part of the key of a survivor set, so equal recipes must have equal ids in every process and
every release: `Recipe.recipe_id` is built from the fields by hand and pinned by a test.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from fractions import Fraction
from math import isfinite

DEFAULT_BUDGET = 1024
"""Tokens kept per kv head by an evicting policy when the recipe names no budget."""

MAX_TOKENS = 2**31 - 1
MAX_WINDOW = 1024
MAX_KERNEL = 255
MAX_SINKS = 1024

POOLS = ("avg", "max")

OPTIONS: dict[str, tuple[str, ...]] = {
    "full": (),
    "snapkv": ("budget", "window", "kernel", "pool", "sinks"),
}
"""Policy name -> the recipe fields that it reads. Any other field is refused for it."""

FieldValue = str | int | float


class RecipeError(ValueError):
    """A recipe was refused. `field` names the offending field, `valid` says in words what it accepts."""

    def __init__(self, field: str, problem: str, valid: str) -> None:
        super().__init__(f"recipe field {field!r}: {problem}; valid: {valid}")
        self.field = field
        self.problem = problem
        self.valid = valid

    def __reduce__(self) -> tuple[type[RecipeError], tuple[str, str, str]]:
        # Crosses process borders inside Ray; the default reduce would call us with the message alone.
        return (type(self), (self.field, self.problem, self.valid))


@dataclass(frozen=True)
class Recipe:
    """One way of choosing survivors. Always valid: the constructor raises `RecipeError` otherwise.

    policy: name in `policies.POLICIES`.
    budget: tokens kept per kv head, window and sinks included (int), or the fraction of the prompt kept
        (float in (0, 1], rounded half up, never fewer than window + sinks). None for "full" only.
    window: last prompt tokens whose queries are scored with; always kept.
    kernel: odd width of the pooling over neighbouring positions, 1 for none. 13 is measured: narrower
        kernels lose digits of pass keys when the tokenizer splits numbers digit by digit.
    pool: "avg" (counts the zero padding at the ends) or "max".
    sinks: first prompt tokens, always kept; 0 reproduces the published SnapKV.

    Fields that the policy does not read keep their defaults, so equal behaviour means equal recipes.
    """

    policy: str = "full"
    budget: int | float | None = None
    window: int = 32
    kernel: int = 13
    pool: str = "avg"
    sinks: int = 4

    def __post_init__(self) -> None:
        _check_policy_and_options(self)
        if OPTIONS[self.policy]:
            _check_values(self)
            _check_budget_holds_protected_tokens(self)

    @property
    def recipe_id(self) -> str:
        """Stable readable identity, for instance "snapkv:b512:w32:k13:avg:s4"; part of survivor keys."""
        if not OPTIONS[self.policy]:
            return self.policy
        # repr keeps 1 (one token) and 1.0 (the whole prompt) apart and round-trips every float.
        return f"{self.policy}:b{self.budget!r}:w{self.window}:k{self.kernel}:{self.pool}:s{self.sinks}"

    def budget_tokens(self, n: int) -> int:
        """Tokens that this recipe keeps per kv head of an `n`-token prompt, at most `n`."""
        assert n >= 0
        if self.budget is None:
            return n
        if isinstance(self.budget, int):
            return min(n, self.budget)
        # Exact arithmetic on the number as written: 0.145 of 100 is 14.5, which rounds up to 15.
        exact = Fraction(repr(self.budget)) * n
        rounded = int(exact + Fraction(1, 2))
        return min(n, max(rounded, self.window + self.sinks))

    def as_fields(self) -> dict[str, FieldValue]:
        """The fields that matter for this policy: `make_recipe(**recipe.as_fields()) == recipe`."""
        values: dict[str, FieldValue] = {"policy": self.policy}
        for name in OPTIONS[self.policy]:
            values[name] = getattr(self, name)
        return values


def make_recipe(**given: object) -> Recipe:
    """Build a recipe from named fields; a field given as None counts as not given.

    An evicting policy without a budget gets `DEFAULT_BUDGET` tokens. Raises `RecipeError` for an unknown
    field or policy, a value out of range, and a field that the policy does not read.
    """
    known = [field.name for field in fields(Recipe)]
    for name in given:
        if name not in known:
            raise RecipeError(name, "unknown field", ", ".join(known))
    present = {name: value for name, value in given.items() if value is not None}
    policy = present.setdefault("policy", "full")
    if not isinstance(policy, str) or policy not in OPTIONS:
        raise _unknown_policy(policy)
    for name in present:
        if name != "policy" and name not in OPTIONS[policy]:
            raise _option_not_read(name, policy)
    if "budget" in OPTIONS[policy]:
        present.setdefault("budget", DEFAULT_BUDGET)
    return Recipe(**present)  # type: ignore[arg-type]  # __post_init__ checks every value's type


def _check_policy_and_options(recipe: Recipe) -> None:
    if not isinstance(recipe.policy, str) or recipe.policy not in OPTIONS:
        raise _unknown_policy(recipe.policy)
    for field in fields(Recipe):
        if field.name == "policy" or field.name in OPTIONS[recipe.policy]:
            continue
        if getattr(recipe, field.name) != field.default:
            raise _option_not_read(field.name, recipe.policy)


def _check_values(recipe: Recipe) -> None:
    _check_budget(recipe.budget)
    _check_int("window", recipe.window, 1, MAX_WINDOW)
    _check_int("sinks", recipe.sinks, 0, MAX_SINKS)
    _check_int("kernel", recipe.kernel, 1, MAX_KERNEL, odd=True)
    if not isinstance(recipe.pool, str) or recipe.pool not in POOLS:
        raise RecipeError("pool", f"{recipe.pool!r} is not a pooling mode", ", ".join(POOLS))


def _check_budget(budget: object) -> None:
    valid = f"a whole number of tokens from 1 to {MAX_TOKENS}, or a fraction of the prompt, 0 < f <= 1.0"
    if type(budget) is int:
        if not 1 <= budget <= MAX_TOKENS:
            raise RecipeError("budget", f"{budget} is out of range", valid)
    elif type(budget) is float:
        if not isfinite(budget) or not 0.0 < budget <= 1.0:
            raise RecipeError("budget", f"{budget} is out of range for a fraction", valid)
    else:
        raise RecipeError("budget", f"{budget!r} is not a number", valid)


def _check_int(name: str, value: object, low: int, high: int, *, odd: bool = False) -> None:
    valid = f"an odd integer from {low} to {high}" if odd else f"an integer from {low} to {high}"
    if type(value) is not int:  # bool is an int to isinstance, and never what the caller meant
        raise RecipeError(name, f"{value!r} is not an integer", valid)
    if not low <= value <= high or (odd and value % 2 == 0):
        raise RecipeError(name, f"{value} is not allowed", valid)


def _check_budget_holds_protected_tokens(recipe: Recipe) -> None:
    protected = recipe.window + recipe.sinks
    if isinstance(recipe.budget, int) and recipe.budget < protected:
        raise RecipeError(
            "budget",
            f"{recipe.budget} tokens cannot hold window {recipe.window} + sinks {recipe.sinks}",
            f"at least {protected} tokens, or a smaller window",
        )


def _unknown_policy(policy: object) -> RecipeError:
    return RecipeError("policy", f"unknown policy {policy!r}", ", ".join(OPTIONS))


def _option_not_read(name: str, policy: str) -> RecipeError:
    readers = ", ".join(other for other, options in OPTIONS.items() if name in options)
    options = ", ".join(OPTIONS[policy]) or "no further field"
    return RecipeError(
        name, f"policy {policy!r} has no {name}", f"{options} with {policy!r}; {name} with policy {readers}"
    )
