"""Write a single file, complete or not at all.

A temporary file beside it is flushed and renamed when the block that fills it ends without an error. If a killed
process left a temporary file, the next run that writes to the path removes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from linumpy.io.output.checks import check_parent, exists_error, refuse_url
from linumpy.io.output.folders import full_disk, recover, temporary_beside
from linumpy.io.output.syscalls import is_named, lock, rename_new, sync_path, unlock


def check_file(path: str | Path, *, overwrite: bool) -> None:
    """Check the path of a file to write."""
    path = Path(path)
    refuse_url(path)
    if path.is_dir():
        raise FileExistsError(f"{path} is a folder: give the path of a file")
    if (path.exists() or path.is_symlink()) and not overwrite:
        raise exists_error(path)
    check_parent(path)


def check_picture(path: str | Path, *, overwrite: bool, formats: tuple[str, ...] = (".png", ".pdf", ".svg")) -> None:
    """Check the path of a picture to write, whose suffix must be one of `formats`."""
    if Path(path).suffix.lower() not in formats:
        written = ", ".join(suffix[1:].upper() for suffix in formats)
        raise ValueError(
            f"{path}: pictures are written as {written}: give it a name that ends in {' or '.join(formats)}"
        )
    check_file(path, overwrite=overwrite)


@contextmanager
def replacing(path: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary file, empty, which is renamed to `path` when the block ends without an error.

    After any error nothing remains of the output, and an existing file is unchanged.
    """
    path = Path(path)
    check_file(path, overwrite=overwrite)
    recover(path)
    with full_disk(path, "nothing is left of"):
        temporary, descriptor = _new_file(path)
        try:
            yield temporary
            sync_path(temporary)
            check_file(path, overwrite=overwrite)  # another process may have made the file meanwhile
            if overwrite:
                temporary.replace(path)
            else:
                rename_new(temporary, path)
            sync_path(path.parent)
        finally:
            temporary.unlink(missing_ok=True)
            unlock(descriptor)


def _new_file(path: Path) -> tuple[Path, int]:
    """Make and lock a new empty file; return its path and the descriptor of the lock."""
    while True:
        temporary = temporary_beside(path)
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            with suppress(BlockingIOError):  # another process locked it first, to clean it up
                lock(descriptor)
                if is_named(descriptor, temporary):
                    return temporary, descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
