"""Recipes by name: what papers and other code bases do, presets for tasks, and `auto`; and how a request's are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from policies.placement import place_recipe
from policies.recipe import DEFAULT_BUDGET, Recipe, merge_fields
from policies.recipe_checks import RecipeError
from policies.recipe_options import EVERYWHERE, OPTIONS
from policies.spans import PromptMap

LIGHT_FROM = 8192
SNAPKV_FROM = 32768
CAPPED_FROM = 131072
"""Prompt tokens above which `auto` evicts lightly, keeps 4096, and also caps what decoding adds."""


@dataclass(frozen=True)
class NamedRecipe:
    """A recipe with a name. fields: as `make_recipe` takes them; about: what it is for; source: where it comes from."""

    fields: Mapping[str, object]
    about: str
    source: str


_PLAIN_SNAPKV = {"policy": "snapkv", "pool": "max", "kernel": 7, "sinks": 0}
_KVPRESS_SNAPKV = {
    "policy": "snapkv",
    "budget": 0.5,
    "window": 64,
    "kernel": 5,
    "pool": "avg",
    "order": "pool_reduce",
    "sinks": 0,
}

_PARITY = {
    "snapkv:paper": NamedRecipe(
        {**_PLAIN_SNAPKV, "budget": 1024, "window": 32},
        "SnapKV as its repository's LongBench runs are configured (window 32, max pooling of 7; 1024, 2048 or 4096 "
        "tokens), selected per kv head instead of per query head.",
        "arXiv 2404.14469; FasterDecoding/SnapKV e216ddc, experiments/LongBench/config",
    ),
    "snapkv:kvpress": NamedRecipe(
        _KVPRESS_SNAPKV, "SnapKVPress: window 64, average pooling of 5 per query head.", "kvpress 0.5.5"
    ),
    "snapkv:kvcache-factory": NamedRecipe(
        {**_PLAIN_SNAPKV, "budget": 128, "window": 8},
        "SnapKV of the KVCache-Factory runner, per kv head: window 8, max pooling of 7.",
        "KVCache-Factory c97f9d7",
    ),
    "pyramidkv:paper": NamedRecipe(
        {**_PLAIN_SNAPKV, "budget": 2048, "window": 8, "layers": "pyramid", "beta": 20},
        "SnapKV scores with a budget that falls linearly over the layers; the sum is exact, which the published code's "
        "is not.",
        "arXiv 2406.02069; KVCache-Factory c97f9d7",
    ),
    "adakv:paper": NamedRecipe(
        {**_PLAIN_SNAPKV, "budget": 1024, "window": 32, "heads": "ada", "alpha": 0.2},
        "SnapKV scores with a layer's budget shared out among its heads; the sum is exact.",
        "arXiv 2407.11550; AdaKV efe4e2e",
    ),
    "h2o:paper": NamedRecipe(
        {
            "policy": "h2o",
            "budget": 0.2,
            "recent": 0.5,
            "normalize": "none",
            "sinks": 0,
            "decode": {"rule": "h2o", "recent": 0.5, "every": 1, "normalize": "none"},
        },
        "Heavy hitters and newest tokens in equal parts, 20 % of the prompt, plain sums, one eviction a step.",
        "arXiv 2306.14048",
    ),
    "h2o:kvpress": NamedRecipe(
        {"policy": "h2o", "budget": 0.5, "recent": 0, "sinks": 0},
        "ObservedAttentionPress: sums divided by the queries that saw a key, nothing protected, prompt only.",
        "kvpress 0.5.5",
    ),
    "streaming_llm:paper": NamedRecipe(
        {
            "policy": "streaming_llm",
            "budget": 2048,
            "sinks": 4,
            "decode": "streaming_llm",
            "positions": "slot",
        },
        "4 sinks and the newest 2044 tokens at their place in the cache: endless streams in constant memory.",
        "arXiv 2309.17453; streaming-llm 2e50426",
    ),
    "scissorhands:paper": NamedRecipe(
        {
            "policy": "scissorhands",
            "budget": 0.2,
            "window": 400,
            "recent": 10,
            "sinks": 0,
            "decode": {"rule": "scissorhands", "window": 400, "recent": 10},
        },
        "Tokens that the last 400 queries gave less than a uniform share leave, half a cache at once; 5 times smaller.",
        "arXiv 2305.17118 (constants as recalled: no released code evicts)",
    ),
    "tova:paper": NamedRecipe(
        {"policy": "tova", "budget": 512, "recent": 0, "sinks": 0, "decode": "tova"},
        "What the last query attends to, one set for all heads; not even the newest token is safe.",
        "arXiv 2401.06104; TOVA 9c7d09b",
    ),
    "expected_attention:kvpress": NamedRecipe(
        {"policy": "expected_attention", "budget": 0.5, "future": 512, "epsilon": 0.0, "sinks": 4},
        "ExpectedAttentionPress with its defaults. Its leaderboard entry has epsilon 0.01 and heads ada.",
        "arXiv 2510.00636; kvpress 0.5.5",
    ),
    "keydiff:kvpress": NamedRecipe(
        {"policy": "keydiff", "budget": 0.5, "sinks": 0},
        "KeyDiffPress: keys unlike the mean key.",
        "kvpress 0.5.5",
    ),
    "knorm:kvpress": NamedRecipe(
        {"policy": "knorm", "budget": 0.5, "sinks": 0}, "KnormPress: keys of low norm.", "kvpress 0.5.5"
    ),
    "criticalkv:kvpress": NamedRecipe(
        {**_KVPRESS_SNAPKV, "critical": True, "critical_share": 0.5},
        "CriticalKVPress around SnapKVPress; unlike there, the window always stays.",
        "arXiv 2502.03805; kvpress 0.5.5",
    ),
}

_TASKS = {
    "summarize": NamedRecipe(
        {"policy": "snapkv", "budget": 0.4, "heads": "ada", "recent": 128},
        "Summaries draw on the whole text: 40 % stays.",
        "KVCache-Factory at 128 tokens: GovReport keeps 66 % of its score where question answering keeps 96 %",
    ),
    "qa": NamedRecipe(
        {"policy": "snapkv", "budget": 0.15, "heads": "ada"},
        "One question that is in the prompt, near its end: 15 % stays.",
        "KVCache-Factory at 128 tokens: question answering keeps 96.5-99.8 % of its score",
    ),
    "code": NamedRecipe(
        {"policy": "snapkv", "budget": 0.3, "heads": "ada", "recent": 256, "protect": ["code"]},
        "30 % stays, lines that define something are preferred, the last 256 tokens are whole.",
        "KVzap without its recent window loses half of LCC",
    ),
    "chat": NamedRecipe(
        {"policy": "snapkv", "budget": 0.5, "heads": "ada", "recent": 256, "protect": ["system"]},
        "The next question is unknown: half stays, the system prompt and the last turn whole.",
        "own choice: SnapKV with the question withheld loses heavily below one half",
    ),
}

NAMED: Mapping[str, NamedRecipe] = MappingProxyType(
    {
        **_PARITY,
        **_TASKS,
        "auto": NamedRecipe(
            {},
            f"By prompt length: to {LIGHT_FROM} tokens nothing leaves, to {SNAPKV_FROM} half stays, to {CAPPED_FROM} "
            "4096 tokens shared out among the heads, beyond that a capped decode cache too.",
            "own choice",
        ),
    }
)
"""Name -> recipe. The fields of "auto" depend on the prompt: `auto_recipe`."""


def auto_recipe(prompt_tokens: int) -> dict[str, object]:
    """Fields that "auto" stands for, for a prompt of this length."""
    if prompt_tokens <= LIGHT_FROM:
        return {"policy": "full"}
    if prompt_tokens <= SNAPKV_FROM:
        return {"policy": "snapkv", "budget": 0.5}
    fields: dict[str, object] = {"policy": "snapkv", "budget": 4096, "heads": "ada"}
    return fields if prompt_tokens <= CAPPED_FROM else {**fields, "decode": "snapkv"}


def choose_recipe(
    given: Mapping[str, object], prompt: PromptMap, named: Mapping[str, NamedRecipe] = NAMED
) -> Recipe:
    """The recipe of one request, placed on its prompt.

    given: recipe fields (None counts as not given), over those of `named[given["recipe"]]` where it names one.
    `window` may also be the name of a span or a [start, stop) range: its tokens are observed, all behind it is `tail`.
    Else the window ends where the template's tail begins. `protect` becomes `spans` and `structure`; ranges are cut
    to the prompt. Raises `RecipeError` for wrong fields, unknown names, and a token budget too small for what the
    recipe protects of this prompt.
    """
    present = {name: value for name, value in given.items() if value is not None}
    name = present.pop("recipe", None)
    if name is None:
        return place_recipe(present, present, prompt)
    if not isinstance(name, str) or name not in named:
        raise unknown_recipe(name, named)
    if name != "auto":
        return place_recipe(merge_fields(named[name].fields, present), present, prompt)
    base = auto_recipe(prompt.tokens)
    evicting = {field: value for field, value in present.items() if field not in EVERYWHERE}
    if base["policy"] == "full" and evicting and "policy" not in present:
        base = {"policy": "snapkv", "budget": DEFAULT_BUDGET}
        if not evicting.keys() & {"budget", "bands"}:
            # Nothing leaves this prompt, so they have no say; they must be right all the same.
            place_recipe({**base, "budget": 1.0, **evicting}, evicting, prompt)
            return place_recipe({**auto_recipe(prompt.tokens), **_but(present, evicting)}, present, prompt)
    return place_recipe(merge_fields(base, present), present, prompt)


def unknown_recipe(name: object, named: Mapping[str, NamedRecipe]) -> RecipeError:
    """Refusal of a recipe that does not exist."""
    hint = f', but a policy: {{"policy": "{name}"}}' if isinstance(name, str) and name in OPTIONS else ""
    return RecipeError("recipe", f"unknown recipe {name!r:.80}{hint}", ", ".join(named))


def _but(fields: Mapping[str, object], without: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in fields.items() if name not in without}
