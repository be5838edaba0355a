"""The readers that all callers of a process share, one for each device."""

from __future__ import annotations

import atexit
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from linumpy.arrays import ReadDevice
from linumpy.device import call_after_fork
from linumpy.gpu.read.reader import Reader

_readers: dict[tuple[int | str, bool], Reader] = {}
#: Number of calls that use each reader, including readers that were released in the meantime.
_users: Counter[Reader] = Counter()
_lock = threading.Lock()


@contextmanager
def shared_reader(device: ReadDevice, *, direct: bool = False) -> Iterator[Reader]:
    """Use the reader of a device that all callers of this process share; the first use makes it."""
    with _lock:
        reader = _readers.get((device, direct))
        if reader is None or reader.is_closed:
            reader = _readers[device, direct] = Reader(device, direct=direct)
        _users[reader] += 1
    try:
        yield reader
    finally:
        with _lock:
            _users[reader] -= 1
            needs_close = not _users[reader]
            if needs_close:
                del _users[reader]
                needs_close = reader not in _readers.values()
        if needs_close:
            reader.close()


def release() -> None:
    """Close the readers that this process shares, and free their memory; the next read makes new ones.

    This function does not wait for reads of other threads: the last of them closes its reader when it ends.
    """
    with _lock:
        readers = [reader for reader in _readers.values() if reader not in _users]
        _readers.clear()
    for reader in readers:
        reader.close()


def _end() -> None:
    """Close all readers at the end of the process, without waiting for threads that still read."""
    with _lock:
        readers = {*_readers.values(), *_users}
        _readers.clear()
    for reader in readers:
        reader.close()


def _forget() -> None:
    """Forget all readers in a child process, which does not have its parent's threads."""
    global _lock
    _lock = threading.Lock()
    _readers.clear()
    _users.clear()


atexit.register(_end)
call_after_fork(_forget)
