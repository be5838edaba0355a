"""Read how an array is stored: an :class:`~linumpy.plan.layout.ArrayLayout` from zarr's metadata. No chunk is opened.

The attribute ``unsupported`` says why linumpy's reader cannot read the array.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import zarr
from numcodecs.abc import Codec
from zarr.abc.store import RangeByteRequest, SuffixByteRequest
from zarr.buffer import cpu
from zarr.core.sync import sync
from zarr.storage import LocalStore

from linumpy.arrays import bits_of
from linumpy.io.metadata import chunk_nbytes, chunks_per_shard
from linumpy.io.source import path_of
from linumpy.io.stores.remote import remote_array
from linumpy.io.stores.zips import ArchiveStore, entries_of
from linumpy.plan.codecs import HOST_FILTERS, DecodeChain, UndecodableError, read_array_filter, read_chain
from linumpy.plan.crops import StoredChunks
from linumpy.plan.layout import MAX_RANK, ArrayLayout, ChunkKeys, ShardLayout

#: bool, and the integers, floats and complex numbers for which CUDA has types.
_SUPPORTED_DTYPES = frozenset(["b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"])
#: Maximum number of different chunk shapes in one array: each shape needs its own kernel launches.
MAX_SHAPES = 64
#: Filters of array elements that the host decodes; zarr v3 applies them before codec 'bytes'.
_ARRAY_FILTERS = frozenset(f"numcodecs.{name}" for name in HOST_FILTERS)
#: Array codecs that only zarr-python decodes; linumpy parses the codecs after them.
_BY_ZARR = ("scale_offset", "cast_value")
#: Filters that round floats when they are written, so that there is nothing to decode.
_NOT_DECODED = ("bitround", "numcodecs.bitround")

_Document = Mapping[str, Any]
"""A part of zarr's JSON metadata."""


@dataclass(frozen=True)
class _Codecs:
    """How the codecs of an array store a chunk.

    - `stored_axes`: axes of the array in the order in which they are stored.
    - `big_endian`: byte order of the stored elements; None if it is not known.
    - `unsupported`: why linumpy's reader cannot read the chunks; None if it can.
    - `chain`: how to decode the bytes of a chunk; None for raw chunks, and for codecs that are not supported.
    """

    stored_axes: tuple[int, ...]
    big_endian: bool | None
    unsupported: str | None
    chain: DecodeChain | None = None


def read_layout(array: zarr.Array) -> ArrayLayout:
    """Describe how an array is stored; ``unsupported`` is not None if zarr-python must read it."""
    document: _Document = array.metadata.to_dict()
    return _layout_v2(array, document) if array.metadata.zarr_format == 2 else _layout_v3(array, document)


def _layout_v2(array: zarr.Array, document: _Document) -> ArrayLayout:
    compressor, filters = document.get("compressor"), list(document.get("filters") or ())
    while filters and array.dtype.kind == "f" and _settings(filters[0])["name"] in _NOT_DECODED:
        del filters[0]
    settings = [_settings(codec) for codec in (*filters, *([compressor] if compressor else []))]
    axes = tuple(range(array.ndim))
    big_endian = array.dtype.byteorder == ">" or (array.dtype.byteorder == "=" and sys.byteorder == "big")
    return _finish(
        array,
        chunk_shape=tuple(array.chunks),
        codecs=_chained(
            axes[::-1] if document["order"] == "F" else axes, settings, chunk_nbytes(array, array.chunks), big_endian
        ),
        keys=ChunkKeys("", document["dimension_separator"]),
        shard=None,
        names=tuple(setting["name"] for setting in settings),
        unsupported=None,
    )


def _settings(codec: Codec | _Document) -> dict[str, Any]:
    """Return the name and settings of a codec of numcodecs."""
    config = dict(codec if isinstance(codec, Mapping) else codec.get_config())
    return {"name": str(config.pop("id")), **config}


def _layout_v3(array: zarr.Array, document: _Document) -> ArrayLayout:
    grid = document["chunk_grid"]
    chain = list(document["codecs"])
    sharded = [codec for codec in chain if codec["name"] == "sharding_indexed"]
    object_shape, lengths, reason = _objects(grid, array.shape)
    shard, chunk_shape, reasons = None, object_shape, [reason] if reason else []
    if document.get("storage_transformers"):
        reasons.append("storage transformers")
    if sharded and len(chain) > 1:
        reasons.append("codecs around the sharding codec")
    if sharded:
        inner = sharded[0]["configuration"]
        chunk_shape = tuple(int(n) for n in inner["chunk_shape"])
        shard, reason = _shard(inner, chunks_per_shard(array, object_shape, chunk_shape))
        reasons += [reason] if reason else []
        chain = list(inner["codecs"])
    names = tuple(str(codec["name"]) for codec in chain)
    codecs = _read_codecs(chain, array.ndim, _native(array.dtype), chunk_nbytes(array, chunk_shape))
    shuffle = 0 if codecs.chain is None else codecs.chain.shuffle
    if lengths is not None and not sharded and shuffle and array.dtype.itemsize % shuffle:
        reasons.append(f"filter 'shuffle' with elements of {shuffle} bytes in chunks of several shapes")
    return _finish(
        array,
        chunk_shape=chunk_shape,
        codecs=codecs,
        keys=_keys_v3(document["chunk_key_encoding"]),
        shard=shard,
        names=names,
        unsupported=reasons[0] if reasons else None,
        grid=str(grid["name"]),
        object_shape=object_shape,
        lengths=lengths,
    )


def _objects(
    grid: _Document, shape: Sequence[int]
) -> tuple[tuple[int, ...], tuple[np.ndarray, ...] | None, str | None]:
    """Read the chunk grid: shape of the (longest) stored objects, their lengths by axis, and why it is not supported.

    The lengths are None for a regular grid, and the reason for a grid that is supported.
    """
    configuration = grid["configuration"]
    if grid["name"] == "regular":
        return tuple(int(n) for n in configuration["chunk_shape"]), None, None
    if grid["name"] != "rectilinear" or configuration.get("kind") != "inline":
        return tuple(shape), None, f"chunk grid {grid['name']!r}"
    axes = zip(configuration["chunk_shapes"], shape, strict=True)
    lengths = tuple(_lengths(spec, extent) for spec, extent in axes)
    shapes = math.prod(len(set(axis.tolist())) for axis in lengths)
    reason = f"chunks of {shapes} shapes: up to {MAX_SHAPES} are read" if shapes > MAX_SHAPES else None
    return tuple(int(axis.max(initial=1)) for axis in lengths), lengths, reason


def _lengths(spec: int | Sequence[Any], extent: int) -> np.ndarray:
    """List the lengths of chunks along an axis from their description: a length, or lengths and (length, repeats)."""
    if isinstance(spec, int):
        return np.full(-(-extent // spec), spec, np.int64)
    pairs = [(entry, 1) if isinstance(entry, int) else entry for entry in spec]
    return np.repeat(*(np.array(column, np.int64) for column in zip(*pairs, strict=True)))


def _shard(configuration: _Document, counts: tuple[int, ...]) -> tuple[ShardLayout, str | None]:
    """Read how shards and their indexes are stored; the second result says why that is not supported, or is None."""
    index = list(configuration.get("index_codecs", ()))
    names = [codec["name"] for codec in index]
    supported = names in (["bytes"], ["bytes", "crc32c"])
    shard = ShardLayout(
        chunks_per_shard=counts,
        index_at_end=_text(configuration.get("index_location", "end")) == "end",
        index_big_endian=supported and _endian(index[0]) == "big",
        index_checksum="crc32c" in names,
    )
    return shard, None if supported else f"shard index encoded by {' + '.join(names)}"


def _keys_v3(encoding: _Document) -> ChunkKeys | None:
    """Read how the keys of chunks are made; None for an unknown encoding."""
    configuration = encoding.get("configuration") or {}
    if encoding["name"] == "default":
        separator = _text(configuration.get("separator", "/"))
        return ChunkKeys("c" + separator, separator)
    if encoding["name"] == "v2":
        return ChunkKeys("", _text(configuration.get("separator", ".")))
    return None


def _read_codecs(chain: Sequence[_Document], rank: int, dtype: np.dtype, chunk_nbytes: int) -> _Codecs:
    """Read the codecs of a chunk, which must come in this order: transposes, array filters, ``bytes``, codecs of bytes.

    Codecs that are not decoded are skipped before the first filter.
    """
    axes: tuple[int, ...] = tuple(range(rank))
    filters: list[_Document] = []
    for position, codec in enumerate(chain):
        if codec["name"] == "transpose" and not filters:
            order = tuple(int(axis) for axis in codec["configuration"]["order"])
            axes = tuple(axes[axis] for axis in order)
        elif codec["name"] in _NOT_DECODED and dtype.kind == "f" and not filters:
            continue
        elif codec["name"] in _ARRAY_FILTERS or codec["name"] in _BY_ZARR:
            filters.append(codec)
        elif codec["name"] == "bytes":
            return _codecs_after_bytes(axes, filters, _endian(codec), chain[position + 1 :], dtype, chunk_nbytes)
        else:
            return _Codecs(axes, None, f"codec {codec['name']!r}")
    return _Codecs(axes, None, "a codec chain without 'bytes'")


def _codecs_after_bytes(
    axes: tuple[int, ...],
    filters: Sequence[_Document],
    endian: str | None,
    codecs: Sequence[_Document],
    dtype: np.dtype,
    chunk_nbytes: int,
) -> _Codecs:
    """Read the filters before codec 'bytes', which the host or zarr-python decodes, and the codecs after it."""
    encoded: list[_Document] = [{**(codec.get("configuration") or {}), "name": codec["name"]} for codec in codecs]
    if by_zarr := [str(codec["name"]) for codec in filters if codec["name"] in _BY_ZARR]:
        known = _chained(axes, encoded, chunk_nbytes, False)
        return replace(
            known, chain=replace(known.chain or DecodeChain(""), host_filter=json.dumps({"id": " + ".join(by_zarr)}))
        )
    try:
        settings = [read_array_filter(array_filter, dtype, endian) for array_filter in filters]
    except UndecodableError as reason:
        return _Codecs(axes, None, str(reason))
    # Filters decode to this machine's byte order, whatever codec 'bytes' says.
    return _chained(axes, [*settings, *encoded], chunk_nbytes, endian == "big" and not filters)


def _chained(axes: tuple[int, ...], codecs: Sequence[_Document], chunk_nbytes: int, big_endian: bool) -> _Codecs:
    """Read the codecs of the bytes of a chunk."""
    try:
        return _Codecs(axes, big_endian, None, read_chain(codecs, chunk_nbytes))
    except UndecodableError as reason:
        return _Codecs(axes, big_endian, str(reason))


def _endian(codec: _Document) -> str | None:
    endian = (codec.get("configuration") or {}).get("endian")
    return None if endian is None else _text(endian)


def _text(value: object) -> str:
    """Return a name that zarr-python keeps as a string or as a member of an enumeration."""
    return str(getattr(value, "value", value))


def _finish(
    array: zarr.Array,
    *,
    chunk_shape: tuple[int, ...],
    codecs: _Codecs,
    keys: ChunkKeys | None,
    shard: ShardLayout | None,
    names: tuple[str, ...],
    unsupported: str | None,
    grid: str = "regular",
    object_shape: tuple[int, ...] | None = None,
    lengths: tuple[np.ndarray, ...] | None = None,
) -> ArrayLayout:
    dtype = _native(array.dtype)
    # A subclass of LocalStore may read its bytes from elsewhere, or change them.
    is_local = isinstance(array.store, ArchiveStore) or type(array.store) is LocalStore
    root, entries = path_of(array) if is_local else None, None
    remote = remote_array(array) if root is None else None
    if isinstance(array.store, ArchiveStore) and keys is not None:
        stored = object_shape if object_shape is not None else chunk_shape
        grid_shape = tuple(-(-n // max(1, size)) for n, size in zip(array.shape, stored, strict=True))
        if lengths is not None:
            grid_shape = tuple(len(axis) for axis in lengths)
        entries = entries_of(array.store.directory, array.path, keys, grid_shape)
    name = str(array.store_path) if remote is None else f"{remote.url}/{remote.path}".rstrip("/")
    reasons = (
        unsupported,
        None
        if root is not None or remote is not None
        else f"the store is a {type(array.store).__name__}, which has its bytes on a GPU",
        None if bits_of(dtype).str[1:] in _SUPPORTED_DTYPES else f"dtype {array.dtype}: only bool and numbers are read",
        None if 1 <= array.ndim <= MAX_RANK else f"rank {array.ndim}: 1 to {MAX_RANK} axes are read",
        None if keys is not None else "an unknown chunk key encoding",
        codecs.unsupported,
    )
    why_not = next((reason for reason in reasons if reason), None)
    stored_big = bool(codecs.big_endian) and dtype.itemsize > 1
    fill = _fill_value(array, dtype)
    # The bits of a NaN that was given in memory are not stored: without the core, the array itself must be read.
    is_kept = why_not is not None or (fill is not None and dtype.kind in "fc" and bool(np.isnan(fill)))
    return ArrayLayout(
        name=name,
        root=root,
        zarr_format=int(array.metadata.zarr_format),
        shape=tuple(array.shape),
        chunk_shape=tuple(max(1, c) for c in chunk_shape),
        dtype=dtype,
        swapped=dtype.itemsize > 1 and stored_big != (sys.byteorder == "big"),
        stored_axes=codecs.stored_axes,
        keys=keys,
        fill_value=fill,
        shard=shard,
        codecs=names,
        unsupported=why_not,
        chain=codecs.chain,
        grid=grid,
        lengths=lengths,
        entries=entries,
        remote=remote,
        array=array if is_kept else None,
    )


def _native(dtype: np.dtype) -> np.dtype:
    """Return a dtype in this machine's byte order; strings of variable length have no byte order."""
    return dtype if isinstance(dtype, np.dtypes.StringDType) else dtype.newbyteorder("=")


def _fill_value(array: zarr.Array, dtype: np.dtype) -> Any:
    """Return the value of a missing chunk; null, which zarr v2 allows, reads as zero."""
    if bits_of(dtype).str[1:] not in _SUPPORTED_DTYPES:
        return None
    value = array.metadata.fill_value
    return np.zeros((), dtype)[()] if value is None else np.asarray(value).astype(dtype)[()]


def stored_chunks(array: zarr.Array) -> StoredChunks:
    """Find out where chunks are stored, from the sizes of a few, or the index of a shard; no chunk is read."""
    layout = read_layout(array)
    whole = [max(n // size, 1) for n, size in zip(layout.shape, layout.object_shape, strict=True)]
    middle, found = tuple(n // 2 for n in whole), []
    for index in (middle, *map(tuple, np.random.default_rng(0).integers(0, whole, (15, layout.rank)).tolist())):
        key = f"{array.path}/{array.metadata.encode_chunk_key(index)}".lstrip("/")
        try:
            if layout.shard is not None:
                if (in_shard := _read_index(array, key, layout.shard)) is not None:
                    return in_shard
                continue
            inside = [min(1, n / c - i) for n, c, i in zip(layout.shape, layout.chunk_shape, index, strict=True)]
            found.append(sync(array.store.getsize(key)) / (1 if layout.chain is None else math.prod(inside)))
        except FileNotFoundError:  # a missing chunk
            continue
    return StoredChunks(float(np.mean(found)) if found else layout.chunk_nbytes)


def _read_index(array: zarr.Array, key: str, shard: ShardLayout) -> StoredChunks | None:
    """Read the index of a shard; None if no inner chunk is stored."""
    part = SuffixByteRequest(shard.index_nbytes) if shard.index_at_end else RangeByteRequest(0, shard.index_nbytes)
    stored = sync(array.store.get(key, cpu.buffer_prototype, part))
    if stored is None:
        return None
    dtype = ">u8" if shard.index_big_endian else "<u8"
    offsets, sizes = np.frombuffer(stored.to_bytes(), dtype, 2 * shard.count).reshape(-1, 2).T
    sizes = np.where(sizes == np.iinfo(np.uint64).max, 0, sizes).astype(np.int64)
    return StoredChunks(float(sizes[sizes > 0].mean()), offsets.astype(np.int64), sizes) if sizes.any() else None
