"""Options: described, bounded, parsed from text as `serve run` hands it over, and resolved."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from deployments.cli import parse_options
from deployments.config import AppArgs, cluster_environment, resolve
from policies import POLICIES
from policies.recipe_options import OPTIONS

NUMBERS = {"integer", "number"}
SCORER = """
from policies import Needs, Policy

class Loud(Policy):
    needs = Needs.KEYS
    options = ()

    def score(self, layer):
        return layer.values.float().norm(dim=-1)
"""


def _bounded(schema: dict) -> bool:
    low = {"minimum", "exclusiveMinimum"} & set(schema)
    high = {"maximum", "exclusiveMaximum"} & set(schema)
    return bool(low and high)


@pytest.mark.parametrize("name", AppArgs.model_fields)
def test_every_option_has_a_description_and_bounds(name):
    schema = AppArgs.model_json_schema()["properties"][name]
    assert schema["description"].endswith(".")
    kinds = schema.get("anyOf", [schema])
    inner = [kind.get("additionalProperties") for kind in kinds]
    for kind in [*kinds, *(each for each in inner if isinstance(each, dict))]:
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
        ("64MiB", "67108864B"),
        ("1.5 kB", "1500B"),
    ],
)
def test_a_budget_keeps_tokens_and_fractions_apart(text, value):
    options = AppArgs(policy="snapkv", window=1, sinks=0, kernel=1, budget=text)
    assert options.budget == value and type(options.budget) is type(value)
    again = AppArgs.model_validate(
        json.loads(json.dumps(options.model_dump(mode="json", exclude_unset=True)))
    )
    assert type(again.budget) is type(value)
    assert type(options.recipe_book.default_fields["budget"]) is type(value)


@pytest.mark.parametrize("bad", ["0", "-1", "2.5", "0.0", "nan", "inf", "many", "", True, 0, 1.5, [1]])
def test_a_bad_budget_is_refused_with_what_is_valid(bad):
    with pytest.raises(ValidationError) as refused:
        AppArgs(policy="snapkv", budget=bad)
    (problem,) = refused.value.errors()
    assert problem["loc"] == ("budget",) and "fraction" in problem["msg"]


def test_the_default_recipe_is_auto_unless_something_else_is_said():
    assert AppArgs().recipe_book.label == "auto"
    assert AppArgs(recipe="qa", budget=0.1).recipe_book.label == "snapkv:b0.1:w32:k13:avg:s4:ada0.2"
    assert AppArgs(policy="h2o").recipe_book.label == "h2o:b1024:s4"
    assert AppArgs(policy="full").recipe_book.label == "full"
    book = AppArgs(kv={"decode": {"rule": "tova", "budget": 64}}).recipe_book
    assert book.label == "auto" and book.default_fields == {"decode": {"rule": "tova", "budget": 64}}


def test_json_options_come_as_text_or_as_they_are():
    words = ['kv={"heads": "ada"}', 'recipes={"mine": {"policy": "knorm"}}', "recipe=mine", "policy=snapkv"]
    options = parse_options(words)
    assert options.kv == {"heads": "ada"} and options.recipes == {"mine": {"policy": "knorm"}}
    assert options == AppArgs(
        kv={"heads": "ada"}, recipes={"mine": {"policy": "knorm"}}, recipe="mine", policy="snapkv"
    )
    assert options.recipe_book.label == "snapkv:b1024:w32:k13:avg:s4:ada0.2"


@pytest.fixture
def own_scorer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "mine.py").write_text(SCORER)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for known in (POLICIES, OPTIONS, sys.modules):
        for name in ("mine", "mine:Loud"):
            known.pop(name, None)


@pytest.mark.parametrize("text", ["mine:Loud", '["mine:Loud"]'])
def test_a_scorer_of_ones_own_becomes_a_policy(text, own_scorer):
    options = parse_options([f"scorers={text}", "policy=mine:Loud", "budget=64"])
    assert options.scorers == ["mine:Loud"]
    assert options.recipe_book.label == "mine:Loud:b64:s4"


def test_what_a_user_should_know_of_the_default_is_shown():
    assert resolve(AppArgs()).recipe_warnings == ()
    (warning,) = resolve(AppArgs(policy="sliding_window")).recipe_warnings
    assert "without sinks" in warning


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
    assert options.recipe_book.label == "snapkv:b512:w16:k13:max:s4"


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
        (["kv={oops"], ["kv", "JSON"]),
        (["recipes=[1]"], ["recipes", "dictionary"]),
        (['kv={"budget": 5}', "budget=6"], ["kv: budget", "option of its own"]),
        (['kv={"sinks": 5}', "sinks=0", "policy=knorm"], ["kv: sinks", "option of its own"]),
        (['kv={"recipe": "qa"}'], ["kv: recipe", "option of its own"]),
        (["nvme_tier_gib=1", "cpu_tier_gib=0"], ["nvme_tier_gib", "cpu_tier_gib is 0", "above 0"]),
        (["redis_url=redis://h", "cpu_tier_gib=0"], ["redis_url", "cpu_tier_gib is 0"]),
        (["nvme_tier_gib=-1"], ["nvme_tier_gib", "greater than or equal to 0"]),
        (["cpu_tier_folder=tiers"], ["cpu_tier_folder", "'tiers' is not an absolute path"]),
        (["nvme_tier_folder="], ["nvme_tier_folder", "absolute"]),
        (["admission=sometimes"], ["admission", "'second_use'"]),
        (["tier_policy=fifo"], ["tier_policy", "'lru'"]),
        (["tenant_share=0"], ["tenant_share", "greater than 0"]),
        (["scorers=nowhere:Policy"], ["scorers", "nowhere", "package.module:Class"]),
        (["scorers=policies.policy:LayerView"], ["scorers", "no class that implements"]),
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


REDIS_URLS = [
    ("http://user:hunter2@h", "redis://"),
    ("hunter2", "redis://"),
    ("redis://:hunter2@", "no host"),
    ("redis://:hunter2@h:x", "port"),
    ("redis://:hunter2@h:99999", "port"),
    ("redis://[hunter2", "host"),
    ("redis://user:hun/ter2@h", "port"),
    ("redis://:hunter2@h/first", "database number"),
    ("redis://user:p@h/hunter2", "database number"),
    ("redis://:hunter2@h?db=hunter2", "database number"),
    ("redis://:hunter2@h?clutser=1", "clutser"),
    ("redis+cluster://:hunter2@h/3", "database 0"),
    ("unix://:hunter2@", "path of a socket"),
]


@pytest.mark.parametrize(("url", "part"), REDIS_URLS)
def test_a_redis_url_that_is_none_is_refused_without_its_password(url, part, capsys):
    with pytest.raises(ValueError, match="redis_url") as refused:
        parse_options([f"redis_url={url}", "threads=0"])
    said = str(refused.value)
    assert part in said and "hunter2" not in said and "ter2@" not in said


@pytest.mark.parametrize(
    "url",
    [
        "redis://h",
        "redis://:p%40ss@127.0.0.1:7000/1",
        "rediss://user:pw@h?ssl_ca_certs=/on/another/machine.pem",
        "unix:///run/redis.sock?db=2",
        "redis://h?cluster=1",
        "redis+cluster://h:7000",
    ],
)
def test_redis_urls_of_every_kind_are_taken(url):
    given = parse_options([f"redis_url={url}"]).redis_url
    assert given is not None and given.get_secret_value() == url and url not in repr(given)


def test_errors_show_no_secret_that_was_given_beside_the_mistake():
    for words in ({"threads": "x"}, {"cpu_tier_gib": 0}, {"unknown": 1}):
        with pytest.raises(ValidationError) as refused:
            AppArgs(**words, api_key="hunter2", redis_url="redis://:hunter2@h")
        assert "hunter2" not in str(refused.value)


def test_options_of_tiers_that_are_off_are_pointed_out():
    assert resolve(AppArgs(cpu_tier_gib=0.001)).tier_warnings == ()
    options = AppArgs(cpu_tier_gib=0.001, admission="always", redis_tier_gib=2, nvme_tier_folder="/x")
    folder, size, admission = resolve(options).tier_warnings
    assert folder.startswith("nvme_tier_folder has no effect: nvme_tier_gib is 0")
    assert size.startswith("redis_tier_gib has no effect: ") and "redis_url" in size
    assert admission.startswith("admission has no effect: ") and "nvme_tier_gib and redis_url" in admission
    assert resolve(AppArgs(admission="always", redis_url="redis://h", cpu_tier_gib=0.001)).tier_warnings == ()


def test_a_tier_that_does_not_fit_its_disk_is_pointed_out(tmp_path):
    options = AppArgs(cpu_tier_gib=0.001, nvme_tier_gib=60_000, nvme_tier_folder=str(tmp_path / "new"))
    (warning,) = resolve(options).tier_warnings
    assert warning.startswith("nvme_tier_gib: 60000 GiB asked for, ") and str(tmp_path) in warning


def test_without_a_cpu_tier_there_is_none():
    assert resolve(AppArgs(cpu_tier_gib=0)).tiers == ()


@pytest.mark.parametrize(
    ("given", "field", "part"),
    [
        ({"policy": "h3o"}, "policy", "full, snapkv"),
        ({"recipe": "qas"}, "recipe", "summarize, qa"),
        ({"budget": 20}, "budget", "at least 36"),
        ({"recipe": "tova:paper", "kernel": 5}, "kernel", "snapkv"),
        ({"kv": {"decode": {"rule": "h2o", "evry": 2}}}, "decode.evry", "every"),
        ({"kv": {"bugdet": 3}}, "bugdet", "budget"),
        ({"recipes": {"qa": {"budget": 1.5}}}, "recipes.qa.budget", "fraction"),
        ({"recipes": {"mine": {"policy": "h3o"}}}, "recipes.mine.policy", "snapkv"),
        ({"recipes": {"auto": {"budget": 5}}}, "recipes.auto", "not 'auto'"),
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
