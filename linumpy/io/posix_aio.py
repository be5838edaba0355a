"""Read many pieces of many files in one call: POSIX ``lio_listio`` of the C library.

One call queues a whole batch, and threads of the C library carry it out without Python's lock. A read through Python,
kvikio's too, costs 15 to 30 µs of the calling thread, which with small chunks is more than the read itself.

In: file descriptors, offsets, addresses of host memory. Out: how many bytes each got. Errors: none are raised for a
read that fails; its count says so. Where the C library has no such call, :func:`why_unavailable` says so.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
from typing import Any

import numpy as np

_LIO_WAIT = 0  # also the code of a read, LIO_READ

# struct aiocb of glibc on 64-bit Linux; the test in why_unavailable() notices if it is another.
_CONTROL = np.dtype(
    {
        "names": ["descriptor", "opcode", "address", "nbytes", "error", "result", "offset"],
        "formats": ["i4", "i4", "u8", "u8", "i4", "i8", "i8"],
        "offsets": [0, 4, 16, 24, 112, 120, 128],
        "itemsize": 168,
    }
)


class _Init(ctypes.Structure):
    """Struct aioinit of glibc."""

    _fields_ = [
        (name, ctypes.c_int) for name in ("threads", "num", "locks", "usedba", "debug", "numusers", "idle", "r")
    ]


@functools.cache
def why_unavailable() -> str:
    """Say why :func:`read_batch` cannot be used here; empty if it can. Tries it once on a small file in memory."""
    machine, library = platform.machine(), platform.libc_ver()[0]
    if machine not in ("x86_64", "aarch64") or library != "glibc":
        return f"glibc on x86_64 or aarch64 is needed, this is {library or 'another C library'} on {machine}"
    try:
        descriptor = os.memfd_create("linumpy")
    except (AttributeError, OSError) as error:
        return f"no file in memory to try it on ({error})"
    try:
        content = np.arange(5000, dtype=np.uint32).view(np.uint8)
        os.write(descriptor, content.tobytes())
        got = np.zeros(9000, np.uint8)
        pieces = np.array([[4000, 0, 3000], [100, 4001, 2999], [19000, 7500, 1500]])  # offset, place, bytes
        counts = read_batch(
            np.full(3, descriptor), got.ctypes.data + pieces[:, 1], pieces[:, 2], pieces[:, 0], retry=False
        )
        right = (counts == [3000, 2999, 1000]).all() and all(
            (got[place : place + count] == content[offset : offset + count]).all()
            for (offset, place, _), count in zip(pieces.tolist(), counts.tolist(), strict=True)
        )
        return "" if right else "lio_listio gave other bytes than were asked for"
    except (AttributeError, OSError) as error:
        return f"the C library has no usable lio_listio ({error})"
    finally:
        os.close(descriptor)


@functools.cache
def _library() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    return library if hasattr(library, "lio_listio") else ctypes.CDLL("librt.so.1", use_errno=True)


@functools.cache
def set_threads(count: int) -> None:
    """Set how many threads read at once, for the whole process.

    The C library takes the number only before the first batch, that of :func:`why_unavailable` included; later calls
    change nothing.
    """
    if platform.libc_ver()[0] == "glibc" and hasattr(_library(), "aio_init"):
        _library().aio_init(ctypes.byref(_Init(threads=count, num=64, idle=1)))


def read_batch(
    descriptors: np.ndarray, addresses: np.ndarray, nbytes: np.ndarray, offsets: np.ndarray, *, retry: bool = True
) -> np.ndarray:
    """Read all pieces, in parallel, and wait for them.

    Parameters
    ----------
    descriptors : numpy.ndarray of int, (n,)
        Files. Pieces with the same number are read one after another; ``os.dup`` gives another number.
    addresses : numpy.ndarray of int, (n,)
        Where in host memory each piece goes. The caller keeps that memory alive and untouched.
    nbytes, offsets : numpy.ndarray of int, (n,)
        How much of the file to read, from which byte on.
    retry : bool
        Whether pieces that came short are read again, one by one: the call may lack resources for a moment.

    Returns
    -------
    numpy.ndarray of int64, (n,)
        Bytes read, fewer than asked for at the end of a file; a negative number is minus an ``errno``.
    """
    control = np.zeros(len(descriptors), _CONTROL)
    control["descriptor"], control["address"], control["nbytes"], control["offset"] = (
        descriptors,
        addresses,
        nbytes,
        offsets,
    )
    pointers = control.ctypes.data + np.arange(len(control), dtype=np.uint64) * _CONTROL.itemsize
    _library().lio_listio(_LIO_WAIT, ctypes.c_void_p(pointers.ctypes.data), len(control), None)
    _wait_for_stragglers(control, pointers)
    counts = np.where(control["error"] != 0, -control["error"].astype(np.int64), control["result"])
    if retry:
        for row in np.flatnonzero(counts != nbytes).tolist():
            counts[row] = _read_again(*(int(a[row]) for a in (descriptors, addresses, nbytes, offsets)))
    return counts


def _wait_for_stragglers(control: np.ndarray, pointers: np.ndarray) -> None:
    """Wait on, where a signal ended the call before its reads were complete: they still write into the memory."""
    while True:
        waiting = np.ascontiguousarray(pointers[control["error"] == errno.EINPROGRESS])
        if not len(waiting):
            return
        _library().aio_suspend(ctypes.c_void_p(waiting.ctypes.data), len(waiting), None)


def _read_again(descriptor: int, address: int, nbytes: int, offset: int) -> int:
    memory = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
    done = 0
    try:
        while done < nbytes:
            got = os.preadv(descriptor, [memory[done:]], offset + done)
            if got == 0:
                break
            done += got
    except OSError as error:
        return -(error.errno or errno.EIO)
    return done
