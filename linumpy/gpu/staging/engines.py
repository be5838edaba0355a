"""Engines that read slabs: batches of plain reads, and kvikio, by GPUDirect Storage or for long reads.

Without GPUDirect Storage kvikio reads with POSIX calls too. Each read passes through Python by itself, 15 to 30 µs, so
that short ones are faster in batches (:mod:`linumpy.io.reads.file_reads`); of long ones there are few, and kvikio's
threads go on from one slab to the next.

In: :class:`~linumpy.io.reads.plain_reads.FileReads`. Out: the same
:class:`~linumpy.io.reads.plain_reads.ReadResults` as batches give.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from linumpy.device import kvikio_mode
from linumpy.gpu.staging.kvikio_settings import transfer_settings
from linumpy.io.reads.file_reads import ReadEngine
from linumpy.io.reads.plain_reads import INODE_BITS, FileReads, ReadResults, read_files

#: One task of a read into host memory; into device memory tasks are of kvikio's own size.
_HOST_TASK = 2**20
#: Reads that are longer than this on average go through kvikio where it can be used.
LONG_READ_NBYTES = 2 * 2**20
#: An error of kvikio's own, which does not say what the system's was.
_UNNAMED = 2**16
#: Errors that are not the file's: of kvikio's own, and too many open files, which may be over when others are closed.
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
        if staging.direct:
            self._direct = CuFileEngine(staging.read_view, direct=True)
        elif staging.on_device and kvikio_mode()[0] != "none":
            self._long = CuFileEngine(staging.pinned_view, direct=False)

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
    direct : bool
        Whether addresses lie on the device.
    """

    def __init__(self, view: Callable[[int, int], Any], *, direct: bool) -> None:
        import kvikio

        self._open, self._view, self._in_host = kvikio.CuFile, view, not direct
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
        pending = PendingReads(reads, in_host=self._in_host)
        try:
            pending.start(self._open, self._view, self._task)
        except BaseException:
            pending.abandon()  # those that were started write into the buffers
            raise
        return pending


class PendingReads:
    """Reads under way; those into host memory that fail by no fault of the file are repeated without kvikio."""

    def __init__(self, reads: FileReads, *, in_host: bool) -> None:
        self._reads, self._in_host = reads, in_host
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
            file = self._files[number]
            self._futures.append(None if file is None else file.pread(view(address, nbytes), nbytes, offset, task))

    def _open(self, open_file: Callable[[str], Any], path: str, number: int) -> Any:
        try:
            if not os.path.isfile(path):  # kvikio would wait for a pipe
                os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
                self._before[number] = self._after[number] = _version(os.stat(path))
                self._opened[number] = 0
                return None
            file = open_file(path)
        except OSError as error:
            self._opened[number] = -(error.errno or errno.EIO)
            return None
        except Exception:
            self._opened[number] = -_UNNAMED
            return None
        self._before[number] = _version(os.fstat(file.fileno()))
        return file

    def done(self) -> bool:
        """Say whether all reads have ended; kvikio tells only who waits."""
        return False

    def wait(self) -> ReadResults:
        """Wait for all reads, and close the files."""
        got = np.array([self._got(future) for future in self._futures], np.int64)
        for number, file in enumerate(self._files):
            if file is not None:
                self._after[number] = _version(os.fstat(file.fileno()))
        failed = self._opened[self._reads.file]
        refused = np.array([file is None for file in self._files], bool)[self._reads.file]
        self._close()
        got = np.where(failed < 0, failed, np.where(refused, -errno.EINVAL, got))
        if self._in_host:
            self._repeat(got)
        for codes in (got, self._opened):
            codes[codes == -_UNNAMED] = -errno.EIO
        return ReadResults(got, self._opened, self._before, self._after)

    def _repeat(self, got: np.ndarray) -> None:
        """Repeat reads by plain system calls: they succeed, or the error is the system's own."""
        rows = np.flatnonzero(np.isin(got, _NOT_THE_FILES))
        if not rows.size:
            return
        reads = self._reads
        files, file = np.unique(reads.file[rows], return_inverse=True)
        paths = [reads.paths[number] for number in files.tolist()]
        again = read_files(FileReads(paths, file, reads.offset[rows], reads.nbytes[rows], reads.address[rows]))
        got[rows] = again.nbytes
        unopened = self._opened[files] < 0
        self._before[files[unopened]] = again.before[unopened]
        self._opened[files], self._after[files] = again.opened, again.after

    @staticmethod
    def _got(future: Any) -> int:
        if future is None:
            return 0
        try:
            return int(future.get())
        except OSError as error:
            return -(error.errno or errno.EIO)
        except Exception:
            return -_UNNAMED

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


def _version(found: os.stat_result) -> tuple[int, int, int, int]:
    return found.st_ino & INODE_BITS, found.st_size, found.st_mtime_ns, found.st_mode
