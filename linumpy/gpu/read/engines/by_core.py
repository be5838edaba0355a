"""Carry out the jobs of a reader by the native core.

In: regions of arrays of one geometry, with their outputs as numbers. Out: jobs, and their reports for
:class:`~linumpy.gpu.read.ticket.Ticket`. A region of a rectilinear array is cut into parts, boxes of chunks of one
shape: each is a region of a regular array, and one job of the core.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from linumpy.arrays import bits_of
from linumpy.core import native
from linumpy.core.reader import CoreJob, CoreReader
from linumpy.core.records import batch_record
from linumpy.gpu.read.outputs import Event, Regions
from linumpy.gpu.read.report import ReaderStats, ReadReport, Times, job_report
from linumpy.gpu.read.scatter import Conversion
from linumpy.gpu.read.ticket import Job, JobList, Jobs
from linumpy.io.paths import MetadataLook
from linumpy.plan.layout import ArrayLayout
from linumpy.plan.read import RegularBox, cut_by_shape

if TYPE_CHECKING:
    from linumpy.gpu.read.engines.core_device import CoreDevice

#: Maximum cached records of geometries and conversions.
_MAX_TEMPLATES = 1024


class CoreEngine:
    """The native core, for one device or for host memory.

    `threads`: threads of the host among which work is divided. `device`: device of the outputs; by default they are in
    host memory. It must be current in the constructor and in :meth:`submit`. `host_cache_bytes`: without a device,
    memory for decoded chunks that later jobs may use.
    """

    def __init__(self, threads: int, device: CoreDevice | None, host_cache_bytes: int = 0) -> None:
        self._device = device
        self._core = CoreReader(threads, None if device is None else device.record())
        if device is None and host_cache_bytes:
            self._core.keep_on_host(host_cache_bytes)
        self._templates: dict[tuple[Conversion, object], native.Batch] = {}

    def submit(
        self,
        layouts: list[ArrayLayout],
        conversion: Conversion,
        regions: Regions,
        owners: Sequence[object],
        ready: Event | None = None,
        *,
        looks: Sequence[MetadataLook | None] | None = None,
        timed: bool = False,
    ) -> Jobs:
        """Submit regions, each as a job.

        `conversion`: conversion from their elements to elements of the outputs. `regions`: regions of these arrays, and
        their outputs. `owners`: for each region, or one for all, the object that owns the memory of the output.
        `ready`: outputs on a device are written after this event. `looks`: metadata files of each array, which the core
        checks before it reads chunks; not those of rectilinear arrays. `timed`: whether to measure the times of
        kernels.

        `MemoryError`: The device memory for slots does not fit.
        """
        if layouts[0].lengths is not None:
            submit = partial(self.submit, conversion=conversion, ready=ready, timed=timed)
            return _submit_parts(submit, layouts, regions, owners)
        on_device = None
        if self._device is not None and ready is not None:
            self._device.give_memory(self._core)
            on_device = self._device.on_device(layouts[0], conversion, int(ready.ptr), timed=timed)
        template = self._template(layouts[0], conversion)
        kept = ready, on_device, self._device
        return self._core.submit(
            layouts, template, regions.columns, owners, looks=looks, on_device=on_device, ready=kept
        )

    def _template(self, layout: ArrayLayout, conversion: Conversion) -> native.Batch:
        """Return the record that describes batches of one geometry and conversion; records are cached."""
        key = conversion, layout.geometry
        template = self._templates.get(key)
        if template is None:
            if len(self._templates) > _MAX_TEMPLATES:
                self._templates.clear()  # calls that still use a record hold a reference to it
            target = native.BFLOAT16 if conversion.bfloat16 else native.DTYPE_CODES[bits_of(conversion.target).str[1:]]
            assert layout.fill_value is not None  # its dtype is supported
            fill = conversion.fill_bytes(layout.fill_value)
            template = self._templates[key] = batch_record(layout, target, fill)
        return template

    def describe(self, job: CoreJob | PartsJob, layout: ArrayLayout, conversion: Conversion) -> ReadReport:
        """Make the report of a job that has ended."""
        core_report, stored_in = job.report(), "host memory"
        stored = core_report.chunks - core_report.filled
        if self._device is not None:
            stored_in = f"pinned host memory, copied to device {self._device.number}"
        engine = f"system calls by the native core's threads, into {stored_in}"
        if self._device is not None and self._device.direct is not None:
            engine = self._device.direct.engine(core_report.reads_repeated)
        if layout.remote is not None:
            engine = f"requests by {layout.remote.client}, into {stored_in}"
        if layout.entries is not None:
            engine += f", from entries of the ZIP file {layout.entries.path}"
        decoder = ""
        if layout.chain is not None:
            on_host = self._device is None or 0 < stored == core_report.decoded
            decoder = f"{layout.chain}, on the {'host' if on_host else 'device'}"
        report = job_report(layout.name, conversion.target_name, job.output)
        return replace(
            report,
            engine=engine,
            bytes_read=core_report.bytes_read,
            chunks_read=stored,
            chunks_filled=core_report.filled,
            files_opened=core_report.files_opened,
            scratch_bytes=self.device_bytes if core_report.chunks else 0,
            read_seconds=core_report.seconds,
            decoder=decoder,
            chunks_decoded_by_host=core_report.decoded,
            host_decode_seconds=core_report.decode_seconds,
            reads_repeated=core_report.reads_repeated,
            scatter_seconds=core_report.device_scatter_seconds or None,
            decode_seconds=None if layout.chain is None else core_report.device_decode_seconds or None,
        )

    @property
    def device_bytes(self) -> int:
        """Device memory that is held for slabs and cached chunks; 0 before the first job."""
        return 0 if self._device is None else self._device.held_nbytes

    def stats(self, stats: ReaderStats) -> ReaderStats:
        """Add the core's counters and times."""
        core = self._core.stats()
        return replace(
            stats,
            jobs=stats.jobs + core.jobs,
            chunks=stats.chunks + core.chunks,
            boxes=stats.boxes + core.boxes,
            slabs=core.tasks if self._device is None else core.slabs,
            bytes_read=core.bytes_read,
            index_hits=core.index_hits,
            index_misses=core.index_misses,
            files_opened=core.files_opened,
            requests_hedged=core.hedges,
            plan_seconds=core.plan_seconds,
            io_seconds=core.read_seconds,
            place_seconds=core.copy_seconds,
            cache_hits=core.kept_hits,
            cache_misses=core.kept_misses,
            device_bytes=self.device_bytes,
            times=Times(
                core.copies,
                core.slabs_decoded,
                core.device_copy_seconds,
                core.device_decode_seconds,
                core.device_scatter_seconds,
                core.copied_nbytes,
                core.decoded_nbytes,
            ),
            chunks_decoded_by_host=core.decoded,
            host_decode_seconds=core.decode_seconds,
        )

    def close(self) -> None:
        """Cancel queued jobs, wait for running ones, and free the device memory."""
        self._core.close()
        if self._device is not None:
            self._device.free()


class PartsJob:
    """Jobs of one output, as one job.

    `output`: the object that holds the memory of the output.
    """

    __slots__ = ("_jobs", "output")

    def __init__(self, output: Any) -> None:
        self.output = output
        self._jobs: list[tuple[Any, ArrayLayout]] = []

    def add(self, job: Job, layout: ArrayLayout) -> None:
        """Add a job, whose errors name chunks of `layout`."""
        self._jobs.append((job, layout))

    def done(self) -> bool:
        """Say whether all jobs have ended."""
        return all(job.done() for job, _ in self._jobs)

    def wait(self) -> None:
        """Wait until all jobs have ended; signals are handled meanwhile."""
        for job, _ in self._jobs:
            job.wait()

    def cancel(self) -> bool:
        """Cancel all jobs that have not ended; False if all have ended."""
        cancelled = [job.cancel() for job, _ in self._jobs]  # a list: `any` would stop at the first
        return any(cancelled)

    def error(self, layout: ArrayLayout) -> BaseException | None:
        """Return the first error, or None; errors of chunks come before the cancellation of a job."""
        errors = [error for job, part_layout in self._jobs if (error := job.error(part_layout)) is not None]
        return min(errors, key=lambda error: isinstance(error, CancelledError), default=None)

    def report(self) -> native.Report:
        """Add up the reports; the parts were read at the same time, so the longest time counts."""
        reports = [job.report() for job, _ in self._jobs]
        total = native.Report()
        for name, *_ in native.Report._fields_:
            add = max if name == "seconds" else sum
            setattr(total, name, add([0, *(getattr(report, name) for report in reports)]))
        return total


def _submit_parts(
    submit: Callable[..., Jobs], layouts: Sequence[ArrayLayout], regions: Regions, owners: Sequence[object]
) -> JobList:
    """Submit regions of rectilinear arrays; parts with chunks of the same shape are submitted together.

    `submit`: ``submit(layouts, regions=, owners=)`` of regular arrays of one geometry; a job for each region.
    `regions`: regions of these arrays, and their outputs. `owners`: for each region, or one for all, the object that
    owns the memory of the output.
    """
    jobs = [PartsJob(owners[row if len(owners) > 1 else 0]) for row in range(len(regions))]
    parts_of_geometry: dict[object, list[tuple[int, RegularBox]]] = {}
    for row, number in enumerate(regions.array.tolist()):
        for part in cut_by_shape(layouts[number], regions.start[row].tolist(), regions.stop[row].tolist()):
            parts_of_geometry.setdefault(part.layout.geometry, []).append((row, part))
    try:
        for members in parts_of_geometry.values():
            arrays, boxes = _boxes_of(regions, members)
            submitted = submit(arrays, regions=boxes, owners=[jobs[row].output for row, _ in members])
            for number, (row, part) in enumerate(members):
                jobs[row].add(submitted.job(number, jobs[row].output), part.layout)
    except BaseException:
        for job in jobs:  # nothing may write to outputs of a call that has raised
            job.cancel()
        for job in jobs:
            job.wait()
        raise
    return JobList(jobs)


def _boxes_of(regions: Regions, members: Sequence[tuple[int, RegularBox]]) -> tuple[list[ArrayLayout], Regions]:
    """Return the distinct arrays of parts, and the parts as regions of these arrays, with their outputs."""
    numbers: dict[int, int] = {}
    array = np.array([numbers.setdefault(id(part.layout), len(numbers)) for _, part in members], np.int64)
    layouts = {id(part.layout): part.layout for _, part in members}
    start, stop, offset = (
        np.array([getattr(part, name) for _, part in members], np.int64) for name in ("start", "stop", "offset")
    )
    outputs = regions.take(np.array([row for row, _ in members]))
    addresses = outputs.addresses + (offset * outputs.strides).sum(axis=1)
    return [layouts[key] for key in numbers], Regions(array, start, stop, outputs.strides, addresses)
