"""`kvtide serve`: start `serve run` with everything set for the user, wait until it answers, say how to call it."""

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import yaml

from deployments.config import AppArgs, cluster_environment
from deployments.proxy import is_free, own_ports, proxy_binary
from engine.weights import ensure_weights

_START_LIMIT_S = 600.0


def launch(options: AppArgs, words: Sequence[str], *, host: str, port: int) -> int:
    """Serve until interrupted; → exit status of `serve run`. `words` are the user's own name=value options."""
    if not is_free("0.0.0.0", port):
        raise RuntimeError(f"port {port} is in use; choose another with --port (or KVTIDE_PORT)")
    ensure_weights(options.model, progress=True)  # here, where a progress bar is seen, not in a replica
    # A cluster of its own, unless the user names one: attaching to whatever runs here would replace its application.
    environment = {
        "RAY_ADDRESS": "local",
        **own_ports(),
        **os.environ,
        **cluster_environment(),
        "PYTHONPATH": _import_path(),
    }
    with tempfile.TemporaryDirectory(prefix="kvtide-") as folder:
        environment |= {
            key: value for key, value in proxy_binary(Path(folder)).items() if key not in os.environ
        }
        config = Path(folder) / "serve.yaml"
        config.write_text(yaml.safe_dump(serve_config(options, host, port)))
        command = [sys.executable, "-m", "ray.serve.scripts", "run", str(config)]
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        return _watch(process, options, f"http://127.0.0.1:{port}")


def serve_config(options: AppArgs, host: str, port: int) -> dict[str, object]:
    """What `serve run` takes as a file: the one application, its options, and where to listen."""
    given = options.model_dump(mode="json", exclude_unset=True)
    if options.api_key is not None:
        given["api_key"] = options.api_key.get_secret_value()
    return {
        "http_options": {"host": host, "port": port},
        "applications": [
            {"name": "kvtide", "route_prefix": "/", "import_path": "deployments:app", "args": given}
        ],
    }


def _import_path() -> str:
    """Replicas must import our packages also when kvtide runs from a checkout and another folder."""
    ours = str(Path(__file__).resolve().parents[1])
    return os.pathsep.join([ours, *filter(None, [os.environ.get("PYTHONPATH")])])


def _watch(process: subprocess.Popen[bytes], options: AppArgs, url: str) -> int:
    """Announce readiness once, pass signals on, wait for the end."""

    def stop(number: int, _frame: object) -> None:
        process.send_signal(signal.SIGTERM)  # a background `serve run` ignores SIGINT

    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        if _wait_ready(process, url):
            print(_greeting(options, url), flush=True)
        elif process.poll() is None:
            print(f"kvtide: not ready after {_START_LIMIT_S:.0f} s, stopping", file=sys.stderr)
            process.terminate()
        return process.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _wait_ready(process: subprocess.Popen[bytes], url: str) -> bool:
    limit = time.monotonic() + _START_LIMIT_S
    while process.poll() is None and time.monotonic() < limit:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:
                if answer.status == 200:
                    return True
        except (urllib.error.URLError, OSError):
            pass  # not listening yet, or a pool without a live replica
        time.sleep(0.5)
    return False


def _greeting(options: AppArgs, url: str) -> str:
    question = {"role": "user", "content": "What is the capital of France?"}
    body = json.dumps({"model": options.name, "messages": [question], "max_tokens": 64, "temperature": 0})
    key = " -H 'Authorization: Bearer <your api_key>'" if options.api_key is not None else ""
    return (
        f"\nkvtide serves {options.name} at {url}/v1\n\n"
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}\n"
    )
