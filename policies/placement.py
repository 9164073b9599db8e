"""A recipe's fields put on one prompt: names of spans become token ranges, the window finds its place."""

from __future__ import annotations

from collections.abc import Mapping

from policies import recipe_checks as checks
from policies.recipe import CHECKS, Recipe, make_recipe
from policies.recipe_checks import MAX_WINDOW, Range, RecipeError
from policies.recipe_options import OPTIONS
from policies.recipe_rules import check_protected_fit, scissorhands_keeps_few_sums
from policies.spans import PromptMap, structural_ranges


def place_recipe(fields: Mapping[str, object], given: Mapping[str, object], prompt: PromptMap) -> Recipe:
    """The recipe that `fields` describe, on this prompt; `given` are those of them that the caller named.

    See `policies.named.choose_recipe`, which says what names and ranges mean.
    """
    fields, policy = dict(fields), fields.get("policy", "full")
    if not isinstance(policy, str) or policy not in OPTIONS:
        return make_recipe(**fields)  # refuses, in its own words
    options = OPTIONS[policy]
    placed: dict[str, object] = {
        name: fields.pop(name) for name in ("window", "tail") if name in fields and name in options
    }
    if "window" in options:
        if "window" in placed and "window" not in given:
            placed["window"] = window_as_found(placed["window"], prompt)
        placed = _place_window(placed, prompt)
    if "protect" in options and fields.get("protect") is not None:
        fields |= _resolve_protected(fields, prompt, forgiving="protect" not in given)
    for name in ("spans", "structure"):
        if name in options and fields.get(name) is not None:
            ranges = checks.ranges(name, fields[name])
            fields[name] = checks.merge((start, min(stop, prompt.tokens)) for start, stop in ranges)
    if _stays_whole(fields, prompt.tokens):
        # No window has a say then, and one that is longer than the budget is no mistake.
        for name, value in placed.items():
            CHECKS[name](name, value)
        placed = {}
    try:
        recipe = make_recipe(**fields, **placed)
        _check_fit(recipe, prompt.tokens)
    except RecipeError as error:
        raise _with_hint(error, placed, given, prompt) from None
    return recipe


def window_as_found(window: object, prompt: PromptMap) -> object:
    """A window that no request asked for, as far as this prompt has it: its last tokens, None for none at all."""
    if isinstance(window, str):
        window = prompt.spans.get(window, (0, 0))
    if not isinstance(window, list | tuple):
        return window
    start, stop = window
    stop = min(stop, prompt.tokens)
    return (max(start, stop - MAX_WINDOW), stop) if start < stop else None


def _check_fit(recipe: Recipe, n: int) -> None:
    for name, budget in [("budget", recipe.budget), *(("bands", budget) for _, _, budget in recipe.bands)]:
        if isinstance(budget, int):
            check_protected_fit(recipe, n, budget, name)
    scissorhands_keeps_few_sums(recipe, n)


def _stays_whole(fields: Mapping[str, object], n: int) -> bool:
    budget = fields.get("budget")
    return type(budget) is int and budget >= n and not fields.get("bands")


def _with_hint(
    error: RecipeError, placed: Mapping[str, object], given: Mapping[str, object], prompt: PromptMap
) -> RecipeError:
    """Says what the caller can do about a tail that they did not ask for."""
    if error.field not in ("budget", "bands") or "tail" in given or not placed.get("tail"):
        return error
    if "cannot hold" not in error.problem:
        return error
    what = "the chat template's last" if placed["tail"] == prompt.tail else "what follows the named window:"
    return RecipeError(error.field, f"{error.problem} ({what} {placed['tail']} tokens)", error.valid)


def _place_window(placed: dict[str, object], prompt: PromptMap) -> dict[str, object]:
    """`window` and `tail` as numbers."""
    window = placed.get("window")
    if isinstance(window, int | float) or window is None:
        tail = prompt.tail if prompt.tail < prompt.tokens else 0
        return {"tail": tail, **{name: value for name, value in placed.items() if value is not None}}
    if "tail" in placed:
        raise RecipeError(
            "tail", "the window's place says where the tail begins", "no tail with a named window"
        )
    start, stop = _find("window", window, prompt)
    if stop - start > MAX_WINDOW:
        raise RecipeError(
            "window",
            f"{stop - start} tokens are too many to observe",
            f"a range of at most {MAX_WINDOW} tokens",
        )
    return {"window": stop - start, "tail": prompt.tokens - stop}


def _resolve_protected(
    fields: Mapping[str, object], prompt: PromptMap, *, forgiving: bool
) -> dict[str, object]:
    """`spans` and `structure` that `protect` asks for, with those given besides.

    forgiving: leave out names that this prompt does not have (a preset's "system" where there is none).
    """
    spans = list(checks.ranges("spans", fields.get("spans") or ()))
    structure = list(checks.ranges("structure", fields.get("structure") or ()))
    for entry in checks.protect("protect", fields["protect"]):
        if entry == "code":
            if prompt.pieces is not None:
                structure += structural_ranges(prompt.pieces)
            elif not forgiving:
                raise RecipeError(
                    "protect", "'code' needs the text of every token of the prompt", "spans, ranges"
                )
        elif not isinstance(entry, str):
            spans.append(entry if forgiving else _find("protect", entry, prompt))
        elif entry in prompt.spans or not forgiving:
            spans.append(_find("protect", entry, prompt))
    return {"spans": spans, "structure": structure}


def _find(name: str, wanted: object, prompt: PromptMap) -> Range:
    """Tokens [start, stop) that a name or range stands for, not empty."""
    if isinstance(wanted, str):
        there = ", ".join(span for span, (start, stop) in prompt.spans.items() if start < stop)
        valid = f"spans of this prompt ({there or 'it has none'}), or [start, stop)"
        start, stop = prompt.spans.get(wanted, (0, 0))
        if start == stop:
            raise RecipeError(name, f"this prompt has no span {wanted!r:.80}", valid)
        return (start, stop)
    start, stop = checks.token_range(name, wanted)
    if start >= prompt.tokens:
        raise RecipeError(
            name, f"[{start}, {stop}) lies behind the prompt", f"tokens from 0 to {prompt.tokens - 1}"
        )
    return (start, min(stop, prompt.tokens))
