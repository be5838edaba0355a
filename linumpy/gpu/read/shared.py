"""The readers that all callers of a process share, one for each device."""

from __future__ import annotations

import atexit
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from linumpy.gpu.read.reader import Reader

_readers: dict[tuple[int | str, bool], Reader] = {}
#: Calls that are using a reader, also one that was released in the meantime.
_users: Counter[Reader] = Counter()
_lock = threading.Lock()


@contextmanager
def shared_reader(device: int | str, *, direct: bool = False) -> Iterator[Reader]:
    """Use the reader of a device that all callers of this process share; it is made when it is first needed."""
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
            is_over = not _users[reader]
            if is_over:
                del _users[reader]
                is_over = reader not in _readers.values()
        if is_over:
            reader.close()


def release() -> None:
    """Close the readers that this process shares, and give back their memory; the next read makes new ones.

    Reads of other threads that are under way are finished; the last of them closes its reader.
    """
    with _lock:
        readers = [reader for reader in _readers.values() if reader not in _users]
        _readers.clear()
    for reader in readers:
        reader.close()


def _end() -> None:
    """At the end of the process threads that still read are not waited for."""
    with _lock:
        readers = {*_readers.values(), *_users}
        _readers.clear()
    for reader in readers:
        reader.close()


def _forget() -> None:
    """In a child process, which has none of its parent's threads."""
    global _lock
    _lock = threading.Lock()
    _readers.clear()
    _users.clear()


atexit.register(_end)
os.register_at_fork(after_in_child=_forget)
