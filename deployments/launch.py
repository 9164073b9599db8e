"""`kvtide serve`: start `serve run` with everything set for the user, wait until it answers, say how to call it."""

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import yaml

from deployments.child import Child
from deployments.config import AppArgs
from deployments.environment import local_environment
from deployments.offline import own_context
from deployments.proxy import is_free
from deployments.slabs import sweep_slabs
from engine.weights import ensure_weights

_START_LIMIT_S = 600.0


def launch(options: AppArgs, *, host: str, port: int) -> int:
    """Serve until interrupted; → exit status of `serve run`."""
    if not is_free("0.0.0.0", port):
        raise RuntimeError(f"port {port} is in use; choose another with --port")
    # Here, where a progress bar is seen, and not in a replica.
    path = ensure_weights(options.model, progress=True)
    # Here too: a replica that refuses its model or its options would be started again and again.
    options.context_length(own_context(path))
    # Only its owner may enter the folder: it holds the api_key.
    with tempfile.TemporaryDirectory(prefix="kvtide-") as folder:
        config = Path(folder) / "serve.yaml"
        config.write_text(yaml.safe_dump(serve_config(options, host, port)))
        # A cluster of its own, unless the user names one: joining whatever runs here would replace its application.
        environment = {
            "RAY_ADDRESS": "local",
            **os.environ,
            **local_environment(Path(folder)),
            "PYTHONPATH": _import_path(),
        }
        with Child([sys.executable, "-m", "ray.serve.scripts", "run", str(config)], environment) as child:
            status = _watch(child, options, f"http://127.0.0.1:{port}")
    sweep_slabs(options.cpu_tier_folder)
    return status


def serve_config(options: AppArgs, host: str, port: int) -> dict[str, object]:
    """What `serve run` takes as a file: the one application, its options, and where to listen."""
    given = options.model_dump(mode="json", exclude_unset=True)
    for name in ("api_key", "redis_url"):
        if (secret := getattr(options, name)) is not None:
            given[name] = secret.get_secret_value()
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


def _watch(child: Child, options: AppArgs, url: str) -> int:
    """Announce readiness once, wait for the end."""
    if _wait_ready(child.process, url):
        print(_greeting(options, url), flush=True)
    elif child.process.poll() is None:
        print(f"kvtide: not ready after {_START_LIMIT_S:.0f} s, stopping", file=sys.stderr)
        child.stop()
    return child.process.wait()


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
