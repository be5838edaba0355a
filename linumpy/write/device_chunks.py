"""Write raw chunks from device memory to files, and read them back for the next resolution.

In: a device array of whole chunks, and the files of the chunks. Out: files of the size of a chunk, complete when the
call returns. Errors: ``OSError``, such as a full disk.

One kernel makes the voxels of each chunk contiguous, in a second copy of the block on the device. With cuFile, many
``pwrite`` run at the same time. In kvikio's compat mode, or without kvikio, the chunks are copied to pinned memory, and
threads of the host write them: kvikio's compat mode was six times slower. A chunk that kvikio fails to write is written
again from host memory, which raises the system's own error.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import zarr

from linumpy.arrays import Array
from linumpy.device import array_module, kvikio_mode, require_cuda, to_host
from linumpy.gpu.kvikio_settings import transfer_settings
from linumpy.gpu.zarr_io import read_zarr_to_gpu
from linumpy.io.budget import PROCESS, Share
from linumpy.plan.pyramid import Box
from linumpy.write.chunk_file import write_file

log = logging.getLogger(__name__)

#: Bytes of each of the two pinned buffers, unless one chunk is larger.
_LANDING_NBYTES = 64 * 2**20
#: Files open at the same time, and descriptors that kvikio opens for each.
_OPEN_FILES, _DESCRIPTORS = 128, 2


def read_to_device(array: zarr.Array, box: Box) -> Array:
    """Read a box of an array into device memory."""
    return read_zarr_to_gpu(array, region=box)


def write_from_device(
    paths: list[str],
    block: Array,
    chunk_shape: tuple[int, ...],
    fill_value: np.generic,
    write_from_host: Callable[[list[str], np.ndarray], None],
) -> None:
    """Write the chunks of a block to their files.

    Parameters
    ----------
    paths : list of str
        One for each chunk, the last axis fastest. Their folders exist.
    block : cupy.ndarray
        On the current device, ordered on CuPy's current stream, which the function synchronizes.
    chunk_shape : tuple of int
        Voxels of a chunk; the last chunks along an axis may be ragged in `block`, and are written whole.
    fill_value : numpy.generic
        Value beyond the edge.
    write_from_host : callable
        Writes rows of bytes in host memory to the files of the paths, and returns when they are written.
    """
    rows = cut_into_chunks(block, chunk_shape, fill_value).reshape((len(paths), -1)).view(np.uint8)
    if kvikio_mode()[0] == "cufile":
        require_cuda().cuda.get_current_stream().synchronize()  # kvikio does not order its reads on the stream
        write_rows(paths, rows)
        return
    for batch, landed in land(rows):
        write_from_host(paths[batch], landed)


def land(rows: Array) -> Iterator[tuple[slice, np.ndarray]]:
    """Copy rows to pinned memory, a few at a time; the next are copied while the caller uses the last.

    Yields
    ------
    slice
        The rows.
    numpy.ndarray
        Their bytes, valid until the next iteration.
    """
    cupy = require_cuda()
    count, nbytes = rows.shape
    step = min(count, max(1, _LANDING_NBYTES // nbytes))
    parts = [slice(begin, min(begin + step, count)) for begin in range(0, count, step)]
    buffers = [_pinned(cupy, step * nbytes) for _ in parts[:2]]
    stream = cupy.cuda.get_current_stream()

    def start(number: int) -> tuple[np.ndarray, Any]:
        part = rows[parts[number]]
        landing = buffers[number % 2][: part.size].reshape(part.shape)
        part.get(out=landing, blocking=False)
        return landing, stream.record()

    landing, copied = start(0)
    try:
        for number, part in enumerate(parts):
            copied.synchronize()
            landed = landing
            if number + 1 < len(parts):
                landing, copied = start(number + 1)
            yield part, landed
    finally:
        copied.synchronize()  # after an interrupt too: the copy must finish before its pinned buffer is freed


def _pinned(cupy: ModuleType, nbytes: int) -> np.ndarray:
    return np.frombuffer(cupy.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)


def cut_into_chunks(block: Array, chunk_shape: tuple[int, ...], fill_value: np.generic) -> Array:
    """Return a contiguous array of shape (grid, chunk), with the fill value beyond the edge."""
    xp, dtype = array_module(block), block.dtype.newbyteorder("=")
    grid = tuple(-(-n // c) for n, c in zip(block.shape, chunk_shape, strict=True))
    chunks = xp.empty((*grid, *chunk_shape), dtype)
    if any(n % c for n, c in zip(block.shape, chunk_shape, strict=True)):
        chunks[...] = fill_value
    axis_parts = [list(_whole_and_ragged(n, c)) for n, c in zip(block.shape, chunk_shape, strict=True)]
    order = (*range(0, 2 * block.ndim, 2), *range(1, 2 * block.ndim, 2))
    for boxes in itertools.product(*axis_parts):
        source, counts, lengths = zip(*boxes, strict=True)
        pairs = [n for pair in zip((c.stop - c.start for c in counts), lengths, strict=True) for n in pair]
        target = (*counts, *map(slice, lengths))
        chunks[target] = block[source].reshape(pairs).transpose(order)
    return chunks  # type: ignore[no-any-return]


def _whole_and_ragged(length: int, chunk: int) -> Iterator[tuple[slice, slice, int]]:
    """Yield the whole chunks of an axis, and its ragged last one: voxels, chunks, and voxels of a chunk."""
    count, ragged = divmod(length, chunk)
    if count:
        yield slice(0, count * chunk), slice(0, count), chunk
    if ragged:
        yield slice(count * chunk, length), slice(count, count + 1), ragged


def write_rows(paths: list[str], rows: Array) -> None:
    """Write each row of bytes to its file by kvikio; after an error or interrupt too, no write is still running."""
    most = min(_OPEN_FILES, len(paths))
    with PROCESS.take(Share(_DESCRIPTORS), Share(_DESCRIPTORS * most)) as share, transfer_settings():
        step = share.descriptors // _DESCRIPTORS
        for begin in range(0, len(paths), step):
            batch = _Batch(rows.shape[1])
            try:
                batch.start(paths[begin : begin + step], rows[begin : begin + step])
            finally:
                batch.wait()
            if batch.failed:
                log.warning("kvikio did not write %d chunks (%s); they are written from host memory", *batch.why())
            for number in batch.failed:
                # Raises the system's error instead of kvikio's, unless the error was temporary.
                write_file(paths[begin + number], [(to_host(rows[begin + number]), 0)])


class _Batch:
    """Files of equal size that kvikio writes at the same time."""

    def __init__(self, nbytes: int) -> None:
        self.failed: dict[int, str] = {}
        self._nbytes = nbytes
        self._files: list[Any] = []
        self._futures: list[tuple[int, Any]] = []

    def start(self, paths: list[str], rows: Array) -> None:
        """Open all files and start their writes."""
        import kvikio

        for number, path in enumerate(paths):
            try:
                self._files.append(kvikio.CuFile(path, "w"))
                self._futures.append((number, self._files[-1].pwrite(rows[number])))
            except (RuntimeError, OSError) as error:
                self.failed[number] = str(error)

    def wait(self) -> None:
        """Wait for all writes, after an interrupt too, since they read from the rows; note which failed."""
        interrupt: BaseException | None = None
        for number, future in self._futures:
            try:
                count = future.get()
                if count != self._nbytes:
                    self.failed[number] = f"{count} of {self._nbytes} bytes"
            except (RuntimeError, OSError) as error:
                self.failed[number] = str(error)
            except BaseException as error:
                interrupt = error
        for file in self._files:
            file.close()
        if interrupt is not None:
            raise interrupt

    def why(self) -> tuple[int, str]:
        """Return how many writes failed, and the reason of one."""
        return len(self.failed), next(iter(self.failed.values()))
