"""Divide the work of a write among the threads of a pool. Errors: that of the task that failed first."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

#: Waits until a write that was started is complete.
Finish = Callable[[], None]


def done() -> None:
    """Wait for nothing: all is written."""


def finish_all(writes: Iterable[Finish]) -> None:
    """Wait until writes are complete."""
    for finish in writes:
        finish()


def in_tasks(pool: ThreadPoolExecutor, threads: int, work: Callable[[int], None], numbers: Sequence[int]) -> None:
    """Call a function with each number, and return when all calls have ended."""
    tasks = min(len(numbers), 4 * threads)  # one task for each chunk would be slow for small chunks

    def some(own: Sequence[int]) -> None:
        for number in own:
            work(number)

    edges = [k * len(numbers) // tasks for k in range(tasks + 1)] if tasks else []
    futures = [pool.submit(some, numbers[a:b]) for a, b in itertools.pairwise(edges)]
    finished, others = wait(futures, return_when=FIRST_EXCEPTION)
    for future in others:  # after an error
        future.cancel()
    wait(others)
    for future in finished:
        future.result()
