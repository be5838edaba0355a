"""Paths of sources and outputs: made absolute, and split where they go through a ZIP file.

In: paths that a caller passes. Out: paths. No errors are raised.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

#: Suffix of OME-Zarr images in ZIP files: https://ngff.openmicroscopy.org/rfc/9/
OZX = ".ozx"


def absolute(path: str | Path) -> Path:
    """Make a path absolute without changing what it names.

    ``..`` is not collapsed, because of symbolic links. A path that ends in ``..`` or has no last part is resolved:
    nothing can be renamed to it.
    """
    path = Path(path).absolute()
    return path if path.name not in ("", "..") else Path(os.path.realpath(path))


def split_archive(path: str | Path) -> tuple[str, str] | None:
    """Split a path that is a file or goes through one: the file, and the path inside it; None for others."""
    whole = os.path.join(os.getcwd(), path)
    above, inside = whole.rstrip("/") or "/", ""
    while True:
        try:
            mode = os.stat(above).st_mode
        except NotADirectoryError:
            above, _, last = above.rpartition("/")
            inside = f"{last}/{inside}" if inside else last
        except (OSError, ValueError):
            return None
        else:
            return (above, inside) if stat.S_ISREG(mode) else None


def is_archive(path: Path) -> bool:
    """Say whether the name of an output is that of an OME-Zarr image in a ZIP file."""
    return path.suffix.lower() == OZX
