"""Read many pieces of many files in one call: POSIX ``lio_listio`` of the C library.

One call queues a whole batch, and threads of the C library carry it out without Python's lock. A read through Python,
kvikio's too, costs 15 to 30 µs of the calling thread, which with small chunks is more than the read itself.

In: file descriptors, offsets, addresses of host memory. Out: how many bytes each got. Errors: none are raised for a
read that fails; its count says so. Where the C library has no such call, :func:`why_unavailable` says so.

The threads of the C library do not exist in a forked child, and the library does not notice: it would queue reads that
nothing carries out. A child forked after the first batch therefore reads with ``preadv`` from threads of its own.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

Result = TypeVar("Result")

_LIO_READ = 0
# With LIO_WAIT, a signal ends the call while its list of waiting requests, which lies on its stack, is still in use.
_LIO_NOWAIT = 1
_SIGEV_NONE = 1

# struct aiocb of glibc on 64-bit Linux; the test in why_unavailable() notices if it is another.
_CONTROL = np.dtype(
    {
        "names": ["descriptor", "opcode", "address", "nbytes", "notify", "error", "result", "offset"],
        "formats": ["i4", "i4", "u8", "u8", "i4", "i4", "i8", "i8"],
        "offsets": [0, 4, 16, 24, 44, 112, 120, 128],
        "itemsize": 168,
    }
)
#: Seconds between two tries to wait for reads where memory has ended.
_LOOK_AGAIN = 0.01
#: Threads of a batch in a forked child.
_CHILD_THREADS = 16


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
    # A signal handler may raise in the main thread at any time; in another thread the reads keep their memory.
    return _in_a_thread(_why_unusable)


def _why_unusable() -> str:
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


def _in_a_thread(function: Callable[[], Result]) -> Result:
    with ThreadPoolExecutor(1, "linumpy-read") as pool:
        return pool.submit(function).result()


@functools.cache
def _library() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    return library if hasattr(library, "lio_listio") else ctypes.CDLL("librt.so.1", use_errno=True)


_has_read = _has_lost_threads = False


def _after_fork() -> None:
    global _has_lost_threads
    _has_lost_threads = _has_read


os.register_at_fork(after_in_child=_after_fork)


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
    global _has_read
    if _has_lost_threads:
        return read_by_threads(descriptors, addresses, nbytes, offsets)
    _has_read = True
    control = np.zeros(len(descriptors), _CONTROL)
    control["descriptor"], control["address"], control["nbytes"], control["offset"] = (
        descriptors,
        addresses,
        nbytes,
        offsets,
    )
    control["opcode"], control["notify"] = _LIO_READ, _SIGEV_NONE
    pointers = control.ctypes.data + np.arange(len(control), dtype=np.uint64) * _CONTROL.itemsize
    waiting = np.empty(len(control), bool)
    _library().lio_listio(_LIO_NOWAIT, ctypes.c_void_p(pointers.ctypes.data), len(control), None)
    while True:
        try:
            _wait(control["error"], pointers, waiting)
            break
        except MemoryError:  # the library's threads write into `control` and to the addresses until all have ended
            time.sleep(_LOOK_AGAIN)
    counts = np.where(control["error"] != 0, -control["error"].astype(np.int64), control["result"])
    if retry:
        for row in np.flatnonzero(counts != nbytes).tolist():
            counts[row] = read_now(*(int(a[row]) for a in (descriptors, addresses, nbytes, offsets)))
    return counts


def _wait(errors: np.ndarray, pointers: np.ndarray, waiting: np.ndarray) -> None:
    """Wait for all reads. A signal ends ``aio_suspend`` early, which leaves nothing behind: then it is called again.

    No array is made for it: where memory has ended, the reads are under way all the same. `waiting` is overwritten.
    """
    first, from_last = pointers.ctypes.data, waiting[::-1]
    while np.equal(errors, errno.EINPROGRESS, out=waiting).any():
        # One request at a time, the last one first, since most of the others are complete by then: to wait for any of
        # n requests takes a time of n at each call.
        row = len(waiting) - 1 - int(from_last.argmax())
        _library().aio_suspend(ctypes.c_void_p(first + pointers.itemsize * row), 1, None)
    if len(pointers):
        # It takes the lock under which the threads note their results: from here on all that they wrote is seen.
        _library().aio_error(ctypes.c_void_p(int(pointers[0])))


def read_by_threads(
    descriptors: np.ndarray, addresses: np.ndarray, nbytes: np.ndarray, offsets: np.ndarray
) -> np.ndarray:
    """Do what :func:`read_batch` does, by threads of Python."""
    columns = [np.asarray(column).tolist() for column in (descriptors, addresses, nbytes, offsets)]
    with ThreadPoolExecutor(min(_CHILD_THREADS, max(1, len(descriptors))), "linumpy-read") as pool:
        return np.fromiter(pool.map(read_now, *columns), np.int64, len(descriptors))


def read_now(descriptor: int, address: int, nbytes: int, offset: int) -> int:
    """Read one piece; return the bytes read, fewer only at the end of the file, or minus an ``errno``."""
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
