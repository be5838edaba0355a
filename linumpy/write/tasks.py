"""Divide the work of a write among the threads of a pool. Errors: that of the task that failed first."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from functools import partial

#: Waits until a write that was started is complete.
Finish = Callable[[], None]


def done() -> None:
    """Wait for nothing: all is written."""


def finish_all(writes: Iterable[Finish]) -> None:
    """Wait until writes are complete."""
    for finish in writes:
        finish()


class Pending:
    """Works of several tasks, of which only so many may have tasks that have not ended: each holds device memory.

    Parameters
    ----------
    most : int
        Number of works.
    """

    def __init__(self, most: int) -> None:
        self._most, self._works, self._lock = most, deque[list[Future[None]]](), threading.Lock()

    def make_room(self) -> None:
        """Wait until another work may begin."""
        with self._lock:
            oldest = self._works.popleft() if len(self._works) >= self._most else []
        wait(oldest)

    def add(self, futures: list[Future[None]]) -> Finish:
        """Add a work, and return what waits for it."""
        with self._lock:
            self._works.append(futures)
        return partial(wait_for, futures)


def in_tasks(pool: ThreadPoolExecutor, threads: int, work: Callable[[int], None], numbers: Sequence[int]) -> None:
    """Call a function with each number, and return when all calls have ended."""

    def some(own: Sequence[int]) -> None:
        for number in own:
            work(number)

    # Not one task for each number, which would be slow for small chunks.
    wait_for(start_tasks(pool, min(len(numbers), 4 * threads), some, numbers))


def start_tasks(
    pool: ThreadPoolExecutor, tasks: int, work: Callable[[Sequence[int]], None], numbers: Sequence[int]
) -> list[Future[None]]:
    """Start to call a function with parts of the numbers, which follow one another."""
    edges = [k * len(numbers) // tasks for k in range(tasks + 1)] if tasks else []
    return [pool.submit(work, numbers[a:b]) for a, b in itertools.pairwise(edges)]


def tasks_of(count: int, threads: int, works: int) -> int:
    """Return into how many tasks a work on so many objects is divided, where so many works share the threads.

    More tasks than threads would contend for Python's lock (the GIL).
    """
    return min(count, max(1, threads // works))


def wait_for(futures: Sequence[Future[None]]) -> None:
    """Wait for tasks; after an error for those only that have begun."""
    finished, others = wait(futures, return_when=FIRST_EXCEPTION)
    for future in others:  # after an error
        future.cancel()
    wait(others)
    for future in finished:
        future.result()
