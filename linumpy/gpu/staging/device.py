"""Staging on a device: the memory that slabs pass through on their way into outputs, and the streams that carry them.

Stored bytes land in pinned host memory, one asynchronous copy a slab takes them to the device, and there they are
decoded and scattered. :class:`DeviceStaging` owns that memory, as two rings that many slabs of any size share.

In: slabs that have been read, and their tables. Out: bytes in outputs, behind an event.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from linumpy.gpu.codecs import decode
from linumpy.gpu.kernels import prepare
from linumpy.gpu.staging.scatter import plan_scatter
from linumpy.gpu.staging.tables import Placed, TablePlan, Tables
from linumpy.plan.decode.launches import plan_launches
from linumpy.plan.decode.placement import DecodeWay
from linumpy.plan.decode.workspace import Workspace, decode_words, decoded_room, words_room
from linumpy.plan.read.ring import ALIGN, Range, Ring, aligned, ring_nbytes, staged_nbytes
from linumpy.plan.read.slabs import Slab

#: Slabs that are decoded on the device at the same time, each on a stream of its own.
DECODE_STREAMS = 4
#: What the CUDA runtime says of an event.
_SUCCESS, _NOT_READY = 0, 600


class DeviceStaging:
    """Rings of pinned host memory and of device memory, on CuPy's current device.

    Parameters
    ----------
    scratch_bytes : int
        Device memory at most.
    host_nbytes : int
        Pinned host memory at most.
    """

    on_device = True
    direct = False

    def __init__(self, scratch_bytes: int, host_nbytes: int) -> None:
        import cupy
        import cupyx

        self._cupy, self._cupyx = cupy, cupyx
        self._limits = decode.limits_of(cupy.cuda.Device())
        self.scratch_bytes, self.host_nbytes = scratch_bytes // ALIGN * ALIGN, host_nbytes // ALIGN * ALIGN
        self._host_ring, self._device_ring = Ring(0), Ring(0)
        self._host: Any = None
        self._device: Any = None
        new = cupy.cuda.Stream
        self._copies, self._scatters = new(non_blocking=True), new(non_blocking=True)
        self._decodes = [new(non_blocking=True) for _ in range(DECODE_STREAMS)]
        self._turn = 0

    @property
    def arena_nbytes(self) -> int:
        """Device memory that is held now."""
        return self._device_ring.nbytes

    @property
    def streams(self) -> tuple[Any, ...]:
        """All streams."""
        return self._copies, self._scatters, *self._decodes

    def spare_nbytes(self) -> int:
        """Device memory that could be held, that which is held included: the driver's and CuPy's own unused ones."""
        pool = self._cupy.get_default_memory_pool()
        free = int(pool.free_bytes()) + int(self._cupy.cuda.runtime.memGetInfo()[0])
        limit = int(pool.get_limit())
        return self.arena_nbytes + (min(free, limit - int(pool.used_bytes())) if limit else free)

    def rest(self) -> None:
        """Give memory beyond the limits back, which a single long chunk has taken."""
        if self._device_ring.nbytes > self.scratch_bytes:
            self._finish_device()
            self._device, self._device_ring = None, Ring(0)
        if self._host_ring.nbytes > self.host_nbytes and self._host_ring.oldest() is None:
            self._host, self._host_ring = None, Ring(0)

    def order_behind(self, events: list[Any]) -> None:
        """Let all that is queued from now on wait for events of the callers' streams.

        Only the stream of copies waits: all that other streams do for a slab waits for the slab's copy.
        """
        for event in events:
            self._copies.wait_event(event)

    def prepare(self, device_nbytes: int, host_nbytes: int) -> None:
        """Hold so much memory, or as much as the limits allow. Rings grow while nothing is in them."""
        if host_nbytes > self._host_ring.nbytes < self.host_nbytes and self._host_ring.oldest() is None:
            self._new_host_ring(staged_nbytes(host_nbytes, self.host_nbytes))
        if device_nbytes > self._device_ring.nbytes < self.scratch_bytes:
            self._new_device_ring(ring_nbytes(device_nbytes, self.scratch_bytes))

    def _new_host_ring(self, nbytes: int) -> None:
        self._host, self._host_ring = None, Ring(0)  # the old one goes back first
        self._host = self._cupyx.empty_pinned((nbytes,), dtype=np.uint8)
        self._host_ring = Ring(nbytes)

    def _new_device_ring(self, nbytes: int) -> None:
        self._finish_device()
        self._device, self._device_ring = None, Ring(0)
        self._device, _ = self.allocate(nbytes)
        self._device_ring = Ring(nbytes)

    def take_host(self, nbytes: int) -> Range | None:
        """Give out pinned memory; None until an older range is free. A single slab may need more than the limit."""
        if nbytes > self._host_ring.nbytes and self._host_ring.oldest() is None:
            self._new_host_ring(max(ring_nbytes(nbytes, self.host_nbytes), aligned(nbytes)))
        return self._host_ring.take(nbytes)

    def oldest_host(self) -> Range | None:
        """Return the pinned memory that must be free before more can be given out."""
        return self._host_ring.oldest()

    def host_address(self, taken: Range) -> int:
        """Address of pinned memory."""
        return int(self._host.ctypes.data) + taken.offset

    def pinned_view(self, address: int, nbytes: int) -> memoryview:
        """View pinned memory at an address."""
        begin = address - int(self._host.ctypes.data)
        return memoryview(self._host[begin : begin + nbytes])

    def host_view(self, taken: Range) -> np.ndarray:
        """Return pinned memory as bytes."""
        return self._host[taken.offset : taken.offset + taken.nbytes]

    def await_copied(self, taken: Range) -> None:
        """Wait until pinned memory has been copied up, and free it."""
        if taken.event is not None:
            taken.event.synchronize()
        taken.free = True

    def await_queued(self) -> None:
        """Wait for all copies and kernels that have been queued."""
        for stream in self.streams:
            stream.synchronize()

    def is_complete(self, event: Any) -> bool:
        """Say whether what comes before an event is complete; raises what a kernel has failed with.

        CuPy's ``Event.done`` alone says "not yet" for ever after that.
        """
        status = int(self._cupy.cuda.runtime.eventQuery(event.ptr))
        if status not in (_SUCCESS, _NOT_READY):
            event.synchronize()
        return status == _SUCCESS

    def elapsed(self, first: Any, last: Any) -> float:
        """Seconds between two events that are complete and were made to be timed."""
        return float(self._cupy.cuda.get_elapsed_time(first, last)) / 1e3

    def plan_tables(self, tables: Tables, *, writes_cache: bool = False) -> TablePlan:
        """Plan launches."""
        return TablePlan([], plan_scatter(tables), writes_cache)

    def allocate(self, nbytes: int) -> tuple[Any, int]:
        """Take device memory for good; returns an array and its address."""
        array = self._cupy.empty(nbytes, np.uint8)
        # CuPy may have handed out memory whose last use is still waiting on this stream.
        self.order_behind([self._event(self._cupy.cuda.get_current_stream())])
        return array, int(array.data.ptr)

    def allocate_pinned(self, nbytes: int) -> np.ndarray:
        """Take pinned host memory, as long as somebody refers to it."""
        return np.asarray(self._cupyx.empty_pinned((max(1, nbytes),), dtype=np.uint8))

    def copy_up(self, targets: list[int], sources: list[int], nbytes: list[int]) -> None:
        """Copy pinned host memory to device memory, address by address, and wait for it."""
        for target, source, count in zip(targets, sources, nbytes, strict=True):
            self._copy(target, source, count)
        self._copies.synchronize()

    def place(self, taken: Range, nbytes: int, plan: TablePlan, *, timed: bool, in_place: bool = False) -> Placed:
        """Copy a slab of decoded chunks up with its tables, and scatter it; without bytes, fill values.

        With `in_place` the tables name chunks on the device by their addresses.
        """
        words = aligned(nbytes)
        device = self._take_device(words + plan.nbytes)
        base = self._address(device)
        plan.write(self.host_view(taken)[words:])
        before = self._timed(self._copies, timed)
        self._copy(base, self.host_address(taken), words + plan.nbytes)
        taken.event = self._timed(self._copies, timed) or self._event(self._copies)
        self._scatters.wait_event(taken.event)
        with self._scatters:
            begin = self._timed(self._scatters, timed)
            self._scatter(plan, 0 if in_place else base, base + words)
            placed = self._placed(1, self._scatters, timed)
        device.event = placed.event
        if timed:
            placed.timing = (begin, begin, placed.event)
            placed.copied = (before, taken.event, words + plan.nbytes)
        return placed

    def encoded_nbytes(self, way: DecodeWay, slab: Slab) -> int:
        """Pinned memory that a slab of encoded chunks takes, tables not counted in."""
        assert way.slot is not None
        chunks = len(slab.pieces)
        return status_offset(way.slot.lay_out(chunks, slab.end), chunks) + 4 * chunks + 2 * ALIGN

    def place_encoded(
        self, taken: Range, slab: Slab, way: DecodeWay, chunk_nbytes: int, plan: TablePlan, *, timed: bool
    ) -> Placed:
        """Copy a slab of stored chunks up, decode and scatter it; chunks lie one after another where they are decoded.

        The slab's bytes begin :data:`MARGIN` behind the beginning of `taken`.
        """
        assert way.slot is not None
        chunks = len(slab.pieces)
        space = way.slot.lay_out(chunks, slab.end)
        status_at, device_words = status_offset(space, chunks), aligned(way.slot.nbytes)
        device, base, copied = self._upload(taken, slab, way, chunk_nbytes, plan, timed=timed)
        number = self._turn = (self._turn + 1) % DECODE_STREAMS
        stream = self._decodes[number]
        stream.wait_event(copied[1])
        if plan.writes_cache:  # chunks that were there before may still be read
            stream.wait_event(self._event(self._scatters))
        status = self._cupyx.empty_pinned((chunks,), dtype=np.int32)
        with stream:
            launches = plan_launches(way.chain, space, base, base + status_at, chunks, chunk_nbytes, self._limits)
            prepare([*map(decode.kernel_spec, launches), *(launch.spec for launch in plan.launches)])
            begin = self._timed(stream, timed)
            decode.start(launches)
            middle = self._timed(stream, timed)
            self._scatter(plan, base + space.decoded, base + device_words)
            runtime = self._cupy.cuda.runtime
            runtime.memcpyAsync(
                status.ctypes.data, base + status_at, status.nbytes, runtime.memcpyDeviceToHost, stream.ptr
            )
            placed = self._placed(2 + number, stream, timed)
        device.event = placed.event
        placed.status = status
        if timed:
            placed.timing = (begin, middle, placed.event)
            placed.copied = copied
        return placed

    def _upload(
        self, taken: Range, slab: Slab, way: DecodeWay, chunk_nbytes: int, plan: TablePlan, *, timed: bool
    ) -> tuple[Range, int, tuple[Any, Any, int]]:
        """Copy up what a slab's kernels need; returns the device memory, its address, and what `Placed.copied` tells.

        What the copy waits for comes before both of its events, the first of which there is with `timed` alone.
        """
        assert way.slot is not None
        chunks = len(slab.pieces)
        space = way.slot.lay_out(chunks, slab.end)
        status_at = status_offset(space, chunks)
        words_at, device_words = aligned(status_at + 4 * chunks), aligned(way.slot.nbytes)
        device = self._take_device(device_words + plan.nbytes)
        base, host = self._address(device), self.host_address(taken)
        view, records = self.host_view(taken), self._records(slab, way, chunk_nbytes)
        view[space.words : space.words + len(records)] = records
        view[status_at : status_at + 4 * chunks] = 0  # the kernels note what is wrong, and nothing else
        plan.write(view[words_at:])
        before = self._timed(self._copies, timed)
        self._copy(base, host, status_at + 4 * chunks)
        if plan.nbytes:
            self._copy(base + device_words, host + words_at, plan.nbytes)
        taken.event = self._timed(self._copies, timed) or self._event(self._copies)
        return device, base, (before, taken.event, status_at + 4 * chunks + plan.nbytes)

    @staticmethod
    def _records(slab: Slab, way: DecodeWay, chunk_nbytes: int) -> np.ndarray:
        place = np.arange(len(slab.pieces)) * decoded_room(way.chain, chunk_nbytes)
        return decode_words(way.chain, slab.piece_place, slab.piece_nbytes, place, chunk_nbytes)

    @staticmethod
    def _scatter(plan: TablePlan, source: int, words: int) -> None:
        """Start launches on CuPy's current stream."""
        for launch in plan.launches:
            launch.start(source, words)
            words += launch.nbytes

    def _take_device(self, nbytes: int) -> Range:
        """Give out device memory; what is queued from now on waits for those that had it before."""
        self.hold(nbytes)
        while (taken := self._device_ring.take(nbytes)) is None:
            oldest = self._device_ring.oldest()
            assert oldest is not None, f"{nbytes} bytes of {self._device_ring.nbytes}"
            if oldest.event is not None:
                self._copies.wait_event(oldest.event)
            oldest.free = True
        return taken

    def hold(self, nbytes: int) -> None:
        """Hold at least so much device memory, beyond the limit if need be; raises MemoryError where there is none."""
        if nbytes > self._device_ring.nbytes:
            self._new_device_ring(max(ring_nbytes(nbytes, self.scratch_bytes), aligned(nbytes)))

    def _address(self, taken: Range) -> int:
        return int(self._device.data.ptr) + taken.offset

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        runtime = self._cupy.cuda.runtime
        if nbytes:  # a slab that nobody wants any more may have no tables, and begin at the end of its memory
            runtime.memcpyAsync(target, source, nbytes, runtime.memcpyHostToDevice, self._copies.ptr)

    def _event(self, stream: Any) -> Any:
        return stream.record(self._cupy.cuda.Event(disable_timing=True))

    def _timed(self, stream: Any, timed: bool) -> Any:
        return stream.record(self._cupy.cuda.Event()) if timed else None

    def _placed(self, number: int, stream: Any, timed: bool) -> Placed:
        return Placed(number, stream.record(self._cupy.cuda.Event(disable_timing=not timed)))

    def _finish_device(self) -> None:
        self.await_queued()
        while (oldest := self._device_ring.oldest()) is not None:
            oldest.free = True

    def close(self) -> None:
        """Wait for all that is queued, and give the memory back."""
        self._finish_device()
        self._host = self._device = None
        self._host_ring, self._device_ring = Ring(0), Ring(0)


def status_offset(space: Workspace, chunks: int) -> int:
    """Find where the status of chunks lies in a workspace: behind the records of chunks."""
    return space.words + words_room(chunks)
