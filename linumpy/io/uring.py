"""io_uring without liburing: a submission queue and a completion queue, by plain system calls.

One ``io_uring_enter`` hands hundreds of operations (open, statx, read, close) to the kernel, and threads of the kernel
("io-wq") carry out those that may block. Python's lock is free all that time, and no Python runs for a single file.

In: submission entries. Out: the result of each entry, as of the system call: a count or minus an ``errno``. Errors:
:class:`OSError` where the kernel has no io_uring, does not allow it, or is older than 5.19.

Layouts and constants are those of ``<linux/io_uring.h>`` (man pages ``io_uring_setup(2)``, ``io_uring_enter(2)``,
``io_uring_register(2)``) and ``<linux/stat.h>`` (``statx(2)``).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import threading
import weakref
from typing import Any

import numpy as np

# System calls have the same numbers on all architectures since Linux 5.0, alpha apart.
_SETUP, _ENTER, _REGISTER = 425, 426, 427
_CQSIZE, _CLAMP, _SUBMIT_ALL, _COOP_TASKRUN = 1 << 3, 1 << 4, 1 << 7, 1 << 8  # IORING_SETUP_*
_FEAT_SINGLE_MMAP, _FEAT_NODROP, _FEAT_SUBMIT_STABLE = 1 << 0, 1 << 1, 1 << 2  # IORING_FEAT_*
_OFF_RINGS, _OFF_ENTRIES = 0, 0x10000000  # IORING_OFF_SQ_RING, IORING_OFF_SQES
_GETEVENTS = 1  # IORING_ENTER_GETEVENTS
_MAX_WORKERS = 19  # IORING_REGISTER_IOWQ_MAX_WORKERS

OPENAT, CLOSE, STATX, READ = 18, 19, 21, 22  # IORING_OP_*
#: IOSQE_IO_DRAIN, IOSQE_IO_HARDLINK, IOSQE_ASYNC: where they lie in the first word of an entry. Only for work that is
#: asynchronous from its start does the kernel use more than one thread while none of them sleeps.
DRAIN, HARDLINK, ASYNC = 1 << 9, 1 << 11, 1 << 12
AT_FDCWD, AT_EMPTY_PATH = -100, 0x1000
#: STATX_TYPE, MODE, MTIME, INO, SIZE.
STATX_MASK = 0x1 | 0x2 | 0x40 | 0x100 | 0x200
#: Words (uint64) of struct statx.
STATX_WORDS = 32
#: Words of struct io_uring_sqe, which are, the lowest bits first: opcode (8 bits), flags (8), priority (16) and
#: descriptor (32); offset, or the buffer of statx; address of the memory or the path; length or the mask of statx (32)
#: and flags of openat and statx (32); user data; three of no use here.
ENTRY_WORDS = 8
#: Entries of the submission queue; the completion queue has twice as many.
ENTRIES = 4096
_MASK = 0x1 | 0x2 | 0x40 | 0x100 | 0x200
#: Words (uint64) of struct statx.
STATX_WORDS = 32
#: Words of struct io_uring_sqe, which are, the lowest bits first: opcode (8 bits), flags (8), priority (16) and
#: descriptor (32); offset, or the buffer of statx; address of the memory or the path; length or the mask of statx (32)
#: and flags of openat and statx (32); user data; three of no use here.
ENTRY_WORDS = 8
#: Entries of the submission queue; the completion queue has twice as many.
ENTRIES = 4096
#: Entries of a window at most, and of all windows that are under way on a ring: the completion queue must hold them.
MAX_STEP, _MAX_UNDER_WAY = 2048, 6144
#: In place of the result of an entry that is under way.
PENDING = -(2**31)
_MASK = 0xFFFFFFFF
_NUMBERS = np.arange(ENTRIES, dtype=np.uint64)

_rings: weakref.WeakSet[Ring] = weakref.WeakSet()


class _Setup(ctypes.Structure):
    """Struct io_uring_params; `sq` is struct io_sqring_offsets, `cq` is struct io_cqring_offsets, in words."""

    _fields_ = [(n, ctypes.c_uint32) for n in ("sq_entries", "cq_entries", "flags", "cpu", "idle", "features", "wq")]
    _fields_ += [("reserved", ctypes.c_uint32 * 3), ("sq", ctypes.c_uint32 * 10), ("cq", ctypes.c_uint32 * 10)]


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.syscall.restype, _libc.syscall.argtypes = ctypes.c_long, [ctypes.c_long] * 7


def _syscall(number: int, *arguments: int) -> int:
    result: int = _libc.syscall(number, *arguments, *(0,) * (6 - len(arguments)))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"io_uring: {os.strerror(code)}")
    return result


class Ring:
    """A submission queue and a completion queue, shared with the kernel. One thread at a time uses it.

    Parameters
    ----------
    workers : int
        Threads of the kernel that the operations of one thread of this process may use, at most. (All rings of a
        thread share them.)

    Attributes
    ----------
    tail : memoryview of uint32, (1,)
        Number of entries that were ever put into the submission queue; to set it is to put them there.
    head : memoryview of uint32, (1,)
        Number of results that were ever taken from the completion queue; to set it is to take them.
    """

    def __init__(self, workers: int) -> None:
        if sys.byteorder != "little":
            raise OSError(errno.ENOSYS, "io_uring: entries are made for little-endian machines only")
        setup = _Setup(flags=_CQSIZE | _CLAMP | _SUBMIT_ALL | _COOP_TASKRUN, cq_entries=2 * ENTRIES)
        self._fd = _syscall(_SETUP, ENTRIES, ctypes.addressof(setup))
        self._mappings: list[tuple[int, int]] = []
        try:
            needed = _FEAT_SINGLE_MMAP | _FEAT_NODROP | _FEAT_SUBMIT_STABLE
            if setup.features & needed != needed or setup.sq_entries != ENTRIES or setup.cq_entries != 2 * ENTRIES:
                raise OSError(errno.ENOSYS, "io_uring: this kernel's is too old or too small")
            self._map(setup)
            limits = (ctypes.c_uint32 * 2)(workers, workers)  # of bounded and of unbounded work
            _syscall(_REGISTER, self._fd, _MAX_WORKERS, ctypes.addressof(limits), 2)
        except BaseException:
            self.close()
            raise
        self._between = threading.Lock()
        _rings.add(self)

    def _map(self, setup: _Setup) -> None:
        size = max(setup.sq[6] + 4 * setup.sq_entries, setup.cq[5] + 16 * setup.cq_entries)
        rings = self._mapping(size, _OFF_RINGS)
        entries = self._mapping(8 * ENTRY_WORDS * setup.sq_entries, _OFF_ENTRIES)
        self._entries = entries.view(np.uint64).reshape(-1, ENTRY_WORDS)
        words = rings[: size // 4 * 4].view(np.uint32)
        order = setup.sq[6] // 4  # the array that says which entry comes when
        words[order : order + setup.sq_entries] = np.arange(setup.sq_entries)
        # Views of memory, since an element of an array takes three times as long.
        counters = (setup.sq[0], setup.sq[1], setup.cq[0], setup.cq[1])
        self._submitted, self.tail, self.head, self._end = (words[byte // 4 : byte // 4 + 1].data for byte in counters)
        # Struct io_uring_cqe: the two halves of the user data, result, flags.
        end = setup.cq[5] + 16 * setup.cq_entries
        self._completions = rings[setup.cq[5] : end].view(np.int32).reshape(-1, 4)

    def _mapping(self, nbytes: int, offset: int) -> np.ndarray:
        # Not by Python's mmap, which keeps a duplicate of the descriptor that a forked child could not close.
        writable, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | mmap.MAP_POPULATE
        address = _libc.mmap(None, nbytes, writable, flags, self._fd, offset)
        if address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), "io_uring: its queues cannot be mapped")
        self._mappings.append((address, nbytes))
        shared_bytes: Any = (ctypes.c_uint8 * nbytes).from_address(address)
        return np.frombuffer(shared_bytes, np.uint8)

    def _unsubmitted(self) -> int:
        return (self.tail[0] - self._submitted[0]) & _MASK

    def under_way(self) -> int:
        """Count the entries that were put into the queue and whose results were not taken."""
        return (self.tail[0] - self.head[0]) & _MASK

    def has_results(self) -> bool:
        """Say whether there are results to take."""
        return self.head[0] != self._end[0]

    def write(self, entries: np.ndarray, number: int) -> int:
        """Write entries behind those in the queue.

        Parameters
        ----------
        entries : numpy.ndarray of uint64, (n, 8)
            As of `ENTRY_WORDS`, without user data; at most `ENTRIES`. Chains of linked entries are complete.
        number : int
            Less than 2^31; :meth:`take` gives it back.

        Returns
        -------
        int
            What :attr:`tail` must be set to to put them into the queue.
        """
        count = len(entries)
        if self._unsubmitted() + count > ENTRIES:
            self.submit()
        entries[:, 4] = _NUMBERS[:count] + np.uint64(number << 32)
        tail = self.tail[0]
        first = tail % ENTRIES
        until = min(count, ENTRIES - first)
        self._entries[first : first + until] = entries[:until]
        if until < count:
            self._entries[: count - until] = entries[until:]
        return (tail + count) & _MASK

    def submit(self) -> bool:
        """Submit what is in the queue; say whether that was anything."""
        left = self._unsubmitted()
        if not left:
            return False
        while left:
            # No barrier: the kernel reads the queue in a system call of the same thread.
            done = self._enter(left, 0)
            left = self._unsubmitted()
            if left and done:
                # The kernel had no memory for more, maybe in the middle of a chain: the rest waits for its beginning.
                self._entries[self._submitted[0] % ENTRIES, 0] |= np.uint64(DRAIN)
        return True

    def sleep(self, count: int) -> None:
        """Sleep until there are that many results, or a signal comes."""
        self._enter(0, count)

    def _enter(self, submit: int, wait: int) -> int:
        try:
            return _syscall(_ENTER, self._fd, submit, wait, _GETEVENTS)
        except OSError as error:
            if error.errno in (errno.EINTR, errno.EAGAIN, errno.EBUSY):
                return 0
            raise

    def take(self) -> tuple[np.ndarray, int]:
        """Look at the results that are there.

        Returns
        -------
        tuple
            Rows of (index among the entries of one :meth:`write`, its `number`, result, flags), int32; and what
            :attr:`head` must be set to to take them from the queue.
        """
        with self._between:
            head, end = self.head[0], self._end[0]
        # Results are read after their number: to release a lock and take it again orders the two on every machine.
        with self._between:
            first, count = head % len(self._completions), (end - head) & _MASK
            rows = self._completions[first : first + count].copy()
            if len(rows) < count:
                rows = np.concatenate([rows, self._completions[: count - len(rows)]])
        return rows, end

    def close(self) -> None:
        """Give the ring back; no operation is under way, unless it is the parent's, in a forked child."""
        descriptor, self._fd = self._fd, -1
        if descriptor >= 0:
            os.close(descriptor)
        nothing: Any = np.empty(0)
        self._entries = self._completions = self._submitted = self.tail = self.head = self._end = nothing
        while self._mappings:
            _libc.munmap(*self._mappings.pop())


def _after_fork() -> None:
    for ring in list(_rings):
        ring.close()  # the parent's ring reads into the parent's memory


os.register_at_fork(after_in_child=_after_fork)
