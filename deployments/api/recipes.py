"""The server's recipes: its default, the named ones, and how a request's `kv` field becomes a recipe for one prompt."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from deployments.api.spans import LazyPromptMap
from engine.errors import InvalidRequest
from kv_tiers.at_rest import AtRest
from policies.named import (
    CAPPED_FROM,
    LIGHT_FROM,
    NAMED,
    SNAPKV_FROM,
    NamedRecipe,
    choose_recipe,
    unknown_recipe,
)
from policies.placement import window_as_found
from policies.recipe import FIELDS, Recipe, RecipeError, make_recipe, merge_fields
from policies.recipe_checks import ranges
from policies.spans import PromptMap

AUTO = "auto"
MAX_RANGES = 1024
"""Most ranges of tokens or layers in one field of a request; one per token would keep an engine's thread busy."""

_SERVER = "default"
_SHOWN_PROBLEM_CHARS = 300


@dataclass(frozen=True)
class RecipeBook:
    """Always valid if `make_book` made it.

    named: recipe name -> recipe, presets with the server's changes and additions; default: the recipe of requests that
    name neither a recipe nor a policy, as a request would say it: {"recipe": name, further fields …} or fields alone.
    """

    named: Mapping[str, NamedRecipe] = field(default_factory=lambda: NAMED)
    default: Mapping[str, object] = field(default_factory=lambda: {"recipe": AUTO})

    @property
    def is_auto(self) -> bool:
        """Whether the default depends on the prompt's length."""
        return self.default.get("recipe") == AUTO

    @cached_property
    def default_fields(self) -> Mapping[str, object]:
        """Recipe fields of the default; of an automatic one those that the server sets besides."""
        rest = {name: value for name, value in self.default.items() if name != "recipe" and value is not None}
        name = self.default.get("recipe")
        if name is None or name == AUTO:
            return rest
        if not isinstance(name, str) or name not in self.named:
            raise unknown_recipe(name, self.named)
        return merge_fields(self.named[name].fields, rest)

    @cached_property
    def label(self) -> str:
        """The default in one word: "auto", or its recipe's id (ranges of a prompt not counted)."""
        return AUTO if self.is_auto else plain_recipe(self.default_fields).recipe_id

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """What whoever runs the server should be told about its default."""
        return () if self.is_auto else plain_recipe(self.default_fields).warnings

    def choose(self, given: Mapping[str, object], prompt: LazyPromptMap) -> Recipe:
        """The recipe of one request on its prompt. Raises `RecipeError`.

        given: the request's fields. With "recipe" they go over that recipe, with "policy" they stand alone, and with
        neither they change the server's default.
        """
        present = {name: value for name, value in given.items() if value is not None}
        try:
            recipe = self._choose(present, prompt)
            if "system" in recipe.protect and prompt.parts.more_system:
                spans = [*ranges("spans", present.get("spans") or ()), *prompt.parts.more_system]
                recipe = self._choose({**present, "spans": spans}, prompt)
        except RecipeError as error:
            if error.field in ("protect", "window") and prompt.looked_at and prompt.parts.missing:
                raise RecipeError(
                    error.field, f"{error.problem}: {prompt.parts.missing}", error.valid
                ) from None
            raise
        return recipe

    def _choose(self, present: Mapping[str, object], prompt: PromptMap) -> Recipe:
        if "recipe" in present or "policy" in present:
            return choose_recipe(present, prompt, self.named)
        if not self.is_auto:
            ours = NamedRecipe(self.default_fields, "", "")
            return choose_recipe({**present, "recipe": _SERVER}, prompt, {_SERVER: ours})
        over = dict(self.default_fields)
        if "protect" in over and "protect" not in present:
            over["protect"] = _there(over["protect"], prompt)
        if "window" in over and "window" not in present:
            over["window"] = window_as_found(over["window"], prompt)
        # Fields over "auto" that evict stand on SnapKV: those of ours that no longer matter beside the request's go.
        fields = merge_fields({"policy": "snapkv", **over}, present)
        fields.pop("policy")
        return choose_recipe({**fields, "recipe": AUTO}, prompt, self.named)


def _there(protect: object, prompt: PromptMap) -> object:
    """What the server protects by default, as far as the prompt has it: no request asked for what is missing."""
    entries = [protect] if isinstance(protect, str) else protect
    assert isinstance(entries, list | tuple), "make_book checked it"
    return [
        entry for entry in entries if not isinstance(entry, str) or entry == "code" or entry in prompt.spans
    ]


def make_book(
    recipe: str, fields: Mapping[str, object], recipes: Mapping[str, Mapping[str, object]]
) -> RecipeBook:
    """The book of a server: `recipe` names its default, `fields` go over it, `recipes` change presets or add names.

    A policy among `fields` replaces "auto", which would choose one itself. Raises `RecipeError` about the option or
    field ("recipes.qa.budget") that is wrong.
    """
    named = dict(NAMED)
    for name, given in recipes.items():
        named[name] = _named(name, given)
    alone = recipe == AUTO and fields.get("policy") is not None
    book = RecipeBook(named, dict(fields) if alone else {**fields, "recipe": recipe})
    if not book.is_auto:
        plain_recipe(book.default_fields)
        return book
    for tokens in (1, LIGHT_FROM + 1, SNAPKV_FROM + 1, CAPPED_FROM + 1):
        choose_recipe({**_unplaced(book.default_fields), "recipe": AUTO}, PromptMap(tokens))
    return book


def _named(name: str, given: Mapping[str, object]) -> NamedRecipe:
    if name == AUTO or not 0 < len(name) <= 64:
        raise RecipeError(f"recipes.{name[:64]}", "not a name to give", "1 to 64 characters, but not 'auto'")
    preset = NAMED.get(name)
    fields = (
        merge_fields(preset.fields, given) if preset else {k: v for k, v in given.items() if v is not None}
    )
    try:
        plain_recipe(fields)
    except RecipeError as error:
        raise RecipeError(f"recipes.{name}.{error.field}", error.problem, error.valid) from None
    if preset is None:
        return NamedRecipe(fields, "Set by this server.", "option recipes")
    return NamedRecipe(fields, preset.about, f"{preset.source}; changed by option recipes")


def plain_recipe(fields: Mapping[str, object]) -> Recipe:
    """The recipe of these fields on no prompt in particular: windows without a place, nothing protected by name."""
    return make_recipe(**_unplaced(fields))


def _unplaced(fields: Mapping[str, object]) -> dict[str, object]:
    kept = dict(fields)
    if isinstance(kept.get("window"), str | list | tuple):
        del kept["window"]
    protect = kept.get("protect")
    if isinstance(protect, str | list | tuple):
        entries = [protect] if isinstance(protect, str) else protect
        kept["protect"] = [entry for entry in entries if not isinstance(entry, str)]
    return kept


KV_FIELDS = ("recipe", *FIELDS, "report", "at_rest")
"""What a request's `kv` may have."""


class KvFields(NamedTuple):
    """A request's `kv`: the fields of its recipe, whether it asks for a report, and which blocks may stand in."""

    recipe: dict[str, object]
    report: bool = False
    at_rest: AtRest = AtRest.EXACT


def split_kv(
    kv: Mapping[str, object] | str | None, codecs: Sequence[str] = (AtRest.EXACT.label,)
) -> KvFields:
    """A request's `kv` taken apart; `codecs` are those of the server's tiers. Raises `RecipeError`."""
    if isinstance(kv, str):
        return KvFields({"recipe": kv})
    fields = dict(kv or {})
    for name in fields:
        if name not in KV_FIELDS:
            near = difflib.get_close_matches(name, KV_FIELDS, n=1)
            hint = f", did you mean {near[0]}?" if near else ""
            raise RecipeError(name, f"unknown field{hint}", ", ".join(KV_FIELDS))
    at_rest = fields.pop("at_rest", None)
    if at_rest is not None and (not isinstance(at_rest, str) or at_rest not in codecs):
        raise RecipeError("at_rest", f"no tier keeps blocks as {at_rest!r:.64}", ", ".join(codecs))
    report = fields.pop("report", None)
    if report is not None and type(report) is not bool:
        raise RecipeError("report", f"{report!r:.64} is neither true nor false", "true, false")
    for name in ("spans", "structure", "bands"):
        several = fields.get(name)
        if isinstance(several, list | dict) and len(several) > MAX_RANGES:
            raise RecipeError(name, f"{len(several)} ranges are too many", f"at most {MAX_RANGES}")
    return KvFields(fields, bool(report), AtRest.named(at_rest or AtRest.EXACT.label))


def refusal(error: RecipeError) -> InvalidRequest:
    """A recipe's refusal in the words of the API: the field is named as the request has it."""
    name = f"kv.{error.field[:64]}"
    return InvalidRequest(f"{name}: {error.problem[:_SHOWN_PROBLEM_CHARS]}; valid: {error.valid}.", name)
