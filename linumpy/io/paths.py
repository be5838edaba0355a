"""Paths of sources and outputs: made absolute, split at a ZIP file, and recognized as Zarr by their files.

In: paths from a caller or from metadata. Out: paths. Errors: none.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

#: Suffix of OME-Zarr images in ZIP files: https://ngff.openmicroscopy.org/rfc/9/
OZX = ".ozx"
#: Metadata files of a Zarr array or group: of format 3, of an array and of a group of format 2.
ZARR_FILES = ("zarr.json", ".zarray", ".zgroup")
#: Metadata documents of a node, in the order in which they are read: these files, and the attributes in format 2.
DOCUMENTS = (*ZARR_FILES, ".zattrs")
#: All metadata files of Zarr.
METADATA_FILES = (*DOCUMENTS, ".zmetadata")


def absolute(path: str | Path) -> Path:
    """Return a path as an absolute path to the same file.

    ``..`` is not collapsed, because of symbolic links. Only a path that ends in ``..``, or is the root, is resolved: an
    output is renamed to its path, and a name cannot be ``..``.
    """
    path = Path(path).absolute()
    return path if path.name not in ("", "..") else Path(os.path.realpath(path))


def split_archive(path: str | Path) -> tuple[str, str] | None:
    """Split the path of a regular file, or a path that continues inside it, as in a ZIP file.

    Returns the absolute path of the file, and the path inside the file; None for a folder and for a missing path.
    """
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


def has_dots(path: str) -> bool:
    """Return whether a path in a store has a part ``.`` or ``..``, by which it could leave its group."""
    return bool({".", ".."} & set(path.replace("\\", "/").split("/")))


def is_archive(path: Path) -> bool:
    """Return whether an output is to be an OME-Zarr image in a ZIP file: whether its suffix is ``.ozx``."""
    return path.suffix.lower() == OZX


def is_zarr_folder(path: Path) -> bool:
    """Return whether a folder holds the metadata of a Zarr array or group."""
    return any((path / name).is_file() for name in ZARR_FILES)
