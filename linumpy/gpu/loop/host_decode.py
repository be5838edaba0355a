"""Decode chunks on the host, by threads, into staging memory.

For the few streams that a GPU decodes more slowly than a processor core does, for what only the host decodes, and for
chunks that the device's decoders gave up. In: spans of a part. Out: decoded bytes at addresses. Errors:
:class:`~linumpy.errors.ChunkError`, one a chunk.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import numpy as np

from linumpy.errors import ChunkError
from linumpy.gpu.loop.wave import Part
from linumpy.io.decode import DecodeError, decode_chunk
from linumpy.io.reads.call_thread import check_thread_memory
from linumpy.io.reads.plain_reads import version

#: Calls of a pool that may start another thread.
_STARTING = 1024

Result = TypeVar("Result")


class PendingDecodes:
    """Chunks that are being decoded.

    Parameters
    ----------
    tasks : list of Future
        Each gives an error or None for each of its chunks, and the seconds that it has decoded for.

    Attributes
    ----------
    seconds : float
        Of all threads together, reading not counted in; known when they have ended.
    name : str
        What reads, for reports.
    """

    name = "threads that pread each chunk and decode it"

    def __init__(self, tasks: list[Future[tuple[list[Exception | None], float]]]) -> None:
        self._tasks, self.seconds = tasks, 0.0

    def done(self) -> bool:
        """Say whether all have ended."""
        return all(task.done() for task in self._tasks)

    def wait(self) -> list[Exception | None]:
        """Wait for all; return an error for each chunk, None where it was decoded."""
        results = [task.result() for task in self._tasks]
        self.seconds = sum(seconds for _, seconds in results)
        return [error for errors, _ in results for error in errors]

    def abandon(self) -> None:
        """Wait until nothing is written any more."""
        wait(self._tasks)


class DecodePool:
    """Threads that read and decode chunks.

    Parameters
    ----------
    threads : int
        How many; they start when they are first needed.
    """

    def __init__(self, threads: int) -> None:
        self.threads, self._calls = threads, 0
        self._pool: ThreadPoolExecutor | None = None

    def start(self, part: Part, spans: np.ndarray, addresses: np.ndarray) -> PendingDecodes:
        """Start to decode chunks to addresses, by no more tasks than there are threads: each costs Python."""
        step = -(-len(spans) // self.threads)
        rows = list(zip(spans.tolist(), addresses.tolist(), strict=True))
        some = [rows[first : first + step] for first in range(0, len(rows), step)]
        try:
            return PendingDecodes([self.submit(_decode_some, part, mine) for mine in some])
        except BaseException:  # a thread cannot be started: wait for the others, which write to the addresses
            self.close()
            raise

    def submit(self, call: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Let one of the threads make a call."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.threads, "linumpy-decode")
        if self._calls < _STARTING:  # by then it has all its threads
            self._calls += 1
            check_thread_memory()
        return self._pool.submit(call, *arguments)

    def close(self) -> None:
        """Let the threads end."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool, self._calls = None, 0


def _decode_some(part: Part, rows: list[tuple[int, int]]) -> tuple[list[Exception | None], float]:
    """Decode spans to addresses; one that fails leaves the others as they are."""
    errors: list[Exception | None] = []
    seconds = 0.0
    for span, address in rows:
        try:
            buffer = (ctypes.c_ubyte * part.layout.chunk_nbytes).from_address(address)
            seconds += _decode(part, span, np.frombuffer(memoryview(buffer), np.uint8))
            errors.append(None)
        except Exception as error:
            errors.append(error)
    return errors, seconds


def _decode(part: Part, span: int, buffer: np.ndarray) -> float:
    """Read and decode a chunk; return the seconds that decoding took."""
    chain = part.layout.chain
    assert chain is not None
    stored = _read(part, span)
    begin = time.perf_counter()
    try:
        decode_chunk(chain, stored, buffer)
    except DecodeError as error:
        raise ChunkError(f"{part.chunk_name(span)} cannot be decoded ({chain}): {error}") from error
    return time.perf_counter() - begin


def _read(part: Part, span: int) -> bytes:
    offset, nbytes = int(part.stored_offset[span]), int(part.stored_nbytes[span])
    number = int(part.wanted.object_index[span])
    try:
        descriptor = os.open(part.paths(np.array([number]))[0], os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            before, stored, after = os.fstat(descriptor), _pread(descriptor, nbytes, offset), os.fstat(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ChunkError(f"{part.chunk_name(span)} cannot be read: {error.strerror}") from error
    for found in (before, after):
        if (part.versions[number] != version(found)[:3]).any():
            raise part.replaced(number, found.st_size)
    if len(stored) != nbytes:
        raise ChunkError(f"{part.chunk_name(span)}: {len(stored)} of {nbytes} bytes could be read")
    return stored


def _pread(descriptor: int, nbytes: int, offset: int) -> bytes:
    """Read to the end of a range or of the file; the kernel reads at most 2 GiB at a time."""
    first = os.pread(descriptor, nbytes, offset)
    if len(first) in (0, nbytes):
        return first
    return first + _pread(descriptor, nbytes - len(first), offset + len(first))
