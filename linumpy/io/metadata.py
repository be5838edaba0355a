"""Open arrays and groups from their metadata documents, also in forms that zarr-python refuses or misreads.

Stored documents are not changed. Consolidated metadata are not used: they may be older than the members of a group.

Read here in zarr v3, beside what zarr-python reads: codecs and chunk key encodings that are bare names
(``"codecs": ["bytes"]``, as zarrs and GDAL write them), a ``configuration`` that is null, ``"fill_value": null`` (GDAL,
zarrita.js), the data types of :mod:`linumpy.io.data_types`, and the exact bits of a NaN that is written in hexadecimal,
such as ``"0x7e05"``. In zarr v2 (NCZarr): a shuffle filter whose ``elementsize`` is a string, or 0 for the item size,
which in arrays of other writers means bytes that are not shuffled; and a fill value that is missing or a list of one
value.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import zarr
from zarr.buffer import cpu
from zarr.core.sync import sync
from zarr.storage import LocalStore, ObjectStore, StorePath

from linumpy.errors import LinumpyError, MetadataError, SourceError
from linumpy.io.data_types import metadata_of, small_type_of
from linumpy.io.paths import DOCUMENTS, has_dots
from linumpy.io.stores.remote import AccessError, RemoteStore, explained, without_credentials
from linumpy.io.stores.zips import ArchiveStore

log = logging.getLogger(__name__)

#: Exceptions that zarr-python raises for a metadata document that it cannot read.
REFUSALS = (ValueError, KeyError, TypeError, AttributeError, ArithmeticError)

#: Largest offset, size and index that the C library's ``off_t`` and NumPy's ``intp`` hold.
_MAX_INT64 = 2**63 - 1
#: Maximum bytes of a chunk, shard and shard index, as in the core, where sums of a few of them must not overflow.
_MAX_NBYTES = 2**60
#: Data types of zarr v3 without a byte order. Raw bits (``r8`` and so on) have no byte order either.
_SINGLE_BYTES = ("bool", "int8", "uint8")

_Document = Mapping[str, Any]
Node = zarr.Array | zarr.Group
#: Members of a remote group that are opened at a time, since its store answers slowly.
_THREADS = 16


def open_stored(where: StorePath, name: str | None = None) -> Node | None:
    """Open the array or group at a path, read-only, from its own metadata documents; None if there is none.

    - `name`: name of the node in messages; by default store and path.
    """
    name = name or without_credentials(str(where))
    where = _read_only(where)
    stored = stored_documents(where, name)
    document: _Document | None = {}
    try:
        document = _document(stored)
        if document is None:
            return None
        if document.get("node_type") == "group":
            shown = {key: value for key, value in document.items() if key != "consolidated_metadata"}
            return zarr.Group(zarr.AsyncGroup.from_dict(where, shown))
        return checked_array(zarr.Array.from_dict(where, dict(document)), document)
    except MetadataError:
        raise
    except REFUSALS as error:
        return _repaired(where, document or {}, error, name)


def open_member(group: zarr.Group, path: str) -> Node | None:
    """Open a member of a group by :func:`open_stored`; None also for a path that leaves the group."""
    return None if has_dots(path) else open_stored(group.store_path / path)


def open_optional(group: zarr.Group, path: str) -> Node | None:
    """Open a member that need not exist; None also if access is denied, as some stores do for missing objects."""
    try:
        return open_member(group, path)
    except (PermissionError, SourceError) as error:
        if not isinstance(error.__cause__ or error, PermissionError):
            raise
        log.warning("%s: its member %r, if there is one, cannot be read: %s", group.store_path, path, error)
        return None


def open_members(group: zarr.Group, paths: Sequence[str]) -> Iterator[Node | None]:
    """Open members of a group by :func:`open_member`, in order; those of a remote group several at a time."""
    if isinstance(group.store, (LocalStore, ArchiveStore)):
        yield from (open_member(group, path) for path in paths)
        return
    with ThreadPoolExecutor(_THREADS, "linumpy-members") as pool:
        for first in range(0, len(paths), _THREADS):
            yield from pool.map(partial(open_member, group), paths[first : first + _THREADS])


def member_names(group: zarr.Group, path: str = "") -> tuple[str, ...] | None:
    """List the names in a group or in a folder at a path in it, sorted; None if the store does not list its keys."""

    async def listed() -> list[str]:
        return [name async for name in group.store.list_dir(f"{group.path}/{path}".strip("/"))]

    try:
        return tuple(sorted(sync(listed()))) if group.store.supports_listing else None
    except AccessError:
        return None


def _read_only(where: StorePath) -> StorePath:
    if type(where.store) is LocalStore:  # without the event loop, which takes longer than the rest
        return where if where.store.read_only else StorePath(where.store.with_read_only(True), where.path)
    if type(where.store) is ObjectStore:  # for linumpy's errors in place of obstore's
        return StorePath(RemoteStore(where.store.store, without_credentials(str(where.store))), where.path)
    return sync(StorePath.open(where.store, where.path, mode="r"))


def _repaired(where: StorePath, document: _Document, error: Exception, name: str) -> zarr.Array:
    """Open an array from a document that zarr-python refused with `error`."""
    try:
        repaired: Any = document
        if (small := small_type_of(document)) is not None:
            repaired = _repair_v3({**document, "data_type": "uint16" if small == "bfloat16" else "uint8"})
            repaired = metadata_of(repaired, small, name)
        elif document and document.get("node_type") != "group":
            repaired = _repair_v3(document)
            if document.get("zarr_format") == 2:  # a fill value may be missing, or a list of one value
                fill = document.get("fill_value")
                is_listed = isinstance(fill, list) and len(fill) == 1 and isinstance(document.get("dtype"), str)
                repaired = {**document, "fill_value": fill[0] if isinstance(fill, list) and is_listed else fill}
        if repaired != document:
            array = checked_array(zarr.Array(zarr.AsyncArray(metadata=repaired, store_path=where)), document)
            is_null = document.get("zarr_format") == 3 and document.get("fill_value", ...) is None
            if is_null and str(document.get("data_type")).startswith(("f", "c")):  # JavaScript writes NaN as null
                log.warning("%s: the fill value is null; missing chunks are read as 0", name)
            return array
    except MetadataError:
        raise
    except REFUSALS as again:
        error = again
    raise SourceError(f"the Zarr metadata of {name!r} cannot be read: {_reason(document, error)}") from error


def checked_array(array: zarr.Array, document: _Document | None = None) -> zarr.Array:
    """Check the shape and chunks of an array that zarr-python opened, and correct metadata that it misreads.

    `document` is the stored metadata of the array, if the caller has read them.
    """
    metadata = array.metadata
    if metadata.zarr_format == 3:
        chunk_nbytes(array, getattr(metadata.chunk_grid, "chunk_shape", ()))
        return _with_exact_fill(array, document)
    chunk_nbytes(array, metadata.chunks)
    filters = tuple(_with_element_size(codec, array, document) for codec in metadata.filters or ())
    if all(new is old for new, old in zip(filters, metadata.filters or (), strict=True)):
        return array
    metadata = dataclasses.replace(metadata, filters=filters)
    return zarr.Array(zarr.AsyncArray(metadata=metadata, store_path=array.store_path, config=array.config))


def _with_exact_fill(array: zarr.Array, document: _Document | None) -> zarr.Array:
    """Correct the bits of a NaN fill value that is written in hexadecimal, some of which zarr-python changes."""
    value: Any = np.asarray(array.metadata.fill_value)
    if value.dtype.kind not in "fc" or not np.isnan(value).any():
        return array
    written = (document or _document_of(array)).get("fill_value")
    parts = written if isinstance(written, list) else [written]
    values = value.reshape(1).view(value.real.dtype)
    bits = values.view(f"u{values.itemsize}").copy()
    if len(parts) != len(bits):
        return array
    for position, part in enumerate(parts):
        if isinstance(part, str) and re.fullmatch(f"0x[0-9a-fA-F]{{{2 * bits.itemsize}}}", part):
            bits[position] = int(part, 16)
    if bits.tobytes() == value.tobytes():
        return array
    metadata = dataclasses.replace(array.metadata, fill_value=bits.view(value.dtype)[0])
    return zarr.Array(zarr.AsyncArray(metadata=metadata, store_path=array.store_path, config=array.config))


def _document_of(array: zarr.Array) -> _Document:
    return _document(stored_documents(array.store_path, without_credentials(str(array.store_path)))) or {}


def chunk_nbytes(array: zarr.Array, chunk_shape: Sequence[int]) -> int:
    """Count the bytes of a decoded chunk."""
    if any(n > _MAX_INT64 for n in array.shape):
        raise MetadataError(f"{array.store_path}: the shape {array.shape} is beyond 64-bit numbers")
    # Along an axis without elements, some writers give chunks the length 0, too.
    if any(c < 1 and n > 0 for c, n in zip(chunk_shape, array.shape, strict=False)):
        raise MetadataError(f"{array.store_path}: chunks of {tuple(chunk_shape)} hold no elements")
    nbytes = math.prod(max(1, c) for c in chunk_shape) * array.dtype.itemsize
    if nbytes > _MAX_NBYTES:
        raise MetadataError(
            f"{array.store_path}: chunks of {tuple(chunk_shape)} {array.dtype} have more than 2**60 bytes"
        )
    return nbytes


def chunks_per_shard(array: zarr.Array, shard_shape: Sequence[int], chunk_shape: Sequence[int]) -> tuple[int, ...]:
    """Count the inner chunks along each axis of a shard."""
    chunk_nbytes(array, shard_shape)
    chunk_nbytes(array, chunk_shape)
    counts = tuple(max(1, n // max(1, c)) for n, c in zip(shard_shape, chunk_shape, strict=True))
    if 16 * math.prod(counts) > _MAX_NBYTES:
        shards = f"shards of {tuple(shard_shape)} with chunks of {tuple(chunk_shape)} inside"
        raise MetadataError(f"{array.store_path}: {shards} have an index of more than 2**60 bytes")
    return counts


def _with_element_size(codec: Any, array: zarr.Array, document: _Document | None) -> Any:
    """Return a shuffle filter of NCZarr, whose size may be text or 0, with the element size that it means."""
    size = getattr(codec, "elementsize", None)
    if getattr(codec, "codec_id", None) != "shuffle" or isinstance(size, bool):
        return codec
    if isinstance(size, str) and size.strip().isdecimal():
        return numcodecs.Shuffle(int(size) or array.dtype.itemsize)
    if size != 0:
        return codec
    document = document or _document_of(array)
    # The NetCDF library adds a key to the metadata, or an attribute.
    is_of_netcdf = any(key.lower() == "_nczarr_array" for key in (*document, *document.get("attributes", {})))
    return numcodecs.Shuffle(array.dtype.itemsize) if is_of_netcdf else codec


def stored_documents(where: StorePath, name: str) -> dict[str, bytes]:
    """Return the documents of a node by their keys. If one is there, denied access to others means they are not."""
    if type(where.store) is LocalStore:
        return _local_documents(where.store.root / where.path)

    async def read() -> list[Any]:
        reads = ((where / key).get(prototype=cpu.buffer_prototype) for key in DOCUMENTS)
        return await asyncio.gather(*reads, return_exceptions=True)

    stored, errors = {}, []
    for key, answer in zip(DOCUMENTS, sync(read()), strict=True):
        if isinstance(answer, BaseException):
            errors.append(answer)
        elif answer is not None:
            stored[key] = answer.to_bytes()
    for error in errors:
        if isinstance(where.store, ArchiveStore) or not isinstance(error, Exception):
            raise error
        if not (stored and isinstance(error, PermissionError)):
            kind = "" if isinstance(error, LinumpyError) else f"{type(error).__name__}: "
            raise SourceError(f"{name!r} cannot be opened: {kind}{explained(error)}") from (None if kind else error)
    return stored


def _local_documents(folder: Path) -> dict[str, bytes]:
    stored = {}
    for key in DOCUMENTS:
        try:
            stored[key] = (folder / key).read_bytes()
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG):
                raise
        if "zarr.json" in stored:  # then no other document is used
            break
    return stored


def _document(stored: Mapping[str, bytes]) -> dict[str, Any] | None:
    """Parse the documents of a node: of zarr v3 if there is one, else of a v2 array or group; None without any."""
    if "zarr.json" in stored:
        document = _object(stored["zarr.json"])
        if document.get("node_type") not in ("array", "group"):
            raise SourceError(f"node_type {document.get('node_type')!r}: it is neither a group nor an array")
        return document
    key = next((key for key in (".zarray", ".zgroup") if key in stored), None)
    if key is None:
        return None
    document = _object(stored[key])
    if document.get("zarr_format") != 2:
        raise SourceError(f"zarr_format {document.get('zarr_format')!r} in {key}, which is a file of format 2")
    document["attributes"] = _object(stored[".zattrs"]) if ".zattrs" in stored else {}
    return document if key == ".zarray" else {**document, "node_type": "group"}


def _object(stored: bytes) -> dict[str, Any]:
    """Parse a JSON document, which must be an object."""
    if stored.lstrip().startswith(b"<"):
        raise SourceError("a web page or another document of HTML or XML is in its place")
    document = json.loads(stored)
    if not isinstance(document, dict):
        raise TypeError(f"the metadata document holds {type(document).__name__}, not an object")
    return document


def _repair_v3(document: _Document) -> dict[str, Any]:
    """Return a document of zarr v3 in zarr-python's form."""
    repaired = dict(document)
    data_type = document.get("data_type")
    if isinstance(data_type, Mapping) and not data_type.get("configuration") and "name" in data_type:
        data_type = repaired["data_type"] = data_type["name"]
    if isinstance(document.get("codecs"), list):
        repaired["codecs"] = _codecs(document["codecs"], data_type)
    if "chunk_key_encoding" in document:
        repaired["chunk_key_encoding"] = _named(document["chunk_key_encoding"])
    if document.get("fill_value", ...) is None:
        repaired["fill_value"] = _zero(data_type)
    return repaired


def _codecs(codecs: Sequence[Any], data_type: Any) -> list[Any]:
    """Return codecs, also in shards, as objects.

    A bare name ``"bytes"`` is a `SourceError` if elements have a byte order, which the name does not state.
    """
    named = [_named(codec) for codec in codecs]
    for position, (codec, written) in enumerate(zip(named, codecs, strict=True)):
        if written == "bytes" and not (data_type in _SINGLE_BYTES or str(data_type).startswith("r")):
            raise SourceError(f"codec 'bytes' does not say which endian the elements of {data_type!r} have")
        if isinstance(codec, Mapping) and codec.get("name") == "sharding_indexed" and codec.get("configuration"):
            inner = dict(codec["configuration"])
            inner |= {"codecs": _codecs(inner["codecs"], data_type)} if "codecs" in inner else {}
            inner |= {"index_codecs": _codecs(inner["index_codecs"], "uint64")} if "index_codecs" in inner else {}
            named[position] = {**codec, "configuration": inner}
    return named


def _named(extension: Any) -> Any:
    """Return a codec or another extension as an object, without a configuration that is null."""
    if isinstance(extension, str):
        return {"name": extension}
    if isinstance(extension, Mapping) and extension.get("configuration", ...) is None:
        return {key: value for key, value in extension.items() if key != "configuration"}
    return extension


def _zero(data_type: Any) -> Any:
    """Return the fill value that writers mean by null in zarr v3; None for data types without such a value."""
    name = str(data_type)
    if name.startswith("complex"):
        return [0.0, 0.0]
    if name.startswith(("int", "uint", "float")):
        return 0
    return {"bool": False, "string": ""}.get(name)


def _reason(document: _Document, error: Exception) -> str:
    """Return why a document cannot be read: the part that zarr-python refuses, or the exception."""
    if isinstance(error, SourceError):
        return str(error)
    dtype = document.get("data_type", document.get("dtype"))
    if isinstance(error, OverflowError):
        return f"fill_value {document.get('fill_value')!r} is no value of {dtype}"
    if isinstance(error, ZeroDivisionError):
        return f"a chunk of 0 elements in the codecs {json.dumps(document.get('codecs'))}"
    if isinstance(document.get("chunk_grid"), str):
        return f"chunk_grid {document['chunk_grid']!r} does not say which chunk_shape"
    if document.get("zarr_format") == 3 and document.get("fill_value", ...) is None and _zero(dtype) is None:
        return f"fill_value null, which has no meaning for data type {dtype!r}"
    return f"{type(error).__name__}: {error}"
