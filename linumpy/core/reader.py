"""Jobs of the native core: regions of arrays, read into host memory or to a device by the core's own threads.

In: layouts, and regions with the addresses of their outputs as arrays of numbers. Out: :class:`CoreJob` records to wait
for. No Python runs in the core's threads, except for reads by GPUDirect Storage and requests to object stores.
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

#: Regions as int64 columns: index of the array, (n,); start and stop in voxels, each (n, rank); strides of the output,
#: in bytes, (n, rank); address of the output, (n,).
RegionColumns = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]
#: The core's handles of jobs, in a ctypes array; null until the jobs are submitted.
Pointers = ctypes.Array[ctypes.c_void_p]

#: Bytes of the shard indexes that a reader keeps.
_INDEX_NBYTES = 64 * 2**20
#: Number of layouts whose records a reader keeps.
_KEPT_LAYOUTS = 2048
#: Seconds of one waiting call: Python handles signals between two calls.
_WAIT_SECONDS = 0.1


def takes(layout: ArrayLayout) -> bool:
    """Say whether the core reads arrays of this layout.

    The core decodes neither filters of numcodecs before a compressor nor compressed entries of a ZIP file.
    """
    if layout.entries is not None and layout.entries.is_compressed:
        return False
    return layout.chain is None or not layout.chain.host_filter


class CoreReader:
    """Reads regions of Zarr arrays; several threads may call it.

    Parameters
    ----------
    threads : int
        Number of threads that work is cut for; the threads belong to the process.
    device : Device, optional
        Memory of the device that holds the outputs; by default outputs are in host memory.

    Raises
    ------
    CoreUnavailableError
        The native core cannot be used.
    """

    def __init__(self, threads: int, device: native.Device | None = None) -> None:
        self._library = native.library()
        self._process = os.getpid()
        self._device = device  # keeps the callback alive that the core reads by
        why = ctypes.create_string_buffer(256)
        self._pointer = self._library.quick.lc_reader_new(threads, _INDEX_NBYTES, device, why)
        if not self._pointer:
            raise RuntimeError(f"the native core could not be started: {why.value.decode(errors='replace')}")
        self._records: OrderedDict[int, tuple[ArrayLayout, native.Array]] = OrderedDict()
        self._lock = threading.Lock()
        self._dropped: dict[int | None, object] = {}  # jobs without a waiting caller, with their outputs
        self._releasing = threading.Lock()
        self.is_closing = False

    def give_memory(self, slabs: int, kept: int = 0, kept_nbytes: int = 0) -> None:
        """Give the core device memory: the address of the slabs, and address and bytes for kept chunks."""
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
            Object that owns the memory of each job's output; kept until the job is over.
        one_job : bool
            Whether all regions are one job.
        on_device : OnDevice, optional
            For outputs on a device: the kernels, and the event after which outputs may be written.
        ready : object
            Object that owns the records of `on_device`; kept, like the layouts, until the jobs are over.
        """
        record, held = self._batch(layouts, template, regions, None, on_device)
        record.one_job = one_job
        pointers = (ctypes.c_void_p * (1 if one_job else record.region_count))()
        # Created before the call: an interrupt right after it must not free outputs that the core writes to.
        jobs = [CoreJob(self, pointers, n, output, (ready, layouts)) for n, output in enumerate(outputs)]
        assert len(jobs) == len(pointers)
        self._queue(record, pointers)
        del held
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
        """Submit regions whose jobs, one for each region, are waited for together; see :meth:`submit`.

        Parameters
        ----------
        layouts, template, regions, on_device, ready
            As for :meth:`submit`.
        output : object
            Object that owns the memory of all outputs; kept until the jobs are over.
        looks : sequence of MetadataLook or None, optional
            Versions of the metadata files of each array. The core compares them when it plans: if a file was replaced,
            the jobs of its array fail with :class:`~linumpy.errors.StaleLayoutError`.
        """
        record, held = self._batch(layouts, template, regions, looks, on_device)
        jobs = CoreJobs(self, (ctypes.c_void_p * record.region_count)(), output, (ready, layouts))
        self._queue(record, jobs.pointers)
        del held
        return jobs

    def _batch(
        self,
        layouts: Sequence[ArrayLayout],
        template: native.Batch,
        regions: RegionColumns,
        looks: Sequence[MetadataLook | None] | None,
        on_device: native.OnDevice | None,
    ) -> tuple[native.Batch, object]:
        """Make the record of a call, and an object that owns the memory that the record points to."""
        # One array for all columns: NumPy takes a microsecond for each address.
        columns = np.concatenate(regions, axis=None, dtype=np.int64)
        with self._lock:
            records = [self._record(layout) for layout in layouts]
        arrays = (native.Array * len(records))(*records)
        held = [look_records(look) for look in looks or () if look is not None]
        if held:
            files = iter(held)
            for array, look in zip(arrays, looks or (), strict=True):
                if look is not None:
                    array.looks = next(files)
                    array.look_count = len(look.files)
        batch = native.Batch.from_buffer_copy(template)
        batch.arrays, batch.array_count = arrays, len(records)
        if count := len(regions[0]):
            cells = 8 * regions[1].size
            batch.region_count = count
            batch.array = first = ctypes.addressof(ctypes.c_char.from_buffer(columns.data))
            batch.start = first = first + 8 * count
            batch.stop = first + cells
            batch.strides = first + 2 * cells
            batch.address = first + 3 * cells
        if on_device is not None:
            batch.on_device = ctypes.pointer(on_device)
        return batch, (columns, held, records)

    def _queue(self, batch: native.Batch, pointers: Pointers) -> None:
        """Submit a batch; waits only while the core's queue is full."""
        quick, waiting = self._library.quick, self._library.waiting
        if self._dropped:
            self._release_dropped()
        while state := quick.lc_submit(self._pointer, batch, pointers):
            if state != 1:
                raise MemoryError(f"{batch.region_count} regions could not be submitted: no memory")
            waiting.lc_wait_capacity(self._pointer, _WAIT_SECONDS)

    def _record(self, layout: ArrayLayout) -> native.Array:
        """Return the record of an array; the records of the last arrays are kept."""
        kept = self._records.get(id(layout))
        if kept is None:
            kept = self._records[id(layout)] = (layout, array_record(layout))
            if len(self._records) > _KEPT_LAYOUTS:
                self._records.popitem(last=False)
        return kept[1]

    def error_of(self, pointer: int | None, layout: ArrayLayout) -> BaseException | None:
        """Return why a job failed, once it is over; None if it did not fail."""
        error = native.Error()
        self._library.quick.lc_job_error(pointer, error)
        return None if error.code == native.OK else exception_of(error, layout)

    def stats(self) -> native.Stats:
        """Return counts and times since the reader was made."""
        self._release_dropped()
        stats = native.Stats()
        self._library.quick.lc_reader_stats(self._pointer, stats)
        return stats

    def close(self) -> None:
        """Cancel queued jobs and finish those under way; in a child process, do nothing."""
        if os.getpid() != self._process:
            return
        self.is_closing = True
        self._library.quick.lc_reader_close(self._pointer)
        while not self._library.waiting.lc_wait_closed(self._pointer, _WAIT_SECONDS):
            pass
        self._release_dropped()

    def drop(self, pointer: int | None, output: object) -> None:
        """Release a job whose caller does not wait; its output is kept as long as the core may write to it."""
        if os.getpid() != self._process:
            return
        if self._library.quick.lc_job_done(pointer):
            self._library.quick.lc_job_release(pointer)
        else:
            self._dropped[pointer] = output  # until a later call of this reader finds the job over

    def drop_all(self, pointers: Pointers, output: object) -> None:
        """Release jobs that were submitted together; see :meth:`drop`."""
        if os.getpid() == self._process and self._library.quick.lc_jobs_over(pointers, len(pointers)):
            self._library.quick.lc_jobs_release(pointers, len(pointers))
            return
        for pointer in pointers:
            self.drop(pointer, output)

    def _release_dropped(self) -> None:
        if not self._releasing.acquire(blocking=False):
            return  # another thread releases them
        try:
            for pointer in list(self._dropped):
                if self._library.quick.lc_job_done(pointer):
                    del self._dropped[pointer]
                    self._library.quick.lc_job_release(pointer)
        finally:
            self._releasing.release()

    def __del__(self) -> None:
        if os.getpid() == self._process and getattr(self, "_pointer", None):
            self.close()
            self._library.quick.lc_reader_delete(self._pointer)


class CoreJob:
    """One job of a reader; over when its last chunk is read, or has failed.

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
        """Say whether the job is over."""
        return bool(self._reader._library.quick.lc_job_done(self._pointer))

    def wait(self) -> None:
        """Wait until the job is over; Python handles signals meanwhile."""
        wait = self._reader._library.waiting.lc_wait_job
        while not self.done():
            if wait(self._pointer, _WAIT_SECONDS) < 0:
                raise RuntimeError("the interpreter is ending, and the job was not finished")
        self._ready = None

    def cancel(self) -> bool:
        """Cancel the job; False if it is over already."""
        return bool(self._reader._library.quick.lc_job_cancel(self._pointer))

    def report(self) -> native.Report:
        """Return counts and times, once the job is over."""
        report = native.Report()
        self._reader._library.quick.lc_job_report(self._pointer, report)
        return report

    def error(self, layout: ArrayLayout) -> BaseException | None:
        """Return why the job failed, once it is over; None if it did not fail."""
        return self._reader.error_of(self._pointer, layout)

    def __del__(self) -> None:
        if (pointer := self._pointer) is not None:
            self._reader.drop(pointer, (self.output, self._ready))


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
        """Say whether all jobs are over; keeps Python's lock."""
        return bool(self._reader._library.quick.lc_jobs_over(self.pointers, len(self.pointers)))

    def wait(self) -> None:
        """Wait until all jobs are over; releases Python's lock only if a job is not."""
        if self.done():
            return
        wait = self._reader._library.waiting.lc_wait_jobs
        while not (state := wait(self.pointers, len(self.pointers), _WAIT_SECONDS)):
            pass
        if state < 0:
            raise RuntimeError("the interpreter is ending, and the jobs were not finished")

    def failed(self) -> list[int]:
        """Return the numbers of the jobs that have failed, once all are over."""
        quick, failed, first = self._reader._library.quick, [], 0
        while (number := quick.lc_jobs_failed(self.pointers, len(self.pointers), first)) >= 0:
            failed.append(number)
            first = number + 1
        return failed

    def error(self, number: int, layout: ArrayLayout) -> BaseException | None:
        """Return why a job failed, once it is over; None if it did not fail."""
        return self._reader.error_of(self.pointers[number], layout)

    def cancel(self) -> None:
        """Cancel all jobs that are not over."""
        for pointer in self.pointers:
            self._reader._library.quick.lc_job_cancel(pointer)

    def __del__(self) -> None:
        if len(self.pointers) and self.pointers[0] is not None:
            self._reader.drop_all(self.pointers, (self.output, self._ready))
