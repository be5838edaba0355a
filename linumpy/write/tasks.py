"""Divide the work of a write among the threads of a pool. Errors: the error of a task that failed."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from functools import partial

from linumpy.device import usable_cores
from linumpy.io.output.objects import ObjectFolder, Target

#: Chunks that are sent to an object store at the same time.
_REMOTE_THREADS = 32

#: A function that waits until a write that was started is complete, and raises its error.
Finish = Callable[[], None]


def writing_threads(target: Target | None = None) -> int:
    """Return how many threads write chunks from host memory; to an object store more, since they wait for answers."""
    return _REMOTE_THREADS if isinstance(target, ObjectFolder) else max(4, min(16, usable_cores()))


def done(*_: object) -> None:
    """Return at once: the :data:`Finish` of a write that is already complete."""


def finish_all(writes: Iterable[Finish]) -> None:
    """Wait until writes are complete."""
    for finish in writes:
        finish()


class Pending:
    """Writes that have begun and may not have ended. Their number is limited, since each write holds device memory."""

    def __init__(self, limit: int) -> None:
        self._limit, self._writes, self._lock = limit, deque[list[Future[None]]](), threading.Lock()

    def wait_for_slot(self) -> None:
        """Wait until another write may begin: for the oldest write, whose :data:`Finish` raises its error."""
        with self._lock:
            oldest = self._writes.popleft() if len(self._writes) >= self._limit else []
        wait(oldest)

    def add(self, futures: list[Future[None]]) -> Finish:
        """Add the tasks of a write, and return a function that waits for them."""
        with self._lock:
            self._writes.append(futures)
        return partial(wait_for, futures)


def in_tasks(pool: ThreadPoolExecutor, threads: int, work: Callable[[int], None], numbers: Sequence[int]) -> None:
    """Call a function with each number, in threads of the pool, and return when all calls have ended."""

    def call_each(part: Sequence[int]) -> None:
        for number in part:
            work(number)

    # A task for each number would be slow for small chunks.
    wait_for(start_tasks(pool, min(len(numbers), 4 * threads), call_each, numbers))


def start_tasks(
    pool: ThreadPoolExecutor, tasks: int, work: Callable[[Sequence[int]], None], numbers: Sequence[int]
) -> list[Future[None]]:
    """Cut the numbers into `tasks` consecutive parts, and start to call a function with each part."""
    edges = [k * len(numbers) // tasks for k in range(tasks + 1)] if tasks else []
    return [pool.submit(work, numbers[a:b]) for a, b in itertools.pairwise(edges)]


def wait_for(futures: Sequence[Future[None]]) -> None:
    """Wait for tasks; after an error, cancel those that have not begun and wait for the others."""
    finished, others = wait(futures, return_when=FIRST_EXCEPTION)
    for future in others:
        future.cancel()
    wait(others)
    for future in finished:
        future.result()
