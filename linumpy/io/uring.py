"""io_uring without liburing: a ring, and a thread that carries out work on it.

One ``io_uring_enter`` hands hundreds of operations (open, statx, read, close) to the kernel, and threads of the kernel
("io-wq") carry out those that may block. Python's lock is free all that time, and no Python runs for a single file.

In: lists of submission entries. Out: the result of each entry, as of the system call: a count or minus an ``errno``.
Errors: :class:`OSError` where the kernel has no io_uring, does not allow it, or is older than 5.19.

Layouts and constants are those of ``<linux/io_uring.h>`` (man pages ``io_uring_setup(2)``, ``io_uring_enter(2)``,
``io_uring_register(2)``) and ``<linux/stat.h>`` (``statx(2)``).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import queue
import threading
import weakref
from collections.abc import Generator
from typing import Any, Protocol

import numpy as np

# System calls have the same numbers on all architectures since Linux 5.0, alpha apart.
_SETUP, _ENTER, _REGISTER = 425, 426, 427
_CQSIZE, _CLAMP, _SUBMIT_ALL, _COOP_TASKRUN = 1 << 3, 1 << 4, 1 << 7, 1 << 8  # IORING_SETUP_*
_FEAT_SINGLE_MMAP, _FEAT_NODROP, _FEAT_SUBMIT_STABLE = 1 << 0, 1 << 1, 1 << 2  # IORING_FEAT_*
_OFF_RINGS, _OFF_ENTRIES = 0, 0x10000000  # IORING_OFF_SQ_RING, IORING_OFF_SQES
_GETEVENTS = 1  # IORING_ENTER_GETEVENTS
_MAX_WORKERS = 19  # IORING_REGISTER_IOWQ_MAX_WORKERS

OPENAT, CLOSE, STATX, READ = 18, 19, 21, 22  # IORING_OP_*
DRAIN, HARDLINK = 1 << 1, 1 << 3  # IOSQE_IO_*
AT_FDCWD, AT_EMPTY_PATH = -100, 0x1000
#: STATX_TYPE, MODE, MTIME, INO, SIZE.
STATX_MASK = 0x1 | 0x2 | 0x40 | 0x100 | 0x200

#: struct io_uring_sqe. `offset` is also the buffer of statx, `flags32` the flags of openat and statx, `length` the mask
#: of statx.
ENTRY = np.dtype(
    {
        "names": ["opcode", "flags", "fd", "offset", "address", "length", "flags32", "user_data"],
        "formats": ["u1", "u1", "i4", "u8", "u8", "u4", "u4", "u8"],
        "offsets": [0, 1, 4, 8, 16, 24, 28, 32],
        "itemsize": 64,
    }
)
#: struct io_uring_cqe.
_COMPLETION = np.dtype([("user_data", "u8"), ("result", "i4"), ("flags", "u4")])
#: The members of struct statx that tell one version of a file from another.
STATX_BUFFER = np.dtype(
    {
        "names": ["mode", "inode", "size", "seconds", "nanoseconds"],
        "formats": ["u2", "u8", "u8", "i8", "u4"],
        "offsets": [28, 32, 40, 112, 120],
        "itemsize": 256,
    }
)
#: Entries of the submission queue; the completion queue has twice as many.
ENTRIES = 4096
#: Pieces of work that a thread has under way: while files of one are opened, those of others are read.
_DEPTH = 3
#: Entries of a step of work, at most: the completion queue must hold the results of all that is under way.
MAX_STEP = 2 * ENTRIES // (_DEPTH + 1)

_rings: weakref.WeakSet[Ring] = weakref.WeakSet()


class _Setup(ctypes.Structure):
    """Struct io_uring_params; `sq` is struct io_sqring_offsets, `cq` is struct io_cqring_offsets, in words."""

    _fields_ = [(n, ctypes.c_uint32) for n in ("sq_entries", "cq_entries", "flags", "cpu", "idle", "features", "wq")]
    _fields_ += [("reserved", ctypes.c_uint32 * 3), ("sq", ctypes.c_uint32 * 10), ("cq", ctypes.c_uint32 * 10)]


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def _syscall(number: int, *arguments: Any) -> int:
    result = _libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"io_uring: {os.strerror(code)}")
    return result


class Ring:
    """A submission queue and a completion queue, shared with the kernel. One thread uses it.

    Parameters
    ----------
    workers : int
        Threads of the kernel that this thread's operations may use, at most.
    """

    def __init__(self, workers: int) -> None:
        setup = _Setup(flags=_CQSIZE | _CLAMP | _SUBMIT_ALL | _COOP_TASKRUN, cq_entries=2 * ENTRIES)
        self._fd = _syscall(_SETUP, ctypes.c_uint(ENTRIES), ctypes.byref(setup))
        self._mappings: list[tuple[int, int]] = []
        try:
            needed = _FEAT_SINGLE_MMAP | _FEAT_NODROP | _FEAT_SUBMIT_STABLE
            if setup.features & needed != needed or setup.sq_entries != ENTRIES:
                raise OSError(errno.ENOSYS, "io_uring: this kernel's is too old or too small")
            self._map(setup)
            limits = (ctypes.c_uint32 * 2)(workers, workers)  # of bounded and of unbounded work
            _syscall(_REGISTER, ctypes.c_int(self._fd), ctypes.c_uint(_MAX_WORKERS), limits, ctypes.c_uint(2))
        except BaseException:
            self.close()
            raise
        #: Operations that were pushed and whose results have not been taken.
        self.under_way = 0
        self._unsubmitted = 0
        self._between = threading.Lock()
        _rings.add(self)

    def _map(self, setup: _Setup) -> None:
        size = max(setup.sq[6] + 4 * setup.sq_entries, setup.cq[5] + _COMPLETION.itemsize * setup.cq_entries)
        rings = self._mapping(size, _OFF_RINGS)
        self._entries = self._mapping(ENTRY.itemsize * setup.sq_entries, _OFF_ENTRIES).view(ENTRY)
        words = rings[: size // 4 * 4].view(np.uint32)
        order = setup.sq[6] // 4  # the array that says which entry comes when
        words[order : order + setup.sq_entries] = np.arange(setup.sq_entries)
        self._tail, self._head, self._end = (
            words[byte // 4 : byte // 4 + 1] for byte in (setup.sq[1], setup.cq[0], setup.cq[1])
        )
        end = setup.cq[5] + _COMPLETION.itemsize * setup.cq_entries
        self._completions = rings[setup.cq[5] : end].view(_COMPLETION)

    def _mapping(self, nbytes: int, offset: int) -> np.ndarray:
        # Not by Python's mmap, which keeps a duplicate of the descriptor that a forked child could not close.
        writable, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | mmap.MAP_POPULATE
        address = _libc.mmap(None, nbytes, writable, flags, self._fd, offset)
        if address == ctypes.c_void_p(-1).value:
            raise OSError(ctypes.get_errno(), "io_uring: its queues cannot be mapped")
        self._mappings.append((address, nbytes))
        shared_bytes: Any = (ctypes.c_uint8 * nbytes).from_address(address)
        return np.frombuffer(shared_bytes, np.uint8)

    def push(self, entries: np.ndarray) -> None:
        """Put entries into the queue; chains of linked entries are complete in one call, of at most `ENTRIES`."""
        if self._unsubmitted + len(entries) > ENTRIES:
            self.enter(0)
        tail = int(self._tail[0])
        first = tail % ENTRIES
        until = min(len(entries), ENTRIES - first)
        self._entries[first : first + until] = entries[:until]
        self._entries[: len(entries) - until] = entries[until:]
        # No barrier: the kernel reads this in a system call of the same thread.
        self._tail[0] = (tail + len(entries)) & 0xFFFFFFFF
        self._unsubmitted += len(entries)
        self.under_way += len(entries)

    def enter(self, wait: int) -> None:
        """Submit what was pushed, and wait until there are `wait` results."""
        while True:
            try:
                numbers = map(ctypes.c_uint, (self._fd, self._unsubmitted, wait, _GETEVENTS))
                done = _syscall(_ENTER, *numbers, None, ctypes.c_size_t(0))
            except OSError as error:
                if error.errno in (errno.EINTR, errno.EAGAIN, errno.EBUSY):
                    continue
                raise
            self._unsubmitted -= done
            if not self._unsubmitted:
                return
            # The kernel had no memory for more, maybe in the middle of a chain: the rest of it waits for its beginning.
            self._entries[(int(self._tail[0]) - self._unsubmitted) % ENTRIES]["flags"] |= DRAIN

    def take(self) -> np.ndarray:
        """Take the results that are there; fields `user_data` and `result`."""
        with self._between:
            head, end = int(self._head[0]), int(self._end[0])
        # Results are read after their number: to release a lock and take it again orders the two on every machine.
        with self._between:
            rows = np.arange(head, head + ((end - head) & 0xFFFFFFFF)) % len(self._completions)
            results = self._completions[rows]
        self._head[0] = end
        self.under_way -= len(results)
        return results

    def close(self) -> None:
        """Give the ring back; no operation is under way, unless it is the parent's, in a forked child."""
        descriptor, self._fd = self._fd, -1
        if descriptor >= 0:
            os.close(descriptor)
        nothing: Any = np.empty(0)
        self._entries = self._completions = self._tail = self._head = self._end = nothing
        while self._mappings:
            _libc.munmap(*self._mappings.pop())


def _after_fork() -> None:
    for ring in list(_rings):
        ring.close()  # the parent's ring reads into the parent's memory


os.register_at_fork(after_in_child=_after_fork)

#: Steps of a piece of work: each yields entries that may run at the same time, chains apart, and gets their results
#: (int32, in order) when all have completed.
Steps = Generator[np.ndarray, np.ndarray, None]


class Work(Protocol):
    """A bounded piece of work."""

    @property
    def descriptors(self) -> int:
        """Files that it has open at the same time, at most."""

    def steps(self) -> Steps:
        """Start the work; a step has 1 to `MAX_STEP` entries."""

    def complete(self, error: BaseException | None) -> None:
        """Take note that all of it has been carried out, or why not."""


class _UnderWay:
    """A piece of work and the results of its current step."""

    steps: Steps
    results: np.ndarray
    left = 0

    def __init__(self, work: Work) -> None:
        self.work = work


class RingThread:
    """A thread that takes work from a queue and keeps several pieces under way on its ring.

    Parameters
    ----------
    work : queue.SimpleQueue
        :class:`Work`, shared with other threads; None ends the thread.
    workers : int
        Threads of the kernel that carry out what it submits.
    descriptors : int
        Files that it may have open at the same time. No work may need more.

    Raises
    ------
    OSError
        If there can be no ring.
    """

    def __init__(self, work: queue.SimpleQueue[Work | None], workers: int, descriptors: int) -> None:
        self._queue, self._workers, self._descriptors = work, workers, descriptors
        self._under_way: dict[int, _UnderWay] = {}
        self._waiting: Work | None = None
        self._ended = False
        ready: queue.SimpleQueue[OSError | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="linumpy-io_uring", daemon=True)
        self._thread.start()
        failure = ready.get()
        if failure is not None:
            raise failure

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def _run(self, ready: queue.SimpleQueue[OSError | None]) -> None:
        try:
            self._ring = Ring(self._workers)
        except OSError as error:
            ready.put(error)
            return
        ready.put(None)
        while True:
            try:
                if not self._admit():
                    break
                self._ring.enter(min((one.left for one in self._under_way.values()), default=0))
                self._advance()
            except BaseException as error:
                self._give_up(error)
        self._ring.close()

    def _admit(self) -> bool:
        """Start what there is and fits; with nothing under way, wait for it. False after the end."""
        while len(self._under_way) < _DEPTH:
            if self._waiting is None and not self._ended:
                try:
                    self._waiting = self._queue.get(block=not self._under_way)
                except queue.Empty:
                    break
                self._ended = self._waiting is None
            work = self._waiting
            held = sum(one.work.descriptors for one in self._under_way.values())
            if work is None or held + work.descriptors > self._descriptors:
                break
            number = next(n for n in range(_DEPTH) if n not in self._under_way)
            self._under_way[number], self._waiting = _UnderWay(work), None
            self._step(number, None)
        return bool(self._under_way) or not self._ended

    def _step(self, number: int, results: np.ndarray | None) -> None:
        """Go on with a piece of work that has the results of its last step, None at first."""
        one = self._under_way[number]
        try:
            if results is None:
                one.steps = one.work.steps()
            entries = one.steps.send(results)  # type: ignore[arg-type]
        except BaseException as error:
            del self._under_way[number]
            one.work.complete(None if isinstance(error, StopIteration) else error)
            return
        entries["user_data"] = np.arange(len(entries), dtype=np.uint64) + np.uint64(number << 32)
        one.results, one.left = np.empty(len(entries), np.int32), len(entries)
        self._ring.push(entries)

    def _advance(self) -> None:
        taken = self._ring.take()
        owner = (taken["user_data"] >> np.uint64(32)).astype(np.int64)
        for number in np.unique(owner).tolist():
            one, mine = self._under_way[number], taken[owner == number]
            one.results[(mine["user_data"] & np.uint64(0xFFFFFFFF)).astype(np.int64)] = mine["result"]
            one.left -= len(mine)
            if not one.left:
                self._step(number, one.results)

    def _give_up(self, error: BaseException) -> None:
        """After an error of this thread, such as one of memory: let everything end, then tell."""
        while self._ring.under_way:
            with contextlib.suppress(Exception):
                self._ring.enter(1)
                self._ring.take()
        while self._under_way:
            self._under_way.popitem()[1].work.complete(error)
