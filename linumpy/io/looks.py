"""Metadata files as they were when they were read: what follows from them holds while they are the same.

In: folders of local arrays and groups. Out: :class:`MetadataLook`, which looks again, or is given to the native core,
which looks when it plans a batch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class MetadataLook:
    """The metadata files of local folders as they were: what was read of them since then holds while it holds.

    Attributes
    ----------
    files : tuple of str
        Their paths, those that are missing included.
    stamps : tuple
        What the file system says of each.
    """

    files: tuple[str, ...]
    stamps: tuple[Any, ...]

    @classmethod
    def at(cls, *folders: str) -> MetadataLook:
        """Look at the metadata files of folders, before they are read."""
        files: list[str] = []
        for folder in folders:
            own = metadata_files(folder)
            files += own[:1] if stamp(own[0]) else own  # while there is zarr.json, no other one is looked at
        return cls(tuple(files), tuple(map(stamp, files)))

    def holds(self) -> bool:
        """Return whether no file is another one since."""
        return all(stamp(path) == known for path, known in zip(self.files, self.stamps, strict=True))


def metadata_files(folder: str) -> list[str]:
    """List the files that may hold the metadata of a folder, in the order in which they are looked for."""
    return [f"{folder}/{name}" for name in ("zarr.json", ".zarray", ".zgroup", ".zattrs", ".zmetadata")]


def stamp(path: str) -> tuple[int, ...] | None:
    """Say what tells a file from one that replaces it; None where it is missing."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    # Copies may set the time of writing back, and keep inode and size.
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
