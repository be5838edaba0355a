"""One reader for many jobs: regions of many arrays, from any thread, through the native core.

In: what names an array, and regions. Out: tickets, whose arrays are CuPy's on a device, NumPy's in host memory. Chunks
of different jobs share reads, decoders and kernels; a chunk that several of them want is read and decoded once. What
the core does not decode is read by zarr-python.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
from zarr.abc.store import Store

from linumpy.core import native
from linumpy.core.reader import takes
from linumpy.device import require_cuda
from linumpy.errors import UnsupportedLayoutError, not_pickled
from linumpy.gpu.read.by_core import CoreEngine
from linumpy.gpu.read.by_zarr import ZarrEngine
from linumpy.gpu.read.core_device import CoreDevice
from linumpy.gpu.read.direct import require_direct
from linumpy.gpu.read.layouts import LAYOUTS
from linumpy.gpu.read.limits import limits_for
from linumpy.gpu.read.outputs import (
    Regions,
    addresses_of,
    alike,
    bounds_of,
    check_output,
    columns_of,
    rows_of,
    strides_of,
    targets_of,
    with_all_axes,
)
from linumpy.gpu.read.request import DEFAULT_SCRATCH_BYTES, cast_dtype, check_scratch, without_bfloat16
from linumpy.gpu.read.scatter import Conversion
from linumpy.gpu.read.stats import ReaderStats
from linumpy.gpu.read.ticket import Job, Ticket, Together
from linumpy.io.looks import MetadataLook
from linumpy.io.source import Source, with_options
from linumpy.plan.layout import ArrayLayout
from linumpy.plan.region import Region, normalize_region

#: Smallest slab: a few blocks of a file.
_MIN_SLAB = 4096


class Reader:
    """Reads regions of Zarr arrays for many callers at once.

    Parameters
    ----------
    device : int or "cpu", optional
        CUDA device, by default the current one; ``"cpu"`` for NumPy arrays.
    scratch_bytes : int
        Device memory for slabs, which the first job takes; outputs come beside it. By default 512 MiB, and what a zstd
        chunk needs that does not fit there, about 3.5 times its size, while there is twice as much.
    cache_bytes : int
        Device memory for decoded chunks that are kept for later jobs; none by default, and none in host memory.
    decode_on : {"device", "host"}, optional
        Where encoded chunks are decoded; by default where it takes less time.
    slab_nbytes : int, optional
        Bytes of a slab at most, by default what measured fastest.
    direct : bool
        Whether stored bytes go to device memory by GPUDirect Storage; only where the system has it. What kvikio fails
        to read so goes through pinned host memory, which is logged once and named in the report.
    timed : bool
        Whether :meth:`stats` measures how long the device copies, decodes and scatters: two events more a slab.

    Raises
    ------
    GpuUnavailableError
        No CUDA device; ``device="cpu"`` needs none. No kvikio for ``direct=True``, the only thing that needs it.
    ValueError
        Less than 1 MiB of scratch, or an option that cannot be.

    Examples
    --------
    >>> from linumpy.gpu import Reader
    >>> with Reader(device="cpu") as reader:  # doctest: +SKIP
    ...     tickets = reader.submit_many("brain.zarr", [np.s_[0:64, 0:64, 0:64], np.s_[64:128, 0:64, 0:64]])
    ...     crops = [ticket.result() for ticket in tickets]
    """

    def __init__(
        self,
        device: Any = None,
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
            require_direct()
        self._cupy = require_cuda() if self.on_device else None
        self.device: int | None = None
        if self._cupy is not None:
            self.device = self._cupy.cuda.runtime.getDevice() if device is None else int(device)
            if self.device >= (count := self._cupy.cuda.runtime.getDeviceCount()):
                raise ValueError(f"device={device}: there are {count} CUDA devices, numbered from 0")
        self._hits = self._misses = 0
        self._process = os.getpid()
        self._is_closed = False
        limits = limits_for(
            scratch_bytes,
            decode_on=decode_on,
            slab_nbytes=slab_nbytes,
            may_exceed=scratch_bytes == DEFAULT_SCRATCH_BYTES,
        )
        #: Device memory that slabs take, from the first job on.
        self.scratch_nbytes = limits.held_nbytes if self.on_device else 0
        self._zarr = ZarrEngine(self._cupy, self.device)
        self._core: CoreEngine | None = None
        if native.why_no_core() is None:
            device_options: dict[str, Any] = {"cache_bytes": int(cache_bytes), "direct": direct, "timed": timed}
            with _context_of(self._cupy, self.device):
                where = None
                if self.device is not None:
                    where = CoreDevice(self._cupy, self.device, limits, **device_options)
                self._core = CoreEngine(limits.threads, where)
        weakref.finalize(self, _close, self._process, self._core, self._zarr)

    def _core_for(self, layout: ArrayLayout) -> CoreEngine | None:
        """Return the native core where it reads arrays of this layout."""
        return self._core if self._core is not None and takes(layout) else None

    def __reduce__(self) -> NoReturn:
        raise not_pickled(self, "send the path of the array, and make a Reader there")

    def submit(
        self,
        source: Source,
        region: Any = None,
        *,
        level: int = 0,
        out: Any = None,
        dtype: Any = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Ticket:
        """Ask for one region.

        Parameters
        ----------
        source, region, level, dtype, storage_options
            As for :func:`linumpy.gpu.read_zarr_to_gpu`. With ``"bfloat16"`` outputs are of uint16 and hold the bits.
        out : cupy.ndarray or numpy.ndarray, optional
            Where to put it; strides may be any that are positive.

        Returns
        -------
        Ticket
            Whose ``result()`` waits for the array.

        Raises
        ------
        UnsupportedLayoutError
            An array that this reader cannot read; the message says why.
        FileNotFoundError, SourceError, RegionError, TypeError, ValueError
            As :func:`linumpy.gpu.read_zarr_to_gpu`.
        """
        layout = self.layout_of(source, level, storage_options=storage_options)
        return self.submit_layout(layout, region, out=out, dtype=dtype)

    def submit_many(
        self,
        source: Source | ArrayLayout | Sequence[Source | ArrayLayout],
        regions: Any,
        *,
        level: int = 0,
        outs: Sequence[Any] | None = None,
        dtype: Any = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> list[Ticket]:
        """Ask for many regions, planned together.

        Parameters
        ----------
        source : as for :meth:`submit`, or an ArrayLayout, or list of these
            The array, or its layout from :meth:`layout_of`, whose metadata files are then not looked at again; in a
            list, that of each region.
        level, dtype
            As for :meth:`submit`.
        regions : numpy.ndarray of int, (n, rank, 2), or sequence of regions
            First voxel and the one behind the last, along each axis; or what :meth:`submit` takes.
        outs : sequence of arrays, optional
            One for each region. Without `dtype` each region is cast to the dtype of its own.
        storage_options : mapping, optional
            Of all URLs in `source`.

        Raises
        ------
        UnsupportedLayoutError, FileNotFoundError, SourceError, RegionError, TypeError, ValueError
            As :meth:`submit`, for any of the regions; then none is read.
        """
        regions = regions if isinstance(regions, np.ndarray) else list(regions)
        layouts, numbers = self._layouts_of(source, len(regions), level, storage_options)
        if outs is not None and len(outs) != len(regions):
            raise ValueError(f"outs has {len(outs)} arrays, but there are {len(regions)} regions")
        if not len(regions):
            return []
        if isinstance(regions, np.ndarray):
            start, stop, shapes = bounds_of(regions, layouts, numbers)
            kept = None
        else:
            boxes = [normalize_region(one, layouts[n].shape) for one, n in zip(regions, numbers, strict=True)]
            if len({len(box.start) for box in boxes}) > 1:
                raise ValueError("regions are of arrays with different numbers of axes: submit those of each by itself")
            start, stop, kept = columns_of(boxes)
            shapes = [box.shape for box in boxes]
        return self._submit(layouts, numbers, start, stop, kept, shapes, outs, dtype)

    def submit_rows(
        self, source: Source | ArrayLayout, regions: np.ndarray, out: Any, rows: np.ndarray, kept: Sequence[bool]
    ) -> Ticket:
        """Ask for many regions of one array, each for a row of another one; they are one job, which fails as a whole.

        Parameters
        ----------
        source : as for :meth:`submit`, or an ArrayLayout
            The array.
        regions : numpy.ndarray of int, (n, rank, 2)
            First voxel and the one behind the last, along each axis.
        out : cupy.ndarray or numpy.ndarray
            Rows of at least the shape of a region, which comes to lie in the first voxels of each.
        rows : numpy.ndarray of int, (n,)
            The row of each region; no two have the same.
        kept : sequence of bool, (rank,)
            Which axes of the array rows have; along the others regions have one voxel.

        Raises
        ------
        UnsupportedLayoutError, FileNotFoundError, SourceError, RegionError, TypeError, ValueError
            As :meth:`submit`; rows that `out` does not have, or that are too small.
        """
        self._check_process()
        layout, mask, wanted = self.layout_of(source), np.asarray(kept), np.asarray(regions)
        start, stop, _ = bounds_of(wanted, [layout], [0] * (len(wanted) if wanted.ndim else 0))
        strides, addresses = rows_of(out, np.asarray(rows), stop - start, mask, self.device)
        target = cast_dtype(layout.dtype, out.dtype)
        with _context_of(self._cupy, self.device):
            ready = self._recorded(self._current_stream())
            every = Regions(np.zeros(len(start), np.int64), start, stop, strides, addresses)
            conversion = Conversion(layout.dtype, target, layout.swapped)
            if (core := self._core_for(layout)) is not None:
                (job,) = core.submit([layout], conversion, every, [out], ready, one_job=True)
                return Ticket(job, layout, conversion, core, self)
            views = [with_all_axes(out[row], mask, size) for row, size in zip(rows, stop - start, strict=True)]
            (other,) = self._zarr.submit([layout], conversion, every, [out], ready, views)
            return Ticket(other, layout, conversion, self._zarr, self)

    def submit_together(
        self,
        layouts: list[ArrayLayout],
        regions: Regions,
        dtype: Any,
        output: Any,
        looks: Sequence[MetadataLook | None] | None = None,
    ) -> Together:
        """Ask for many regions whose outputs are known as numbers, and that are waited for in one call.

        Parameters
        ----------
        layouts : list of ArrayLayout
            The arrays, all with :meth:`reads_natively`.
        regions : Regions
            What is wanted of them, within their bounds, and where it goes, on the device of this reader.
        dtype : dtype or "bfloat16"
            Of the outputs.
        output : object
            What holds their memory.
        looks : sequence of MetadataLook or None, optional
            Metadata files of each array, which are looked at before chunks are read: where one is another by then, the
            errors of its regions are :class:`~linumpy.errors.StaleLayoutError`.
        """
        self._check_process()
        dtype, bfloat16 = without_bfloat16(dtype, *(layout.dtype for layout in layouts))
        kinds: dict[object, list[int]] = {}
        for number, layout in enumerate(layouts):
            kinds.setdefault(layout.geometry, []).append(number)
        shares = []
        with _context_of(self._cupy, self.device):
            ready = self._recorded(self._current_stream())
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

    def reads_natively(self, layout: ArrayLayout) -> bool:
        """Say whether :meth:`submit_together` takes arrays of this layout: the core reads them, from a regular grid."""
        return layout.lengths is None and self._core_for(layout) is not None

    def _layouts_of(
        self,
        source: Source | ArrayLayout | Sequence[Source | ArrayLayout],
        count: int,
        level: int,
        options: Mapping[str, Any] | None,
    ) -> tuple[list[Any], list[int]]:
        """List the layouts of sources, each once, and which of them each region is of."""
        if not isinstance(source, (list, tuple)) or (len(source) == 2 and isinstance(source[0], Store)):
            return [self.layout_of(source, level, storage_options=options)], [0] * count
        if len(source) != count:
            raise ValueError(f"source is a list of {len(source)} arrays, but there are {count} regions")
        numbers: dict[int, int] = {}
        array = [numbers.setdefault(id(one), len(numbers)) for one in source]
        first = {number: one for one, number in zip(reversed(source), reversed(array), strict=True)}
        layouts = [self.layout_of(first[number], level, storage_options=options) for number in range(len(first))]
        return layouts, array

    def submit_layout(
        self, layout: ArrayLayout, region: Any = None, *, out: Any = None, dtype: Any = None, timed: bool = False
    ) -> Ticket:
        """Ask for one region of an array whose layout is known; see :meth:`submit`."""
        box = region if isinstance(region, Region) else normalize_region(region, layout.shape)
        start, stop, kept = columns_of([box])
        outs = None if out is None else [out]
        return self._submit([layout], [0], start, stop, kept, [box.shape], outs, dtype, timed=timed)[0]

    def _output(self, out: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Make the array that a region is read into, or check the caller's."""
        if out is None:
            return (np if self._cupy is None else self._cupy).empty(shape, dtype)
        check_output(out, shape, dtype, self.device)
        return out

    def _current_stream(self) -> Any:
        return None if self._cupy is None else self._cupy.cuda.get_current_stream()

    def _recorded(self, stream: Any) -> Any:
        """Mark what the caller has queued, behind which outputs may be written; None in host memory."""
        return None if self._cupy is None else stream.record(self._cupy.cuda.Event(disable_timing=True))

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError("this reader was made by the parent of this process: make one here")

    def layout_of(
        self, source: Source | ArrayLayout, level: int = 0, *, storage_options: Mapping[str, Any] | None = None
    ) -> ArrayLayout:
        """Say how an array is stored; known local ones are not opened again while their metadata is as it was.

        Raises
        ------
        UnsupportedLayoutError
            This reader cannot read it.
        """
        source = with_options(source, storage_options)
        layout, known = (source, True) if isinstance(source, ArrayLayout) else LAYOUTS.find(source, level)
        self._hits, self._misses = self._hits + known, self._misses + (not known)
        if layout.unsupported is not None:
            raise UnsupportedLayoutError(f"{layout.name} cannot be read by this reader: {layout.unsupported}")
        return layout

    def _submit(
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
        self._check_process()
        dtype, bfloat16 = without_bfloat16(dtype, *(layout.dtype for layout in layouts))
        targets = targets_of(layouts, numbers, outs, dtype)
        with _context_of(self._cupy, self.device):
            wanted = [None] * len(shapes) if outs is None else outs
            arrays = [self._output(*one) for one in zip(wanted, shapes, targets, strict=True)]
            ready = self._recorded(self._current_stream())
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
        engine: CoreEngine | ZarrEngine = self._core_for(mine[0]) or self._zarr
        if isinstance(engine, CoreEngine):
            jobs: Sequence[Job] = engine.submit(mine, conversion, regions, outputs, ready, timed=timed)
        else:
            sizes = every.stop - every.start
            views = [with_all_axes(arrays[row], None if kept is None else kept[row], sizes[row]) for row in rows]
            jobs = engine.submit(mine, conversion, regions, outputs, ready, views)
        for row, number, job in zip(rows, regions.array.tolist(), jobs, strict=True):
            tickets[row] = Ticket(job, mine[number], conversion, engine, self)

    @property
    def device_bytes(self) -> int:
        """Device memory that is held for slabs and kept chunks."""
        return 0 if self._core is None else self._core.device_bytes

    def stats(self) -> ReaderStats:
        """Say what has been done so far."""
        stats = ReaderStats(layout_hits=self._hits, layout_misses=self._misses)
        stats = self._zarr.stats(stats)
        return stats if self._core is None else self._core.stats(stats)

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be submitted any more."""
        return self._is_closed

    def close(self) -> None:
        """Cancel what is queued, wait for what is under way, and free threads, streams and memory."""
        self._is_closed = True
        _close(self._process, self._core, self._zarr)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _check_options(device: Any, decode_on: str | None, slab_nbytes: int | None, cache_bytes: int) -> None:
    is_number = isinstance(device, (int, np.integer)) and not isinstance(device, bool) and device >= 0
    if device is not None and not is_number and not (isinstance(device, str) and device == "cpu"):
        raise ValueError(f"device={device!r}: the number of a CUDA device, or 'cpu'")
    if decode_on not in (None, "device", "host"):
        raise ValueError(f"decode_on={decode_on!r}: 'device', 'host' or None")
    if slab_nbytes is not None and slab_nbytes < _MIN_SLAB:
        raise ValueError(f"slab_nbytes={slab_nbytes}: at least {_MIN_SLAB} are needed")
    if cache_bytes < 0:
        raise ValueError(f"cache_bytes={cache_bytes}: 0 or more")


def _context_of(cupy: Any, device: int | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if cupy is None else cupy.cuda.Device(device)


def _close(process: int, *engines: CoreEngine | ZarrEngine | None) -> None:
    """Close what carries out jobs; a child has none of its parent's threads."""
    if os.getpid() == process:
        for engine in engines:
            if engine is not None:
                engine.close()
