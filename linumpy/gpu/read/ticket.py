"""The ticket by which a caller waits for a region that it has asked for. Errors of a job are its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

import numpy as np

from linumpy.core.reader import CoreJobs
from linumpy.errors import not_pickled
from linumpy.gpu.read.report import ReadReport
from linumpy.gpu.read.scatter import Conversion
from linumpy.plan.layout import ArrayLayout


class Job(Protocol):
    """What an engine carries out."""

    @property
    def output(self) -> Any:
        """What holds the memory of the output, until the job is over."""

    def done(self) -> bool:
        """Say whether it is over."""

    def wait(self) -> None:
        """Wait until it is over; signals are handled meanwhile."""

    def cancel(self) -> bool:
        """Give it up; False where it is over already."""

    def error(self, layout: ArrayLayout) -> BaseException | None:
        """Return why it failed; None where it did not."""


class Engine(Protocol):
    """What carries out the jobs of a reader: the native core, or zarr-python."""

    def describe(self, job: Any, layout: ArrayLayout, conversion: Conversion) -> ReadReport:
        """Make the report of a job that is over."""


class Ticket:
    """One region, or the rows of one array, that is being read."""

    __slots__ = ("__weakref__", "_conversion", "_engine", "_engines", "_job", "_layout", "source")

    def __init__(self, job: Job, layout: ArrayLayout, conversion: Conversion, engine: Engine, engines: Any) -> None:
        self._job, self._layout, self._conversion, self._engine = job, layout, conversion, engine
        self._engines = engines  # which are not closed while a ticket of them is held
        self.source = layout.name

    def __reduce__(self) -> NoReturn:
        raise not_pickled(self, "send the array that result() returns")

    def result(self, stream: Any = None) -> Any:
        """Wait until the region has been read, and return its array.

        Parameters
        ----------
        stream : cupy.cuda.Stream, optional
            Where the array is used. Kernels that write to it are over then, whatever the stream.

        Raises
        ------
        ChunkError
            A chunk of this region is not what the metadata says.
        concurrent.futures.CancelledError
            The job was cancelled.
        RuntimeError
            The reader was closed before the job was submitted, or the device has failed.
        """
        if (error := self.exception()) is not None:
            raise own_copy(error)
        return self._job.output

    def exception(self) -> BaseException | None:
        """Wait until the job is over; return its error, or None."""
        self._job.wait()
        return self._job.error(self._layout)

    def done(self) -> bool:
        """Say whether :meth:`result` returns or raises at once."""
        return self._job.done()

    def cancel(self) -> bool:
        """Give the job up.

        Returns
        -------
        bool
            False where it is over already. Else its output is not written any more once :meth:`exception` returns.
        """
        return self._job.cancel()

    @property
    def array(self) -> Any:
        """Where the region is read to."""
        return self._job.output

    @property
    def error(self) -> BaseException | None:
        """The error so far; the job may not be over yet."""
        return self._job.error(self._layout)

    @property
    def report(self) -> ReadReport:
        """What was done; waits until the job is over."""
        if (error := self.exception()) is not None:
            raise own_copy(error)
        return self._engine.describe(self._job, self._layout, self._conversion)


class Together:
    """Regions that one call has asked for and that are waited for in one call; an error is that of its region alone.

    Parameters
    ----------
    shares : list of (rows, CoreJobs, layouts, numbers)
        Numbers of the regions of arrays of one geometry, their jobs, the arrays, and which of them each region is of.
    engines : Engines
        Of the reader, which is not closed while this is held.
    """

    def __init__(
        self, shares: Sequence[tuple[Sequence[int], CoreJobs, list[ArrayLayout], np.ndarray]], engines: Any
    ) -> None:
        self._shares, self._engines = shares, engines

    def __reduce__(self) -> NoReturn:
        raise not_pickled(self, "send the arrays that were read")

    def wait(self) -> None:
        """Wait until all are over; signals are handled meanwhile."""
        for _, jobs, _, _ in self._shares:
            jobs.wait()

    def done(self) -> bool:
        """Say whether :meth:`wait` returns at once."""
        return all(jobs.done() for _, jobs, _, _ in self._shares)

    def cancel(self) -> None:
        """Give up those that are not over; their outputs are not written any more once :meth:`wait` returns."""
        for _, jobs, _, _ in self._shares:
            jobs.cancel()

    def errors(self, stream: Any = None) -> dict[int, BaseException]:
        """Wait until all are over, and return the errors of those that failed, by the number of the region.

        Kernels that write to the outputs are over then, whatever the stream.
        """
        self.wait()
        found: dict[int, BaseException] = {}
        for rows, jobs, layouts, numbers in self._shares:
            for job in jobs.failed():
                error = jobs.error(job, layouts[numbers[job]])
                assert error is not None
                found[rows[job]] = error
        return found


def own_copy(error: BaseException) -> BaseException:
    """Make an error of its own for each raise: a traceback belongs to one of them."""
    try:
        copy = type(error)(*error.args)
    except Exception:
        return error
    copy.__cause__ = error.__cause__
    return copy
