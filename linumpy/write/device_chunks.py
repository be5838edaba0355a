"""Bring chunks from device memory to the host or to files, and read them back for the next resolution.

In: device arrays of whole chunks. Out: the stored bytes of the chunks in pinned memory; or, of raw ones, files. Errors:
``OSError``, such as a full disk.

One kernel makes the voxels of each chunk contiguous, in a second copy of the block on the device. Raw chunks are
written by cuFile (``linumpy.write.cufile``). In kvikio's compat mode, or without kvikio, they are copied to pinned
memory, and threads of the host write them: kvikio's compat mode was six times slower. Chunks with codecs are encoded on
the device, and their stored bytes are copied to pinned memory.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import zarr

from linumpy.arrays import Array
from linumpy.device import array_module, kvikio_mode, require_cuda
from linumpy.gpu.zarr_io import read_zarr_to_gpu
from linumpy.io.codecs import Checksum
from linumpy.plan.encoding import Encoding
from linumpy.plan.pyramid import Box
from linumpy.write.chunk_file import Bytes, ChunkFiles
from linumpy.write.cufile import write_rows
from linumpy.write.tasks import Finish

#: Writes some of the objects of a work; takes their numbers, which follow one another.
StartedWork = Callable[[Sequence[int]], None]
#: Bytes of each of the two pinned buffers of a thread that writes.
_LANDING_NBYTES = 4 * 2**20


def read_to_device(array: zarr.Array, box: Box) -> Array:
    """Read a box of an array into device memory."""
    return read_zarr_to_gpu(array, region=box)


def start_writing(
    paths: list[str],
    block: Array,
    chunk_shape: tuple[int, ...],
    fill_value: np.generic,
    files: ChunkFiles,
    start: Callable[[StartedWork], Finish],
) -> Finish:
    """Start to write the raw chunks of a block to their files.

    Parameters
    ----------
    paths : list of str
        One for each chunk, the last axis fastest.
    block : cupy.ndarray
        On the current device, ordered on CuPy's current stream.
    chunk_shape : tuple of int
        Voxels of a chunk; the last chunks along an axis may be ragged in `block`, and are written whole.
    fill_value : numpy.generic
        Value beyond the edge.
    files : ChunkFiles
        Of the array.
    start : callable
        Starts to call a function with parts of the numbers of the chunks, in threads.
    """
    rows = cut_into_chunks(block, chunk_shape, fill_value).reshape((len(paths), -1)).view(np.uint8)
    nbytes = rows.shape[1]
    cut = recorded()
    streams = DeviceStreams(rows.reshape(-1), np.arange(len(paths) + 1) * nbytes, cut)

    def by_kvikio() -> None:
        streams.wait()  # kvikio does not order its reads on the stream
        write_rows([path + files.suffix for path in paths], rows)
        files.complete(paths)

    def write_some(numbers: Sequence[int]) -> None:
        bounds = np.arange(numbers[0], numbers[-1] + 2) * nbytes
        write_landed(streams, [paths[n] for n in numbers], bounds, np.zeros(len(numbers), bool), files)

    if kvikio_mode()[0] == "cufile":
        return by_kvikio
    finish = start(write_some)
    cut.synchronize()
    return finish


class DeviceStreams:
    """The stored bytes of chunks, one behind another on the device, which the current stream is still making.

    Parameters
    ----------
    arena : cupy.ndarray of uint8
        The bytes.
    offsets : cupy.ndarray or numpy.ndarray of int64
        One more than chunks: where each begins in the arena.
    cut : cupy.cuda.Event
        When the block that they are made of may change.
    is_fill : cupy.ndarray of bool, optional
        Which chunks hold nothing but the fill value; by default none is taken for one.
    """

    def __init__(self, arena: Array, offsets: Array, cut: Any, is_fill: Array | None = None) -> None:
        cupy = require_cuda()
        self.cut = cut
        self._arena, self._offsets = arena, offsets
        self._is_fill = np.zeros(len(offsets) - 1, bool) if is_fill is None else is_fill
        self._device = cupy.cuda.Device()
        self._made = recorded()
        self._copies = _copy_stream(cupy, self._device.id)
        self._lock = threading.Lock()
        self._counts: tuple[np.ndarray, np.ndarray] | None = None

    def wait(self) -> None:
        """Wait until all is made."""
        self._made.synchronize()

    def counts(self) -> tuple[np.ndarray, np.ndarray]:
        """Wait until all is made, and return the offsets and which chunks hold nothing but the fill value."""
        with self._lock, self._device:
            if self._counts is None:
                self.wait()
                self._counts = self._fetched(self._offsets), self._fetched(self._is_fill)
            return self._counts

    @contextmanager
    def land(self, pieces: Sequence[tuple[int, int]]) -> Iterator[Iterator[tuple[int, np.ndarray]]]:
        """Copy pieces of the arena to pinned memory, one after another as they are asked for; see :func:`land`."""
        self.wait()
        with self._device, closing(land(self._arena, pieces, self._copies)) as landed:
            yield landed

    def _fetched(self, array: Array) -> np.ndarray:
        return array if isinstance(array, np.ndarray) else array.get(stream=self._copies)  # type: ignore[no-any-return, attr-defined]


def recorded(stream: Any = None) -> Any:
    """Return an event of a stream's work so far; threads that wait for it leave the processor to others."""
    event = require_cuda().cuda.Event(block=True, disable_timing=True)
    event.record(stream)
    return event


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
    cut = recorded()
    is_fill = holds_only(rows, fill_value)
    stored = rows.view(np.uint8)
    if not encoding.compressor:
        return DeviceStreams(stored.reshape(-1), np.arange(len(rows) + 1) * stored.shape[1], cut, is_fill)
    encoded = encode_chunks(stored, encoding)
    return DeviceStreams(encoded.arena, encoded.offsets, cut, is_fill)


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


def write_landed(
    streams: DeviceStreams,
    paths: Sequence[str],
    offsets: np.ndarray,
    is_fill: np.ndarray,
    files: ChunkFiles,
    *,
    with_checksum: bool = False,
) -> int:
    """Copy chunks to the host and write each to its file; returns the bytes of the files.

    Parameters
    ----------
    streams : DeviceStreams
        The stored bytes.
    paths : sequence of str
        Of the files.
    offsets : numpy.ndarray of int64
        Where each chunk begins in the arena, and where the last one ends.
    is_fill : numpy.ndarray of bool
        Which chunks hold nothing but the fill value: their files are removed.
    files : ChunkFiles
        Of the array.
    with_checksum : bool
        Whether a CRC-32C follows each.
    """
    nbytes, stored = 0, np.flatnonzero(~is_fill)
    for number in np.flatnonzero(is_fill).tolist():
        files.remove(paths[number])
    bounds = np.stack([offsets[:-1], offsets[1:]], axis=1)[stored]
    sizes = bounds[:, 1] - bounds[:, 0]
    if len(sizes) and sizes.max() > _LANDING_NBYTES:
        for number, (begin, end) in zip(stored.tolist(), bounds.tolist(), strict=True):
            with streams.land(cut_bytes(begin, end)) as landed:
                groups = Landing(landed).groups([(begin, end)], with_checksum=with_checksum)
                nbytes += files.write(paths[number], groups)
        return nbytes
    runs = list(_runs(bounds, _LANDING_NBYTES))
    with streams.land([(int(bounds[run.start, 0]), int(bounds[run.stop - 1, 1])) for run in runs]) as landed:
        for run, (begin, piece) in zip(runs, landed, strict=True):
            names = [paths[number] for number in stored[run.start : run.stop].tolist()]
            own = bounds[run.start : run.stop] - begin
            nbytes += files.write_many(names, piece, own, with_checksum=with_checksum)
    return nbytes


def _runs(bounds: np.ndarray, most: int) -> Iterator[range]:
    """Yield runs of chunks that lie within so many bytes, or of one chunk."""
    first, count = 0, len(bounds)
    while first < count:
        last = max(first + 1, int(np.searchsorted(bounds[:, 1], bounds[first, 0] + most, "right")))
        yield range(first, last)
        first = last


def cut_bytes(begin: int, end: int) -> list[tuple[int, int]]:
    """Cut bytes into pieces that are copied at a time."""
    return [(at, min(at + _LANDING_NBYTES, end)) for at in range(begin, end, _LANDING_NBYTES)]


def land(arena: Array, pieces: Sequence[tuple[int, int]], stream: Any) -> Generator[tuple[int, np.ndarray]]:
    """Copy bytes to pinned memory, piece by piece; the next is copied while the caller uses the last.

    Parameters
    ----------
    arena : cupy.ndarray of uint8
        Device memory, which nothing writes to any more.
    pieces : sequence of (int, int)
        Where each begins and ends in it.
    stream : cupy.cuda.Stream
        Of the copies.

    Yields
    ------
    int
        Where a piece begins in the arena.
    numpy.ndarray of uint8
        The piece, valid until the next iteration.
    """
    cupy = require_cuda()
    if not pieces:
        return
    # CuPy's pool gives back memory of the same size only, and to pin memory takes longer than all else here.
    size = 1 << (max(1, *(end - begin for begin, end in pieces)) - 1).bit_length()
    buffers = [_pinned(cupy, size) for _ in pieces[:2]]

    def start(number: int) -> tuple[np.ndarray, Any]:
        begin, end = pieces[number]
        landing = buffers[number % 2][: end - begin]
        if end > begin:
            arena[begin:end].get(stream=stream, out=landing, blocking=False)
        return landing, recorded(stream)

    landing, copied = start(0)
    try:
        for number, (begin, _) in enumerate(pieces):
            copied.synchronize()
            landed = landing
            if number + 1 < len(pieces):
                landing, copied = start(number + 1)
            yield begin, landed
    finally:
        copied.synchronize()  # after an interrupt too: the copy must finish before its pinned buffer is freed


class Landing:
    """Bytes of the device in the order in which they are copied to pinned memory.

    Parameters
    ----------
    pieces : iterator of (int, numpy.ndarray)
        As of :func:`land`.
    """

    def __init__(self, pieces: Iterator[tuple[int, np.ndarray]]) -> None:
        self._pieces, self._begin, self._piece = pieces, 0, np.empty(0, np.uint8)

    def groups(self, spans: Iterable[tuple[int, int]], *, with_checksum: bool = False) -> Iterator[list[Bytes]]:
        """Yield the bytes of spans of the arena, in groups that are valid until the next one.

        Parameters
        ----------
        spans : iterable of (int, int)
            Where each begins and ends; none begins before the end of an earlier one.
        with_checksum : bool
            Whether the CRC-32C of each span follows it.
        """
        group: list[Bytes] = []
        for begin, end in spans:
            crc = Checksum()
            while begin < end:
                while begin >= self._begin + len(self._piece):
                    if group:
                        yield group
                        group = []
                    self._begin, self._piece = next(self._pieces)
                part = self._piece[begin - self._begin : end - self._begin]
                if with_checksum:
                    crc.add(part)
                group.append(part)
                begin += len(part)
            if with_checksum:
                group.append(crc.stored())
        if group:
            yield group


def _pinned(cupy: ModuleType, nbytes: int) -> np.ndarray:
    return np.frombuffer(cupy.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)


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
