"""Read raw shards from an HTTP server to the device without linumpy: by kvikio's RemoteFile, and by obstore.

Both first copy all bytes of all shards to the device: kvikio through its own threads and pinned memory, obstore through
host memory. Then the same array operations order the chunks there. Without a GPU obstore reads into NumPy arrays, and
kvikio cannot run. Errors: :class:`~linumpy.benchmark.cases.CannotRunError` if kvikio cannot be used, ``ImportError`` if
obstore is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from math import prod
from typing import Any

import numpy as np

from linumpy.arrays import Array
from linumpy.benchmark.cases import CannotRunError
from linumpy.benchmark.shared.stores import StoredArray
from linumpy.device import resolve, to_host
from linumpy.gpu.kvikio_settings import transfer_settings
from linumpy.packages import install_line

#: Bytes of a request of obstore, as many as kvikio's, and the number of concurrent requests.
REQUEST_NBYTES, REQUESTS = 4 * 2**20, 32

#: A function that reads the objects with the given keys into the rows of a buffer.
Fetch = Callable[[Sequence[str], Array], None]


def by_kvikio(base: str, stored: StoredArray, *, on_gpu: bool) -> Array:
    """Read the array by kvikio's RemoteFile."""
    remote_file = _remote_file(on_gpu)

    def fetch(keys: Sequence[str], buffer: Array) -> None:
        with transfer_settings(), ExitStack() as opened:
            size = buffer.shape[1]
            files = [opened.enter_context(remote_file.open_http(f"{base}/{key}", size)) for key in keys]
            reads = [file.pread(row, size) for file, row in zip(files, buffer, strict=True)]
            if any(read.get() != size for read in reads):
                raise OSError("kvikio did not read all bytes of a shard")

    return _read(stored, fetch, on_gpu=on_gpu)


def _remote_file(on_gpu: bool) -> Any:
    if not on_gpu:
        raise CannotRunError("kvikio needs CUDA's driver, also for reads into host memory")
    try:
        from kvikio import RemoteFile
    except (ImportError, RuntimeError) as error:  # RuntimeError: CUDA's libraries are not found
        raise CannotRunError(f"kvikio cannot be used: {install_line()}") from error
    return RemoteFile


def by_obstore(store: object, stored: StoredArray, *, on_gpu: bool) -> Array:
    """Read the array by obstore; the thread that waited for a response copies the bytes to the device."""
    import obstore

    def fetch(keys: Sequence[str], buffer: Array) -> None:
        def read_range(row: int, start: int) -> None:
            stop = min(buffer.shape[1], start + REQUEST_NBYTES)
            response = obstore.get_range(store, keys[row], start=start, end=stop)  # type: ignore[arg-type]
            data = np.frombuffer(memoryview(response), np.uint8)
            buffer[row, start:stop] = resolve("cuda" if on_gpu else "cpu").xp.asarray(data)

        with ThreadPoolExecutor(REQUESTS) as threads:
            starts = range(0, buffer.shape[1], REQUEST_NBYTES)
            for future in [threads.submit(read_range, row, start) for row in range(len(keys)) for start in starts]:
                future.result()

    return _read(stored, fetch, on_gpu=on_gpu)


def _shards(stored: StoredArray) -> Iterator[tuple[int, ...]]:
    """Yield the index of each shard."""
    assert stored.shards is not None
    return np.ndindex(*(n // s for n, s in zip(stored.shape, stored.shards, strict=True)))


def _read(stored: StoredArray, fetch: Fetch, *, on_gpu: bool) -> Array:
    """Fetch all shards, and order their chunks; the array consists of whole shards, and no chunk is missing."""
    assert stored.shards is not None
    xp = resolve("cuda" if on_gpu else "cpu").xp
    keys = [f"{stored.path.name}/c/{'/'.join(map(str, index))}" for index in _shards(stored)]
    size = (stored.path.parent / keys[0]).stat().st_size
    buffer = xp.empty((len(keys), size), np.uint8)
    fetch(keys, buffer)
    inner = tuple(s // c for s, c in zip(stored.shards, stored.chunks, strict=True))
    count, chunk_nbytes = prod(inner), prod(stored.chunks) * stored.dtype.itemsize
    offsets = np.ascontiguousarray(to_host(buffer[:, count * chunk_nbytes : -4])).view(np.uint64)  # without checksums
    order = xp.asarray(offsets[:, ::2] // np.uint64(chunk_nbytes)).astype(np.int64)
    rank = len(inner)
    axes = [axis for pair in zip(range(rank), range(rank, 2 * rank), strict=True) for axis in pair]
    out = xp.empty(stored.shape, stored.dtype)
    for row, index in enumerate(_shards(stored)):
        chunks = buffer[row, : count * chunk_nbytes].view(stored.dtype).reshape(count, *stored.chunks)[order[row]]
        box = tuple(slice(n * s, (n + 1) * s) for n, s in zip(index, stored.shards, strict=True))
        out[box] = chunks.reshape(*inner, *stored.chunks).transpose(axes).reshape(stored.shards)
    return out
