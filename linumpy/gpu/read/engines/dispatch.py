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
from linumpy.gpu.read.limits import Limits
from linumpy.gpu.read.outputs import Boxes, Event, Regions, check_output
from linumpy.gpu.read.request import cast_dtype, new_array, without_bfloat16
from linumpy.gpu.read.scatter import Conversion
from linumpy.gpu.read.stats import ReaderStats
from linumpy.gpu.read.ticket import JobGroup, Jobs, Ticket, Together
from linumpy.io.paths import MetadataLook
from linumpy.plan.layout import ArrayLayout

log = logging.getLogger(__name__)


class Engines:
    """The native core, if it is available, and zarr-python; closed when no reader and no ticket refers to them.

    `device`: number of the CUDA device of all outputs; None for host memory. `options`: as for
    :class:`~linumpy.gpu.read.engines.core_device.CoreDevice`.
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
                    from linumpy.gpu.read.engines.core_device import CoreDevice  # only for reads to a device

                    core_device = CoreDevice(self._cupy, device, limits, **options)
                self._core = CoreEngine(limits.threads, core_device)
        weakref.finalize(self, _close, self._process, self._core, self._zarr)

    def reads_natively(self, layout: ArrayLayout) -> bool:
        """Say whether the native core reads arrays of this layout; zarr-python reads all others."""
        if self._core is None or layout.unsupported is not None or takes(layout):
            return self._core is not None and layout.unsupported is None
        if (reason := native.why_not_decoded(layout.chain)) is not None:
            _log_once(reason)
        return False

    def submit(
        self,
        layouts: list[ArrayLayout],
        numbers: list[int],
        boxes: Boxes,
        outs: Sequence[Array] | None,
        dtype: DTypeLike | None,
        *,
        timed: bool = False,
    ) -> list[Ticket]:
        """Submit regions, each with an array of its own.

        `numbers`: index of each region's array. `boxes`: bounds and shapes of the regions. `outs`, `dtype`: as for
        :meth:`linumpy.gpu.read.reader.Reader.submit_many`. `timed`: whether to measure the times of kernels.
        """
        self._check_process()
        if dtype is None and outs is not None:  # an array for each pair of array and dtype
            pairs = [(number, getattr(out, "dtype", None)) for number, out in zip(numbers, outs, strict=True)]
            index = {pair: position for position, pair in enumerate(dict.fromkeys(pairs))}
            layouts, numbers = [layouts[number] for number, _ in index], [index[pair] for pair in pairs]
            conversions = [self._conversion(layouts[n], dtype) for n, (_, dtype) in enumerate(index)]
        else:
            conversions = [self._conversion(layout, dtype) for layout in layouts]
        with self._context():
            given = [None] * len(numbers) if outs is None else outs
            targets = [conversions[number].target for number in numbers]
            arrays = [self._output(*spec) for spec in zip(given, boxes.shapes, targets, strict=True)]
            regions = boxes.into(arrays, numbers)
            groups = self._submit(layouts, conversions, regions, arrays, timed=timed)
        tickets: list[Any] = [None] * len(arrays)
        for group in groups:
            for number, (row, array) in enumerate(zip(group.rows, group.array_index.tolist(), strict=True)):
                job = group.jobs.job(number, arrays[row])
                tickets[row] = Ticket(job, group.layouts[array], group.conversion, group.engine, self)
        return tickets

    def submit_regions(
        self,
        layouts: list[ArrayLayout],
        regions: Regions,
        dtype: DTypeLike,
        owner: object,
        looks: Sequence[MetadataLook | None] | None,
    ) -> Together:
        """Submit regions; see :meth:`linumpy.gpu.read.reader.Reader.submit_regions`."""
        self._check_process()
        with self._context():
            conversions = [self._conversion(layout, dtype) for layout in layouts]
            return Together(self._submit(layouts, conversions, regions, [owner], looks=looks), self)

    def _submit(
        self,
        layouts: list[ArrayLayout],
        conversions: list[Conversion],
        regions: Regions,
        owners: Sequence[object],
        *,
        looks: Sequence[MetadataLook | None] | None = None,
        timed: bool = False,
    ) -> list[JobGroup]:
        """Submit the regions of arrays that are read and cast alike together.

        `conversions` are those of the arrays; `owners` has an object for each region, or one for all.
        """
        alike: dict[tuple[bool, Conversion, object], list[int]] = {}
        for number, (layout, conversion) in enumerate(zip(layouts, conversions, strict=True)):
            alike.setdefault((self.reads_natively(layout), conversion, layout.geometry), []).append(number)
        ready, groups = self._record_event(), list[JobGroup]()
        try:
            for (natively, conversion, _), numbers in alike.items():
                rows: Sequence[int] = range(len(regions))
                part, part_layouts, part_owners, part_looks = regions, layouts, owners, looks
                if len(alike) > 1:
                    chosen = np.flatnonzero(np.isin(regions.array, numbers))
                    rows, part = chosen.tolist(), regions.take(chosen)
                    part = replace(part, array=np.searchsorted(numbers, part.array))
                    part_layouts = [layouts[number] for number in numbers]
                    part_owners = [owners[row] for row in rows] if len(owners) > 1 else owners
                    part_looks = None if looks is None else [looks[number] for number in numbers]
                engine: CoreEngine | ZarrEngine = self._zarr
                if natively and self._core is not None:
                    engine = self._core
                    jobs: Jobs = engine.submit(
                        part_layouts, conversion, part, part_owners, ready, looks=part_looks, timed=timed
                    )
                else:
                    jobs = self._zarr.submit(part_layouts, conversion, part, part_owners, ready)
                groups.append(JobGroup(rows, jobs, part_layouts, part.array, conversion, engine))
        except BaseException:
            for group in groups:  # submitted jobs must not write to the caller's outputs after this call
                group.jobs.cancel()
            for group in groups:
                group.jobs.wait()
            raise
        return groups

    def _conversion(self, layout: ArrayLayout, dtype: DTypeLike | None) -> Conversion:
        if not (dtype is None or isinstance(dtype, (str, np.dtype))):
            dtype = np.dtype(dtype)  # which can be hashed
        return _conversion(layout.dtype, layout.swapped, dtype, self._cupy is not None)

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


@functools.lru_cache(maxsize=256)
def _conversion(stored: np.dtype, swapped: bool, dtype: DTypeLike | None, on_device: bool) -> Conversion:
    """Return the conversion of stored elements to a dtype, by default to their own."""
    dtype, bfloat16 = without_bfloat16(dtype, stored)
    return Conversion(stored, cast_dtype(stored, dtype, on_device=on_device), swapped, bfloat16)
