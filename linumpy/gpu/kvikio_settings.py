"""kvikio's process-wide settings, changed during a read or a write and restored afterwards."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from linumpy.device import usable_cores

#: More threads than this gain nothing (measured with 16 cores, PCIe 5). If there are more than four cores, two stay
#: free for the reader's thread and the caller: otherwise raw arrays were read a third slower.
_MAX_THREADS, _FREE_CORES = 16, 2
_NTHREADS_VARIABLES = ("KVIKIO_NTHREADS", "KVIKIO_NUM_THREADS")
#: kvikio's default number of threads; another number means that a user has set it.
_DEFAULT_THREADS = 1

_lock = threading.Lock()
_users = 0
_scope: Any = None


@contextmanager
def transfer_settings() -> Iterator[None]:
    """Set kvikio's threads and thresholds for reads and writes.

    Concurrent calls share one scope: the first call changes the settings, and the end of the last restores them. A
    number of threads or a threshold that a user has set is kept (``KVIKIO_NTHREADS``, ``KVIKIO_GDS_THRESHOLD``; for
    threads also ``kvikio.defaults.set``). The settings affect kvikio only, not the native core's threads.
    """
    global _users, _scope
    import kvikio.defaults

    with _lock:
        if _users == 0:
            changes = _changed_settings(kvikio.defaults)
            _scope = kvikio.defaults.set(changes) if changes else None
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0 and _scope is not None:
                _scope.__exit__(None, None, None)
                _scope = None


def _changed_settings(defaults: ModuleType) -> dict[str, int]:
    """Return the settings to change, without equal ones: setting the number of threads makes a new pool."""
    changes = {}
    # Below its threshold kvikio reads on the calling thread, one read after another.
    if defaults.get("gds_threshold") != 0 and "KVIKIO_GDS_THRESHOLD" not in os.environ:
        changes["gds_threshold"] = 0
    threads = read_threads(defaults.get("num_threads"))
    if threads != defaults.get("num_threads"):
        changes["num_threads"] = threads
    return changes


def read_threads(current: int) -> int:
    """Return the number of kvikio's threads for reads and writes; `current`, if a user has set it."""
    if current != _DEFAULT_THREADS or any(os.environ.get(name) for name in _NTHREADS_VARIABLES):
        return current
    cores = usable_cores()
    return min(_MAX_THREADS, cores - _FREE_CORES if cores > 2 * _FREE_CORES else cores)
