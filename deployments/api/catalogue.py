"""GET /v1/kv/recipes: what a request's `kv` may say, as this server understands it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from functools import partial

from deployments.api.recipes import AUTO, RecipeBook, plain_recipe
from kv_tiers.at_rest import AtRest
from policies import POLICIES
from policies.decode_recipe import DECODE_DEFAULTS, DECODE_OPTIONS, make_decode_recipe
from policies.decoding import RULES
from policies.recipe import CHECKS, DEFAULT_BUDGET, Recipe, RecipeError
from policies.recipe_checks import as_json
from policies.recipe_options import DEFAULTS, OPTIONS

Json = dict[str, object]

_NOTHING = object()
_PLACES = ", or its place: question, system, or [start, stop)"


def catalogue(book: RecipeBook, codecs: Sequence[str]) -> Json:
    """The endpoint's body: the server's recipes, and every policy, decode rule and field with its valid values.

    `codecs`: of the server's tiers.
    """
    return {
        "default": dict(book.default),
        "recipes": [_recipe(book, name) for name in book.named],
        "policies": {name: _policy(name) for name in POLICIES},
        "decode_rules": {name: _rule(name) for name in DECODE_OPTIONS},
        "fields": {**_own_fields(book, codecs), **_recipe_fields(), **_decode_fields()},
    }


def _recipe(book: RecipeBook, name: str) -> Json:
    named = book.named[name]
    given = dict(named.fields)
    return {
        "name": name,
        "about": named.about,
        "source": named.source,
        "fields": given,
        "recipe_id": None if name == AUTO else plain_recipe(given).recipe_id,
    }


def _policy(name: str) -> Json:
    return {
        "options": list(OPTIONS[name]),
        "defaults": dict(DEFAULTS.get(name, {})),
        "needs": POLICIES[name].needs.name.lower(),
        "about": _about(POLICIES[name]),
    }


def _rule(name: str) -> Json:
    return {
        "options": list(DECODE_OPTIONS[name]),
        "defaults": dict(DECODE_DEFAULTS[name]),
        "about": _about(RULES[name]),
    }


def _about(described: type) -> str:
    """The first paragraph of a class's own docstring in one line."""
    return " ".join(inspect.cleandoc(described.__doc__ or "").split("\n\n")[0].split())


def _own_fields(book: RecipeBook, codecs: Sequence[str]) -> Json:
    """Fields of `kv` that are no fields of a recipe."""
    return {
        "recipe": {"default": None, "valid": ", ".join(book.named)},
        "report": {"default": False, "valid": "true, false"},
        "at_rest": {"default": AtRest.EXACT.label, "valid": ", ".join(codecs)},
        "policy": {"default": None, "valid": ", ".join(OPTIONS)},
    }


def _recipe_fields() -> Json:
    """Defaults where no policy says otherwise, and the valid values in the words with which others are refused."""
    described: Json = {}
    for each in fields(Recipe):
        if each.name not in CHECKS:
            continue
        default = "grow" if each.default is MISSING else as_json(each.name, each.default)
        default = DEFAULT_BUDGET if each.name == "budget" else default
        valid = _words(partial(CHECKS[each.name], each.name, _NOTHING))
        described[each.name] = {
            "default": default,
            "valid": valid + (_PLACES if each.name == "window" else ""),
        }
    return described


def _decode_fields() -> Json:
    described: Json = {"decode.rule": {"default": "grow", "valid": ", ".join(DECODE_OPTIONS)}}
    for rule, options in DECODE_OPTIONS.items():
        for name in options:
            valid = _words(partial(make_decode_recipe, {"rule": rule, name: _NOTHING}))
            described.setdefault(f"decode.{name}", {"default": None, "valid": valid})
    return described


def _words(refuse: Callable[[], object]) -> str:
    """What a check says is valid when it is given what is not."""
    try:
        refuse()
    except RecipeError as error:
        return error.valid
    raise AssertionError("a check takes anything")
