"""zarr-python's process-wide configuration, host memory or device memory; and waiting for its event loop.

zarr has one configuration for the process, so ``zarr.config.enable_gpu()`` in one thread makes the reads of all others
return CuPy arrays. :func:`read_on_host` and :func:`write_from_host` are the only functions by which linumpy reads and
writes voxels with zarr-python in host memory. They pass the kind of buffer in each call, which zarr uses for arrays of
format 3 without shards. Codecs that use the configuration instead (shards, and all of format 2) run in *host mode*. Any
number of threads hold host mode at the same time; one thread holds GPU mode, which starts when no thread is in host
mode.

Metadata is read without a guard: it is the same in both modes.
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

from linumpy.errors import ChunkError, LinumpyError
from linumpy.io.stores.remote import explained, without_credentials
from linumpy.plan.region import normalize_region

log = logging.getLogger(__name__)

_HOST_BUFFERS = {"buffer": "zarr.buffer.cpu.Buffer", "ndbuffer": "zarr.buffer.cpu.NDBuffer"}
#: Seconds of waiting for the other mode before a warning.
_WARN_SECONDS = 10.0


def read_on_host(array: zarr.Array, selection: Any = ...) -> np.ndarray:
    """Read into host memory by zarr-python, in any process-wide mode of zarr.

    Parameters
    ----------
    array : zarr.Array
        Of zarr format 2 or 3.
    selection : slice, int, Ellipsis, or a tuple of these
        As for zarr's basic indexing; by default all of the array.

    Returns
    -------
    numpy.ndarray
        In the stored byte order and, with format 2, the stored order of axes; of shape ``()`` if each axis has an int.

    Raises
    ------
    Exception
        The error of the store or of a codec.
    """
    with host_codecs(array):
        return np.asarray(array.get_basic_selection(selection, prototype=cpu.buffer_prototype))


def read_chunks_on_host(array: zarr.Array, region: tuple[int | slice, ...]) -> np.ndarray:
    """Read a region as :func:`read_on_host` does, with the name of a broken chunk in the error.

    Parameters
    ----------
    array : zarr.Array
        Of zarr format 2 or 3.
    region : tuple of int and slice
        Within the array; slices of step 1. Omitted axes and bounds cover the whole axis.

    Raises
    ------
    ChunkError
        The store or a codec cannot return a chunk (or shard), which the error names; or the file of a shard is empty,
        which zarr would read as a shard that was never written; or a Blosc chunk is cut off, and numcodecs would read
        memory beyond its end.
    """
    _refuse_empty_shards(array, region)
    _refuse_cut_blosc(array, region)
    try:
        return read_on_host(array, region)
    except (MemoryError, LinumpyError):
        raise
    except Exception as error:  # codecs raise errors of many types, without the name of the chunk
        reason = explained(error) or type(error).__name__
        raise ChunkError(f"{_broken_chunk(array, region)} cannot be read: {reason}") from error


def _broken_chunk(array: zarr.Array, region: tuple[int | slice, ...]) -> str:
    """Name the first chunk (or shard) of a region that zarr cannot read."""
    size = array.shards or array.chunks
    for index in _stored_objects(array, region):
        try:
            read_on_host(array, tuple(slice(i * s, (i + 1) * s) for i, s in zip(index, size, strict=True)))
        except Exception:  # the same error as in the caller
            return without_credentials(f"{array.store_path}/{array.metadata.encode_chunk_key(index)}")
    return without_credentials(str(array.store_path))


def _refuse_empty_shards(array: zarr.Array, region: tuple[int | slice, ...]) -> None:
    """Raise :class:`ChunkError` for a shard of a local array that is an empty file, as a full disk leaves it."""
    if array.shards is None or not isinstance(array.store, LocalStore):
        return
    for index in _stored_objects(array, region):
        key = array.metadata.encode_chunk_key(index)
        try:
            nbytes = os.stat(array.store.root / array.path / key).st_size
        except OSError:  # usually it was never written; zarr reports any other error
            continue
        if nbytes == 0:
            raise ChunkError(f"{array.store_path}/{key} is an empty file, without the index of a shard")


def _refuse_cut_blosc(array: zarr.Array, region: tuple[int | slice, ...]) -> None:
    """Raise :class:`ChunkError` for a Blosc chunk of a local array whose file is shorter than its header says."""
    if array.shards is not None or not isinstance(array.store, LocalStore):
        return
    if not any("Blosc" in type(codec).__name__ for codec in array.compressors[-1:]):
        return
    for index in _stored_objects(array, region):
        key = array.metadata.encode_chunk_key(index)
        try:
            with open(array.store.root / array.path / key, "rb", buffering=0) as file:
                header, nbytes = file.read(16), os.fstat(file.fileno()).st_size
        except OSError:  # usually it was never written; zarr reports any other error
            continue
        wanted = int.from_bytes(header[12:], "little")
        if len(header) < 16 or nbytes < wanted:
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
    """Hold host mode if a codec of the array uses zarr's configuration; others get the kind of buffer in each call."""
    document = array.metadata
    uses_configuration = document.zarr_format == 2 or any(isinstance(codec, ShardingCodec) for codec in document.codecs)
    return host_zarr_context() if uses_configuration else nullcontext()


class _OfThread(threading.local):
    """The modes that a thread holds."""

    host = 0  # nested entries into host mode
    owner: object | None = None  # the entry into GPU mode that it made, or that it works for


class _Mode:
    """A lock that many threads share in host mode, and that one thread holds in GPU mode.

    Both may be nested in one thread, and host mode within GPU mode. A thread that waits for GPU mode gets it before
    threads that ask for host mode later.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._mine = _OfThread()
        self._hosts = 0
        self._owner: object | None = None
        self._owner_name = ""
        self._entries = 0
        self._waiting = 0
        self._settings = ExitStack()  # restores the configuration from before host mode

    @contextmanager
    def host(self) -> Iterator[None]:
        """Set zarr's configuration to host memory."""
        with self._changed:
            if not self._mine.host and not self._is_owner():
                self._wait(lambda: self._owner is None and not self._waiting, "host memory")
            # Set only where it differs, so that settings of other code are not overwritten.
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
        """Keep other threads out of host mode."""
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
        """Return a function by which another thread, working for this one, shares its GPU mode."""
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
    """Make zarr work in host memory, and keep other threads from switching on its GPU mode.

    For one call of zarr at a time: the code inside must not wait for another thread that also needs host mode.
    """
    return _mode.host()


@contextmanager
def gpu_mode() -> Iterator[None]:
    """Switch on zarr's GPU mode, once no other thread of linumpy is in host mode.

    Raises
    ------
    RuntimeError
        Within :func:`host_zarr_context` in the same thread.
    """
    with _mode.gpu(), zarr.config.enable_gpu():
        yield


def in_mode_of_caller() -> Callable[[], None]:
    """Return the initializer of a pool of threads for which the caller waits.

    With it, threads of a caller in GPU mode may read on the host; they would deadlock otherwise.
    """
    return _mode.for_thread()


def wait_for_zarr(seconds: float = 30.0) -> None:
    """Wait until zarr's event loop is idle: after an error in one chunk, zarr still processes the others."""

    async def others() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)

    sync(others())
