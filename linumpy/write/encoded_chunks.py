"""Write whole chunks and shards of a local array, encoded where their voxels are.

In: boxes of whole stored objects, as NumPy or CuPy arrays. Out: files; a chunk or shard that holds nothing but the fill
value has none, and an inner chunk like it is missing in its shard, as zarr has it. A device array is cut into chunks
and encoded on CuPy's current stream, in batches; threads of the host copy the stored bytes to pinned memory, a piece at
a time, and write them while the next batches are encoded. Host arrays are encoded by the same threads. Errors:
``OSError``, such as a full disk.
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
from typing import TYPE_CHECKING, Any

import numpy as np
import zarr

from linumpy.arrays import Array
from linumpy.device import free_memory, is_device_array, to_host
from linumpy.io.codecs import checksum, host_encoder
from linumpy.plan.encoding import Encoding
from linumpy.plan.layout import ArrayLayout
from linumpy.plan.pyramid import Box, grown, shape_of, split, within
from linumpy.write.chunk_file import Bytes, ChunkFiles
from linumpy.write.shard import file_groups, stored_sizes, stored_spans
from linumpy.write.tasks import Finish, Pending, done, finish_all, in_tasks, start_tasks, tasks_of

if TYPE_CHECKING:
    from linumpy.write.device_chunks import DeviceStreams

log = logging.getLogger(__name__)

#: Bytes of the voxels that the device encodes at a time, and of the memory that this takes; unless one chunk or shard
#: takes more.
BATCH_NBYTES, _MOST_NBYTES = 256 * 2**20, 5 * 2**29
#: Batches whose stored bytes are being written at the same time: of shards, each is written by one thread.
_MOST_PENDING = 8
#: Share of the free device memory, of which encoding takes a fourth, where no other budget is given.
_SHARE = 0.5


@dataclass(frozen=True)
class Batch:
    """What the device encodes at a time.

    Attributes
    ----------
    nbytes : int
        Bytes of the voxels of one or more chunks (or shards); 0 where the memory is too small for one: the host
        encodes then.
    pending : int
        Batches whose stored bytes are kept on the device while they are written.
    device_nbytes : int
        Device memory that writing takes beyond a block.
    """

    nbytes: int
    pending: int
    device_nbytes: int


#: The host encodes.
NO_BATCH = Batch(0, 1, 0)


def plan_batch(encoding: Encoding, chunk_nbytes: int, object_nbytes: int, budget: int | None = None) -> Batch:
    """Choose what a device encodes at a time.

    Parameters
    ----------
    encoding : Encoding
        Of an (inner) chunk.
    chunk_nbytes, object_nbytes : int
        Bytes of the voxels of an (inner) chunk, and of a chunk or shard.
    budget : int, optional
        Bytes of device memory, of which encoding may take a fourth.
    """
    allowed = math.inf if budget is None else budget // 4
    count = max(1, BATCH_NBYTES // object_nbytes)
    while count:
        once, each = _device_nbytes(encoding, chunk_nbytes, count * object_nbytes)
        pending = max(2, min(_MOST_PENDING, int(min(allowed, _MOST_NBYTES) - once) // each))
        needed = once + pending * each
        if needed <= (allowed if count == 1 else min(allowed, _MOST_NBYTES)):
            return Batch(count * object_nbytes, pending, needed)
        count //= 2
    return NO_BATCH


def _device_nbytes(encoding: Encoding, chunk_nbytes: int, batch: int) -> tuple[int, int]:
    """Return the device memory that encoding a batch takes, and that of its stored bytes."""
    from linumpy.gpu.codecs.encode import encoding_nbytes

    if why_not_on_device(encoding, chunk_nbytes) or not encoding.compressor:
        return 0, batch
    arena, scratch = encoding_nbytes(-(-batch // chunk_nbytes), chunk_nbytes, replace(encoding, checksum=False))
    return batch + scratch, arena


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
def _say(why: str) -> None:
    log.warning("%s: chunks are copied to the host, which encodes them", why)


@dataclass(frozen=True)
class _Object:
    """A chunk or shard: its file, its box, and, with shards, the numbers of its inner chunks in the index."""

    path: str
    box: Box
    slots: np.ndarray | None
    count: int


class EncodedChunks:
    """Chunks of which an :class:`~linumpy.plan.encoding.Encoding` says how they are encoded, in files or in shards.

    Parameters
    ----------
    array : zarr.Array
        In a local folder, in order C and this machine's byte order.
    layout : ArrayLayout
        Of the array.
    encoding : Encoding
        Of its (inner) chunks.
    pool, threads, renamed
        As for :func:`linumpy.write.raw_chunks.chunks_of`.
    batch : Batch, optional
        What the device encodes at a time; by default what an eighth of its free memory holds.
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
        """What the current device encodes at a time."""
        if self._given_batch is not None:
            return self._given_batch
        object_nbytes = math.prod(self._layout.object_shape) * self._layout.dtype.itemsize
        return plan_batch(self.encoding, self._layout.chunk_nbytes, object_nbytes, int(_SHARE * free_memory()))

    @functools.cached_property
    def _pending(self) -> Pending:
        return Pending(self._batch.pending)

    @functools.cached_property
    def why_host(self) -> str:
        """Why the host encodes chunks of the device; empty if it does not."""
        if not self._batch.nbytes:
            return "the device memory that may be used is too small to encode in it"
        return why_not_on_device(self.encoding, self._layout.chunk_nbytes)

    def start(self, box: Box, block: Array) -> Finish:
        """Start to write a box of whole chunks (or shards).

        `block` may change when this returns, and what is returned waits until all of it is written.
        """
        if is_device_array(block):
            if not self.why_host:
                layout = self._layout
                step = grown(layout.object_shape, layout.shape, layout.dtype.itemsize, self._batch.nbytes)
                started = [self._start_batch(part, block[within(part, box)]) for part in split(box, step)]
                started[-1][0].synchronize()
                return partial(finish_all, [finish for _, finish in started])
            _say(self.why_host)
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

    def _write(self, one: _Object, groups: Iterable[Sequence[Bytes]], sizes: np.ndarray) -> None:
        """Write a file, in a thread of the pool; remove it where no chunk of it is stored."""
        if sizes.any():
            self._wrote(self._files.write(one.path, file_groups(groups, sizes, self._layout.shard, one.slots)))
        else:
            self._files.remove(one.path)

    def _wrote(self, nbytes: int) -> None:
        with self._lock:
            self.stored_nbytes += nbytes

    def _start_batch(self, box: Box, block: Array) -> tuple[Any, Finish]:
        """Start to encode objects on the device, and tasks that copy their bytes to the host and write them.

        Returns the event after which `block` may change, and what waits for the files.
        """
        from linumpy.write.device_chunks import start_encoding

        self._pending.make_room()
        layout = self._layout
        objects = [] if layout.shard is None else self._objects(box)
        parts = [block[within(one.box, box)] for one in objects] or [block]
        assert layout.fill_value is not None
        streams = start_encoding(parts, layout.chunk_shape, layout.fill_value, replace(self.encoding, checksum=False))
        if layout.shard is None:
            paths = self._files.paths(box, layout.object_shape)
            count, write_some = len(paths), partial(self._write_chunks, streams, paths)
        else:
            count, write_some = len(objects), partial(self._write_shards, streams, objects)
        tasks = tasks_of(count, self._threads, self._batch.pending if layout.shard is None else 1)
        return streams.cut, self._pending.add(start_tasks(self._pool, tasks, write_some, range(count)))

    def _write_chunks(self, streams: DeviceStreams, paths: list[str], numbers: Sequence[int]) -> None:
        from linumpy.write.device_chunks import write_landed

        a, b = numbers[0], numbers[-1] + 1
        offsets, is_fill = streams.counts()[0][a : b + 1], streams.counts()[1][a:b]
        with_checksum = self.encoding.checksum
        self._wrote(write_landed(streams, paths[a:b], offsets, is_fill, self._files, with_checksum=with_checksum))

    def _write_shards(self, streams: DeviceStreams, objects: list[_Object], numbers: Sequence[int]) -> None:
        from linumpy.write.device_chunks import Landing, cut_bytes

        firsts = [0, *itertools.accumulate(one.count for one in objects)]
        with_checksum = self.encoding.checksum
        for number in numbers:
            a, b = firsts[number], firsts[number + 1]
            offsets, is_fill = streams.counts()[0][a : b + 1], streams.counts()[1][a:b]
            sizes = stored_sizes(offsets, is_fill, with_checksum=with_checksum)
            spans = stored_spans(offsets, is_fill, with_checksum=with_checksum)
            with streams.land(cut_bytes(int(offsets[0]), int(offsets[-1]))) as landed:
                self._write(objects[number], Landing(landed).groups(spans, with_checksum=with_checksum), sizes)

    def _write_from_host(self, objects: list[_Object], block: np.ndarray, box: Box) -> None:
        """Encode each chunk in a thread of the pool; the one that encodes the last chunk of an object writes it."""
        chunk_shape = self._layout.chunk_shape
        encoded: list[list[Bytes | None]] = [[None] * one.count for one in objects]
        missing = [one.count for one in objects]
        names = [(o, c, part) for o, one in enumerate(objects) for c, part in enumerate(split(one.box, chunk_shape))]

        def encode(number: int) -> None:
            which, chunk, part = names[number]
            encoded[which][chunk] = self._encoded(block[within(part, box)])
            with self._lock:
                missing[which] -= 1
                complete = not missing[which]
            if complete:
                own, encoded[which] = [_with_checksum(one, self.encoding) for one in encoded[which]], []
                sizes = np.array([sum(map(len, parts)) for parts in own])
                self._write(objects[which], [[part for parts in own for part in parts]], sizes)

        in_tasks(self._pool, self._threads, encode, range(len(names)))

    def _encoded(self, part: np.ndarray) -> Bytes | None:
        """Encode a chunk, with the fill value beyond the edge; None if it holds nothing else."""
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
    """Return the stored bytes of a chunk; none of one that is not stored."""
    if chunk is None:
        return []
    return [chunk, checksum(chunk)] if encoding.checksum else [chunk]


def _slots(counts: Sequence[int], chunks_per_shard: Sequence[int]) -> np.ndarray:
    """Return the numbers in a shard's index of its first inner chunks along each axis."""
    corner = np.ix_(*map(np.arange, counts))
    return np.asarray(np.ravel_multi_index(np.broadcast_arrays(*corner), chunks_per_shard)).reshape(-1)  # type: ignore[call-overload, no-any-return]
