"""kvikio's process-wide settings, changed for the time of a read or a write and put back after it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

#: More threads than this gained nothing where it was measured (16 cores, PCIe 5). Two cores are left to the reader's
#: thread and its caller: without them raw arrays were read a third slower.
_MAX_THREADS, _LEFT = 16, 2
_NTHREADS_VARIABLES = ("KVIKIO_NTHREADS", "KVIKIO_NUM_THREADS")
#: kvikio's own default; another number was set by somebody.
_UNSET_THREADS = 1

_lock = threading.Lock()
_users = 0
_scope: Any = None


@contextmanager
def transfer_settings() -> Iterator[None]:
    """Set kvikio's threads and thresholds for reads and writes.

    Those that run at the same time in several threads share one scope: the first sets, the last puts back. A number
    of threads that the caller set, by ``KVIKIO_NTHREADS`` or ``kvikio.defaults.set``, stays. It counts for what goes
    through kvikio, not for reads by the native core's threads.
    """
    global _users, _scope
    import kvikio.defaults

    with _lock:
        if _users == 0:
            wanted = _wanted(kvikio.defaults)
            _scope = kvikio.defaults.set(wanted) if wanted else None
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0 and _scope is not None:
                _scope.__exit__(None, None, None)
                _scope = None


def _wanted(defaults: Any) -> dict[str, int]:
    """Say what to change; nothing that is as wanted, since a new number of threads makes a new pool."""
    wanted = {}
    # Below its threshold kvikio reads on the calling thread, one read after another.
    if defaults.get("gds_threshold") != 0 and "KVIKIO_GDS_THRESHOLD" not in os.environ:
        wanted["gds_threshold"] = 0
    threads = read_threads(defaults.get("num_threads"))
    if threads != defaults.get("num_threads"):
        wanted["num_threads"] = threads
    return wanted


def read_threads(current: int) -> int:
    """Number of kvikio threads that a read uses, given the number set now; one that somebody chose stays."""
    if current != _UNSET_THREADS or any(os.environ.get(name) for name in _NTHREADS_VARIABLES):
        return current
    cores = len(os.sched_getaffinity(0))
    return min(_MAX_THREADS, cores - _LEFT if cores > 2 * _LEFT else cores)
