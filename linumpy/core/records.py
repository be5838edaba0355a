"""Records that describe arrays to the native core, and exceptions for jobs that failed there.

In: layouts, metadata files and errors of the core. Out: records of :mod:`linumpy.core.native`, exceptions, messages.
"""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import CancelledError

import numpy as np

from linumpy.arrays import bits_of
from linumpy.core import native
from linumpy.errors import ChunkError, StaleLayoutError, StorageRefusedError
from linumpy.io.paths import MetadataLook
from linumpy.plan.codecs import DecodeChain
from linumpy.plan.layout import ArrayLayout


def chain_record(chain: DecodeChain | None) -> native.Chain:
    """Return the record of how chunks are encoded; None stands for raw chunks."""
    if chain is None:
        return native.Chain()
    inner = native.COMPRESSORS.index(chain.inner) if chain.inner else 0
    return native.Chain(
        1,
        native.COMPRESSORS.index(chain.compressor),
        inner,
        chain.stored_checksum,
        chain.decoded_checksum,
        chain.shuffle,
    )


def look_records(look: MetadataLook) -> ctypes.Array[native.Look]:
    """Return the records of the versions of metadata files; they are cached in `look`."""
    records: ctypes.Array[native.Look] | None = look.__dict__.get("_records")
    if records is None:
        records = (native.Look * len(look.files))(
            *(
                native.Look(os.fsencode(path), *(stamp or ()))
                for path, stamp in zip(look.files, look.stamps, strict=True)
            )
        )
        look.__dict__["_records"] = records
    return records


def geometry_record(layout: ArrayLayout) -> native.Geometry:
    """Return the record of how chunks are stored in arrays of one geometry, of which `layout` is one."""
    record = native.Geometry(
        rank=layout.rank, dtype=native.DTYPE_CODES[bits_of(layout.dtype).str[1:]], swapped=layout.swapped
    )
    record.chunk_shape[: layout.rank] = layout.chunk_shape
    record.stored_axes[: layout.rank] = layout.stored_axes
    record.chain = chain_record(layout.chain)
    if (shard := layout.shard) is not None:
        record.chunks_per_shard[: layout.rank] = shard.chunks_per_shard
        record.index_at_end = shard.index_at_end
        record.index_big_endian = shard.index_big_endian
        record.index_checksum = shard.index_checksum
    return record


def batch_record(layout: ArrayLayout, target: int, fill: np.ndarray) -> native.Batch:
    """Return a batch without regions, with the fields that all batches of arrays of one geometry share.

    `target`: code of the dtype of the outputs, in :data:`linumpy.core.native.DTYPE_CODES`. `fill` (uint8, (16,)): bytes
    of the fill value as an element of the outputs, and padding.
    """
    return native.Batch(
        geometry=ctypes.pointer(geometry_record(layout)),
        target=target,
        fill=(ctypes.c_uint8 * 16).from_buffer_copy(fill.data),
    )


def array_record(layout: ArrayLayout) -> native.Array:
    """Return the record of where the chunks of an array are stored."""
    prefix, separator = layout.chunk_path
    if layout.remote is not None:
        from linumpy.core.requests import number_of  # only for object stores

        record = native.Array(prefix.encode(), separator.encode(), metadata_path(layout).encode())
        record.store = number_of(layout.remote.objects)
        return record
    record = native.Array(os.fsencode(prefix), separator.encode(), os.fsencode(metadata_path(layout)))
    if (entries := layout.entries) is not None:
        record.archive = ctypes.pointer(native.Look(os.fsencode(entries.path), *entries.stamp))
        record.grid[: layout.rank] = entries.grid
        record.entries = entries.table.ctypes.data  # C-contiguous int64; the layout keeps the memory alive
        record.entry_count = len(entries.table)
    return record


def metadata_path(layout: ArrayLayout) -> str:
    """Return the path of the metadata file (or ZIP file) of an array, or its key in a store.

    It exists as long as the array: without it, chunks are not missing, but the array is gone.
    """
    if layout.entries is not None:
        return layout.entries.path
    folder = layout.root if layout.remote is None else layout.remote.path
    name = "zarr.json" if layout.zarr_format == 3 else ".zarray"
    return f"{folder}/{name}" if folder else name


def why_gone(layout: ArrayLayout) -> str:
    """Return the message for an array whose chunks and metadata are missing."""
    holder = "array" if layout.remote is not None else "folder" if layout.entries is None else "file"
    return f"chunks of {layout.name} are missing, and so is {metadata_path(layout)}: is the {holder} gone?"


def exception_of(error: native.Error, layout: ArrayLayout) -> BaseException:
    """Return the exception for the error of a job on an array; most messages name the chunk and the file."""
    code, rank = error.code, layout.rank
    stored, chunk = tuple(error.object[:rank]), tuple(error.chunk[:rank])
    prefix, separator = layout.chunk_path
    path = ("" if layout.remote is None else f"{layout.remote.url}/") + prefix + separator.join(map(str, stored))
    name = f"{'chunk' if layout.shard is None else 'shard'} {stored} of {layout.name}: {path}"
    text = error.text.decode(errors="replace")
    if code == native.CANCELLED:
        return CancelledError("the job was cancelled")
    if code == native.CLOSED:
        return RuntimeError("the reader is closed")
    if code == native.DEVICE:
        return RuntimeError(f"{layout.name}: the device failed: {text}")
    if code == native.CHANGED:
        return StaleLayoutError(f"the metadata of {layout.name} were written anew since they were read")
    if code == native.REPLACED and layout.entries is not None:
        return ChunkError(f"{layout.entries.path} was written anew since its directory was read: open it again")
    if code == native.THREAD:
        return RuntimeError(f"no thread could be started to read {layout.name}: {os.strerror(error.number)}")
    if code == native.MEMORY:
        return MemoryError(f"chunk {chunk} of {layout.name}: no memory for its {layout.chunk_nbytes} bytes")
    if code == native.DECODE:
        name = f"chunk {chunk} of {layout.name}: {path}"
        if layout.shard is not None:
            name += f", bytes {error.offset} to {error.offset + error.nbytes}"
        return ChunkError(f"{name} cannot be decoded ({layout.chain}): {text}")
    sentences = {
        native.OPEN: (
            f"{name} cannot be opened: {os.strerror(error.number)}"
            + (f": {error.a} are allowed, raise the limit by ulimit -n" if error.a else "")
        ),
        native.NOT_FILE: f"{name} cannot be read: it is no regular file",
        native.SIZE: (
            f"{name} has {error.a} bytes, but a raw chunk of {layout.dtype} {layout.chunk_shape} has {error.b}"
        ),
        native.REPLACED: (
            f"{name} was replaced while it was being read (it had {error.a} bytes, and has {error.b} now): "
            f"read it again when its writer is done"
        ),
        native.READ: f"{name} cannot be read: {os.strerror(error.number)}",
        native.SHORT: f"{name}: {error.a} of {error.b} bytes could be read",
        native.INDEX: f"{name}: {text}",
        native.ENTRY: f"{name}: {text}",
        native.REMOTE: f"{name} cannot be read: {text}",
        native.GONE: why_gone(layout),
    }
    if code in sentences:
        refused = code in (native.OPEN, native.READ, native.REMOTE)
        return (StorageRefusedError if refused else ChunkError)(sentences[code])
    return RuntimeError(f"{name}: the native core failed: {text}")
