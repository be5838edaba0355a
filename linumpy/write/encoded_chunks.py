"""Encode whole chunks and shards of a local array, on the device or the host, and write their files.

In: boxes of whole stored objects (chunks or shards), as NumPy or CuPy arrays. Out: files. As in zarr, an object that
holds only the fill value has no file, and such an inner chunk is missing in its shard. A device array is cut into
chunks and encoded on CuPy's current stream, in batches; threads of the host copy the stored bytes to pinned memory, a
piece at a time, and write them while the next batches are encoded. The same threads encode host arrays, and device
arrays whose chunks the device does not encode (``why_host``). Errors: ``OSError``, such as a full disk.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import zarr

from linumpy.arrays import Array
from linumpy.device import free_memory, is_device_array, to_host
from linumpy.io.codecs import checksum, host_encoder
from linumpy.plan.codecs import Encoding
from linumpy.plan.layout import ArrayLayout
from linumpy.plan.pyramid import Box, grown, shape_of, split, within
from linumpy.write.chunk_file import Bytes, ChunkFiles
from linumpy.write.shard import file_groups, stored_sizes, stored_spans
from linumpy.write.tasks import Finish, Pending, done, finish_all, in_tasks, start_tasks, task_count

if TYPE_CHECKING:
    from cupy.cuda import Event

    from linumpy.write.device_chunks import StoredBytes

log = logging.getLogger(__name__)

#: Limits, unless a single chunk or shard takes more: bytes of a batch's voxels, and device memory of all batches.
BATCH_NBYTES, _MAX_DEVICE_NBYTES = 256 * 2**20, 5 * 2**29
#: Limit of batches whose stored bytes are being written. One thread writes a shard: several batches keep threads busy.
_MAX_PENDING = 8
#: The default budget as a share of the free device memory; encoding takes at most a fourth of the budget.
_BUDGET_SHARE = 0.5


@dataclass(frozen=True)
class Batch:
    """The size of the batches that the device encodes.

    - `nbytes`: bytes of the voxels of one or more chunks (or shards); 0 if the memory holds none, so that the host
      encodes.
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

    - `encoding`: encoding of an (inner) chunk.
    - `chunk_nbytes`, `object_nbytes`: bytes of the voxels of an (inner) chunk, and of a chunk or shard.
    - `budget`: bytes of device memory, of which encoding may take a fourth; by default only the fixed limits apply.
    """
    allowed = math.inf if budget is None else budget // 4
    count = max(1, BATCH_NBYTES // object_nbytes)
    while count:
        once, each = _device_nbytes(encoding, chunk_nbytes, count * object_nbytes)
        pending = max(2, min(_MAX_PENDING, int(min(allowed, _MAX_DEVICE_NBYTES) - once) // each))
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

    if encoding.not_on_device or not encoding.compressor:
        return encoding.not_on_device
    try:
        encoding_nbytes(1, chunk_nbytes, replace(encoding, checksum=False))
    except (NotImplementedError, ValueError) as error:
        return f"the device does not encode {encoding} in chunks of {chunk_nbytes} bytes ({error})"
    return ""


@functools.cache
def _warn_once(why: str) -> None:
    log.warning("%s: chunks are copied to the host, which encodes them", why)


@dataclass(frozen=True)
class _Object:
    """A stored object: its file, its box, the index slots of its inner chunks (None without shards), their count."""

    path: str
    box: Box
    slots: np.ndarray | None
    count: int


class EncodedChunks:
    """Chunks with an :class:`~linumpy.plan.codecs.Encoding`, in files of their own or in shards.

    - `array`: in a local folder, in C order and this machine's byte order.
    - `encoding`: encoding of the (inner) chunks.
    - `pool`, `threads`, `renamed`, `batch`: as for :func:`linumpy.write.raw_chunks.chunks_of`.
    """

    def __init__(
        self,
        array: zarr.Array,
        layout: ArrayLayout,
        encoding: Encoding,
        pool: ThreadPoolExecutor,
        threads: int,
        *,
        renamed: bool = False,
        batch: Batch | None = None,
    ) -> None:
        assert layout.fill_value is not None  # its dtype is supported
        self.array, self.encoding, self.stored_nbytes = array, encoding, 0
        self._layout, self._pool, self._threads = layout, pool, threads
        self._files = ChunkFiles(layout, renamed=renamed)
        self._given_batch = batch
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
        """Start to write a box of whole chunks (or shards); see :meth:`linumpy.write.raw_chunks.Chunks.start`.

        Chunks that the host encodes are written before this returns.
        """
        if is_device_array(block):
            if not self.why_host:
                layout = self._layout
                step = grown(layout.object_shape, layout.shape, layout.dtype.itemsize, self._batch.nbytes)
                started = [self._start_batch(part, block[within(part, box)]) for part in split(box, step)]
                started[-1][0].synchronize()
                return partial(finish_all, [finish for _, finish in started])
            _warn_once(self.why_host)
            block = to_host(block)
        self._write_from_host(self._objects(box), np.asarray(block), box)
        return done

    def _objects(self, box: Box) -> list[_Object]:
        layout = self._layout
        objects = []
        paths = self._files.paths(box, layout.object_shape)
        for path, unit in zip(paths, split(box, layout.object_shape), strict=True):
            counts = tuple(-(-n // c) for n, c in zip(shape_of(unit), layout.chunk_shape, strict=True))
            slots = None if layout.shard is None else _slots(counts, layout.shard.chunks_per_shard)
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
        """Start to encode a batch on the device, and start the tasks that copy the stored bytes and write files.

        Returns the event after which `block` may change, and a function that waits for the files.
        """
        from linumpy.write.device_chunks import start_encoding

        self._pending.wait_for_slot()
        layout = self._layout
        objects = [] if layout.shard is None else self._objects(box)
        parts = [block[within(object_.box, box)] for object_ in objects] or [block]
        assert layout.fill_value is not None
        stored_bytes = start_encoding(
            parts, layout.chunk_shape, layout.fill_value, replace(self.encoding, checksum=False)
        )
        if layout.shard is None:
            paths = self._files.paths(box, layout.object_shape)
            count, write_some = len(paths), partial(self._write_chunks, stored_bytes, paths)
        else:
            count, write_some = len(objects), partial(self._write_shards, stored_bytes, objects)
        tasks = task_count(count, self._threads, self._batch.pending if layout.shard is None else 1)
        return stored_bytes.block_copied, self._pending.add(start_tasks(self._pool, tasks, write_some, range(count)))

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
        from linumpy.write.device_chunks import PinnedSpans, split_bytes

        firsts = [0, *itertools.accumulate(object_.count for object_ in objects)]  # number of each shard's first chunk
        with_checksum = self.encoding.checksum
        all_offsets, all_is_fill = stored_bytes.offsets_and_fill()
        for number in numbers:
            first, end = firsts[number], firsts[number + 1]
            offsets, is_fill = all_offsets[first : end + 1], all_is_fill[first:end]
            sizes = stored_sizes(offsets, is_fill, with_checksum=with_checksum)
            spans = stored_spans(offsets, is_fill, with_checksum=with_checksum)
            with stored_bytes.copied_to_host(split_bytes(int(offsets[0]), int(offsets[-1]))) as copies:
                self._write(objects[number], PinnedSpans(copies).groups(spans, with_checksum=with_checksum), sizes)

    def _write_from_host(self, objects: list[_Object], block: np.ndarray, box: Box) -> None:
        """Encode each chunk in a thread of the pool; the thread that encodes the last chunk of an object writes it."""
        chunk_shape = self._layout.chunk_shape
        encoded: list[list[Bytes | None]] = [[None] * object_.count for object_ in objects]
        remaining = [object_.count for object_ in objects]
        chunks = [
            (number, index, part)
            for number, object_ in enumerate(objects)
            for index, part in enumerate(split(object_.box, chunk_shape))
        ]

        def encode(chunk_number: int) -> None:
            number, index, part = chunks[chunk_number]
            encoded[number][index] = self._encoded(block[within(part, box)])
            with self._lock:
                remaining[number] -= 1
                is_complete = not remaining[number]
            if is_complete:
                stored, encoded[number] = [_with_checksum(chunk, self.encoding) for chunk in encoded[number]], []
                sizes = np.array([sum(map(len, buffers)) for buffers in stored])
                self._write(objects[number], [[buffer for buffers in stored for buffer in buffers]], sizes)

        in_tasks(self._pool, self._threads, encode, range(len(chunks)))

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


def _with_checksum(chunk: Bytes | None, encoding: Encoding) -> list[Bytes]:
    """Return the buffers of a chunk in its file; an empty list for a chunk that is not stored."""
    if chunk is None:
        return []
    return [chunk, checksum(chunk)] if encoding.checksum else [chunk]


def _slots(counts: Sequence[int], chunks_per_shard: Sequence[int]) -> np.ndarray:
    """Return the numbers, in a shard's index, of the first `counts` inner chunks along each axis."""
    corner = np.ix_(*map(np.arange, counts))
    return np.asarray(np.ravel_multi_index(np.broadcast_arrays(*corner), chunks_per_shard)).reshape(-1)  # type: ignore[call-overload, no-any-return]
