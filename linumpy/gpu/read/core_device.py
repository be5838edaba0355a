"""What the native core needs to read to a device: kernels, and how slabs of each kind of chunks are decoded.

In: layouts and conversions. Out: the records of :mod:`linumpy.core.native`, kept for as long as their reader.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np

from linumpy.core import native
from linumpy.gpu.codecs import decode
from linumpy.gpu.kernels import load, prepare
from linumpy.gpu.loop.limits import Limits
from linumpy.gpu.loop.works import way_of
from linumpy.gpu.staging.scatter import Conversion, kernel_spec
from linumpy.plan.codecs import CHECKSUM_NBYTES, DecodeChain
from linumpy.plan.decode.launches import Launch, plan_launches
from linumpy.plan.decode.placement import choose_way
from linumpy.plan.decode.staging import Slot, longest_stored
from linumpy.plan.decode.workspace import ALIGN, CODES, MARGIN, Workspace, decoded_room, words_room
from linumpy.plan.layout import ArrayLayout

#: Slabs: two are filled while the others are under way.
SLABS = 5
#: Slots of device memory for those that are copied, decoded and scattered.
SLOTS = 3
#: Pinned memory of a slab: all of them stay in the processor's cache, or nearly.
PINNED_NBYTES = 40 * 2**20
#: Least scratch: the longest read of the core fits a slab.
LEAST_SCRATCH_BYTES = 2**20
#: Chunks of a slab; more gain nothing.
_MOST_CHUNKS = 1024
_UNITS = (1, 2, 4, 8, 16)
#: Words of the scatter tables for each row of a slab, as in device.cpp.
_ROW_WORDS = 14 + 9
#: Addresses by which those of slab and status are found among the arguments of a launch.
_BASE, _STATUS = 2**40, 2**50


class CoreDevice:
    """Kernels and plans for one device.

    Parameters
    ----------
    cupy : module
        CuPy.
    device : int
        Number of the device.
    limits : Limits
        Of the reader.
    """

    def __init__(self, cupy: Any, device: int, limits: Limits) -> None:
        self._cupy, self._limits = cupy, limits
        self.slab_nbytes = limits.scratch_bytes // SLOTS // 4096 * 4096
        self.rows = min(max(self.slab_nbytes // 1024, 64), 4096)
        self.data_nbytes = self.slab_nbytes - (8 * self.rows * _ROW_WORDS + 4096)
        self.pinned_nbytes = min(PINNED_NBYTES, self.data_nbytes // 2 // 4096 * 4096)
        self._device_limits = decode.limits_of(cupy.cuda.Device(device))
        self._scatters: dict[object, native.Scatter] = {}
        self._plans: dict[object, native.DecodePlan | None] = {}
        self._kept: list[Any] = []
        self._lock = threading.Lock()  # the core holds pointers to records: none may be made twice, and replaced

    def record(self, direct: Any = None) -> native.Device:
        """Describe the memory of slabs, and what reads into it; the current context is that of the device."""
        self._cupy.cuda.runtime.free(0)  # a thread that has not used CUDA yet has no context
        context = self._cupy.cuda.driver.ctxGetCurrent()
        return native.Device(
            context, SLABS, self.pinned_nbytes, SLOTS, self.slab_nbytes, self.rows, 0, direct or native.ReadDirect()
        )

    def takes(self, layout: ArrayLayout) -> bool:
        """Say whether the core reads arrays of this layout to the device."""
        return layout.chain is None or not layout.chain.host_filter

    def on_device(self, layout: ArrayLayout, conversion: Conversion, ready: int) -> native.OnDevice:
        """Give what a batch needs; kernels that are new are compiled."""
        with self._lock:
            plan = None if layout.chain is None else self._plan_of(layout.chain, layout.chunk_nbytes)
            scatter = self._scatter_of(layout, conversion)
        record = native.OnDevice(ctypes.pointer(scatter), None, ready)
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
        self._kept.append(kernel)
        return int(kernel.kernel.ptr)

    def _plan_of(self, chain: DecodeChain, chunk_nbytes: int) -> native.DecodePlan | None:
        key = (chain, chunk_nbytes)
        if key not in self._plans:
            self._plans[key] = self._make_plan(chain, chunk_nbytes)
        return self._plans[key]

    def _make_plan(self, chain: DecodeChain, chunk_nbytes: int) -> native.DecodePlan | None:
        device_from = self._device_from((chain, chunk_nbytes))
        slot = self._slot_of(chain, chunk_nbytes)
        if device_from is None or slot is None:
            return None
        count = min(slot.chunks, _MOST_CHUNKS, self.rows)
        layouts = np.zeros((count + 1, 3), np.int64)
        rows = []
        for number in range(1, count + 1):
            space = slot.lay_out(number, 0)
            layouts[number] = space.words, space.words + words_room(number), space.decoded
            rows.append(self._launches(chain, space, number, chunk_nbytes))
        longer = self._launches(chain, slot.lay_out(1, ALIGN), 1, chunk_nbytes)
        moved = [_moved(one, other) for one, other in zip(rows[0], longer, strict=True)]
        prepare([decode.kernel_spec(launch) for launch in rows[-1]])
        launches = (native.Launch * ((count + 1) * len(rows[0])))()
        for number, row in enumerate(rows, 1):
            for k, launch in enumerate(row):
                launches[number * len(row) + k] = self._launch_record(launch, moved[k])
        self._kept += [launches, layouts]
        return native.DecodePlan(
            chunks=count,
            stored_nbytes=min(slot.stored_nbytes, self.pinned_nbytes),
            stored=MARGIN,
            slots=1 if slot.nbytes <= self.data_nbytes else SLOTS,
            capacity=slot.capacity,
            each=slot.weight_of_any,
            has_pool=chain.streams_by == "zstd",
            reordered=decoded_room(chain, chunk_nbytes) if chain.is_reordered else 0,
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
            layouts=layouts.ctypes.data,
        )

    def _slot_of(self, chain: DecodeChain, chunk_nbytes: int) -> Slot | None:
        """Fit a slab into a slot of device memory, or into all of them; None where a chunk does not fit there."""
        if longest_stored(chunk_nbytes) + 256 > self.pinned_nbytes:
            return None
        tables = self.slab_nbytes - self.data_nbytes
        for most, slots in ((self.data_nbytes, SLOTS), (SLOTS * self.slab_nbytes - tables, 1)):
            way = choose_way(
                chain, chunk_nbytes, chunks=_MOST_CHUNKS * SLOTS, room=slots * most, cores=self._limits.threads,
                table_nbytes=8, margin=256, decode_on="device",
            )  # fmt: skip
            if way.slot is not None and way.slot.nbytes <= most:
                return way.slot
        return None

    def _device_from(self, kind: tuple[DecodeChain, int]) -> int | None:
        """Find the number of chunks from which the device decodes faster than the host; None where it never does."""
        chosen = [
            count for count in (1, *(2**k for k in range(1, 16))) if way_of(kind, count, self._limits).slot is not None
        ]
        return min(chosen) if chosen else None

    def _launches(self, chain: DecodeChain, space: Workspace, count: int, chunk_nbytes: int) -> list[Launch]:
        return plan_launches(chain, space, _BASE, _STATUS, count, chunk_nbytes, self._device_limits)

    def _launch_record(self, launch: Launch, moved: list[int]) -> native.Launch:
        kernel = load(decode.kernel_spec(launch))
        decode.allow(kernel, launch.shared)
        record = native.Launch(
            self._function(kernel), launch.grid[0], (*launch.grid, 1)[1], launch.block, launch.shared, len(launch.args)
        )
        for argument, value, stored in zip(record.arguments, launch.args, moved, strict=False):
            argument.constant, argument.stored = value % _BASE, stored
            argument.status, argument.base = value >= _STATUS, _BASE <= value < _STATUS
        return record


def _moved(launch: Launch, longer: Launch) -> list[int]:
    """Say how often the stored bytes are added to each argument, from a slab without and one with `ALIGN` of them."""
    return [(b - a) // ALIGN for a, b in zip(launch.args, longer.args, strict=True)]
