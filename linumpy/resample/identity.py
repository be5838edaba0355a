"""Identify stored data by a digest, to detect a source that has changed since a run began."""

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
    """Return a digest of the stored objects of an array: another digest means that objects were written again.

    For a local array it covers names, sizes, modification times and inodes of all files, which are not read; a million
    chunks take some seconds. For an array in a ZIP file it covers the ZIP file. For a remote array it covers names,
    sizes and the server's entity tags or times. None if the store does not tell these.
    """
    folder, store = folder_of(array), array.store
    if folder is not None:
        lines: Iterable[str] | None = _local_files(str(folder))
    elif isinstance(store, (ArchiveStore, ZipStore)):
        lines = [_file_line(str(store.path), os.stat(store.path))]
    elif is_object_store(store):
        lines = _object_lines(array)
    elif isinstance(store, FsspecStore):
        lines = _fsspec_lines(store.fs, f"{store.path}/{array.path}".rstrip("/"))
    else:
        lines = None
    return None if lines is None else _digest(lines)


def identify_path(path: str | Path) -> str:
    """Return a digest of the names, sizes, times and inodes of a local file or of the files in a folder."""
    return _digest(_local_files(str(path)) if os.path.isdir(path) else [_file_line("", os.stat(path))])


def unknown_data() -> str:
    """Return a placeholder for the digest of data that cannot be identified; it differs from run to run."""
    return f"not known {secrets.token_hex(8)}"


def digest_of(document: object) -> str:
    """Return a digest of a JSON document; values of other types are converted by ``str``."""
    return hashlib.sha256(json.dumps(document, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _digest(lines: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:32]


def _local_files(folder: str, prefix: str = "") -> Iterator[str]:
    """Yield sorted lines of all files in a folder, except ``.nfs`` files: deleted files that are still open."""
    if why_no_core() is None:
        yield list_files(folder).decode("utf-8", "surrogateescape")
        return
    with os.scandir(folder) as entries:
        listed = sorted(entries, key=lambda item: os.fsencode(item.name))
    for entry in listed:
        if entry.is_dir():
            yield from _local_files(entry.path, f"{prefix}{entry.name}/")
        elif not entry.name.startswith(".nfs"):
            with suppress(FileNotFoundError):  # a file deleted during the scan
                yield _file_line(prefix + entry.name, entry.stat())


def _file_line(name: str, status: os.stat_result) -> str:
    return f"{name}\0{status.st_size} {status.st_mtime_ns} {status.st_ino}\n"


def _fsspec_lines(file_system: Any, path: str) -> list[str] | None:
    """List the files of an fsspec file system; None if a file has no tag and no time, or if there is no file."""
    is_async = file_system.async_impl
    files = sync(file_system._find(path, detail=True)) if is_async else file_system.find(path, detail=True)
    lines = []
    for name, info in sorted(files.items()):
        versions = [
            info[key] for key in ("ETag", "etag", "LastModified", "last_modified", "mtime", "created") if key in info
        ]
        if not versions:
            return None
        lines.append(f"{name}\0{info.get('size')} {versions[0]}\n")
    return lines or None


def _object_lines(array: zarr.Array) -> list[str] | None:
    """List the objects of an array in an object store; None if the listing fails, or is empty."""
    import obstore.store

    if isinstance(array.store.store, obstore.store.HTTPStore):  # type: ignore[attr-defined]
        return None  # an HTTP store cannot list, and the attempt costs retries
    lines = []
    try:
        for batch in obstore.list(array.store.store, f"{array.path}/" if array.path else None):  # type: ignore[attr-defined]
            for meta in batch:
                version = meta["e_tag"] or meta["last_modified"]
                lines.append(f"{meta['path']}\0{meta['size']} {version}\n")
    except Exception:  # whatever the reason, the data cannot be identified
        return None
    return sorted(lines) or None
