"""Read parts of many files into host memory: opened, checked, read and closed without Python for a single file.

In: :class:`FileReads`, a batch of reads with the addresses that they fill. Out: :class:`ReadResults`, with the version
of each file before and after its reads. Errors: none are raised for a file or a read that fails; its count is minus an
``errno``.

Batches go through io_uring (:mod:`linumpy.io.uring`). The caller carries out small ones at once where their bytes are
in the page cache: a thread would need longer to wake up. Where io_uring is not there or not allowed, as in most
containers, a thread opens and closes the files, and reads by :mod:`linumpy.io.posix_aio`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np

from linumpy.io import posix_aio, uring
from linumpy.io.plain_reads import FileReads, ReadResults, read_files, stat_file
from linumpy.io.read_jobs import Job, ReadJob, StatJob, Window

__all__ = ["FileReads", "Pending", "ReadEngine", "ReadResults"]

#: Batches up to this are read by the caller, if they are in the page cache.
SMALL_READS, SMALL_NBYTES = 8, 2**20
#: Small batches that go to the threads after one that was not in the page cache, or took that many seconds.
_COLD_BATCHES, _SLOW = 8, 0.002
#: Where nobody says how many files may be open.
_DESCRIPTORS = 1024
#: Small batches that callers read at the same time.
_CALLERS = 16
_CAN_TELL_CACHED = hasattr(os, "RWF_NOWAIT") and hasattr(ctypes.CDLL(None), "preadv2")

Result = TypeVar("Result")

_log = logging.getLogger(__name__)
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


class Pending(Generic[Result]):
    """A batch under way."""

    def __init__(self, reads: FileReads | None = None) -> None:
        self._reads, self._process = reads, os.getpid()
        self._results: Any = None
        self._error: BaseException | None = None
        self._ended = False
        self._gate = threading.Lock()
        self._gate.acquire()
        self._callbacks: list[Callable[[Pending[Result]], object]] = []

    def settle(self, results: Any, error: BaseException | None) -> None:
        """Note the end; the engine calls this."""
        self._results, self._error, self._ended = results, error, True
        self._gate.release()
        self._call_back()

    def done(self) -> bool:
        """Say whether all reads have ended."""
        return self._ended

    def wait(self) -> Result:
        """Wait for all reads.

        A signal handler that raises does not end the waiting: its exception is raised when all reads have ended. Only
        one that comes in the first instant of this call is raised at once: a caller that may be interrupted (the main
        thread) calls :meth:`abandon` before its memory serves another purpose.
        """
        interrupt = self._wait_through()
        if interrupt is not None:
            raise interrupt
        if self._error is not None:
            raise self._error
        result: Result = self._results
        return result

    def abandon(self) -> None:
        """Wait until nothing is read any more, whatever became of it. Exceptions of signal handlers are dropped."""
        self._wait_through()

    def add_done_callback(self, function: Callable[[Pending[Result]], object]) -> None:
        """Call a function with this object when all reads have ended.

        A thread of the engine calls it, so that it must not wait; or this one, if they have ended before.
        """
        self._callbacks.append(function)
        if self._ended:
            self._call_back()

    def _call_back(self) -> None:
        while self._callbacks:
            with contextlib.suppress(IndexError):  # another thread took the last one
                function = self._callbacks.pop(0)
                try:
                    function(self)
                except Exception:
                    _log.exception("a callback of a batch of reads failed")

    def _wait_through(self) -> BaseException | None:
        interrupt = None
        while True:
            try:
                if self._process != os.getpid() and not self._ended:
                    self._read_in_child()
                while not self._ended:
                    # The time limit is for the thread that was interrupted between these two.
                    if self._gate.acquire(timeout=1):
                        self._gate.release()
                return interrupt
            except BaseException as error:
                interrupt = error

    def _read_in_child(self) -> None:
        # The threads that read for the parent are not in this process, nor is the memory that they fill.
        assert self._reads is not None  # the caller of ReadEngine.stat is not in this process either
        try:
            self._results = read_files(self._reads)
        except Exception as error:
            self._error = error
        self._ended = True


class ReadEngine:
    """Reads batches, for as long as it lives; any thread may start them.

    Parameters
    ----------
    threads : int
        Threads that read; 0 for as many as there are cores.
    descriptors : int
        Files that are open at the same time, at most.
    rings : int
        Threads of Python that hand work to those; 0 for one for four cores, and four at most.

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
        threads = threads or cores
        self._tokens = [None] * min(_CALLERS, descriptors // 8)
        descriptors -= len(self._tokens)
        rings = min(rings or max(1, min(4, cores // 4)), threads, descriptors)
        self._descriptors = descriptors // rings
        self._process, self._closed, self._cold = os.getpid(), False, 0
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._threads: list[uring.RingThread | _PlainThread] = []
        self._stop = weakref.finalize(self, _stop, self._queue, self._threads, self._process)
        self.why_not_uring = self._start_rings(rings, -(-threads // rings))
        self.name = f"io_uring, {threads} threads"
        if self.why_not_uring:
            _stop(self._queue, self._threads, self._process)
            posix_aio.set_threads(threads)
            self.name = "threads that pread" if posix_aio.why_unavailable() else "POSIX AIO"
            self._threads.append(_PlainThread(self._queue))

    def _start_rings(self, rings: int, workers: int) -> str:
        try:
            for _ in range(rings):
                self._threads.append(uring.RingThread(self._queue, workers, self._descriptors))
            return self._why_wrong()
        except OSError as error:
            return str(error)

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

    def start(self, reads: FileReads) -> Pending[ReadResults]:
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
        if results is None:
            return self._begin(reads)
        pending: Pending[ReadResults] = Pending(reads)
        pending.settle(results, None)
        return pending

    def stat(self, paths: list[str]) -> np.ndarray:
        """Look at files, all at once.

        Returns
        -------
        numpy.ndarray of int64, (files, 4)
            Rows as :attr:`ReadResults.before`; minus the ``errno`` and zeros where a file cannot be looked at.
        """
        if len(paths) <= SMALL_READS or os.getpid() != self._process:
            return np.array([stat_file(path) for path in paths], np.int64).reshape(-1, 4)
        pending: Pending[np.ndarray] = Pending()
        self._queue_windows(StatJob(paths, pending.settle), pending)
        return pending.wait()

    def close(self) -> None:
        """Wait for all batches and end the threads."""
        with self._lock:
            self._closed = True
        self._stop()

    def _begin(self, reads: FileReads) -> Pending[ReadResults]:
        pending: Pending[ReadResults] = Pending(reads)
        self._queue_windows(ReadJob(reads, pending.settle), pending)
        return pending

    def _queue_windows(self, job: Job, pending: Pending[Any]) -> None:
        todo = deque([*job.windows(len(self._threads), self._descriptors), None])
        try:
            with self._lock:
                if self._closed:
                    raise RuntimeError("the engine is closed")
                # One call of the interpreter: after an interrupt what is still in `todo` is what no thread has got.
                deque(map(self._queue.put, iter(todo.popleft, None)), maxlen=0)
        except BaseException as error:
            for window in todo:
                if window is not None:
                    window.complete(error)
            pending.abandon()
            raise

    def _read_at_once(self, reads: FileReads) -> ReadResults | None:
        """Read a small batch in this thread, if all of it is in the page cache."""
        if len(reads.file) > SMALL_READS or reads.nbytes.sum() > SMALL_NBYTES or not _CAN_TELL_CACHED:
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
    """The thread that carries out windows where there is no ring."""

    def __init__(self, work: queue.SimpleQueue[Window | None]) -> None:
        self._work = work
        self._thread = threading.Thread(target=self._run, name="linumpy-read", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for window in iter(self._work.get, None):
            window.run()

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()


def _stop(work: queue.SimpleQueue[Any], threads: list[uring.RingThread | _PlainThread], process: int) -> None:
    """End threads after the work that is in their queue."""
    if os.getpid() != process:
        return
    for _ in threads:
        work.put(None)
    while threads:
        threads.pop().join()
