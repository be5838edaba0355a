"""What the native core needs to read to a device: memory, kernels, and how slabs of each kind of chunks are decoded.

In: layouts and conversions. Out: the records of :mod:`linumpy.core.native`, kept for as long as their reader.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from typing import Any

import numpy as np

from linumpy.core import native
from linumpy.core.reader import CoreReader
from linumpy.gpu.codecs import decode
from linumpy.gpu.kernels import load, prepare
from linumpy.gpu.read.engines.direct import DirectReads
from linumpy.gpu.read.limits import SLABS, SLOTS, Limits, placement_of, placement_within
from linumpy.gpu.read.scatter import Conversion, kernel_spec
from linumpy.plan.codecs import CHECKSUM_NBYTES, DecodeChain
from linumpy.plan.decode.launches import DecodeLaunch, plan_launches
from linumpy.plan.decode.placement import may_be_grouped
from linumpy.plan.decode.staging import Slot, longest_stored
from linumpy.plan.decode.workspace import ALIGN, CODES, MARGIN, Workspace, padded_nbytes, records_nbytes
from linumpy.plan.layout import ArrayLayout

_log = logging.getLogger(__name__)

#: Less memory for kept chunks is of no use.
_LEAST_KEPT = 2**20
#: More chunks than this do not change where they are decoded.
_MANY_CHUNKS = 2**15
#: Chunks of a slab; more gain nothing.
_MOST_CHUNKS = 1024
_UNITS = (1, 2, 4, 8, 16)
#: Copies decoded chunks to where they are kept.
_BYTES = Conversion(np.dtype("u1"), np.dtype("u1"), False)
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
        self.direct = DirectReads(cupy, device) if direct else None
        self._timed = timed
        self._device_limits = decode.limits_of(cupy.cuda.Device(device))
        self._scatters: dict[object, native.Scatter] = {}
        self._plans: dict[object, native.DecodePlan | None] = {}
        self._known: dict[object, tuple[native.Scatter, native.DecodePlan | None]] = {}
        self._held: list[Any] = []
        self.held_nbytes = 0
        self._is_given = False
        self._alive: list[Any] = []  # kernels and launches, which records point to
        self._lock = threading.Lock()  # the core holds pointers to records: none may be made twice, and replaced

    def record(self) -> native.Device:
        """Describe the memory of slabs, and how stored bytes get there."""
        self._cupy.cuda.runtime.free(0)  # a thread that has not used CUDA yet has no context
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
        """Allocate the slots and of kept chunks for the first job of a reader.

        Raises
        ------
        MemoryError
            There is not that much for slots.
        """
        if self._is_given:
            return
        with self._lock:
            if self._is_given or reader.is_closing:
                return
            slots = self._allocate(self.limits.held_nbytes)
            kept, kept_nbytes = self._allocate_kept()
            self._held = [slots, kept]
            self.held_nbytes = self.limits.held_nbytes + kept_nbytes
            # The core's streams do not wait for what the memory was used for before.
            self._cupy.cuda.get_current_stream().synchronize()
            reader.give_memory(int(slots.ptr), 0 if kept is None else int(kept.ptr), kept_nbytes)
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
            self._is_given = False
            self._held, self.held_nbytes = [], 0
        if self.direct is not None:
            self.direct.close()

    def on_device(
        self, layout: ArrayLayout, conversion: Conversion, ready: int, *, timed: bool = False
    ) -> native.OnDevice:
        """Give what a batch needs, which is to be held until its jobs are over; kernels that are new are compiled."""
        key = conversion, layout.geometry
        known = self._known.get(key)
        if known is None:
            with self._lock:
                plan = None if layout.chain is None else self._plan_of(layout.chain, layout.chunk_nbytes)
                known = self._known[key] = self._scatter_of(layout, conversion), plan
        scatter, plan = known
        record = native.OnDevice(ctypes.pointer(scatter), None, ready, timed)
        if plan is not None and (plan.slots or self._lend(record, plan.slab_nbytes)):
            record.decode = ctypes.pointer(plan)
        return record

    def _lend(self, record: native.OnDevice, nbytes: int) -> bool:
        """Give a batch of long chunks memory of its own; False where there is not that much, and the host decodes."""
        try:
            record.held = self._allocate(nbytes)
        except MemoryError:
            return False
        record.memory = int(record.held.ptr)
        return True

    def _scatter_of(self, layout: ArrayLayout, conversion: Conversion) -> native.Scatter:
        axes = [axis for axis in range(layout.rank) if layout.chunk_shape[axis] > 1] or [layout.rank - 1]
        return self._scatter(conversion, axes)

    def _scatter(self, conversion: Conversion, axes: list[int]) -> native.Scatter:
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
        slot, slots = self._slot_of(chain, chunk_nbytes)
        device_from = self._device_from(chain, chunk_nbytes) if slots else 1
        if device_from is None or slot is None:
            return None
        count = min(slot.chunks, _MOST_CHUNKS, self.limits.rows, max(1, slot.capacity // slot.fixed_weight))
        layouts = np.zeros((count + 1, 4), np.int64)
        rows = []
        for number in range(1, count + 1):
            space, longer = slot.lay_out(number, 0), slot.lay_out(number, ALIGN)
            found = self._launches(chain, space, number, chunk_nbytes)
            moved = map(_moved, found, self._launches(chain, longer, number, chunk_nbytes))
            rows.append(list(zip(found, moved, strict=True)))
            layouts[number] = space.words, space.words + records_nbytes(number), space.decoded, len(found)
        prepare([decode.kernel_spec(launch) for launch, _ in rows[-1]])
        most = max(map(len, rows))
        launches = (native.Launch * ((count + 1) * most))()
        for number, row in enumerate(rows, 1):
            for k, (launch, steps) in enumerate(row):
                launches[number * most + k] = self._launch_record(launch, steps)
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
            launch_count=most,
            launches=launches,
            layouts=layouts.ctypes.data,
        )

    def _slot_of(self, chain: DecodeChain, chunk_nbytes: int) -> tuple[Slot | None, int]:
        """Fit a slab into a slot of device memory, or into all of them, or, long zstd, into memory of its own.

        Returns
        -------
        Slot or None
            None where not even one chunk fits.
        int
            Slots that it takes; 0 for memory of its own.
        """
        limits = self.limits
        options = [(limits.data_nbytes, SLOTS, 1), (limits.held_nbytes - limits.table_nbytes, 1, SLOTS)]
        if limits.may_exceed and limits.decode_on != "host" and may_be_grouped(chain, chunk_nbytes):
            options.append((self._cupy.cuda.runtime.memGetInfo()[0] // 2, 1, 0))
        for most, count, slots in options:
            chunks = _MOST_CHUNKS * SLOTS if slots else 1
            slot = placement_within(count * most, chain, chunk_nbytes, chunks, limits.threads, "device").slot
            if slot is not None and slot.nbytes <= most:
                return slot, slots
        return None, 0

    def _device_from(self, chain: DecodeChain, chunk_nbytes: int) -> int | None:
        """Find the number of chunks from which the device decodes faster than the host; None where it never does."""
        counts = (2**k for k in range(_MANY_CHUNKS.bit_length()))
        chosen = [count for count in counts if placement_of(chain, chunk_nbytes, count, self.limits).slot is not None]
        return min(chosen) if chosen else None

    def _launches(self, chain: DecodeChain, space: Workspace, count: int, chunk_nbytes: int) -> list[DecodeLaunch]:
        return plan_launches(chain, space, _BASE, _STATUS, count, chunk_nbytes, self._device_limits)

    def _launch_record(self, launch: DecodeLaunch, moved: list[int]) -> native.Launch:
        kernel = load(decode.kernel_spec(launch))
        decode.allow(kernel, launch.shared)
        record = native.Launch(
            self._function(kernel), launch.grid[0], (*launch.grid, 1)[1], launch.block, launch.shared, len(launch.args)
        )
        for argument, value, stored in zip(record.arguments, launch.args, moved, strict=False):
            argument.constant, argument.stored = value % _BASE, stored
            argument.status, argument.base = value >= _STATUS, _BASE <= value < _STATUS
        return record


def _moved(launch: DecodeLaunch, longer: DecodeLaunch) -> list[int]:
    """Say how often the stored bytes are added to each argument, from a slab without and one with `ALIGN` of them."""
    return [(b - a) // ALIGN for a, b in zip(launch.args, longer.args, strict=True)]
