"""Read parts of many files into host memory: opened, checked, read and closed without Python for a single file.

In: :class:`FileReads`, a batch of reads with the addresses that they fill. Out: :class:`ReadResults`, with the version
of each file before and after its reads. Errors: none are raised for a file or a read that fails; its count is minus an
``errno``.

Batches go through io_uring (:mod:`linumpy.io.rings`), driven by the threads that start them and wait for them. The
caller carries out small ones at once where their bytes are in the page cache: a thread of the kernel would need longer
to wake up. Where io_uring is not there or not allowed, as in most containers, a thread opens and closes the files, and
reads by :mod:`linumpy.io.posix_aio`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import queue
import threading
import time
import weakref
from collections import deque
from typing import Any

import numpy as np

from linumpy.io import posix_aio
from linumpy.io.plain_reads import FileReads, ReadResults, read_files, stat_file
from linumpy.io.read_jobs import Job, ReadJob, StatJob
from linumpy.io.rings import Rings

__all__ = ["FileReads", "Pending", "ReadEngine", "ReadResults"]

#: Batches up to this are read by the caller, if they are in the page cache.
SMALL_FILES, SMALL_READS, SMALL_NBYTES = 8, 32, 5 * 2**17
#: Files that are looked at sooner one by one.
_FEW_FILES = 256
#: Small batches that go to the ring after one that was not in the page cache, or took that many seconds.
_COLD_BATCHES, _SLOW = 8, 0.002
#: Where nobody says how many files may be open.
_DESCRIPTORS = 1024
#: Small batches that callers read at the same time.
_CALLERS = 16
#: With fewer, threads of the kernel do not wait for each other at one ring.
_CORES_FOR_TWO_RINGS = 8
_CAN_TELL_CACHED = hasattr(os, "RWF_NOWAIT") and hasattr(ctypes.CDLL(None), "preadv2")

_libc = ctypes.CDLL(None, use_errno=True)
if _CAN_TELL_CACHED:
    _libc.preadv2.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_long, ctypes.c_int]
    _libc.preadv2.restype = ctypes.c_ssize_t


class _Vector(ctypes.Structure):
    """Struct iovec of ``preadv2(2)``."""

    _fields_ = [("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t)]


class _NotCachedError(Exception):
    """A read would have to wait for a disk."""


def _read_cached(descriptor: int, address: int, nbytes: int, offset: int) -> int:
    """Do what :func:`linumpy.io.posix_aio.read_now` does, unless it would have to wait for a disk."""
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
            raise _NotCachedError
        if code == errno.EOPNOTSUPP and flags:  # the file system cannot tell: overlay, tmpfs, some networks
            flags = 0
        elif code != errno.EINTR:
            return -code
    return done


class Pending:
    """A batch under way. It goes on when a caller starts a batch, waits for one, or asks whether one has ended."""

    def __init__(self, engine: ReadEngine, job: ReadJob | None, results: ReadResults | None = None) -> None:
        # The engine is not closed while somebody waits here.
        self._engine, self._job, self._results, self._process = engine, job, results, os.getpid()

    def done(self) -> bool:
        """Say whether all reads have ended."""
        if self._job is None:
            return True
        if not self._job.ended and self._process == os.getpid():
            self._engine._driver.poll()
        return self._job.ended

    def wait(self) -> ReadResults:
        """Wait for all reads.

        A signal handler that raises does not end the waiting: its exception is raised when all reads have ended. Only
        one that comes in the first instant of this call is raised at once: a caller that may be interrupted (the main
        thread) calls :meth:`abandon` before its memory serves another purpose.
        """
        interrupt = self._wait_through()
        if interrupt is not None:
            raise interrupt
        if self._results is None:
            assert self._job is not None
            if self._job.error is not None:
                raise self._job.error
            self._results = self._job.outcome
        return self._results

    def abandon(self) -> None:
        """Wait until nothing is read any more, whatever became of it. Exceptions of signal handlers are dropped."""
        self._wait_through()

    def _wait_through(self) -> BaseException | None:
        interrupt = None
        while True:
            try:
                if self._job is not None and not self._job.ended:
                    if self._process == os.getpid():
                        self._engine._driver.wait(self._job)
                    else:
                        # Nobody reads for the parent in this process, nor is the memory here that the parent fills.
                        self._results, self._job = read_files(self._job.reads), None
                return interrupt
            except BaseException as error:
                interrupt = error


class ReadEngine:
    """Reads batches, for as long as it lives; any thread may start them, and wait for those of others.

    A thread must not end before the batches that it started: what is left of them is then read one by one.

    Parameters
    ----------
    threads : int
        Threads that read; 0 for as many as there are cores.
    descriptors : int
        Files that are open at the same time, at most.
    rings : int
        Rings of io_uring, which batches use by turns; 0 for two where there are 8 cores, one else.

    Attributes
    ----------
    name : str
        What reads, for reports.
    why_not_uring : str
        Why that is not io_uring; empty if it is.
    """

    def __init__(self, threads: int = 0, *, descriptors: int = _DESCRIPTORS, rings: int = 0) -> None:
        if threads < 0 or rings < 0 or descriptors < 1:
            raise ValueError(f"threads={threads}, rings={rings} and descriptors={descriptors} must be positive")
        cores = len(os.sched_getaffinity(0))
        self._threads = threads or cores
        self._tokens = [None] * min(_CALLERS, descriptors // 8)
        self._descriptors = descriptors - len(self._tokens)
        self._process, self._closed, self._cold = os.getpid(), False, 0
        self._driver: Rings | _PlainThread
        self.why_not_uring = self._start_rings(rings or (2 if cores >= _CORES_FOR_TWO_RINGS else 1))
        self.name = f"io_uring, {self._threads} threads"
        if self.why_not_uring:
            posix_aio.set_threads(self._threads)
            self.name = "threads that pread" if posix_aio.why_unavailable() else "POSIX AIO"
            self._driver = _PlainThread()
        self._stop = weakref.finalize(self, _stop, self._driver, self._process)

    def _start_rings(self, rings: int) -> str:
        try:
            self._driver = Rings(rings, self._threads, self._descriptors)
        except OSError as error:
            return str(error)
        wrong = "an error"
        try:
            wrong = self._why_wrong()
        except OSError as error:
            wrong = str(error)
        finally:
            if wrong:
                self._driver.close()
        return wrong

    def _why_wrong(self) -> str:
        """Try it on a file in memory: there are kernels and sandboxes that have a part of io_uring."""
        content = np.arange(5000, dtype=np.uint16)
        got = np.zeros(6000, np.uint16)
        with open(os.memfd_create("linumpy"), "wb", buffering=0) as trial:
            trial.write(content.tobytes())
            path = f"/proc/self/fd/{trial.fileno()}"
            expected = read_files(FileReads([path], *np.zeros((4, 1), np.int64))).before
            file, offset, nbytes = np.array([[0, 0], [8000, 0], [4000, 8000]])
            address = got.ctypes.data + np.array([8000, 0])
            results = self._begin(FileReads([path], file, offset, nbytes, address, got)).wait()
        right = results.nbytes.tolist() == [2000, 8000] and (got[:5000] == content).all()
        right = right and (results.before == expected).all() and (results.after == expected).all()
        return "" if right else "io_uring gave other bytes than were asked for"

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
        if self._closed:
            raise RuntimeError("the engine is closed")
        in_child = os.getpid() != self._process
        results = read_files(reads) if in_child or not reads.paths else self._read_at_once(reads)
        return self._begin(reads) if results is None else Pending(self, None, results)

    def stat(self, paths: list[str]) -> np.ndarray:
        """Look at files.

        Returns
        -------
        numpy.ndarray of int64, (files, 4)
            Rows as :attr:`ReadResults.before`; minus the ``errno`` and zeros where a file cannot be looked at.
        """
        if self._closed:
            raise RuntimeError("the engine is closed")
        if len(paths) <= _FEW_FILES or os.getpid() != self._process:
            return np.array([stat_file(path) for path in paths], np.int64).reshape(-1, 4)
        job = StatJob(paths)
        self._driver.start(job)
        self._driver.wait(job)
        if job.error is not None:
            raise job.error
        return job.outcome

    def close(self) -> None:
        """Wait for all batches, and give back what they used."""
        self._closed = True
        self._stop()

    def _begin(self, reads: FileReads) -> Pending:
        job = ReadJob(reads, self._threads, self._descriptors)
        pending = Pending(self, job)
        self._driver.start(job)
        return pending

    def _read_at_once(self, reads: FileReads) -> ReadResults | None:
        """Read a small batch in this thread, if all of it is in the page cache."""
        if len(reads.file) > SMALL_READS or len(reads.paths) > SMALL_FILES or not _CAN_TELL_CACHED:
            return None
        if reads.nbytes.sum() > SMALL_NBYTES:
            return None
        if self._cold:
            self._cold -= 1
            return None
        token: list[None] = []
        begin = time.monotonic()
        try:
            token.extend(map(self._tokens.pop, (-1,)))
            results = read_files(reads, _read_cached)
        except IndexError:  # as many callers as may open files do so
            return None
        except _NotCachedError:
            self._cold = _COLD_BATCHES
            return None
        finally:
            self._tokens.extend(token)
        if time.monotonic() - begin > _SLOW:
            self._cold = _COLD_BATCHES
        return results


class _PlainThread:
    """The thread that carries out batches where there is no ring."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Job[Any] | None] = queue.SimpleQueue()
        self._lock, self._closed = threading.Lock(), False
        self._thread = threading.Thread(target=self._run, name="linumpy-read", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for job in iter(self._work.get, None):
            job.run()
            job.gate.release()
            del job

    def start(self, job: Job[Any]) -> None:
        """Start a job; if this raises, nothing goes on."""
        todo = deque([job, None])
        job.gate.acquire()
        try:
            with self._lock:
                if self._closed:
                    raise RuntimeError("the engine is closed")
                # One call of the interpreter: after an interrupt what is still in `todo` is what the thread has not.
                deque(map(self._work.put, iter(todo.popleft, None)), maxlen=0)
        except BaseException:
            while job not in todo and not job.ended:
                with contextlib.suppress(BaseException):
                    self.wait(job)
            raise

    def poll(self) -> None:
        """Do nothing: the thread goes on by itself."""

    def wait(self, job: Job[Any]) -> None:
        """Wait until a job has ended."""
        while not job.ended:
            # The time limit is for the thread that was interrupted between these two.
            if job.gate.acquire(timeout=1):
                job.gate.release()

    def close(self) -> None:
        """Wait for all jobs and end the thread."""
        with self._lock:
            self._closed = True
        self._work.put(None)
        self._thread.join()


def _stop(driver: Rings | _PlainThread, process: int) -> None:
    if os.getpid() == process:
        driver.close()
