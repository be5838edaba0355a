"""Write whole chunks and shards of an array, raw or encoded, from the host or the device.

As in zarr, an edge chunk is written whole, with the fill value beyond the edge; an object with an encoding or shards
that holds only the fill value has no file, and such an inner chunk is missing in its shard.

A device array is cut into chunks and encoded on CuPy's current stream, in batches; threads of the host write the stored
bytes while the next batches are encoded (``linumpy.write.device_chunks``). The same threads encode host arrays, and
device arrays whose chunks the device does not encode. zarr-python writes arrays that are neither in a local folder nor
in an object store, and arrays whose codecs, byte order or axis order linumpy does not write.

Files get their final names at once, so the folder of the array must have a temporary name until the array is complete.
Where two processes may write the same chunk (``renamed``), each writes a file of its own and renames it.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import zarr
from zarr.buffer import cpu

from linumpy.arrays import Array
from linumpy.device import free_memory, is_device_array, to_host
from linumpy.io.codecs import checksum, encoding_of, host_encoder
from linumpy.io.layout import read_layout
from linumpy.io.stores.remote import RemoteStore
from linumpy.io.zarr_mode import host_codecs, read_on_host
from linumpy.plan.codecs import CHECKSUM_NBYTES, Encoding
from linumpy.plan.layout import ArrayLayout
from linumpy.plan.pyramid import Box, grown, shape_of, split, within
from linumpy.write.chunk_file import Bytes, ChunkFiles, ChunkObjects, file_groups, stored_sizes, stored_spans
from linumpy.write.tasks import Finish, Pending, done, finish_all, in_tasks, start_tasks

if TYPE_CHECKING:
    from cupy.cuda import Event

    from linumpy.write.device_chunks import StoredBytes

log = logging.getLogger(__name__)

#: Limits, unless a single chunk or shard takes more: bytes of a batch's voxels, and device memory of all batches.
BATCH_NBYTES, _MAX_DEVICE_NBYTES = 256 * 2**20, 5 * 2**29
#: Limit of batches whose stored bytes are being written. One thread writes a shard: several batches keep threads busy.
#: Batches of raw chunks are as large as their voxels, and take no time to encode.
_MAX_PENDING, _MAX_RAW_PENDING = 8, 2
#: The default budget as a share of the free device memory; encoding takes at most a fourth of the budget.
_BUDGET_SHARE = 0.5
#: Bytes that are gathered at once from a raw chunk that is not contiguous: they stay in the processor's cache.
_PIECE_NBYTES = 2**19


@dataclass(frozen=True)
class Batch:
    """The size of the batches that the device encodes.

    - `nbytes`: bytes of the voxels of one or more chunks (or shards); 0 if the memory holds none: the host encodes.
    - `pending`: number of batches whose stored bytes may be on the device at the same time, while they are written.
    - `device_nbytes`: device memory that writing takes beyond a block.
    """

    nbytes: int
    pending: int
    device_nbytes: int


#: The batch size if the host encodes.
NO_BATCH = Batch(0, 1, 0)


def plan_batch(encoding: Encoding, chunk_nbytes: int, object_nbytes: int, budget: int | None = None) -> Batch:
    """Plan the size of the batches that a device encodes; :data:`NO_BATCH` if not even a chunk (or shard) fits.

    - `chunk_nbytes`, `object_nbytes`: bytes of the voxels of an (inner) chunk, and of a chunk or shard.
    - `budget`: bytes of device memory, of which encoding may take a fourth; by default only the fixed limits apply.
    """
    allowed = math.inf if budget is None else budget // 4
    count = max(1, BATCH_NBYTES // object_nbytes)
    max_pending = _MAX_PENDING if encoding.compressor or object_nbytes > chunk_nbytes else _MAX_RAW_PENDING
    while count:
        once, each = _device_nbytes(encoding, chunk_nbytes, count * object_nbytes)
        pending = max(2, min(max_pending, int(min(allowed, _MAX_DEVICE_NBYTES) - once) // each))
        needed = once + pending * each
        if needed <= (allowed if count == 1 else min(allowed, _MAX_DEVICE_NBYTES)):
            return Batch(count * object_nbytes, pending, needed)
        count //= 2
    return NO_BATCH


def _device_nbytes(encoding: Encoding, chunk_nbytes: int, batch_nbytes: int) -> tuple[int, int]:
    """Return the temporary device memory that encodes a batch, and the device memory of the batch's stored bytes."""
    from linumpy.gpu.codecs.encode import encoding_nbytes

    if why_not_on_device(encoding, chunk_nbytes) or not encoding.compressor:
        return 0, batch_nbytes
    arena, scratch = encoding_nbytes(-(-batch_nbytes // chunk_nbytes), chunk_nbytes, replace(encoding, checksum=False))
    return batch_nbytes + scratch, arena


def why_not_on_device(encoding: Encoding, chunk_nbytes: int) -> str:
    """Return why the device does not encode such chunks; empty if it does."""
    from linumpy.gpu.codecs.encode import encoding_nbytes

    if encoding.codec is None or not encoding.codec.on_device:
        return f"{encoding.compressor} is encoded by the host"
    if not encoding.compressor:
        return ""
    try:
        encoding_nbytes(1, chunk_nbytes, replace(encoding, checksum=False))
    except (NotImplementedError, ValueError) as error:
        return f"the device does not encode {encoding} in chunks of {chunk_nbytes} bytes ({error})"
    return ""


@functools.cache
def _warn_once(why: str) -> None:
    log.warning("%s: chunks are copied to the host, which encodes them", why)


def chunks_of(
    array: zarr.Array, pool: ThreadPoolExecutor, threads: int, *, renamed: bool = False, batch: Batch | None = None
) -> Chunks:
    """Choose how the chunks of an array, which is open for writing, are written.

    - `pool`: the threads that write; the caller shuts the pool down.
    - `batch`: the batches that a device encodes; by default those that take an eighth of the device's free memory.
    """
    layout, encoding = read_layout(array), encoding_of(array)
    is_plain = not layout.swapped and layout.stored_axes == tuple(range(layout.rank))
    store = array.store if isinstance(array.store, RemoteStore) else None
    if encoding is None or layout.unsupported is not None or not is_plain or (layout.root is None and store is None):
        return ZarrChunks(array, layout, pool)
    files = ChunkFiles(layout, renamed=renamed) if store is None else ChunkObjects(layout, store)
    return OwnChunks(array, layout, encoding, files, pool, threads, batch=batch)


def read_back(array: zarr.Array, box: Box, *, on_device: bool) -> Array:
    """Read a box that was written, to the host by zarr or to the device by linumpy's reader."""
    if on_device:
        from linumpy.write.device_chunks import read_to_device

        return read_to_device(array, box)
    return read_on_host(array, box)


class ZarrChunks:
    """Chunks that zarr-python writes, for example with codecs that linumpy does not name, or axes in another order."""

    def __init__(self, array: zarr.Array, layout: ArrayLayout, pool: ThreadPoolExecutor) -> None:
        self.array, self._layout, self._pool, self.stored_nbytes = array, layout, pool, 0
        self.why_host = "zarr-python applies " + (" and ".join(layout.codecs) or "the order of bytes and axes")

    def start(self, box: Box, block: Array) -> Finish:
        """Copy a device array to the host, and write it by zarr before this returns."""
        # zarr continues a write whose caller is interrupted: the shutdown of the pool waits for it.
        block = to_host(block)
        with host_codecs(self.array):
            self._pool.submit(self.array.set_basic_selection, box, block, prototype=cpu.buffer_prototype).result()
        for unit in split(box, self._layout.object_shape) if self._layout.root is not None else ():
            index = tuple(b.start // s for b, s in zip(unit, self._layout.object_shape, strict=True))
            with suppress(FileNotFoundError):
                path = f"{self._layout.root}/{self.array.metadata.encode_chunk_key(index)}"
                self.stored_nbytes += os.stat(path).st_size
        return done


@dataclass(frozen=True)
class _Object:
    """A stored object: its file, its box, the index slots of its inner chunks (None without shards), their count."""

    path: str
    box: Box
    slots: np.ndarray | None
    count: int


class OwnChunks:
    """Chunks that linumpy writes, in C order and this machine's byte order, in files or objects, or in shards."""

    def __init__(
        self,
        array: zarr.Array,
        layout: ArrayLayout,
        encoding: Encoding,
        files: ChunkFiles,
        pool: ThreadPoolExecutor,
        threads: int,
        *,
        batch: Batch | None = None,
    ) -> None:
        assert layout.fill_value is not None  # its dtype is supported
        self.array, self.encoding, self.stored_nbytes = array, encoding, 0
        self._layout, self._pool, self._threads = layout, pool, threads
        self._files, self._given_batch = files, batch
        #: Whether a file holds the voxels of a chunk, whatever they are.
        self._is_raw = layout.chain is None and layout.shard is None
        self._bits = np.dtype(f"u{layout.dtype.itemsize}")
        self._fill = np.asarray(layout.fill_value).view(self._bits)[()]
        self._encode_on_host = host_encoder(encoding)
        self._lock = threading.Lock()

    @functools.cached_property
    def _batch(self) -> Batch:
        """The size of batches: the caller's, or planned once for the current device."""
        if self._given_batch is not None:
            return self._given_batch
        object_nbytes = math.prod(self._layout.object_shape) * self._layout.dtype.itemsize
        return plan_batch(self.encoding, self._layout.chunk_nbytes, object_nbytes, int(_BUDGET_SHARE * free_memory()))

    @functools.cached_property
    def _pending(self) -> Pending:
        return Pending(self._batch.pending)

    @functools.cached_property
    def why_host(self) -> str:
        """Why the host encodes chunks of device arrays; empty if the device does."""
        if not self._batch.nbytes:
            return "the device memory that may be used is too small to encode in it"
        return why_not_on_device(self.encoding, self._layout.chunk_nbytes)

    def start(self, box: Box, block: Array) -> Finish:
        """Start to write a box; chunks that the host encodes are written before this returns."""
        if is_device_array(block):
            if not self.why_host:
                layout = self._layout
                step = grown(layout.object_shape, layout.shape, layout.dtype.itemsize, self._batch.nbytes)
                started = [self._start_batch(part, block[within(part, box)]) for part in split(box, step)]
                started[-1][0].synchronize()
                return partial(finish_all, [finish for _, finish in started])
            _warn_once(self.why_host)
        self._write_from_host(box, to_host(block))
        return done

    def _objects(self, box: Box) -> list[_Object]:
        layout = self._layout
        objects = []
        paths = self._files.paths(box, layout.object_shape)
        for path, unit in zip(paths, split(box, layout.object_shape), strict=True):
            counts = tuple(-(-n // c) for n, c in zip(shape_of(unit), layout.chunk_shape, strict=True))
            slots = None
            if (
                layout.shard is not None
            ):  # the numbers of its chunks in the index, some of which may lie beyond the edge
                slots = np.arange(layout.shard.count).reshape(layout.shard.chunks_per_shard)
                slots = slots[tuple(map(slice, counts))].reshape(-1)
            objects.append(_Object(path, unit, slots, math.prod(counts)))
        return objects

    def _write(self, object_: _Object, groups: Iterable[Sequence[Bytes]], sizes: np.ndarray) -> None:
        """Write the file of an object, or remove the file if all chunks of the object hold only the fill value."""
        if sizes.any():
            groups = file_groups(groups, sizes, self._layout.shard, object_.slots)
            self._add_stored(self._files.write(object_.path, groups))
        else:
            self._files.remove(object_.path)

    def _add_stored(self, nbytes: int) -> None:
        with self._lock:
            self.stored_nbytes += nbytes

    def _start_batch(self, box: Box, block: Array) -> tuple[Event, Finish]:
        """Start to encode a batch on the device, and the tasks that copy the stored bytes and write files.

        Returns the event after which `block` may change, and a function that waits for the files.
        """
        from linumpy.write.device_chunks import start_encoding, write_by_kvikio

        self._pending.wait_for_slot()
        layout = self._layout
        objects = [] if layout.shard is None else self._objects(box)
        parts = [block[within(object_.box, box)] for object_ in objects] or [block]
        assert layout.fill_value is not None
        encoding = replace(self.encoding, checksum=False)
        stored_bytes = start_encoding(parts, layout.chunk_shape, layout.fill_value, encoding, keep_fill=self._is_raw)
        if layout.shard is None:
            paths = self._files.paths(box, layout.object_shape)
            count, write_some = len(paths), partial(self._write_chunks, stored_bytes, paths)
            is_local = layout.root is not None
            if self._is_raw and is_local and (finish := write_by_kvikio(stored_bytes, paths, self._files)) is not None:
                self._add_stored(count * layout.chunk_nbytes)
                return stored_bytes.block_copied, finish
        else:
            count, write_some = len(objects), partial(self._write_shards, stored_bytes, objects)
        # Batches of chunks share the threads. More tasks than threads would contend for Python's lock (the GIL).
        threads = max(1, self._threads // self._batch.pending) if layout.shard is None else self._threads
        return stored_bytes.block_copied, self._pending.add(
            start_tasks(self._pool, min(count, threads), write_some, range(count))
        )

    def _write_chunks(self, stored_bytes: StoredBytes, paths: list[str], numbers: Sequence[int]) -> None:
        from linumpy.write.device_chunks import write_chunk_files

        first, end = numbers[0], numbers[-1] + 1
        all_offsets, all_is_fill = stored_bytes.offsets_and_fill()
        nbytes = write_chunk_files(
            stored_bytes, paths[first:end], all_offsets[first : end + 1], all_is_fill[first:end], self._files,
            with_checksum=self.encoding.checksum,
        )  # fmt: skip
        self._add_stored(nbytes)

    def _write_shards(self, stored_bytes: StoredBytes, objects: list[_Object], numbers: Sequence[int]) -> None:
        from linumpy.write.device_chunks import span_groups, split_bytes

        firsts = [0, *itertools.accumulate(object_.count for object_ in objects)]  # number of each shard's first chunk
        with_checksum = self.encoding.checksum
        all_offsets, all_is_fill = stored_bytes.offsets_and_fill()
        for number in numbers:
            first, end = firsts[number], firsts[number + 1]
            offsets, is_fill = all_offsets[first : end + 1], all_is_fill[first:end]
            sizes = stored_sizes(offsets, is_fill, with_checksum=with_checksum)
            spans = stored_spans(offsets, is_fill, with_checksum=with_checksum)
            with stored_bytes.copied_to_host(split_bytes(int(offsets[0]), int(offsets[-1]))) as copies:
                self._write(objects[number], span_groups(copies, spans, with_checksum=with_checksum), sizes)

    def _write_from_host(self, box: Box, block: np.ndarray) -> None:
        """Write chunks in threads of the pool; the thread that encodes the last chunk of an object writes its file."""
        if self._is_raw and shape_of(box) == self._layout.chunk_shape:  # one chunk needs no other thread
            self._write_raw(self._files.paths(box, self._layout.chunk_shape)[0], block)
            return
        objects = self._objects(box)
        encoded: list[list[Bytes | None]] = [[None] * object_.count for object_ in objects]
        remaining = [object_.count for object_ in objects]
        chunks = [
            (number, index, part)
            for number, object_ in enumerate(objects)
            for index, part in enumerate(split(object_.box, self._layout.chunk_shape))
        ]

        def write(chunk_number: int) -> None:
            number, index, part = chunks[chunk_number]
            voxels = block[within(part, box)]
            if self._is_raw:
                self._write_raw(objects[number].path, voxels)
                return
            encoded[number][index] = self._encoded(voxels)
            with self._lock:
                remaining[number] -= 1
                is_complete = not remaining[number]
            if is_complete:
                stored, encoded[number] = encoded[number], []
                tail = CHECKSUM_NBYTES if self.encoding.checksum else 0
                sizes = np.array([0 if chunk is None else len(chunk) + tail for chunk in stored])
                buffers: list[Bytes] = []
                for chunk in stored:
                    if chunk is not None:
                        buffers += [chunk, checksum(chunk)] if tail else [chunk]
                self._write(objects[number], [buffers], sizes)

        in_tasks(self._pool, self._threads, write, range(len(chunks)))

    def _write_raw(self, path: str, part: np.ndarray) -> None:
        """Write a chunk as it is; one that is not contiguous, or at the edge, is gathered piece by piece."""
        layout = self._layout
        if part.shape == layout.chunk_shape and part.dtype == layout.dtype and part.flags.c_contiguous:
            self._add_stored(self._files.write(path, [[part]]))
        else:
            self._add_stored(self._files.write(path, ([piece] for piece in self._gathered(part))))

    def _gathered(self, part: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the voxels of a chunk in pieces that are contiguous, with the fill value beyond the edge."""
        layout = self._layout
        step = grown((1,) * layout.rank, layout.chunk_shape, layout.dtype.itemsize, _PIECE_NBYTES)
        pieces = list(split(tuple(slice(0, n) for n in layout.chunk_shape), step))  # consecutive in the file
        scratch = np.empty(math.prod(shape_of(pieces[0])), layout.dtype)
        for box in pieces:
            piece = scratch[: math.prod(shape_of(box))].reshape(shape_of(box))
            voxels = part[box]
            if voxels.shape != piece.shape:
                piece[...] = layout.fill_value
            piece[tuple(map(slice, voxels.shape))] = voxels
            yield piece

    def _encoded(self, part: np.ndarray) -> Bytes | None:
        """Encode a chunk, with the fill value beyond the edge; return None if the chunk holds only the fill value."""
        layout = self._layout
        if part.shape == layout.chunk_shape:
            chunk = np.ascontiguousarray(part, layout.dtype)
        else:
            chunk = np.full(layout.chunk_shape, layout.fill_value, layout.dtype)
            chunk[tuple(map(slice, part.shape))] = part
        bits = chunk.reshape(-1).view(self._bits)
        if bits[0] == self._fill and bits[-1] == self._fill and (bits == self._fill).all():
            return None
        return self._encode_on_host(chunk)


#: A writer of the chunks of an array; `stored_nbytes` counts the bytes of the files that were written.
Chunks = OwnChunks | ZarrChunks
