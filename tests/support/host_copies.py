"""Count what comes from the device to the host: every copy that CuPy makes of an array goes through one method."""

import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import linumpy

_HERE = str(Path(linumpy.__file__).parent)
#: Where a result may leave the device.
WRITERS = tuple(f"{_HERE}/write/{one}" for one in ("writer.py", "chunks.py", "regions.py", "device_chunks.py"))


@dataclass
class HostCopies:
    """Bytes of every copy: of those that a writer made, and of the others with the line that asked for each."""

    written: list = field(default_factory=list)
    others: list = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, nbytes, frame):
        asked = ""
        while frame is not None:
            name = frame.f_code.co_filename
            if name in WRITERS:
                with self._lock:
                    self.written.append(nbytes)
                return
            if not asked and name.startswith(_HERE) and not name.endswith("/device.py"):
                asked = f"{name.removeprefix(_HERE)}:{frame.f_lineno}"
            frame = frame.f_back
        with self._lock:
            self.others.append((nbytes, asked))


@contextmanager
def counted_host_copies():
    """Count inside the block, in all threads."""
    import cupy

    plain, copies = cupy.ndarray.get, HostCopies()

    def get(self, *arguments, **options):
        copies.add(self.nbytes, sys._getframe(1))
        return plain(self, *arguments, **options)

    cupy.ndarray.get = get
    try:
        yield copies
    finally:
        del cupy.ndarray.get
        assert cupy.ndarray.get is plain
