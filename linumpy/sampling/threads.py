"""Work of NumPy in as many threads as the process may use.

In: a function of a range of samples, which is called for all samples. NumPy releases Python's global interpreter lock
while it computes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

#: Samples that a thread evaluates at a time: so many that each operation of NumPy takes much longer than acquiring
#: Python's global interpreter lock.
BATCH = 2**16
_pool: tuple[int, ThreadPoolExecutor] | None = None


def threads() -> int:
    """Return how many processors the process may use."""
    return len(os.sched_getaffinity(0))


def in_threads(part: Callable[[int, int], None], count: int, batch: int = BATCH) -> None:
    """Call ``part(begin, end)`` for batches of 0 to `count`, in threads; the first exception is raised here."""
    if count <= batch:
        if count:
            part(0, count)
        return
    pool = _executor()
    runs = min(threads() * 4, math.ceil(count / batch))
    each = math.ceil(count / runs)

    def run(start: int, stop: int) -> None:
        for begin in range(start, stop, batch):
            part(begin, min(begin + batch, stop))

    run_parts(pool, run, [(start, min(start + each, count)) for start in range(0, count, each)])


def run_parts(pool: ThreadPoolExecutor, part: Callable[[int, int], None], ranges: list[tuple[int, int]]) -> None:
    """Call ``part(begin, end)`` for ranges in the threads of a pool; the first exception is raised.

    All calls have ended when this returns or raises, so the caller may free the memory that they write to.
    """
    calls = [pool.submit(part, begin, end) for begin, end in ranges]
    try:
        for call in calls:
            call.result()
    finally:
        for call in calls:
            call.cancel()
        wait(calls)


def _executor() -> ThreadPoolExecutor:
    """Return the threads of this process; a forked child makes new ones."""
    global _pool
    if _pool is None or _pool[0] != os.getpid():
        _pool = os.getpid(), ThreadPoolExecutor(threads(), thread_name_prefix="linumpy-sampling")
    return _pool[1]
