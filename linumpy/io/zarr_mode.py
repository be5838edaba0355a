"""Read and write by zarr-python in host memory, whatever its process-wide mode; and wait for its event loop.

zarr-python has one configuration for the process: after ``zarr.config.enable_gpu()`` in one thread, the reads of all
threads return CuPy arrays. linumpy reads and writes voxels in host memory by zarr-python only with :func:`read_on_host`
and :func:`write_from_host`. They pass the kind of buffer in each call, which suffices for arrays of format 3 without
shards. Codecs of shards and of format 2 use the configuration instead, and so run in *host mode*, in which the
configuration is set to host memory. Any number of threads hold host mode at the same time. One thread holds *GPU mode*,
which starts when no thread is in host mode. Metadata are the same in both modes and are read in either.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import zarr
from zarr.buffer import cpu
from zarr.codecs import ShardingCodec
from zarr.core.sync import sync
from zarr.storage import LocalStore

from linumpy.errors import ChunkError, LinumpyError, StorageRefusedError
from linumpy.io.stores.remote import explained, without_credentials
from linumpy.plan.region import normalize_region

log = logging.getLogger(__name__)

_HOST_BUFFERS = {"buffer": "zarr.buffer.cpu.Buffer", "ndbuffer": "zarr.buffer.cpu.NDBuffer"}
#: Seconds that a thread waits for the other mode to end before it logs a warning.
_WARN_SECONDS = 10.0


def read_on_host(array: zarr.Array, selection: Any = ...) -> np.ndarray:
    """Read into host memory by zarr-python, in any process-wide mode of zarr; `selection` is as for basic indexing.

    Voxels have the stored byte order and, with format 2, the stored memory order (C or F).
    """
    with host_codecs(array):
        return np.asarray(array.get_basic_selection(selection, prototype=cpu.buffer_prototype))


def read_chunks_on_host(array: zarr.Array, region: tuple[int | slice, ...]) -> np.ndarray:
    """Read a region of slices of step 1 as :func:`read_on_host` does, but raise `ChunkError` for a broken chunk."""
    _refuse_broken_files(array, region)
    try:
        return read_on_host(array, region)
    except (MemoryError, LinumpyError):
        raise
    except Exception as error:  # codecs raise errors of many types, without the name of the chunk
        reason = explained(error) or type(error).__name__
        kind = StorageRefusedError if isinstance(error, OSError) and error.errno else ChunkError
        raise kind(f"{_broken_chunk(array, region)} cannot be read: {reason}") from error


def _broken_chunk(array: zarr.Array, region: tuple[int | slice, ...]) -> str:
    """Return the name of the first chunk (or shard) of a region that zarr-python cannot read; else of the array."""
    size = array.shards or array.chunks
    for index in _stored_objects(array, region):
        try:
            read_on_host(array, tuple(slice(i * s, (i + 1) * s) for i, s in zip(index, size, strict=True)))
        except Exception:  # most likely the error that the caller reports
            return without_credentials(f"{array.store_path}/{array.metadata.encode_chunk_key(index)}")
    return without_credentials(str(array.store_path))


def _refuse_broken_files(array: zarr.Array, region: tuple[int | slice, ...]) -> None:
    """Raise :class:`ChunkError` for files of a local array that zarr-python reads as if they were whole.

    They are a shard that is an empty file, as a full disk leaves it, and a Blosc chunk whose file is shorter than its
    header says.
    """
    is_sharded = array.shards is not None
    is_blosc = not is_sharded and any("Blosc" in type(codec).__name__ for codec in array.compressors[-1:])
    if not (is_sharded or is_blosc) or not isinstance(array.store, LocalStore):
        return
    for index in _stored_objects(array, region):
        key = array.metadata.encode_chunk_key(index)
        try:
            with open(array.store.root / array.path / key, "rb", buffering=0) as file:
                header, nbytes = file.read(16), os.fstat(file.fileno()).st_size
        except OSError:  # usually it was never written; zarr reports any other error
            continue
        if is_sharded and not nbytes:
            raise ChunkError(f"{array.store_path}/{key} is an empty file, without the index of a shard")
        wanted = int.from_bytes(header[12:], "little")
        if is_blosc and (len(header) < 16 or nbytes < wanted):
            says = f", and its Blosc header says {wanted}" if len(header) == 16 else ", fewer than a Blosc header"
            raise ChunkError(f"{array.store_path}/{key} cannot be read: it has {nbytes} bytes{says}")


def _stored_objects(array: zarr.Array, region: tuple[int | slice, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the indexes of the chunks (or shards) that a region touches."""
    size, box = array.shards or array.chunks, normalize_region(region, array.shape)
    if not box.size:
        return iter(())
    bounds = zip(box.start, box.stop, size, strict=True)
    return itertools.product(*(range(start // step, -(-stop // step)) for start, stop, step in bounds))


def write_from_host(array: zarr.Array, selection: Any, values: Any) -> None:
    """Write from host memory by zarr-python as ``array[selection] =`` does, in any process-wide mode of zarr."""
    with host_codecs(array):
        array.set_basic_selection(selection, values, prototype=cpu.buffer_prototype)


def host_codecs(array: zarr.Array) -> AbstractContextManager[None]:
    """Hold host mode if a codec of the array uses zarr's configuration; for other arrays do nothing."""
    document = array.metadata
    uses_configuration = document.zarr_format == 2 or any(isinstance(codec, ShardingCodec) for codec in document.codecs)
    return host_zarr_context() if uses_configuration else nullcontext()


class _ThreadModes(threading.local):
    """The modes that a thread holds."""

    host = 0  # number of nested entries into host mode
    owner: object | None = None  # identifies the GPU mode that the thread has begun, or that the thread works for


class _Mode:
    """A lock that many threads share in host mode, and that one thread holds in GPU mode.

    A thread may nest host mode in host mode, GPU mode in GPU mode, and host mode in GPU mode. A thread that waits for
    GPU mode gets it before threads that ask for host mode later.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._mine = _ThreadModes()
        self._hosts = 0  # entries of all threads into host mode
        self._owner: object | None = None  # identifies the present GPU mode
        self._owner_name = ""  # name of the thread that began it
        self._entries = 0  # entries into it
        self._waiting = 0  # threads that wait for GPU mode
        self._settings = ExitStack()  # restores the configuration from before host mode

    @contextmanager
    def host(self) -> Iterator[None]:
        """Hold host mode, with zarr's configuration set to host memory."""
        with self._changed:
            if not self._mine.host and not self._is_owner():
                self._wait(lambda: self._owner is None and not self._waiting, "host memory")
            # Only a configuration that differs is set and later restored, so that settings of other code stay.
            if any(zarr.config.get(key) != value for key, value in _HOST_BUFFERS.items()):
                self._settings.enter_context(zarr.config.set(_HOST_BUFFERS))
            self._hosts += 1
            self._mine.host += 1
        try:
            yield
        finally:
            with self._changed:
                self._hosts -= 1
                self._mine.host -= 1
                if not self._hosts:
                    self._settings.close()
                    self._changed.notify_all()

    @contextmanager
    def gpu(self) -> Iterator[None]:
        """Hold GPU mode, which keeps other threads out of host mode."""
        if self._mine.host:
            raise RuntimeError("zarr's GPU mode cannot begin within a read or write of host memory in the same thread")
        with self._changed:
            self._waiting += 1
            try:
                self._wait(lambda: (self._owner is None or self._is_owner()) and not self._hosts, "GPU memory")
            finally:
                self._waiting -= 1
                self._changed.notify_all()
            if self._owner is None:
                self._owner = self._mine.owner = object()
                self._owner_name = threading.current_thread().name
            self._entries += 1
        try:
            yield
        finally:
            with self._changed:
                self._entries -= 1
                if not self._entries:
                    self._owner = None
                    self._changed.notify_all()

    def for_thread(self) -> Callable[[], None]:
        """Return a function that another thread calls to share the GPU mode of this thread, for which it works."""
        owner = self._mine.owner

        def adopt() -> None:
            self._mine.owner = owner

        return adopt

    def _is_owner(self) -> bool:
        return self._owner is not None and self._mine.owner is self._owner

    def _wait(self, ready: Callable[[], bool], kind: str) -> None:
        if self._changed.wait_for(ready, _WARN_SECONDS):
            return
        who = f"thread {self._owner_name!r} in gpu_zarr_context()" if self._owner is not None else "other threads"
        log.warning("a call of zarr in %s waits for %s. If they wait for this thread, it is a deadlock", kind, who)
        self._changed.wait_for(ready)


_mode = _Mode()


def host_zarr_context() -> AbstractContextManager[None]:
    """Hold host mode: zarr works in host memory, and no other thread can switch on its GPU mode.

    Use it for one call of zarr at a time. The block must not wait for another thread that also needs host mode: that
    thread could be waiting behind a third thread that waits for GPU mode.
    """
    return _mode.host()


@contextmanager
def gpu_mode() -> Iterator[None]:
    """Hold GPU mode: wait until no thread is in host mode, then switch on zarr's GPU mode."""
    with _mode.gpu(), zarr.config.enable_gpu():
        yield


def in_mode_of_caller() -> Callable[[], None]:
    """Return the initializer for a pool of threads for which the caller waits, so that they share its GPU mode.

    Without it they would wait for the end of GPU mode to read on the host, and the caller for them.
    """
    return _mode.for_thread()


def wait_for_zarr(seconds: float = 30.0) -> None:
    """Wait up to `seconds` until zarr's event loop is idle.

    After an error in one chunk, zarr-python raises while its event loop still processes the other chunks.
    """

    async def wait_for_other_tasks() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)

    sync(wait_for_other_tasks())
