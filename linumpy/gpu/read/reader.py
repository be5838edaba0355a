"""One reader for many jobs: regions of many arrays, from any thread, through the native core.

In: sources and regions. Out: tickets; their arrays are CuPy arrays on a device, NumPy arrays in host memory. Chunks of
different jobs share reads, decoders and kernels. A chunk that several waiting jobs want is read and decoded once.
Regions with the same geometry and cast are submitted together, to one engine: the core, or zarr-python for arrays that
the core does not read, which the log and the report of a ticket say.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn, cast

import numpy as np
from numpy.typing import DTypeLike
from zarr.abc.store import Store

from linumpy.arrays import Array, ReadDevice
from linumpy.checks import is_integer
from linumpy.core import native
from linumpy.core.reader import takes
from linumpy.device import require_cuda
from linumpy.errors import not_pickled
from linumpy.gpu.read.engines.by_core import CoreEngine
from linumpy.gpu.read.engines.by_zarr import ZarrEngine, log_once
from linumpy.gpu.read.layouts import LAYOUTS
from linumpy.gpu.read.limits import Limits
from linumpy.gpu.read.outputs import Boxes, Regions, bounds_of, boxes_of, check_output
from linumpy.gpu.read.report import ReaderStats
from linumpy.gpu.read.request import DEFAULT_SCRATCH_BYTES, check_elements, check_scratch, new_array
from linumpy.gpu.read.scatter import Conversion, conversion_to
from linumpy.gpu.read.ticket import JobGroup, Ticket, Together
from linumpy.io.paths import MetadataLook
from linumpy.io.source import Source, with_options
from linumpy.plan.layout import ArrayLayout
from linumpy.plan.read import html_table
from linumpy.plan.region import Region, RegionLike, normalize_region

#: Minimum of `slab_nbytes`: a block of a file system.
_MIN_SLAB_NBYTES = 4096


class Reader:
    """Reads regions of Zarr arrays for many callers at once.

    Parameters
    ----------
    device : int or "cpu", optional
        CUDA device, by default the current one; ``"cpu"`` for NumPy arrays.
    scratch_bytes : int
        Device memory for slabs, which the first job allocates; outputs need further memory. By default 512 MiB; then a
        zstd chunk that does not fit gets memory of its own, about 3.5 times its size, if twice as much is free.
    cache_bytes : int
        Memory for decoded chunks that later jobs may use, of the device, or with ``"cpu"`` of the host; none by
        default. A chunk is used again only if its stored object has not changed.
    decode_on : {"device", "host"}, optional
        Where encoded chunks are decoded; by default the faster one.
    slab_nbytes : int, optional
        Maximum bytes of a slab's chunks, at least 4096; by default as many as fit into a slot, a third of the scratch
        memory.
    direct : bool
        Whether stored bytes go to device memory by GPUDirect Storage, which the system must have. Reads that fail in
        kvikio go through pinned host memory, which is logged once and named in the report.
    timed : bool
        Whether to measure the times of copies, decoders and scatter kernels for :meth:`stats`, by further events.

    Raises
    ------
    GpuUnavailableError
        No CUDA device; ``device="cpu"`` needs none. No kvikio for ``direct=True``, which alone needs it.
    ValueError
        Less than 1 MiB of scratch, a device that does not exist, or another invalid option.
    TypeError
        `scratch_bytes` that is no whole number.

    Examples
    --------
    >>> from linumpy.gpu import Reader
    >>> with Reader(device="cpu") as reader:  # doctest: +SKIP
    ...     tickets = reader.submit_many("brain.zarr", [np.s_[0:64, 0:64, 0:64], np.s_[64:128, 0:64, 0:64]])
    ...     crops = [ticket.result() for ticket in tickets]
    """

    def __init__(
        self,
        device: ReadDevice | None = None,
        scratch_bytes: int = DEFAULT_SCRATCH_BYTES,
        *,
        cache_bytes: int = 0,
        decode_on: str | None = None,
        slab_nbytes: int | None = None,
        direct: bool = False,
        timed: bool = False,
    ) -> None:
        scratch_bytes = check_scratch(scratch_bytes)
        _check_options(device, decode_on, slab_nbytes, cache_bytes)
        self.on_device = device != "cpu"
        if direct and self.on_device:
            from linumpy.gpu.read.engines.direct import require_direct  # only for GPUDirect Storage

            require_direct()
        self.device = _device_number(device) if self.on_device else None
        self._cupy = require_cuda() if self.on_device else None
        self._hits = self._misses = 0
        self._is_closed = False
        self._process = os.getpid()
        limits = Limits(
            scratch_bytes,
            decode_on=decode_on,
            slab_nbytes=slab_nbytes,
            may_exceed=scratch_bytes == DEFAULT_SCRATCH_BYTES,
        )
        #: Device memory for slabs, allocated by the first job.
        self.scratch_nbytes = limits.held_nbytes if self.on_device else 0
        self._zarr = ZarrEngine(self._cupy, self.device)
        self._core: CoreEngine | None = None
        if native.why_no_core() is None:
            with self._context():
                core_device = None
                if self._cupy is not None and self.device is not None:
                    from linumpy.gpu.read.engines.core_device import CoreDevice  # only for reads to a device

                    core_device = CoreDevice(
                        self._cupy, self.device, limits, cache_bytes=int(cache_bytes), direct=direct, timed=timed
                    )
                self._core = CoreEngine(limits.threads, core_device, 0 if self.on_device else int(cache_bytes))
        # Tickets refer to their reader, which is closed when nothing refers to it.
        weakref.finalize(self, _close, self._process, self._core, self._zarr)

    def __reduce__(self) -> NoReturn:
        raise not_pickled(self, "send the path of the array, and make a Reader there")

    def submit(
        self,
        source: Source | ArrayLayout,
        region: Region | RegionLike = None,
        *,
        level: int = 0,
        out: Array | None = None,
        dtype: DTypeLike | None = None,
        timed: bool = False,
        storage_options: Mapping[str, object] | None = None,
    ) -> Ticket:
        """Submit one region.

        Parameters
        ----------
        source, region, level, dtype, storage_options
            As for :func:`linumpy.gpu.read_zarr_to_gpu`, or a layout from :meth:`layout_of`, whose metadata files are
            then not checked again. With ``"bfloat16"`` outputs are of uint16 and hold the bits.
        timed : bool
            Whether to measure the times of kernels, for the report of the ticket.
        out : cupy.ndarray or numpy.ndarray, optional
            The output, of any positive strides.

        Returns
        -------
        Ticket
            Its ``result()`` waits for the array.

        Raises
        ------
        FileNotFoundError, SourceError, RegionError, TypeError, ValueError
            As :func:`linumpy.gpu.read_zarr_to_gpu`.
        MemoryError
            No memory for the output, or, for the first job, for the slots.
        RuntimeError
            This process is a child of the process that made the reader.
        """
        layout = self.layout_of(source, level, storage_options=storage_options)
        box = region if isinstance(region, Region) else normalize_region(region, layout.shape)
        return self._tickets([layout], [0], boxes_of([box]), None if out is None else [out], dtype, timed=timed)[0]

    def submit_many(
        self,
        source: Source | ArrayLayout | Sequence[Source | ArrayLayout],
        regions: np.ndarray | Iterable[RegionLike],
        *,
        level: int = 0,
        outs: Sequence[Array] | None = None,
        dtype: DTypeLike | None = None,
        storage_options: Mapping[str, object] | None = None,
    ) -> list[Ticket]:
        """Submit many regions, which are planned together.

        Parameters
        ----------
        source : as for :meth:`submit`, or an ArrayLayout, or list of these
            The array, or its layout from :meth:`layout_of`, whose metadata files are then not checked again; a list
            holds the array of each region.
        level, dtype
            As for :meth:`submit`.
        regions : numpy.ndarray of int, (n, rank, 2), or sequence of regions
            Start and stop of each region along each axis; or regions as for :meth:`submit`.
        outs : sequence of arrays, optional
            An output for each region. Without `dtype` each region is cast to the dtype of its output.
        storage_options : mapping, optional
            Options for all URLs in `source`.

        Returns
        -------
        list of Ticket
            A ticket for each region, in order.

        Raises
        ------
        FileNotFoundError, SourceError, RegionError, TypeError, ValueError
            As for :meth:`submit`, for any of the regions; then none is read. Other numbers of arrays or outputs than of
            regions.
        MemoryError, RuntimeError
            As for :meth:`submit`.
        """
        regions = regions if isinstance(regions, np.ndarray) else list(regions)
        layouts, numbers = self._layouts_of(source, len(regions), level, storage_options)
        if outs is not None and len(outs) != len(regions):
            raise ValueError(f"outs has {len(outs)} arrays, but there are {len(regions)} regions")
        if not len(regions):
            return []
        if isinstance(regions, np.ndarray):
            boxes = bounds_of(regions, layouts, numbers)
        else:
            each = [normalize_region(region, layouts[n].shape) for region, n in zip(regions, numbers, strict=True)]
            if len({len(region.start) for region in each}) > 1:
                raise ValueError("regions are of arrays with different numbers of axes: submit those of each by itself")
            boxes = boxes_of(each)
        return self._tickets(layouts, numbers, boxes, outs, dtype)

    def submit_regions(
        self,
        layouts: list[ArrayLayout],
        regions: Regions,
        dtype: DTypeLike,
        owner: object,
        looks: Sequence[MetadataLook | None] | None = None,
    ) -> Together:
        """Submit many regions, whose outputs are given by addresses and strides, to wait for all in one call.

        `layouts`: the arrays, from :meth:`layout_of`. `regions`: within the bounds of these arrays, with their outputs
        on the device of this reader. `dtype`: of the outputs, or "bfloat16". `owner`: the object that owns the memory
        of all outputs; it is kept until the last region has been read. `looks`: metadata files of each array, which are
        checked before chunks are read: if one has changed, the errors of its regions are
        :class:`~linumpy.errors.StaleLayoutError`. Only of arrays for which :meth:`reads_natively`.
        """
        self._check_process()
        with self._context():
            conversions = [self._conversion(layout, dtype) for layout in layouts]
            return Together(self._submit(layouts, conversions, regions, [owner], looks=looks), self)

    def reads_natively(self, layout: ArrayLayout) -> bool:
        """Say whether the core reads arrays of this layout, on a regular grid, and checks their metadata files."""
        return layout.lengths is None and self._is_for_core(layout)

    def _is_for_core(self, layout: ArrayLayout) -> bool:
        if self._core is None or layout.unsupported is not None or takes(layout):
            return self._core is not None and layout.unsupported is None
        if (reason := native.why_not_decoded(layout.chain)) is not None:
            log_once(reason)
        return False

    def _tickets(
        self,
        layouts: list[ArrayLayout],
        numbers: list[int],
        boxes: Boxes,
        outs: Sequence[Array] | None,
        dtype: DTypeLike | None,
        *,
        timed: bool = False,
    ) -> list[Ticket]:
        """Submit regions, each with an array of its own; `numbers` has the index of each region's array."""
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
            alike.setdefault((self._is_for_core(layout), conversion, layout.geometry), []).append(number)
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
                engine = self._core if natively and self._core is not None else self._zarr
                jobs = engine.submit(part_layouts, conversion, part, part_owners, ready, looks=part_looks, timed=timed)
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
        return conversion_to(dtype, layout.dtype, layout.swapped, self.on_device)

    def _output(self, out: Array | None, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        """Return the array that a region is read into: a new one, or the caller's, checked."""
        if out is None:
            return new_array(np if self._cupy is None else self._cupy, shape, dtype)
        check_output(out, shape, dtype, self.device)
        return out

    def _context(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._cupy is None else self._cupy.cuda.Device(self.device)

    def _record_event(self) -> Any:
        """Record an event after the caller's queued work; outputs are written after this event. None in host memory."""
        if self._cupy is None:
            return None
        cuda = self._cupy.cuda
        return cuda.get_current_stream().record(cuda.Event(disable_timing=True))

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError("this reader was made by the parent of this process: make one here")

    def _layouts_of(
        self,
        source: Source | ArrayLayout | Sequence[Source | ArrayLayout],
        count: int,
        level: int,
        options: Mapping[str, object] | None,
    ) -> tuple[list[ArrayLayout], list[int]]:
        """Return the layouts of distinct sources, and the index of each region's layout."""
        if not isinstance(source, (list, tuple)) or (len(source) == 2 and isinstance(source[0], Store)):
            return [self.layout_of(cast("Source", source), level, storage_options=options)], [0] * count
        if len(source) != count:
            raise ValueError(f"source is a list of {len(source)} arrays, but there are {count} regions")
        numbers: dict[int, int] = {}
        array_index = [numbers.setdefault(id(item), len(numbers)) for item in source]
        distinct = {number: item for item, number in zip(reversed(source), reversed(array_index), strict=True)}
        layouts = [self.layout_of(distinct[number], level, storage_options=options) for number in range(len(distinct))]
        return layouts, array_index

    def layout_of(
        self, source: Source | ArrayLayout, level: int = 0, *, storage_options: Mapping[str, object] | None = None
    ) -> ArrayLayout:
        """Return how an array is stored; local layouts are cached until the files of their metadata change."""
        if isinstance(source, ArrayLayout):
            with_options(source, storage_options)  # type: ignore[arg-type]  # refuses options: a layout is no URL
            layout, is_hit = source, True
        else:
            layout, is_hit = LAYOUTS.find(source, level, storage_options)
        self._hits, self._misses = self._hits + is_hit, self._misses + (not is_hit)
        check_elements(layout)
        return layout

    @property
    def device_bytes(self) -> int:
        """Device memory that the reader holds for slabs and cached chunks; 0 before the first job."""
        return 0 if self._core is None else self._core.device_bytes

    def stats(self) -> ReaderStats:
        """Return counters and times so far."""
        stats = self._zarr.stats(ReaderStats(layout_hits=self._hits, layout_misses=self._misses))
        return stats if self._core is None else self._core.stats(stats)

    def _repr_html_(self) -> str:
        stats = self.stats()
        rows = [
            ("reader", "into host memory" if self.device is None else f"to CUDA device {self.device}"),
            ("read", f"regions {stats.jobs:,}, chunks {stats.chunks:,}, stored bytes {stats.bytes_read:,}"),
            ("cache", f"{stats.cache_hits:,} chunks found, {stats.cache_misses:,} not"),
            ("memory", f"{stats.device_bytes:,} bytes of device memory"),
        ]
        return html_table(rows)

    @property
    def is_closed(self) -> bool:
        """Whether the reader is closed, so that nothing can be submitted."""
        return self._is_closed

    def close(self) -> None:
        """Cancel queued jobs, wait for running ones, and free threads, streams and memory."""
        self._is_closed = True
        _close(self._process, self._core, self._zarr)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _check_options(device: ReadDevice | None, decode_on: str | None, slab_nbytes: int | None, cache_bytes: int) -> None:
    if not (device is None or (isinstance(device, str) and device == "cpu") or (is_integer(device) and device >= 0)):
        raise ValueError(f"device={device!r}: the number of a CUDA device, or 'cpu'")
    if decode_on not in (None, "device", "host"):
        raise ValueError(f"decode_on={decode_on!r}: 'device', 'host' or None")
    if slab_nbytes is not None and slab_nbytes < _MIN_SLAB_NBYTES:
        raise ValueError(f"slab_nbytes={slab_nbytes}: at least {_MIN_SLAB_NBYTES} are needed")
    if cache_bytes < 0:
        raise ValueError(f"cache_bytes={cache_bytes}: 0 or more")


def _device_number(device: ReadDevice | None) -> int:
    """Return the number of a CUDA device, by default the current one; raise if it does not exist."""
    runtime = require_cuda().cuda.runtime
    number: int = runtime.getDevice() if device is None else int(device)
    if number >= (count := runtime.getDeviceCount()):
        raise ValueError(f"device={device}: there are {count} CUDA devices, numbered from 0")
    return number


def _close(process: int, *engines: CoreEngine | ZarrEngine | None) -> None:
    """Close engines; not in a child process, which does not have its parent's threads."""
    if os.getpid() == process:
        for engine in engines:
            if engine is not None:
                engine.close()
