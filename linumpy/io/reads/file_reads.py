"""Read parts of many files into host memory: open, look, read in parallel, look again, close.

In: :class:`FileReads`, a batch of reads with the addresses that they fill. Out: :class:`ReadResults`, with the version
of each file before and after its reads. Errors: none are raised for a file or a read that fails; its count is minus an
``errno``.

Threads of the C library carry out a batch (:mod:`linumpy.io.reads.posix_aio`), without Python's lock. The caller
carries out small ones at once where their bytes are in the page cache: another thread would need longer to wake up.
io_uring was measured beside it, by one submission for all that is done to a file and by submission threads of the
kernel; on a virtual machine of 16 cores it was slower in every case but one, which kept 12 cores busy.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import os
import threading
import time
from collections.abc import Callable

import numpy as np

from linumpy.io.reads import posix_aio
from linumpy.io.reads.call_thread import Call, CallThread
from linumpy.io.reads.open_files import FilesOnce, KeptFiles, OpenFiles
from linumpy.io.reads.plain_reads import FileReads, ReadOne, ReadResults, read_file, read_files, stat_file

__all__ = ["FileReads", "Pending", "ReadEngine", "ReadResults"]

#: Batches up to this are read by the caller, if they are in the page cache.
SMALL_FILES, SMALL_READS, SMALL_NBYTES = 8, 32, 2**20
#: Batches that go to other threads after one that was not in the page cache, or took that many seconds.
COLD_BATCHES, SLOW = 8, 0.002
#: One task of a read. Smaller ones spread a read over more threads.
TASK_NBYTES = 2**20
#: Where nobody says how many files may be open.
_DESCRIPTORS = 1024
#: Of the C library, at most and at least; else two fewer than cores, which the reader's thread and its caller need:
#: with 20 on 16 cores raw arrays were read a third slower than with 14.
_MOST_THREADS, _LEAST_THREADS = 20, 8
#: Why a file could not be opened, without it being the file's fault.
_PASSING = [errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM]
_CAN_TELL_CACHED = hasattr(os, "RWF_NOWAIT") and hasattr(ctypes.CDLL(None), "preadv2")

_libc = ctypes.CDLL(None, use_errno=True)
if _CAN_TELL_CACHED:
    _libc.preadv2.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_long, ctypes.c_int]
    _libc.preadv2.restype = ctypes.c_ssize_t


class _Vector(ctypes.Structure):
    """Struct iovec of ``preadv2(2)``."""

    _fields_ = [("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t)]


class NotCachedError(Exception):
    """A read would have to wait for a disk."""


def read_cached(descriptor: int, address: int, nbytes: int, offset: int) -> int:
    """Do what :func:`linumpy.io.reads.posix_aio.read_now` does, unless it would have to wait for a disk."""
    done, flags = 0, os.RWF_NOWAIT
    while done < nbytes:
        vector = _Vector(address + done, nbytes - done)
        got = _libc.preadv2(descriptor, ctypes.byref(vector), 1, offset + done, flags)
        if got == 0:
            break
        if got > 0:
            done += got
            continue
        code = ctypes.get_errno()
        if code == errno.EAGAIN:
            raise NotCachedError
        if code == errno.EOPNOTSUPP and flags:  # the file system cannot tell: overlay, tmpfs, some networks
            flags = 0
        elif code != errno.EINTR:
            return -code
    return done


class Pending:
    """A batch under way.

    Parameters
    ----------
    reads : FileReads
        What is read; their memory is kept until the end.
    kept : KeptFiles
        Files that are open already, and take over those of this batch.
    """

    repeated, failure = 0, ""  # those of an engine that another one repeats

    def __init__(self, reads: FileReads, kept: KeptFiles) -> None:
        self._reads, self._kept = reads, kept
        self._files: OpenFiles | FilesOnce = FilesOnce() if reads.versions is None else OpenFiles()
        self._call: Call | None = None
        self._rows = np.empty(0, np.int64)
        self._nbytes: np.ndarray | None = None
        self._results: ReadResults | None = None
        self._process = os.getpid()
        self._lock = threading.Lock()

    def open(self) -> None:
        """Open the files; for the engine."""
        if isinstance(self._files, FilesOnce):
            self._files.open(self._reads.paths)
            return
        for path, expected in zip(self._reads.paths, self._reads.expected, strict=True):
            self._kept.open_into(self._files, path, expected)

    def read_now(self, read: ReadOne) -> None:
        """Read in this thread; for the engine. Where that raises, :meth:`begin` still may."""
        reads = self._reads
        rows = zip(
            reads.file.tolist(), reads.address.tolist(), reads.nbytes.tolist(), reads.offset.tolist(), strict=True
        )
        refusals, descriptors = self._files.refusals.tolist(), self._files.descriptors.tolist()
        nbytes = [refusals[file] or read(descriptors[file], *row) for file, *row in rows]
        self._nbytes = np.array(nbytes, np.int64)

    def begin(self, read: Callable[..., np.ndarray], thread: CallThread, descriptors: int, most: int) -> None:
        """Start to read the files, each from `most` descriptors at most; for the engine."""
        reads = self._reads
        refused = self._files.refusals[reads.file]
        count = np.where(refused < 0, 0, -(-reads.nbytes // TASK_NBYTES))
        self._rows = rows = np.repeat(np.arange(len(count)), count)
        within = (np.arange(len(rows)) - np.repeat(np.cumsum(count) - count, count)) * TASK_NBYTES
        if len(rows):
            numbers = self._spread(reads.file[rows], max(1, min(most, descriptors // len(self._files))))
            nbytes = np.minimum(reads.nbytes[rows] - within, TASK_NBYTES)
            address = reads.address[rows].astype(np.int64) + within
            columns = (numbers, address, nbytes, reads.offset[rows] + within)
            # The call keeps the memory, and the files open, also where nobody keeps this object.
            self._call = Call(_read_and_keep, read, columns, (reads, self._files))
            thread.start(self._call)

    def _spread(self, file: np.ndarray, most: int) -> np.ndarray:
        """Give each task a descriptor: reads from one descriptor wait for each other."""
        numbers = self._files.descriptors[file]
        tasks = np.bincount(file, minlength=len(self._files))
        end = np.cumsum(tasks)
        for number in np.flatnonzero(tasks > 1).tolist() if most > 1 else []:
            count, stop = int(tasks[number]), int(end[number])
            numbers[stop - count : stop] = np.resize(self._files.duplicates(number, min(count, most)), count)
        return numbers

    def done(self) -> bool:
        """Say whether all reads have ended, so that :meth:`wait` waits for no other thread."""
        return self._results is not None or self._call is None or self._call.ended() or self._is_copy()

    def wait(self) -> ReadResults:
        """Wait for all reads, and close the files.

        An interrupt does not end the waiting, since the batch writes into memory until then; it is raised at the end.
        """
        interrupt = self._wait_through()
        with self._lock:
            if self._results is None:
                self._results = self._finish()
        if interrupt is not None:
            raise interrupt
        return self._results

    def abandon(self) -> None:
        """Wait until nothing is read any more, whatever became of it, and close the files; no interrupt ends it."""
        self._wait_through()
        while True:
            with contextlib.suppress(BaseException), self._lock:
                self._files.close()
                return

    def settle(self, results: ReadResults) -> None:
        """Note results that are there already; for the engine."""
        self._results = results

    def _is_copy(self) -> bool:
        """Say whether this is a forked child's, which has none of the threads that read."""
        return os.getpid() != self._process

    def _wait_through(self) -> BaseException | None:
        return None if self._call is None or self._is_copy() else self._call.wait()

    def _finish(self) -> ReadResults:
        try:
            if self._is_copy():
                return read_files(self._reads)
            nbytes = self._counts()
            lost = self._files.look_again()[self._reads.file]
            nbytes = np.where(lost < 0, lost, nbytes)
            opened, before, after = self._files.versions()
            if isinstance(self._files, OpenFiles):
                self._kept.keep_from(self._files, self._reads.paths, self._reads.expected)
        finally:
            self._files.close()
        results = ReadResults(nbytes, opened, before, after)
        self._try_again(results)
        return results

    def _counts(self) -> np.ndarray:
        """Bytes of each read, or why it failed."""
        if self._nbytes is not None:
            return self._nbytes
        reads = self._reads
        nbytes = self._files.refusals[reads.file]
        if self._call is None:
            return nbytes
        tasks = self._call.result()
        if len(self._rows) == len(nbytes) and (self._rows == np.arange(len(nbytes))).all():
            return np.asarray(tasks, np.int64)
        nbytes = nbytes + np.bincount(self._rows, np.maximum(tasks, 0), len(nbytes)).astype(np.int64)
        for task in np.flatnonzero(tasks < 0).tolist():
            nbytes[self._rows[task]] = tasks[task]
        return nbytes

    def _try_again(self, results: ReadResults) -> None:
        """Read what could not be opened for a passing reason, one by one, now that the other files are closed."""
        if results.opened.min(initial=0) == 0:
            return
        reads, files = self._reads, np.flatnonzero(np.isin(-results.opened, _PASSING))
        if len(files):
            self._kept.close()
        for file in files.tolist():
            begin, end = np.searchsorted(reads.file, (file, file + 1)).tolist()
            columns = (column[begin:end].tolist() for column in (reads.offset, reads.nbytes, reads.address))
            found = read_file(reads.paths[file], list(zip(*columns, strict=True)))
            results.opened[file], results.before[file], results.after[file], results.nbytes[begin:end] = found


def _threads(cores: int) -> int:
    return min(_MOST_THREADS, max(_LEAST_THREADS, cores - 2))


def _read_and_keep(read: Callable[..., np.ndarray], columns: tuple[np.ndarray, ...], _: object) -> np.ndarray:
    """Read, and keep the last argument alive until then."""
    return read(*columns)


class ReadEngine:
    """Reads batches, for as long as it lives; any thread may start them.

    Parameters
    ----------
    threads : int
        Threads that read; 0 for a number that was measured. The C library takes it before the first batch of the
        process alone.
    descriptors : int
        Of files that one batch has open at the same time, at most. Each batch that was started and not yet waited for
        has as many.
    kept_descriptors : int
        Of files that stay open for later batches, at most; of those alone whose versions batches expect.

    Attributes
    ----------
    name : str
        What reads, for reports.
    """

    def __init__(self, threads: int = 0, *, descriptors: int = _DESCRIPTORS, kept_descriptors: int = 0) -> None:
        if threads < 0 or descriptors < 1:
            raise ValueError(f"threads={threads} and descriptors={descriptors} must be positive")
        self._threads, self._descriptors = threads or _threads(len(os.sched_getaffinity(0))), descriptors
        posix_aio.set_threads(self._threads)  # before why_unavailable(), whose trial is the batch that settles it
        plain = posix_aio.why_unavailable()
        self.name = "threads that pread" if plain else "POSIX lio_listio into host memory"
        self._read: Callable[..., np.ndarray] = posix_aio.read_by_threads if plain else posix_aio.read_batch
        # The call that queues a batch also waits for it, so it needs a thread of its own. One: two batches at a time
        # measured slower, since all reads queue at one lock of the C library.
        self._thread = CallThread("linumpy-read")
        self._process, self._cold, self._closed = os.getpid(), 0, False
        self._kept = KeptFiles(kept_descriptors)

    def start(self, reads: FileReads) -> Pending:
        """Start the reads of a batch; small batches in the page cache are read when this returns.

        Parameters
        ----------
        reads : FileReads
            What to read and where to. That memory must stay as it is until the batch has ended.

        Returns
        -------
        Pending
            To wait for the batch. If this raises instead, nothing is read any more.
        """
        reads.check()
        self._check_open()
        pending = Pending(reads, self._kept)
        if os.getpid() != self._process or not reads.paths:
            pending.settle(read_files(reads))
        elif len(reads.paths) > self._descriptors:
            pending.settle(self._by_parts(reads))
        else:
            self._open_and_read(reads, pending)
        return pending

    def _open_and_read(self, reads: FileReads, pending: Pending) -> None:
        try:
            pending.open()
            if not self._read_at_once(reads, pending):
                self._begin(pending)
        except BaseException:
            pending.abandon()
            raise

    def _begin(self, pending: Pending) -> None:
        pending.begin(self._read, self._thread, self._descriptors, self._threads)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the engine is closed")

    def _by_parts(self, reads: FileReads) -> ReadResults:
        """Carry out a batch of more files than may be open, one part after another."""
        parts = []
        for first in range(0, len(reads.paths), self._descriptors):
            begin, end = np.searchsorted(reads.file, (first, first + self._descriptors))
            rows = slice(int(begin), int(end))
            part = FileReads(
                reads.paths[first : first + self._descriptors],
                reads.file[rows] - first,
                reads.offset[rows],
                reads.nbytes[rows],
                reads.address[rows],
                reads.memory,
                None if reads.versions is None else reads.versions[first : first + self._descriptors],
            )
            pending = Pending(part, self._kept)
            self._open_and_read(part, pending)
            try:
                parts.append(pending.wait())
            except BaseException:
                pending.abandon()
                raise
        names = (field.name for field in dataclasses.fields(ReadResults))
        return ReadResults(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    def stat(self, paths: list[str]) -> np.ndarray:
        """Look at files.

        Returns
        -------
        numpy.ndarray of int64, (files, 4)
            Rows as :attr:`ReadResults.before`; minus the ``errno`` and zeros where a file cannot be looked at.
        """
        self._check_open()
        return np.array([stat_file(path) for path in paths], np.int64).reshape(-1, 4)

    def rest(self) -> None:
        """Close the files that are kept open, until the next batch."""
        self._kept.close()

    @property
    def open_files(self) -> int:
        """Files that are kept open now."""
        return len(self._kept)

    @property
    def open_file_counts(self) -> tuple[int, int]:
        """Files that were open already when a batch wanted them, and files that had to be opened."""
        return self._kept.hits, self._kept.misses

    def close(self) -> None:
        """Wait for all batches, end the threads and close all files."""
        self._closed = True
        self._kept.close()
        if os.getpid() == self._process:
            self._thread.close()

    def _read_at_once(self, reads: FileReads, pending: Pending) -> bool:
        """Read a small batch in this thread, if all of it is in the page cache."""
        few = len(reads.paths) <= min(SMALL_FILES, self._descriptors) and len(reads.file) <= SMALL_READS
        if not few or reads.nbytes.sum() > SMALL_NBYTES or not _CAN_TELL_CACHED:
            return False
        if self._cold:
            self._cold -= 1
            return False
        begin = time.monotonic()
        try:
            pending.read_now(read_cached)
        except NotCachedError:
            self._cold = COLD_BATCHES
            return False
        if time.monotonic() - begin > SLOW:
            self._cold = COLD_BATCHES
        return True
