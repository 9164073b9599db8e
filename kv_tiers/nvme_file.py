"""The one file of an NVMe tier: found or made, locked, allocated to its last byte, opened past the page cache."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import secrets
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from kv_tiers.nvme_index import PAGE, Geometry

SUFFIX = ".kvnvme"
_MODE = 0o600


def nvme_path(folder: Path | str, name: str) -> Path:
    """The file for whatever `name` (application, node, model...): inside `folder`, short, another for another name."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return Path(folder) / f"kvtide-{digest}{SUFFIX}"


@dataclass
class NvmeFile:
    """An open, locked file. `whole_slots`: how many slots an earlier life left at full length; 0 if it was made now.

    The lock is an flock: the kernel drops it with the owner's last process, also after kill -9, and not earlier.
    """

    fd: int
    salt: int
    direct: bool
    whole_slots: int
    recreated: bool
    """A file was there, but of another version, shape or codec, or never finished."""

    @classmethod
    def open(cls, path: Path, geometry: Geometry, *, direct: bool) -> Self:
        """Take over the file or make it, `geometry.nbytes` long, mode 0600.

        BlockingIOError: another process has it. PermissionError: it is another user's, others may open it, or it is
        no regular file. OSError ENOSPC: no room in the folder; a file that was made for this is gone again.
        """
        fd = _open(path)
        try:
            _lock(fd, path)
            before = os.fstat(fd)
            _require_ours(before, path)
            salt = geometry.salt_of(os.pread(fd, PAGE, 0))
            if salt is None:
                os.ftruncate(fd, 0)
                whole_slots = 0
            else:
                whole_slots = min(geometry.slots, (before.st_size - geometry.data) // geometry.slot_bytes)
            _allocate(fd, path, geometry.nbytes)
            if salt is None:
                salt = secrets.randbits(64)
                os.pwrite(fd, geometry.superblock(salt), 0)
                os.fsync(fd)  # the buffered page must not come later than direct writes of it
        except OSError as error:
            # A file that does not fit is worth nothing; one that is not ours is not ours to remove.
            if error.errno == errno.ENOSPC:
                path.unlink(missing_ok=True)
            os.close(fd)
            raise
        is_direct = direct and _bypass_cache(fd)
        return cls(fd, salt, is_direct, max(0, whole_slots), before.st_size > 0 and whole_slots == 0)

    def sync(self) -> OSError | None:
        """Buffered files only: have the kernel write what it holds back."""
        if self.direct:
            return None
        try:
            os.fdatasync(self.fd)
        except OSError as error:
            return error
        return None

    def close(self) -> None:
        """Let go of file and lock."""
        os.close(self.fd)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, _MODE)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise PermissionError(
                errno.EPERM, "an NVMe tier's file is not a symbolic link", str(path)
            ) from error
        raise


def _lock(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise BlockingIOError(error.errno, "another process uses this NVMe tier's file", str(path)) from error
    named = os.stat(path, follow_symlinks=False)
    if not os.path.samestat(named, os.fstat(fd)):
        raise BlockingIOError(
            errno.EWOULDBLOCK, "somebody replaced this NVMe tier's file just now", str(path)
        )


def _require_ours(status: os.stat_result, path: Path) -> None:
    private = stat.S_IMODE(status.st_mode) & 0o077 == 0
    if not (stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and private):
        raise PermissionError(errno.EPERM, "not a private regular file of this user", str(path))


def _allocate(fd: int, path: Path, nbytes: int) -> None:
    """Exactly `nbytes` long, all of it allocated, so that the disk cannot be full later on."""
    status = os.fstat(fd)
    if status.st_size > nbytes:
        os.ftruncate(fd, nbytes)
    room = os.statvfs(path.parent)
    free = room.f_bavail * room.f_frsize
    missing = nbytes - status.st_blocks * 512
    if missing > free:
        raise _no_room(path, nbytes, free)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, nbytes)
        else:  # macOS
            os.ftruncate(fd, nbytes)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise _no_room(path, nbytes, free) from error


def _no_room(path: Path, nbytes: int, free: int) -> OSError:
    message = f"an NVMe tier of {nbytes} bytes does not fit: {path.parent} has {free} bytes free"
    return OSError(errno.ENOSPC, message, str(path))


def _bypass_cache(fd: int) -> bool:
    """Switch to O_DIRECT, if reading a page works then."""
    flag = getattr(os, "O_DIRECT", 0)
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    if not flag:
        return False
    page = memoryview(mmap.mmap(-1, PAGE))
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | flag)
        return os.preadv(fd, [page], 0) == PAGE
    except OSError:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        return False
