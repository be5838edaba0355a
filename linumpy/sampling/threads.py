"""Call a function of NumPy for ranges of samples, in as many threads as the process may use.

In: a function of a range, and the number of samples. Out: calls that together cover all samples. NumPy releases
Python's global interpreter lock while it computes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

from linumpy.device import usable_cores

#: Samples of a call: enough that each operation of NumPy takes much longer than acquiring Python's global interpreter
#: lock.
BATCH = 2**16
_pool: tuple[int, ThreadPoolExecutor] | None = None


def in_threads(part: Callable[[int, int], None], count: int, batch: int = BATCH) -> None:
    """Call ``part(begin, end)`` for batches that cover 0 to `count`, in threads; raise the first exception."""
    if count <= batch:
        if count:
            part(0, count)
        return
    runs = min(usable_cores() * 4, math.ceil(count / batch))
    each = math.ceil(count / runs)

    def run(start: int, stop: int) -> None:
        for begin in range(start, stop, batch):
            part(begin, min(begin + batch, stop))

    global _pool
    if _pool is None or _pool[0] != os.getpid():  # a forked child makes new threads
        _pool = os.getpid(), ThreadPoolExecutor(usable_cores(), thread_name_prefix="linumpy-sampling")
    run_parts(_pool[1], run, [(start, min(start + each, count)) for start in range(0, count, each)])


def run_parts(pool: ThreadPoolExecutor, part: Callable[[int, int], None], ranges: list[tuple[int, int]]) -> None:
    """Call ``part(begin, end)`` for ranges in the threads of a pool; raise the first exception.

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
