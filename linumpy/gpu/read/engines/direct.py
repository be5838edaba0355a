"""Reads by GPUDirect Storage: a callback of the native core that reads the stored bytes of a slab into device memory.

In: records of :class:`~linumpy.core.native.DirectRead`. Out: the number of bytes read, in each record; after a failed
read it stays negative. The core repeats failed reads by system calls, which report errors of the file.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import numpy as np

from linumpy.arrays import Array
from linumpy.core import native
from linumpy.device import kvikio_mode
from linumpy.errors import GpuUnavailableError
from linumpy.gpu.kvikio_settings import transfer_settings
from linumpy.packages import install_line

_log = logging.getLogger(__name__)

#: `ReadReport.engine` of such reads.
ENGINE = "kvikio CuFile.pread into device memory"
#: Maximum open files of a slab. kvikio opens each file twice, and several slabs may be read at a time.
_OPEN_FILES = 32
#: Errors of opening that the file did not cause: too many open files, or no memory.
_NOT_OF_FILE = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM)


def require_direct() -> None:
    """Raise :class:`~linumpy.errors.GpuUnavailableError` if kvikio, which such reads need, is missing."""
    mode, reason = kvikio_mode()
    if mode == "none":
        raise GpuUnavailableError(f"direct=True reads through kvikio, but {reason}: {install_line()}")


class DirectReads:
    """Reads into the memory of one device, for one reader.

    `callback`: the function that the core calls, in its own threads. It must live until the core's reader is closed.
    """

    def __init__(self, cupy: ModuleType, device: int) -> None:
        import kvikio

        self._reads = reads = _Reads(kvikio.CuFile, cupy, device)
        # The function does not refer to this object: a reference cycle would need the garbage collector.
        self.callback = native.ReadDirect(lambda records, count: reads.carry_out(records, count))
        weakref.finalize(self, reads.restore_settings)

    def engine(self, repeated: int) -> str:
        """Return `ReadReport.engine` of a job; the core repeated `repeated` of its reads."""
        failure = self._reads.failure
        return f"{ENGINE}, failed reads through host memory: {failure}" if repeated and failure else ENGINE

    def close(self) -> None:
        """Restore kvikio's settings."""
        self._reads.restore_settings()


class _Reads:
    """State of the callback.

    `failure`: why the first failed read failed; empty if none has failed.
    """

    def __init__(self, open_file: Callable[[str], Any], cupy: ModuleType, device: int) -> None:
        self._open_file, self._cupy, self._device = open_file, cupy, device
        self._scope = contextlib.ExitStack()
        self._lock = threading.Lock()
        self._is_set_up = False
        self.failure = ""

    def carry_out(self, records: Any, count: int) -> None:
        """Read a slab, and wait for it. Raises nothing: the core cannot handle Python's exceptions."""
        try:
            self._set_up()
            with self._cupy.cuda.Device(self._device):
                slab = _SlabReads(self._open_file, self._view)
                slab.carry_out(records[n] for n in range(count))
            if slab.failures:
                self._log_failure(len(slab.failures), slab.failures[0])
        except BaseException as error:
            self._log_failure(count, _message_of(error))

    def _set_up(self) -> None:
        """Change kvikio's settings before the first read; not sooner, since making its threads takes milliseconds."""
        with self._lock:
            if not self._is_set_up:
                self._scope.enter_context(transfer_settings())
                self._is_set_up = True

    def restore_settings(self) -> None:
        """Restore kvikio's settings; the next read changes them again."""
        with self._lock:
            self._scope.close()
            self._is_set_up = False

    def _view(self, address: int, nbytes: int) -> Array:
        memory = self._cupy.cuda.UnownedMemory(address, nbytes, None, self._device)
        return self._cupy.ndarray((nbytes,), np.uint8, self._cupy.cuda.MemoryPointer(memory, 0))

    def _log_failure(self, reads: int, why: str) -> None:
        """Keep the message of the first failure, and log it once."""
        with self._lock:
            is_logged, self.failure = bool(self.failure), self.failure or why
        if not is_logged:
            _log.warning("%s failed %d reads (%s), which go through host memory without it", ENGINE, reads, why)


class _SlabReads:
    """Reads of one slab.

    `failures`: messages of failed reads, without those whose file has an error: the core reports these.
    """

    def __init__(self, open_file: Callable[[str], Any], view: Callable[[int, int], Array]) -> None:
        self._open_file, self._view = open_file, view
        self._files: OrderedDict[bytes, tuple[Any, list[Any]]] = OrderedDict()  # files, and the pending reads of each
        self.failures: list[str] = []

    def carry_out(self, records: Iterable[native.DirectRead]) -> None:
        """Start all reads, and wait for them."""
        try:
            for record in records:
                file, pending = self._file(record.path)
                if file is not None:
                    self._start(record, file, pending)
        finally:
            while self._files:
                self._finish()

    def _file(self, path: bytes) -> tuple[Any, list[Any]]:
        """Return an open file and its pending reads; the file is None if it cannot be opened."""
        if path in self._files:
            self._files.move_to_end(path)
            return self._files[path]
        if len(self._files) == _OPEN_FILES:
            self._finish()
        file = None
        try:
            file = self._open_file(os.fsdecode(path))
        except Exception as error:
            # The core gets an error of the file again when it repeats the read, and reports it.
            if not isinstance(error, OSError) or error.errno in _NOT_OF_FILE:
                self.failures.append(_message_of(error))
        self._files[path] = file, []
        return self._files[path]

    def _start(self, record: native.DirectRead, file: Any, pending: list[Any]) -> None:
        try:
            view = self._view(record.address, record.nbytes)
            pending.append((record, file.pread(view, record.nbytes, record.offset, None), view))
        except Exception as error:
            self.failures.append(_message_of(error))

    def _finish(self) -> None:
        """Wait for the reads of the least recently used file, and close it."""
        _, (file, pending) = self._files.popitem(last=False)
        for record, future, _ in pending:
            try:
                record.result = int(future.get())
            except Exception as error:
                self.failures.append(_message_of(error))
        if file is not None:
            with contextlib.suppress(Exception):
                file.close()


def _message_of(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
