"""The command line as its user meets it."""

from __future__ import annotations

import copy
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ray.serve.schema import ServeDeploySchema
from service_stand import network, tokenizer

from deployments.cli import _parse, main
from deployments.config import AppArgs
from deployments.launch import _greeting, serve_config

ROOT = Path(__file__).parents[1]
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant, who answers]\n\n{% endif %}"
)


def test_config_prints_valid_json_without_the_key(capsys):
    assert main(["config", "api_key=hunter2", "policy=snapkv", "budget=0.25", "threads=2"]) == 0
    text = capsys.readouterr().out
    assert "hunter2" not in text
    shown = json.loads(text)
    assert shown["options"]["budget"] == 0.25 and shown["options"]["api_key"]
    assert shown["default_recipe"] == "snapkv:b0.25:w32:k13:avg:s4"
    assert shown["threads_per_replica"] == 2 and shown["cores"] >= 1
    assert set(shown["options"]) == set(AppArgs.model_fields)


def test_a_wrong_key_is_not_shown_either(capsys):
    assert main(["config", "api_key=hunter2", "threads=x"]) == 2
    assert "hunter2" not in "".join(capsys.readouterr())


def test_config_prints_the_tiers_that_a_node_gets_without_the_password(capsys, tmp_path):
    url = "rediss://user:hunter2@cache.example:6380/2?ssl_cert_reqs=none"
    words = [f"cpu_tier_folder={tmp_path}", "cpu_tier_gib=0.001", "nvme_tier_gib=0.002", f"redis_url={url}"]
    words.append("nvme_tier_codec=int8")
    assert main(["config", *words, f"nvme_tier_folder={tmp_path / 'new'}", "redis_tier_gib=3"]) == 0
    text = capsys.readouterr().out
    assert "hunter2" not in text
    shown = json.loads(text)
    assert shown["tiers"] == [
        {"tier": "cpu", "gib": 0.001, "where": str(tmp_path), "codec": "exact"},
        {"tier": "nvme", "gib": 0.002, "where": str(tmp_path / "new"), "codec": "int8"},
        {"tier": "redis", "gib": 3.0, "where": "rediss://cache.example:6380/2", "codec": "exact"},
    ]
    assert shown["tier_warnings"] == []


def test_a_reader_that_has_enough_gets_no_traceback():
    command = f"{shlex.quote(sys.executable)} -m deployments.cli config | true"
    script = f"set -o pipefail; {command}; echo status ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.stdout.strip() in ("status 141", "status 0")  # 0 when all was written before the reader left


def test_a_closed_output_ends_quietly():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "deployments.cli", "config"],
        cwd=ROOT,
        stdout=write,
        stderr=subprocess.PIPE,
        timeout=60,
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["serv"],
        ["generate"],
        ["serve", "--port", "0"],
        ["serve", "--port", "x"],
        ["serve", "--host", "::1"],
    ],
)
def test_a_wrong_command_line_ends_with_usage(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2 and "usage: kvtide" in capsys.readouterr().err


def test_a_model_that_is_not_there_is_one_line(tmp_path, capsys):
    assert main(["generate", "--prompt", "x", f"model={tmp_path / 'none'}"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("kvtide: ") and "Traceback" not in said and str(tmp_path) in said


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    network().save_pretrained(path)
    words = copy.deepcopy(tokenizer())
    words.chat_template = TEMPLATE
    words.save_pretrained(path)
    return path


def test_generate_streams_an_answer_and_says_what_the_prompt_cost(folder, capsys):
    words = [f"model={folder}", "pool_gib=0.01", "policy=snapkv", "budget=24", "window=8", "sinks=2"]
    assert main(["generate", "--prompt", "a" * 60, "--max-tokens", "5", *words]) == 0
    first = capsys.readouterr()
    assert "60 prompt tokens, 24 kept per head" in first.err
    assert main(["generate", "--prompt", "a" * 60, "--max-tokens", "5", *words]) == 0
    assert capsys.readouterr().out == first.out


def test_generate_takes_recipes_as_serve_does(folder, capsys):
    words = [f"model={folder}", "pool_gib=0.01", "recipe=qa", "budget=48", "window=8"]
    assert main(["generate", "--prompt", "a" * 60, "--max-tokens", "3", *words]) == 0
    assert "(snapkv:b48:w8:k13:avg:s4:ada0.2)" in capsys.readouterr().err
    assert main(["generate", "--chat", "--prompt", "a" * 60, "--max-tokens", "3", *words]) == 0
    assert "(snapkv:b48:w8:k13:avg:s4:t27:ada0.2)" in capsys.readouterr().err
    assert (
        main(["generate", "--prompt", "a", "--max-tokens", "1", f"model={folder}", "policy=sliding_window"])
        == 0
    )
    assert "without sinks" in capsys.readouterr().err


def test_generate_refuses_a_recipe_that_does_not_fit_the_prompt(folder, capsys):
    words = [f"model={folder}", "pool_gib=0.01", "policy=snapkv", "budget=38", "window=8"]
    assert main(["generate", "--chat", "--prompt", "a" * 60, *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("kvtide: budget: ") and "tail 27" in said and said.count("\n") == 1


def test_generate_streams_beyond_the_context_in_slot_positions(folder, capsys):
    kv = {"decode": {"rule": "streaming_llm", "budget": 24}, "positions": "slot"}
    words = [f"model={folder}", "pool_gib=0.01", "max_context=48"]
    assert main(["generate", "--prompt", "a" * 40, "--max-tokens", "80", *words]) == 0
    within = capsys.readouterr().out
    assert main(["generate", "--prompt", "a" * 40, "--max-tokens", "80", *words, f"kv={json.dumps(kv)}"]) == 0
    assert len(capsys.readouterr().out) > 2 * len(within) > 0


@pytest.mark.parametrize(("prompt", "part"), [("", "empty"), ("a" * 2048, "2048")], ids=["empty", "too long"])
def test_generate_refuses_a_prompt_that_cannot_be_answered(folder, prompt, part, capsys):
    assert main(["generate", "--prompt", prompt, f"model={folder}", "pool_gib=0.01"]) == 1
    assert part in capsys.readouterr().err


def test_generate_keeps_to_the_context_and_the_threads_it_is_given(folder, capsys):
    words = [f"model={folder}", "pool_gib=0.01"]
    assert main(["generate", "--prompt", "a" * 40, *words, "max_context=32"]) == 1
    assert "40 tokens, the context 32" in capsys.readouterr().err
    before = torch.get_num_threads()
    try:
        assert main(["generate", "--prompt", "a" * 40, "--max-tokens", "1", *words, "threads=1"]) == 0
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("command", [["generate", "--prompt", "x"], ["serve", "--port", "1"]])
def test_a_context_beyond_the_models_own_is_refused(folder, command, capsys, monkeypatch):
    monkeypatch.setattr("deployments.launch.is_free", lambda host, port: True)
    assert main([*command, f"model={folder}", "max_context=100000"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("kvtide: max_context: 100000 ") and "2048" in said


def test_fetch_prints_the_folder(folder, capsys):
    assert main(["fetch", f"model={folder}"]) == 0
    assert Path(capsys.readouterr().out.strip()) == folder


def test_what_serve_run_is_given_is_valid_and_comes_back_as_the_same_options():
    options = AppArgs(
        policy="snapkv",
        budget=1.0,
        api_key="k",
        redis_url="redis://:pw@h",
        prefill_resources={"p": 1},
        decode_replicas=2,
    )
    config = serve_config(options, "0.0.0.0", 8123)
    checked = ServeDeploySchema.model_validate(json.loads(json.dumps(config)))
    assert checked.http_options.port == 8123
    (application,) = checked.applications
    assert application.import_path == "deployments:app"
    again = AppArgs.model_validate(application.args)
    assert again == options and again.budget == 1.0 and type(again.budget) is float


def test_the_greeting_can_be_pasted_into_a_shell():
    options = AppArgs(served_name="it's", api_key="hunter2")
    line = next(x for x in _greeting(options, "http://127.0.0.1:8000").splitlines() if "curl" in x)
    words = shlex.split(line)
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/chat/completions"]
    assert json.loads(words[words.index("-d") + 1])["model"] == "it's"
    assert "hunter2" not in line and any(word.startswith("Authorization") for word in words)


def test_options_are_taken_before_and_behind_flags():
    parsed = _parse(["serve", "model=x", "--port", "8001", "policy=full"])
    assert parsed.options == ["model=x", "policy=full"] and parsed.port == 8001


def test_an_unknown_flag_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--prot", "8001"])
    assert "--prot" in capsys.readouterr().err
