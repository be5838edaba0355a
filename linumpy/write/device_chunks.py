"""Bring chunks from device memory to the host or to files, and read them back for the next resolution.

In: device arrays of whole chunks. Out: the stored bytes of the chunks in pinned memory; or, of raw ones, files. Errors:
``OSError``, such as a full disk.

One kernel makes the voxels of each chunk contiguous, in a second copy of the block on the device. Raw chunks are
written by cuFile, many ``pwrite`` at the same time. In kvikio's compat mode, or without kvikio, they are copied to
pinned memory, and threads of the host write them: kvikio's compat mode was six times slower. A chunk that kvikio fails
to write is written again from host memory, which raises the system's own error. Chunks with codecs are encoded on the
device, and their stored bytes are copied to pinned memory.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import zarr

from linumpy.arrays import Array
from linumpy.device import array_module, kvikio_mode, require_cuda, to_host
from linumpy.gpu.kvikio_settings import transfer_settings
from linumpy.gpu.zarr_io import read_zarr_to_gpu
from linumpy.io.budget import PROCESS, Share
from linumpy.plan.encoding import Encoding
from linumpy.plan.pyramid import Box
from linumpy.write.chunk_file import write_file
from linumpy.write.tasks import Finish

log = logging.getLogger(__name__)

#: Bytes of each of the two pinned buffers, unless one chunk is larger.
_LANDING_NBYTES = 64 * 2**20
#: Files open at the same time, and descriptors that kvikio opens for each.
_OPEN_FILES, _DESCRIPTORS = 128, 2


def read_to_device(array: zarr.Array, box: Box) -> Array:
    """Read a box of an array into device memory."""
    return read_zarr_to_gpu(array, region=box)


def start_writing(
    paths: list[str],
    block: Array,
    chunk_shape: tuple[int, ...],
    fill_value: np.generic,
    write_from_host: Callable[[list[str], np.ndarray], None],
) -> Finish:
    """Start to write the raw chunks of a block to their files.

    Parameters
    ----------
    paths : list of str
        One for each chunk, the last axis fastest. Their folders exist.
    block : cupy.ndarray
        On the current device, ordered on CuPy's current stream.
    chunk_shape : tuple of int
        Voxels of a chunk; the last chunks along an axis may be ragged in `block`, and are written whole.
    fill_value : numpy.generic
        Value beyond the edge.
    write_from_host : callable
        Writes rows of bytes in host memory to the files of the paths, and returns when they are written.
    """
    rows = cut_into_chunks(block, chunk_shape, fill_value).reshape((len(paths), -1)).view(np.uint8)
    bounds = np.arange(len(paths) + 1) * rows.shape[1]
    streams = DeviceStreams(rows.reshape(-1), bounds)

    def finish() -> None:
        if kvikio_mode()[0] == "cufile":
            streams.wait()  # kvikio does not order its reads on the stream
            write_rows(paths, rows)
            return
        for some, landed in streams.land(bounds):
            write_from_host(paths[some.start : some.stop], landed.reshape(len(some), -1))

    return finish


class DeviceStreams:
    """The stored bytes of chunks, one behind another on the device, which the current stream is still making.

    Parameters
    ----------
    arena : cupy.ndarray of uint8
        The bytes.
    offsets : cupy.ndarray or numpy.ndarray of int64
        One more than chunks: where each begins in the arena.
    is_fill : cupy.ndarray of bool, optional
        Which chunks hold nothing but the fill value; by default none is taken for one.
    """

    def __init__(self, arena: Array, offsets: Array, is_fill: Array | None = None) -> None:
        cupy = require_cuda()
        self._arena, self._offsets = arena, offsets
        self._is_fill = np.zeros(len(offsets) - 1, bool) if is_fill is None else is_fill
        self._made = cupy.cuda.get_current_stream().record()
        self._copies = _copy_stream(cupy, cupy.cuda.Device().id)

    def wait(self) -> None:
        """Wait until all is made."""
        self._made.synchronize()

    def offsets(self) -> np.ndarray:
        """Wait for the offsets."""
        return self._landed(self._offsets)

    def is_fill(self) -> np.ndarray:
        """Wait for which chunks hold nothing but the fill value."""
        return self._landed(self._is_fill)

    def land(self, bounds: np.ndarray) -> Iterator[tuple[range, np.ndarray]]:
        """Copy objects to pinned memory; `bounds` are where they begin in the arena, and where the last one ends."""
        self._copies.wait_event(self._made)
        return land(self._arena, bounds, self._copies)

    def _landed(self, array: Array) -> np.ndarray:
        if isinstance(array, np.ndarray):
            return array
        self._copies.wait_event(self._made)
        return array.get(stream=self._copies)  # type: ignore[no-any-return, attr-defined]


@functools.cache
def _copy_stream(cupy: ModuleType, device: int) -> Any:
    """Return the stream of copies to the host: on the caller's, they would wait for the next batch."""
    with cupy.cuda.Device(device):
        return cupy.cuda.Stream(non_blocking=True)


def start_encoding(
    parts: Sequence[Array], chunk_shape: tuple[int, ...], fill_value: np.generic, encoding: Encoding
) -> DeviceStreams:
    """Start to cut blocks into chunks, and to encode these, on CuPy's current stream.

    Parameters
    ----------
    parts : sequence of cupy.ndarray
        Blocks, whose chunks follow one another, in each of them the last axis fastest.
    chunk_shape : tuple of int
        Voxels of a chunk; the last chunks along an axis may be ragged in a block, and are encoded whole.
    fill_value : numpy.generic
        Value beyond the edge.
    encoding : Encoding
        One that the device has.
    """
    from linumpy.gpu.codecs.encode import encode_chunks

    rows = rows_of(parts, chunk_shape, fill_value)
    is_fill = holds_only(rows, fill_value)
    stored = rows.view(np.uint8)
    if not encoding.compressor:
        return DeviceStreams(stored.reshape(-1), np.arange(len(rows) + 1) * stored.shape[1], is_fill)
    encoded = encode_chunks(stored, encoding)
    return DeviceStreams(encoded.arena, encoded.offsets, is_fill)


def rows_of(parts: Sequence[Array], chunk_shape: tuple[int, ...], fill_value: np.generic) -> Array:
    """Return the chunks of blocks, of shape (chunk, voxel)."""
    grids = [tuple(-(-n // c) for n, c in zip(part.shape, chunk_shape, strict=True)) for part in parts]
    ends = list(itertools.accumulate(map(math.prod, grids), initial=0))
    rows = array_module(parts[0]).empty((ends[-1], *chunk_shape), parts[0].dtype.newbyteorder("="))
    for part, grid, first, last in zip(parts, grids, ends, ends[1:], strict=False):
        cut_into_chunks(part, chunk_shape, fill_value, rows[first:last].reshape((*grid, *chunk_shape)))
    return rows.reshape((len(rows), -1))  # type: ignore[no-any-return]


def holds_only(rows: Array, value: np.generic) -> Array:
    """Return which rows hold nothing but a value, bit by bit."""
    bits = np.dtype(f"u{rows.dtype.itemsize}")
    wanted, voxels = np.asarray(value, rows.dtype).view(bits)[()], rows.view(bits)
    return (voxels.min(axis=1) == wanted) & (voxels.max(axis=1) == wanted)  # type: ignore[no-any-return]


def land(arena: Array, bounds: np.ndarray, stream: Any) -> Iterator[tuple[range, np.ndarray]]:
    """Copy objects to pinned memory, a few at a time; the next are copied while the caller uses the last.

    Parameters
    ----------
    arena : cupy.ndarray of uint8
        The objects, one behind another.
    bounds : numpy.ndarray of int64
        Where each of them begins, and where the last one ends.
    stream : cupy.cuda.Stream
        Of the copies.

    Yields
    ------
    range
        The numbers of the objects.
    numpy.ndarray
        Their bytes, valid until the next iteration.
    """
    cupy = require_cuda()
    parts = list(_parts(bounds, _LANDING_NBYTES))
    largest = max((int(bounds[part.stop] - bounds[part.start]) for part in parts), default=0)
    # CuPy's pool gives back memory of the same size only, and to pin memory takes longer than all else here.
    size = 1 << max(0, largest - 1).bit_length()
    buffers = [_pinned(cupy, size) for _ in parts[:2]]

    def start(number: int) -> tuple[np.ndarray, Any]:
        first, last = (int(bounds[at]) for at in (parts[number].start, parts[number].stop))
        landing = buffers[number % 2][: last - first]
        if last > first:
            arena[first:last].get(stream=stream, out=landing, blocking=False)
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


def _parts(bounds: np.ndarray, most: int) -> Iterator[range]:
    """Yield objects that take at most so many bytes together, or one."""
    first, count = 0, len(bounds) - 1
    while first < count:
        last = max(first + 1, int(np.searchsorted(bounds, bounds[first] + most, "right")) - 1)
        yield range(first, min(last, count))
        first = min(last, count)


def _pinned(cupy: ModuleType, nbytes: int) -> np.ndarray:
    return np.frombuffer(cupy.cuda.alloc_pinned_memory(max(1, nbytes)), np.uint8, nbytes)


def cut_into_chunks(
    block: Array, chunk_shape: tuple[int, ...], fill_value: np.generic, out: Array | None = None
) -> Array:
    """Return a contiguous array of shape (grid, chunk), `out` if there is one, with the fill value beyond the edge."""
    xp, dtype = array_module(block), block.dtype.newbyteorder("=")
    grid = tuple(-(-n // c) for n, c in zip(block.shape, chunk_shape, strict=True))
    chunks = xp.empty((*grid, *chunk_shape), dtype) if out is None else out
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
                write_file(paths[begin + number], [[to_host(rows[begin + number])]])


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
