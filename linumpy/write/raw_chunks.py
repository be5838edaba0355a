"""Write whole chunks of an array: raw ones straight to their files, all others through zarr.

In: boxes that are whole in storage, as NumPy or CuPy arrays. Out: files. A raw chunk at the edge is written whole, with
the fill value beyond the edge, as zarr does. From host memory chunks go out by ``pwrite`` from several threads; from a
device by kvikio's ``CuFile.pwrite`` where that may be GPUDirect Storage, and else by the same threads from pinned
memory (``linumpy.write.device_chunks``). Errors: ``OSError``, such as a full disk.

Files are written under their final names, so an array is not to be read before it is complete; the folder that it is in
has a temporary name until then. Where two processes may write the same chunk, its file is written under another name
and renamed.
"""

from __future__ import annotations

import itertools
import math
import os
import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any, Protocol

import numpy as np
import zarr
from zarr.buffer import cpu

from linumpy.device import is_device_array, to_host
from linumpy.io.layout import read_layout
from linumpy.io.zarr_mode import host_codecs, read_on_host
from linumpy.plan.layout import ArrayLayout
from linumpy.plan.pyramid import Box, shape_of, split, within
from linumpy.write.chunk_file import write_file

#: What is not contiguous is gathered in pieces of about this size, which stay in the processor's cache.
_PIECE_NBYTES = 2**19


def writing_threads() -> int:
    """Threads that write chunks from host memory."""
    return max(4, min(16, len(os.sched_getaffinity(0))))


class Chunks(Protocol):
    """How the chunks of an array are written."""

    def write(self, box: Box, block: Any) -> None:
        """Write a box that is whole in storage, and return when all of it is written."""

    def read(self, box: Box, *, on_device: bool) -> Any:
        """Read a box, to where it is wanted."""


def chunks_of(array: zarr.Array, pool: ThreadPoolExecutor, threads: int, *, renamed: bool = False) -> Chunks:
    """Choose how the chunks of an array are written.

    Parameters
    ----------
    array : zarr.Array
        Open for writing.
    pool : ThreadPoolExecutor
        Its threads write; it is the caller's to shut down.
    threads : int
        How many it has.
    renamed : bool
        Whether a chunk's file gets its name when it is complete, as those that zarr writes do: where another process
        may write the same chunk at the same time.
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
    """Chunks that zarr writes: encoded ones, and those in shards."""

    def __init__(self, array: zarr.Array, pool: ThreadPoolExecutor) -> None:
        self.array, self._pool = array, pool

    def write(self, box: Box, block: Any) -> None:
        """Copy a device array to the host, once, and hand it to zarr.

        In a thread of the pool: zarr goes on with a write whose caller is interrupted, and only what waits for the pool
        knows when it is over.
        """
        block = to_host(block)
        with host_codecs(self.array):
            self._pool.submit(self.array.set_basic_selection, box, block, prototype=cpu.buffer_prototype).result()

    def read(self, box: Box, *, on_device: bool) -> Any:
        """Read by zarr, or by the reader of the device."""
        return read_back(self.array, box, on_device=on_device)


def read_back(array: zarr.Array, box: Box, *, on_device: bool) -> Any:
    """Read a box of what was written."""
    if on_device:
        from linumpy.write.device_chunks import read_to_device

        return read_to_device(array, box)
    return read_on_host(array, box)


class RawChunks:
    """Chunks whose files hold nothing but their voxels."""

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

    def write(self, box: Box, block: Any) -> None:
        """Write a box that is whole in storage."""
        chunk = self._layout.chunk_shape
        boxes = list(split(box, chunk))
        paths = [self._path([b.start // c for b, c in zip(one, chunk, strict=True)]) + self._suffix for one in boxes]
        if is_device_array(block):
            from linumpy.write.device_chunks import write_from_device

            write_from_device(paths, block, chunk, self._layout.fill_value, self._write_rows)
        elif len(boxes) == 1:
            self._write_one(paths[0], block)
        else:
            self._by_threads(paths, [block[within(one, box)] for one in boxes])
        if self._suffix:
            for path in paths:
                os.replace(path, path.removesuffix(self._suffix))

    def _write_rows(self, paths: list[str], rows: np.ndarray) -> None:
        """Write each row of bytes to its file."""
        self._by_threads(paths, [row.view(self._layout.dtype).reshape(self._layout.chunk_shape) for row in rows])

    def _by_threads(self, paths: list[str], parts: list[np.ndarray]) -> None:
        tasks = min(len(paths), 4 * self._threads)  # a task a chunk would be felt where chunks are small
        futures = [self._pool.submit(self._write_some, paths[k::tasks], parts[k::tasks]) for k in range(tasks)]
        finished, others = wait(futures, return_when=FIRST_EXCEPTION)
        for future in others:  # one has failed
            future.cancel()
        wait(others)
        for future in finished:
            future.result()

    def read(self, box: Box, *, on_device: bool) -> Any:
        """Read by zarr, or by the reader of the device."""
        return read_back(self.array, box, on_device=on_device)

    def _path(self, index: list[int]) -> str:
        """Name the file of a chunk, and make the folder that it goes to."""
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
    """Cut a chunk into boxes that are contiguous in its file; with the offset of each, in bytes."""
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
