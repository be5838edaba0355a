"""System calls for writing safely that Python's ``os`` lacks, and locks that end with their process.

In: paths and descriptors. Out: names exchanged or renamed without replacing, bytes on the disk, locks. Errors:
``OSError`` as the system gives it, naming the path; what a file system does not have is told by the returned value.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
from pathlib import Path
from typing import Any

_AT_FDCWD = -100
_NOREPLACE, _EXCHANGE = 1, 2
#: Of file systems, kernels and C libraries that do not have a call.
_MISSING = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF)


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _rename(first: Path, second: Path, flags: int) -> bool:
    """Call ``renameat2``; False where it is missing."""
    call = getattr(_libc(), "renameat2", None)  # glibc from 2.28 on
    if call is None:
        return False
    if not call(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), ctypes.c_uint(flags)):
        return True
    code = ctypes.get_errno()
    if code in _MISSING:
        return False
    raise OSError(code, os.strerror(code), str(first), None, str(second))


def exchange(first: Path, second: Path) -> bool:
    """Exchange two names in one step; False, with nothing done, where the file system cannot."""
    return _rename(first, second, _EXCHANGE)


def rename_new(first: Path, second: Path) -> None:
    """Rename, unless something has the new name.

    Raises
    ------
    FileExistsError
        Something has it. Where the file system has no such call, it is looked for just before.
    """
    if _rename(first, second, _NOREPLACE):
        return
    if os.path.lexists(second):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(second))
    first.rename(second)


def sync_file_system(descriptor: int) -> None:
    """Wait until all that was written to a file's file system is on the disk.

    One call costs less than one for each file of an image. It reports errors since the descriptor was opened, so open
    it before the first byte is written.
    """
    if _libc().syncfs(descriptor):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def sync_path(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _MISSING:  # some network file systems have none for folders
            raise
    finally:
        os.close(descriptor)


def lock(descriptor: int) -> bool:
    """Lock a file until its descriptor is closed or the process ends, however that ends.

    Returns
    -------
    bool
        Whether it is locked; False where the file system has no locks.

    Raises
    ------
    BlockingIOError
        Another descriptor, of this process or of another one, has the lock.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def unlock(descriptor: int) -> None:
    """Unlock and close a file; also where a forked process has a copy of the descriptor."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    finally:
        os.close(descriptor)


def is_named(descriptor: int, path: Path) -> bool:
    """Say whether a path still names the file of a descriptor."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def write_fully(descriptor: int, data: bytes) -> None:
    """Append bytes to a file, all of them or none.

    Raises
    ------
    OSError
        Such as a full disk; the file is as long as before.
    """
    before, left = os.fstat(descriptor).st_size, memoryview(data)
    try:
        while left:
            left = left[os.write(descriptor, left) :]
    except OSError:
        os.ftruncate(descriptor, before)
        raise
