"""Regions of rectilinear arrays as jobs of the native core: a job for each box of chunks of one shape.

A region is cut into such boxes, the parts; each part is a region of a regular array, and one job of the core.

In: regions, outputs, and the function that submits regions of regular arrays. Out: a :class:`PartsJob` for each region.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from typing import Any

import numpy as np

from linumpy.core import native
from linumpy.gpu.read.outputs import Regions
from linumpy.gpu.read.ticket import Job, JobList, Jobs
from linumpy.plan.layout import ArrayLayout
from linumpy.plan.read import RegularBox, cut_by_shape


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


def submit_parts(
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
