"""Memory, kernels and decode plans with which the native core reads to a device.

In: layouts and conversions. Out: records of :mod:`linumpy.core.native`, which live as long as their reader. A decode
plan lists, for each number of chunks of a slab, the launches that decode them (see architecture.md).
"""

from __future__ import annotations

import ctypes
import logging
import threading
from concurrent.futures import wait
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from linumpy.core import native
from linumpy.core.reader import CoreReader
from linumpy.gpu.codecs import decode
from linumpy.gpu.kernels import load, prepare, prepare_beside
from linumpy.gpu.read.limits import SLABS, SLOTS, Limits, placement_of
from linumpy.gpu.read.scatter import Conversion, kernel_spec
from linumpy.plan.codecs import CHECKSUM_NBYTES, DecodeChain
from linumpy.plan.decode.launches import DecodeLaunch, plan_launches
from linumpy.plan.decode.placement import may_be_grouped
from linumpy.plan.decode.workspace import (
    ALIGN,
    CODES,
    MARGIN,
    Slot,
    Workspace,
    longest_stored,
    padded_nbytes,
    records_nbytes,
)
from linumpy.plan.layout import ArrayLayout

if TYPE_CHECKING:
    from linumpy.gpu.read.engines.direct import DirectReads

_log = logging.getLogger(__name__)

#: Minimum memory for cached chunks.
_MIN_CACHE_NBYTES = 2**20
#: More chunks than this do not change where they are decoded.
_MANY_CHUNKS = 2**15
#: Maximum chunks of a slab; more gain nothing.
_MAX_CHUNKS = 1024
_UNITS = (1, 2, 4, 8, 16)
#: Copies decoded chunks into the cache.
_BYTES = Conversion(np.dtype("u1"), np.dtype("u1"), False)
#: Seconds that a job waits for the kernels that decode: enough to load compiled ones. Without them the host decodes.
_LOAD_SECONDS = 0.25
#: Placeholders for the addresses of a slab and of the status of chunks in the arguments of a launch, which the core
#: replaces.
_BASE, _STATUS = 2**40, 2**50


class CoreDevice:
    """Memory, kernels and plans for one device, which must be current in all calls.

    `direct`: whether stored bytes go to the device by GPUDirect Storage. `timed`: whether to measure the times of all
    kernels.
    """

    def __init__(
        self,
        cupy: ModuleType,
        device: int,
        limits: Limits,
        *,
        cache_bytes: int = 0,
        direct: bool = False,
        timed: bool = False,
    ) -> None:
        self._cupy, self.number, self.limits = cupy, device, limits
        self._cache_bytes = cache_bytes
        self.direct: DirectReads | None = None
        if direct:
            from linumpy.gpu.read.engines.direct import DirectReads  # only for GPUDirect Storage

            self.direct = DirectReads(cupy, device)
        self._timed = timed
        self._device_limits = decode.limits_of(cupy.cuda.Device(device))
        self._scatters: dict[object, native.Scatter] = {}
        self._plans: dict[object, native.DecodePlan | None] = {}
        # Plans whose kernels a job has waited for once; later jobs do not wait again.
        self._waited_for: set[tuple[DecodeChain, int]] = set()
        self._parts_of_batches: dict[object, tuple[native.Scatter, native.DecodePlan | None]] = {}
        self._held: list[object] = []
        self.held_nbytes = 0
        self._is_given = False
        self._alive: list[object] = []  # kernels and launches to which records point
        self._lock = threading.Lock()  # the core points to records, which must not be replaced

    def record(self) -> native.Device:
        """Describe the memory of slabs, and how stored bytes are read into it."""
        self._cupy.cuda.runtime.free(0)  # creates a context in a thread that has not used CUDA yet
        record = native.Device(
            self._cupy.cuda.driver.ctxGetCurrent(),
            SLABS,
            self.limits.pinned_nbytes,
            SLOTS,
            self.limits.device_nbytes,
            self.limits.rows,
            self._timed,
            native.ReadDirect() if self.direct is None else self.direct.callback,
        )
        if self._cache_bytes:
            with self._lock:
                record.keep = ctypes.pointer(self._scatter(_BYTES, [0]))
        return record

    def give_memory(self, reader: CoreReader) -> None:
        """Allocate memory for the slots and the cache, for the first job of a reader.

        `MemoryError`: The memory for slots does not fit.
        """
        if self._is_given:
            return
        with self._lock:
            if self._is_given or reader.is_closing:
                return
            slots = self._allocate(self.limits.held_nbytes)
            cache, cache_nbytes = self._allocate_cache()
            self._held = [slots, cache]
            self.held_nbytes = self.limits.held_nbytes + cache_nbytes
            # The core's streams are not ordered after earlier work that used this memory.
            self._cupy.cuda.get_current_stream().synchronize()
            reader.give_memory(int(slots.ptr), 0 if cache is None else int(cache.ptr), cache_nbytes)
            self._is_given = True

    def _allocate(self, nbytes: int) -> Any:
        return self._cupy.cuda.alloc(nbytes)

    def _allocate_cache(self) -> tuple[Any, int]:
        """Allocate the cache, or a half, a quarter, ... of it, as fits: reads do not need it."""
        nbytes = self._cache_bytes
        while nbytes >= min(_MIN_CACHE_NBYTES, self._cache_bytes) and nbytes > 0:
            try:
                return self._allocate(nbytes), nbytes
            except MemoryError as error:
                less = nbytes // 2
                _log.warning("the chunk cache gets %d of %d bytes or less: %s", less, self._cache_bytes, error)
                nbytes = less
        return None, 0

    def free(self) -> None:
        """Free the memory, and restore kvikio's settings, after all jobs of the core have ended."""
        with self._lock:
            self._is_given = False
            self._held, self.held_nbytes = [], 0
        if self.direct is not None:
            self.direct.close()

    def on_device(
        self, layout: ArrayLayout, conversion: Conversion, ready: int, *, timed: bool = False
    ) -> native.OnDevice:
        """Return the record of a batch, which must live until its jobs have ended; compile kernels that are new."""
        key = conversion, layout.geometry
        parts = self._parts_of_batches.get(key)
        if parts is None:
            with self._lock:
                chain, nbytes = layout.chain, layout.chunk_nbytes
                plan = None if chain is None else self._plan_of(chain, nbytes)
                axes = [axis for axis, size in enumerate(layout.chunk_shape) if size > 1] or [layout.rank - 1]
                parts = self._scatter(conversion, axes), plan
                if chain is None or (chain, nbytes) in self._plans:
                    self._parts_of_batches[key] = parts
        scatter, plan = parts
        record = native.OnDevice(ctypes.pointer(scatter), None, ready, timed)
        if plan is not None and (plan.slots or self._allocate_for_batch(record, plan.slab_nbytes)):
            record.decode = ctypes.pointer(plan)
        return record

    def _allocate_for_batch(self, record: native.OnDevice, nbytes: int) -> bool:
        """Allocate separate memory for a batch of long chunks; False if it does not fit: then the host decodes."""
        try:
            record.held = self._allocate(nbytes)
        except MemoryError:
            return False
        record.memory = int(record.held.ptr)
        return True

    def _scatter(self, conversion: Conversion, axes: list[int]) -> native.Scatter:
        itemsize = conversion.source.itemsize
        kind = ("copy", itemsize) if conversion.is_copy else conversion
        key = (kind, tuple(axes))
        scatter = self._scatters.get(key)
        if scatter is None:
            units = [unit for unit in _UNITS if unit >= itemsize] if conversion.is_copy else [itemsize]
            specs = [kernel_spec(conversion, len(axes), unit) for unit in units]
            prepare(specs)
            scatter = native.Scatter(rank=len(axes), is_copy=conversion.is_copy)
            scatter.axes[: len(axes)] = axes
            for unit, spec in zip(units, specs, strict=True):
                scatter.functions[_UNITS.index(unit)] = self._function(load(spec))
            self._scatters[key] = scatter
        return scatter

    def _function(self, kernel: Any) -> int:
        self._alive.append(kernel)
        return int(kernel.kernel.ptr)

    def _plan_of(self, chain: DecodeChain, chunk_nbytes: int) -> native.DecodePlan | None:
        """Return the plan; None if the host decodes.

        While the kernels are compiled for the first time on this machine, the host decodes, unless `decode_on` is
        ``"device"``: later jobs may get a plan, which is then in ``_plans``.
        """
        key = (chain, chunk_nbytes)
        if key in self._plans:
            return self._plans[key]
        slot, slots = self._slot_of(chain, chunk_nbytes)
        device_from = self._device_from(chain, chunk_nbytes) if slots else 1
        if device_from is None or slot is None:
            self._plans[key] = None
            return None
        count = min(slot.chunks, _MAX_CHUNKS, self.limits.rows, max(1, slot.capacity // slot.fixed_weight))
        launches = self._launches(chain, slot.lay_out(count, 0), count, chunk_nbytes)
        compiling = prepare_beside(decode.kernel_spec(launch) for launch in launches)
        if self.limits.decode_on != "device" and not compiling.done():
            if key not in self._waited_for:
                wait([compiling], _LOAD_SECONDS)
                self._waited_for.add(key)
            if not compiling.done():
                return None
        compiling.result()
        self._plans[key] = self._make_plan(chain, chunk_nbytes, slot, slots, count, device_from)
        return self._plans[key]

    def _make_plan(
        self, chain: DecodeChain, chunk_nbytes: int, slot: Slot, slots: int, count: int, device_from: int
    ) -> native.DecodePlan:
        layouts = np.zeros((count + 1, 4), np.int64)
        rows = []
        for number in range(1, count + 1):
            space, longer = slot.lay_out(number, 0), slot.lay_out(number, ALIGN)
            planned = self._launches(chain, space, number, chunk_nbytes)
            steps = map(_steps_by_stored, planned, self._launches(chain, longer, number, chunk_nbytes))
            rows.append(list(zip(planned, steps, strict=True)))
            layouts[number] = space.words, space.words + records_nbytes(number), space.decoded, len(planned)
        width = max(map(len, rows))
        launches = (native.Launch * ((count + 1) * width))()
        for number, row in enumerate(rows, 1):
            for position, (launch, argument_steps) in enumerate(row):
                launches[number * width + position] = self._launch_record(launch, argument_steps)
        self._alive += [launches, layouts]
        return native.DecodePlan(
            chunks=count,
            stored_nbytes=min(slot.stored_nbytes, max(self.limits.pinned_nbytes, longest_stored(chunk_nbytes) + ALIGN)),
            stored=MARGIN,
            slots=slots,
            slab_nbytes=slots * self.limits.device_nbytes or slot.nbytes + self.limits.table_nbytes,
            capacity=slot.capacity,
            each=slot.fixed_weight,
            has_pool=chain.streams_by == "zstd",
            reordered=padded_nbytes(chain, chunk_nbytes) if chain.is_reordered else 0,
            chunk_nbytes=chunk_nbytes,
            chunk_stride=padded_nbytes(chain, chunk_nbytes),
            target_nbytes=chunk_nbytes + chain.tail_nbytes,
            checksum_nbytes=CHECKSUM_NBYTES if chain.stored_checksum else 0,
            counter=chain.compressor != "blosc",
            codec=CODES[chain.compressor],
            shuffle=chain.shuffle,
            device_from=device_from,
            launch_count=width,
            launches=launches,
            layouts=layouts.ctypes.data,
        )

    def _slot_of(self, chain: DecodeChain, chunk_nbytes: int) -> tuple[Slot | None, int]:
        """Fit a slab into one slot of device memory, or all slots, or, for long zstd chunks, separate memory.

        Returns: (1) The layout of the slab; None if not even one chunk fits. (2) Number of slots that a slab takes; 0
        for separate memory, or if nothing fits.
        """
        limits, forced = self.limits, replace(self.limits, decode_on="device")
        # Bytes of a slab, slabs on the device at a time, and slots of a slab.
        options = [(limits.data_nbytes, SLOTS, 1), (limits.held_nbytes - limits.table_nbytes, 1, SLOTS)]
        if limits.may_exceed and limits.decode_on != "host" and may_be_grouped(chain, chunk_nbytes):
            options.append((self._cupy.cuda.runtime.memGetInfo()[0] // 2, 1, 0))
        for capacity, slabs, slots in options:
            chunks = _MAX_CHUNKS * SLOTS if slots else 1
            slot = placement_of(chain, chunk_nbytes, chunks, forced, slabs * capacity).slot
            if slot is not None and slot.nbytes <= capacity:
                return slot, slots
        return None, 0

    def _device_from(self, chain: DecodeChain, chunk_nbytes: int) -> int | None:
        """Find the least power of 2 of chunks that are decoded on the device; None if the host always decodes."""
        counts = (2**k for k in range(_MANY_CHUNKS.bit_length()))
        return next((n for n in counts if placement_of(chain, chunk_nbytes, n, self.limits).slot is not None), None)

    def _launches(self, chain: DecodeChain, space: Workspace, count: int, chunk_nbytes: int) -> list[DecodeLaunch]:
        return plan_launches(chain, space, _BASE, _STATUS, count, chunk_nbytes, self._device_limits)

    def _launch_record(self, launch: DecodeLaunch, steps: list[int]) -> native.Launch:
        kernel = load(decode.kernel_spec(launch))
        decode.allow(kernel, launch.shared)
        record = native.Launch(
            self._function(kernel), launch.grid[0], (*launch.grid, 1)[1], launch.block, launch.shared, len(launch.args)
        )
        for argument, value, stored in zip(record.arguments, launch.args, steps, strict=False):
            argument.constant, argument.stored = value % _BASE, stored
            argument.status, argument.base = value >= _STATUS, _BASE <= value < _STATUS
        return record


def _steps_by_stored(launch: DecodeLaunch, longer: DecodeLaunch) -> list[int]:
    """Return how much each argument grows for each stored byte of a slab; `longer` has `ALIGN` more stored bytes."""
    return [(b - a) // ALIGN for a, b in zip(launch.args, longer.args, strict=True)]
