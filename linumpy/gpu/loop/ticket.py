"""The ticket by which a caller waits for a region that it has asked for. Errors of a job are its own."""

from __future__ import annotations

import contextlib
import math
import threading
import time
import weakref
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from linumpy.errors import not_pickled
from linumpy.gpu.loop.report import ReadReport

if TYPE_CHECKING:
    from collections.abc import Callable


#: Seconds between two looks of a waiter: an interrupt may have come to another one that was to wake it up.
_LOOK_AGAIN = 0.1


class Ending:
    """An event that can be set whenever an interrupt comes to a waiter; that of ``threading`` may stay locked."""

    __slots__ = ("_held", "_reached")

    def __init__(self) -> None:
        self._reached, self._held = False, threading.Lock()
        self._held.acquire()

    def set(self) -> None:
        """Let all go on; by one thread."""
        if not self._reached:
            self._reached = True
            self._held.release()

    def is_set(self) -> bool:
        """Say whether it is reached."""
        return self._reached

    def wait(self, seconds: float = math.inf) -> bool:
        """Wait for it, so many seconds at most; say whether it is reached."""
        limit = time.monotonic() + seconds
        while not self._reached and (left := limit - time.monotonic()) > 0:
            if self._held.acquire(timeout=min(left, _LOOK_AGAIN)):
                self._held.release()
        return self._reached


@dataclass(frozen=True)
class JobCounts:
    """What was done for a job.

    Attributes
    ----------
    chunks, filled, by_host : int
        Chunks; those of them that are not stored; those that the host decoded.
    bytes_read : int
        Stored bytes, shard indexes counted in.
    files_opened, reads_repeated : int
        Files, and reads that kvikio failed to do and the host repeated, with those of the jobs that were carried out
        together.
    host_seconds : float
        Of the threads that decoded on the host, with those of the jobs that were carried out together.
    """

    chunks: int = 0
    filled: int = 0
    by_host: int = 0
    bytes_read: int = 0
    files_opened: int = 0
    reads_repeated: int = 0
    host_seconds: float = 0.0

    def __add__(self, other: JobCounts) -> JobCounts:
        return JobCounts(
            self.chunks + other.chunks,
            self.filled + other.filled,
            self.by_host + other.by_host,
            self.bytes_read + other.bytes_read,
            self.files_opened + other.files_opened,
            self.reads_repeated + other.reads_repeated,
            self.host_seconds + other.host_seconds,
        )


@dataclass(eq=False)
class Together:
    """What was done for jobs that are carried out together.

    Attributes
    ----------
    events : dict of int to event
        For each stream the last one that was recorded behind their kernels.
    timings : list of (str, tuple of events)
        Kind of a slab; events before decoding, before and behind the scatter.
    files_opened, index_nbytes, reads_repeated : int
        Files; bytes of shard indexes; reads that kvikio failed to do.
    failure : str
        Why the first of those reads failed.
    host_seconds : float
        Of the threads that decode: the time of each, for its chunks.
    """

    events: dict[int, Any] = field(default_factory=dict)
    timings: list[tuple[str, tuple[Any, Any, Any]]] = field(default_factory=list)
    files_opened: int = 0
    index_nbytes: int = 0
    reads_repeated: int = 0
    failure: str = ""
    host_seconds: float = 0.0

    def note_repeated(self, reads: int, failure: str) -> None:
        """Count reads that were repeated without kvikio."""
        self.reads_repeated += reads
        self.failure = self.failure or failure

    @property
    def counts(self) -> JobCounts:
        """As all these jobs have them in common."""
        return JobCounts(
            bytes_read=self.index_nbytes,
            files_opened=self.files_opened,
            reads_repeated=self.reads_repeated,
            host_seconds=self.host_seconds,
        )


class LoopLife:
    """Whether the loop that tickets wait for still runs.

    The loop's thread holds the lock until it ends, and nothing is allocated to release it. So whoever waits learns of
    an end that the loop could tell nobody, as where there was no memory for the errors of its jobs.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.failure: BaseException | None = None

    def has_ended(self) -> bool:
        """Say whether nothing is read any more."""
        return not self.lock.locked()


class Ticket:
    """One region that is being read."""

    __slots__ = (
        "__weakref__",
        "_array",
        "_cancelled",
        "_decided",
        "_deciding",
        "_describe",
        "_dropped",
        "_error",
        "_events",
        "_home",
        "_life",
        "_order",
        "_report",
        "_settled",
        "begin",
        "counts",
        "end",
        "portions",
        "source",
        "timed",
        "together",
    )

    def __init__(
        self, array: Any, source: str, order: Callable[[Any, list[Any]], None], home: Any, life: LoopLife | None = None
    ) -> None:
        self._array, self.source, self._order, self._home, self._life = array, source, order, home, life
        self._dropped: Any = None  # what is done where nobody asks for the result
        self._settled = Ending()
        self._error: BaseException | None = None
        self._cancelled = self._decided = False
        self._deciding = threading.Lock()
        self._events: list[Any] = []
        self._report: ReadReport | None = None
        self._describe: Callable[[Ticket], ReadReport] | None = None
        self.begin = self.end = time.perf_counter()
        self.timed = False
        self.counts = JobCounts()
        self.portions = 1  # requests that are not over yet
        self.together: list[Together] = []  # of its requests, until it is over

    def __reduce__(self) -> NoReturn:
        raise not_pickled(self, "send the array that result() returns")

    def result(self, stream: Any = None) -> Any:
        """Wait until the region has been read, and return its array.

        Parameters
        ----------
        stream : cupy.cuda.Stream, optional
            What is queued on it from now on finds the array complete; by default CuPy's current stream. It is this
            stream that waits for the last kernels, not the caller.

        Raises
        ------
        ChunkError
            A chunk of this region is not what the metadata says.
        concurrent.futures.CancelledError
            The job was cancelled.
        RuntimeError
            The reader's thread has ended by an error, of which it could tell nobody; memory may have ended twice.
        """
        self._wait()
        if self._error is not None:
            raise own_copy(self._error)
        self._order(stream, self._events)
        if self._home is not None:  # memory goes back to the stream on which it was allocated
            self._order(self._home, self._events)
            self._home = None
            if self._dropped is not None:
                self._dropped.detach()
        return self._array

    def exception(self) -> BaseException | None:
        """Wait until the job is over; return its error, or None."""
        self._wait()
        return self._error

    def done(self) -> bool:
        """Say whether :meth:`result` returns or raises at once."""
        return self._settled.is_set() or (self._life is not None and self._life.has_ended())

    def _wait(self) -> None:
        """Wait for the end of the job, or of the loop, which could not end it."""
        while not self._settled.wait(_LOOK_AGAIN):
            if self._life is None or not self._life.has_ended():
                continue
            with self._deciding:  # of several that wait one ends it
                if not self._settled.is_set():
                    self._decided = True
                    if self._error is None:
                        self._error = RuntimeError(f"the reader has ended with an error: {self._life.failure!r}")
                        self._error.__cause__ = self._life.failure
                    self._settled.set()

    def cancel(self) -> bool:
        """Give the job up.

        Returns
        -------
        bool
            False where it is over already. Else its output is not written any more once :meth:`exception` returns.
        """
        with self._deciding:
            if self._decided:
                return False
            self._cancelled = True
            return True

    @property
    def report(self) -> ReadReport:
        """What was done; waits until the job is over."""
        self._wait()
        if self._error is not None or self._describe is None:
            raise own_copy(self._error or CancelledError("the job was cancelled"))
        if self._report is None:
            self._report = self._describe(self)
        return self._report

    @property
    def array(self) -> Any:
        """Where the region is read to."""
        return self._array

    @property
    def error(self) -> BaseException | None:
        """The error so far; the job may not be over yet."""
        return self._error

    @property
    def given_up(self) -> bool:
        """Whether nobody gets the array, so that nothing more needs to be read for it."""
        return self._cancelled or self._error is not None

    def fail(self, error: BaseException) -> None:
        """Note an error, unless the job is over; for the reader."""
        if self._error is None and not self._settled.is_set():
            self._error = error

    def count(self, counts: JobCounts) -> None:
        """Add what a request of the job did; for the reader."""
        self.counts += counts

    def end_request(self, done: Together) -> bool:
        """End one of its requests; for the reader. Says whether the job is over."""
        if not any(one is done for one in self.together):
            self.together.append(done)
        self.portions -= 1
        return self.portions <= 0

    def decide(self) -> bool:
        """Take no :meth:`cancel` any more; for the reader. Says whether the job is given up."""
        with self._deciding:
            self._decided = True
        return self.given_up

    def settle(self, events: list[Any], describe: Callable[[Ticket], ReadReport] | None) -> None:
        """End the job, whatever is raised meanwhile; for the reader. `describe` makes its report."""
        try:
            self.decide()
            self._events, self._describe = events, describe
            if self._home is not None and events:
                # Not by __del__: in a cycle of references streams and events may be gone before it is called.
                self._dropped = weakref.finalize(self, _order_after, self._order, self._home, events)
                self._dropped.atexit = False
            self.end = time.perf_counter()
            if self._cancelled and self._error is None:
                self._error = CancelledError("the job was cancelled")
        except Exception as error:
            if self._error is None:
                self._error = error
            raise
        finally:
            self._settled.set()


def _order_after(order: Callable[[Any, list[Any]], None], home: Any, events: list[Any]) -> None:
    """Let the stream to which an output's memory goes back wait for what is written to it."""
    with contextlib.suppress(Exception):  # the device may be gone at the end of the process
        order(home, events)


def own_copy(error: BaseException) -> BaseException:
    """Make an error of its own for each raise: a traceback belongs to one of them."""
    try:
        copy = type(error)(*error.args)
    except Exception:
        return error
    copy.__cause__ = error.__cause__
    return copy
