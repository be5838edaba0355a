"""The readers that all callers of a process share, one for each device."""

from __future__ import annotations

import atexit
import os
import threading

from linumpy.gpu.read.reader import Reader

_readers: dict[tuple[int | str, bool], Reader] = {}
_readers_lock = threading.Lock()


def shared_reader(device: int | str, *, direct: bool = False) -> Reader:
    """Return the reader of a device that all callers of this process share; it is made when it is first needed."""
    with _readers_lock:
        reader = _readers.get((device, direct))
        if reader is None or reader.is_closed:
            reader = _readers[device, direct] = Reader(device, direct=direct)
        return reader


def release() -> None:
    """Close the readers that this process shares, and give back their memory; the next read makes new ones."""
    with _readers_lock:
        readers = list(_readers.values())
        _readers.clear()
    for reader in readers:
        reader.close()


def _forget() -> None:
    """In a child process, which has none of its parent's threads."""
    global _readers_lock
    _readers_lock = threading.Lock()
    _readers.clear()


atexit.register(release)
os.register_at_fork(after_in_child=_forget)
