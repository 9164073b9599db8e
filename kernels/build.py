"""Compiles the native kernels once per machine and finds them again.

The shared object has a plain C interface and no torch headers, so it builds in seconds. It links against the OpenMP
runtime that torch already loaded: two runtimes in one process would fight for the cores. Cached under
$KVTIDE_CACHE or ~/.cache/kvtide, in native/<hash of sources, compiler, flags and CPU>; files appear whole.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCES = Path(__file__).parent / "native"
_BASE_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
)
_TIMEOUT_S = 300


class BuildFailed(Exception):
    """No native kernels on this machine; the message says why and what to install."""


def cache_root() -> Path:
    """Where built libraries live: $KVTIDE_CACHE or ~/.cache/kvtide, then `native`."""
    root = os.environ.get("KVTIDE_CACHE")
    try:
        return (Path(root) if root else Path.home() / ".cache" / "kvtide") / "native"
    except RuntimeError as error:
        raise BuildFailed(f"no folder to build in ({error}); set KVTIDE_CACHE to a writable one") from error


def find_compiler() -> str:
    """Path of $CXX, g++, c++ or clang++, the first that exists. BuildFailed: there is none."""
    for name in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise BuildFailed("no C++ compiler found; install g++ (Debian, Ubuntu: apt-get install g++) or set CXX")


def library(extra_flags: tuple[str, ...] = ()) -> Path:
    """Path of the shared object for this machine, built if it is not cached yet. BuildFailed: it cannot be built.

    extra_flags go to the compiler after all others (tests build the portable variant with them).
    """
    compiler = find_compiler()
    version = _run([compiler, "--version"])
    if version.returncode:
        raise BuildFailed(f"{compiler} does not work: {_first_lines(version)}; install g++ or set CXX")
    sources = sorted(SOURCES.glob("*.cpp"))
    digest = hashlib.blake2b(digest_size=16)
    parts = [path.read_bytes() for path in sorted(SOURCES.iterdir()) if path.suffix in (".cpp", ".h")]
    parts += [version.stdout.encode(), " ".join((*_BASE_FLAGS, *extra_flags)).encode(), _cpu().encode()]
    parts += [str(_torch_openmp()).encode()]
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    target = cache_root() / digest.hexdigest() / "kvtide_kernels.so"
    if not os.path.exists(target):
        _build(compiler, sources, extra_flags, target)
    return target


def _build(compiler: str, sources: list[Path], extra_flags: tuple[str, ...], target: Path) -> None:
    """Try flag sets from best to plainest; move the first result into place."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as folder:
            built = Path(folder) / target.name
            for compile_flags, link_flags in _flag_sets():
                flags = [*_BASE_FLAGS, *compile_flags, *extra_flags]
                attempt = _compile_and_link(compiler, flags, link_flags, sources, built)
                if attempt.returncode == 0:
                    os.replace(built, target)
                    return
    except OSError as error:
        raise BuildFailed(
            f"cannot write {target.parent}: {error}; set KVTIDE_CACHE to a writable folder"
        ) from error
    raise BuildFailed(
        f"{compiler} failed: {_first_lines(attempt)}; install a C++17 compiler (g++ 11 or newer)"
    )


def _flag_sets() -> list[tuple[list[str], list[str]]]:
    """(compile flags, link flags) to try in this order; the last builds anywhere, on one thread."""
    native = "-march=native" if platform.machine().lower() in ("x86_64", "amd64") else "-mcpu=native"
    sets = []
    openmp = _torch_openmp()
    if openmp is not None and "gomp" in openmp.name:
        sets.append(([native, "-fopenmp"], [str(openmp), f"-Wl,-rpath,{openmp.parent}"]))
    sets.append(([native, "-fopenmp"], ["-fopenmp"]))
    sets.append(([native, "-Wno-unknown-pragmas"], []))
    sets.append((["-Wno-unknown-pragmas"], []))
    return sets


def _compile_and_link(
    compiler: str, flags: list[str], link_flags: list[str], sources: list[Path], built: Path
) -> subprocess.CompletedProcess[str]:
    """Compile apart from linking: with -fopenmp at link time the compiler would add its own runtime."""
    objects = []
    for source in sources:
        objects.append(str(built.parent / f"{source.stem}.o"))
        attempt = _run([compiler, *flags, "-c", str(source), "-o", objects[-1]])
        if attempt.returncode:
            return attempt
    return _run([compiler, "-shared", *objects, "-o", str(built), *link_flags])


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))


def _first_lines(attempt: subprocess.CompletedProcess[str]) -> str:
    lines = (attempt.stderr or attempt.stdout).strip().splitlines()
    return " | ".join(lines[:3]) or f"exit status {attempt.returncode}"


def _torch_openmp() -> Path | None:
    """The OpenMP runtime inside torch's wheel, if there is one."""
    package = Path(torch.__file__).parent
    for folder in (package / "lib", package.parent / "torch.libs"):
        for pattern in ("libgomp*.so*", "libomp*.dylib"):
            found = sorted(folder.glob(pattern))
            if found:
                return found[0]
    return None


def _cpu() -> str:
    """What -march=native depends on: machine and CPU feature flags."""
    info = Path("/proc/cpuinfo")
    names = ("flags", "Features", "CPU part")
    lines = info.read_text().splitlines() if info.exists() else []
    features = sorted(
        {line.split(":", 1)[1].strip() for line in lines if line.startswith(names) and ":" in line}
    )
    return "\n".join([platform.machine(), platform.processor(), *features])
