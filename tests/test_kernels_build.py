"""Building the native kernels, and going on in plain torch where that is impossible."""

from __future__ import annotations

import logging
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kernels import build, fallback, ops

PROBE = """
import torch
from kernels import ops
from kernels.layout import page_layout
layout = page_layout(64, torch.float32, 8192)
pool = torch.zeros(1, 8192, dtype=torch.uint8)
one = torch.zeros(1, dtype=torch.int32)
ops.scatter(pool, layout, one, torch.ones(5, 64), torch.full((5, 64), 2.0))
length = torch.full((1, 1), 5, dtype=torch.int32)
q, tables = torch.ones(1, 1, 64), one.view(1, 1, 1)
out, lse = ops.paged_decode_attention(q, pool, layout, tables, one, length, one, 0.125)
print(ops.implementation(), float(out.mean()), round(float(lse[0, 0]), 4))
"""


def fake_compiler(folder: Path, body: str) -> Path:
    """An executable that answers --version and otherwise runs `body`."""
    path = folder / "fake-cxx"
    path.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then echo fake 1.0; exit 0; fi\n{body}\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def run_probe(**environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True, env=env)


def test_without_a_compiler_the_same_numbers_come_with_one_notice(tmp_path: Path) -> None:
    done = run_probe(PATH=str(tmp_path), CXX="", KVTIDE_CACHE=str(tmp_path))
    assert done.stdout.split() == ["torch", "2.0", "9.6094"]
    notices = done.stderr.strip().splitlines()
    assert len(notices) == 1 and "no C++ compiler found" in notices[0] and "install g++" in notices[0]


def test_the_environment_can_ask_for_torch_quietly() -> None:
    done = run_probe(KVTIDE_KERNELS="torch")
    assert done.stdout.split() == ["torch", "2.0", "9.6094"] and not done.stderr


def test_by_default_the_native_kernels_serve() -> None:
    assert run_probe(KVTIDE_KERNELS="native").stdout.split() == ["native", "2.0", "9.6094"]


def test_an_unknown_choice_names_the_valid_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIDE_KERNELS", "cuda")
    with pytest.raises(ValueError, match="native, torch"):
        ops.requested()


def test_a_broken_compiler_falls_back_and_says_what_it_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, "echo 'cc1plus: out of luck' >&2; exit 1")))
    monkeypatch.setenv("KVTIDE_CACHE", str(tmp_path / "cache"))
    with caplog.at_level(logging.WARNING):
        assert ops.choose("native") == ("torch", fallback)
    assert "out of luck" in caplog.text and "install" in caplog.text


def test_a_library_that_does_not_load_falls_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writes = 'while [ "$1" != -o ]; do shift; done; echo junk > "$2"'
    monkeypatch.setenv("CXX", str(fake_compiler(tmp_path, writes)))
    monkeypatch.setenv("KVTIDE_CACHE", str(tmp_path / "cache"))
    assert ops.choose("native") == ("torch", fallback)
    assert "does not load" in caplog.text


def test_an_unwritable_cache_falls_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVTIDE_CACHE", str(tmp_path / "file" / "below"))
    assert ops.choose("native") == ("torch", fallback)
    assert "KVTIDE_CACHE" in caplog.text


def test_a_build_appears_whole_and_is_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = 'echo run >> "$0.log"; while [ "$1" != -o ]; do shift; done; echo built > "$2"'
    compiler = fake_compiler(tmp_path, counts)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("KVTIDE_CACHE", str(tmp_path / "cache"))
    first = build.library()
    runs = Path(f"{compiler}.log").read_text()
    assert first.read_text() == "built\n" and list(first.parent.iterdir()) == [first]
    assert build.library() == first and Path(f"{compiler}.log").read_text() == runs
    assert build.library(("-DOTHER",)) != first, "other flags are another library"
