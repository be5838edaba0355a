"""Choose how the chunks of an array are written (:func:`chunks_of`), and write raw chunks.

In: boxes of whole chunks or shards, as NumPy or CuPy arrays. Out: files. A raw chunk at the edge is written whole, with
the fill value beyond the edge, as zarr does. Several threads write from host memory. A device array is written by
kvikio's ``CuFile.pwrite`` where kvikio may use GPUDirect Storage, and elsewhere by the same threads from pinned memory
(``linumpy.write.device_chunks``). ``linumpy.write.encoded_chunks`` writes encoded chunks and shards. zarr-python writes
arrays that are not in a local folder, and arrays whose codecs, byte order or axis order linumpy does not write. Errors:
``OSError``, such as a full disk, and the errors of zarr-python.

Files are written under their final names, so the folder of the array must have a temporary name until the array is
complete. Where two processes may write the same chunk (``renamed``), each writes a file of its own and renames it.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Protocol

import numpy as np
import zarr
from zarr.buffer import cpu

from linumpy.arrays import Array
from linumpy.device import is_device_array, to_host, usable_cores
from linumpy.io.codecs import encoding_of
from linumpy.io.layout import read_layout
from linumpy.io.zarr_mode import host_codecs, read_on_host
from linumpy.plan.layout import ArrayLayout
from linumpy.plan.pyramid import Box, shape_of, split, within
from linumpy.write.chunk_file import ChunkFiles
from linumpy.write.encoded_chunks import Batch, EncodedChunks
from linumpy.write.tasks import Finish, Pending, done, in_tasks, start_tasks, task_count

#: Bytes that are gathered at once from a chunk that is not contiguous: they stay in the processor's cache.
_PIECE_NBYTES = 2**19
#: Device blocks that threads may be writing from pinned memory at the same time; each holds a copy on the device.
_PENDING = 2


def writing_threads() -> int:
    """Return how many threads write chunks from host memory."""
    return max(4, min(16, usable_cores()))


class Chunks(Protocol):
    """A writer of the chunks of an array.

    - `stored_nbytes`: bytes of the files that were written.
    - `why_host`: why the host encodes chunks of device arrays; empty if the device does.
    """

    array: zarr.Array
    stored_nbytes: int

    @property
    def why_host(self) -> str:
        """Why the host encodes chunks of device arrays; empty if the device does."""

    def start(self, box: Box, block: Array) -> Finish:
        """Start to write a box of whole chunks (or shards), and return a function that waits until it is written.

        `block` may change when this returns; a device array, by work on CuPy's current stream.
        """


def chunks_of(
    array: zarr.Array,
    pool: ThreadPoolExecutor,
    threads: int,
    *,
    renamed: bool = False,
    batch: Batch | None = None,
) -> Chunks:
    """Choose how the chunks of an array are written.

    - `pool`: the threads that write; the caller shuts the pool down.
    - `threads`: number of threads in the pool.
    - `renamed`: as for :class:`linumpy.write.chunk_file.ChunkFiles`.
    - `batch`: the batches that a device encodes; by default batches that take up to an eighth of the device's free
      memory.
    """
    layout, encoding = read_layout(array), encoding_of(array)
    if (
        encoding is None
        or layout.unsupported is not None
        or layout.root is None
        or layout.swapped
        or layout.stored_axes != tuple(range(layout.rank))
    ):
        return ZarrChunks(array, layout, pool)
    if layout.chain is None and layout.shard is None:
        return RawChunks(array, layout, pool, threads, renamed=renamed)
    return EncodedChunks(array, layout, encoding, pool, threads, renamed=renamed, batch=batch)


class ZarrChunks:
    """Chunks that zarr-python writes, for example with codecs that linumpy does not name, or axes in another order."""

    def __init__(self, array: zarr.Array, layout: ArrayLayout, pool: ThreadPoolExecutor) -> None:
        self.array, self._layout, self._pool, self.stored_nbytes = array, layout, pool, 0
        self.why_host = "zarr-python applies " + (" and ".join(layout.codecs) or "the order of bytes and axes")

    def start(self, box: Box, block: Array) -> Finish:
        """Copy a device array to the host, and write it by zarr before this returns.

        zarr runs in a thread of the pool, since it continues a write whose caller is interrupted: shutting down the
        pool waits for that write.
        """
        block = to_host(block)
        with host_codecs(self.array):
            self._pool.submit(self.array.set_basic_selection, box, block, prototype=cpu.buffer_prototype).result()
        if self._layout.root is not None:
            for unit in split(box, self._layout.object_shape):
                index = [b.start // s for b, s in zip(unit, self._layout.object_shape, strict=True)]
                with suppress(FileNotFoundError):
                    self.stored_nbytes += os.stat(
                        f"{self._layout.root}/{self.array.metadata.encode_chunk_key(tuple(index))}"
                    ).st_size
        return done


def read_back(array: zarr.Array, box: Box, *, on_device: bool) -> Array:
    """Read a box that was written, to the host by zarr or to the device by linumpy's reader."""
    if on_device:
        from linumpy.write.device_chunks import read_to_device

        return read_to_device(array, box)
    return read_on_host(array, box)


class RawChunks:
    """Chunks without encoding: a file holds the voxels of a chunk."""

    why_host = ""

    def __init__(
        self, array: zarr.Array, layout: ArrayLayout, pool: ThreadPoolExecutor, threads: int, *, renamed: bool = False
    ) -> None:
        self.array, self._layout, self._pool, self._threads = array, layout, pool, threads
        self._files, self.stored_nbytes = ChunkFiles(layout, renamed=renamed), 0
        self._pieces, self._pending = list(_pieces(layout.chunk_shape, layout.dtype.itemsize)), Pending(_PENDING)
        self._local, self._lock = threading.local(), threading.Lock()

    def start(self, box: Box, block: Array) -> Finish:
        """Start to write a box of whole chunks; see :meth:`Chunks.start`."""
        chunk = self._layout.chunk_shape
        boxes = list(split(box, chunk))
        paths = self._files.paths(box, chunk)
        if is_device_array(block):
            from linumpy.write.device_chunks import start_writing

            assert self._layout.fill_value is not None  # its dtype is supported
            self._pending.wait_for_slot()
            start = partial(self._start, len(paths))
            finish = start_writing(paths, block, chunk, self._layout.fill_value, self._files, start)
        else:
            finish = done
            if len(boxes) == 1:
                self._write_one(paths[0], to_host(block))
            else:
                self._write_some(paths, [to_host(block[within(chunk_box, box)]) for chunk_box in boxes])
        with self._lock:
            self.stored_nbytes += len(boxes) * self._layout.chunk_nbytes
        return finish

    def _start(self, count: int, write_some: Callable[[Sequence[int]], None]) -> Finish:
        """Start tasks that write `count` chunks from the device, through pinned memory."""
        tasks = task_count(count, self._threads, _PENDING)
        return self._pending.add(start_tasks(self._pool, tasks, write_some, range(count)))

    def _write_some(self, paths: list[str], parts: list[np.ndarray]) -> None:
        in_tasks(self._pool, self._threads, lambda k: self._write_one(paths[k], parts[k]), range(len(paths)))

    def _write_one(self, path: str, part: np.ndarray) -> None:
        layout = self._layout
        if part.shape == layout.chunk_shape and part.dtype == layout.dtype and part.flags.c_contiguous:
            self._files.write(path, [[part]])
        else:
            self._files.write(path, ([piece] for piece in self._gathered(part)))

    def _gathered(self, part: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the voxels of a chunk in pieces that are contiguous, with the fill value beyond the edge."""
        layout = self._layout
        for box in self._pieces:
            piece = self._scratch()[: math.prod(shape_of(box))].reshape(shape_of(box))
            voxels = part[box]
            if voxels.shape != piece.shape:
                piece[...] = layout.fill_value
            piece[tuple(map(slice, voxels.shape))] = voxels
            yield piece

    def _scratch(self) -> np.ndarray:
        """Return a buffer for the largest piece; each thread has a buffer of its own."""
        if not hasattr(self._local, "scratch"):
            largest = max(math.prod(shape_of(box)) for box in self._pieces)
            self._local.scratch = np.empty(largest, self._layout.dtype)
        return self._local.scratch  # type: ignore[no-any-return]


def _pieces(shape: tuple[int, ...], itemsize: int) -> Iterator[Box]:
    """Cut a chunk into boxes that are consecutive in its file, of at most :data:`_PIECE_NBYTES` or one voxel row."""
    axis = next(a for a in range(len(shape)) if a + 1 == len(shape) or _row_size(shape, a) * itemsize <= _PIECE_NBYTES)
    rows = max(1, min(shape[axis], _PIECE_NBYTES // (_row_size(shape, axis) * itemsize)))
    for corner in itertools.product(*map(range, shape[:axis]), range(0, shape[axis], rows)):
        leading = [slice(a, a + 1) for a in corner[:-1]]
        piece = slice(corner[-1], min(corner[-1] + rows, shape[axis]))
        yield (*leading, piece, *(slice(0, n) for n in shape[axis + 1 :]))


def _row_size(shape: tuple[int, ...], axis: int) -> int:
    """Return the number of voxels in a chunk for one index along `axis`."""
    return math.prod(shape[axis + 1 :])
