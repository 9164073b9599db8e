"""Options: described, bounded, parsed from text as `serve run` hands it over, and resolved."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from deployments.cli import parse_options
from deployments.config import AppArgs, cluster_environment, resolve

NUMBERS = {"integer", "number"}


def _bounded(schema: dict) -> bool:
    low = {"minimum", "exclusiveMinimum"} & set(schema)
    high = {"maximum", "exclusiveMaximum"} & set(schema)
    return bool(low and high)


@pytest.mark.parametrize("name", AppArgs.model_fields)
def test_every_option_has_a_description_and_bounds(name):
    schema = AppArgs.model_json_schema()["properties"][name]
    assert schema["description"].endswith(".")
    kinds = schema.get("anyOf", [schema])
    for kind in [*kinds, *(k["additionalProperties"] for k in kinds if "additionalProperties" in k)]:
        assert kind.get("type") not in NUMBERS or _bounded(kind), kind


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("512", 512),
        ("0.25", 0.25),
        ("1", 1),
        ("1.0", 1.0),
        ("1e-1", 0.1),
        (512, 512),
        (0.5, 0.5),
        (1.0, 1.0),
        (1, 1),
    ],
)
def test_a_budget_keeps_tokens_and_fractions_apart(text, value):
    options = AppArgs(policy="snapkv", window=1, sinks=0, kernel=1, budget=text)
    assert options.budget == value and type(options.budget) is type(value)
    again = AppArgs.model_validate(
        json.loads(json.dumps(options.model_dump(mode="json", exclude_unset=True)))
    )
    assert type(again.budget) is type(value)
    assert type(options.recipe.budget) is type(value)


@pytest.mark.parametrize("bad", ["0", "-1", "2.5", "0.0", "nan", "inf", "many", "", True, 0, 1.5, [1]])
def test_a_bad_budget_is_refused_with_what_is_valid(bad):
    with pytest.raises(ValidationError) as refused:
        AppArgs(policy="snapkv", budget=bad)
    (problem,) = refused.value.errors()
    assert problem["loc"] == ("budget",) and "fraction" in problem["msg"]


def test_words_become_typed_options():
    options = parse_options(
        [
            "model=/models/Some Model/", "policy=snapkv", "budget=512", "window=16", "pool=max", "prefill_replicas=2",
            "threads=3", "replica_cpus=0.5", "workspace_gib=1", "cpu_tier_gib=0", "deadline_s=1.5", "max_context=4096",
            'prefill_resources={"prefill": 1}', "api_key=s3cret=x", "served_name=mine",
        ]
    )  # fmt: skip
    assert options.model == "/models/Some Model/" and options.name == "mine"
    assert (options.budget, options.window, options.pool) == (512, 16, "max")
    assert (options.prefill_replicas, options.threads, options.replica_cpus) == (2, 3, 0.5)
    assert (options.workspace_gib, options.cpu_tier_gib, options.deadline_s) == (1.0, 0.0, 1.5)
    assert options.prefill_resources == {"prefill": 1.0} and options.max_context == 4096
    assert options.api_key is not None and options.api_key.get_secret_value() == "s3cret=x"
    assert options.recipe.recipe_id == "snapkv:b512:w16:k13:max:s4"


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["modle=demo"], ["modle", "valid options", "model", "pool_gib"]),
        (["demo"], ["'demo'", "name=value", "valid options"]),
        (["threads=0"], ["threads", "greater than or equal to 1"]),
        (["threads=many"], ["threads", "integer"]),
        (["dtype=float16"], ["dtype", "'bfloat16'", "'float32'"]),
        (["transport=carrier"], ["transport", "'nixl'"]),
        (["prefill_resources={oops"], ["prefill_resources", "JSON"]),
        (['decode_resources={"gpu": -1}'], ["decode_resources", "gpu", "greater than or equal to 0"]),
        (["deadline_s=inf"], ["deadline_s"]),
        (["pool_gib=nan"], ["pool_gib"]),
        (["model="], ["model", "at least 1 character"]),
        (["policy=a", "policy=b"], ["policy", "twice"]),
    ],
    ids=lambda value: " ".join(value) if value and "=" in value[0] else None,
)
def test_a_refusal_names_the_option_and_what_is_valid(words, parts, capsys):
    from deployments.cli import main

    assert main(["config", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("kvtide: ") and said.count("\n") == 1
    for part in parts:
        assert part in said


@pytest.mark.parametrize(
    ("given", "field", "part"),
    [
        ({"policy": "h3o"}, "policy", "full, snapkv"),
        ({"budget": 100}, "budget", "snapkv"),
        ({"policy": "snapkv", "kernel": 4}, "kernel", "odd"),
        ({"policy": "snapkv", "budget": 20}, "budget", "at least 36"),
        ({"policy": "full", "sinks": 2}, "sinks", "snapkv"),
    ],
)
def test_a_default_recipe_that_does_not_fit_names_its_field(given, field, part):
    with pytest.raises(ValidationError) as refused:
        AppArgs(**given)
    message = refused.value.errors()[0]["msg"]
    assert f"{field}: " in message and part in message


@pytest.mark.parametrize(
    ("cores", "options", "threads"),
    [
        (2, {}, 1),
        (16, {}, 8),
        (16, {"prefill_replicas": 2, "decode_replicas": 2}, 4),
        (3, {"prefill_replicas": 4}, 1),
        (2, {"threads": 5}, 5),
    ],
)
def test_cores_are_shared_out_evenly(cores, options, threads):
    assert AppArgs(**options).threads_per_replica(cores) == threads


def test_a_cluster_respects_what_the_user_set(monkeypatch):
    for name in cluster_environment():
        monkeypatch.delenv(name, raising=False)
    assert cluster_environment()["RAY_AUTH_MODE"] == "token"
    assert cluster_environment()["RAY_USAGE_STATS_ENABLED"] == "0"
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "0")
    found = cluster_environment()
    assert (found["RAY_AUTH_MODE"], found["RAY_SERVE_ENABLE_HA_PROXY"]) == ("disabled", "0")
    assert resolve(AppArgs()).environment == found


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("demo", "demo"),
        ("org/Name-1B", "Name-1B"),
        ("/x/folder/", "folder"),
        ("/x/m.Q8.gguf", "m.Q8"),
        ("/", "/"),
    ],
)
def test_the_served_name_follows_the_model(model, name):
    assert AppArgs(model=model).name == name


def test_a_hugging_face_id_is_a_second_name() -> None:
    assert AppArgs(model="org/Name-1B").names == ("Name-1B", "org/Name-1B")
    assert AppArgs(model="org/Name-1B", served_name="mine").names == ("mine", "org/Name-1B")
    for model in ("demo", "/x/folder/", "./x", "~/x.gguf"):
        assert AppArgs(model=model).names == (AppArgs(model=model).name,)


def test_the_context_is_the_models_own_or_less() -> None:
    assert AppArgs().context_length(2048) == 2048
    assert AppArgs(max_context=1024).context_length(2048) == 1024
    with pytest.raises(ValueError, match=r"max_context: 4096 .* 2048"):
        AppArgs(max_context=4096).context_length(2048)


def test_a_request_never_asks_for_more_choices_than_are_decoded_together():
    assert AppArgs(max_sequences=4).api_settings().max_n == 4
    assert AppArgs(max_n=3, max_sequences=4).api_settings().max_n == 3


def test_options_are_frozen():
    with pytest.raises(ValidationError):
        AppArgs().threads = 3
