"""Write the chunks of device arrays to files, or copy their stored bytes to pinned host memory; read boxes back.

Blocks are copied on the device, so that the voxels of each chunk are contiguous. cuFile writes raw chunks from there,
many at the same time; a chunk that kvikio fails to write is written again from host memory, and if that fails, too, the
error is the system's own. In kvikio's compat mode, or without kvikio, stored bytes are copied to pinned memory, and
threads of the host write them: kvikio's compat mode was six times slower.

The *arena* is the device array that holds the stored bytes of all chunks; a *piece* is a range of its bytes that is
copied to the host at once.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import zarr

from linumpy.arrays import Array
from linumpy.device import array_module, kvikio_mode, require_cuda, to_host
from linumpy.gpu.kvikio_settings import transfer_settings
from linumpy.gpu.zarr_io import read_zarr_to_gpu
from linumpy.io.budget import PROCESS, Share
from linumpy.io.codecs import Checksum
from linumpy.plan.codecs import Encoding
from linumpy.plan.pyramid import Box
from linumpy.write.chunk_file import Bytes, ChunkFiles, write_file
from linumpy.write.tasks import Finish

if TYPE_CHECKING:
    from cupy.cuda import Event, Stream
    from kvikio.cufile import IOFuture

#: Maximum bytes of each of the two pinned buffers of a writing thread.
_PINNED_NBYTES = 4 * 2**20


def read_to_device(array: zarr.Array, box: Box) -> Array:
    """Read a box of an array into device memory."""
    return read_zarr_to_gpu(array, region=box)


def write_by_kvikio(stored_bytes: StoredBytes, paths: list[str], files: ChunkFiles) -> Finish | None:
    """Return a function that writes raw chunks, all of one size, by cuFile; None if kvikio would use host memory."""
    if kvikio_mode()[0] != "cufile":
        return None

    def write() -> None:
        stored_bytes.wait()  # kvikio does not order its reads on the stream
        write_rows([path + files.suffix for path in paths], stored_bytes.arena.reshape((len(paths), -1)))
        files.complete(paths)

    return write


class StoredBytes:
    """The stored bytes of consecutive chunks on the device; CuPy's current stream may still be writing them.

    - `offsets` (int64): offset of each chunk in the arena, and the end of the last chunk.
    - `block_copied`: event after which the voxels that the chunks were made from may change.
    - `is_fill` (bool): which chunks hold only the fill value; by default none.
    """

    def __init__(self, arena: Array, offsets: Array, block_copied: Event, is_fill: Array | None = None) -> None:
        cupy = require_cuda()
        self.block_copied = block_copied
        self.arena, self._offsets = arena, offsets
        self._is_fill = np.zeros(len(offsets) - 1, bool) if is_fill is None else is_fill
        self._device = cupy.cuda.Device()
        self._complete = record_event()
        self._copies = _copy_stream(cupy, self._device.id)
        self._lock = threading.Lock()
        self._offsets_and_fill: tuple[np.ndarray, np.ndarray] | None = None

    def wait(self) -> None:
        """Wait until all bytes are written."""
        self._complete.synchronize()

    def offsets_and_fill(self) -> tuple[np.ndarray, np.ndarray]:
        """Wait until all bytes are written; return the offsets, and which chunks hold only the fill value."""
        with self._lock, self._device:
            if self._offsets_and_fill is None:
                self.wait()
                self._offsets_and_fill = self._fetched(self._offsets), self._fetched(self._is_fill)
            return self._offsets_and_fill

    @contextmanager
    def copied_to_host(self, pieces: Sequence[tuple[int, int]]) -> Iterator[Iterator[tuple[int, np.ndarray]]]:
        """Wait until all bytes are written; yield an iterator over copies of pieces, by :func:`pinned_copies`."""
        self.wait()
        with self._device, closing(pinned_copies(self.arena, pieces, self._copies)) as copies:
            yield copies

    def _fetched(self, array: Array) -> np.ndarray:
        return array if isinstance(array, np.ndarray) else array.get(stream=self._copies)  # type: ignore[no-any-return, attr-defined]


def record_event(stream: Stream | None = None) -> Event:
    """Record an event on a stream, by default CuPy's current stream; threads that wait for it block, not spin."""
    event = require_cuda().cuda.Event(block=True, disable_timing=True)
    event.record(stream)
    return event


@functools.cache
def _copy_stream(cupy: ModuleType, device: int) -> Stream:
    """Return a stream for copies to the host: on the caller's stream they would wait for the next batch."""
    with cupy.cuda.Device(device):
        return cupy.cuda.Stream(non_blocking=True)


def start_encoding(
    parts: Sequence[Array],
    chunk_shape: tuple[int, ...],
    fill_value: np.generic,
    encoding: Encoding,
    *,
    keep_fill: bool = False,
) -> StoredBytes:
    """Start to cut blocks into chunks, and to encode the chunks without checksums, on CuPy's current stream.

    - `parts`: blocks; the chunks are ordered block by block, in each of them the last axis fastest. The last chunks
      along an axis may be cut, and are encoded whole, with the fill value beyond the edge.
    - `keep_fill`: whether chunks that hold only the fill value are stored like others.
    """
    from linumpy.gpu.codecs.encode import encode_chunks

    rows = cut_blocks(parts, chunk_shape, fill_value)
    block_copied = record_event()
    is_fill = None if keep_fill else filled_with(rows, fill_value)
    raw = rows.view(np.uint8)
    if not encoding.compressor:
        return StoredBytes(raw.reshape(-1), np.arange(len(rows) + 1) * raw.shape[1], block_copied, is_fill)
    encoded = encode_chunks(raw, encoding)
    return StoredBytes(encoded.arena, encoded.offsets, block_copied, is_fill)


def cut_blocks(parts: Sequence[Array], chunk_shape: tuple[int, ...], fill_value: np.generic) -> Array:
    """Return the chunks of all blocks as a contiguous array of shape (chunk, voxel)."""
    grids = [tuple(-(-n // c) for n, c in zip(part.shape, chunk_shape, strict=True)) for part in parts]
    ends = list(itertools.accumulate(map(math.prod, grids), initial=0))
    rows = array_module(parts[0]).empty((ends[-1], *chunk_shape), parts[0].dtype.newbyteorder("="))
    for part, grid, first, last in zip(parts, grids, ends, ends[1:], strict=False):
        cut_into_chunks(part, chunk_shape, fill_value, rows[first:last].reshape((*grid, *chunk_shape)))
    return rows.reshape((len(rows), -1))  # type: ignore[no-any-return]


def filled_with(rows: Array, value: np.generic) -> Array:
    """Return which rows hold only a value, bit for bit."""
    bits = np.dtype(f"u{rows.dtype.itemsize}")
    expected, voxels = np.asarray(value, rows.dtype).view(bits)[()], rows.view(bits)
    return (voxels.min(axis=1) == expected) & (voxels.max(axis=1) == expected)  # type: ignore[no-any-return]


def write_chunk_files(
    stored_bytes: StoredBytes,
    paths: Sequence[str],
    offsets: np.ndarray,
    is_fill: np.ndarray,
    files: ChunkFiles,
    *,
    with_checksum: bool = False,
) -> int:
    """Copy chunks to the host, write each to its file, and return the size of all files.

    Parameters are as for :class:`StoredBytes`; files of chunks that hold only the fill value are removed.
    """
    nbytes, stored_numbers = 0, np.flatnonzero(~is_fill)
    for number in np.flatnonzero(is_fill).tolist():
        files.remove(paths[number])
    bounds = np.stack([offsets[:-1], offsets[1:]], axis=1)[stored_numbers]
    sizes = bounds[:, 1] - bounds[:, 0]
    if len(sizes) and sizes.max() > _PINNED_NBYTES:
        for number, (begin, end) in zip(stored_numbers.tolist(), bounds.tolist(), strict=True):
            with stored_bytes.copied_to_host(split_bytes(begin, end)) as copies:
                groups = span_groups(copies, [(begin, end)], with_checksum=with_checksum)
                nbytes += files.write(paths[number], groups)
        return nbytes
    runs = list(_runs(bounds, _PINNED_NBYTES))
    pieces = [(int(bounds[run.start, 0]), int(bounds[run.stop - 1, 1])) for run in runs]
    with stored_bytes.copied_to_host(pieces) as copies:
        for run, (begin, piece) in zip(runs, copies, strict=True):
            run_paths = [paths[number] for number in stored_numbers[run.start : run.stop].tolist()]
            run_bounds = bounds[run.start : run.stop] - begin
            nbytes += files.write_many(run_paths, piece, run_bounds, with_checksum=with_checksum)
    return nbytes


def _runs(bounds: np.ndarray, max_nbytes: int) -> Iterator[range]:
    """Yield runs of consecutive chunks; each run spans at most `max_nbytes`, or is a single chunk."""
    first, count = 0, len(bounds)
    while first < count:
        last = max(first + 1, int(np.searchsorted(bounds[:, 1], bounds[first, 0] + max_nbytes, "right")))
        yield range(first, last)
        first = last


def split_bytes(begin: int, end: int) -> list[tuple[int, int]]:
    """Cut a range of bytes into pieces that fit a pinned buffer."""
    return [(offset, min(offset + _PINNED_NBYTES, end)) for offset in range(begin, end, _PINNED_NBYTES)]


def pinned_copies(arena: Any, pieces: Sequence[tuple[int, int]], stream: Stream) -> Generator[tuple[int, np.ndarray]]:
    """Copy pieces of the arena to pinned memory; piece n + 1 is copied while the caller uses piece n.

    - `arena` (uint8): device memory; all work that writes it must be complete.
    - `pieces`: begin and end of each piece in the arena.

    Yields the begin of a piece, and its bytes, which are valid until the next iteration.
    """
    cupy = require_cuda()
    if not pieces:
        return
    # A power of two: CuPy's pool reuses memory of equal size only, and pinning memory takes longer than copy and write.
    size = 1 << (max(1, *(end - begin for begin, end in pieces)) - 1).bit_length()
    buffers = [np.frombuffer(cupy.cuda.alloc_pinned_memory(size), np.uint8, size) for _ in pieces[:2]]

    def start(number: int) -> tuple[np.ndarray, Event]:
        begin, end = pieces[number]
        piece = buffers[number % 2][: end - begin]
        if end > begin:
            arena[begin:end].get(stream=stream, out=piece, blocking=False)
        return piece, record_event(stream)

    next_piece, copied = start(0)
    try:
        for number, (begin, _) in enumerate(pieces):
            copied.synchronize()
            piece = next_piece
            if number + 1 < len(pieces):
                next_piece, copied = start(number + 1)
            yield begin, piece
    finally:
        copied.synchronize()  # after an interrupt too: the copy must finish before its pinned buffer is freed


def span_groups(
    pieces: Iterator[tuple[int, np.ndarray]], spans: Iterable[tuple[int, int]], *, with_checksum: bool = False
) -> Iterator[list[Bytes]]:
    """Yield the bytes of ascending spans, and their CRC-32Cs, from pieces of :func:`pinned_copies`.

    They come in groups of buffers, each valid until the next.
    """
    group: list[Bytes] = []
    piece_begin, piece = 0, np.empty(0, np.uint8)
    for begin, end in spans:
        crc = Checksum()
        while begin < end:
            while begin >= piece_begin + len(piece):
                if group:
                    yield group
                    group = []
                piece_begin, piece = next(pieces)
            part = piece[begin - piece_begin : end - piece_begin]
            if with_checksum:
                crc.add(part)
            group.append(part)
            begin += len(part)
        if with_checksum:
            group.append(crc.stored())
    if group:
        yield group


def cut_into_chunks(
    block: Array, chunk_shape: tuple[int, ...], fill_value: np.generic, out: Array | None = None
) -> Array:
    """Copy a block into an array of shape (grid, chunk); voxels beyond the edge of the block are the fill value."""
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
    """Yield slice of voxels, slice of chunks and voxels per chunk: for the whole chunks, then for the ragged chunk."""
    count, ragged = divmod(length, chunk)
    if count:
        yield slice(0, count * chunk), slice(0, count), chunk
    if ragged:
        yield slice(count * chunk, length), slice(count, count + 1), ragged


log = logging.getLogger(__name__)

#: Limit of files that are open at the same time, and descriptors that kvikio opens for each file.
_MAX_OPEN_FILES, _DESCRIPTORS_PER_FILE = 128, 2


def write_rows(paths: list[str], rows: Array) -> None:
    """Write each row of bytes to its file by kvikio; all writes have ended when this returns or raises."""
    max_open = min(_MAX_OPEN_FILES, len(paths))
    min_share, max_share = Share(_DESCRIPTORS_PER_FILE), Share(_DESCRIPTORS_PER_FILE * max_open)
    with PROCESS.take(min_share, max_share) as share, transfer_settings():
        step = share.descriptors // _DESCRIPTORS_PER_FILE
        for begin in range(0, len(paths), step):
            batch = rows[begin : begin + step]
            failed = _write_batch(paths[begin : begin + step], batch)
            if failed:
                reason = next(iter(failed.values()))
                log.warning(
                    "kvikio did not write %d chunks (%s); they are written from host memory", len(failed), reason
                )
            for index in failed:
                # Raises the system's error instead of kvikio's. A temporary error does not come back.
                write_file(paths[begin + index], [[to_host(batch[index])]])


def _write_batch(paths: Sequence[str], rows: Array) -> dict[int, str]:
    """Write rows at the same time; return the errors of those that failed, by the number of the row.

    All writes have ended when this returns or raises, since they use the rows: an interrupt is raised at the end.
    """
    import kvikio

    failed: dict[int, str] = {}
    futures: list[tuple[int, IOFuture]] = []
    with ExitStack() as scope:
        try:
            for index, path in enumerate(paths):
                try:
                    file = kvikio.CuFile(path, "w")
                    scope.callback(file.close)
                    futures.append((index, file.pwrite(rows[index])))
                except (RuntimeError, OSError) as error:
                    failed[index] = str(error)
        finally:
            interrupt: BaseException | None = None
            for index, future in futures:
                try:
                    count = future.get()
                    if count != rows.shape[1]:
                        failed[index] = f"{count} of {rows.shape[1]} bytes"
                except (RuntimeError, OSError) as error:
                    failed[index] = str(error)
                except BaseException as error:
                    interrupt = error
            if interrupt is not None:
                raise interrupt
    return failed
