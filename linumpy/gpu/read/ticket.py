"""Tickets, by which callers wait for the regions that they submitted. A ticket raises the error of its own job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from linumpy.arrays import Array
from linumpy.core.reader import CoreJobs
from linumpy.errors import not_pickled
from linumpy.gpu.read.report import ReadReport
from linumpy.gpu.read.scatter import Conversion
from linumpy.plan.layout import ArrayLayout

if TYPE_CHECKING:
    from linumpy.gpu.read.engines.by_core import CoreEngine
    from linumpy.gpu.read.engines.by_zarr import ZarrEngine


#: A job of an engine: :class:`~linumpy.core.reader.CoreJob`, ``PartsJob`` or ``ZarrJob``. All have `output` (the object
#: that holds the memory of the output), `done`, `wait`, `cancel` and `error`.
Job = Any


class JobList:
    """Single jobs with the methods of :class:`~linumpy.core.reader.CoreJobs`."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = jobs

    def job(self, number: int, output: Any) -> Job:
        """Return one of the jobs, for the array that its ticket returns."""
        return self._jobs[number]

    def wait(self) -> float:
        """Wait until all jobs have ended; return 0, as it is not known how long the thread waited for Python's lock."""
        for job in self._jobs:
            job.wait()
        return 0.0

    def done(self) -> bool:
        """Say whether all jobs have ended."""
        return all(job.done() for job in self._jobs)

    def cancel(self) -> None:
        """Cancel all jobs that have not ended."""
        for job in self._jobs:
            job.cancel()

    def failed(self) -> list[int]:
        """Return the numbers of the jobs that have failed."""
        return [number for number, job in enumerate(self._jobs) if job.error(None) is not None]

    def error(self, number: int, layout: ArrayLayout) -> BaseException | None:
        """Return why a job failed; None if it did not."""
        return self._jobs[number].error(layout)  # type: ignore[no-any-return]


#: Jobs that an engine got together, numbered as their regions.
Jobs = CoreJobs | JobList


class Ticket:
    """One region that is being read."""

    __slots__ = ("__weakref__", "_conversion", "_engine", "_job", "_layout", "_reader", "source")

    def __init__(
        self, job: Job, layout: ArrayLayout, conversion: Conversion, engine: CoreEngine | ZarrEngine, reader: object
    ) -> None:
        self._job, self._layout, self._conversion, self._engine = job, layout, conversion, engine
        self._reader = reader  # it is closed when nothing refers to it
        self.source = layout.name

    def __reduce__(self) -> NoReturn:
        raise not_pickled(self, "send the array that result() returns")

    def result(self, stream: object = None) -> Array:
        """Wait until the region has been read, and return its array.

        Parameters
        ----------
        stream : cupy.cuda.Stream, optional
            The stream that uses the array. It makes no difference: all kernels that write to the array have ended.

        Raises
        ------
        ChunkError
            A chunk of this region is broken, or was replaced while it was read.
        concurrent.futures.CancelledError
            The job was cancelled.
        MemoryError
            The memory that the job needs could not be allocated.
        RuntimeError
            The reader was closed before the job was submitted, or the device has failed.
        """
        if (error := self.exception()) is not None:
            raise own_copy(error)
        return self._job.output  # type: ignore[no-any-return]

    def exception(self) -> BaseException | None:
        """Wait until the job has ended; return its error, or None."""
        self._job.wait()
        return self._job.error(self._layout)

    def done(self) -> bool:
        """Say whether :meth:`result` returns or raises at once."""
        return self._job.done()

    def cancel(self) -> bool:
        """Cancel the job.

        Returns
        -------
        bool
            False if the job has already ended. Otherwise its output is no longer written once :meth:`exception` has
            returned.
        """
        return self._job.cancel()

    @property
    def array(self) -> Array:
        """The array into which the region is read."""
        return self._job.output  # type: ignore[no-any-return]

    @property
    def report(self) -> ReadReport:
        """The report of the read. Waits until the job has ended, and raises as :meth:`result`."""
        if (error := self.exception()) is not None:
            raise own_copy(error)
        return self._engine.describe(self._job, self._layout, self._conversion)


class JobGroup(NamedTuple):
    """Jobs of the regions of one call that one engine carries out, whose arrays have one geometry.

    `rows`: indices of these regions in the call. `jobs`: a job for each of these regions. `array_index`: index in
    `layouts` of each region's array.
    """

    rows: Sequence[int]
    jobs: Jobs
    layouts: list[ArrayLayout]
    array_index: np.ndarray
    conversion: Conversion
    engine: CoreEngine | ZarrEngine


class Together:
    """Regions that one call submitted, to wait for in one call; an error concerns its region alone.

    `reader`: it is not closed while this object exists.
    """

    def __init__(self, groups: Sequence[JobGroup], reader: object) -> None:
        self._groups, self._reader = groups, reader

    def __reduce__(self) -> NoReturn:
        raise not_pickled(self, "send the arrays that were read")

    def wait(self) -> float:
        """Wait until all jobs have ended; signals are handled meanwhile.

        Returns the seconds that the thread then waited for Python's lock, where that is known.
        """
        return max((group.jobs.wait() for group in self._groups), default=0.0)

    def done(self) -> bool:
        """Say whether :meth:`wait` returns at once."""
        return all(group.jobs.done() for group in self._groups)

    def result(self) -> None:
        """Wait until all jobs have ended; raise the error of the first region that failed."""
        if errors := self.errors():
            raise own_copy(errors[min(errors)])

    def cancel(self) -> None:
        """Cancel all jobs that have not ended; their outputs are no longer written once :meth:`wait` returns."""
        for group in self._groups:
            group.jobs.cancel()

    def errors(self, stream: object = None) -> dict[int, BaseException]:
        """Wait until all jobs have ended, and return the errors of failed jobs by the index of the region.

        `stream` makes no difference: all kernels that write to the outputs have ended.
        """
        self.wait()
        errors: dict[int, BaseException] = {}
        for group in self._groups:
            for job in group.jobs.failed():
                error = group.jobs.error(job, group.layouts[group.array_index[job]])
                assert error is not None
                errors[group.rows[job]] = error
        return errors


def own_copy(error: BaseException) -> BaseException:
    """Copy an error before it is raised, so that each raise writes its traceback to a separate copy."""
    try:
        copy = type(error)(*error.args)
    except Exception:
        return error
    copy.__cause__ = error.__cause__
    return copy
