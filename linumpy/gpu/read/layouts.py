"""A cache of array layouts. An entry is valid while the metadata files of its array are unchanged.

In: a source. Out: an :class:`~linumpy.plan.layout.ArrayLayout`, and whether it came from the cache.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import zarr

from linumpy.device import call_after_fork
from linumpy.io.layout import read_layout
from linumpy.io.open import checked_level, open_source
from linumpy.io.paths import metadata_files, stamp
from linumpy.io.source import Source, with_options
from linumpy.plan.layout import ArrayLayout

#: Capacity of the cache; the least recently used layout is evicted.
_CAPACITY = 2048


class _Entry(NamedTuple):
    """A cached layout, the metadata files of its array, and their version when it was read (see `_version`)."""

    version: Any
    files: list[str]
    layout: ArrayLayout


class Layouts:
    """The cache, safe to use from several threads.

    A path is opened again when one of its metadata files has changed. The layout of an open array is that of the
    metadata with which the array was opened.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: OrderedDict[object, _Entry] = OrderedDict()

    def get(self, source: Source, level: int, storage_options: Mapping[str, Any] | None = None) -> ArrayLayout:
        """Return the layout of an array; for the parameters see :func:`linumpy.io.open.open_source`."""
        return self.find(source, level, storage_options)[0]

    def find(
        self, source: Source, level: int, storage_options: Mapping[str, Any] | None = None
    ) -> tuple[ArrayLayout, bool]:
        """Return the layout of an array, and whether it came from the cache."""
        source = with_options(source, storage_options)
        key = _key(source, checked_level(level))
        with self._lock:
            entry = self._entries.get(key) if key is not None else None
        if entry is not None and _version(source, entry.files) == entry.version:
            with self._lock:
                self._entries[key] = entry
                self._entries.move_to_end(key)
            return entry.layout, True
        files = [] if key is None or isinstance(source, zarr.Array) else metadata_files(_folder(source))
        version = _version(source, files)  # before the files are read: a later change makes the entry invalid
        layout = read_layout(open_source(source, level))
        if files and layout.root is not None and layout.entries is None:
            if f"{layout.root}/zarr.json" not in files:  # a resolution level of an image
                level_files = metadata_files(layout.root)
                version, files = [*version, *_version(source, level_files)], files + level_files
                layout = read_layout(open_source(source, level))  # again, now that the level's files have stamps
            elif layout.zarr_format == 3:  # zarr.json hides the files of format 2
                version, files = version[:1], files[:1]
        if key is not None:
            with self._lock:
                self._entries[key] = _Entry(version, files, layout)
                while len(self._entries) > _CAPACITY:
                    self._entries.popitem(last=False)
        return layout, False

    def after_fork(self) -> None:
        """Replace the lock in a child process: a thread of the parent may have held it."""
        self._lock = threading.Lock()


#: The cache of this process, shared by all readers.
LAYOUTS = Layouts()
call_after_fork(LAYOUTS.after_fork)


def _key(source: Source, level: int) -> object:
    """Return the cache key of a local path or an open array; None for other sources, which are not cached."""
    if isinstance(source, zarr.Array):
        return "array", id(source.metadata), str(source.store_path), level
    if isinstance(source, (str, os.PathLike)) and "://" not in str(source):
        return "path", _folder(source), level
    return None


def _folder(source: Any) -> str:
    """Return the absolute path of a source; ``..`` is not collapsed, because of symlinks."""
    return os.path.join(os.getcwd(), source)


def _version(source: Source, files: list[str]) -> Any:
    """Return a value that changes when the metadata does: stamps of files, or the identity of an array's metadata."""
    return _ByIdentity(source.metadata) if isinstance(source, zarr.Array) else [stamp(path) for path in files]


@dataclass(frozen=True, eq=False)
class _ByIdentity:
    """Compares an object by identity. It holds the object, so that no later object can have the same identity."""

    held: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and self.held is other.held

    __hash__ = None  # type: ignore[assignment]
