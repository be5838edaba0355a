"""Regions that are read into host memory by the native core.

In: layouts, regions, NumPy arrays. Out: :class:`HostTicket`, which is to its caller what
:class:`~linumpy.gpu.loop.ticket.Ticket` is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from linumpy.core import native
from linumpy.core.reader import CoreJob, CoreReader
from linumpy.errors import not_pickled
from linumpy.gpu.loop.jobs import Regions
from linumpy.gpu.loop.report import LINUMPY, ReadReport
from linumpy.gpu.loop.ticket import own_copy
from linumpy.gpu.staging.scatter import Conversion
from linumpy.plan.layout import ArrayLayout

#: `ReadReport.engine` of such reads.
ENGINE = "system calls by the native core's threads, into host memory"


class HostTicket:
    """One region, or the rows of one array, that the core reads; see :class:`~linumpy.gpu.loop.ticket.Ticket`."""

    __slots__ = ("__weakref__", "_conversion", "_job", "_layout", "_reader", "source")

    def __init__(self, job: CoreJob, layout: ArrayLayout, conversion: Conversion, reader: Any) -> None:
        self._job, self._layout, self._conversion = job, layout, conversion
        self._reader = reader  # which is not closed while a ticket of it is held
        self.source = layout.name

    def result(self, stream: Any = None) -> np.ndarray:
        """Wait until the region has been read, and return its array; `stream` is for devices."""
        if (error := self.exception()) is not None:
            raise own_copy(error)
        array: np.ndarray = self._job.output
        return array

    def exception(self) -> BaseException | None:
        """Wait until the job is over; return its error, or None."""
        self._job.wait()
        return self._job.error(self._layout)

    def done(self) -> bool:
        """Say whether :meth:`result` returns or raises at once."""
        return self._job.done()

    def cancel(self) -> bool:
        """Give the job up; False where it is over already. Else its output is not written once it is over."""
        return self._job.cancel()

    @property
    def array(self) -> np.ndarray:
        """Where the region is read to."""
        array: np.ndarray = self._job.output
        return array

    @property
    def error(self) -> BaseException | None:
        """The error so far; the job may not be over yet."""
        return self._job.error(self._layout)

    @property
    def report(self) -> ReadReport:
        """What was done; waits until the job is over."""
        if (error := self.exception()) is not None:
            raise own_copy(error)
        counts, layout, array = self._job.report(), self._layout, self.array
        return ReadReport(
            source=layout.name,
            backend=LINUMPY,
            gds="not used",
            engine=ENGINE,
            fallback="",
            shape=tuple(array.shape),
            dtype=self._conversion.target_name,
            bytes_read=counts.bytes_read,
            bytes_decoded=int(array.size) * self._conversion.target.itemsize,
            chunks_read=counts.chunks - counts.filled,
            chunks_filled=counts.filled,
            files_opened=counts.files_opened,
            scratch_bytes=0,
            plan_seconds=0.0,
            read_seconds=counts.seconds,
            scatter_seconds=None,
            decoder=self._decoder(counts),
            chunks_decoded_by_host=counts.decoded,
            host_decode_seconds=counts.decode_seconds,
        )

    def _decoder(self, counts: native.Report) -> str:
        chain, stored = self._layout.chain, counts.chunks - counts.filled
        if chain is None:
            return ""
        return f"{chain}, on the {'host' if stored == counts.decoded else 'device'}"

    def __reduce__(self) -> NoReturn:
        raise not_pickled(self, "send the array that result() returns")


def submit_to_core(
    core: CoreReader,
    reader: Any,
    layouts: list[ArrayLayout],
    conversion: Conversion,
    regions: Regions,
    outputs: Sequence[np.ndarray],
    *,
    one_job: bool = False,
    on_device: native.OnDevice | None = None,
    ready: Any = None,
) -> list[HostTicket]:
    """Submit regions of arrays of one geometry; one ticket for each output."""
    target = native.BFLOAT16 if conversion.bfloat16 else native.DTYPE_CODES[conversion.target.str[1:]]
    columns = regions.array, regions.start, regions.stop, regions.strides, regions.addresses
    fill = conversion.fill_bytes(layouts[0].fill_value)
    jobs = core.submit(layouts, columns, outputs, target, fill, one_job=one_job, on_device=on_device, ready=ready)
    arrays = [0] if one_job else regions.array.tolist()
    return [HostTicket(job, layouts[number], conversion, reader) for job, number in zip(jobs, arrays, strict=True)]
