"""Stamps of metadata files: data derived from a file stay valid while its stamp does not change.

In: folders of local arrays and groups. Out: :class:`MetadataLook`, which compares the stamps again; the native core
compares them too, when it plans a batch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from linumpy.io.paths import split_archive


@dataclass(frozen=True)
class MetadataLook:
    """Stamps of the metadata files of local folders, taken before the files are read.

    Attributes
    ----------
    files : tuple of str
        Paths of the files, including missing files.
    stamps : tuple
        The :func:`stamp` of each file.
    """

    files: tuple[str, ...]
    stamps: tuple[tuple[int, ...] | None, ...]

    @classmethod
    def at(cls, *folders: str) -> MetadataLook:
        """Stamp the metadata files of folders, before they are read."""
        files: list[str] = []
        for folder in folders:
            own = metadata_files(folder)
            files += own[:1] if stamp(own[0]) else own  # where zarr.json exists, no other file is read
        return cls(tuple(files), tuple(map(stamp, files)))

    def holds(self) -> bool:
        """Return whether no file was replaced or changed."""
        return all(stamp(path) == earlier for path, earlier in zip(self.files, self.stamps, strict=True))


def metadata_files(folder: str) -> list[str]:
    """List the files that may hold the metadata of a folder, in the order in which they are read.

    For a folder inside a ZIP file, the only such file is the ZIP file.
    """
    if (split := split_archive(folder)) is not None:
        return [split[0]]
    return [f"{folder}/{name}" for name in ("zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata")]


def stamp(path: str) -> tuple[int, ...] | None:
    """Return numbers that change when a file is changed or replaced; None for a missing file."""
    try:
        return stamp_of(os.stat(path))
    except OSError:
        return None


def stamp_of(status: os.stat_result) -> tuple[int, ...]:
    """Return the :func:`stamp` of a file by its status."""
    # A copy may keep inode and size and set back the modification time; nobody can set the change time.
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
