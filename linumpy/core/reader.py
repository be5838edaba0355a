"""Jobs of the native core: regions of arrays, read into host memory or to a device by the core's own threads.

In: layouts, and regions with their outputs as arrays of numbers. Out: :class:`CoreJob` records, which are waited for.
No Python runs in the core's threads, but for reads by GPUDirect Storage and requests to object stores.
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

#: Bytes of the shard indexes that a reader keeps.
_INDEX_NBYTES = 64 * 2**20
#: Layouts whose records are kept.
_LAYOUTS = 2048
#: Seconds after which a wait looks for signals: Python handles them between two calls.
_SLICE = 0.1


def takes(layout: ArrayLayout) -> bool:
    """Say whether the core reads arrays of this layout.

    It undoes no filters of numcodecs before a compressor, and no compression by a ZIP file.
    """
    if layout.entries is not None and layout.entries.is_compressed:
        return False
    return layout.chain is None or not layout.chain.host_filter


class CoreReader:
    """Reads regions of Zarr arrays; for several threads.

    Parameters
    ----------
    threads : int
        Threads that work is cut for; they belong to the process.
    device : Device, optional
        Memory of the device that outputs lie on; by default they lie in host memory.

    Raises
    ------
    CoreUnavailableError
        There is no native core.
    """

    def __init__(self, threads: int, device: native.Device | None = None) -> None:
        self._library = native.library()
        self._process = os.getpid()
        self._device = device  # holds what the core calls to read
        why = ctypes.create_string_buffer(256)
        self._pointer = self._library.quick.lc_reader_new(threads, _INDEX_NBYTES, device, why)
        if not self._pointer:
            raise RuntimeError(f"the native core could not be started: {why.value.decode(errors='replace')}")
        self._records: OrderedDict[int, tuple[ArrayLayout, native.Array]] = OrderedDict()
        self._lock = threading.Lock()
        self._dropped: dict[int, Any] = {}  # jobs without a waiting caller, with their outputs
        self._releasing = threading.Lock()
        self.is_closing = False

    def give_memory(self, slabs: int, kept: int = 0, kept_nbytes: int = 0) -> None:
        """Hand over device memory: the address of the slabs, and of the memory for chunks that are kept."""
        self._library.quick.lc_reader_memory(self._pointer, slabs, kept, kept_nbytes)

    def submit(
        self,
        layouts: Sequence[ArrayLayout],
        template: native.Batch,
        regions: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray],
        outputs: Sequence[Any],
        *,
        one_job: bool = False,
        on_device: native.OnDevice | None = None,
        ready: Any = None,
    ) -> list[CoreJob]:
        """Ask for regions of arrays of one geometry.

        Parameters
        ----------
        layouts : sequence of ArrayLayout
            The arrays, alike in :attr:`~linumpy.plan.layout.ArrayLayout.geometry`.
        template : Batch
            What the regions have in common: see :func:`~linumpy.core.records.batch_record`. The caller keeps it.
        regions : tuple of numpy.ndarray of int64
            Which array each region is of, (n,); first voxels and those behind the last, (n, rank); bytes between
            neighbours in each output, (n, rank); addresses of the outputs, (n,).
        outputs : sequence
            What holds the memory of each job's output, until the job is over.
        one_job : bool
            Whether all regions are one job.
        on_device : OnDevice, optional
            Kernels, and the event behind which outputs may be written, where those are on a device.
        ready : object
            What holds these until the jobs are over; layouts, whose object stores are used, are held as well.
        """
        record, held = self._batch(layouts, template, regions, None, on_device)
        record.one_job = one_job
        pointers = (ctypes.c_void_p * (1 if one_job else record.region_count))()
        # Made before they are submitted: an interrupt behind the call must not free outputs that are written to.
        jobs = [CoreJob(self, pointers, n, output, (ready, layouts)) for n, output in enumerate(outputs)]
        assert len(jobs) == len(pointers)
        self._queue(record, pointers)
        del held
        return jobs

    def submit_together(
        self,
        layouts: Sequence[ArrayLayout],
        template: native.Batch,
        regions: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray],
        output: Any,
        *,
        looks: Sequence[MetadataLook | None] | None = None,
        on_device: native.OnDevice | None = None,
        ready: Any = None,
    ) -> CoreJobs:
        """Ask for regions that are waited for together, a job each; see :meth:`submit`.

        Parameters
        ----------
        layouts, template, regions, on_device, ready
            As for :meth:`submit`.
        output : object
            What holds the memory of all outputs, until the jobs are over.
        looks : sequence of MetadataLook or None, optional
            Metadata files of each array. The core looks at them when it plans: jobs of an array one of whose files is
            another by then fail by :class:`~linumpy.errors.StaleLayoutError`.
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
        regions: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray],
        looks: Sequence[MetadataLook | None] | None,
        on_device: native.OnDevice | None,
    ) -> tuple[native.Batch, Any]:
        """Make the record of a call, and what holds the memory that it refers to."""
        # One array of numbers behind each other: each address that NumPy is asked for takes a microsecond.
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

    def _queue(self, batch: native.Batch, pointers: Any) -> None:
        """Submit a batch; waits only where very much is queued."""
        quick, waiting = self._library.quick, self._library.waiting
        if self._dropped:
            self._release_dropped()
        while state := quick.lc_submit(self._pointer, batch, pointers):
            if state != 1:
                raise MemoryError(f"{batch.region_count} regions could not be submitted: no memory")
            waiting.lc_wait_capacity(self._pointer, _SLICE)

    def _record(self, layout: ArrayLayout) -> native.Array:
        """Describe an array for the core; records of those that were read last are kept."""
        known = self._records.get(id(layout))
        if known is None:
            known = self._records[id(layout)] = (layout, array_record(layout))
            if len(self._records) > _LAYOUTS:
                self._records.popitem(last=False)
        return known[1]

    def stats(self) -> native.Stats:
        """Say what has been done so far."""
        self._release_dropped()
        stats = native.Stats()
        self._library.quick.lc_reader_stats(self._pointer, stats)
        return stats

    def close(self) -> None:
        """Cancel what is queued and finish what is under way; in a child process, do nothing."""
        if os.getpid() != self._process:
            return
        self.is_closing = True
        self._library.quick.lc_reader_close(self._pointer)
        while not self._library.waiting.lc_wait_closed(self._pointer, _SLICE):
            pass
        self._release_dropped()

    def drop(self, pointer: int, output: Any) -> None:
        """Forget a job whose caller does not wait; its output is kept as long as the core may write to it."""
        if os.getpid() != self._process:
            return
        if self._library.quick.lc_job_done(pointer):
            self._library.quick.lc_job_release(pointer)
        else:
            self._dropped[pointer] = output  # until a later call of this reader finds the job over

    def drop_all(self, pointers: Any, output: Any) -> None:
        """Let go of jobs that were submitted together; see :meth:`drop`."""
        if os.getpid() == self._process and self._library.quick.lc_jobs_over(pointers, len(pointers)):
            self._library.quick.lc_jobs_release(pointers, len(pointers))
            return
        for pointer in pointers:
            self.drop(pointer, output)

    def _release_dropped(self) -> None:
        if not self._releasing.acquire(blocking=False):
            return  # another thread does
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
    """One job of a reader; over when its last chunk is settled.

    Attributes
    ----------
    output : object
        What holds the memory of the output.
    """

    __slots__ = ("_number", "_pointers", "_reader", "_ready", "output")

    def __init__(self, reader: CoreReader, pointers: Any, number: int, output: Any, ready: Any = None) -> None:
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
        """Wait until the job is over; signals are handled meanwhile."""
        wait = self._reader._library.waiting.lc_wait_job
        while not self.done():
            if wait(self._pointer, _SLICE) < 0:
                raise RuntimeError("the interpreter is ending, and the job was not finished")
        self._ready = None

    def cancel(self) -> bool:
        """Give the job up; False where it is over already."""
        return bool(self._reader._library.quick.lc_job_cancel(self._pointer))

    def report(self) -> native.Report:
        """Say what was done, once the job is over."""
        report = native.Report()
        self._reader._library.quick.lc_job_report(self._pointer, report)
        return report

    def error(self, layout: ArrayLayout) -> BaseException | None:
        """Return why the job failed, once it is over; None where it did not."""
        error = native.Error()
        self._reader._library.quick.lc_job_error(self._pointer, error)
        return None if error.code == native.OK else exception_of(error, layout)

    def __del__(self) -> None:
        if (pointer := self._pointer) is not None:
            self._reader.drop(pointer, (self.output, self._ready))


class CoreJobs:
    """Jobs of a reader that are waited for together, numbered as their regions.

    Attributes
    ----------
    pointers : ctypes array
        The core's handles; null until they are submitted.
    output : object
        What holds the memory of the outputs.
    """

    __slots__ = ("_reader", "_ready", "output", "pointers")

    def __init__(self, reader: CoreReader, pointers: Any, output: Any, ready: Any) -> None:
        self._reader, self.pointers, self.output, self._ready = reader, pointers, output, ready

    def done(self) -> bool:
        """Say whether all are over; the lock of the interpreter is kept."""
        return bool(self._reader._library.quick.lc_jobs_over(self.pointers, len(self.pointers)))

    def wait(self) -> None:
        """Wait until all are over; the lock of the interpreter is given back only where one is not."""
        if self.done():
            return
        wait = self._reader._library.waiting.lc_wait_jobs
        while not (state := wait(self.pointers, len(self.pointers), _SLICE)):
            pass
        if state < 0:
            raise RuntimeError("the interpreter is ending, and the jobs were not finished")

    def failed(self) -> list[int]:
        """Number the jobs that have failed, once all are over."""
        quick, found, first = self._reader._library.quick, [], 0
        while (number := quick.lc_jobs_failed(self.pointers, len(self.pointers), first)) >= 0:
            found.append(number)
            first = number + 1
        return found

    def error(self, number: int, layout: ArrayLayout) -> BaseException | None:
        """Return why a job failed, once it is over."""
        error = native.Error()
        self._reader._library.quick.lc_job_error(self.pointers[number], error)
        return None if error.code == native.OK else exception_of(error, layout)

    def cancel(self) -> None:
        """Give all up that are not over."""
        for pointer in self.pointers:
            self._reader._library.quick.lc_job_cancel(pointer)

    def __del__(self) -> None:
        if len(self.pointers) and self.pointers[0] is not None:
            self._reader.drop_all(self.pointers, (self.output, self._ready))
