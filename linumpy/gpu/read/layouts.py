"""Layouts of arrays that were read before, each valid while its metadata is as it was.

In: what names an array. Out: an :class:`~linumpy.plan.layout.ArrayLayout`, and whether it was known.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import zarr

from linumpy.io.layout import read_layout
from linumpy.io.looks import metadata_files, stamp
from linumpy.io.open import checked_level, open_source
from linumpy.io.source import Source
from linumpy.plan.layout import ArrayLayout

#: Layouts that are kept.
_LAYOUTS = 2048


class Layouts:
    """Layouts of the arrays that were read last; for several threads.

    A path is looked at again when the files of its metadata are other ones; an open array has the metadata that it was
    opened with.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[object, tuple[Any, list[str], ArrayLayout]] = OrderedDict()

    def get(self, source: Source, level: int) -> ArrayLayout:
        """Return the layout of an array."""
        return self.find(source, level)[0]

    def find(self, source: Source, level: int) -> tuple[ArrayLayout, bool]:
        """Return the layout of an array, and whether it was known."""
        key = _key(source, checked_level(level))
        with self._lock:
            entry = self._known.get(key) if key is not None else None
        if entry is not None and _version(source, entry[1]) == entry[0]:
            with self._lock:
                self._known[key] = entry
                self._known.move_to_end(key)
            return entry[2], True
        files = [] if key is None or isinstance(source, zarr.Array) else metadata_files(_folder(source))
        before = _version(source, files)
        layout = read_layout(open_source(source, level))
        if files and layout.root is not None and layout.entries is None:
            if f"{layout.root}/zarr.json" not in files:  # an image's resolution
                own = metadata_files(layout.root)
                before, files = [*before, *_version(source, own)], files + own
                layout = read_layout(open_source(source, level))  # again, now that its files were looked at
            elif layout.zarr_format == 3:  # while there is this file, no other one is looked at
                before, files = before[:1], files[:1]
        if key is not None:
            with self._lock:
                self._known[key] = (before, files, layout)
                while len(self._known) > _LAYOUTS:
                    self._known.popitem(last=False)
        return layout, False

    def after_fork(self) -> None:
        """Make the lock new in a child process, whose parent may have held it."""
        self._lock = threading.Lock()


#: Layouts that all readers of this process know.
LAYOUTS = Layouts()
os.register_at_fork(after_in_child=LAYOUTS.after_fork)


def _key(source: Source, level: int) -> object:
    """Name a source that may be known; None for others."""
    if isinstance(source, zarr.Array):
        return "array", id(source.metadata), str(source.store_path), level
    if isinstance(source, (str, os.PathLike)) and "://" not in str(source):
        return "path", _folder(source), level
    return None


def _folder(source: Any) -> str:
    """Path of a source; ``..`` is not collapsed, because of symlinks."""
    return os.path.join(os.getcwd(), source)


def _version(source: Source, files: list[str]) -> Any:
    """What must be the same for a layout to hold."""
    return _Same(source.metadata) if isinstance(source, zarr.Array) else [stamp(path) for path in files]


@dataclass(frozen=True, eq=False)
class _Same:
    """An object that equals itself alone; held, so that no other one gets its identity."""

    held: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.held is other.held

    __hash__ = None  # type: ignore[assignment]
