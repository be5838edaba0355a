"""Limits that transfers of this process share: open files, host memory, threads.

A transfer is a read by zarr-python, or a write by kvikio; the native core has limits of its own. It holds its
:class:`Share` during a ``with`` block. Transfers wait in order of arrival until enough is free. A transfer within a
transfer of the same thread does not wait and gets its minimum. A transfer gets its minimum even beyond the total if no
other transfer runs.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields

from linumpy.device import call_after_fork, machine_memory, usable_cores

#: File descriptors that are reserved for everything else in the process.
_SPARE_FILES = 64
#: Limit of open files if the system sets none.
_MANY_FILES = 2**20
#: Buffers of all transfers together take at most the machine's memory divided by this number.
_MEMORY_DIVISOR = 4
#: Threads of all transfers together, for each core of the machine.
_THREADS_PER_CORE = 2


@dataclass(frozen=True)
class Share:
    """Resources of a transfer.

    - `descriptors`: file descriptors, several for a file that is opened several times.
    - `host_nbytes`: bytes of buffers in host memory.
    """

    descriptors: int = 0
    host_nbytes: int = 0
    threads: int = 0

    def covers(self, other: Share) -> bool:
        """Return whether this share has enough of each resource that `other` needs: that is above 0 there."""
        return all(free >= needed for free, needed in zip(self._values(), other._values(), strict=True) if needed)

    def part(self, minimum: Share, maximum: Share) -> Share:
        """Return half of this share, within the bounds; the other half is for the next transfers."""
        bounds = zip(self._values(), minimum._values(), maximum._values(), strict=True)
        return Share(*(min(high, max(low, free // 2)) for free, low, high in bounds))

    def _values(self) -> tuple[int, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))


class Budget:
    """A total of resources, of which transfers hold shares.

    - `total`: returns the total. Called for each transfer, since the limit of open files can change.
    - `open_files`: returns the number of descriptors that are open in the process, also those of its transfers.
    """

    def __init__(self, total: Callable[[], Share], open_files: Callable[[], int]) -> None:
        self._total, self._open_files = total, open_files
        self.reset()

    def total(self) -> Share:
        """Return the resources that all transfers together may use."""
        return self._total()

    def reset(self) -> None:
        """Forget all shares, in a child process, which has none of the threads that held them."""
        self._changed = threading.Condition()
        self._held: dict[object, Share] = {}
        self._queue: deque[object] = deque()
        self._local = threading.local()
        self._others = 0

    @contextmanager
    def take(self, minimum: Share, maximum: Share) -> Iterator[Share]:
        """Hold a share between `minimum` and `maximum` during a block; wait before it until `minimum` is free."""
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
            self._changed.notify_all()  # the next in the queue may find enough free, too
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
        # A transfer may have fewer files open than its share has. So the open files of the rest of the process are
        # counted while no transfer runs. During transfers the count only rises: if more files are open than all shares
        # have, the excess belongs to the rest of the process.
        opened = self._open_files()
        self._others = max(self._others, opened - held.descriptors) if self._held else opened
        return Share(
            total.descriptors - self._others - held.descriptors,
            total.host_nbytes - held.host_nbytes,
            total.threads - held.threads,
        )


def _open_files() -> int:
    """Return the number of open descriptors of this process; an estimate where the system does not list them."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return _SPARE_FILES


def _process_total() -> Share:
    files = _MANY_FILES
    with suppress(ImportError):  # Windows has no such limit
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        files = files if limit == resource.RLIM_INFINITY else limit
    return Share(files - _SPARE_FILES, _memory() // _MEMORY_DIVISOR, _THREADS_PER_CORE * usable_cores())


@functools.cache
def _memory() -> int:
    """Return the bytes of memory of this machine, or of the container that the process runs in."""
    machine = machine_memory()
    try:
        with open("/sys/fs/cgroup/memory.max") as file:
            return min(machine, int(file.read()))
    except (OSError, ValueError):  # no such group, or "max"
        return machine


#: The budget of this process.
PROCESS = Budget(_process_total, _open_files)
call_after_fork(PROCESS.reset)
