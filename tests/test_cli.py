"""The command line as its user meets it."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from ray.serve.schema import ServeDeploySchema
from service_stand import network, tokenizer

from deployments.cli import main
from deployments.config import AppArgs
from deployments.launch import _greeting, serve_config
from deployments.proxy import own_ports, proxy_binary

ROOT = Path(__file__).parents[1]


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
    "arguments", [[], ["serv"], ["generate"], ["serve", "--port", "0"], ["serve", "--port", "x"]]
)
def test_a_wrong_command_line_ends_with_usage(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2 and "usage: kvtide" in capsys.readouterr().err


def test_a_wrong_port_in_the_environment_is_said_not_thrown(monkeypatch, capsys):
    monkeypatch.setenv("KVTIDE_PORT", "eight")
    with pytest.raises(SystemExit):
        main(["serve"])
    assert "--port" in capsys.readouterr().err
    assert main(["config"]) == 0


def test_a_model_that_is_not_there_is_one_line(tmp_path, capsys):
    assert main(["generate", "--prompt", "x", f"model={tmp_path / 'none'}"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("kvtide: ") and "Traceback" not in said and str(tmp_path) in said


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    network().save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def test_generate_streams_an_answer_and_says_what_the_prompt_cost(folder, capsys):
    words = [f"model={folder}", "pool_gib=0.01", "policy=snapkv", "budget=24", "window=8", "sinks=2"]
    assert main(["generate", "--prompt", "a" * 60, "--max-tokens", "5", *words]) == 0
    first = capsys.readouterr()
    assert "60 prompt tokens, 24 kept per head" in first.err
    assert main(["generate", "--prompt", "a" * 60, "--max-tokens", "5", *words]) == 0
    assert capsys.readouterr().out == first.out


@pytest.mark.parametrize(("prompt", "part"), [("", "empty"), ("a" * 2048, "2048")], ids=["empty", "too long"])
def test_generate_refuses_a_prompt_that_cannot_be_answered(folder, prompt, part, capsys):
    assert main(["generate", "--prompt", prompt, f"model={folder}", "pool_gib=0.01"]) == 1
    assert part in capsys.readouterr().err


def test_fetch_prints_the_folder(folder, capsys):
    assert main(["fetch", f"model={folder}"]) == 0
    assert Path(capsys.readouterr().out.strip()) == folder


def test_what_serve_run_is_given_is_valid_and_comes_back_as_the_same_options():
    options = AppArgs(policy="snapkv", budget=1.0, api_key="k", prefill_resources={"p": 1}, decode_replicas=2)
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


def test_haproxy_runs_without_splice_and_every_service_has_ports_of_its_own(tmp_path: Path) -> None:
    wrapper = Path(proxy_binary(tmp_path)["RAY_SERVE_HAPROXY_BINARY_PATH"])
    version = subprocess.run([wrapper, "-v"], capture_output=True, text=True, check=True).stdout
    assert "HAProxy" in version and " -dS " in wrapper.read_text()
    ports = own_ports()
    assert len(set(ports.values())) == len(ports)
    assert int(ports["RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT"]) > int(
        ports["RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT"]
    )


def test_a_port_in_use_is_said_to_be_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 1
    assert f"port {port} is in use" in capsys.readouterr().err
