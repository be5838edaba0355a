"""Decode chunks on the host, by threads, on their way to the device.

For the few streams that a GPU decodes more slowly than a processor core does, and for chunks that its decoders gave up.
In: a job and the pieces that are wanted. Out: bytes in the result, ordered on the caller's current stream. Errors:
:class:`~linumpy.errors.ChunkError`.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from linumpy.errors import ChunkError
from linumpy.gpu.read.job import Job
from linumpy.gpu.read.scatter import launch, table_words
from linumpy.gpu.read.staging import Target
from linumpy.io.budget import Share
from linumpy.io.decode import DecodeError, decode_chunk
from linumpy.plan.read.scatter import ScatterTable
from linumpy.plan.read.slabs import MAX_PIECES

#: Larger buffers, and more of them, are not worth their pinning, which costs about 0.7 ms/MiB.
_PINNED_CHUNK, _PINNED = 64 * 2**20, 256 * 2**20


class HostSlots(Protocol):
    """Buffers of decoded chunks on the host, and the way from there into the result."""

    count: int

    def buffer(self, slot: int) -> np.ndarray:
        """Return the bytes that a chunk is decoded into, once nothing reads them any more."""

    def place(self, slot: int, begin: int, end: int, table: ScatterTable) -> None:
        """Send bytes of a decoded chunk on their way into the result."""

    def fill(self, table: ScatterTable) -> None:
        """Write fill values."""

    def finish(self) -> None:
        """Wait until no buffer is in use any more."""


@dataclass(frozen=True)
class _Chunk:
    """A chunk that is being decoded."""

    rows: np.ndarray
    slot: int
    decoded: Future[None]


@dataclass(frozen=True)
class HostShare:
    """What decodes the chunks of a read.

    Attributes
    ----------
    threads : int
        Threads, each with a file open.
    buffers : int
        Chunks that are decoded or copied at the same time.
    """

    threads: int
    buffers: int


@contextmanager
def decoding(job: Job, chunks: int) -> Iterator[HostShare]:
    """Hold threads, files and memory for decoding so many chunks; inside another such block of the job, those."""
    chunk_nbytes = job.plan.layout.chunk_nbytes
    held = 2 * chunk_nbytes  # a buffer, and the stored bytes that it is decoded from
    threads = min(job.threads, max(1, chunks))
    # One more file is the shard whose index is read meanwhile.
    most = Share(1 + threads, buffer_count(chunk_nbytes, chunks, threads) * held, threads)
    with job.holding(Share(2, held, 1), most) as share:
        threads = min(share.threads, share.descriptors - 1)
        yield HostShare(threads, min(buffer_count(chunk_nbytes, chunks, threads), max(1, share.host_nbytes // held)))


def run(job: Job, slots: HostSlots, rows: Iterable[np.ndarray]) -> None:
    """Decode the chunks of pieces and place them.

    Parameters
    ----------
    job : Job
        In which the pieces were found.
    slots : HostSlots
        Buffers.
    rows : iterable of numpy.ndarray of int64
        Pieces in some order, those of a chunk together.
    """
    pending: deque[_Chunk] = deque()
    with decoding(job, slots.count) as share, ThreadPoolExecutor(share.threads, "linumpy-decode") as pool:
        try:
            for number, mine in enumerate(chunk for some in rows for chunk in _by_chunk(job, some)):
                if len(pending) == slots.count:
                    _place(job, slots, pending.popleft())
                slot = number % slots.count
                pending.append(_Chunk(mine, slot, pool.submit(_decode, job, int(mine[0]), slots.buffer(slot))))
            while pending:
                _place(job, slots, pending.popleft())
        finally:
            for chunk in pending:
                chunk.decoded.cancel()
            wait([chunk.decoded for chunk in pending])


def buffer_count(chunk_nbytes: int, chunks: int, threads: int) -> int:
    """Say how many chunks are decoded or copied at the same time."""
    return max(1, min(2 * threads, chunks, max(threads, _PINNED // chunk_nbytes)))


def _by_chunk(job: Job, rows: np.ndarray) -> Iterator[np.ndarray]:
    """Part pieces by their chunk."""
    if len(rows):
        chunk = job.pieces.chunk[rows]
        yield from np.split(rows, np.flatnonzero((chunk[1:] != chunk[:-1]).any(axis=1)) + 1)


def _decode(job: Job, row: int, buffer: np.ndarray) -> None:
    layout = job.plan.layout
    assert layout.chain is not None
    stored = _read(job, row)
    try:
        decode_chunk(layout.chain, stored, buffer[: layout.chunk_nbytes])
    except DecodeError as error:
        raise ChunkError(f"{job.chunk_name(row)} cannot be decoded ({layout.chain}): {error}") from error


def _read(job: Job, row: int) -> bytes:
    number, offset, nbytes = int(job.number[row]), int(job.stored_offset[row]), int(job.stored_nbytes[row])
    try:
        descriptor = os.open(job.path(number), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            before, stored, after = os.fstat(descriptor), _pread(descriptor, nbytes, offset), os.fstat(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ChunkError(f"{job.chunk_name(row)} cannot be read: {error.strerror}") from error
    job.check_version(number, before)
    job.check_version(number, after)
    if len(stored) != nbytes:
        raise ChunkError(f"{job.chunk_name(row)}: {len(stored)} of {nbytes} bytes could be read")
    return stored


def _pread(descriptor: int, nbytes: int, offset: int) -> bytes:
    """Read to the end of a range or of the file; the kernel reads at most 2 GiB at a time."""
    first = os.pread(descriptor, nbytes, offset)
    if len(first) in (0, nbytes):
        return first
    return first + _pread(descriptor, nbytes - len(first), offset + len(first))


def _place(job: Job, slots: HostSlots, chunk: _Chunk) -> None:
    """Place the pieces of a decoded chunk, as many at a time as the device's buffer takes."""
    chunk.decoded.result()
    job.counts.by_host += 1
    job.counts.files_opened += 1
    job.counts.bytes_read += int(job.stored_nbytes[chunk.rows[0]])
    offset, nbytes = job.pieces.offset[chunk.rows], job.pieces.nbytes[chunk.rows]
    ends, first = offset + nbytes, 0
    while first < len(chunk.rows):
        begin = int(offset[first]) // 16 * 16
        last = first + 1
        while last < min(len(chunk.rows), first + MAX_PIECES) and ends[last] - begin <= job.limits.nbytes:
            last += 1
        rows = chunk.rows[first:last]
        table = job.tables.table(rows, offset[first:last] - begin)
        slots.place(chunk.slot, begin, int(ends[first:last].max()), table)
        first = last


class DeviceHostSlots:
    """Pinned buffers of decoded chunks, and one buffer on the device that all of them pass through, in order.

    Parameters
    ----------
    target : Target
        The result.
    count : int
        Chunks at a time.
    chunk_nbytes : int
        Decoded bytes of a chunk.
    arena : cupy.ndarray of uint8
        The buffer on the device.
    """

    def __init__(self, target: Target, count: int, chunk_nbytes: int, arena: Any) -> None:
        import cupy
        import cupyx

        self._cupy, self.count, self._target, self._arena = cupy, count, target, arena
        self._stream = cupy.cuda.get_current_stream()
        pinned = chunk_nbytes <= _PINNED_CHUNK
        make = cupyx.empty_pinned if pinned else np.empty
        self._host = [make((chunk_nbytes,), dtype=np.uint8) for _ in range(count)]
        self._free: list[Any] = [None] * count

    def buffer(self, slot: int) -> np.ndarray:
        """Return a buffer, once it has been copied up."""
        if self._free[slot] is not None:
            self._free[slot].synchronize()
        return self._host[slot]

    def place(self, slot: int, begin: int, end: int, table: ScatterTable) -> None:
        """Copy up and scatter, one after another on the caller's stream."""
        runtime, arena = self._cupy.cuda.runtime, int(self._arena.data.ptr)
        source = self._host[slot].ctypes.data + begin
        runtime.memcpyAsync(arena, source, end - begin, runtime.memcpyHostToDevice, self._stream.ptr)
        self._scatter(table, arena)
        self._free[slot] = self._stream.record(self._cupy.cuda.Event(disable_timing=True))

    def fill(self, table: ScatterTable) -> None:
        """Write fill values."""
        self._scatter(table, 0)

    def _scatter(self, table: ScatterTable, source: int) -> None:
        words = self._cupy.asarray(table_words(table, self._target.fill))
        launch(table, self._target.conversion, source, self._target.address, words.data.ptr)

    def finish(self) -> None:
        """Wait until no buffer is in use any more: neither those placed, nor one whose scatter could not be started."""
        self._stream.record(self._cupy.cuda.Event(disable_timing=True)).synchronize()
