"""Open an array or a group from any kind of source, read-only; and find the name and folder of an array.

Errors: ``FileNotFoundError`` for a missing path, :class:`~linumpy.errors.SourceError` for a source that is neither an
array nor a group or cannot be opened, :class:`~linumpy.errors.MetadataError` for impossible shapes or chunks.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import zarr
from zarr.abc.store import Store
from zarr.core.sync import sync
from zarr.storage import FsspecStore, LocalStore, StorePath, ZipStore

from linumpy.errors import SourceError
from linumpy.io.metadata import Node, checked_array, open_stored
from linumpy.io.paths import METADATA_FILES, OZX, absolute, split_archive
from linumpy.io.stores.remote import RemoteStore, explained, is_remote, open_store, without_credentials
from linumpy.io.stores.zips import ArchiveStore

Source = str | Path | zarr.Array[Any] | zarr.Group | Store | StorePath | tuple[Store, str]
"""A path (``str``, ``Path``), a ``zarr.Array`` or ``zarr.Group``, a store, a ``StorePath``, or ``(store, path)``."""


def open_node(source: Source) -> Node:
    """Open an array or a group; an open group is returned unchanged."""
    if isinstance(source, zarr.Array):
        return checked_array(source)
    if isinstance(source, zarr.Group):
        return source
    if isinstance(source, (str, Path)):
        return _open_path(source)
    if isinstance(source, StorePath):
        return open_at(source)
    if isinstance(source, Store):
        return open_at(StorePath(source))
    if isinstance(source, tuple) and len(source) == 2 and isinstance(source[0], Store):
        return open_at(_store_path(source[0], str(source[1])))
    raise TypeError(
        f"source is a {type(source).__name__}: pass a path, a zarr array or group, or a pair of a Zarr store and a path"
    )


def local_store(folder: str | Path) -> LocalStore:
    """Return the store of a local folder.

    linumpy passes local paths to zarr-python only as such stores: zarr-python would parse text with ``#``, ``?``, ``;``
    or ``::`` as a URL, and a relative path changes its meaning with the working folder of the process.
    """
    return LocalStore(absolute(folder), read_only=True)


def _open_path(source: str | Path) -> Node:
    text = str(source)
    if "://" in text and not text.startswith("file://"):
        return _open_url(text)
    folder = _without_scheme(text)
    if (split := split_archive(folder)) is not None:
        return _open_archive(*split)
    if not Path(folder).exists():
        hint = ": only shells expand '~', give the whole path" if folder.startswith("~") else ""
        raise FileNotFoundError(f"there is no file or folder {folder!r}{hint}")
    return open_at(StorePath(local_store(folder)), name=folder)


def _open_archive(file: str, inside: str) -> Node:
    """Open the array or group at a path in a ZIP file."""
    store = ArchiveStore(file)
    roots = store.directory.roots
    if not roots:
        raise SourceError(f"{file} is a ZIP file without a Zarr array or group")
    if not inside and "" not in roots:
        listed = ", ".join(f"{file}/{root}" for root in roots[:8]) + (" …" if len(roots) > 8 else "")
        raise SourceError(f"{file} has no Zarr array or group at its root: name one of {listed}")
    return open_at(_store_path(store, inside), name=f"{file}/{inside}".rstrip("/"))


def _open_url(url: str) -> Node:
    name = without_credentials(url)
    try:
        return open_at(_store_path(*_located(url, None)), name=name)
    except SourceError:
        raise
    except ImportError as error:
        need = 'URLs need obstore: pip install "linumpy-gpu[remote]"; or fsspec: pip install "zarr[remote]"'
        raise SourceError(f"{name!r} cannot be opened: {error}. {need}") from error
    except Exception as error:  # obstore and fsspec have exceptions of their own, for example without a connection
        raise SourceError(f"{name!r} cannot be opened: {type(error).__name__}: {explained(error)}") from None


def _located(url: str, options: Mapping[str, Any] | None) -> tuple[Store, str]:
    """Return the store of a URL, and the path in it: by obstore, or by fsspec for other schemes and without obstore."""
    if is_remote(url):
        try:
            return open_store(url, options)
        except ImportError:
            if importlib.util.find_spec("obstore") is not None:
                raise
    return FsspecStore.from_url(url, storage_options=dict(options or {}), read_only=True), ""


def with_options(source: Source, storage_options: Mapping[str, Any] | None) -> Source:
    """Return the store and path of a URL that is opened with options; without options, return the source unchanged.

    The options are as obstore's ``from_url`` takes them (see docs/remote.md), or without obstore as fsspec takes them.
    """
    if not storage_options:
        return source
    if not isinstance(source, str) or local_name(source) is not None:
        raise ValueError(f"storage_options= are for URLs, and the source is {describe_source(source)!r}")
    try:
        return _located(source, storage_options)
    except (ImportError, ValueError):
        raise
    except Exception as error:
        name = without_credentials(source)
        raise SourceError(f"{name!r} cannot be opened: {type(error).__name__}: {explained(error)}") from None


def open_at(where: StorePath, *, name: str | None = None) -> Node:
    """Open the array or group at a path in a store, read-only; `name` is its name in messages."""
    if name is None and isinstance(where.store, RemoteStore):
        name = str(where)
    node = open_stored(where, name)
    if node is None:
        named = repr(name) if name else f"{where.path!r} in {where.store}"
        raise SourceError(f"{named} {_why_no_node(where)}")
    return node


def _why_no_node(where: StorePath) -> str:
    """Return what a path is at which there is neither an array nor a group, as the end of a message."""
    if where.path.rpartition("/")[2] in METADATA_FILES:
        return "is a metadata file of Zarr: pass the folder that holds it"
    if isinstance(where.store, RemoteStore) and where.path.lower().endswith((OZX, ".zip", ".tif", ".tiff")):
        return "is no Zarr array or group, and ZIP and TIFF files are read from local folders only: download it first"
    return "is neither a Zarr array nor a Zarr group (zarr v2 and v3 looked for)"


def _store_path(store: Store, path: str) -> StorePath:
    try:
        return StorePath(store, path)
    except ValueError as error:  # the path contains `.` or `..`
        raise SourceError(f"{path!r} is no path in {store}: {error}") from error


def local_name(source: str) -> str | None:
    """Return the local path in a path or ``file://`` URL; None for other URLs."""
    return None if "://" in source and not source.startswith("file://") else _without_scheme(source)


def _without_scheme(text: str) -> str:
    """Return the path in a ``file://`` URL; a text without ``file://`` is returned unchanged.

    A URL quotes special characters, but zarr-python and linumpy print local paths after ``file://`` without quoting.
    """
    if not text.startswith("file://"):
        return text
    path = text.removeprefix("file://")
    return path if Path(path).exists() else unquote(path)


def describe_source(source: Source) -> str:
    """Return the path or URL of a source, without credentials, for messages."""
    if isinstance(source, (zarr.Array, zarr.Group)):
        return without_credentials(str(source.store_path))
    if isinstance(source, tuple):
        return without_credentials("/".join(str(part) for part in source))
    return without_credentials(str(source)) if isinstance(source, str) else str(source)


def name_on_disk(array: zarr.Array) -> str:
    """Return the name of an array; for a local array the same by whichever path, link or ``..`` it was opened."""
    store = array.store
    if isinstance(store, LocalStore):
        return f"file://{os.path.realpath(store.root / array.path)}"
    if isinstance(store, (ArchiveStore, ZipStore)):
        return f"zip://{os.path.realpath(store.path)}/{array.path}".rstrip("/")
    return describe_source(array)


def folder_of(array: zarr.Array) -> Path | None:
    """Return the folder of an array; None for an array outside the local file system."""
    return absolute(Path(array.store.root) / array.path) if isinstance(array.store, LocalStore) else None


def path_of(array: zarr.Array) -> str | None:
    """Return the local path of an array: its folder, or a path in a ZIP file; None for an array elsewhere."""
    if isinstance(array.store, ArchiveStore):
        return f"{array.store.path}/{array.path}".rstrip("/")
    folder = folder_of(array)
    return None if folder is None else str(folder)


def local_path(array: zarr.Array) -> str:
    """Return the path by which other processes can open an array: its folder, or a path in a ZIP file."""
    path = path_of(array)
    if path is None:
        raise SourceError(f"{array.store_path} is not in a local folder or ZIP file, so other processes cannot open it")
    return path


def source_for_others(array: zarr.Array) -> Source:
    """Return the source by which other processes can open an array: a path, or an object store and the path in it."""
    return (array.store, array.path) if isinstance(array.store, RemoteStore) else local_path(array)


def written(array: zarr.Array) -> str:
    """Return a text that changes when an array is written anew, to distinguish arrays of one path: a time or stamp."""
    if isinstance(array.store, ArchiveStore):
        return str(array.store.directory.stamp)
    folder = folder_of(array)
    if folder is None:
        return "unknown"
    name = "zarr.json" if array.metadata.zarr_format == 3 else ".zarray"
    return str((folder / name).stat().st_mtime_ns)


def sizes_of(path: str | Path) -> tuple[int, int]:
    """Return the decoded bytes of all arrays in a Zarr folder, ZIP file or URL, and the bytes of its files."""
    node = open_node(path)
    members = [node] if isinstance(node, zarr.Array) else [member for _, member in node.members(max_depth=None)]
    decoded = sum(member.nbytes for member in members if isinstance(member, zarr.Array))
    if isinstance(node.store, RemoteStore):
        return decoded, sync(node.store.getsize_prefix(f"{node.path}/"))
    return decoded, os.stat(path).st_size if os.path.isfile(path) else _files_nbytes(path)


def _files_nbytes(folder: str | Path) -> int:
    with os.scandir(folder) as entries:
        return sum(_files_nbytes(entry.path) if entry.is_dir() else entry.stat().st_size for entry in entries)
