"""Write a single file, complete or not at all.

In: a place. Out: a temporary place beside it, renamed when its block ends well. Errors: ``FileExistsError`` for a place
that is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from linumpy.io.place import refuse_url, temporary_beside


def check_file(path: str | Path, *, overwrite: bool) -> None:
    """Refuse a place for a file that is taken.

    Raises
    ------
    FileExistsError
        Naming the place. A folder is never replaced by a file.
    """
    path = Path(path)
    refuse_url(path)
    if path.is_dir():
        raise FileExistsError(f"{path} is a folder, not a place for a file")
    if (path.exists() or path.is_symlink()) and not overwrite:
        raise FileExistsError(f"{path} exists: choose another place, or overwrite it")


def check_picture(path: str | Path, *, overwrite: bool) -> None:
    """Refuse a place for a picture: one that is taken, or whose name is not that of a PNG, which is what is written.

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
    """Give a temporary place for a file, which takes its own when the block ends well.

    Parameters
    ----------
    path : str or Path
        The file to make, and the folders above it.
    overwrite : bool
        Whether to replace a file that is there.

    Raises
    ------
    FileExistsError
        As :func:`check_file`.
    """
    path = Path(path)
    check_file(path, overwrite=overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_beside(path)
    try:
        yield temporary
        check_file(path, overwrite=overwrite)  # someone else may have come first
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
