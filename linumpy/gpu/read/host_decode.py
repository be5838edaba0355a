"""Decode chunks on the host, by threads, into staging memory.

For the few streams that a GPU decodes more slowly than a processor core does, for what only the host decodes, and for
chunks that the device's decoders gave up. In: spans of a part. Out: decoded bytes at addresses. Errors:
:class:`~linumpy.errors.ChunkError`, one a chunk.
"""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from linumpy.errors import ChunkError
from linumpy.gpu.read.wave import Part
from linumpy.io.decode import DecodeError, decode_chunk


class DecodePool:
    """Threads that read and decode chunks.

    Parameters
    ----------
    threads : int
        How many; they start when they are first needed.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pool: ThreadPoolExecutor | None = None

    def start(self, part: Part, span: int, address: int) -> Future[None]:
        """Start to decode one chunk to an address."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.threads, "linumpy-decode")
        nbytes = part.layout.chunk_nbytes
        buffer = np.frombuffer(memoryview((ctypes.c_ubyte * nbytes).from_address(address)), np.uint8)
        return self._pool.submit(_decode, part, span, buffer)

    def close(self) -> None:
        """Let the threads end."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None


def _decode(part: Part, span: int, buffer: np.ndarray) -> None:
    chain = part.layout.chain
    assert chain is not None
    stored = _read(part, span)
    try:
        decode_chunk(chain, stored, buffer)
    except DecodeError as error:
        raise ChunkError(f"{part.chunk_name(span)} cannot be decoded ({chain}): {error}") from error


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
        if (part.versions[number] != (found.st_ino, found.st_size, found.st_mtime_ns)).any():
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
