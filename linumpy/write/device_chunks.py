"""Raw chunks from device memory to files; and back, for the next resolution.

In: a device array that is whole in storage, and the files of its chunks. Out: files, each as long as a chunk, written
when the call returns. Errors: ``OSError``, such as a full disk.

One kernel makes the voxels of each chunk contiguous (a second copy of the block on the device). Where cuFile may take
them past host memory, the ``pwrite`` of many files are under way at the same time. In kvikio's compat mode, or without
kvikio, they land in pinned memory, from where threads of the host write them: kvikio's own way through the host was six
times slower where it was measured. What kvikio fails to write is written once more from host memory, and the system's
own error is raised.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import zarr

from linumpy.device import array_module, kvikio_mode, require_cuda, to_host
from linumpy.gpu.kvikio_settings import transfer_settings
from linumpy.gpu.zarr_io import read_zarr_to_gpu
from linumpy.io.budget import PROCESS, Share
from linumpy.plan.pyramid import Box
from linumpy.write.chunk_file import write_file

log = logging.getLogger(__name__)

#: Bytes that are copied to pinned memory at a time, unless one chunk takes more; there are two such buffers.
_LANDING_NBYTES = 64 * 2**20
#: Files open at the same time, and how often kvikio opens each.
_OPEN_FILES, _DESCRIPTORS = 128, 2


def read_to_device(array: zarr.Array, box: Box) -> Any:
    """Read a box of an array into device memory."""
    return read_zarr_to_gpu(array, region=box)


def write_from_device(
    paths: list[str],
    block: Any,
    chunk_shape: tuple[int, ...],
    fill_value: Any,
    write_from_host: Callable[[list[str], np.ndarray], None],
) -> None:
    """Write the chunks of a block to their files.

    Parameters
    ----------
    paths : list of str
        One for each chunk, the last axis fastest. Their folders are there.
    block : cupy.ndarray
        On the current device, ordered on CuPy's current stream, which is waited for.
    chunk_shape : tuple of int
        Voxels of a chunk; the last chunks along an axis may be ragged in `block`, and are written whole.
    fill_value : numpy.generic
        What is beyond the edge.
    write_from_host : callable
        Takes paths and rows of bytes in host memory, and returns when each is written to its file.
    """
    rows = cut_into_chunks(block, chunk_shape, fill_value).reshape(len(paths), -1).view(np.uint8)
    if kvikio_mode()[0] == "cufile":
        require_cuda().cuda.get_current_stream().synchronize()  # kvikio knows nothing of streams
        write_rows(paths, rows)
        return
    for some, landed in land(rows):
        write_from_host(paths[some], landed)


def land(rows: Any) -> Iterator[tuple[slice, np.ndarray]]:
    """Copy rows to pinned memory, a few at a time; the next are copied while the caller has some.

    Yields
    ------
    slice
        Which rows.
    numpy.ndarray
        Their bytes, valid until the next ones are asked for.
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

    landing, there = start(0)
    try:
        for number, some in enumerate(parts):
            there.synchronize()
            landed = landing
            if number + 1 < len(parts):
                landing, there = start(number + 1)
            yield some, landed
    finally:
        there.synchronize()  # interrupted or not: the copy must finish before its pinned buffer is freed


def _pinned(cupy: Any, nbytes: int) -> np.ndarray:
    return np.frombuffer(cupy.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)


def cut_into_chunks(block: Any, chunk_shape: tuple[int, ...], fill_value: Any) -> Any:
    """Make the voxels of each chunk contiguous: (grid, chunk), contiguous, with the fill value beyond the edge."""
    xp, dtype = array_module(block), block.dtype.newbyteorder("=")
    grid = tuple(-(-n // c) for n, c in zip(block.shape, chunk_shape, strict=True))
    chunks = xp.empty((*grid, *chunk_shape), dtype)
    if any(n % c for n, c in zip(block.shape, chunk_shape, strict=True)):
        chunks[...] = fill_value
    ways = [list(_whole_and_ragged(n, c)) for n, c in zip(block.shape, chunk_shape, strict=True)]
    order = (*range(0, 2 * block.ndim, 2), *range(1, 2 * block.ndim, 2))
    for one in itertools.product(*ways):
        source, counts, lengths = zip(*one, strict=True)
        pairs = [n for pair in zip((c.stop - c.start for c in counts), lengths, strict=True) for n in pair]
        target = (*counts, *map(slice, lengths))
        chunks[target] = block[source].reshape(pairs).transpose(order)
    return chunks


def _whole_and_ragged(length: int, chunk: int) -> Any:
    """Yield the part of an axis that is whole chunks, and the rest: voxels, chunks, and voxels of a chunk."""
    count, rest = divmod(length, chunk)
    if count:
        yield slice(0, count * chunk), slice(0, count), chunk
    if rest:
        yield slice(count * chunk, length), slice(count, count + 1), rest


def write_rows(paths: list[str], rows: Any) -> None:
    """Write each row of bytes to its file; those under way are waited for whatever happens."""
    most = min(_OPEN_FILES, len(paths))
    with PROCESS.take(Share(_DESCRIPTORS), Share(_DESCRIPTORS * most)) as share, transfer_settings():
        step = share.descriptors // _DESCRIPTORS
        for begin in range(0, len(paths), step):
            some = slice(begin, begin + step)
            batch = _Batch(rows.shape[1])
            try:
                batch.start(paths[some], rows[some])
            finally:
                batch.wait()
            if batch.failed:
                log.warning("kvikio did not write %d chunks (%s); they go through the host", *batch.why())
            for number in batch.failed:
                # Whatever kvikio's reason was, the system's is the one to tell; and a passing one is gone now.
                write_file(paths[begin + number], [(to_host(rows[begin + number]), 0)])


class _Batch:
    """A few files that are written at the same time, each with so many bytes."""

    def __init__(self, nbytes: int) -> None:
        self.failed: dict[int, str] = {}
        self._nbytes = nbytes
        self._files: list[Any] = []
        self._futures: list[tuple[int, Any]] = []

    def start(self, paths: list[str], rows: Any) -> None:
        """Open all files and start to write them."""
        import kvikio

        for number, path in enumerate(paths):
            try:
                self._files.append(kvikio.CuFile(path, "w"))
                self._futures.append((number, self._files[-1].pwrite(rows[number])))
            except (RuntimeError, OSError) as error:
                self.failed[number] = str(error)

    def wait(self) -> None:
        """Wait for all of them, interrupted or not, since they read from the rows until then; note which failed."""
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
        """How many failed, and the reason of one."""
        return len(self.failed), next(iter(self.failed.values()))
