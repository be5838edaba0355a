"""Engines that read slabs: batches of plain reads, and kvikio, by GPUDirect Storage or for long reads.

Without GPUDirect Storage kvikio reads with POSIX calls too. Each read passes through Python by itself, 15 to 30 µs, so
that short ones are faster in batches (:mod:`linumpy.io.reads.file_reads`); of long ones there are few, and kvikio's
threads go on from one slab to the next.

kvikio is needed for GPUDirect Storage alone: without it batches read everything. What it fails to read, although the
file is sound, is read once more by plain system calls, for device memory by way of pinned host memory.

In: :class:`~linumpy.io.reads.plain_reads.FileReads`. Out: the same
:class:`~linumpy.io.reads.plain_reads.ReadResults` as batches give.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from linumpy.device import install_line, kvikio_mode
from linumpy.errors import GpuUnavailableError
from linumpy.gpu.staging.kvikio_settings import transfer_settings
from linumpy.io.reads.file_reads import ReadEngine
from linumpy.io.reads.plain_reads import FileReads, ReadResults, read_files, version

_log = logging.getLogger(__name__)

#: One task of a read into host memory; into device memory tasks are of kvikio's own size.
_HOST_TASK = 2**20
#: Reads that are longer than this on average go through kvikio where it can be used.
LONG_READ_NBYTES = 2 * 2**20
#: An error of kvikio's own, which does not say what the system's was.
_UNNAMED = 2**16
#: Errors of opening a file that are not the file's: kvikio's own, and too many open files, which may pass.
_NOT_THE_FILES = [-_UNNAMED, -errno.EMFILE, -errno.ENFILE, -errno.EAGAIN, -errno.ENOMEM]


class Engines:
    """What reads slabs: batches of plain reads, and kvikio where it takes less time or reads into device memory.

    Parameters
    ----------
    staging : DeviceStaging or HostStaging
        The memory that is read into.
    """

    def __init__(self, staging: Any) -> None:
        self.batches: ReadEngine | None = None
        self._direct = self._long = None
        self._descriptors = 0
        self._counts_before = 0, 0
        self.name = "no file was read"
        self._staging = staging
        if staging.direct:
            self._direct = CuFileEngine(staging.read_view, self._by_way_of_host)
        elif staging.on_device and kvikio_mode()[0] != "none":
            self._long = CuFileEngine(staging.pinned_view)

    def use(self, descriptors: int, batches: int) -> None:
        """Have so many files open at most, in so many batches at a time and between them."""
        if self.batches is not None:
            if self._descriptors // 2 <= descriptors <= 2 * self._descriptors:
                return
            self._counts_before = self.open_file_counts
            self.batches.close()
            self.batches = None  # not to be used again where the next one cannot be made
        each = max(1, descriptors // (batches + 1))
        self.batches, self._descriptors = ReadEngine(descriptors=each, kept_descriptors=each), descriptors

    @property
    def open_file_counts(self) -> tuple[int, int]:
        """Shards that were open when they were read, and those that had to be opened."""
        hits, misses = (0, 0) if self.batches is None else self.batches.open_file_counts
        return self._counts_before[0] + hits, self._counts_before[1] + misses

    def start(self, reads: FileReads, *, direct: bool, raw: bool) -> Any:
        """Start to read a slab, of raw or of encoded chunks."""
        engine = self._choose(reads, direct=direct, raw=raw)
        self.name = engine.name
        return engine.start(reads)

    def _choose(self, reads: FileReads, *, direct: bool, raw: bool) -> Any:
        if direct:
            return self._direct
        # Of encoded chunks decoding takes longer than reading: what kvikio takes to set up counts for more.
        is_long = raw and int(reads.nbytes.sum()) > LONG_READ_NBYTES * len(reads.nbytes)
        return self._long if is_long and self._long is not None else self.batches

    def _by_way_of_host(self, reads: FileReads) -> ReadResults:
        """Carry out reads into device memory by way of pinned host memory."""
        assert self.batches is not None
        place = np.cumsum([0, *reads.nbytes.tolist()])
        pinned = self._staging.allocate_pinned(int(place[-1]))
        addresses = pinned.ctypes.data + place[:-1]
        results = self.batches.start(
            FileReads(reads.paths, reads.file, reads.offset, reads.nbytes, addresses, pinned)
        ).wait()
        self._staging.copy_up(reads.address.tolist(), addresses.tolist(), np.maximum(results.nbytes, 0).tolist())
        return results

    def rest(self) -> None:
        """Close files that are kept open, and put process-wide settings back that only reads need."""
        for engine in (self._direct, self._long, self.batches):
            if engine is not None:
                engine.rest()

    def close(self) -> None:
        """Give everything back."""
        self.rest()
        if self.batches is not None:
            self.batches.close()


class CuFileEngine:
    """Reads through kvikio's ``CuFile.pread``.

    Parameters
    ----------
    view : callable
        Makes the buffer of so many bytes at an address: a device array, or a view of host memory.
    by_way_of_host : callable, optional
        Carries out reads into device memory that kvikio has failed to do. Without it addresses lie in host memory.
    """

    def __init__(
        self, view: Callable[[int, int], Any], by_way_of_host: Callable[[FileReads], ReadResults] | None = None
    ) -> None:
        import kvikio

        direct = by_way_of_host is not None
        self._open, self._view, self._by_way_of_host = kvikio.CuFile, view, by_way_of_host
        self._is_told = False
        self.name = f"kvikio CuFile.pread into {'device' if direct else 'pinned host'} memory"
        self._task = None if direct or "KVIKIO_TASK_SIZE" in os.environ else _HOST_TASK
        self._scope = contextlib.ExitStack()
        self._is_set_up = False

    def rest(self) -> None:
        """Put kvikio's settings back, until the next read."""
        self._scope.close()
        self._is_set_up = False

    def start(self, reads: FileReads) -> PendingReads:
        """Open the files, and start a ``pread`` for each read."""
        if not self._is_set_up:  # to make its threads takes kvikio milliseconds
            self._scope.enter_context(transfer_settings())
            self._is_set_up = True
        pending = PendingReads(reads, self._by_way_of_host, self._tell)
        try:
            pending.start(self._open, self._view, self._task)
        except BaseException:
            pending.abandon()  # those that were started write into the buffers
            raise
        return pending

    def _tell(self, reads: int, why: str) -> None:
        """Log once that reads are repeated without kvikio."""
        if not self._is_told:
            self._is_told = True
            _log.warning("%s failed %d reads (%s), which go through host memory without it", self.name, reads, why)


def require_direct() -> None:
    """Raise :class:`~linumpy.errors.GpuUnavailableError` where nothing can read by GPUDirect Storage."""
    mode, reason = kvikio_mode()
    if mode == "none":
        raise GpuUnavailableError(f"direct=True reads through kvikio, but {reason}: {install_line()}")


class PendingReads:
    """Reads under way; those that fail by no fault of the file are repeated without kvikio.

    Attributes
    ----------
    repeated : int
        Reads that were repeated.
    failure : str
        Why the first of them had failed; empty where none had.
    """

    def __init__(
        self,
        reads: FileReads,
        by_way_of_host: Callable[[FileReads], ReadResults] | None,
        tell: Callable[[int, str], None],
    ) -> None:
        self._reads, self._by_way_of_host, self._tell = reads, by_way_of_host, tell
        self.repeated, self.failure = 0, ""
        self._files: list[Any] = []
        self._futures: list[Any] = []
        count = len(reads.paths)
        self._opened = np.zeros(count, np.int64)
        self._before, self._after = np.zeros((count, 4), np.int64), np.zeros((count, 4), np.int64)

    def start(self, open_file: Callable[[str], Any], view: Callable[[int, int], Any], task: int | None) -> None:
        """Open files and start reads."""
        for number, path in enumerate(self._reads.paths):
            self._files.append(self._open(open_file, path, number))
        reads = self._reads
        rows = zip(
            reads.file.tolist(), reads.offset.tolist(), reads.nbytes.tolist(), reads.address.tolist(), strict=True
        )
        for number, offset, nbytes, address in rows:
            file, future = self._files[number], None
            if file is not None:
                try:
                    future = file.pread(view(address, nbytes), nbytes, offset, task)
                except Exception as error:
                    future = _Refused(error)
            self._futures.append(future)

    def _open(self, open_file: Callable[[str], Any], path: str, number: int) -> Any:
        file = None
        try:
            if not os.path.isfile(path):  # kvikio would wait for a pipe
                os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
                self._before[number] = self._after[number] = version(os.stat(path))
                self._opened[number] = 0
                return None
            file = open_file(path)
            self._before[number] = version(os.fstat(file.fileno()))
            return file
        except Exception as error:
            self._opened[number] = self._note(error)
        if file is not None:
            file.close()
        return None

    def done(self) -> bool:
        """Say whether all reads have ended; kvikio tells only who waits."""
        return False

    def wait(self) -> ReadResults:
        """Wait for all reads, and close the files."""
        got = np.array([self._got(future) for future in self._futures], np.int64)
        lost = self._look_again()[self._reads.file]
        failed = self._opened[self._reads.file]
        refused = np.array([file is None for file in self._files], bool)[self._reads.file]
        self._close()
        # A read's own error may be the driver's, whatever its number is: the system says whether it is the file's.
        again = np.isin(failed, _NOT_THE_FILES) | ((failed == 0) & ~refused & (got < 0))
        got = np.where(failed < 0, failed, np.where(refused, -errno.EINVAL, np.where(lost < 0, lost, got)))
        self._repeat(np.flatnonzero(again), got)
        for codes in (got, self._opened):
            codes[codes == -_UNNAMED] = -errno.EIO
        return ReadResults(got, self._opened, self._before, self._after)

    def _look_again(self) -> np.ndarray:
        """Note the versions behind all reads; return 0, or minus the ``errno`` of a file that cannot be looked at."""
        lost = np.zeros(len(self._files), np.int64)
        for number, file in enumerate(self._files):
            if file is None:
                continue
            try:
                self._after[number] = version(os.fstat(file.fileno()))
            except OSError as error:
                lost[number], self._after[number] = -(error.errno or errno.EIO), self._before[number]
        return lost

    def _repeat(self, rows: np.ndarray, got: np.ndarray) -> None:
        """Repeat reads by plain system calls: they succeed, or the error is the system's own."""
        if not rows.size:
            return
        self.repeated = len(rows)
        self._tell(self.repeated, self.failure)
        reads = self._reads
        files, file = np.unique(reads.file[rows], return_inverse=True)
        paths = [reads.paths[number] for number in files.tolist()]
        again = (self._by_way_of_host or read_files)(
            FileReads(paths, file, reads.offset[rows], reads.nbytes[rows], reads.address[rows])
        )
        got[rows] = again.nbytes
        unopened = self._opened[files] < 0
        self._before[files[unopened]] = again.before[unopened]
        self._opened[files], self._after[files] = again.opened, again.after

    def _got(self, future: Any) -> int:
        if future is None:
            return 0
        try:
            return int(future.get())
        except Exception as error:
            return self._note(error)

    def _note(self, error: Exception) -> int:
        """Note what a call of kvikio's has failed with; return minus its ``errno``."""
        self.failure = self.failure or " ".join(f"{type(error).__name__}: {error}".split())
        return -(error.errno or errno.EIO) if isinstance(error, OSError) else -_UNNAMED

    def abandon(self) -> None:
        """Wait for every read, whatever became of it."""
        for future in self._futures:
            with contextlib.suppress(Exception):
                self._got(future)
        self._close()

    def _close(self) -> None:
        while self._files:
            file = self._files.pop()
            if file is not None:
                file.close()


class _Refused:
    """A read that could not be started."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def get(self) -> int:
        raise self._error
