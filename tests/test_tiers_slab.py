"""Slabs: private, preallocated, shared by path, and cleaned up after proven death only."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kv_tiers.slab import Slab, remove_stale

ROOT = str(Path(__file__).parents[1])

OWNER = """
import sys
from kv_tiers.slab import Slab
slab = Slab.create(sys.argv[1], 8192)
slab.view(0, 5)[:] = b"alive"
print("ready", flush=True)
sys.stdin.readline()
"""

VISITOR = """
import sys
from kv_tiers.slab import Slab
slab = Slab.attach(sys.argv[1])
print(bytes(slab.view(100, 5)).decode(), slab.nbytes)
slab.view(4000, 6)[:] = b"answer"
slab.close()
"""


def start(program, path):
    return subprocess.Popen(
        [sys.executable, "-c", program, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": ROOT},
    )


@pytest.fixture
def path(tmp_path):
    return tmp_path / "node.kvslab"


@pytest.fixture
def owner(path):
    """A live process that owns the slab at `path`."""
    process = start(OWNER, path)
    assert process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.communicate(timeout=30)


def test_a_new_slab_is_private_zeroed_and_fully_allocated(path):
    old = os.umask(0)
    try:
        slab = Slab.create(path, 1 << 20)
    finally:
        os.umask(old)
    status = path.stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size == 1 << 20 and status.st_blocks * 512 >= 1 << 20
    assert not any(slab.view(0, slab.nbytes))
    slab.unlink()
    slab.close()
    assert not path.exists()


def test_another_process_reads_and_writes_the_same_bytes(path):
    with Slab.create(path, 8192) as slab:
        slab.view(100, 5)[:] = b"hello"
        output, _ = start(VISITOR, path).communicate(timeout=60)
        assert output.split() == ["hello", "8192"]
        assert bytes(slab.view(4000, 6)) == b"answer"
    assert not path.exists()


def test_views_are_windows_not_copies(path):
    with Slab.create(path, 4096) as slab, Slab.attach(path) as other:
        array = np.frombuffer(slab.view(64, 64), dtype=np.uint8)
        array[3] = 7
        assert other.view(67, 1)[0] == 7
        assert array.ctypes.data == slab.address + 64


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 2), (0, 4097), (4096, 1), (5, -1)])
def test_views_outside_the_slab_are_refused(path, offset, nbytes):
    with Slab.create(path, 4096) as slab, pytest.raises(ValueError, match="outside"):
        slab.view(offset, nbytes)


def test_views_outlive_close(path):
    slab = Slab.create(path, 4096)
    view = slab.view(10, 3)
    slab.unlink()
    slab.close()
    slab.close()
    view[:] = b"abc"
    assert bytes(view) == b"abc"


def test_a_taken_path_is_refused_and_left_alone(path):
    with Slab.create(path, 4096) as slab:
        slab.view(0, 1)[0] = 9
        with pytest.raises(FileExistsError):
            Slab.create(path, 4096)
        assert slab.view(0, 1)[0] == 9 and path.exists()


def test_o25_more_than_the_file_system_has_is_refused_with_both_numbers(path):
    free = os.statvfs(path.parent).f_bavail * os.statvfs(path.parent).f_frsize
    with pytest.raises(OSError, match=r"slab of \d+ bytes does not fit: .* has \d+ bytes free") as caught:
        Slab.create(path, free + (1 << 40))
    assert caught.value.errno == errno.ENOSPC
    assert not path.exists()


def test_space_that_runs_out_while_allocating_leaves_nothing_behind(path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("kv_tiers.slab.os.posix_fallocate", full, raising=False)
    with pytest.raises(OSError, match="does not fit") as caught:
        Slab.create(path, 4096)
    assert caught.value.errno == errno.ENOSPC
    assert not path.exists()


@pytest.mark.parametrize(("name", "nbytes"), [("a.kvslab", 0), ("a.bin", 4096)])
def test_senseless_slabs_are_refused(tmp_path, name, nbytes):
    with pytest.raises(ValueError):
        Slab.create(tmp_path / name, nbytes)


def test_attaching_refuses_what_others_could_have_written(tmp_path, path):
    with pytest.raises(FileNotFoundError):
        Slab.attach(path)
    with Slab.create(path, 4096):
        link = tmp_path / "link.kvslab"
        link.symlink_to(path)
        with pytest.raises(PermissionError):
            Slab.attach(link)
        path.chmod(0o666)
        with pytest.raises(PermissionError):
            Slab.attach(path)
    path.touch(mode=0o600)
    with pytest.raises(ValueError, match="empty"):
        Slab.attach(path)


def test_a_live_owner_keeps_its_slab(path, owner):
    assert remove_stale(path.parent) == []
    with Slab.attach(path) as slab:
        assert bytes(slab.view(0, 5)) == b"alive"
    assert remove_stale(path.parent) == [] and path.exists(), "a visitor's close is not the owner's death"


def test_a_killed_owner_loses_its_slab_and_visitors_keep_reading(path, owner):
    visitor = Slab.attach(path)
    owner.send_signal(signal.SIGKILL)
    owner.wait(timeout=30)
    assert remove_stale(path.parent) == [path]
    assert not path.exists()
    assert bytes(visitor.view(0, 5)) == b"alive"
    with Slab.create(path, 4096) as fresh:
        assert bytes(fresh.view(0, 5)) == bytes(5)
    visitor.close()


def test_a_slab_of_this_process_is_stale_only_after_close(path):
    slab = Slab.create(path, 4096)
    assert remove_stale(path.parent) == []
    slab.close()
    assert remove_stale(path.parent) == [path]


def test_cleaning_up_leaves_other_files_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("keep")
    (tmp_path / "folder.kvslab").mkdir()
    (tmp_path / "link.kvslab").symlink_to(tmp_path / "notes.txt")
    (tmp_path / "open.kvslab").touch(mode=0o644)
    assert remove_stale(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 4


def test_a_slab_taken_for_stale_while_it_is_made_is_made_again(path, monkeypatch):
    """The cleaner strikes between the creation of the file and its lock."""
    lock = __import__("kv_tiers.slab", fromlist=["_"]).fcntl.flock
    strikes = []

    def strike_first(fd, operation):
        if not strikes:
            strikes.append(fd)
            path.unlink()
        lock(fd, operation)

    monkeypatch.setattr("kv_tiers.slab.fcntl.flock", strike_first)
    with Slab.create(path, 4096) as slab:
        assert path.exists() and path.stat().st_size == slab.nbytes
    assert strikes
