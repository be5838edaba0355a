"""Metadata documents of other writers that zarr-python refuses or misreads, although their meaning is clear.

In: the path of a node in its store, or an open ``zarr.Array``. Out: a ``zarr.Array`` with the same metadata in
zarr-python's form, or a ``zarr.Group``; stored documents are not changed. Errors:
:class:`~linumpy.errors.SourceError` for documents that remain unreadable, :class:`~linumpy.errors.MetadataError` for
impossible shapes and chunks.

Read here in zarr v3: codecs and chunk key encodings that are bare names (``"codecs": ["bytes"]``, as zarrs and GDAL
write them), a ``configuration`` that is null, ``"fill_value": null`` (GDAL, zarrita.js), the data types of
:mod:`linumpy.io.data_types`, and the exact bits of a NaN that is written in hexadecimal, such as ``"0x7e05"``. In
zarr v2 (NCZarr): a shuffle filter whose ``elementsize`` is a string, or 0 for the item size, which in arrays of other
writers means bytes that are not shuffled; and a fill value that is missing or a list of one value.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numcodecs
import numpy as np
import zarr
from zarr.buffer import cpu
from zarr.core.sync import sync
from zarr.storage import StorePath

from linumpy.errors import MetadataError, SourceError
from linumpy.io.data_types import metadata_of, small_type_of

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


def open_refused(where: StorePath, error: Exception, name: str | None = None) -> zarr.Array | zarr.Group | None:
    """Open a node that zarr-python refused.

    Parameters
    ----------
    where : StorePath
        Store and path of the node.
    error : Exception
        The exception of zarr-python, one of :data:`REFUSALS`.
    name : str, optional
        Name of the node in messages; by default store and path.

    Returns
    -------
    zarr.Array, zarr.Group or None
        The node; None if no metadata document is stored there.

    Raises
    ------
    SourceError
        The document cannot be read; the message names the node and the reason.
    """
    name = name or str(where)
    document: _Document | None = {}
    try:
        document = _read_document(where)
        if document is None:
            return None
        if document.get("node_type") == "group":
            # zarr-python may have refused the metadata of a member, which are consolidated in the group's document.
            return zarr.open_group(where.store, path=where.path, mode="r", zarr_format=3, use_consolidated=False)
        if (small := small_type_of(document)) is not None:
            repaired = _repair_v3({**document, "data_type": "uint16" if small == "bfloat16" else "uint8"})
            parsed: Any = metadata_of(repaired, small, name)
            return zarr.Array(zarr.AsyncArray(metadata=parsed, store_path=where))
        repaired = _repair_v2(document) if document.get("zarr_format") == 2 else _repair_v3(document)
        if repaired != document:
            metadata: Any = repaired
            array = zarr.Array(zarr.AsyncArray(metadata=metadata, store_path=where))
            _warn_of_null(document, name)
            return array
    except REFUSALS as again:
        raise SourceError(f"the Zarr metadata of {name!r} cannot be read: {_reason(document or {}, again)}") from again
    raise SourceError(f"the Zarr metadata of {name!r} cannot be read: {_reason(document, error)}") from error


def checked_array(array: zarr.Array) -> zarr.Array:
    """Check the shape and chunks of an array that zarr-python opened, and correct metadata that it misreads.

    Returns
    -------
    zarr.Array
        `array`, or a new ``zarr.Array`` if zarr-python misread a shuffle filter of NCZarr or the bits of a NaN.

    Raises
    ------
    MetadataError
        As :func:`chunk_nbytes`.
    """
    metadata = array.metadata
    if metadata.zarr_format == 3:
        chunk_nbytes(array, getattr(metadata.chunk_grid, "chunk_shape", ()))
        return _with_exact_fill(array)
    chunk_nbytes(array, metadata.chunks)
    filters = tuple(_with_element_size(codec, array) for codec in metadata.filters or ())
    if all(new is old for new, old in zip(filters, metadata.filters or (), strict=True)):
        return array
    metadata = dataclasses.replace(metadata, filters=filters)
    return zarr.Array(zarr.AsyncArray(metadata=metadata, store_path=array.store_path, config=array.config))


def _with_exact_fill(array: zarr.Array) -> zarr.Array:
    """Correct the bits of a NaN fill value that is written in hexadecimal, some of which zarr-python changes."""
    value: Any = np.asarray(array.metadata.fill_value)
    if value.dtype.kind not in "fc" or not np.isnan(value).any():
        return array
    document = _read_document(array.store_path) or {}
    written = document.get("fill_value")
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


def chunk_nbytes(array: zarr.Array, chunk_shape: Sequence[int]) -> int:
    """Count the bytes of a decoded chunk.

    Raises
    ------
    MetadataError
        A length beyond 64-bit numbers, an empty chunk, or a chunk of more than 2**60 bytes.
    """
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
    """Count the inner chunks along each axis of a shard.

    Raises
    ------
    MetadataError
        As :func:`chunk_nbytes`, for shard or chunk; or an index of the shard of more than 2**60 bytes.
    """
    chunk_nbytes(array, shard_shape)
    chunk_nbytes(array, chunk_shape)
    counts = tuple(max(1, n // max(1, c)) for n, c in zip(shard_shape, chunk_shape, strict=True))
    if 16 * math.prod(counts) > _MAX_NBYTES:
        shards = f"shards of {tuple(shard_shape)} with chunks of {tuple(chunk_shape)} inside"
        raise MetadataError(f"{array.store_path}: {shards} have an index of more than 2**60 bytes")
    return counts


def _with_element_size(codec: Any, array: zarr.Array) -> Any:
    """Return a shuffle filter of NCZarr with the element size that it means; other filters unchanged.

    NCZarr may write the size as a string, and 0 for the item size.
    """
    size = getattr(codec, "elementsize", None)
    if getattr(codec, "codec_id", None) != "shuffle" or isinstance(size, bool):
        return codec
    if isinstance(size, str) and size.strip().isdecimal():
        return numcodecs.Shuffle(int(size) or array.dtype.itemsize)
    return numcodecs.Shuffle(array.dtype.itemsize) if size == 0 and _is_of_netcdf(array) else codec


def _is_of_netcdf(array: zarr.Array) -> bool:
    """Whether the NetCDF library wrote an array of zarr v2: it adds a key to the metadata, or an attribute."""
    document = _read_document(array.store_path) or {}
    return any(key.lower() == "_nczarr_array" for key in (*document, *document.get("attributes", {})))


def _read_document(where: StorePath) -> dict[str, Any] | None:
    """Read the metadata document of a node, of zarr v3 if there is one, else of a v2 array; None without either."""

    async def read(key: str) -> bytes | None:
        buffer = await (where / key).get(prototype=cpu.buffer_prototype)
        return None if buffer is None else buffer.to_bytes()

    stored = sync(read("zarr.json"))
    if stored is not None:
        return _object(stored)
    stored = sync(read(".zarray"))
    if stored is None:
        return None
    attributes = sync(read(".zattrs"))
    return {**_object(stored), "attributes": {} if attributes is None else _object(attributes)}


def _object(stored: bytes) -> dict[str, Any]:
    """Parse a JSON document, which must be an object."""
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


def _warn_of_null(document: _Document, name: str) -> None:
    """Log a warning for floats: the fill value null is read as 0, but may mean NaN, which JavaScript writes as null."""
    kind = str(document.get("data_type"))
    if document.get("zarr_format") == 3 and document.get("fill_value", ...) is None and kind.startswith(("f", "c")):
        log.warning("%s: the fill value is null; missing chunks are read as 0", name)


def _repair_v2(document: _Document) -> dict[str, Any]:
    """Return a document of zarr v2 whose fill value is neither missing nor a list of one value."""
    fill = document.get("fill_value")
    if isinstance(fill, list) and len(fill) == 1 and isinstance(document.get("dtype"), str):
        fill = fill[0]
    return {**document, "fill_value": fill}


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
