"""Stamps of metadata files, to notice that a file was changed or replaced.

A stamp is a few numbers from the status of a file. Whatever was read from a file is valid while the stamp of the file
is the same. In: folders of local arrays and groups, or paths inside ZIP files. Out: a :class:`MetadataLook`, the stamps
at one time. :meth:`MetadataLook.holds` and the native core compare them with the present stamps. Errors: none.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from linumpy.io.paths import DOCUMENTS, split_archive


@dataclass(frozen=True)
class MetadataLook:
    """Stamps of the metadata files of local folders, taken before the files are read.

    - `files`: paths of the files, including files that do not exist.
    - `stamps`: the :func:`stamp` of each file.
    """

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
    """List the files that may hold the metadata of a folder, in the order in which they are read.

    For a ZIP file or a path inside it, the only such file is the ZIP file.
    """
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
