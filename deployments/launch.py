"""`kvtide serve`: start `serve run` with everything set for the user, wait until it answers, say how to call it."""

import json
import os
import random
import shlex
import signal
import socket
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
from engine.weights import ensure_weights

_START_LIMIT_S = 600.0
# Gateways that one node may hold; each listens on a port of its own.
_INGRESS_PORTS = 64
_TRIES = 200


def launch(options: AppArgs, words: Sequence[str], *, host: str, port: int) -> int:
    """Serve until interrupted; → exit status of `serve run`. `words` are the user's own name=value options."""
    if not _is_free("0.0.0.0", port):
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


def own_ports() -> dict[str, str]:
    """Ports that Serve fixes, moved to where nobody listens.

    HAProxy's metrics and statistics ports keep a second service on the machine from starting. Worse, the replicas' own
    ports (30000 and up, opened with SO_REUSEPORT) are shared without an error, and requests reach the other service.
    """
    metrics = _free_block(2)
    ingress = _free_block(_INGRESS_PORTS)
    grpc = _free_block(_INGRESS_PORTS)
    return {
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(metrics),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(metrics + 1),
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(ingress),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(ingress + _INGRESS_PORTS - 1),
        "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": str(grpc),
        "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": str(grpc + _INGRESS_PORTS - 1),
    }


def _free_block(count: int) -> int:
    """First of `count` neighbouring ports that nobody listens on, below the range the kernel hands out."""
    for _ in range(_TRIES):
        first = random.randrange(20_000, 32_000 - count)
        if all(_is_free("0.0.0.0", port) for port in range(first, first + count)):
            return first
    raise RuntimeError(f"no {count} neighbouring free ports found in 20000-32000")


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # a connection in TIME_WAIT is no listener
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


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
