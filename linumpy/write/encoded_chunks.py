"""Write whole chunks and shards of a local array, encoded where their voxels are.

In: boxes of whole stored objects, as NumPy or CuPy arrays. Out: files; a chunk or shard that holds nothing but the fill
value has none, and an inner chunk like it is missing in its shard, as zarr has it. A device array is cut into chunks
and encoded on CuPy's current stream, in batches; only the stored bytes are copied to pinned memory, and threads of the
host write them while the next batch is encoded. Host arrays are encoded by the same threads. Errors: ``OSError``, such
as a full disk.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import zarr

from linumpy.arrays import Array
from linumpy.device import is_device_array, to_host
from linumpy.io.codecs import checksum, host_encoder
from linumpy.plan.encoding import Encoding
from linumpy.plan.layout import ArrayLayout
from linumpy.plan.pyramid import Box, grown, shape_of, split, within
from linumpy.write.chunk_file import Bytes, ChunkFiles
from linumpy.write.shard import file_parts, own_streams, packed_streams
from linumpy.write.tasks import Finish, done, in_tasks

log = logging.getLogger(__name__)

#: Bytes of the voxels that the device encodes at a time, and of the memory that this takes; unless one chunk or shard
#: takes more.
BATCH_NBYTES, _MOST_NBYTES = 128 * 2**20, 3 * 2**29


def batch_nbytes(encoding: Encoding, chunk_nbytes: int, object_nbytes: int, budget: int | None = None) -> int:
    """Return the bytes of the voxels that a device encodes at a time.

    Parameters
    ----------
    encoding : Encoding
        Of an (inner) chunk.
    chunk_nbytes, object_nbytes : int
        Bytes of the voxels of an (inner) chunk, and of a chunk or shard.
    budget : int, optional
        Bytes of device memory, of which encoding may take a fourth.

    Returns
    -------
    int
        Those of one or more chunks (or shards); 0 where the memory is too small for one: the host encodes then.
    """
    allowed = math.inf if budget is None else budget // 4
    count = max(1, BATCH_NBYTES // object_nbytes)
    while (needed := device_nbytes(encoding, chunk_nbytes, count * object_nbytes)) > min(allowed, _MOST_NBYTES):
        if count == 1:
            return object_nbytes if needed <= allowed else 0
        count //= 2
    return count * object_nbytes


def device_nbytes(encoding: Encoding, chunk_nbytes: int, batch: int) -> int:
    """Return the device memory that writing takes beyond a block: chunks of a batch, and the streams of two."""
    if not batch:
        return 0
    from linumpy.gpu.codecs.encode import encoding_nbytes

    if why_not_on_device(encoding, chunk_nbytes) or not encoding.compressor:
        return 2 * batch
    return batch + 2 * encoding_nbytes(-(-batch // chunk_nbytes), chunk_nbytes, replace(encoding, checksum=False))


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
    batch : int, optional
        Bytes of the voxels that the device encodes at a time, by :func:`batch_nbytes`.
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
        batch: int | None = None,
    ) -> None:
        assert layout.fill_value is not None  # its dtype is supported
        self.array, self.encoding, self.stored_nbytes = array, encoding, 0
        self._layout, self._pool, self._threads = layout, pool, threads
        self._files = ChunkFiles(layout, renamed=renamed)
        object_nbytes = math.prod(layout.object_shape) * layout.dtype.itemsize
        limit = batch_nbytes(encoding, layout.chunk_nbytes, object_nbytes) if batch is None else batch
        self._batch = grown(layout.object_shape, layout.shape, layout.dtype.itemsize, limit) if limit else None
        self._bits = np.dtype(f"u{layout.dtype.itemsize}")
        self._fill = np.asarray(layout.fill_value).view(self._bits)[()]
        self._encode_on_host = host_encoder(encoding)
        self._lock = threading.Lock()

    @functools.cached_property
    def why_host(self) -> str:
        """Why the host encodes chunks of the device; empty if it does not."""
        if self._batch is None:
            return "the device memory that may be used is too small to encode in it"
        return why_not_on_device(self.encoding, self._layout.chunk_nbytes)

    def start(self, box: Box, block: Array) -> Finish:
        """Start to write a box of whole chunks (or shards).

        Of a device array the last batch is still being encoded when this returns; `block` may change once the function
        that is returned has been called, which waits until all of it is written.
        """
        if is_device_array(block):
            if self._batch is not None and not self.why_host:
                finish: Finish = done
                for part in split(box, self._batch):
                    following = self._start_on_device(self._objects(part), block[within(part, box)])
                    finish()
                    finish = following
                return finish
            _say(self.why_host)
            block = to_host(block)
        self._write_from_host(self._objects(box), np.asarray(block), box)
        return done

    def _objects(self, box: Box) -> list[_Object]:
        layout = self._layout
        objects = []
        for unit in split(box, layout.object_shape):
            path = self._files.path([b.start // s for b, s in zip(unit, layout.object_shape, strict=True)])
            counts = tuple(-(-n // c) for n, c in zip(shape_of(unit), layout.chunk_shape, strict=True))
            slots = None if layout.shard is None else _slots(counts, layout.shard.chunks_per_shard)
            objects.append(_Object(path, unit, slots, math.prod(counts)))
        return objects

    def _write(self, path: str, parts: list[Bytes]) -> None:
        """Write a file, in a thread of the pool."""
        self._wrote(self._files.write(path, parts))

    def _wrote(self, nbytes: int) -> None:
        with self._lock:
            self.stored_nbytes += nbytes

    def _start_on_device(self, objects: list[_Object], block: Array) -> Finish:
        from linumpy.write.device_chunks import start_encoding

        layout, first = self._layout, objects[0].box
        parts = [block[tuple(slice(b.start - f.start, b.stop - f.start) for b, f in zip(one.box, first, strict=True))]
                 for one in objects] if layout.shard is not None else [block]  # fmt: skip
        assert layout.fill_value is not None
        started = start_encoding(parts, layout.chunk_shape, layout.fill_value, replace(self.encoding, checksum=False))
        firsts = np.cumsum([0, *(one.count for one in objects)])

        def finish() -> None:
            offsets, is_fill = started.offsets(), started.is_fill()
            bounds = offsets[firsts]
            begins = bounds.tolist()  # numbers of Python: a file takes less time than NumPy's scalars
            for some, landed in started.land(bounds):
                base = begins[some.start]

                def parts(number: int, landed: np.ndarray = landed, base: int = base) -> list[Bytes]:
                    a, b = firsts[number], firsts[number + 1]
                    mine = landed[begins[number] - base : begins[number + 1] - base]
                    if layout.shard is None:
                        if is_fill[number]:
                            return []
                        return [mine, checksum(mine)] if self.encoding.checksum else [mine]
                    streams = packed_streams(
                        mine, offsets[a : b + 1], is_fill[a:b], with_checksum=self.encoding.checksum
                    )
                    return file_parts(streams, layout.shard, objects[number].slots)

                if len(some) < self._threads:  # large ones, such as shards: a thread would write one for long
                    in_threads = partial(in_tasks, self._pool, self._threads)
                    self._wrote(self._files.write_pieces([(objects[n].path, parts(n)) for n in some], in_threads))
                else:
                    in_tasks(self._pool, self._threads, lambda n: self._write(objects[n].path, parts(n)), some)

        return finish

    def _write_from_host(self, objects: list[_Object], block: np.ndarray, box: Box) -> None:
        """Encode each chunk in a thread of the pool; the one that encodes the last chunk of an object writes it."""
        layout, chunk_shape = self._layout, self._layout.chunk_shape
        encoded: list[list[bytes | np.ndarray | None]] = [[None] * one.count for one in objects]
        missing = [one.count for one in objects]
        names = [(o, c, part) for o, one in enumerate(objects) for c, part in enumerate(split(one.box, chunk_shape))]

        def encode(number: int) -> None:
            which, chunk, part = names[number]
            encoded[which][chunk] = self._encoded(block[within(part, box)])
            with self._lock:
                missing[which] -= 1
                complete = not missing[which]
            if complete:
                own, encoded[which] = encoded[which], []
                streams = own_streams(own, with_checksum=self.encoding.checksum)
                self._write(objects[which].path, file_parts(streams, layout.shard, objects[which].slots))

        in_tasks(self._pool, self._threads, encode, range(len(names)))

    def _encoded(self, part: np.ndarray) -> bytes | np.ndarray | None:
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


def _slots(counts: Sequence[int], chunks_per_shard: Sequence[int]) -> np.ndarray:
    """Return the numbers in a shard's index of its first inner chunks along each axis."""
    corner = np.ix_(*map(np.arange, counts))
    return np.asarray(np.ravel_multi_index(np.broadcast_arrays(*corner), chunks_per_shard)).reshape(-1)  # type: ignore[call-overload, no-any-return]
