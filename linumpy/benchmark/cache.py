"""Take files out of the page cache, and see whether they left.

In: paths of files. Out: which part of their pages the kernel still holds. It needs no root and touches no other
file. It knows this machine's cache only: the disk, a file server or the host of a virtual machine may keep its own.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np


def drop(files: Iterable[Path]) -> None:
    """Write the files' dirty pages to the disk and ask the kernel to forget the rest.

    This is the system call behind ``kvikio.drop_file_page_cache`` too.
    """
    for file in files:
        with open(file, "rb") as opened:
            os.fdatasync(opened.fileno())  # a dirty page cannot be dropped
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_part(files: Iterable[Path]) -> float | None:
    """Return which part of the files' pages is in the page cache, 0 to 1.

    Returns
    -------
    float or None
        None where the kernel does not tell: it answers only for files that the caller may write.
    """
    held = pages = 0
    for file in files:
        if not os.access(file, os.W_OK):
            return None
        here, total = _resident(file)
        held, pages = held + here, pages + total
    return held / pages if pages else 0.0


def _resident(file: Path) -> tuple[int, int]:
    """Count a file's pages in memory, and all of them, with mincore(2)."""
    size = file.stat().st_size
    if size == 0:
        return 0, 0
    total = -(-size // mmap.PAGESIZE)
    seen = (ctypes.c_ubyte * total)()
    # A private map, so that ctypes may take its address; nothing is written and no page is touched.
    with open(file, "rb") as opened, mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_COPY) as mapped:
        first = ctypes.c_char.from_buffer(mapped)
        try:
            if _libc().mincore(ctypes.addressof(first), ctypes.c_size_t(size), seen) != 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(file))
        finally:
            del first  # the map cannot be closed while ctypes points into it
    return int(np.count_nonzero(np.frombuffer(bytes(seen), np.uint8) & 1)), total


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_ubyte)]
    return libc
