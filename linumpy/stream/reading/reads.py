"""Reads of crops: regions of arrays and their outputs → tickets.

Regions that have the same number of axes, and that the native core reads into outputs of one dtype, share a ticket.
Every other box has a ticket of its own, with the same methods. An error affects one job only.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Executor, Future, wait
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np

from linumpy.arrays import Array
from linumpy.gpu.read.outputs import Regions
from linumpy.gpu.rounding import bfloat16_bits, cast_elements
from linumpy.io.zarr_mode import read_chunks_on_host
from linumpy.stream.arguments import Box
from linumpy.stream.on_device import Stream
from linumpy.stream.planning.records import ArrayInfo

if TYPE_CHECKING:
    import zarr

    from linumpy.gpu import Reader
    from linumpy.gpu.read.ticket import Ticket
    from linumpy.plan.layout import ArrayLayout

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReadJob:
    """A region of an array, and the output into which it is read.

    Attributes
    ----------
    info : ArrayInfo
        The array.
    region : Box
        Region of the array.
    array, index : cupy.ndarray or numpy.ndarray, tuple
        The output ``array[index]``; elements are cast to its dtype.
    address, strides : int, tuple of int
        Address of the output, and its strides in bytes along all axes of the array.
    bfloat16 : bool
        Whether elements are cast to bfloat16; the output, uint16, holds the bits.
    needed : numpy.ndarray or None
        Boxes of the region that are read, see :class:`~linumpy.stream.planning.records.CropRead`; None for the whole
        region.
    """

    info: ArrayInfo
    region: Box
    array: Array
    index: tuple[int | slice, ...]
    address: int
    strides: tuple[int, ...]
    bfloat16: bool = False
    needed: np.ndarray | None = None

    @property
    def out(self) -> Array:
        """The output of the region."""
        out: Array = self.array[self.index]
        return out

    def boxes(self) -> Iterator[tuple[Box, Array]]:
        """Yield each box that is read, and the output of the box."""
        if self.needed is None:
            yield self.region, self.out
            return
        lead = len(self.region) - self.needed.shape[1]
        for box in self.needed.tolist():
            inside = tuple(
                slice(a - start, b - start) for (a, b), (start, _) in zip(box, self.region[lead:], strict=True)
            )
            yield (*self.region[:lead], *map(tuple, box)), self.out[(..., *inside)]


class Fallback:
    """Reads by zarr-python, for arrays that the reader does not support; logs the reason once for each array.

    Parameters
    ----------
    pool : Executor
        Threads that read.
    """

    def __init__(self, pool: Executor) -> None:
        self._pool = pool
        self._logged: set[str] = set()

    def submit(self, job: ReadJob) -> list[FallbackTicket]:
        """Start to read; return a ticket for each box."""
        if job.info.name not in self._logged:
            self._logged.add(job.info.name)
            log.warning("%s is read by zarr-python on the host: %s", job.info.name, job.info.unsupported)
        return [FallbackTicket(self._pool.submit(_read, job, box, out), out) for box, out in job.boxes()]


class ReadTicket(Protocol):
    """Reads that one call waits for."""

    def wait(self) -> None:
        """Wait until the reads have ended."""

    def errors(self, stream: Stream | None = None) -> dict[int, BaseException]:
        """Wait for the regions, which are then ready on `stream`; return the errors of faulty regions by number."""

    def cancel(self) -> None:
        """Cancel the reads."""


class FallbackTicket:
    """A region that zarr-python reads."""

    def __init__(self, future: Future[np.ndarray | None], out: Array) -> None:
        self._future, self._out = future, out

    def wait(self) -> None:
        """Wait until the read has ended."""
        wait([self._future])

    def errors(self, stream: Stream | None = None) -> dict[int, BaseException]:
        """Wait for the region, and copy it to a device on `stream`; return its error as number 0."""
        try:
            values = self._future.result()
            if values is not None:
                import cupy

                with cupy.cuda.get_current_stream() if stream is None else stream:
                    self._out[...] = cupy.asarray(values)
                self._future = Future()
                self._future.set_result(None)
        except (Exception, CancelledError) as error:
            return {0: error}
        return {}

    def cancel(self) -> None:
        """Cancel the read unless it has begun."""
        self._future.cancel()


class ReaderTicket:
    """A region for which the reader has a ticket of its own.

    Parameters
    ----------
    ticket : Ticket or Exception
        The reader's ticket, or the exception of the submission.
    """

    def __init__(self, ticket: Ticket | Exception) -> None:
        self._ticket = ticket

    def wait(self) -> None:
        """Wait until the read has ended."""
        if not isinstance(self._ticket, Exception):
            self._ticket.exception()

    def errors(self, stream: Stream | None = None) -> dict[int, BaseException]:
        """Wait for the region; return its error as number 0."""
        error = self._ticket if isinstance(self._ticket, Exception) else self._ticket.exception()
        return {} if error is None else {0: error}

    def cancel(self) -> None:
        """Cancel the read."""
        if not isinstance(self._ticket, Exception):
            self._ticket.cancel()


def _read(job: ReadJob, box: Box, out: Array) -> np.ndarray | None:
    """Read a box, and cast it to the output's dtype; return the values if `out` is on a device, else write them."""
    source = cast("zarr.Array", job.info.source)
    values = np.ascontiguousarray(read_chunks_on_host(source, tuple(slice(a, b) for a, b in box)))
    values = bfloat16_bits(values) if job.bfloat16 else cast_elements(values, out.dtype)
    if isinstance(out, np.ndarray):
        out[...] = values
        return None
    return values


#: Indices of jobs, and the ticket of their reads: error i of the ticket concerns the job of the i-th index.
Submitted = tuple[Sequence[int], ReadTicket]


def submit(reader: Reader, jobs: Sequence[ReadJob], fallback: Fallback, memory: object) -> list[Submitted]:
    """Submit jobs: by one call all jobs that share a ticket, as the head of this module says, and others one by one.

    Parameters
    ----------
    reader : linumpy.gpu.Reader
        The reader, on the device of the outputs.
    jobs : sequence of ReadJob
        The reads.
    fallback : Fallback
        Reads the arrays that the reader does not support.
    memory : object
        Owner of the outputs' memory, which the native core holds while it writes there.

    Returns
    -------
    list of (indices of jobs, ticket)
        An error of a submission is an error of its ticket, except for jobs that are submitted together.
    """
    submitted: list[Submitted] = []
    together: dict[tuple[int, bool, str], list[int]] = {}
    for number, job in enumerate(jobs):
        if job.info.unsupported is not None:
            submitted += [([number], ticket) for ticket in fallback.submit(job)]
        elif not reader.reads_natively(cast("ArrayLayout", job.info.source)):
            submitted += [([number], _submit_alone(reader, job, *read)) for read in job.boxes()]
        else:
            together.setdefault((len(job.region), job.bfloat16, job.array.dtype.str), []).append(number)
    for numbers in together.values():
        rows, ticket = _submit_together(reader, [jobs[number] for number in numbers], memory)
        submitted.append(([numbers[row] for row in rows], ticket))
    return submitted


def _submit_together(reader: Reader, jobs: Sequence[ReadJob], memory: object) -> tuple[list[int], ReadTicket]:
    """Submit jobs by one call; return the index of the job of each box, and the ticket."""
    numbers: dict[int, int] = {}
    arrays = [numbers.setdefault(id(job.info), len(numbers)) for job in jobs]
    infos = dict(zip(arrays, [job.info for job in jobs], strict=True))
    extents = np.array([job.region for job in jobs], np.int64)
    regions = Regions(
        np.array(arrays, np.int64),
        extents[:, :, 0],
        extents[:, :, 1],
        np.array([job.strides for job in jobs], np.int64),
        np.array([job.address for job in jobs], np.int64),
    )
    rows, regions = _needed_boxes(regions, [job.needed for job in jobs])
    layouts, looks = zip(*((info.source, info.look) for info in infos.values()), strict=True)
    dtype = "bfloat16" if jobs[0].bfloat16 else jobs[0].array.dtype
    return rows, reader.submit_regions(list(layouts), regions, dtype, memory, looks)


def _needed_boxes(regions: Regions, needed: Sequence[np.ndarray | None]) -> tuple[list[int], Regions]:
    """Divide regions into their needed boxes; return the index of the region of each box, and the boxes."""
    rows = [row for row, boxes in enumerate(needed) for _ in range(1 if boxes is None else len(boxes))]
    if all(boxes is None for boxes in needed):
        return rows, regions
    repeated, first = regions.take(np.array(rows)), 0
    start, stop = repeated.start.copy(), repeated.stop.copy()
    for boxes in needed:
        if boxes is not None:
            of_region, axes = slice(first, first + len(boxes)), boxes.shape[1]
            start[of_region, -axes:], stop[of_region, -axes:] = boxes[:, :, 0], boxes[:, :, 1]
        first += 1 if boxes is None else len(boxes)
    addresses = repeated.addresses + ((start - repeated.start) * repeated.strides).sum(axis=1)
    return rows, replace(repeated, start=start, stop=stop, addresses=addresses)


def _submit_alone(reader: Reader, job: ReadJob, box: Box, out: Array) -> ReaderTicket:
    try:
        dtype = "bfloat16" if job.bfloat16 else None
        regions = np.array([box], np.int64)
        return ReaderTicket(reader.submit_many([job.info.source], regions, outs=[out], dtype=dtype)[0])
    except Exception as error:
        return ReaderTicket(error)
