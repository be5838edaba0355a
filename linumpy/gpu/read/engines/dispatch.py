"""The engines of one reader: regions with the same geometry and cast are submitted together, to one engine.

In: layouts, regions within the bounds of the arrays, and outputs. Out: tickets. The native core reads the arrays that
it decodes, zarr-python all others. Errors: ``RuntimeError`` in a child of the process that made the engines;
``TypeError`` and ``ValueError`` for outputs that do not fit; ``MemoryError``. A ticket raises the error of its job.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from linumpy.arrays import Array
from linumpy.core import native
from linumpy.core.reader import takes
from linumpy.device import require_cuda
from linumpy.gpu.read.engines.by_core import CoreEngine
from linumpy.gpu.read.engines.by_zarr import ZarrEngine
from linumpy.gpu.read.engines.core_device import CoreDevice
from linumpy.gpu.read.limits import Limits
from linumpy.gpu.read.outputs import (
    Event,
    Regions,
    addresses_of,
    check_output,
    grouped,
    rows_of,
    strides_of,
    targets_of,
    with_all_axes,
)
from linumpy.gpu.read.request import cast_dtype, new_array, without_bfloat16
from linumpy.gpu.read.scatter import Conversion
from linumpy.gpu.read.stats import ReaderStats
from linumpy.gpu.read.ticket import GeometryJobs, Job, Ticket, Together
from linumpy.io.paths import MetadataLook
from linumpy.plan.layout import ArrayLayout

log = logging.getLogger(__name__)


class Engines:
    """The native core, if it is available, and zarr-python; closed when no reader and no ticket refers to them.

    Parameters
    ----------
    device : int or None
        Number of the CUDA device of all outputs; None for host memory.
    limits : Limits
        Limits of slabs.
    options : bool or int
        As for :class:`~linumpy.gpu.read.engines.core_device.CoreDevice`.
    """

    def __init__(self, device: int | None, limits: Limits, **options: Any) -> None:
        self._cupy = None if device is None else require_cuda()
        self._device = device
        self._process = os.getpid()
        self._zarr = ZarrEngine(self._cupy, device)
        self._core: CoreEngine | None = None
        if native.why_no_core() is None:
            with self._context():
                core_device = None
                if self._cupy is not None and device is not None:
                    core_device = CoreDevice(self._cupy, device, limits, **options)
                self._core = CoreEngine(limits.threads, core_device)
        weakref.finalize(self, _close, self._process, self._core, self._zarr)

    def core_for(self, layout: ArrayLayout) -> CoreEngine | None:
        """Return the native core if it reads arrays of this layout."""
        if self._core is None or takes(layout):
            return self._core
        if (reason := native.why_not_decoded(layout.chain)) is not None:
            _log_once(reason)
        return None

    def submit(
        self,
        layouts: list[ArrayLayout],
        numbers: list[int],
        start: np.ndarray,
        stop: np.ndarray,
        kept: np.ndarray | None,
        shapes: list[tuple[int, ...]],
        outs: Sequence[Array] | None,
        dtype: DTypeLike | None,
        *,
        timed: bool = False,
    ) -> list[Ticket]:
        """Submit regions, a job each.

        Parameters
        ----------
        layouts : list of ArrayLayout
            The arrays.
        numbers : list of int
            Index of each region's array.
        start, stop, kept : numpy.ndarray
            Bounds of the regions, (regions, rank), and which axes of the array each output has; None if all have all.
        shapes : list of tuple of int
            Shapes of the outputs.
        outs, dtype
            As for :meth:`linumpy.gpu.read.reader.Reader.submit_many`.
        timed : bool
            Whether to measure the times of kernels.
        """
        self._check_process()
        dtype, bfloat16 = without_bfloat16(dtype, *(layout.dtype for layout in layouts))
        targets = targets_of(layouts, numbers, outs, dtype)
        with self._context():
            given = [None] * len(shapes) if outs is None else outs
            arrays = [self._output(*spec) for spec in zip(given, shapes, targets, strict=True)]
            ready = self._record_event()
            strides = strides_of(arrays, kept, start.shape)
            regions = Regions(np.array(numbers, np.int64), start, stop, strides, addresses_of(arrays))
            tickets: list[Any] = [None] * len(arrays)
            try:
                for rows in grouped(layouts, numbers, targets):
                    conversion = Conversion(
                        layouts[numbers[rows[0]]].dtype, targets[rows[0]], layouts[numbers[rows[0]]].swapped, bfloat16
                    )
                    self._submit_group(tickets, rows, layouts, conversion, regions, kept, arrays, ready, timed=timed)
            except BaseException:
                for ticket in tickets:  # submitted jobs must not write to the caller's outputs after this call
                    if ticket is not None:
                        ticket.cancel()
                for ticket in tickets:
                    if ticket is not None:
                        ticket.exception()
                raise
        return tickets

    def _submit_group(
        self,
        tickets: list[Any],
        rows: list[int],
        layouts: list[ArrayLayout],
        conversion: Conversion,
        all_regions: Regions,
        kept: np.ndarray | None,
        arrays: list[Array],
        ready: Event,
        *,
        timed: bool,
    ) -> None:
        """Submit some rows of `all_regions`, whose arrays have one geometry, and write their tickets to `tickets`."""
        group_layouts, regions, outputs = layouts, all_regions, [arrays[row] for row in rows]
        if len(rows) < len(all_regions):
            used, array_index = np.unique(all_regions.array[rows], return_inverse=True)
            group_layouts = [layouts[number] for number in used.tolist()]
            regions = replace(all_regions.take(np.array(rows)), array=array_index)
        engine: CoreEngine | ZarrEngine = self.core_for(group_layouts[0]) or self._zarr
        if isinstance(engine, CoreEngine):
            jobs: Sequence[Job] = engine.submit(group_layouts, conversion, regions, outputs, ready, timed=timed)
        else:
            sizes = all_regions.stop - all_regions.start
            views = [with_all_axes(arrays[row], None if kept is None else kept[row], sizes[row]) for row in rows]
            jobs = engine.submit(group_layouts, conversion, regions, outputs, ready, views)
        for row, number, job in zip(rows, regions.array.tolist(), jobs, strict=True):
            tickets[row] = Ticket(job, group_layouts[number], conversion, engine, self)

    def submit_rows(
        self, layout: ArrayLayout, start: np.ndarray, stop: np.ndarray, out: Array, rows: np.ndarray, kept: np.ndarray
    ) -> Ticket:
        """Submit regions of one array as one job, each for a row of `out`."""
        self._check_process()
        strides, addresses = rows_of(out, rows, stop - start, kept, self._device)
        conversion = Conversion(layout.dtype, cast_dtype(layout.dtype, out.dtype), layout.swapped)
        regions = Regions(np.zeros(len(start), np.int64), start, stop, strides, addresses)
        with self._context():
            ready = self._record_event()
            if (core := self.core_for(layout)) is not None:
                (job,) = core.submit([layout], conversion, regions, [out], ready, one_job=True)
                return Ticket(job, layout, conversion, core, self)
            views = [with_all_axes(out[row], kept, size) for row, size in zip(rows, stop - start, strict=True)]
            (zarr_job,) = self._zarr.submit([layout], conversion, regions, [out], ready, views)
            return Ticket(zarr_job, layout, conversion, self._zarr, self)

    def submit_together(
        self,
        layouts: list[ArrayLayout],
        regions: Regions,
        dtype: DTypeLike,
        output: object,
        looks: Sequence[MetadataLook | None] | None,
    ) -> Together:
        """Submit regions that the core reads; see :meth:`linumpy.gpu.read.reader.Reader.submit_together`."""
        self._check_process()
        dtype, bfloat16 = without_bfloat16(dtype, *(layout.dtype for layout in layouts))
        geometries: dict[object, list[int]] = {}
        for number, layout in enumerate(layouts):
            geometries.setdefault(layout.geometry, []).append(number)
        groups = []
        with self._context():
            ready = self._record_event()
            for numbers in geometries.values():
                group_layouts, group_regions = layouts, regions
                rows: Sequence[int] = range(len(regions))
                if len(geometries) > 1:
                    chosen = np.flatnonzero(np.isin(regions.array, numbers))
                    group_layouts, rows = [layouts[number] for number in numbers], chosen.tolist()
                    group_regions = regions.take(chosen)
                    group_regions = replace(group_regions, array=np.searchsorted(numbers, group_regions.array))
                stored = group_layouts[0].dtype
                conversion = Conversion(stored, cast_dtype(stored, dtype), group_layouts[0].swapped, bfloat16)
                group_looks = None if looks is None else [looks[number] for number in numbers]
                assert self._core is not None
                jobs = self._core.submit_together(group_layouts, conversion, group_regions, output, ready, group_looks)
                groups.append(GeometryJobs(rows, jobs, group_layouts, group_regions.array))
        return Together(groups, self)

    def _output(self, out: Array | None, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        """Return the array that a region is read into: a new one, or the caller's, checked."""
        if out is None:
            return new_array(np if self._cupy is None else self._cupy, shape, dtype)
        check_output(out, shape, dtype, self._device)
        return out

    def _context(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._cupy is None else self._cupy.cuda.Device(self._device)

    def _record_event(self) -> Event | None:
        """Record an event after the caller's queued work; outputs are written after this event. None in host memory."""
        if self._cupy is None:
            return None
        cuda = self._cupy.cuda
        return cuda.get_current_stream().record(cuda.Event(disable_timing=True))

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError("this reader was made by the parent of this process: make one here")

    @property
    def device_bytes(self) -> int:
        """Device memory that is held for slabs and cached chunks; 0 before the first job."""
        return 0 if self._core is None else self._core.device_bytes

    def stats(self, stats: ReaderStats) -> ReaderStats:
        """Add the counters and times of all engines."""
        stats = self._zarr.stats(stats)
        return stats if self._core is None else self._core.stats(stats)

    def close(self) -> None:
        """Cancel queued jobs, wait for running ones, and free threads, streams and memory."""
        _close(self._process, self._core, self._zarr)


@functools.cache
def _log_once(reason: str) -> None:
    log.warning("%s", reason)


def _close(process: int, *engines: CoreEngine | ZarrEngine | None) -> None:
    """Close engines; not in a child process, which does not have its parent's threads."""
    if os.getpid() == process:
        for engine in engines:
            if engine is not None:
                engine.close()
