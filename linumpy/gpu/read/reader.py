"""One reader for many jobs: regions of many arrays, from any thread, through the native core.

In: sources and regions. Out: tickets; their arrays are CuPy arrays on a device, NumPy arrays in host memory. Chunks of
different jobs share reads, decoders and kernels. A chunk that several waiting jobs want is read and decoded once.
zarr-python reads the arrays that the core does not read, which the log and the report of a ticket say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

import numpy as np
from numpy.typing import DTypeLike
from zarr.abc.store import Store

from linumpy.arrays import Array
from linumpy.checks import is_integer
from linumpy.device import require_cuda
from linumpy.errors import not_pickled
from linumpy.gpu.read.engines.dispatch import Engines
from linumpy.gpu.read.layouts import LAYOUTS
from linumpy.gpu.read.limits import limits_for
from linumpy.gpu.read.outputs import Regions, bounds_of, boxes_of
from linumpy.gpu.read.request import DEFAULT_SCRATCH_BYTES, check_elements, check_scratch
from linumpy.gpu.read.stats import ReaderStats
from linumpy.gpu.read.ticket import Ticket, Together
from linumpy.io.paths import MetadataLook
from linumpy.io.source import Source, with_options
from linumpy.plan.layout import ArrayLayout
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
        Device memory for decoded chunks that later jobs may use; none by default, and none in host memory.
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
        device: int | str | None = None,
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
        self._hits = self._misses = 0
        self._is_closed = False
        limits = limits_for(
            scratch_bytes,
            decode_on=decode_on,
            slab_nbytes=slab_nbytes,
            may_exceed=scratch_bytes == DEFAULT_SCRATCH_BYTES,
        )
        #: Device memory for slabs, allocated by the first job.
        self.scratch_nbytes = limits.held_nbytes if self.on_device else 0
        self._engines = Engines(self.device, limits, cache_bytes=int(cache_bytes), direct=direct, timed=timed)

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
        return self._engines.submit([layout], [0], boxes_of([box]), None if out is None else [out], dtype, timed=timed)[
            0
        ]

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
        return self._engines.submit(layouts, numbers, boxes, outs, dtype)

    def submit_regions(
        self,
        layouts: list[ArrayLayout],
        regions: Regions,
        dtype: DTypeLike,
        owner: object,
        looks: Sequence[MetadataLook | None] | None = None,
    ) -> Together:
        """Submit many regions, whose outputs are given by addresses and strides, to wait for all in one call.

        Parameters
        ----------
        layouts : list of ArrayLayout
            The arrays, from :meth:`layout_of`.
        regions : Regions
            Regions within the bounds of these arrays, and their outputs on the device of this reader.
        dtype : dtype or "bfloat16"
            Dtype of the outputs.
        owner : object
            The object that owns the memory of all outputs; it is kept until the last region has been read.
        looks : sequence of MetadataLook or None, optional
            Metadata files of each array, which are checked before chunks are read: if one has changed, the errors of
            its regions are :class:`~linumpy.errors.StaleLayoutError`. Only of arrays for which :meth:`reads_natively`.
        """
        return self._engines.submit_regions(layouts, regions, dtype, owner, looks)

    def reads_natively(self, layout: ArrayLayout) -> bool:
        """Say whether the core reads arrays of this layout, on a regular grid, and checks their metadata files."""
        return layout.lengths is None and self._engines.reads_natively(layout)

    def _layouts_of(
        self,
        source: Source | ArrayLayout | Sequence[Source | ArrayLayout],
        count: int,
        level: int,
        options: Mapping[str, object] | None,
    ) -> tuple[list[ArrayLayout], list[int]]:
        """Return the layouts of distinct sources, and the index of each region's layout."""
        if not isinstance(source, (list, tuple)) or (len(source) == 2 and isinstance(source[0], Store)):
            return [self.layout_of(source, level, storage_options=options)], [0] * count
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
            layout, is_hit = with_options(source, storage_options), True  # which refuses options: a layout is no URL
        else:
            layout, is_hit = LAYOUTS.find(source, level, storage_options)
        self._hits, self._misses = self._hits + is_hit, self._misses + (not is_hit)
        check_elements(layout)
        return layout

    @property
    def device_bytes(self) -> int:
        """Device memory that the reader holds for slabs and cached chunks; 0 before the first job."""
        return self._engines.device_bytes

    def stats(self) -> ReaderStats:
        """Return counters and times so far."""
        return self._engines.stats(ReaderStats(layout_hits=self._hits, layout_misses=self._misses))

    @property
    def is_closed(self) -> bool:
        """Whether the reader is closed, so that nothing can be submitted."""
        return self._is_closed

    def close(self) -> None:
        """Cancel queued jobs, wait for running ones, and free threads, streams and memory."""
        self._is_closed = True
        self._engines.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _check_options(device: int | str | None, decode_on: str | None, slab_nbytes: int | None, cache_bytes: int) -> None:
    if not (device is None or (isinstance(device, str) and device == "cpu") or (is_integer(device) and device >= 0)):
        raise ValueError(f"device={device!r}: the number of a CUDA device, or 'cpu'")
    if decode_on not in (None, "device", "host"):
        raise ValueError(f"decode_on={decode_on!r}: 'device', 'host' or None")
    if slab_nbytes is not None and slab_nbytes < _MIN_SLAB_NBYTES:
        raise ValueError(f"slab_nbytes={slab_nbytes}: at least {_MIN_SLAB_NBYTES} are needed")
    if cache_bytes < 0:
        raise ValueError(f"cache_bytes={cache_bytes}: 0 or more")


def _device_number(device: int | str | None) -> int:
    """Return the number of a CUDA device, by default the current one; raise if it does not exist."""
    runtime = require_cuda().cuda.runtime
    number: int = runtime.getDevice() if device is None else int(device)
    if number >= (count := runtime.getDeviceCount()):
        raise ValueError(f"device={device}: there are {count} CUDA devices, numbered from 0")
    return number
