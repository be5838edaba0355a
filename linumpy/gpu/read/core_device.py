"""What the native core needs to read to a device: memory, kernels, and how slabs of each kind of chunks are decoded.

In: layouts and conversions. Out: the records of :mod:`linumpy.core.native`, kept for as long as their reader.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from typing import Any

from linumpy.core import native
from linumpy.core.reader import CoreReader
from linumpy.device import install_line, kvikio_mode
from linumpy.errors import GpuUnavailableError
from linumpy.gpu.codecs import decode
from linumpy.gpu.kernels import load, prepare
from linumpy.gpu.read.limits import SLABS, Limits, way_of
from linumpy.gpu.read.scatter import Conversion, kernel_spec
from linumpy.plan.codecs import CHECKSUM_NBYTES, DecodeChain
from linumpy.plan.decode.launches import Launch, plan_launches
from linumpy.plan.decode.staging import longest_stored
from linumpy.plan.decode.workspace import CODES, Workspace, decoded_room, plan_workspace, words_room
from linumpy.plan.layout import ArrayLayout

_log = logging.getLogger(__name__)

#: Less memory for kept chunks is of no use.
_LEAST_KEPT = 2**20
#: Chunks of a read at most, as far as the choice of the way of decoding goes.
_MANY_CHUNKS = 2**15
#: Chunks of a slab; more gain nothing.
_MOST_CHUNKS = 512
#: What zstd keeps between its two steps, as a part of the decoded bytes: its upper bound.
_POOL = 1.5
_UNITS = (1, 2, 4, 8, 16)
#: Addresses by which those of slab and status are found among the arguments of a launch.
_BASE, _STATUS = 2**40, 2**50


class CoreDevice:
    """Memory, kernels and plans for one device, which is current in all calls.

    Parameters
    ----------
    cupy : module
        CuPy.
    device : int
        Number of the device.
    limits : Limits
        Of slabs.
    cache_bytes : int
        Memory for chunks that are kept.
    direct : bool
        Whether stored bytes go to the device by GPUDirect Storage.
    timed : bool
        Whether the times of all kernels are wanted.
    """

    def __init__(
        self,
        cupy: Any,
        device: int,
        limits: Limits,
        *,
        cache_bytes: int = 0,
        direct: bool = False,
        timed: bool = False,
    ) -> None:
        self._cupy, self.number, self.limits = cupy, device, limits
        self._cache_bytes = cache_bytes
        self._direct, self._timed = direct, timed
        self._device_limits = decode.limits_of(cupy.cuda.Device(device))
        self._scatters: dict[object, native.Scatter] = {}
        self._plans: dict[object, native.DecodePlan | None] = {}
        self._held: list[Any] = []
        self.held_nbytes = 0
        self._is_given = False
        self._alive: list[Any] = []  # kernels and launches, which records point to
        self._lock = threading.Lock()  # the core holds pointers to records: none may be made twice, and replaced

    def record(self) -> native.Device:
        """Describe the memory of slabs, and how stored bytes get there."""
        self._cupy.cuda.runtime.free(0)  # a thread that has not used CUDA yet has no context
        return native.Device(
            self._cupy.cuda.driver.ctxGetCurrent(),
            SLABS,
            self.limits.pinned_nbytes,
            self.limits.device_nbytes,
            self.limits.rows,
            self._timed,
            native.ReadDirect(),  # where self._direct, what reads by GPUDirect Storage
        )

    def give_memory(self, reader: CoreReader) -> None:
        """Allocate the memory of slabs and of kept chunks for the first job of a reader.

        Raises
        ------
        MemoryError
            There is not that much for slabs.
        """
        if self._is_given:
            return
        with self._lock:
            if self._is_given or reader.is_closing:
                return
            slabs = self._allocate(self.limits.held_nbytes)
            kept, kept_nbytes = self._allocate_kept()
            self._held = [slabs, kept]
            self.held_nbytes = self.limits.held_nbytes + kept_nbytes
            # The core's streams do not wait for what the memory was used for before.
            self._cupy.cuda.get_current_stream().synchronize()
            reader.give_memory(int(slabs.ptr), 0 if kept is None else int(kept.ptr), kept_nbytes)
            self._is_given = True

    def _allocate(self, nbytes: int) -> Any:
        return self._cupy.cuda.alloc(nbytes)

    def _allocate_kept(self) -> tuple[Any, int]:
        """Allocate as much as there is of the memory for kept chunks, which jobs do not need."""
        nbytes = self._cache_bytes
        while nbytes >= min(_LEAST_KEPT, self._cache_bytes) and nbytes > 0:
            try:
                return self._allocate(nbytes), nbytes
            except MemoryError as error:
                less = nbytes // 2
                _log.warning("the chunk cache gets %d of %d bytes or less: %s", less, self._cache_bytes, error)
                nbytes = less
        return None, 0

    def free(self) -> None:
        """Give the memory back; nothing of the core is under way any more."""
        with self._lock:
            self._is_given = True  # a job that is submitted later is refused
            self._held, self.held_nbytes = [], 0

    def on_device(
        self, layout: ArrayLayout, conversion: Conversion, ready: int, *, timed: bool = False
    ) -> native.OnDevice:
        """Give what a batch needs; kernels that are new are compiled."""
        with self._lock:
            plan = None if layout.chain is None else self._plan_of(layout.chain, layout.chunk_nbytes)
            scatter = self._scatter_of(layout, conversion)
        record = native.OnDevice(ctypes.pointer(scatter), None, ready, timed)
        if plan is not None:
            record.decode = ctypes.pointer(plan)
        return record

    def _scatter_of(self, layout: ArrayLayout, conversion: Conversion) -> native.Scatter:
        axes = [axis for axis in range(layout.rank) if layout.chunk_shape[axis] > 1] or [layout.rank - 1]
        itemsize = conversion.source.itemsize
        kind = ("copy", itemsize) if conversion.is_copy else conversion
        key = (kind, tuple(axes))
        known = self._scatters.get(key)
        if known is None:
            units = [unit for unit in _UNITS if unit >= itemsize] if conversion.is_copy else [itemsize]
            specs = [kernel_spec(conversion, len(axes), unit) for unit in units]
            prepare(specs)
            known = native.Scatter(rank=len(axes), is_copy=conversion.is_copy)
            known.axes[: len(axes)] = axes
            for unit, spec in zip(units, specs, strict=True):
                known.functions[_UNITS.index(unit)] = self._function(load(spec))
            self._scatters[key] = known
        return known

    def _function(self, kernel: Any) -> int:
        self._alive.append(kernel)
        return int(kernel.kernel.ptr)

    def _plan_of(self, chain: DecodeChain, chunk_nbytes: int) -> native.DecodePlan | None:
        key = (chain, chunk_nbytes)
        if key not in self._plans:
            self._plans[key] = self._make_plan(chain, chunk_nbytes)
        return self._plans[key]

    def _make_plan(self, chain: DecodeChain, chunk_nbytes: int) -> native.DecodePlan | None:
        device_from = self._device_from(chain, chunk_nbytes)
        space = _largest_space(chain, chunk_nbytes, self.limits)
        if device_from is None or space is None:
            return None
        count, status = space.chunks, space.words + words_room(space.chunks)
        rows = [self._launches(chain, space, number, chunk_nbytes) for number in range(1, count + 1)]
        launches = (native.Launch * ((count + 1) * len(rows[0])))()
        for number, row in enumerate(rows, 1):
            for k, launch in enumerate(row):
                launches[number * len(row) + k] = launch
        self._alive.append(launches)
        return native.DecodePlan(
            chunks=count,
            stored_nbytes=space.stored_nbytes,
            stored=space.stored,
            words=space.words,
            status=status,
            decoded=space.decoded,
            slab_nbytes=space.nbytes,
            chunk_nbytes=chunk_nbytes,
            chunk_room=decoded_room(chain, chunk_nbytes),
            target_nbytes=chunk_nbytes + chain.tail,
            checksum_nbytes=CHECKSUM_NBYTES if chain.stored_checksum else 0,
            counter=chain.compressor != "blosc",
            codec=CODES[chain.compressor],
            shuffle=chain.shuffle,
            device_from=device_from,
            launch_count=len(rows[0]),
            launches=launches,
        )

    def _device_from(self, chain: DecodeChain, chunk_nbytes: int) -> int | None:
        """Find the number of chunks from which the device decodes faster than the host; None where it never does."""
        counts = (2**k for k in range(_MANY_CHUNKS.bit_length()))
        chosen = [count for count in counts if way_of(chain, chunk_nbytes, count, self.limits).slot is not None]
        return min(chosen) if chosen else None

    def _launches(self, chain: DecodeChain, space: Workspace, count: int, chunk_nbytes: int) -> list[native.Launch]:
        limits = self._device_limits
        found = plan_launches(chain, space, _BASE, _STATUS, count, chunk_nbytes, limits)
        if count == space.chunks:
            prepare([decode.kernel_spec(launch) for launch in found])
        return [self._launch_record(launch) for launch in found]

    def _launch_record(self, launch: Launch) -> native.Launch:
        kernel = load(decode.kernel_spec(launch))
        decode.allow(kernel, launch.shared)
        record = native.Launch(
            self._function(kernel), launch.grid[0], (*launch.grid, 1)[1], launch.block, launch.shared, len(launch.args)
        )
        for argument, value in zip(record.arguments, launch.args, strict=False):
            if value >= _STATUS:
                argument.constant, argument.status = value - _STATUS, 1
            elif value >= _BASE:
                argument.constant, argument.base = value - _BASE, 1
            else:
                argument.constant = value
        return record


def _largest_space(chain: DecodeChain, chunk_nbytes: int, limits: Limits) -> Workspace | None:
    """Lay out a slab of as many chunks as fit; None where not even one does."""
    longest = longest_stored(chunk_nbytes) + 256
    pool = _POOL * chunk_nbytes + 256 if chain.streams_by == "zstd" else 0

    def space(count: int) -> Workspace:
        return plan_workspace(
            chain,
            chunks=count,
            stored_nbytes=min(count * longest, limits.pinned_nbytes),
            decoded_nbytes=count * decoded_room(chain, chunk_nbytes),
            words_nbytes=4 * count + 256,
            pool_nbytes=int(count * pool),
        )

    low, high = 0, min(_MOST_CHUNKS, limits.rows)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if space(middle).nbytes <= limits.data_nbytes else (low, middle - 1)
    return space(low) if low and longest <= limits.pinned_nbytes else None


def require_direct() -> None:
    """Raise :class:`~linumpy.errors.GpuUnavailableError` where nothing can read by GPUDirect Storage."""
    mode, reason = kvikio_mode()
    if mode == "none":
        raise GpuUnavailableError(f"direct=True reads through kvikio, but {reason}: {install_line()}")
