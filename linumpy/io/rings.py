"""Jobs on rings of io_uring, driven by whoever starts a job or waits for one: there are no threads of Python.

In: :class:`Job`, work in windows of submission entries. Out: the job is told the results of each step of its windows.
Errors: :class:`OSError` where there can be no ring.

The exception of a signal handler may come after any call in the main thread. All state is therefore either complete or
can be built again from the queues of the rings: what must change together changes without a call in between.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import Any, Protocol

import numpy as np

from linumpy.io.uring import ENTRIES, ENTRY_WORDS, Ring

#: Entries of a window at most, and of all windows that are under way on a ring: the completion queue must hold them
#: and those of one :meth:`Rings._wake`.
MAX_STEP, _MAX_UNDER_WAY = ENTRIES // 2, 3 * ENTRIES // 2
#: In place of the result of an entry that is under way.
PENDING = -(2**31)


class Job(Protocol):
    """Work in windows that are carried out one after another or at the same time.

    Attributes
    ----------
    windows : list of Window
        Its parts.
    begun, complete : int
        Windows that were begun and that are complete; :class:`Rings` counts.
    ended : bool
        Whether :meth:`end` has been carried out.
    ring : Ring
        Where; :class:`Rings` chooses.
    """

    windows: list[Window]
    begun: int
    complete: int
    ended: bool
    ring: Ring

    def step(self, window: Window) -> np.ndarray | None:
        """Return the entries of the step `window.stage`, whose number is at most `window.entries`; None at the end.

        They may run at the same time, chains apart. `window.results` has the results of the last step. Where an
        exception ends this, it is called again. An error of the job itself is kept for its end.
        """

    def end(self) -> None:
        """Put the results together, when all windows are complete; called again where an exception ends this."""


class Window:
    """A part of a job: the chains of its units `begin` to `end`.

    Attributes
    ----------
    descriptors, entries : int
        Files that it has open at the same time, and entries of a step, at most.
    stage : int
        Steps that were begun.
    results : numpy.ndarray of int32
        Results of the entries of the last one, in order.
    notes : object
        The job's own.
    """

    __slots__ = ("begin", "descriptors", "end", "entries", "job", "notes", "number", "results", "stage")

    def __init__(self, job: Job, begin: int, end: int, *, descriptors: int, entries: int) -> None:
        self.job, self.begin, self.end, self.descriptors, self.entries = job, begin, end, descriptors, entries
        self.stage, self.number = 0, 0
        self.results: np.ndarray = np.zeros(0, np.int32)
        self.notes: Any = None


class Rings:
    """Rings that carry out jobs; whoever starts a job or waits for one drives them. Any thread may.

    One thread at a time sleeps in the kernel, for all that wait. The kernel ends operations of a thread that ends
    (``ECANCELED``).

    Parameters
    ----------
    count : int
        Rings; jobs are given to them by turns, so that waiting for one job is not disturbed by the next.
    workers : int
        Threads of the kernel.
    descriptors : int
        Files that may be open at the same time. No window may need more.

    Raises
    ------
    OSError
        If there can be no ring.
    """

    def __init__(self, count: int, workers: int, descriptors: int) -> None:
        self._rings: list[Ring] = []
        self._descriptors, self._number, self._closed = descriptors, 0, False
        self._started = 0
        self._jobs: list[Job] = []
        self._active: dict[int, Window] = {}
        self._lock = threading.Lock()  # of all state; nobody waits for the kernel while it is held
        self._turns = [None]  # the right to sleep in the kernel; taken by one call of the interpreter
        self._asleep: tuple[Ring, int] | None = None
        self._sleepers: list[queue.SimpleQueue[None]] = []
        try:
            for _ in range(count):
                self._rings.append(Ring(workers))
        except BaseException:
            self.close()
            raise

    def start(self, job: Job) -> None:
        """Start a job; what of it needs no waiting has been done when this returns. If it raises, nothing goes on."""
        try:
            with self._lock:
                if self._closed:
                    raise RuntimeError("the engine is closed")
                job.ring = self._rings[self._started % len(self._rings)]
                self._started += 1
                self._jobs.append(job)
                self._advance()
                if self._asleep is not None:
                    self._wake(*self._asleep)
        except BaseException:
            while job in self._jobs:
                with contextlib.suppress(BaseException):
                    self.wait(job)
            raise

    def poll(self) -> None:
        """Note what has ended, and go on with it."""
        with self._lock:
            self._advance()
            if self._asleep is not None:
                self._wake(*self._asleep)

    def wait(self, job: Job | None) -> None:
        """Wait until a job has ended; an exception of a signal handler ends the waiting. None: see :meth:`close`."""
        turn: list[None] = []
        wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        try:
            self._sleepers.append(wake)
            while not job.ended if job else self._rings:
                with contextlib.suppress(IndexError):
                    turn.extend(map(self._turns.pop, (-1,)))
                if turn:
                    self._lead(job)
                else:
                    with contextlib.suppress(queue.Empty):
                        wake.get(timeout=1)  # the limit is for one who was interrupted before he could wake others
        finally:
            self._turns.extend(turn)
            self._sleepers.remove(wake)
            self._wake_waiting()

    def close(self) -> None:
        """Refuse further jobs, wait for those that were started, and give the rings back."""
        with self._lock:
            self._closed = True
        self.wait(None)

    def _lead(self, job: Job | None) -> None:
        while True:
            with self._lock:
                self._asleep = None
                self._advance()
                if job is None and not self._jobs:
                    while self._rings:
                        self._rings[-1].close()
                        self._rings.pop()
                    return
                if job and job.ended:
                    return
                ring, count = self._asleep = self._what_to_await(job)
            if len(self._sleepers) > 1:
                self._wake_waiting()
            ring.sleep(count)

    def _what_to_await(self, job: Job | None) -> tuple[Ring, int]:
        """Choose a ring, and how many results must come before there is anything to do for a job."""
        windows = list(self._active.values())
        window = next((one for one in windows if one.job is job), windows[0])
        return window.job.ring, int(np.count_nonzero(window.results == PENDING))

    def _wake(self, ring: Ring, count: int) -> None:
        """Wake the thread that sleeps until there are more results than are left after this thread has taken some."""
        end = ring.write(np.zeros((count, ENTRY_WORDS), np.uint64), 0)  # that do nothing, at once
        ring.tail[0] = end
        ring.submit()

    def _wake_waiting(self) -> None:
        for one in tuple(self._sleepers):
            if one.empty():
                one.put(None)

    def _advance(self) -> None:
        """Take results, go on with what they belong to, and begin what fits, until there is nothing to submit."""
        while True:
            for ring in self._rings:
                if ring.has_results():
                    self._take(ring)
            for window in [one for one in self._active.values() if one.results.min() > PENDING]:
                self._step(window)
            self._begin()
            submitted = [ring.submit() for ring in self._rings]
            if not any(submitted):
                break
        for job in [job for job in self._jobs if job.complete == len(job.windows)]:
            if not job.ended:
                job.end()
            self._jobs.remove(job)

    def _take(self, ring: Ring) -> None:
        rows, end = ring.take()
        for window in self._active.values():
            if window.job.ring is ring:
                mine = rows[rows[:, 1] == window.number]
                window.results[mine[:, 0]] = mine[:, 2]
        ring.head[0] = end  # after an exception before this they are noted again

    def _begin(self) -> None:
        """Begin a window; the next one when the kernel is at work on this one."""
        job = next((job for job in self._jobs if job.begun < len(job.windows)), None)
        if job is None:
            return
        window, active = job.windows[job.begun], self._active.values()
        if active:
            entries = sum([one.entries for one in active if one.job.ring is job.ring], window.entries)
            descriptors = sum([one.descriptors for one in active], window.descriptors)
            if descriptors > self._descriptors or entries > _MAX_UNDER_WAY:
                return
        window.number = self._number % (2**31 - 1) + 1
        self._step(window)

    def _step(self, window: Window) -> None:
        job, number = window.job, window.number
        entries = job.step(window)
        if entries is not None:
            results = np.full(len(entries), PENDING, np.int32)
            end = job.ring.write(entries, number)
        # No calls from here on.
        if window.stage == 0:
            job.begun += 1
            self._number = number
        if entries is not None:
            self._active[number] = window
            window.results = results
            window.stage += 1
            job.ring.tail[0] = end
            return
        job.complete += 1
        if window.stage:
            del self._active[number]
