"""What all reads of this process may use at the same time: open files, host memory, decoding threads.

In: the minimum that a read needs and the maximum that it can use. Out: its :class:`Share`, held during a ``with``
block. Reads wait in order of arrival while others hold too much. A nested read of the same thread does not wait and
gets its minimum. A read that runs alone gets at least its minimum, even beyond the total. No errors are raised.
"""

from __future__ import annotations

import functools
import os
import resource
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

#: Descriptors reserved for everything else in the process.
_SPARE_FILES = 64
#: Limit of open files if the process has none.
_MANY_FILES = 2**20
#: Buffers of reads may take one part in so many of the machine's memory; most of it is pinned.
_MEMORY_DIVISOR = 4
#: Decoding threads for each core. One read takes at most one for each core, so that a second read can run beside it.
_THREADS_PER_CORE = 2


@dataclass(frozen=True)
class Share:
    """Resources of a read.

    Attributes
    ----------
    descriptors : int
        Open files, duplicates included.
    host_nbytes : int
        Bytes of buffers in host memory.
    threads : int
        Threads that decode.
    """

    descriptors: int = 0
    host_nbytes: int = 0
    threads: int = 0

    def covers(self, other: Share) -> bool:
        """Say whether this share has enough of everything in `other`."""
        return all(own >= needed for own, needed in zip(self._values(), other._values(), strict=True) if needed)

    def part(self, minimum: Share, maximum: Share) -> Share:
        """Return half of this share, within bounds: the other half lets the next reads run beside this one."""
        bounds = zip(self._values(), minimum._values(), maximum._values(), strict=True)
        return Share(*(min(high, max(low, free // 2)) for free, low, high in bounds))

    def _values(self) -> tuple[int, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))


class Budget:
    """Shares of one total.

    Parameters
    ----------
    total : callable
        Returns the total. Called for each read, since the limit of open files can change.
    open_files : callable
        Returns the number of descriptors that are open in the process, including those of its reads.
    """

    def __init__(self, total: Callable[[], Share], open_files: Callable[[], int]) -> None:
        self._total, self._open_files = total, open_files
        self.reset()

    def total(self) -> Share:
        """Return what all reads together may use."""
        return self._total()

    def reset(self) -> None:
        """Forget all shares: a child process has none of its parent's threads."""
        self._changed = threading.Condition()
        self._held: dict[object, Share] = {}
        self._queue: deque[object] = deque()
        self._local = threading.local()
        self._others = 0

    @contextmanager
    def take(self, minimum: Share, maximum: Share) -> Iterator[Share]:
        """Hold a share between `minimum` and `maximum` during a block."""
        ticket, thread = object(), self._local
        depth = getattr(thread, "depth", 0)
        thread.depth = depth + 1
        try:
            yield self._admit(ticket, minimum, minimum if depth else maximum, waits=not depth)
        finally:
            thread.depth = depth
            self._release(ticket)

    def _admit(self, ticket: object, minimum: Share, maximum: Share, *, waits: bool) -> Share:
        with self._changed:
            self._queue.append(ticket)
            while waits and (self._queue[0] is not ticket or (self._held and not self._free().covers(minimum))):
                self._changed.wait()
            self._held[ticket] = share = self._free().part(minimum, maximum)
            self._queue.remove(ticket)
            self._changed.notify_all()  # the next in the queue may run beside this one
            return share

    def _release(self, ticket: object) -> None:
        with self._changed:
            self._held.pop(ticket, None)
            if ticket in self._queue:  # interrupted while it waited
                self._queue.remove(ticket)
            self._changed.notify_all()

    def _free(self) -> Share:
        total, shares = self._total(), self._held.values()
        held = Share(*map(sum, zip(*(share._values() for share in shares), strict=True)))
        # Reads may have fewer files open than they hold. So the descriptors of everything else are counted while there
        # are no reads; during reads that count only rises, when more files are open than the reads hold.
        opened = self._open_files()
        self._others = max(self._others, opened - held.descriptors) if self._held else opened
        return Share(
            total.descriptors - self._others - held.descriptors,
            total.host_nbytes - held.host_nbytes,
            total.threads - held.threads,
        )


def _open_files() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return _SPARE_FILES


def _process_total() -> Share:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    files = _MANY_FILES if files == resource.RLIM_INFINITY else files
    return Share(files - _SPARE_FILES, _memory() // _MEMORY_DIVISOR, _THREADS_PER_CORE * len(os.sched_getaffinity(0)))


@functools.cache
def _memory() -> int:
    """Return the bytes of memory of this machine, or of the container that the process runs in."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/sys/fs/cgroup/memory.max") as file:
            return min(machine, int(file.read()))
    except (OSError, ValueError):  # no such group, or "max"
        return machine


#: The budget of this process.
PROCESS = Budget(_process_total, _open_files)
os.register_at_fork(after_in_child=PROCESS.reset)
