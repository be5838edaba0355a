"""Identify the stored data of an array, to detect a source that has changed since a run began.

In: an array. Out: a digest of its files' or objects' names, sizes and times. Errors: ``OSError``.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import zarr
from zarr.core.sync import sync
from zarr.storage import FsspecStore, ZipStore

from linumpy.core.files import list_files
from linumpy.core.native import why_no_core
from linumpy.io.source import folder_of
from linumpy.io.stores.remote import is_object_store
from linumpy.io.stores.zips import ArchiveStore


def identify_data(array: zarr.Array) -> str | None:
    """Return a digest that changes with the stored data of an array.

    It covers names, sizes, modification times and inodes of all files of a local array, without reading them: some
    seconds for a million chunks. For an array in a ZIP file it covers the ZIP file; for a remote array, the server's
    entity tags or modification times. None for other stores.
    """
    folder, store = folder_of(array), array.store
    if folder is not None:
        lines: Iterable[str] | None = _local_files(str(folder))
    elif isinstance(store, (ArchiveStore, ZipStore)):
        lines = [_file_line(str(store.path), os.stat(store.path))]
    elif is_object_store(store):
        lines = _objects(array)
    elif isinstance(store, FsspecStore):
        lines = _remote_files(store.fs, f"{store.path}/{array.path}".rstrip("/"))
    else:
        lines = None
    return None if lines is None else _digest(lines)


def identify_path(path: str | Path) -> str:
    """Return a digest that changes with a local file or folder, by names, sizes, times and inodes, without reading.

    Raises
    ------
    FileNotFoundError
        Neither a file nor a folder is at the path.
    """
    return _digest(_local_files(str(path)) if os.path.isdir(path) else [_file_line("", os.stat(path))])


def unknown_data() -> str:
    """Return a text in place of the digest of data that cannot be identified; no other run has the same text."""
    return f"not known {secrets.token_hex(8)}"


def digest_of(document: object) -> str:
    """Return a digest of a document of JSON; other values in it count by their text."""
    return hashlib.sha256(json.dumps(document, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _digest(lines: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:32]


def _local_files(folder: str, prefix: str = "") -> Iterator[str]:
    """Yield a line for each file of an array, by name, except ``.nfs`` files, which are removed files still open."""
    if why_no_core() is None:
        yield list_files(folder).decode("utf-8", "surrogateescape")
        return
    with os.scandir(folder) as entries:
        listed = sorted(entries, key=lambda item: os.fsencode(item.name))
    for entry in listed:
        if entry.is_dir():
            yield from _local_files(entry.path, f"{prefix}{entry.name}/")
        elif not entry.name.startswith(".nfs"):
            with suppress(FileNotFoundError):  # the file was just removed: the next digest differs
                yield _file_line(prefix + entry.name, entry.stat())


def _file_line(name: str, status: os.stat_result) -> str:
    return f"{name}\0{status.st_size} {status.st_mtime_ns} {status.st_ino}\n"


def _remote_files(files: Any, path: str) -> list[str] | None:
    """List the files of an fsspec file system; None where it has neither entity tags nor modification times."""
    found = files.find(path, detail=True) if not files.async_impl else sync(files._find(path, detail=True))
    lines = []
    for name, info in sorted(found.items()):
        marks = [
            info[key] for key in ("ETag", "etag", "LastModified", "last_modified", "mtime", "created") if key in info
        ]
        if not marks:
            return None
        lines.append(f"{name}\0{info.get('size')} {marks[0]}\n")
    return lines or None


def _objects(array: zarr.Array) -> list[str] | None:
    """List the objects of an array in an object store; None if the store does not list objects, ETags or times."""
    import obstore.store

    if isinstance(array.store.store, obstore.store.HTTPStore):  # type: ignore[attr-defined]
        return None  # an HTTP store lists nothing, and asking it takes retries
    lines = []
    try:
        for batch in obstore.list(array.store.store, f"{array.path}/" if array.path else None):  # type: ignore[attr-defined]
            for meta in batch:
                mark = meta["e_tag"] or meta["last_modified"]
                lines.append(f"{meta['path']}\0{meta['size']} {mark}\n")
    except Exception:  # a server that cannot list
        return None
    return sorted(lines) or None
