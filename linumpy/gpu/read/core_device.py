"""What the native core needs to read to a device: kernels, and how slabs of each kind of chunks are decoded.

In: layouts and conversions. Out: the records of :mod:`linumpy.core.native`, kept for as long as their reader.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from linumpy.core import native
from linumpy.gpu.codecs import decode
from linumpy.gpu.kernels import load, prepare
from linumpy.gpu.loop.limits import Limits
from linumpy.gpu.loop.works import way_of
from linumpy.gpu.staging.scatter import Conversion, kernel_spec
from linumpy.plan.codecs import CHECKSUM_NBYTES, DecodeChain
from linumpy.plan.decode.launches import Launch, plan_launches
from linumpy.plan.decode.staging import longest_stored
from linumpy.plan.decode.workspace import CODES, Workspace, decoded_room, plan_workspace, words_room
from linumpy.plan.layout import ArrayLayout

#: Slabs: one is read, one copied, the others decoded and scattered.
SLABS = 4
#: Pinned memory of a slab, and the longest chunk that the core takes.
PINNED_NBYTES = 48 * 2**20
#: Least scratch: the longest read of the core fits a slab.
LEAST_SCRATCH_BYTES = 2**20
#: Chunks of a slab; more gain nothing.
_MOST_CHUNKS = 512
#: What zstd keeps between its two steps, as a part of the decoded bytes: its upper bound.
_POOL = 1.5
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
        self.slab_nbytes = limits.scratch_bytes // SLABS // 4096 * 4096
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
        return native.Device(context, SLABS, self.pinned_nbytes, self.slab_nbytes, self.rows, 0, direct or native.ReadDirect())

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
        space = _largest_space(chain, chunk_nbytes, self.data_nbytes, self.pinned_nbytes)
        if device_from is None or space is None:
            return None
        count, status = space.chunks, space.words + words_room(space.chunks)
        rows = [self._launches(chain, space, number, chunk_nbytes) for number in range(1, count + 1)]
        launches = (native.Launch * ((count + 1) * len(rows[0])))()
        for number, row in enumerate(rows, 1):
            for k, launch in enumerate(row):
                launches[number * len(row) + k] = launch
        self._kept.append(launches)
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

    def _device_from(self, kind: tuple[DecodeChain, int]) -> int | None:
        """Find the number of chunks from which the device decodes faster than the host; None where it never does."""
        chosen = [
            count for count in (1, *(2**k for k in range(1, 16))) if way_of(kind, count, self._limits).slot is not None
        ]
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


def _largest_space(chain: DecodeChain, chunk_nbytes: int, slab_nbytes: int, pinned_nbytes: int) -> Workspace | None:
    """Lay out a slab of as many chunks as fit; None where not even one does."""
    longest = longest_stored(chunk_nbytes) + 256
    pool = _POOL * chunk_nbytes + 256 if chain.streams_by == "zstd" else 0

    def space(count: int) -> Workspace:
        return plan_workspace(
            chain,
            chunks=count,
            stored_nbytes=min(count * longest, pinned_nbytes),
            decoded_nbytes=count * decoded_room(chain, chunk_nbytes),
            words_nbytes=4 * count + 256,
            pool_nbytes=int(count * pool),
        )

    low, high = 0, _MOST_CHUNKS
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if space(middle).nbytes <= slab_nbytes else (low, middle - 1)
    return space(low) if low and longest <= pinned_nbytes else None
