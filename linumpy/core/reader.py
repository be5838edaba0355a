"""Jobs of the native core: regions of arrays, read into host memory or to a device by the core's own threads.

In: layouts, and regions with the addresses of their outputs as arrays of numbers. Out: :class:`CoreJobs`, to
wait for. Errors: :class:`~linumpy.errors.CoreUnavailableError` without a core; a job returns the
reason why it failed. No Python runs in the core's threads, except for reads by GPUDirect Storage and requests to object
stores.

``_HELD`` owns the outputs of all jobs of the process until the core has said that they are over, wherever an interrupt
(Ctrl-C) comes to the thread that submits, waits for or deletes jobs.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from linumpy.core import native
from linumpy.core.records import array_record, exception_of, look_records
from linumpy.errors import MetadataError
from linumpy.io.paths import MetadataLook
from linumpy.plan.layout import ArrayLayout

RegionColumns = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""n regions as columns of int64: index of the array in a list, (n,); start and stop in voxels, each (n, rank); strides
of the output in bytes, (n, rank); address of the output, (n,)."""
Pointers = ctypes.Array[ctypes.c_void_p]
"""The core's handles of jobs; null until the jobs are submitted."""

#: Maximum number of reads of slow storage in flight in the process, and the environment variable that replaces it.
_READS = 256
READS_VARIABLE = "LINUMPY_READS"
#: Environment variable; with the value "0" no request is sent a second time because its response is late.
HEDGING_VARIABLE = "LINUMPY_HEDGING"
#: Maximum bytes of the shard indexes that a reader keeps.
_INDEX_NBYTES = 64 * 2**20
#: Maximum number of layouts whose records a reader keeps.
_KEPT_LAYOUTS = 2048
#: Seconds of one waiting call: Python handles signals between two calls.
_WAIT_SECONDS = 0.1


def takes(layout: ArrayLayout) -> bool:
    """Return whether the core reads a supported array of this layout.

    The core decodes neither filters before the compressor nor compressed entries of a ZIP file, nor, without the
    library of a decoder, chunks that need it.
    """
    if layout.entries is not None and layout.entries.is_compressed:
        return False
    if native.why_not_decoded(layout.chain) is not None:
        return False
    return layout.chain is None or not layout.chain.host_filter


def max_reads() -> int:
    """Return the maximum number of reads in flight; ``ValueError`` if the environment variable is no such number."""
    text = os.environ.get(READS_VARIABLE) or str(_READS)
    if not text.isdecimal() or not 1 <= int(text) <= 4096:
        raise ValueError(f"{READS_VARIABLE}={text!r}: pass a number of reads from 1 to 4096")
    return int(text)


class CoreReader:
    """Reads regions of Zarr arrays; several threads may call it.

    `threads`: number of threads among which work is divided; the threads belong to the process. `device`: record of the
    device that holds the outputs; by default outputs are in host memory.

    `CoreUnavailableError`: The native core cannot be used. `RuntimeError`: The core cannot start a reader; the message
    gives the reason.
    """

    def __init__(self, threads: int, device: native.Device | None = None) -> None:
        self._library = native.library()
        self._process = os.getpid()
        self._device = device  # keeps alive the function in it that the core calls for direct reads
        reason = ctypes.create_string_buffer(256)
        self._library.quick.lc_set_reads(max_reads())
        hedging = os.environ.get(HEDGING_VARIABLE) or "1"
        if hedging not in ("0", "1"):
            raise ValueError(f"{HEDGING_VARIABLE}={hedging!r}: pass 0 or 1")
        self._library.quick.lc_set_hedging(hedging == "1")
        self._pointer = self._library.quick.lc_reader_new(threads, _INDEX_NBYTES, device, reason)
        if not self._pointer:
            raise RuntimeError(f"the native core could not be started: {reason.value.decode(errors='replace')}")
        # By the id of the layout, which stays alive as long as its entry.
        self._records: OrderedDict[int, tuple[ArrayLayout, native.Array]] = OrderedDict()
        self._lock = threading.Lock()
        self.is_closing = False

    def give_memory(self, slabs: int, kept: int = 0, kept_nbytes: int = 0) -> None:
        """Give the core its device memory before the first batch.

        `slabs`: address of the memory for slabs. `kept`, `kept_nbytes`: address and bytes of the memory for kept
        chunks; 0 for none.
        """
        self._library.quick.lc_reader_memory(self._pointer, slabs, kept, kept_nbytes)

    def keep_on_host(self, nbytes: int) -> None:
        """Give a core without a device memory for decoded chunks, before the first batch."""
        self._kept = np.empty(nbytes, np.uint8)  # the system provides the memory as chunks come
        self.give_memory(0, self._kept.ctypes.data, nbytes)

    def submit(
        self,
        layouts: Sequence[ArrayLayout],
        template: native.Batch,
        regions: RegionColumns,
        owners: Sequence[object],
        *,
        looks: Sequence[MetadataLook | None] | None = None,
        on_device: native.OnDevice | None = None,
        ready: object = None,
    ) -> CoreJobs:
        """Submit regions of arrays of one geometry, each as a job.

        `layouts`: the arrays, with equal :attr:`~linumpy.plan.layout.ArrayLayout.geometry`. `template`: fields common
        to all regions: see :func:`~linumpy.core.records.batch_record`. The caller keeps it. `regions` (tuple of
        numpy.ndarray of int64): see :data:`RegionColumns`. `owners`: for each job, or one for all, the object that owns
        the memory of the output; it is kept until the job, or all jobs, are over. `looks`: stamps of the metadata files
        of each array. The core compares them when it plans. If a file has changed, the jobs of the array fail with
        :class:`~linumpy.errors.StaleLayoutError`. `on_device`: for outputs on a device: the kernels, and the event
        after which outputs may be written. `ready`: object that owns the records of `on_device`; it is kept, like the
        layouts, until the jobs are over.

        `MemoryError`: There is no memory for the batch.
        """
        record, kept_alive = self._batch(layouts, template, regions, looks, on_device)
        # Jobs are created before they are submitted: an interrupt right after that must not free outputs that the core
        # writes to.
        owned: list[object] = [(owner, ready, layouts) for owner in owners]
        jobs = CoreJobs(self, (ctypes.c_void_p * record.region_count)(), owned)
        self._queue(record, jobs.pointers)
        del kept_alive  # the core has copied the records
        return jobs

    def _batch(
        self,
        layouts: Sequence[ArrayLayout],
        template: native.Batch,
        regions: RegionColumns,
        looks: Sequence[MetadataLook | None] | None,
        on_device: native.OnDevice | None,
    ) -> tuple[native.Batch, object]:
        """Return the record of a batch, and an object that owns the memory that the record points to."""
        array_index, start, *_ = regions
        # One array for all columns, since NumPy takes a microsecond to return an address.
        columns = np.concatenate(regions, axis=None, dtype=np.int64)
        with self._lock:
            records = [self._record(layout) for layout in layouts]
        arrays = (native.Array * len(records))(*records)
        all_looks = [look_records(look) for look in looks or () if look is not None]
        if all_looks:
            next_looks = iter(all_looks)
            for array, look in zip(arrays, looks or (), strict=True):
                if look is not None:
                    array.looks = next(next_looks)
                    array.look_count = len(look.files)
        batch = native.Batch.from_buffer_copy(template)
        batch.arrays, batch.array_count = arrays, len(records)
        if count := len(array_index):
            matrix_nbytes = 8 * start.size
            batch.region_count = count
            batch.array = ctypes.addressof(ctypes.c_char.from_buffer(columns.data))
            batch.start = batch.array + 8 * count
            batch.stop = batch.start + matrix_nbytes
            batch.strides = batch.stop + matrix_nbytes
            batch.address = batch.strides + matrix_nbytes
        if on_device is not None:
            batch.on_device = ctypes.pointer(on_device)
        return batch, (columns, all_looks, records)

    def _queue(self, batch: native.Batch, pointers: Pointers) -> None:
        """Submit a batch; wait only while the core's queue is full."""
        quick, waiting = self._library.quick, self._library.waiting
        if _DELETED or _DROPPED:
            _release_deleted()
        while state := quick.lc_submit(self._pointer, batch, pointers):
            if state == 3:
                raise MetadataError("a chunk, or the index of a shard, has more than 2**60 bytes")
            if state != 1:
                raise MemoryError(f"{batch.region_count} regions could not be submitted: no memory")
            waiting.lc_wait_capacity(self._pointer, _WAIT_SECONDS)

    def _record(self, layout: ArrayLayout) -> native.Array:
        """Return the record of an array; a number of records is kept for later calls."""
        kept = self._records.get(id(layout))
        if kept is None:
            kept = self._records[id(layout)] = (layout, array_record(layout))
            if len(self._records) > _KEPT_LAYOUTS:
                self._records.popitem(last=False)
        return kept[1]

    def error_of(self, pointer: int | None, layout: ArrayLayout) -> BaseException | None:
        """Return the exception for a job that is over; None if the job did not fail."""
        error = native.Error()
        self._library.quick.lc_job_error(pointer, error)
        return None if error.code == native.OK else exception_of(error, layout)

    def stats(self) -> native.Stats:
        """Return counts and times since the reader was made."""
        _release_deleted()
        stats = native.Stats()
        self._library.quick.lc_reader_stats(self._pointer, stats)
        return stats

    def close(self) -> None:
        """Cancel the jobs that no thread has begun, and wait for the others; in a child process, do nothing."""
        if os.getpid() != self._process:
            return
        self.is_closing = True
        self._library.quick.lc_reader_close(self._pointer)
        while not self._library.waiting.lc_wait_closed(self._pointer, _WAIT_SECONDS):
            pass
        _release_deleted()

    def __del__(self) -> None:
        if os.getpid() == self._process and getattr(self, "_pointer", None):
            self.close()
            self._library.quick.lc_reader_delete(self._pointer)


class _Key(weakref.ref["CoreJobs"]):
    """Weak reference to a batch, as a key: those of batches that had one address, one after another, differ."""

    __slots__ = ()
    __hash__ = object.__hash__
    __eq__ = object.__eq__


class CoreJobs:
    """Jobs that are submitted together, numbered as their regions; created before that, deleted when nothing refers.

    They are waited for together, or one by one as :meth:`job`.

    `pointers`: the core's handles of the jobs. `owned`: for each job, or for all jobs together, the objects that the
    core uses, such as the output; None if it is over.
    """

    __slots__ = ("__weakref__", "key", "owned", "pointers", "quick", "reader")

    def __init__(self, reader: CoreReader, pointers: Pointers, owned: list[object]) -> None:
        self.reader, self.pointers, self.owned, self.quick = reader, pointers, owned, reader._library.quick
        self.key = key = _Key(self, _DELETED.add)
        _HELD[key] = reader, pointers, owned

    def __del__(self) -> None:
        if hasattr(self, "key"):  # not if the constructor was interrupted
            _release(self.key)  # at once if the jobs are over; else a later call does it

    def job(self, number: int, output: Any) -> CoreJob:
        """Return one of the jobs, to wait for by itself; the jobs must have an owner each."""
        return CoreJob(self, number, output)

    def done(self) -> bool:
        """Return whether all jobs are over, without releasing Python's lock."""
        if not self.quick.lc_jobs_over(self.pointers, len(self.pointers)):
            return False
        self.owned.clear()
        return True

    def wait(self) -> float:
        """Wait until all jobs are over, while Python handles signals; if they are over, keep Python's lock.

        Returns the seconds that the thread then waited for the lock.

        `RuntimeError`: The interpreter is ending, and the jobs were not finished.
        """
        wait, seconds = self.reader._library.waiting.lc_wait_jobs, 0.0
        while not self.done():
            if wait(self.pointers, len(self.pointers), _WAIT_SECONDS) < 0:
                raise RuntimeError("the interpreter is ending, and the jobs were not finished")
            seconds = self.quick.lc_since_wait()
        return seconds

    def failed(self) -> list[int]:
        """Return the numbers of the jobs that have failed; all jobs must be over."""
        failed, first = [], 0
        while (number := self.quick.lc_jobs_failed(self.pointers, len(self.pointers), first)) >= 0:
            failed.append(number)
            first = number + 1
        return failed

    def error(self, number: int, layout: ArrayLayout) -> BaseException | None:
        """Return the exception for the job of a number, which must be over; None if it did not fail."""
        return self.reader.error_of(self.pointers[number], layout)

    def cancel(self) -> None:
        """Cancel all jobs that are not over."""
        for pointer in self.pointers:
            self.quick.lc_job_cancel(pointer)


#: The reader, handles and owned objects of each batch that exists or is not over.
_HELD: dict[_Key, tuple[CoreReader, Pointers, list[object]]] = {}
#: Deleted batches. Weak references add them without running Python, so that no interrupt prevents it.
_DELETED: set[_Key] = set()
#: Jobs that were deleted before they were over, while other jobs of their batches exist.
_DROPPED: set[tuple[_Key, int]] = set()


def _release(key: _Key) -> None:
    """Release the jobs of a batch that is deleted, if all are over; in a child process, drop them."""
    if (held := _HELD.get(key)) is not None:
        reader, pointers, _ = held
        # The core releases a batch once, however often it is asked: an interrupt may come before and after the call.
        if os.getpid() == reader._process and not reader._library.quick.lc_jobs_release(pointers, len(pointers)):
            return
        _HELD.pop(key, None)
    _DELETED.discard(key)


def _release_deleted() -> None:
    """Release deleted jobs that are over by now, and their outputs."""
    for dropped in _DROPPED.copy():
        key, number = dropped
        if (held := _HELD.get(key)) is not None:
            reader, pointers, owned = held
            if not reader._library.quick.lc_job_done(pointers[number]):
                continue
            owned[number] = None
        _DROPPED.discard(dropped)
    for key in _DELETED.copy():
        _release(key)


class CoreJob:
    """One job of a reader; it is over when its output is complete, or when it has failed or was cancelled.

    `output`: object that owns the memory of the output.
    """

    __slots__ = ("_batch", "_number", "output")

    def __init__(self, batch: CoreJobs, number: int, output: Any) -> None:
        self._number, self.output, self._batch = number, output, batch

    @property
    def _pointer(self) -> int | None:
        """The core's handle; None until the job is submitted."""
        pointer: int | None = self._batch.pointers[self._number]
        return pointer

    def done(self) -> bool:
        """Return whether the job is over."""
        batch = self._batch
        if not batch.quick.lc_job_done(batch.pointers[self._number]):
            return False
        batch.owned[self._number] = None
        return True

    def wait(self) -> None:
        """Wait until the job is over, while Python handles signals.

        `RuntimeError`: The interpreter is ending, and the job was not finished.
        """
        while not self.done():
            if self._batch.reader._library.waiting.lc_wait_job(self._pointer, _WAIT_SECONDS) < 0:
                raise RuntimeError("the interpreter is ending, and the job was not finished")

    def cancel(self) -> bool:
        """Cancel the job; return False if it is over already."""
        return bool(self._batch.quick.lc_job_cancel(self._pointer))

    def report(self) -> native.Report:
        """Return counts and times of the job, which must be over."""
        report = native.Report()
        self._batch.quick.lc_job_report(self._pointer, report)
        return report

    def error(self, layout: ArrayLayout) -> BaseException | None:
        """Return the exception for the job, which must be over; None if it did not fail."""
        batch, number = self._batch, self._number
        if batch.quick.lc_jobs_failed(batch.pointers, number + 1, number) < 0:
            return None  # without the record of an error, which takes longer to make
        return batch.reader.error_of(batch.pointers[number], layout)

    def __del__(self) -> None:
        batch = getattr(self, "_batch", None)  # None if the constructor was interrupted
        if batch is not None and batch.owned[self._number] is not None and not self.done():
            _DROPPED.add((batch.key, self._number))
