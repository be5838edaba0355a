"""The engines of one reader: regions that are read alike are submitted together, to the engine that reads them.

In: layouts, regions within their bounds, and outputs. Out: tickets. The native core reads what it decodes, zarr-python
the rest. Errors: ``RuntimeError`` in a child of the process that made them; what a job fails with, its ticket raises.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from linumpy.core import native
from linumpy.core.reader import takes
from linumpy.device import require_cuda
from linumpy.gpu.read.engines.by_core import CoreEngine
from linumpy.gpu.read.engines.by_zarr import ZarrEngine
from linumpy.gpu.read.engines.core_device import CoreDevice
from linumpy.gpu.read.limits import Limits
from linumpy.gpu.read.outputs import (
    Regions,
    addresses_of,
    alike,
    check_output,
    rows_of,
    strides_of,
    targets_of,
    with_all_axes,
)
from linumpy.gpu.read.request import cast_dtype, without_bfloat16
from linumpy.gpu.read.scatter import Conversion
from linumpy.gpu.read.stats import ReaderStats
from linumpy.gpu.read.ticket import Job, Ticket, Together
from linumpy.io.looks import MetadataLook
from linumpy.plan.layout import ArrayLayout


class Engines:
    """The native core, where there is one, and zarr-python; closed when neither a reader nor a ticket holds them.

    Parameters
    ----------
    device : int or None
        Number of the CUDA device of all outputs; None for host memory.
    limits : Limits
        Of slabs.
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
                where = None if device is None else CoreDevice(self._cupy, device, limits, **options)
                self._core = CoreEngine(limits.threads, where)
        weakref.finalize(self, _close, self._process, self._core, self._zarr)

    def core_for(self, layout: ArrayLayout) -> CoreEngine | None:
        """Return the native core where it reads arrays of this layout."""
        return self._core if self._core is not None and takes(layout) else None

    def submit(
        self,
        layouts: list[ArrayLayout],
        numbers: list[int],
        start: np.ndarray,
        stop: np.ndarray,
        kept: np.ndarray | None,
        shapes: list[tuple[int, ...]],
        outs: Sequence[Any] | None,
        dtype: Any,
        *,
        timed: bool = False,
    ) -> list[Ticket]:
        """Submit regions, a job each.

        Parameters
        ----------
        layouts : list of ArrayLayout
            The arrays.
        numbers : list of int
            Which of them each region is of.
        start, stop, kept : numpy.ndarray
            Bounds of the regions, and which axes their outputs have; None for all.
        shapes : list of tuple of int
            Of the outputs.
        outs, dtype
            As for :meth:`linumpy.gpu.read.reader.Reader.submit_many`.
        timed : bool
            Whether the times of kernels are wanted.
        """
        self._check_process()
        dtype, bfloat16 = without_bfloat16(dtype, *(layout.dtype for layout in layouts))
        targets = targets_of(layouts, numbers, outs, dtype)
        with self._context():
            wanted = [None] * len(shapes) if outs is None else outs
            arrays = [self._output(*one) for one in zip(wanted, shapes, targets, strict=True)]
            ready = self._recorded()
            every = Regions(
                np.array(numbers, np.int64),
                start,
                stop,
                strides_of(arrays, kept, start.shape),
                addresses_of(arrays),
            )
            tickets: list[Any] = [None] * len(arrays)
            try:
                for rows in alike(layouts, numbers, targets):
                    conversion = Conversion(
                        layouts[numbers[rows[0]]].dtype, targets[rows[0]], layouts[numbers[rows[0]]].swapped, bfloat16
                    )
                    self._submit_alike(tickets, rows, layouts, conversion, every, kept, arrays, ready, timed=timed)
            except BaseException:
                for ticket in tickets:  # those that were submitted must not write to outputs of the caller any more
                    if ticket is not None:
                        ticket.cancel()
                for ticket in tickets:
                    if ticket is not None:
                        ticket.exception()
                raise
        return tickets

    def _submit_alike(
        self,
        tickets: list[Any],
        rows: list[int],
        layouts: list[ArrayLayout],
        conversion: Conversion,
        every: Regions,
        kept: np.ndarray | None,
        arrays: list[Any],
        ready: Any,
        *,
        timed: bool,
    ) -> None:
        """Submit those of some regions that are of arrays of one geometry, and put down their tickets."""
        mine, regions, outputs = layouts, every, [arrays[row] for row in rows]
        if len(rows) < len(every):
            used, which = np.unique(every.array[rows], return_inverse=True)
            mine = [layouts[number] for number in used.tolist()]
            regions = replace(every.take(np.array(rows)), array=which)
        engine: CoreEngine | ZarrEngine = self.core_for(mine[0]) or self._zarr
        if isinstance(engine, CoreEngine):
            jobs: Sequence[Job] = engine.submit(mine, conversion, regions, outputs, ready, timed=timed)
        else:
            sizes = every.stop - every.start
            views = [with_all_axes(arrays[row], None if kept is None else kept[row], sizes[row]) for row in rows]
            jobs = engine.submit(mine, conversion, regions, outputs, ready, views)
        for row, number, job in zip(rows, regions.array.tolist(), jobs, strict=True):
            tickets[row] = Ticket(job, mine[number], conversion, engine, self)

    def submit_rows(
        self, layout: ArrayLayout, start: np.ndarray, stop: np.ndarray, out: Any, rows: np.ndarray, kept: np.ndarray
    ) -> Ticket:
        """Submit regions of one array as one job, each for a row of `out`."""
        self._check_process()
        strides, addresses = rows_of(out, rows, stop - start, kept, self._device)
        conversion = Conversion(layout.dtype, cast_dtype(layout.dtype, out.dtype), layout.swapped)
        every = Regions(np.zeros(len(start), np.int64), start, stop, strides, addresses)
        with self._context():
            ready = self._recorded()
            if (core := self.core_for(layout)) is not None:
                (job,) = core.submit([layout], conversion, every, [out], ready, one_job=True)
                return Ticket(job, layout, conversion, core, self)
            views = [with_all_axes(out[row], kept, size) for row, size in zip(rows, stop - start, strict=True)]
            (other,) = self._zarr.submit([layout], conversion, every, [out], ready, views)
            return Ticket(other, layout, conversion, self._zarr, self)

    def submit_together(
        self,
        layouts: list[ArrayLayout],
        regions: Regions,
        dtype: Any,
        output: Any,
        looks: Sequence[MetadataLook | None] | None,
    ) -> Together:
        """Submit regions that the core reads; see :meth:`linumpy.gpu.read.reader.Reader.submit_together`."""
        self._check_process()
        dtype, bfloat16 = without_bfloat16(dtype, *(layout.dtype for layout in layouts))
        kinds: dict[object, list[int]] = {}
        for number, layout in enumerate(layouts):
            kinds.setdefault(layout.geometry, []).append(number)
        shares = []
        with self._context():
            ready = self._recorded()
            for numbers in kinds.values():
                mine, every = layouts, regions
                rows: Sequence[int] = range(len(regions))
                if len(kinds) > 1:
                    chosen = np.flatnonzero(np.isin(regions.array, numbers))
                    mine, rows = [layouts[number] for number in numbers], chosen.tolist()
                    every = regions.take(chosen)
                    every = replace(every, array=np.searchsorted(numbers, every.array))
                conversion = Conversion(mine[0].dtype, cast_dtype(mine[0].dtype, dtype), mine[0].swapped, bfloat16)
                seen = None if looks is None else [looks[number] for number in numbers]
                assert self._core is not None
                jobs = self._core.submit_together(mine, conversion, every, output, ready, seen)
                shares.append((rows, jobs, mine, every.array))
        return Together(shares, self)

    def _output(self, out: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Make the array that a region is read into, or check the caller's."""
        if out is None:
            return (np if self._cupy is None else self._cupy).empty(shape, dtype)
        check_output(out, shape, dtype, self._device)
        return out

    def _context(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._cupy is None else self._cupy.cuda.Device(self._device)

    def _recorded(self) -> Any:
        """Mark what the caller has queued, behind which outputs may be written; None in host memory."""
        if self._cupy is None:
            return None
        cuda = self._cupy.cuda
        return cuda.get_current_stream().record(cuda.Event(disable_timing=True))

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError("this reader was made by the parent of this process: make one here")

    @property
    def device_bytes(self) -> int:
        """Device memory that is held for slabs and kept chunks."""
        return 0 if self._core is None else self._core.device_bytes

    def stats(self, stats: ReaderStats) -> ReaderStats:
        """Add what was done."""
        stats = self._zarr.stats(stats)
        return stats if self._core is None else self._core.stats(stats)

    def close(self) -> None:
        """Cancel what is queued, wait for what is under way, and free threads, streams and memory."""
        _close(self._process, self._core, self._zarr)


def _close(process: int, *engines: CoreEngine | ZarrEngine | None) -> None:
    """Close what carries out jobs; a child has none of its parent's threads."""
    if os.getpid() == process:
        for engine in engines:
            if engine is not None:
                engine.close()
