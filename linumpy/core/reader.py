"""Jobs of the native core: regions of arrays, read into host memory or to a device by the core's own threads.

In: layouts, and regions with the addresses of their outputs as arrays of numbers. Out: :class:`CoreJob` or
:class:`CoreJobs`, to wait for. Errors: :class:`~linumpy.errors.CoreUnavailableError` without a core; a job returns the
reason why it failed. No Python runs in the core's threads, except for reads by GPUDirect Storage and requests to object
stores.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from linumpy.core import native
from linumpy.core.records import array_record, exception_of, look_records
from linumpy.io.looks import MetadataLook
from linumpy.plan.layout import ArrayLayout

RegionColumns = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""n regions as columns of int64: index of the array in a list, (n,); start and stop in voxels, each (n, rank); strides
of the output in bytes, (n, rank); address of the output, (n,)."""
Pointers = ctypes.Array[ctypes.c_void_p]
"""The core's handles of jobs; null until the jobs are submitted."""

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


class CoreReader:
    """Reads regions of Zarr arrays; several threads may call it.

    Parameters
    ----------
    threads : int
        Number of threads among which work is divided; the threads belong to the process.
    device : Device, optional
        Record of the device that holds the outputs; by default outputs are in host memory.

    Raises
    ------
    CoreUnavailableError
        The native core cannot be used.
    RuntimeError
        The core cannot start a reader; the message gives the reason.
    """

    def __init__(self, threads: int, device: native.Device | None = None) -> None:
        self._library = native.library()
        self._process = os.getpid()
        self._device = device  # keeps alive the function in it that the core calls for direct reads
        reason = ctypes.create_string_buffer(256)
        self._pointer = self._library.quick.lc_reader_new(threads, _INDEX_NBYTES, device, reason)
        if not self._pointer:
            raise RuntimeError(f"the native core could not be started: {reason.value.decode(errors='replace')}")
        # By the id of the layout, which stays alive as long as its entry.
        self._records: OrderedDict[int, tuple[ArrayLayout, native.Array]] = OrderedDict()
        self._lock = threading.Lock()
        self._abandoned: dict[int | None, object] = {}  # jobs that nobody waits for, with their outputs
        self._releasing = threading.Lock()
        self.is_closing = False

    def give_memory(self, slabs: int, kept: int = 0, kept_nbytes: int = 0) -> None:
        """Give the core its device memory before the first batch.

        Parameters
        ----------
        slabs : int
            Address of the memory for slabs.
        kept, kept_nbytes : int
            Address and bytes of the memory for kept chunks; 0 for none.
        """
        self._library.quick.lc_reader_memory(self._pointer, slabs, kept, kept_nbytes)

    def submit(
        self,
        layouts: Sequence[ArrayLayout],
        template: native.Batch,
        regions: RegionColumns,
        outputs: Sequence[object],
        *,
        one_job: bool = False,
        on_device: native.OnDevice | None = None,
        ready: object = None,
    ) -> list[CoreJob]:
        """Submit regions of arrays of one geometry.

        Parameters
        ----------
        layouts : sequence of ArrayLayout
            The arrays, with equal :attr:`~linumpy.plan.layout.ArrayLayout.geometry`.
        template : Batch
            Fields common to all regions: see :func:`~linumpy.core.records.batch_record`. The caller keeps it.
        regions : tuple of numpy.ndarray of int64
            See :data:`RegionColumns`.
        outputs : sequence
            For each job the object that owns the memory of the output; it is kept until the job is over.
        one_job : bool
            Whether all regions are one job; otherwise each region is a job.
        on_device : OnDevice, optional
            For outputs on a device: the kernels, and the event after which outputs may be written.
        ready : object
            Object that owns the records of `on_device`; it is kept, like the layouts, until the jobs are over.

        Raises
        ------
        MemoryError
            There is no memory for the batch.
        """
        record, kept_alive = self._batch(layouts, template, regions, None, on_device)
        record.one_job = one_job
        pointers = (ctypes.c_void_p * (1 if one_job else record.region_count))()
        # Jobs are created before they are submitted: an interrupt right after that must not free outputs that the core
        # writes to.
        jobs = [CoreJob(self, pointers, n, output, (ready, layouts)) for n, output in enumerate(outputs)]
        assert len(jobs) == len(pointers)
        self._queue(record, pointers)
        del kept_alive  # the core has copied the records
        return jobs

    def submit_together(
        self,
        layouts: Sequence[ArrayLayout],
        template: native.Batch,
        regions: RegionColumns,
        output: object,
        *,
        looks: Sequence[MetadataLook | None] | None = None,
        on_device: native.OnDevice | None = None,
        ready: object = None,
    ) -> CoreJobs:
        """Submit regions, each as a job, to wait for all of them together.

        Parameters
        ----------
        layouts, template, regions, on_device, ready
            As for :meth:`submit`.
        output : object
            Object that owns the memory of all outputs; it is kept until the jobs are over.
        looks : sequence of MetadataLook or None, optional
            Stamps of the metadata files of each array. The core compares them when it plans. If a file has changed, the
            jobs of the array fail with :class:`~linumpy.errors.StaleLayoutError`.

        Raises
        ------
        MemoryError
            As for :meth:`submit`.
        """
        record, kept_alive = self._batch(layouts, template, regions, looks, on_device)
        jobs = CoreJobs(self, (ctypes.c_void_p * record.region_count)(), output, (ready, layouts))
        self._queue(record, jobs.pointers)
        del kept_alive
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
        if self._abandoned:
            self._release_abandoned()
        while state := quick.lc_submit(self._pointer, batch, pointers):
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
        self._release_abandoned()
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
        self._release_abandoned()

    def release(self, pointer: int | None, output: object) -> None:
        """Release a job for which nobody waits any more; keep its output as long as the core may write to it."""
        if os.getpid() != self._process:
            return
        if self._library.quick.lc_job_done(pointer):
            self._library.quick.lc_job_release(pointer)
        else:
            self._abandoned[pointer] = output  # until a later call of this reader finds the job over

    def release_all(self, pointers: Pointers, output: object) -> None:
        """Release jobs that were submitted together; see :meth:`release`."""
        if os.getpid() == self._process and self._library.quick.lc_jobs_over(pointers, len(pointers)):
            self._library.quick.lc_jobs_release(pointers, len(pointers))
            return
        for pointer in pointers:
            self.release(pointer, output)

    def _release_abandoned(self) -> None:
        """Release the abandoned jobs that are over by now."""
        if not self._releasing.acquire(blocking=False):
            return  # another thread releases them
        try:
            for pointer in list(self._abandoned):
                if self._library.quick.lc_job_done(pointer):
                    del self._abandoned[pointer]
                    self._library.quick.lc_job_release(pointer)
        finally:
            self._releasing.release()

    def __del__(self) -> None:
        if os.getpid() == self._process and getattr(self, "_pointer", None):
            self.close()
            self._library.quick.lc_reader_delete(self._pointer)


class CoreJob:
    """One job of a reader; it is over when its output is complete, or when it has failed or was cancelled.

    Attributes
    ----------
    output : object
        Object that owns the memory of the output.
    """

    __slots__ = ("_number", "_pointers", "_reader", "_ready", "output")

    def __init__(self, reader: CoreReader, pointers: Pointers, number: int, output: Any, ready: object = None) -> None:
        self._reader, self._pointers, self._number, self.output, self._ready = reader, pointers, number, output, ready

    @property
    def _pointer(self) -> int | None:
        """The core's handle; None until the job is submitted."""
        pointer: int | None = self._pointers[self._number]
        return pointer

    def done(self) -> bool:
        """Return whether the job is over."""
        return bool(self._reader._library.quick.lc_job_done(self._pointer))

    def wait(self) -> None:
        """Wait until the job is over, while Python handles signals.

        Raises
        ------
        RuntimeError
            The interpreter is ending, and the job was not finished.
        """
        wait = self._reader._library.waiting.lc_wait_job
        while not self.done():
            if wait(self._pointer, _WAIT_SECONDS) < 0:
                raise RuntimeError("the interpreter is ending, and the job was not finished")
        self._ready = None

    def cancel(self) -> bool:
        """Cancel the job; return False if it is over already."""
        return bool(self._reader._library.quick.lc_job_cancel(self._pointer))

    def report(self) -> native.Report:
        """Return counts and times of the job, which must be over."""
        report = native.Report()
        self._reader._library.quick.lc_job_report(self._pointer, report)
        return report

    def error(self, layout: ArrayLayout) -> BaseException | None:
        """Return the exception for the job, which must be over; None if it did not fail."""
        return self._reader.error_of(self._pointer, layout)

    def __del__(self) -> None:
        if (pointer := self._pointer) is not None:
            self._reader.release(pointer, (self.output, self._ready))


class CoreJobs:
    """Jobs of a reader that are waited for together, numbered as their regions.

    Attributes
    ----------
    pointers : Pointers
        The core's handles.
    output : object
        Object that owns the memory of the outputs.
    """

    __slots__ = ("_reader", "_ready", "output", "pointers")

    def __init__(self, reader: CoreReader, pointers: Pointers, output: Any, ready: object) -> None:
        self._reader, self.pointers, self.output, self._ready = reader, pointers, output, ready

    def done(self) -> bool:
        """Return whether all jobs are over, without releasing Python's lock."""
        return bool(self._reader._library.quick.lc_jobs_over(self.pointers, len(self.pointers)))

    def wait(self) -> None:
        """Wait until all jobs are over, while Python handles signals; if they are over, keep Python's lock.

        Raises
        ------
        RuntimeError
            The interpreter is ending, and the jobs were not finished.
        """
        if self.done():
            return
        wait = self._reader._library.waiting.lc_wait_jobs
        while not (state := wait(self.pointers, len(self.pointers), _WAIT_SECONDS)):
            pass
        if state < 0:
            raise RuntimeError("the interpreter is ending, and the jobs were not finished")

    def failed(self) -> list[int]:
        """Return the numbers of the jobs that have failed; all jobs must be over."""
        quick, failed, first = self._reader._library.quick, [], 0
        while (number := quick.lc_jobs_failed(self.pointers, len(self.pointers), first)) >= 0:
            failed.append(number)
            first = number + 1
        return failed

    def error(self, number: int, layout: ArrayLayout) -> BaseException | None:
        """Return the exception for the job of a number, which must be over; None if it did not fail."""
        return self._reader.error_of(self.pointers[number], layout)

    def cancel(self) -> None:
        """Cancel all jobs that are not over."""
        for pointer in self.pointers:
            self._reader._library.quick.lc_job_cancel(pointer)

    def __del__(self) -> None:
        if len(self.pointers) and self.pointers[0] is not None:
            self._reader.release_all(self.pointers, (self.output, self._ready))
