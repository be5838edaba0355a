"""Paths of sources and outputs, and stamps of metadata files, to notice that a file was changed or replaced.

A stamp is a few numbers from the status of a file: whatever was read from a file is valid while the stamp of the file
is the same. :meth:`MetadataLook.holds` and the native core compare them with the present stamps.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
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
    """Split the path of a regular file, or a path that continues inside it, as in a ZIP file; None for any other path.

    Returns the absolute path of the file, and the path inside the file.
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


@dataclass(frozen=True)
class MetadataLook:
    """Stamps of the metadata files of local folders, also of missing files, taken before the files are read."""

    files: tuple[str, ...]
    stamps: tuple[tuple[int, ...] | None, ...]

    @classmethod
    def at(cls, *folders: str) -> MetadataLook:
        """Stamp the metadata files of folders, before they are read."""
        files: list[str] = []
        for folder in folders:
            candidates = metadata_files(folder)
            files += candidates[:1] if stamp(candidates[0]) else candidates  # beside zarr.json no other file is read
        return cls(tuple(files), tuple(map(stamp, files)))

    def holds(self) -> bool:
        """Return whether no file was made, changed, replaced or removed since."""
        return all(stamp(path) == earlier for path, earlier in zip(self.files, self.stamps, strict=True))


def metadata_files(folder: str) -> list[str]:
    """List the files that may hold the metadata of a folder, in the order in which they are read; or the ZIP file."""
    if (split := split_archive(folder)) is not None:
        return [split[0]]
    return [f"{folder}/{name}" for name in DOCUMENTS]


def stamp(path: str) -> tuple[int, ...] | None:
    """Return numbers that change when a file is changed or replaced; None for a file that is missing or unreachable."""
    try:
        return stamp_of(os.stat(path))
    except OSError:
        return None


def stamp_of(status: os.stat_result) -> tuple[int, ...]:
    """Return the :func:`stamp` of a file from its status: device, inode, size, modification and change time."""
    # A program may overwrite a file in place with the same size and set its modification time, but not its change time.
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
