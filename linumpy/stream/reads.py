"""Regions that are read: those of arrays that the reader takes by the reader, others by zarr-python in threads.

In: jobs. Out: a ticket each, in their order; an error is that of its job alone. Tickets are the reader's, or have the
same methods.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import CancelledError, Executor, Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from linumpy.io.zarr_mode import read_on_host
from linumpy.stream.plan import ArrayInfo, Box

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReadJob:
    """A region and where it goes.

    Attributes
    ----------
    info : ArrayInfo
        The array.
    region : Box
        What is read of it.
    out : cupy.ndarray or numpy.ndarray
        Strides may be any that are positive; elements are cast to its dtype.
    """

    info: ArrayInfo
    region: Box
    out: Any


class Fallback:
    """Reads by zarr-python what the reader does not take; says why, once for each array.

    Parameters
    ----------
    pool : Executor
        Its threads.
    """

    def __init__(self, pool: Executor) -> None:
        self._pool = pool
        self._named: set[str] = set()

    def submit(self, job: ReadJob) -> FallbackTicket:
        """Begin to read."""
        if job.info.name not in self._named:
            self._named.add(job.info.name)
            log.warning("%s is read by zarr-python on the host: %s", job.info.name, job.info.unsupported)
        return FallbackTicket(self._pool.submit(_read, job), job.out)


class FallbackTicket:
    """A region that zarr-python reads."""

    def __init__(self, future: Future[Any], out: Any) -> None:
        self._future, self._out = future, out

    def result(self, stream: Any = None) -> Any:
        """Wait for the region; copy it to a device on `stream`."""
        values = self._future.result()
        if values is not None:
            import cupy

            with cupy.cuda.get_current_stream() if stream is None else stream:
                self._out[...] = cupy.asarray(values)
            self._future = Future()
            self._future.set_result(None)
        return self._out

    def exception(self) -> BaseException | None:
        """Wait for the end; return the error, or None."""
        try:
            return self._future.exception()
        except CancelledError as error:
            return error

    def done(self) -> bool:
        """Say whether nothing has to be waited for."""
        return self._future.done()

    def cancel(self) -> bool:
        """Give the region up, unless it is being read."""
        return self._future.cancel()


class FailedTicket:
    """A region that could not be asked for."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def result(self, stream: Any = None) -> Any:
        """Raise the error."""
        raise self._error

    def exception(self) -> BaseException | None:
        """Return the error."""
        return self._error

    def done(self) -> bool:
        """Say that nothing has to be waited for."""
        return True

    def cancel(self) -> bool:
        """Say that it is too late."""
        return False


def _read(job: ReadJob) -> Any:
    """Read and cast; returns what is to be copied to a device, None where the output is in host memory."""
    values = read_on_host(job.info.source, tuple(slice(a, b) for a, b in job.region))
    with np.errstate(all="ignore"):  # numbers that the new dtype cannot hold are not defined, as in NumPy
        values = np.ascontiguousarray(values).astype(job.out.dtype, copy=False)
    if isinstance(job.out, np.ndarray):
        job.out[...] = values
        return None
    return values


def submit(reader: Any, jobs: Sequence[ReadJob], fallback: Fallback) -> list[Any]:
    """Submit jobs: those of the same array and dtype together, so that they are planned together.

    Parameters
    ----------
    reader : linumpy.gpu.Reader
        On the device of the outputs.
    jobs : sequence of ReadJob
        What to read.
    fallback : Fallback
        Reads what the reader does not take.
    """
    groups: dict[tuple[int, str], list[int]] = {}
    tickets: list[Any] = [None] * len(jobs)
    for number, job in enumerate(jobs):
        if job.info.unsupported is not None:
            tickets[number] = fallback.submit(job)
        else:
            groups.setdefault((id(job.info), job.out.dtype.str), []).append(number)
    for numbers in groups.values():
        chosen = [jobs[number] for number in numbers]
        regions = np.array([job.region for job in chosen], np.int64)
        outs = [job.out for job in chosen]
        made: Sequence[Any]
        try:
            made = reader.submit_many(chosen[0].info.source, regions, outs=outs, dtype=outs[0].dtype)
        except Exception as error:
            made = [FailedTicket(error)] * len(chosen)
        for number, ticket in zip(numbers, made, strict=True):
            tickets[number] = ticket
    return tickets
