"""Paths of sources and outputs: made absolute, split at a ZIP file, and recognized as Zarr by their files.

In: paths that a caller passes. Out: paths. No errors are raised.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

#: Suffix of OME-Zarr images in ZIP files: https://ngff.openmicroscopy.org/rfc/9/
OZX = ".ozx"
#: Metadata files of a Zarr array or group: of format 3, of a group and of an array of format 2.
ZARR_FILES = ("zarr.json", ".zgroup", ".zarray")


def absolute(path: str | Path) -> Path:
    """Make a path absolute without changing what it names.

    ``..`` is not collapsed, because of symbolic links. A path that ends in ``..`` or has no last part is resolved:
    nothing can be renamed to it.
    """
    path = Path(path).absolute()
    return path if path.name not in ("", "..") else Path(os.path.realpath(path))


def split_archive(path: str | Path) -> tuple[str, str] | None:
    """Split a path to, or into, a ZIP file: the path of the file, and the path inside it; None for other paths."""
    above, inside = os.path.join(os.getcwd(), path).rstrip("/") or "/", ""
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
    """Say whether an output is to be an OME-Zarr image in a ZIP file, by its suffix."""
    return path.suffix.lower() == OZX


def is_zarr_folder(path: Path) -> bool:
    """Say whether a folder is a Zarr array or group."""
    return any((path / name).is_file() for name in ZARR_FILES)
