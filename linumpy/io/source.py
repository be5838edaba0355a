"""Sources, which name an array or a group: open one read-only, name it, identify its data.

In: a path, a URL, a store with a path, or an open array or group. Out: the array or group; its folder, its name, a
digest of its files. Errors: ``FileNotFoundError`` for a missing path, :class:`~linumpy.errors.SourceError` for a source
that is neither an array nor a group.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

import zarr
import zarr.errors
from zarr.abc.store import Store
from zarr.core.sync import sync
from zarr.storage import FsspecStore, LocalStore, StorePath, ZipStore

from linumpy.errors import SourceError
from linumpy.io.metadata import REFUSALS, checked_array, open_refused
from linumpy.io.paths import absolute, split_archive
from linumpy.io.stores.remote import RemoteStore, explained, is_object_store, is_remote, open_store, without_credentials
from linumpy.io.stores.zips import ArchiveStore

Source = Any
"""A path (``str``, ``Path``), a ``zarr.Array`` or ``zarr.Group``, a store, a ``StorePath``, or ``(store, path)``."""


def open_node(source: Source) -> zarr.Array | zarr.Group:
    """Open an array or a group from any kind of source; see :func:`linumpy.io.open.open_source`."""
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
    raise TypeError(f"source is a {type(source).__name__}: pass a path, a zarr array or group, or a (store, path) pair")


def local_store(folder: str | Path, *, read_only: bool = True) -> LocalStore:
    """Make the store of a local folder.

    Every local path that linumpy passes to zarr goes through here: zarr would parse text with ``#``, ``?``, ``;`` or
    ``::`` as a URL, and a relative path changes its meaning with the working folder of the process.
    """
    return LocalStore(absolute(folder), read_only=read_only)


def _open_path(source: str | Path) -> zarr.Array | zarr.Group:
    text = str(source)
    if "://" in text and not text.startswith("file://"):
        return _open_url(text)
    folder = _without_scheme(text)
    if (split := split_archive(folder)) is not None:
        return _open_archive(*split)
    if not Path(folder).exists():
        hint = ": only shells expand '~', give the whole path" if folder.startswith("~") else ""
        raise FileNotFoundError(f"there is no file or folder {folder!r}{hint}")
    # Without the format zarr looks for the files of both: half a millisecond for each read.
    zarr_format: Literal[3] | None = 3 if (Path(folder) / "zarr.json").is_file() else None
    if zarr_format and (array := _array_at(folder)) is not None:
        return checked_array(array)
    return open_at(StorePath(local_store(folder)), zarr_format, name=folder)


def _open_archive(file: str, inside: str) -> zarr.Array | zarr.Group:
    """Open what lies at a path in a ZIP file."""
    store = ArchiveStore(file)
    roots = store.directory.roots
    if not roots:
        raise SourceError(f"{file} is a ZIP file without a Zarr array or group")
    if not inside and "" not in roots:
        listed = ", ".join(f"{file}/{root}" for root in roots[:8]) + (" …" if len(roots) > 8 else "")
        raise SourceError(f"{file} has no Zarr array or group at its root: name one of {listed}")
    return open_at(_store_path(store, inside), name=f"{file}/{inside}".rstrip("/"))


def _array_at(folder: str) -> zarr.Array | None:
    """Open an array of zarr format 3 in a third of the time that ``zarr.open`` takes.

    None for another kind of node and for any error, which ``zarr.open`` then reports.
    """
    try:
        document = json.loads((Path(folder) / "zarr.json").read_bytes())
        if document["node_type"] != "array":
            return None
        return zarr.Array.from_dict(StorePath(local_store(folder)), document)
    except Exception:
        return None


def _open_url(url: str) -> zarr.Array | zarr.Group:
    name = without_credentials(url)
    try:
        return open_at(_store_path(*_located(url, None)), name=name)
    except SourceError:
        raise
    except ImportError as error:
        need = 'URLs need obstore: pip install "linumpy-gpu[remote]"; or fsspec: pip install "zarr[remote]"'
        raise SourceError(f"{name!r} cannot be opened: {error}. {need}") from error
    except Exception as error:  # the store's package raises its own errors: no connection, no credentials
        raise SourceError(f"{name!r} cannot be opened: {type(error).__name__}: {explained(error)}") from None


def _located(url: str, options: Mapping[str, Any] | None) -> tuple[Store, str]:
    """Return the store of a URL and the path there: by obstore, and without it, or for other schemes, by fsspec."""
    if is_remote(url):
        try:
            return open_store(url, options)
        except ImportError:
            if importlib.util.find_spec("obstore") is not None:
                raise
    return FsspecStore.from_url(url, storage_options=dict(options or {}), read_only=True), ""


def with_options(source: Source, storage_options: Mapping[str, Any] | None) -> Source:
    """Return a source that a URL and options for its store name; any other source as it is.

    Parameters
    ----------
    source : str, Path, or what else names a source
        A URL, if there are options.
    storage_options : mapping, optional
        What obstore's ``from_url`` takes, see docs/remote.md; without obstore, what fsspec takes.

    Raises
    ------
    ValueError
        Options for what is no URL; a URL with a query.
    SourceError
        Options that the store does not know.
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


def open_at(
    where: StorePath, zarr_format: Literal[2, 3] | None = None, *, name: str | None = None
) -> zarr.Array | zarr.Group:
    """Open the array or group at a path in a store, read-only.

    Parameters
    ----------
    where : StorePath
        The path.
    zarr_format : {2, 3}, optional
        Format of the node, if known.
    name : str, optional
        Name of the node in messages.

    Raises
    ------
    SourceError
        The path holds neither an array nor a group, or its metadata cannot be read.
    """
    if name is None and isinstance(where.store, RemoteStore):
        name = str(where)
    named = repr(name) if name else f"{where.path!r} in {where.store}"
    missing = f"{named} is neither a Zarr array nor a Zarr group (zarr v2 and v3 looked for)"
    node: zarr.Array | zarr.Group | None
    try:
        node = zarr.open(where.store, path=where.path, mode="r", zarr_format=zarr_format)
    except (zarr.errors.NodeNotFoundError, FileNotFoundError) as error:
        raise SourceError(missing) from error
    except REFUSALS as error:
        node = open_refused(where, error, name)
    except Exception as error:
        if not isinstance(where.store, RemoteStore):
            raise
        raise SourceError(f"{named} cannot be opened: {type(error).__name__}: {explained(error)}") from None
    if node is None:
        raise SourceError(missing)
    return checked_array(node) if isinstance(node, zarr.Array) else node


def _store_path(store: Store, path: str) -> StorePath:
    try:
        return StorePath(store, path)
    except ValueError as error:  # the path contains `.` or `..`
        raise SourceError(f"{path!r} is no path in {store}: {error}") from error


def local_name(source: str) -> str | None:
    """Return the path that a path or a ``file://`` URL names; None for other URLs."""
    return None if "://" in source and not source.startswith("file://") else _without_scheme(source)


def _without_scheme(text: str) -> str:
    """Remove ``file://``, with which zarr and linumpy print local paths; a local file is not read as a remote one."""
    if not text.startswith("file://"):
        return text
    path = text.removeprefix("file://")
    return path if Path(path).exists() else unquote(path)


def describe_source(source: Source) -> str:
    """Name a source for people: by its path or URL."""
    if isinstance(source, (zarr.Array, zarr.Group)):
        return without_credentials(str(source.store_path))
    if isinstance(source, tuple):
        return without_credentials("/".join(str(part) for part in source))
    return without_credentials(str(source)) if isinstance(source, str) else str(source)


def name_on_disk(array: zarr.Array) -> str:
    """Name an array as :func:`describe_source`, with the same name for each path to it.

    The file system resolves symbolic links and ``..``.
    """
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
    """Return the local path that an array is opened by: its folder, or a path in a ZIP file; None for other arrays."""
    if isinstance(array.store, ArchiveStore):
        return f"{array.store.path}/{array.path}".rstrip("/")
    folder = folder_of(array)
    return None if folder is None else str(folder)


def local_path(array: zarr.Array) -> str:
    """Return the path of an array, from which other processes can open it: its folder, or a path in a ZIP file.

    Raises
    ------
    SourceError
        The array is not in a local folder or ZIP file.
    """
    path = path_of(array)
    if path is None:
        raise SourceError(f"{array.store_path} is not in a local folder or ZIP file, so other processes cannot open it")
    return path


def identify_data(array: zarr.Array) -> str | None:
    """Return a digest that changes with the stored data of an array.

    It covers names, sizes, modification times and inodes of all files of a local array (of a ZIP file, its own),
    without reading them: some seconds for a million chunks. For a remote array it covers the server's entity tags or
    modification times. None for other stores.
    """
    folder, store = folder_of(array), array.store
    if folder is not None:
        lines: Iterable[str] | None = _local_files(str(folder), "")
    elif isinstance(store, (ArchiveStore, ZipStore)):
        lines = [_file_line(str(store.path), os.stat(store.path))]
    elif is_object_store(store):
        lines = _objects(array)
    elif isinstance(store, FsspecStore):
        lines = _remote_files(store.fs, f"{store.path}/{array.path}".rstrip("/"))
    else:
        lines = None
    if lines is None:
        return None
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:32]


def identify_path(path: str | Path) -> str:
    """Return a digest that changes with a local file or folder, by names, sizes, times and inodes, without reading.

    Raises
    ------
    FileNotFoundError
        There is nothing at the path.
    """
    digest = hashlib.sha256()
    if not os.path.isdir(path):
        digest.update(_file_line("", os.stat(path)).encode())
    else:
        for line in _local_files(str(path), ""):
            digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:32]


def _local_files(folder: str, prefix: str) -> Iterator[str]:
    """Yield a line for each file of an array, by name, without the ``.nfs`` files of removed files still open."""
    with os.scandir(folder) as entries:
        listed = sorted(entries, key=lambda item: item.name)
    for entry in listed:
        if entry.is_dir():
            yield from _local_files(entry.path, f"{prefix}{entry.name}/")
        elif not entry.name.startswith(".nfs"):
            with suppress(FileNotFoundError):  # removed meanwhile: the next digest differs
                yield _file_line(prefix + entry.name, entry.stat())


def _file_line(name: str, status: os.stat_result) -> str:
    return f"{name}\0{status.st_size} {status.st_mtime_ns} {status.st_ino}\n"


def _remote_files(files: Any, path: str) -> list[str] | None:
    """List the files of an fsspec file system; None where it has neither entity tags nor modification times."""
    find = files.find(path, detail=True) if not files.async_impl else sync(files._find(path, detail=True))
    lines = []
    for name, info in sorted(find.items()):
        marks = [
            info[key] for key in ("ETag", "etag", "LastModified", "last_modified", "mtime", "created") if key in info
        ]
        if not marks:
            return None
        lines.append(f"{name}\0{info.get('size')} {marks[0]}\n")
    return lines or None


def _objects(array: zarr.Array) -> list[str] | None:
    """List the objects of an array in an object store; None where it does not list, or tells no ETags and times."""
    import obstore.store

    if isinstance(array.store.store, obstore.store.HTTPStore):  # type: ignore[attr-defined]
        return None  # to find that out takes retries
    lines = []
    try:
        for batch in obstore.list(array.store.store, f"{array.path}/" if array.path else None):  # type: ignore[attr-defined]
            for found in batch:
                mark = found["e_tag"] or found["last_modified"]
                lines.append(f"{found['path']}\0{found['size']} {mark}\n")
    except Exception:  # a server that cannot list
        return None
    return sorted(lines) or None


def written(array: zarr.Array) -> str:
    """Return when the metadata of a local array was written, which differs for a new array with the old name."""
    if isinstance(array.store, ArchiveStore):
        return str(array.store.directory.stamp)
    folder = folder_of(array)
    if folder is None:
        return "unknown"
    name = "zarr.json" if array.metadata.zarr_format == 3 else ".zarray"
    return str((folder / name).stat().st_mtime_ns)


def sizes_of(path: Path) -> tuple[int, int]:
    """Return the decoded bytes of all arrays below a path, and the bytes of its files."""
    node = open_node(path)
    found = [node] if isinstance(node, zarr.Array) else [one for _, one in node.members(max_depth=None)]
    decoded = sum(one.nbytes for one in found if isinstance(one, zarr.Array))
    return decoded, path.stat().st_size if path.is_file() else _files_nbytes(path)


def _files_nbytes(folder: str | Path) -> int:
    with os.scandir(folder) as entries:
        return sum(_files_nbytes(entry.path) if entry.is_dir() else entry.stat().st_size for entry in entries)
