"""Write a single file, complete or not at all.

In: the path of a file. Out: a temporary file beside it, flushed and renamed when its block ends well. One that a killed
process leaves is removed by the next run that writes there. Errors: ``FileExistsError`` for a path that is taken,
``OSError`` for a disk that is full.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from linumpy.io.place import check_parent, full_disk, refuse_url, settle, taken, temporary_beside
from linumpy.io.syscalls import is_named, lock, rename_new, sync_path, unlock


def check_file(path: str | Path, *, overwrite: bool) -> None:
    """Refuse a path for a file that is taken, or in a folder that is not there.

    Raises
    ------
    FileExistsError
        Naming the place. A folder is never replaced by a file.
    FileNotFoundError
        As :func:`linumpy.io.place.check_parent`.
    """
    path = Path(path)
    refuse_url(path)
    if path.is_dir():
        raise FileExistsError(f"{path} is a folder, not a place for a file")
    if (path.exists() or path.is_symlink()) and not overwrite:
        raise taken(path)
    check_parent(path)


def check_picture(path: str | Path, *, overwrite: bool) -> None:
    """Refuse a path for a picture: one that is taken, or whose name is not that of a PNG, which is what is written.

    Raises
    ------
    FileExistsError
        As :func:`check_file`.
    ValueError
        Such as ``a.jpg``.
    """
    if Path(path).suffix.lower() != ".png":
        raise ValueError(f"{path}: pictures are written as PNG, give it a name that ends in .png")
    check_file(path, overwrite=overwrite)


@contextmanager
def replacing(path: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Give a temporary file, which is renamed to `path` when the block ends well.

    Parameters
    ----------
    path : str or Path
        The file to make. The temporary one is there, and empty.
    overwrite : bool
        Whether to replace a file that is there.

    Raises
    ------
    FileExistsError, FileNotFoundError
        As :func:`check_file`.
    OSError
        The disk is full. Nothing is left then.
    """
    path = Path(path)
    check_file(path, overwrite=overwrite)
    settle(path)
    with full_disk(path, "nothing is left of"):
        temporary, descriptor = _new_file(path)
        try:
            yield temporary
            sync_path(temporary)
            check_file(path, overwrite=overwrite)  # someone else may have come first
            if overwrite:
                temporary.replace(path)
            else:
                rename_new(temporary, path)
            sync_path(path.parent)
        finally:
            temporary.unlink(missing_ok=True)
            unlock(descriptor)


def _new_file(path: Path) -> tuple[Path, int]:
    """Make a new empty file, and lock it."""
    while True:
        temporary = temporary_beside(path)
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            with suppress(BlockingIOError):  # another process took it for an abandoned one before it was locked
                lock(descriptor)
                if is_named(descriptor, temporary):
                    return temporary, descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
