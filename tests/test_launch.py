"""Starting a service: the environment of its cluster, its process, its ports."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers
from service_stand import network, tokenizer

from deployments import launch
from deployments.child import Child
from deployments.cli import main
from deployments.proxy import own_ports, proxy_binary
from deployments.slabs import sweep_slabs
from kv_tiers.slab import Slab

ROOT = Path(__file__).parents[1]
BUILD = """
import json, os, sys
from pathlib import Path
import pydantic
from ray._common.utils import import_attr
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary as build
from ray.serve.scripts import convert_args_to_dict

def ours():
    return {name: value for name, value in os.environ.items() if name.startswith("RAY_") and name != "RAY_CLIENT_MODE"}

builder = import_attr("deployments:app")
try:
    build(builder, convert_args_to_dict(("polcy=snapkv",)))
except pydantic.ValidationError as refusal:
    message = str(refusal)
os.environ["RAY_ADDRESS"] = "10.0.0.1:6379"
build(builder, convert_args_to_dict(("policy=snapkv", "budget=256")))
joining = ours()
del os.environ["RAY_ADDRESS"]
application = build(builder, convert_args_to_dict(("policy=snapkv", "budget=256")))
wrapper = ours().get("RAY_SERVE_HAPROXY_BINARY_PATH", "")
print(json.dumps({
    "message": message, "joining": joining, "starting": ours(), "wrapper_runs": os.access(wrapper, os.X_OK),
    "recipe": application._bound_deployment.init_args[0].recipe_book.label,
}))
"""
SLEEPER = """
import os, sys
from deployments.child import Child
with Child([sys.executable, "-c", "import time; time.sleep(60)"], os.environ) as child:
    print(child.process.pid, flush=True)
    print(child.process.wait())
"""


def bare_environment(**more: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**inherited, "PYTHONPATH": str(ROOT), **more}


def until(condition: Callable[[], bool], limit_s: float = 10) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_serve_run_gets_checked_options_and_the_environment_of_a_cluster_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BUILD],
        env=bare_environment(RAY_worker_niceness="5"),
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    seen = json.loads(done.stdout.splitlines()[-1])
    assert "unknown option polcy" in seen["message"] and "valid options: model" in seen["message"]
    assert seen["recipe"] == "snapkv:b256:w32:k13:avg:s4"
    assert seen["joining"] == {"RAY_ADDRESS": "10.0.0.1:6379", "RAY_worker_niceness": "5"}
    starting = seen["starting"]
    assert starting["RAY_SERVE_ENABLE_HA_PROXY"] == starting["RAY_SERVE_THROUGHPUT_OPTIMIZED"] == "1"
    assert starting["RAY_worker_niceness"] == "5", "what the user has set stays"
    assert "RAY_AUTH_MODE" not in starting, "Ray has read it already, and would refuse itself"
    assert seen["wrapper_runs"] and not Path(starting["RAY_SERVE_HAPROXY_BINARY_PATH"]).exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_child_before_us(number: signal.Signals) -> None:
    # Heard also where these tests run under nohup or in the background of a shell.
    heard = f"import signal; signal.signal({int(number)}, signal.SIG_DFL)"
    command = [sys.executable, "-c", f"{heard}\n{SLEEPER}"]
    ours = subprocess.Popen(command, env=bare_environment(), stdout=subprocess.PIPE)
    assert ours.stdout is not None
    pid = int(ours.stdout.readline())
    ours.send_signal(number)
    assert ours.communicate(timeout=20)[0].split() == [b"-15"] and ours.returncode == 0
    assert has_ended(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can tell a child of its parent's death")
def test_a_child_does_not_outlive_us_when_we_are_killed() -> None:
    ours = subprocess.Popen([sys.executable, "-c", SLEEPER], env=bare_environment(), stdout=subprocess.PIPE)
    assert ours.stdout is not None
    pid = int(ours.stdout.readline())
    ours.kill()
    ours.communicate(timeout=20)
    until(lambda: has_ended(pid))


def test_a_signal_that_comes_while_the_child_starts_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    start = subprocess.Popen

    def interrupted(*words: object, **options: object) -> object:
        os.kill(os.getpid(), signal.SIGTERM)
        return start(*words, **options)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with Child([sys.executable, "-c", "import time; time.sleep(60)"], os.environ) as child:
        assert child.process.wait(20) == -signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before


def test_under_nohup_a_hang_up_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Child([sys.executable, "-c", ""], os.environ) as child:
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            child.process.wait(20)
    finally:
        signal.signal(signal.SIGHUP, before)


class Started(Exception):
    """Instead of a process: what it would have been given."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        self.folder = Path(command[-1]).parent
        self.mode = stat.S_IMODE(self.folder.stat().st_mode)
        self.config = Path(command[-1]).read_text()
        self.environment = environment
        raise self


@pytest.mark.parametrize(("asked", "listens"), [("localhost", "127.0.0.1"), ("0.0.0.0", "0.0.0.0")])
def test_serve_writes_the_key_where_only_its_owner_reads(
    asked: str, listens: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network().save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr(launch, "Child", Started)
    monkeypatch.setattr(launch, "is_free", lambda host, port: True)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv(
        "RAY_SERVE_HAPROXY_BINARY_PATH", raising=False
    )  # another test of this process may have set it
    with pytest.raises(Started) as started:
        main(["serve", "--host", asked, f"model={tmp_path}", "api_key=hunter2"])
    given = started.value
    assert "hunter2" in given.config and f"host: {listens}" in given.config
    assert given.mode == 0o700 and not given.folder.exists()
    assert given.environment["RAY_ADDRESS"] == "local"
    assert given.environment["RAY_SERVE_HAPROXY_BINARY_PATH"].startswith(str(given.folder))


def test_a_model_that_cannot_be_served_is_refused_by_name_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    network().save_pretrained(tmp_path)  # weights there are; what they belong to is another matter
    tokenizer().save_pretrained(tmp_path)
    transformers.DeepseekV2Config().save_pretrained(tmp_path)
    monkeypatch.setattr(launch, "Child", Started)
    monkeypatch.setattr(launch, "is_free", lambda host, port: True)
    assert main(["serve", f"model={tmp_path}"]) == 1
    assert "multi-head latent attention" in capsys.readouterr().err


def test_an_address_we_cannot_watch_is_refused_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--host", "10.0.0.7"])
    said = capsys.readouterr().err
    assert "10.0.0.7 is not one of 127.0.0.1, localhost, 0.0.0.0" in said and "ready" in said


def test_haproxy_runs_without_splice_and_every_service_has_ports_of_its_own(tmp_path: Path) -> None:
    wrapper = Path(proxy_binary(tmp_path)["RAY_SERVE_HAPROXY_BINARY_PATH"])
    version = subprocess.run([wrapper, "-v"], capture_output=True, text=True, check=True).stdout
    assert "HAProxy" in version and " -dS " in wrapper.read_text()
    ports = own_ports()
    assert len(set(ports.values())) == len(ports)
    assert {"RAY_SERVE_FALLBACK_PROXY_HTTP_PORT", "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT"} < set(ports)
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


def test_memory_files_of_dead_agents_are_removed_and_those_of_living_ones_stay(tmp_path: Path) -> None:
    code = (
        "import sys; from kv_tiers.slab import Slab; Slab.create(sys.argv[1], 4096)"  # dies without unlinking
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "dead.kvslab")], cwd=ROOT, check=True)
    with Slab.create(tmp_path / "alive.kvslab", 4096):
        sweep_slabs(str(tmp_path))
        assert [path.name for path in tmp_path.iterdir()] == ["alive.kvslab"]
