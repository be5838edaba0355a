"""One reader for many jobs: regions of many arrays, from any thread, through one staging ring.

In: what names an array, and regions. Out: tickets, whose arrays are CuPy's on a device, NumPy's in host memory. Chunks
of different jobs share reads, decoders and kernels; a chunk that several of them want is read and decoded once.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np

from linumpy.core import native
from linumpy.core.reader import CoreReader, takes
from linumpy.device import require_cuda
from linumpy.errors import UnsupportedLayoutError, not_pickled
from linumpy.gpu.kernels import address_of
from linumpy.gpu.loop.alone import FEW_CHUNKS
from linumpy.gpu.loop.jobs import Jobs, Regions, SmallJob
from linumpy.gpu.loop.limits import limits_for
from linumpy.gpu.loop.loop import Loop
from linumpy.gpu.loop.report import LINUMPY, ReadReport
from linumpy.gpu.loop.ticket import Ticket
from linumpy.gpu.read.core_device import LEAST_SCRATCH_BYTES, SLOTS, CoreDevice
from linumpy.gpu.read.direct import require_direct
from linumpy.gpu.read.host import HostTicket, submit_to_core
from linumpy.gpu.read.layouts import LAYOUTS
from linumpy.gpu.read.outputs import alike, bounds_of, check_output, rows_of, shapes_of, strides_of, targets_of
from linumpy.gpu.read.request import DEFAULT_SCRATCH_BYTES, cast_dtype, check_scratch, without_bfloat16
from linumpy.gpu.read.stats import ReaderStats, with_core, with_loop
from linumpy.gpu.staging.device import DeviceStaging
from linumpy.gpu.staging.direct import DirectStaging
from linumpy.gpu.staging.host import HostStaging
from linumpy.gpu.staging.scatter import Conversion
from linumpy.io.source import Source
from linumpy.plan.layout import ArrayLayout
from linumpy.plan.read.plan import ReadPlan
from linumpy.plan.region import Region, normalize_region

#: What `submit` returns: of a reader's loop, or of the native core.
AnyTicket = Ticket | HostTicket
#: Smallest slab: a few blocks of a file.
_MIN_SLAB = 4096


class Reader:
    """Reads regions of Zarr arrays for many callers at once.

    Parameters
    ----------
    device : int or "cpu", optional
        CUDA device, by default the current one; ``"cpu"`` for NumPy arrays.
    scratch_bytes : int
        Device memory for slabs; outputs come beside it. By default 512 MiB, and what a zstd chunk needs that does not
        fit there, about 3.5 times its size, while there is twice as much: one at a time, given back when they are read.
    cache_bytes : int
        Device memory for decoded chunks that are kept for later jobs; none by default, and none in host memory.
    decode_on : {"device", "host"}, optional
        Where encoded chunks are decoded; by default where it takes less time.

    slab_nbytes : int, optional
        Bytes of a slab at most, by default what measured fastest.
    direct : bool
        Whether stored bytes go to device memory by GPUDirect Storage; only where the system has it. What kvikio fails
        to read so goes through pinned host memory, which is logged once and told in the report.
    timed : bool
        Whether :meth:`stats` tells how long the device copies, decodes and scatters: two events more a slab.

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
        self.limits = limits_for(
            scratch_bytes,
            on_device=self.on_device,
            decode_on=decode_on,
            slab_nbytes=slab_nbytes,
            may_exceed=scratch_bytes == DEFAULT_SCRATCH_BYTES,
        )
        self._hits = self._misses = 0
        self._process = os.getpid()
        self._core_device: CoreDevice | None = None
        context = functools.partial(_context_of, self._cupy, self.device)
        make_staging = functools.partial(_make_staging, self.on_device, direct, self.limits.scratch_bytes)
        describe = functools.partial(_describe_by, weakref.ref(self))
        # The loop's thread must not refer to the reader, which would then never be given up.
        self._engines = _Engines(
            functools.partial(Loop, make_staging, self.limits, context, describe, int(cache_bytes), timed=timed),
            self._core_reader(is_plain=not (direct or cache_bytes)),
        )
        if self._engines.core is None:
            self._engines.start_loop()
        weakref.finalize(self, self._engines.close, self._process)

    def _core_reader(self, *, is_plain: bool) -> CoreReader | None:
        """Return the native core where it reads for this reader."""
        if not self.on_device:
            return None if native.why_no_core() is not None else CoreReader(self.limits.threads)
        if not (is_plain and self.limits.scratch_bytes >= LEAST_SCRATCH_BYTES and native.reads_to_devices()):
            return None
        assert self.device is not None
        with _context_of(self._cupy, self.device):
            self._core_device = CoreDevice(self._cupy, self.device, self.limits)
            core = CoreReader(self.limits.threads, self._core_device.record())
            self._arena = self._cupy.cuda.alloc(SLOTS * self._core_device.slab_nbytes)
            self._cupy.cuda.get_current_stream().synchronize()
            core.give_memory(self._arena.ptr)
            return core

    @property
    def _loop(self) -> Loop:
        return self._engines.start_loop()

    def _core_for(self, layout: ArrayLayout) -> CoreReader | None:
        """Return the native core where it reads arrays of this layout into host memory."""
        core, device = self._engines.core, self._core_device
        return core if core is not None and (takes(layout) if device is None else device.takes(layout)) else None

    def __reduce__(self) -> NoReturn:
        raise not_pickled(self, "send the path of the array, and make a Reader there")

    def submit(
        self, source: Source, region: Any = None, *, level: int = 0, out: Any = None, dtype: Any = None
    ) -> AnyTicket:
        """Ask for one region.

        Parameters
        ----------
        source, region, level, dtype
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
        return self.submit_layout(self.layout_of(source, level), region, out=out, dtype=dtype)

    def submit_many(
        self,
        source: Source | ArrayLayout | Sequence[Source | ArrayLayout],
        regions: Any,
        *,
        level: int = 0,
        outs: Sequence[Any] | None = None,
        dtype: Any = None,
    ) -> list[AnyTicket]:
        """Ask for many regions, planned together.

        Parameters
        ----------
        source : as for :meth:`submit`, or an ArrayLayout, or list of these
            The array, or what :meth:`layout_of` told of it, which is then not looked at again; in a list, that of each
            region.
        level, dtype
            As for :meth:`submit`.
        regions : numpy.ndarray of int, (n, rank, 2), or sequence of regions
            First voxel and the one behind the last, along each axis; or what :meth:`submit` takes.
        outs : sequence of arrays, optional
            One for each region. Without `dtype` each region is cast to the dtype of its own.

        Raises
        ------
        UnsupportedLayoutError, FileNotFoundError, SourceError, RegionError, TypeError, ValueError
            As :meth:`submit`, for any of the regions; then none is read.
        """
        regions = regions if isinstance(regions, np.ndarray) else list(regions)
        layouts, array = self._layouts_of(source, len(regions), level)
        if outs is not None and len(outs) != len(regions):
            raise ValueError(f"outs has {len(outs)} arrays, but there are {len(regions)} regions")
        if not len(regions):
            return []
        if isinstance(regions, np.ndarray):
            start, stop = bounds_of(regions, layouts, array)
            kept = None
        else:
            boxes = [normalize_region(one, layouts[n].shape) for one, n in zip(regions, array.tolist(), strict=True)]
            if len({len(box.start) for box in boxes}) > 1:
                raise ValueError("regions are of arrays with different numbers of axes: submit those of each by itself")
            start, stop = (np.array([getattr(box, side) for box in boxes], np.int64) for side in ("start", "stop"))
            kept = np.array([box.kept for box in boxes], bool)
        return self._submit(layouts, array, start, stop, kept, outs, dtype)

    def submit_rows(
        self, source: Source | ArrayLayout, regions: np.ndarray, out: Any, rows: np.ndarray, kept: Sequence[bool]
    ) -> AnyTicket:
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
        start, stop = bounds_of(wanted, [layout], np.zeros(wanted.shape[:1], np.int64))
        strides, addresses = rows_of(out, np.asarray(rows), stop - start, mask, self.device)
        target = cast_dtype(layout.dtype, out.dtype)
        with _context_of(self._cupy, self.device):
            ready = self._recorded(self._current_stream())
        every = Regions(np.zeros(len(start), np.int64), start, stop, strides, addresses)
        conversion = Conversion(layout.dtype, target, layout.swapped)
        if (core := self._core_for(layout)) is not None:
            return self._to_core(core, [layout], conversion, every, [out], ready, one_job=True)[0]
        ticket = Ticket(out, layout.name, self._order, None, self._loop.life)
        if not len(start):
            ticket.settle([], None)
            return ticket
        ticket.portions = len(start)
        jobs = Jobs(self.limits, [layout], conversion, every, ready, [ticket] * len(start))
        self._loop.submit(jobs, jobs.boxes)
        return ticket

    def _to_core(
        self,
        core: CoreReader,
        layouts: list[ArrayLayout],
        conversion: Conversion,
        regions: Regions,
        outputs: list[Any],
        ready: Any,
        *,
        one_job: bool = False,
    ) -> list[HostTicket]:
        """Submit regions of arrays of one geometry to the native core."""
        if self._core_device is None:
            return submit_to_core(core, self, layouts, conversion, regions, outputs, one_job=one_job)
        with _context_of(self._cupy, self.device):
            on_device = self._core_device.on_device(layouts[0], conversion, int(ready.ptr))
        return submit_to_core(
            core, self, layouts, conversion, regions, outputs, one_job=one_job, on_device=on_device, ready=ready
        )

    def _layouts_of(
        self, source: Source | ArrayLayout | Sequence[Source | ArrayLayout], count: int, level: int
    ) -> tuple[list[Any], np.ndarray]:
        """List the layouts of sources, each once, and which of them each region is of."""
        if not isinstance(source, (list, tuple)):
            return [self.layout_of(source, level)], np.zeros(count, np.int64)
        if len(source) != count:
            raise ValueError(f"source is a list of {len(source)} arrays, but there are {count} regions")
        numbers: dict[int, int] = {}
        array = [numbers.setdefault(id(one), len(numbers)) for one in source]
        first = {number: one for one, number in zip(reversed(source), reversed(array), strict=True)}
        return [self.layout_of(first[number], level) for number in range(len(first))], np.array(array, np.int64)

    def submit_layout(
        self, layout: ArrayLayout, region: Any = None, *, out: Any = None, dtype: Any = None, timed: bool = False
    ) -> AnyTicket:
        """Ask for one region of an array whose layout is known; see :meth:`submit`."""
        box = region if isinstance(region, Region) else normalize_region(region, layout.shape)
        count = ReadPlan(layout, box).chunk_count
        if 0 < count <= FEW_CHUNKS and self._core_for(layout) is None:
            return self._submit_small(layout, box, count, out, dtype, timed=timed)
        start, stop = (np.array([one], np.int64).reshape(1, -1) for one in (box.start, box.stop))
        kept = np.array([box.kept], bool).reshape(1, -1)
        outs = None if out is None else [out]
        return self._submit([layout], np.zeros(1, np.int64), start, stop, kept, outs, dtype, timed=timed)[0]

    def _submit_small(
        self, layout: ArrayLayout, box: Region, count: int, out: Any, dtype: Any, *, timed: bool
    ) -> AnyTicket:
        """Do what :meth:`_submit` does for one region of few chunks, in a fifth of the time."""
        self._check_process()
        if dtype is None and out is not None:
            dtype = getattr(out, "dtype", None)
        dtype, bfloat16 = without_bfloat16(dtype, layout.dtype)
        target = cast_dtype(layout.dtype, dtype)
        with _context_of(self._cupy, self.device):
            home = self._current_stream()
            array = self._output(out, box.shape, target)
            ready = self._recorded(home)
        ticket = Ticket(array, layout.name, self._order, home if out is None else None, self._loop.life)
        ticket.timed = timed
        strides = array.strides
        if len(strides) < len(box.kept):
            rest = iter(strides)
            strides = tuple([next(rest) if kept else 0 for kept in box.kept])
        conversion = Conversion(layout.dtype, target, layout.swapped, bfloat16)
        job = SmallJob(
            self.limits, layout, conversion, box.start, box.stop, strides, address_of(array), ready, ticket, count
        )
        self._loop.submit(job, count)
        return ticket

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

    def layout_of(self, source: Source | ArrayLayout, level: int = 0) -> ArrayLayout:
        """Say how an array is stored; known ones are not opened again while their metadata is as it was.

        Raises
        ------
        UnsupportedLayoutError
            This reader cannot read it.
        """
        layout, known = (source, True) if isinstance(source, ArrayLayout) else LAYOUTS.find(source, level)
        self._hits, self._misses = self._hits + known, self._misses + (not known)
        if layout.unsupported is not None:
            raise UnsupportedLayoutError(f"{layout.name} cannot be read by this reader: {layout.unsupported}")
        return layout

    def _submit(
        self,
        layouts: list[ArrayLayout],
        array: np.ndarray,
        start: np.ndarray,
        stop: np.ndarray,
        kept: np.ndarray | None,
        outs: Sequence[Any] | None,
        dtype: Any,
        *,
        timed: bool = False,
    ) -> list[AnyTicket]:
        self._check_process()
        numbers = array.tolist()
        dtype, bfloat16 = without_bfloat16(dtype, *(layout.dtype for layout in layouts))
        targets = targets_of(layouts, numbers, outs, dtype)
        shapes = shapes_of(stop - start, kept)
        with _context_of(self._cupy, self.device):
            home = self._current_stream()
            wanted = [None] * len(shapes) if outs is None else outs
            arrays = [self._output(*one) for one in zip(wanted, shapes, targets, strict=True)]
            ready = self._recorded(home)
        own = home if outs is None else None
        strides = strides_of(arrays, kept, start.shape)
        addresses = np.array([address_of(one) for one in arrays], np.int64)
        tickets: list[Any] = [None] * len(arrays)
        made = []
        for rows in alike(layouts, numbers, targets):
            mine, regions = layouts, Regions(array, start, stop, strides, addresses)
            if len(rows) < len(numbers):
                used, which = np.unique(array[rows], return_inverse=True)
                mine = [layouts[number] for number in used.tolist()]
                regions = replace(regions.take(np.array(rows)), array=which)
            conversion = Conversion(mine[0].dtype, targets[rows[0]], mine[0].swapped, bfloat16)
            if (core := self._core_for(mine[0])) is not None:
                given = self._to_core(core, mine, conversion, regions, [arrays[row] for row in rows], ready)
                for row, ticket in zip(rows, given, strict=True):
                    tickets[row] = ticket
                continue
            for row in rows:
                tickets[row] = Ticket(arrays[row], layouts[numbers[row]].name, self._order, own, self._loop.life)
                tickets[row].timed = timed
            made.append(Jobs(self.limits, mine, conversion, regions, ready, [tickets[row] for row in rows]))
        for jobs in made:  # none of them is queued where one cannot be made
            self._loop.submit(jobs, jobs.boxes)
        return tickets

    def _order(self, stream: Any, events: list[Any]) -> None:
        """Let a stream wait for events."""
        if self._cupy is None or not events:
            return
        stream = self._cupy.cuda.get_current_stream() if stream is None else stream
        for event in events:
            stream.wait_event(event)

    def _describe(
        self, layout: ArrayLayout, conversion: Conversion, timings: list[Any], engine: str, ticket: Ticket
    ) -> ReadReport:
        """Make the report of a job that is over."""
        decode, scatter = self._seconds(layout, timings) if ticket.timed else (None, None)
        array = ticket.array
        return ReadReport(
            source=layout.name,
            backend=LINUMPY,
            gds="not used",
            engine=engine,
            fallback="",
            shape=tuple(array.shape),
            dtype=conversion.target_name,
            bytes_read=ticket.counts.bytes_read,
            bytes_decoded=int(array.size) * conversion.target.itemsize,
            chunks_read=ticket.counts.chunks - ticket.counts.filled,
            chunks_filled=ticket.counts.filled,
            files_opened=ticket.counts.files_opened,
            scratch_bytes=self.device_bytes if ticket.counts.chunks else 0,
            plan_seconds=0.0,
            read_seconds=ticket.end - ticket.begin,
            scatter_seconds=scatter,
            decoder=_decoder(layout, ticket),
            decode_seconds=decode,
            chunks_decoded_by_host=ticket.counts.by_host,
            host_decode_seconds=ticket.counts.host_seconds,
            reads_repeated=ticket.counts.reads_repeated,
        )

    def _seconds(self, layout: ArrayLayout, timings: list[Any]) -> tuple[float | None, float | None]:
        """Times of the decoders and of the scatter kernels; waits for the last of them."""
        if self._cupy is None:
            return None, None
        elapsed = self._cupy.cuda.get_elapsed_time
        for _, (_, _, last) in timings:
            last.synchronize()
        scatter = sum(elapsed(middle, last) for _, (_, middle, last) in timings) / 1e3
        if layout.chain is None:
            return None, scatter
        return sum(elapsed(first, middle) for kind, (first, middle, _) in timings if kind == "device") / 1e3, scatter

    @property
    def device_bytes(self) -> int:
        """Device memory that is held for slabs."""
        loop = self._engines.loop
        carrier = None if loop is None else loop.carrier
        return 0 if carrier is None else int(carrier.staging.arena_nbytes)

    def stats(self) -> ReaderStats:
        """Say what has been done so far."""
        stats = ReaderStats(layout_hits=self._hits, layout_misses=self._misses)
        if (core := self._engines.core) is not None:
            stats = with_core(stats, core.stats())
        if (loop := self._engines.loop) is not None:
            stats = with_loop(stats, loop)
        return stats

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be submitted any more."""
        return self._engines.is_closing

    def close(self) -> None:
        """Cancel what is queued, wait for what is under way, and free threads, streams and memory."""
        self._engines.close(self._process)

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


def _make_staging(on_device: bool, direct: bool, scratch_bytes: int, host_nbytes: int) -> Any:
    if not on_device:
        return HostStaging(host_nbytes)
    kind = DirectStaging if direct else DeviceStaging
    return kind(scratch_bytes, host_nbytes)


def _context_of(cupy: Any, device: int | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if cupy is None else cupy.cuda.Device(device)


def _describe_by(reader: weakref.ref[Reader], *arguments: Any) -> ReadReport:
    alive = reader()
    assert alive is not None, "a ticket refers to its reader"
    return alive._describe(*arguments)


class _Engines:
    """What carries out the jobs of a reader: a loop, and in host memory the native core beside it.

    The loop is started when a job is the first that the core does not take.
    """

    def __init__(self, make_loop: Callable[[], Loop], core: CoreReader | None) -> None:
        self._make_loop, self.core = make_loop, core
        self.loop: Loop | None = None
        self._closed = False
        self._lock = threading.Lock()

    @property
    def is_closing(self) -> bool:
        """Whether no further job is taken, also because the loop has ended with an error."""
        return self._closed or (self.loop is not None and self.loop.is_closing)

    def start_loop(self) -> Loop:
        """Return the loop; it is started by the first call."""
        with self._lock:
            if self.loop is None:
                loop = self._make_loop()
                loop.start()
                self.loop = loop
                if self._closed:
                    loop.close()
            return self.loop

    def close(self, process: int) -> None:
        """Cancel what is queued, and finish what is under way; a child has none of its parent's threads."""
        self._closed = True
        if os.getpid() != process:
            return
        if self.core is not None:
            self.core.close()
        if self.loop is not None:
            self.loop.close()


def _decoder(layout: ArrayLayout, ticket: Ticket) -> str:
    """Say how the chunks of a job were decoded, and where; those that the device gave up are counted elsewhere."""
    if layout.chain is None:
        return ""
    stored, by_host = ticket.counts.chunks - ticket.counts.filled, ticket.counts.by_host
    return f"{layout.chain}, on the {'host' if 0 < stored == by_host else 'device'}"
