"""What the fields of a recipe must be to each other. Each rule raises `RecipeError` where it is broken."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import TYPE_CHECKING

from policies import recipe_checks as checks
from policies.decode_recipe import SLOT_RULES
from policies.recipe_checks import RecipeError, merge
from policies.recipe_options import CONDITIONS, OPTIONS

if TYPE_CHECKING:
    from policies.recipe import Recipe

MAX_COMING = 64
"""Compressions to come that scissorhands keeps sums for: at 128 dimensions as much memory as a head's bf16 KV."""

MAX_SUMS = 1 << 16
"""Sums per kv head that are no matter, however many compressions they are for."""


def fields_are_read_by_what_is_chosen(recipe: Recipe) -> None:
    """`alpha` needs heads "ada", and so on: a field without effect would make two ids of one behaviour."""
    for name, (switch, value) in CONDITIONS.items():
        if getattr(recipe, switch) != value and not recipe.is_default(name):
            raise RecipeError(
                name, f"not read with {switch} {getattr(recipe, switch)!r}", f"{switch} {value!r}"
            )
    if recipe.bands and recipe.layers == "pyramid":
        raise RecipeError(
            "bands", "layers 'pyramid' gives every layer its budget", "layers 'uniform' with bands"
        )


def decode_rule_fits_the_recipe(recipe: Recipe) -> None:
    """A whole prompt needs a cap of its own, a cap must hold what never leaves, slots need a run of tokens."""
    decode = recipe.decode
    if recipe.positions == "slot" and decode.rule not in SLOT_RULES:
        raise RecipeError(
            "positions",
            f"decode rule {decode.rule!r} has no slot positions: only one run of tokens after the sinks does",
            f"absolute, or a decode rule of {', '.join(SLOT_RULES)}",
        )
    if not decode.evicts:
        return
    if decode.budget is None:
        if not recipe.evicts:
            raise RecipeError(
                "decode.budget",
                f"rule {decode.rule!r} after policy {recipe.policy!r} has no cap",
                "tokens to cache per kv head",
            )
        return
    first = checks.length(merge([(0, decode.sinks or 0), *recipe.spans]))
    held = first + decode.always_kept
    if decode.budget < held:
        raise RecipeError(
            "decode.budget",
            f"{decode.budget} tokens cannot hold {first} sinks and protected tokens and the newest "
            f"{decode.always_kept}",
            f"at least {held}",
        )


def scissorhands_keeps_few_sums(recipe: Recipe, n: int | None = None) -> None:
    """Scissorhands while decoding sums attention for every compression whose window a query falls into, per token.

    Few tokens at once and a long window mean many. n: prompt tokens, where known; caps that depend on them wait until
    then.
    """
    decode = recipe.decode
    if decode.rule != "scissorhands":
        return
    assert decode.window is not None
    caps = list(_known_caps(recipe, n))
    first = checks.length(merge([(0, decode.sinks or 0), *recipe.spans]))
    most = max([MAX_COMING, *(MAX_SUMS // max(caps) for _ in caps[:1])])
    for cap in caps:
        drop = max(1, cap // 2 if decode.every is None else decode.every)
        free = cap + 1 - min(cap, first + decode.recent_tokens(cap))
        coming = ceil(decode.window / min(drop, free))
        if coming > most:
            need = ceil(decode.window / most)
            raise RecipeError(
                "decode.every" if drop <= free else "decode.recent",
                f"{min(drop, free)} tokens at once of {cap}, with a window of {decode.window} queries, need sums for "
                f"{coming} compressions to come",
                f"at least {need} tokens at once"
                if drop <= free
                else f"room for {need} tokens beside sinks, spans and the newest",
            )


def _known_caps(recipe: Recipe, n: int | None) -> Iterator[int]:
    """Tokens that a head may be capped at while decoding, the fewest of any head included, as far as can be told."""
    if recipe.decode.budget is not None:
        yield recipe.decode.budget
        return
    for budget in [recipe.budget, *(budget for _, _, budget in recipe.bands)]:
        if isinstance(budget, float) and n is not None:
            budget = recipe.tokens_of(budget, n)
        if isinstance(budget, int):
            yield budget
            if recipe.heads == "ada" and (n is None or budget < n):
                always = recipe.sinks + recipe.last_tokens if n is None else recipe.least_tokens(n)
                yield max(1, always, checks.share(recipe.alpha, budget))
        elif n is not None:
            yield n  # bytes: no more than that


def budgets_hold_protected_tokens(recipe: Recipe) -> None:
    """Token budgets have room for sinks, window, tail and recent tokens.

    Of spans only a prompt's length says how far they overlap with those: `check_protected_fit` looks at them.
    """
    held = recipe.sinks + recipe.last_tokens
    for name, budget in [("budget", recipe.budget), *(("bands", budget) for _, _, budget in recipe.bands)]:
        if isinstance(budget, int) and budget < held:
            raise _does_not_fit(recipe, name, budget, held)


def check_protected_fit(recipe: Recipe, n: int, budget: int, name: str = "budget") -> None:
    """Raise for a token budget that cannot hold what is always kept of an `n`-token prompt that it would cut."""
    held = recipe.protected_tokens(n)
    if budget < held and budget < n:
        raise _does_not_fit(recipe, name, budget, held)


def _does_not_fit(recipe: Recipe, name: str, budget: int, held: int) -> RecipeError:
    return RecipeError(
        name,
        f"{budget} tokens cannot hold {' + '.join(protected_parts(recipe))}",
        f"at least {held} tokens, or a smaller {_largest_part(recipe)}",
    )


def _largest_part(recipe: Recipe) -> str:
    """What to name smaller: "recent" hides window and tail where it reaches beyond them."""
    if recipe.last_tokens > recipe.kept_window + recipe.tail:
        return "recent"
    return "window" if recipe.kept_window else "protected part"


def protected_parts(recipe: Recipe) -> list[str]:
    """What is always kept, in words with numbers: "window 32", "sinks 4"."""
    last = recipe.kept_window + recipe.tail
    parts = []
    if isinstance(recipe.recent, int) and recipe.recent > last:
        parts.append(f"recent {recipe.recent}")
    else:
        parts += [f"window {recipe.kept_window}"] if recipe.kept_window else []
        parts += [f"tail {recipe.tail}"] if recipe.tail else []
    parts += [f"sinks {recipe.sinks}"] if recipe.sinks else []
    parts += [f"spans {checks.length(recipe.spans)}"] if recipe.spans else []
    return parts


def unknown_policy(policy: object) -> RecipeError:
    """Refusal of a policy that does not exist."""
    return RecipeError("policy", f"unknown policy {policy!r:.80}", ", ".join(OPTIONS))


def option_not_read(name: str, policy: str) -> RecipeError:
    """Refusal of a field that the policy does not read."""
    readers = ", ".join(other for other, options in OPTIONS.items() if name in options)
    options = ", ".join(OPTIONS[policy])
    return RecipeError(
        name, f"policy {policy!r} has no {name}", f"{options} with {policy!r}; {name} with policy {readers}"
    )
