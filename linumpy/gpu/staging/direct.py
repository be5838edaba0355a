"""Staging for GPUDirect Storage: stored bytes land in device memory; what the host decodes, in pinned memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from linumpy.gpu.staging.device import DeviceStaging, status_offset
from linumpy.gpu.staging.tables import Placed, TablePlan
from linumpy.plan.decode.placement import DecodeWay
from linumpy.plan.read.ring import ALIGN, Range, Ring, aligned, ring_nbytes
from linumpy.plan.read.slabs import Slab


class DirectStaging(DeviceStaging):
    """Rings of device memory for reads and for decoding, and of pinned memory for what the host decodes.

    Parameters
    ----------
    scratch_bytes, host_nbytes
        As for :class:`DeviceStaging`.
    """

    direct = True

    def __init__(self, scratch_bytes: int, host_nbytes: int) -> None:
        super().__init__(scratch_bytes // 4, host_nbytes)
        self._read_limit = scratch_bytes * 3 // 4 // ALIGN * ALIGN
        self._reads = Ring(0)
        self._memory: Any = None

    def spare_nbytes(self) -> int:
        """Say that there is no memory beyond the scratch: what is read into has its own part of it."""
        return 0

    @property
    def arena_nbytes(self) -> int:
        """Device memory that is held now."""
        return self._device_ring.nbytes + self._reads.nbytes

    def take_read(self, nbytes: int) -> Range | None:
        """Give out device memory for reads; None until an older range is free."""
        if nbytes > self._reads.nbytes and self._reads.oldest() is None:
            self._memory, self._reads = None, Ring(0)
            size = ring_nbytes(4 * nbytes, max(aligned(nbytes), self._read_limit))
            self._memory = self._cupy.empty(size, np.uint8)
            # cuFile writes device memory outside of every stream: earlier work on this memory must be complete.
            self._event(self._cupy.cuda.get_current_stream()).synchronize()
            self._reads = Ring(size)
        return self._reads.take(nbytes)

    def oldest_read(self) -> Range | None:
        """Return the memory that must be free before more can be given out for reads."""
        return self._reads.oldest()

    def read_address(self, taken: Range) -> int:
        """Address of memory for reads."""
        return int(self._memory.data.ptr) + taken.offset

    def read_view(self, address: int, nbytes: int) -> Any:
        """View memory for reads as an array."""
        begin = address - int(self._memory.data.ptr)
        return self._memory[begin : begin + nbytes]

    def place_read(self, taken: Range, nbytes: int, plan: TablePlan, *, timed: bool) -> Placed:
        """Scatter a slab of raw chunks that lies on the device."""
        base, words = self.read_address(taken), aligned(nbytes)
        pinned = self._cupyx.empty_pinned((max(1, plan.nbytes),), dtype=np.uint8)
        plan.write(pinned)
        self._copy(base + words, int(pinned.ctypes.data), plan.nbytes)
        self._scatters.wait_event(self._event(self._copies))
        with self._scatters:
            begin = self._timed(self._scatters, timed)
            self._scatter(plan, base, base + words)
            placed = self._placed(1, self._scatters, timed)
        placed.timing = (begin, begin, placed.event) if timed else None
        taken.event, taken.held = placed.event, pinned
        return placed

    def encoded_nbytes(self, way: DecodeWay, slab: Slab) -> int:
        """Device memory that a slab of encoded chunks takes, tables not counted in."""
        assert way.slot is not None
        return aligned(way.slot.nbytes)

    def _upload(
        self, taken: Range, slab: Slab, way: DecodeWay, chunk_nbytes: int, plan: TablePlan, *, timed: bool
    ) -> tuple[Range, int, tuple[Any, Any, int]]:
        """Copy up the records and tables of a slab, whose stored bytes are there."""
        assert way.slot is not None
        chunks = len(slab.pieces)
        space = way.slot.lay_out(chunks, slab.end)
        status_at, device_words = status_offset(space, chunks), self.encoded_nbytes(way, slab)
        head = status_at + 4 * chunks - space.words
        pinned = self._cupyx.empty_pinned((head + plan.nbytes,), dtype=np.uint8)
        records = self._records(slab, way, chunk_nbytes)
        pinned[: len(records)], pinned[status_at - space.words : head] = records, 0
        plan.write(pinned[head:])
        base, host = self.read_address(taken), int(pinned.ctypes.data)
        before = self._timed(self._copies, timed)
        self._copy(base + space.words, host, head)
        if plan.nbytes:
            self._copy(base + device_words, host + head, plan.nbytes)
        taken.held = pinned
        uploaded = self._timed(self._copies, timed) or self._event(self._copies)
        return taken, base, (before, uploaded, head + plan.nbytes)

    def _finish_device(self) -> None:
        super()._finish_device()
        while (oldest := self._reads.oldest()) is not None:
            oldest.free = True

    def close(self) -> None:
        """Wait for all that is queued, and give the memory back."""
        super().close()
        self._memory, self._reads = None, Ring(0)
