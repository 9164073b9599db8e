"""Ids of recipes: stable, readable, different wherever the survivors may differ.

An id is part of the key of a survivor set, so equal recipes must have equal ids in every process and every release:
the text is built from the fields by hand and pinned by a test. What is never left out comes first; every other field
is appended only where it is not the policy's default.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import xxhash

from policies.recipe_options import OPTIONS

if TYPE_CHECKING:
    from policies.recipe import Recipe

_TAGS = (
    ("tail", "t"),
    ("recent", "r"),
    ("group", "g"),
    ("normalize", "n-"),
    ("threshold", "th-"),
    ("future", "f"),
    ("epsilon", "eps"),
    ("seed", "seed"),
)
_SWITCHED_OFF = (("covariance", "no-covariance"), ("value_norm", "no-value-norm"))


def recipe_id(recipe: Recipe) -> str:
    """Identity of a recipe, for instance "snapkv:b512:w32:k13:avg:s4:ada0.2:d=h2o,b512,r0.5,e1"."""
    parts = [recipe.policy]
    if recipe.evicts:
        parts += _selection(recipe)
    if recipe.decode.evicts:
        parts.append(f"d={recipe.decode.text(recipe.sinks)}")
    if recipe.positions != "absolute":
        parts.append(recipe.positions)
    return ":".join(parts)


def _selection(recipe: Recipe) -> list[str]:
    options = OPTIONS[recipe.policy]
    # repr keeps 1 (one token) and 1.0 (the whole prompt) apart and round-trips every float.
    parts = [f"b{recipe.budget}" if isinstance(recipe.budget, str) else f"b{recipe.budget!r}"]
    for name, tag in (("window", "w"), ("kernel", "k"), ("pool", ""), ("sinks", "s")):
        if name in options:
            parts.append(f"{tag}{getattr(recipe, name)}")
    for name, tag in _TAGS:
        value = getattr(recipe, name)
        if name in options and not recipe.is_default(name):
            parts.append(f"{tag}{value}" if isinstance(value, str) else f"{tag}{value!r}")
    parts += [tag for name, tag in _SWITCHED_OFF if name in options and not getattr(recipe, name)]
    if recipe.order == "pool_reduce":
        parts.append("pool-first")
    if recipe.layers == "pyramid":
        parts.append(f"pyramid{recipe.beta}")
    if recipe.bands:
        parts.append("bands" + ",".join(f"{first}-{last}={budget!r}" for first, last, budget in recipe.bands))
    if recipe.heads == "ada":
        parts.append(f"ada{recipe.alpha!r}")
    if recipe.critical:
        parts.append(f"critical{recipe.critical_share!r}")
    if recipe.spans or recipe.structure:
        parts.append(f"p{_ranges_digest(recipe)}")
    return parts


def _ranges_digest(recipe: Recipe) -> str:
    """12 hex digits: two sets of ranges over the same prompt are told apart, keys of prompts cover the rest."""
    numbers = [len(recipe.spans)]
    for start, stop in (*recipe.spans, *recipe.structure):
        numbers += [start, stop]
    return xxhash.xxh64_hexdigest(struct.pack(f"<{len(numbers)}q", *numbers))[:12]
