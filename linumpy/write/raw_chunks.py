"""Write whole chunks of an array: raw ones directly to their files, all others by zarr-python.

In: boxes of whole chunks or shards, as NumPy or CuPy arrays. Out: files. A raw chunk at the edge is written whole, with
the fill value beyond the edge, as zarr does. Several threads write host memory by ``pwrite``. A device array is written
by kvikio's ``CuFile.pwrite`` where that may be GPUDirect Storage, and by the same threads from pinned memory elsewhere
(``linumpy.write.device_chunks``). Errors: ``OSError``, such as a full disk.

Files are written under their final names, so an array must not be read before it is complete; its folder has a
temporary name until then. Where two processes may write the same chunk, its file is written under another name and
renamed.
"""

from __future__ import annotations

import itertools
import math
import os
import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Protocol

import numpy as np
import zarr
from zarr.buffer import cpu

from linumpy.arrays import Array
from linumpy.device import is_device_array, to_host
from linumpy.io.layout import read_layout
from linumpy.io.zarr_mode import host_codecs, read_on_host
from linumpy.plan.layout import ArrayLayout
from linumpy.plan.pyramid import Box, shape_of, split, within
from linumpy.write.chunk_file import write_file

#: Bytes of the pieces in which chunks that are not contiguous are gathered: they stay in the processor's cache.
_PIECE_NBYTES = 2**19


def writing_threads() -> int:
    """Return how many threads write chunks from host memory."""
    return max(4, min(16, len(os.sched_getaffinity(0))))


class Chunks(Protocol):
    """Writes and reads back the chunks of an array."""

    array: zarr.Array

    def write(self, box: Box, block: Array) -> None:
        """Write a box of whole chunks (or shards), and return when all of it is written."""

    def read(self, box: Box, *, on_device: bool) -> Array:
        """Read a box to the device or the host."""


def chunks_of(array: zarr.Array, pool: ThreadPoolExecutor, threads: int, *, renamed: bool = False) -> Chunks:
    """Choose how the chunks of an array are written.

    Parameters
    ----------
    array : zarr.Array
        Open for writing.
    pool : ThreadPoolExecutor
        The threads that write; the caller shuts it down.
    threads : int
        Number of its threads.
    renamed : bool
        Whether the file of a chunk gets its name when it is complete, as zarr's do: needed where another process may
        write the same chunk at the same time.
    """
    layout = read_layout(array)
    raw = (
        layout.unsupported is None
        and layout.chain is None
        and layout.shard is None
        and not layout.swapped
        and layout.stored_axes == tuple(range(layout.rank))
    )
    return RawChunks(array, layout, pool, threads, renamed=renamed) if raw else ZarrChunks(array, pool)


class ZarrChunks:
    """Chunks that zarr-python writes: encoded ones, and those in shards."""

    def __init__(self, array: zarr.Array, pool: ThreadPoolExecutor) -> None:
        self.array, self._pool = array, pool

    def write(self, box: Box, block: Array) -> None:
        """Copy a device array to the host, and write it by zarr.

        It runs in a thread of the pool: zarr continues a write whose caller is interrupted, and shutting the pool down
        waits for it.
        """
        block = to_host(block)
        with host_codecs(self.array):
            self._pool.submit(self.array.set_basic_selection, box, block, prototype=cpu.buffer_prototype).result()

    def read(self, box: Box, *, on_device: bool) -> Array:
        """Read to the host by zarr, or to the device by linumpy's reader."""
        return read_back(self.array, box, on_device=on_device)


def read_back(array: zarr.Array, box: Box, *, on_device: bool) -> Array:
    """Read a written box."""
    if on_device:
        from linumpy.write.device_chunks import read_to_device

        return read_to_device(array, box)
    return read_on_host(array, box)


class RawChunks:
    """Chunks whose files hold their voxels, not encoded."""

    def __init__(
        self, array: zarr.Array, layout: ArrayLayout, pool: ThreadPoolExecutor, threads: int, *, renamed: bool = False
    ) -> None:
        assert layout.root is not None
        assert layout.keys is not None
        self.array, self._layout, self._pool, self._threads = array, layout, pool, threads
        self._root, self._keys = layout.root, layout.keys
        self._suffix = f".{os.getpid()}-{secrets.token_hex(4)}.partial" if renamed else ""
        self._pieces = list(_pieces(layout.chunk_shape, layout.dtype.itemsize))
        self._folders: set[str] = set()
        self._local = threading.local()

    def write(self, box: Box, block: Array) -> None:
        """Write a box of whole chunks."""
        chunk = self._layout.chunk_shape
        boxes = list(split(box, chunk))
        paths = [
            self._path([b.start // c for b, c in zip(chunk_box, chunk, strict=True)]) + self._suffix
            for chunk_box in boxes
        ]
        if is_device_array(block):
            from linumpy.write.device_chunks import write_from_device

            assert self._layout.fill_value is not None  # its dtype is supported
            write_from_device(paths, block, chunk, self._layout.fill_value, self._write_rows)
        elif len(boxes) == 1:
            self._write_one(paths[0], to_host(block))
        else:
            self._by_threads(paths, [block[within(chunk_box, box)] for chunk_box in boxes])
        if self._suffix:
            for path in paths:
                os.replace(path, path.removesuffix(self._suffix))

    def _write_rows(self, paths: list[str], rows: np.ndarray) -> None:
        """Write each row of bytes to its file."""
        self._by_threads(paths, [row.view(self._layout.dtype).reshape(self._layout.chunk_shape) for row in rows])

    def _by_threads(self, paths: list[str], parts: list[np.ndarray]) -> None:
        tasks = min(len(paths), 4 * self._threads)  # one task for each chunk would be slow for small chunks
        futures = [self._pool.submit(self._write_some, paths[k::tasks], parts[k::tasks]) for k in range(tasks)]
        finished, others = wait(futures, return_when=FIRST_EXCEPTION)
        for future in others:  # after an error
            future.cancel()
        wait(others)
        for future in finished:
            future.result()

    def read(self, box: Box, *, on_device: bool) -> Array:
        """Read to the host by zarr, or to the device by linumpy's reader."""
        return read_back(self.array, box, on_device=on_device)

    def _path(self, index: list[int]) -> str:
        """Return the path of a chunk's file, after making its folder."""
        path = f"{self._root}/{self._keys.prefix}{self._keys.separator.join(map(str, index))}"
        folder = os.path.dirname(path)
        if folder not in self._folders:
            os.makedirs(folder, exist_ok=True)
            self._folders.add(folder)
        return path

    def _write_some(self, paths: list[str], parts: list[np.ndarray]) -> None:
        for path, part in zip(paths, parts, strict=True):
            self._write_one(path, part)

    def _write_one(self, path: str, part: np.ndarray) -> None:
        layout = self._layout
        if part.shape == layout.chunk_shape and part.dtype == layout.dtype and part.flags.c_contiguous:
            write_file(path, [(part, 0)])
        else:
            write_file(path, self._gathered(part))

    def _gathered(self, part: np.ndarray) -> Iterator[tuple[np.ndarray, int]]:
        """Gather a chunk piece by piece, with the fill value beyond the edge."""
        layout = self._layout
        for box, offset in self._pieces:
            piece = self._scratch()[: math.prod(shape_of(box))].reshape(shape_of(box))
            source = part[box]
            if source.shape != piece.shape:
                piece[...] = layout.fill_value
            piece[tuple(map(slice, source.shape))] = source
            yield piece, offset

    def _scratch(self) -> np.ndarray:
        if not hasattr(self._local, "scratch"):
            largest = max(math.prod(shape_of(box)) for box, _ in self._pieces)
            self._local.scratch = np.empty(largest, self._layout.dtype)
        return self._local.scratch  # type: ignore[no-any-return]


def _pieces(shape: tuple[int, ...], itemsize: int) -> Iterator[tuple[Box, int]]:
    """Cut a chunk into boxes that are contiguous in its file; yields each with its offset in bytes."""
    axis = next(a for a in range(len(shape)) if a + 1 == len(shape) or _below(shape, a) * itemsize <= _PIECE_NBYTES)
    rows = max(1, min(shape[axis], _PIECE_NBYTES // (_below(shape, axis) * itemsize)))
    strides = [_below(shape, a) * itemsize for a in range(len(shape))]
    for corner in itertools.product(*map(range, shape[:axis]), range(0, shape[axis], rows)):
        leading = [slice(a, a + 1) for a in corner[:-1]]
        piece = slice(corner[-1], min(corner[-1] + rows, shape[axis]))
        offset = sum(a * s for a, s in zip(corner, strides[: axis + 1], strict=True))
        yield (*leading, piece, *(slice(0, n) for n in shape[axis + 1 :])), offset


def _below(shape: tuple[int, ...], axis: int) -> int:
    return math.prod(shape[axis + 1 :])
