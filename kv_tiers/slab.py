"""A preallocated memory file that one process owns and others map: the node's CPU slab.

The owner holds an flock on the file for as long as it lives. The kernel drops it with the owner's last
process, also after kill -9, and never earlier, whatever happens to process ids: a free lock is the proof of
death that `remove_stale` needs. Attaching takes no lock. Linux and macOS; the folder is typically on a tmpfs.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
from pathlib import Path
from typing import Self

import numpy as np

SUFFIX = ".kvslab"
_MODE = 0o600


class Slab:
    """`nbytes` of shared memory under `path`. Made by `create` (the owner) or `attach` (everyone else).

    Any thread may use views; who may write where is the tier's business. A slab never shrinks, so a mapping
    stays readable after `unlink` and after its owner's death.
    """

    def __init__(self, path: Path, fd: int, nbytes: int, *, owner: bool) -> None:
        self.path = path
        self.nbytes = nbytes
        self.owner = owner
        self._fd = fd
        self._map: mmap.mmap | None = mmap.mmap(fd, nbytes)
        self._view = memoryview(self._map)

    @classmethod
    def create(cls, path: Path | str, nbytes: int) -> Slab:
        """Make and own a new file of `nbytes` zeros, mode 0600, all of it allocated now.

        ValueError: `nbytes` below 1 or a name without `SUFFIX`. FileExistsError: the path is taken
        (`remove_stale` first). OSError ENOSPC: the file system has less room than that; nothing is left
        behind.
        """
        path = Path(path)
        if nbytes < 1:
            raise ValueError(f"a slab has at least 1 byte, not {nbytes}")
        if path.suffix != SUFFIX:
            raise ValueError(f"a slab's name ends in {SUFFIX}, or nobody would clean it up: {path}")
        _require_room(path, nbytes)
        fd = _open_owned(path)
        try:
            _allocate(fd, path, nbytes)
            return cls(path, fd, nbytes, owner=True)
        except OSError:
            path.unlink()
            os.close(fd)
            raise

    @classmethod
    def attach(cls, path: Path | str) -> Slab:
        """Map an existing slab, readable and writable.

        FileNotFoundError: no such slab. PermissionError: it belongs to another user, others may open it, or
        it is no regular file, so its contents cannot be trusted. ValueError: empty (its owner is still making
        it).
        """
        path = Path(path)
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise PermissionError(errno.EPERM, "a slab is not a symbolic link", str(path)) from error
            raise
        try:
            status = os.fstat(fd)
            if not _is_ours(status):
                raise PermissionError(errno.EPERM, "not a private regular file of this user", str(path))
            if status.st_size == 0:
                raise ValueError(f"slab {path} is empty: its owner has not finished making it")
            return cls(path, fd, status.st_size, owner=False)
        except (OSError, ValueError):
            os.close(fd)
            raise

    @property
    def address(self) -> int:
        """Where the slab starts in this process, for registration with a transport."""
        return int(np.frombuffer(self._view, dtype=np.uint8).ctypes.data)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """The slab's own bytes [offset, offset + nbytes), writable, not copied."""
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise ValueError(f"bytes {offset}..{offset + nbytes} lie outside a slab of {self.nbytes}")
        return self._view[offset : offset + nbytes]

    def close(self) -> None:
        """Let go of the mapping and, as the owner, of the proof of life. May be called again.

        Views that are still out stay valid: the memory is unmapped with the last of them.
        """
        if self._map is None:
            return
        self._view.release()
        mapping, self._map = self._map, None
        with contextlib.suppress(BufferError):  # views are out: they keep the mapping until they go
            mapping.close()
        os.close(self._fd)

    def unlink(self) -> None:
        """Owner: remove the name (before `close`). The bytes go when the last process has let go."""
        assert self.owner and self._map is not None, "only a live owner unlinks"
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.owner and self._map is not None:
            self.unlink()
        self.close()


def remove_stale(folder: Path | str) -> list[Path]:
    """Unlink this user's slabs in `folder` whose owner is dead; returns them. Nothing else is touched."""
    removed: list[Path] = []
    for path in sorted(Path(folder).glob("*" + SUFFIX)):
        try:
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ELOOP, errno.EACCES, errno.EPERM, errno.EISDIR):
                continue  # gone meanwhile, or nothing of ours
            raise
        try:
            # Unlinked while we hold the lock: `create` notices if this hits a file that it has just made.
            if _is_ours(os.fstat(fd)) and _try_lock(fd) and _still_named(fd, path):
                path.unlink()
                removed.append(path)
        finally:
            os.close(fd)
    return removed


def _open_owned(path: Path) -> int:
    """Create the file and lock it; again, if `remove_stale` took it for stale in between."""
    for _ in range(100):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, _MODE)
        if _try_lock(fd) and _still_named(fd, path):
            return fd
        os.close(fd)
    raise OSError(errno.EBUSY, "somebody keeps removing the new slab", str(path))


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _still_named(fd: int, path: Path) -> bool:
    """Whether `path` still leads to the open file."""
    try:
        named = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(named, os.fstat(fd))


def _is_ours(status: os.stat_result) -> bool:
    private = stat.S_IMODE(status.st_mode) & 0o077 == 0
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and private


def _require_room(path: Path, nbytes: int) -> None:
    """Unreserved, a slab too large would kill a process later, at the first touch of a missing page."""
    room = os.statvfs(path.parent)
    free = room.f_bavail * room.f_frsize
    if nbytes > free:
        raise _no_room(path, nbytes, free)


def _allocate(fd: int, path: Path, nbytes: int) -> None:
    if not hasattr(os, "posix_fallocate"):  # macOS
        os.ftruncate(fd, nbytes)
        return
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        room = os.statvfs(path.parent)
        raise _no_room(path, nbytes, room.f_bavail * room.f_frsize) from error


def _no_room(path: Path, nbytes: int, free: int) -> OSError:
    message = f"a slab of {nbytes} bytes does not fit: {path.parent} has {free} bytes free"
    return OSError(errno.ENOSPC, message, str(path))
