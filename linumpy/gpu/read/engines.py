"""Engines that carry out the reads of a slab.

:class:`CuFileEngine` is kvikio's ``CuFile.pread``, into device memory (GPUDirect Storage) or host memory.
:class:`PosixEngine` reads into host memory in batches. Without GPUDirect Storage kvikio reads with POSIX calls too,
but each read passes through Python by itself; a batch does not, and reads 512 KiB chunks 2.5 times as fast.

In: open files, a slab, slots. Out: bytes read, or an error, for each read.
"""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

import numpy as np

from linumpy.gpu.read.kvikio_settings import transfer_settings, wanted_threads
from linumpy.gpu.read.staging import Slots
from linumpy.io import posix_aio
from linumpy.plan.read.slabs import Slab

#: One task of a read. Smaller ones spread a read over more threads.
TASK_NBYTES = 2**20
#: Reads longer than this, on average, go through kvikio: they are few enough that Python does not matter, and kvikio
#: keeps its threads busy from one slab to the next.
LONG_READ_NBYTES = 2 * 2**20


class File(Protocol):
    """An open file."""

    def fileno(self) -> int:
        """Return the file descriptor."""

    def close(self) -> None:
        """Close it."""


class Pending(Protocol):
    """Reads under way."""

    def wait(self) -> list[int | BaseException]:
        """Wait for all of them; for each read the bytes it got, or why it failed. Raises nothing itself."""


class Engine(Protocol):
    """Opens files and reads from them; a context manager around all reads of one call."""

    name: str
    descriptors_per_file: int
    #: Descriptors that the files of a slab may take, duplicates included; set by the reader.
    descriptors_per_slab: int

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: object) -> None: ...

    def open(self, path: str) -> File:
        """Open a file for reading."""

    def start(self, files: list[Any], slab: Slab, slots: Slots, slot: int) -> Pending:
        """Start the reads of a slab from their files; None in place of a file is no read."""


class CuFileEngine:
    """Reads through kvikio."""

    descriptors_per_slab = 0  # it makes no duplicates
    descriptors_per_file = 2  # kvikio opens every file twice, with and without O_DIRECT

    def __init__(self, *, direct: bool) -> None:
        import kvikio

        self.open = kvikio.CuFile
        self.name = f"kvikio CuFile.pread into {'device' if direct else 'pinned host'} memory"
        # For GDS, or where somebody set it, tasks are of kvikio's own size.
        self._task = None if direct or "KVIKIO_TASK_SIZE" in os.environ else TASK_NBYTES
        self._scope = contextlib.ExitStack()

    def __enter__(self) -> CuFileEngine:
        self._scope.enter_context(transfer_settings())
        return self

    def __exit__(self, *error: object) -> None:
        self._scope.close()

    def start(self, files: list[Any], slab: Slab, slots: Slots, slot: int) -> Pending:
        """Start a ``pread`` for each read."""
        pending = _Futures()
        rows = zip(files, slots.buffers(slot, slab), slab.nbytes.tolist(), slab.offset.tolist(), strict=True)
        try:
            for file, buffer, nbytes, offset in rows:
                pending.futures.append(None if file is None else file.pread(buffer, nbytes, offset, self._task))
        except BaseException:
            pending.wait()  # those that were started write into the slot
            raise
        return pending


class _Futures:
    def __init__(self) -> None:
        self.futures: list[Any] = []

    def wait(self) -> list[int | BaseException]:
        return [0 if future is None else self._get(future) for future in self.futures]

    @staticmethod
    def _get(future: Any) -> int | BaseException:
        try:
            return future.get()
        except BaseException as error:  # an interrupt too: the reads behind this one must still be waited for
            return error


class PosixFile:
    """An open file with as many descriptors as reads go on in it at once."""

    __slots__ = ("_further", "descriptor")

    def __init__(self, path: str) -> None:
        self._further: list[int] | None = None  # a list for every small chunk would be felt
        # O_NONBLOCK means nothing to a file, but without it a pipe in its place would be waited for.
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)

    def fileno(self) -> int:
        """Return the file descriptor."""
        return self.descriptor

    def descriptors(self, count: int) -> list[int]:
        """Return that many descriptors of the file."""
        further = self._further = self._further or []
        while len(further) < count - 1:
            further.append(os.dup(self.descriptor))
        return [self.descriptor, *further[: count - 1]]

    def close(self) -> None:
        """Close all descriptors."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        while self._further:
            os.close(self._further.pop())

    def __del__(self) -> None:
        # An interrupt may come between opening a file and noting it.
        if hasattr(self, "descriptor"):
            self.close()


class PosixEngine:
    """Reads in batches into host memory."""

    name = "POSIX lio_listio into pinned host memory"
    descriptors_per_file = 1
    descriptors_per_slab = 2**62

    def __init__(self, threads: int) -> None:
        self._threads = threads
        # The call that queues a batch also waits for it, so it needs a thread of its own. One: two batches at a time
        # measured slower, since all reads queue at one lock of the C library.
        self._caller = ThreadPoolExecutor(1, "linumpy-read")

    def __enter__(self) -> PosixEngine:
        posix_aio.set_threads(self._threads)
        return self

    def __exit__(self, *error: object) -> None:
        self._caller.shutdown(wait=True)

    open = staticmethod(PosixFile)

    def start(self, files: list[Any], slab: Slab, slots: Slots, slot: int) -> Pending:
        """Queue one batch with all reads of the slab, cut into tasks."""
        rows, within = _tasks(np.array([0 if file is None else 1 for file in files]) * slab.nbytes)
        each = self.descriptors_per_slab // max(1, len({id(file) for file in files}))
        descriptors = _spread(files, rows, max(1, min(self._threads, each)))
        nbytes = np.minimum(slab.nbytes[rows] - within, TASK_NBYTES)
        addresses = slots.addresses(slot, slab)[rows] + within
        batch = self._caller.submit(posix_aio.read_batch, descriptors, addresses, nbytes, slab.offset[rows] + within)
        return _Batch(batch, rows, len(files))


def _tasks(nbytes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cut reads into tasks: for each task its read, and where in the read it begins."""
    count = -(-nbytes // TASK_NBYTES)
    rows = np.repeat(np.arange(len(nbytes)), count)
    first = np.cumsum(count) - count
    return rows, (np.arange(len(rows)) - first[rows]) * TASK_NBYTES


def _spread(files: list[Any], rows: np.ndarray, threads: int) -> np.ndarray:
    """Give each task a descriptor: reads from one descriptor wait for each other."""
    # Small chunks: a file and a task each. Their numbers alone do not tell: one file may have two, a missing one none.
    if np.array_equal(rows, np.arange(len(files))) and len({id(file) for file in files}) == len(files):
        return np.array([file.descriptor for file in files], np.int64)
    tasks: dict[int, list[int]] = {}
    for task, row in enumerate(rows.tolist()):
        tasks.setdefault(id(files[row]), []).append(task)
    descriptors = np.empty(len(rows), np.int64)
    by_id = {id(file): file for file in files}
    for key, mine in tasks.items():
        if len(mine) == 1:
            descriptors[mine[0]] = by_id[key].descriptor
        else:
            descriptors[mine] = np.resize(by_id[key].descriptors(min(len(mine), threads)), len(mine))
    return descriptors


class _Batch:
    def __init__(self, batch: Future[np.ndarray], rows: np.ndarray, reads: int) -> None:
        self._batch, self._rows, self._reads = batch, rows, reads

    def wait(self) -> list[int | BaseException]:
        interrupt = self._wait_through()
        failure = interrupt or self._batch.exception()
        if failure is not None:
            return [failure] * self._reads
        counts = self._batch.result()
        total = np.bincount(self._rows, np.maximum(counts, 0), minlength=self._reads)
        results: list[int | BaseException] = total.astype(np.int64).tolist()
        for task in np.flatnonzero(counts < 0).tolist():
            number = -int(counts[task])
            results[self._rows[task]] = OSError(number, os.strerror(number))
        return results

    def _wait_through(self) -> BaseException | None:
        """Wait to the end even if interrupted, since the batch writes into the slot until then."""
        interrupt = None
        while not self._batch.done():
            try:
                wait([self._batch])
            except BaseException as error:
                interrupt = error
        return interrupt


def choose_engine(*, direct: bool, read_nbytes: float, encoded: bool = False) -> Engine:
    """Choose what reads.

    Parameters
    ----------
    direct : bool
        Whether reads go to device memory by GPUDirect Storage, which is kvikio's.
    read_nbytes : float
        Bytes of a stored object that are read, on average.
    encoded : bool
        Whether chunks are decoded, which takes longer than reading them: then the time that kvikio needs to set up its
        threads, about 2 ms a call, counts for more than what it saves on long reads.
    """
    if direct or (read_nbytes > LONG_READ_NBYTES and not encoded):
        return CuFileEngine(direct=direct)
    threads = wanted_threads()
    posix_aio.set_threads(threads)  # before why_unavailable(), whose trial is the batch that settles the number
    return CuFileEngine(direct=direct) if posix_aio.why_unavailable() else PosixEngine(threads)
