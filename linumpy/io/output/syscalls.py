"""System calls for safe writing that Python's ``os`` lacks, and locks that end with their process.

:func:`exchange` and :func:`lock` return False if the file system lacks the call.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

#: Constants of Linux: paths are relative to the working folder; flags of ``renameat2``.
_AT_FDCWD = -100
_NOREPLACE, _EXCHANGE = 1, 2
#: Errors of file systems and kernels that lack a call.
_MISSING = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
#: Flag to open files whose bytes are written as they are; elsewhere than on Windows all are.
BINARY = getattr(os, "O_BINARY", 0)
#: Errors of file systems that have no locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF)


@functools.cache
def _call(name: str) -> Any:
    """Return a function of the C library, or None if it has none (macOS) or is not found like that (Windows)."""
    try:
        return getattr(ctypes.CDLL(None, use_errno=True), name, None)
    except (OSError, TypeError):
        return None


def _rename(first: Path, second: Path, flags: int) -> bool:
    """Call ``renameat2``; return False if the C library, kernel or file system lacks it."""
    call = _call("renameat2")  # glibc from 2.28 on
    if call is None:
        return False
    if not call(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), ctypes.c_uint(flags)):
        return True
    code = ctypes.get_errno()
    if code in _MISSING:
        return False
    raise OSError(code, os.strerror(code), str(first), None, str(second))


def exchange(first: Path, second: Path) -> bool:
    """Exchange two names atomically; if the file system cannot, return False and change nothing."""
    return _rename(first, second, _EXCHANGE)


def rename_new(first: Path, second: Path) -> None:
    """Rename without replacing. Without the system call, this is checked just before the rename, not atomically."""
    if _rename(first, second, _NOREPLACE):
        return
    if os.path.lexists(second):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(second))
    first.rename(second)


@contextmanager
def opened_folder(path: Path) -> Iterator[int | None]:
    """Yield a descriptor of a folder; None on Windows, which cannot open folders."""
    if not hasattr(os, "O_DIRECTORY"):
        yield None
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def sync_file_system(descriptor: int | None) -> None:
    """Flush the file system of a descriptor to the disk, which takes less time than flushing each file of an image.

    The call reports write errors since the descriptor was opened: open it before the first byte is written. Where it is
    missing, all file systems are flushed (macOS), or none (Windows, whose system flushes files when it likes).
    """
    syncfs = _call("syncfs")
    if syncfs is None or descriptor is None:
        getattr(os, "sync", lambda: None)()
    elif syncfs(descriptor):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def sync_path(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows opens no folders, and flushes only files opened to be written
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _MISSING:  # some network file systems cannot flush folders
            raise
    finally:
        os.close(descriptor)


def lock(descriptor: int) -> bool:
    """Lock a file until its descriptor is closed or the process ends; `BlockingIOError` if another descriptor holds it.

    Returns False if the file system has no locks, or on Windows, whose locks would keep others from reading and
    removing the file: what a killed run leaves is then named in a warning, and not removed.
    """
    if fcntl is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def unlock(descriptor: int) -> None:
    """Unlock and close a file, even if a forked process has a copy of the descriptor."""
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    finally:
        os.close(descriptor)


def is_named(descriptor: int | None, path: Path) -> bool:
    """Return whether a path still names the file of a descriptor or, for a folder without one, any file."""
    if descriptor is None:
        return path.exists()
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


@contextmanager
def named_errors(path: str | Path) -> Iterator[None]:
    """Add a path to system errors that name no path, such as the error of a file that cannot be closed."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_fully(descriptor: int, data: bytes) -> None:
    """Append all bytes to a file, or none."""
    length, remaining = os.fstat(descriptor).st_size, memoryview(data)
    try:
        while remaining:
            remaining = remaining[os.write(descriptor, remaining) :]
    except OSError:
        os.ftruncate(descriptor, length)
        raise
