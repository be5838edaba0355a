"""A reader with the interface of linumpy.gpu.Reader that reads with zarr-python in threads: the oracle's own speed."""

import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import zarr

from linumpy.io.source import open_source


class Ticket:
    def __init__(self, future):
        self._future = future

    def result(self, stream=None):
        return self._future.result()

    def exception(self):
        try:
            return self._future.exception()
        except CancelledError as error:
            return error

    def done(self):
        return self._future.done()

    def cancel(self):
        return self._future.cancel()


class Reader:
    def __init__(self, device="cpu", scratch_bytes=0, cache_bytes=0):
        self._pool = ThreadPoolExecutor(4)
        self._lock = threading.Lock()
        self._bytes = self._jobs = 0

    def submit_batch(self, requests):
        return [Ticket(self._pool.submit(self._read, *request)) for request in requests]

    def _read(self, source, region, out, dtype):
        array = source if isinstance(source, zarr.Array) else open_source(source)
        values = np.asarray(array[region])
        with self._lock:
            self._bytes += values.nbytes
            self._jobs += 1
        out[...] = values.astype(dtype)
        return out

    def stats(self):
        return SimpleNamespace(bytes_read=self._bytes, chunks_decoded=self._jobs)

    def close(self):
        self._pool.shutdown()


def make_array(path, values, chunks=None, **options):
    array = zarr.create_array(path, shape=values.shape, dtype=values.dtype, chunks=chunks or values.shape, **options)
    array[...] = values
    return str(path)
