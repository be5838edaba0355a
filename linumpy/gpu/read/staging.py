"""Staging: the memory that slabs pass through on their way into outputs, and the streams that carry them.

Stored bytes land in pinned host memory, one asynchronous copy a slab takes them to the device, and there they are
decoded and scattered; with GPUDirect Storage they land on the device. :class:`DeviceStaging` owns that memory, as two
rings that many slabs of any size share. :class:`HostStaging` is the same for outputs in host memory.

In: slabs that have been read, and their tables. Out: bytes in outputs, behind an event.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from linumpy.gpu.codecs import decode
from linumpy.gpu.kernels import prepare
from linumpy.gpu.read.scatter import Conversion, ScatterLaunch, plan_scatter
from linumpy.plan.decode.launches import plan_launches
from linumpy.plan.decode.placement import DecodeWay
from linumpy.plan.decode.workspace import Workspace, decode_words, decoded_room, words_room
from linumpy.plan.read.ring import ALIGN, Range, Ring, aligned, ring_nbytes
from linumpy.plan.read.scatter import ScatterTable
from linumpy.plan.read.slabs import Slab

#: Slabs that are decoded on the device at the same time, each on a stream of its own.
DECODE_STREAMS = 4

Tables = list[tuple[Conversion, ScatterTable]]


@dataclass(eq=False)
class Placed:
    """A slab whose copies and kernels have been queued.

    Attributes
    ----------
    stream : int
        Number of the stream that its last kernel runs on.
    event : object
        Recorded behind that kernel; None in host memory.
    status : numpy.ndarray of int32 or None
        Of each chunk that the device decodes, once `event` is complete: 0 where all is well. None for raw slabs.
    timing : tuple of events or None
        Before decoding, before and behind the scatter.
    """

    stream: int
    event: Any
    status: np.ndarray | None = None
    timing: tuple[Any, Any, Any] | None = None


class Staging(Protocol):
    """What the reader's loop needs of the memory that slabs pass through."""

    #: Streams and events of the device, where it has them.
    on_device: bool

    def take_host(self, nbytes: int) -> Range | None:
        """Give out host memory for a slab; None until an older one is free."""

    def host_address(self, taken: Range) -> int:
        """Address of host memory."""

    def oldest_host(self) -> Range | None:
        """Return the host memory that must be free before more can be given out."""

    def await_copied(self, taken: Range) -> None:
        """Wait until host memory has been copied up, and free it."""

    def await_queued(self) -> None:
        """Wait for all copies and kernels that have been queued."""

    def plan_tables(self, tables: Tables) -> TablePlan:
        """Bring tables into the form in which they are carried out."""

    def place(self, taken: Range, nbytes: int, plan: TablePlan, *, timed: bool) -> Placed:
        """Scatter decoded bytes that lie in host memory; without bytes, fill values."""


@dataclass(frozen=True, eq=False)
class TablePlan:
    """Tables of one slab.

    Attributes
    ----------
    tables : list of (Conversion, ScatterTable)
        As they are.
    launches : list of ScatterLaunch
        As the device carries them out; none in host memory.
    writes_cache : bool
        Whether chunks are copied into the cache too.
    """

    tables: Tables
    launches: list[ScatterLaunch]
    writes_cache: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all words."""
        return sum(launch.nbytes for launch in self.launches)


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

    def order_behind(self, events: list[Any]) -> None:
        """Let all that is queued from now on wait for events of the callers' streams.

        Only the stream of copies waits: all that other streams do for a slab waits for the slab's copy.
        """
        for event in events:
            self._copies.wait_event(event)

    def prepare(self, device_nbytes: int, host_nbytes: int) -> None:
        """Hold so much memory, or as much as the limits allow. Rings grow while nothing is in them."""
        if host_nbytes > self._host_ring.nbytes < self.host_nbytes and self._host_ring.oldest() is None:
            self._new_host_ring(ring_nbytes(host_nbytes, self.host_nbytes))
        if device_nbytes > self._device_ring.nbytes < self.scratch_bytes:
            self._new_device_ring(ring_nbytes(device_nbytes, self.scratch_bytes))

    def _new_host_ring(self, nbytes: int) -> None:
        self._host = None  # the old one goes back first
        self._host = self._cupyx.empty_pinned((nbytes,), dtype=np.uint8)
        self._host_ring = Ring(nbytes)

    def _new_device_ring(self, nbytes: int) -> None:
        self._finish_device()
        self._device = None
        self._device = self._cupy.empty(nbytes, np.uint8)
        self._device_ring = Ring(nbytes)
        # CuPy may have handed out memory whose last use is still waiting on this stream.
        self.order_behind([self._event(self._cupy.cuda.get_current_stream())])

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

    def plan_tables(self, tables: Tables, *, writes_cache: bool = False) -> TablePlan:
        """Plan launches."""
        return TablePlan(tables, plan_scatter(tables), writes_cache)

    def allocate(self, nbytes: int) -> tuple[Any, int]:
        """Take device memory for good; returns an array and its address."""
        array = self._cupy.empty(nbytes, np.uint8)
        self.order_behind([self._event(self._cupy.cuda.get_current_stream())])
        return array, int(array.data.ptr)

    def place(self, taken: Range, nbytes: int, plan: TablePlan, *, timed: bool, in_place: bool = False) -> Placed:
        """Copy a slab of decoded chunks up with its tables, and scatter it; without bytes, fill values.

        With `in_place` the tables name chunks on the device by their addresses.
        """
        words = aligned(nbytes)
        device = self._take_device(words + plan.nbytes)
        base = self._address(device)
        _write(self.host_view(taken)[words:], plan)
        self._copy(base, self.host_address(taken), words + plan.nbytes)
        taken.event = self._event(self._copies)
        self._scatters.wait_event(taken.event)
        with self._scatters:
            begin = self._timed(self._scatters, timed)
            self._scatter(plan, 0 if in_place else base, base + words)
            placed = self._placed(1, self._scatters, timed)
        device.event = placed.event
        placed.timing = (begin, begin, placed.event) if timed else None
        return placed

    def encoded_nbytes(self, way: DecodeWay, slab: Slab) -> int:
        """Pinned memory that a slab of encoded chunks takes, tables not counted in."""
        assert way.slot is not None
        chunks = len(slab.pieces)
        return _status_offset(way.slot.lay_out(chunks, slab.end), chunks) + 4 * chunks + 2 * ALIGN

    def place_encoded(
        self, taken: Range, slab: Slab, way: DecodeWay, chunk_nbytes: int, plan: TablePlan, *, timed: bool
    ) -> Placed:
        """Copy a slab of stored chunks up, decode and scatter it; chunks lie one after another where they are decoded.

        The slab's bytes begin :data:`MARGIN` behind the beginning of `taken`.
        """
        assert way.slot is not None
        chunks = len(slab.pieces)
        space = way.slot.lay_out(chunks, slab.end)
        status_at, device_words = _status_offset(space, chunks), aligned(way.slot.nbytes)
        device, base, uploaded = self._upload(taken, slab, way, chunk_nbytes, plan)
        number = self._turn = (self._turn + 1) % DECODE_STREAMS
        stream = self._decodes[number]
        stream.wait_event(uploaded)
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
        placed.timing = (begin, middle, placed.event) if timed else None
        return placed

    def _upload(
        self, taken: Range, slab: Slab, way: DecodeWay, chunk_nbytes: int, plan: TablePlan
    ) -> tuple[Range, int, Any]:
        """Copy up what a slab's kernels need; returns the device memory, its address, and the event of the copy."""
        assert way.slot is not None
        chunks = len(slab.pieces)
        space = way.slot.lay_out(chunks, slab.end)
        status_at = _status_offset(space, chunks)
        words_at, device_words = aligned(status_at + 4 * chunks), aligned(way.slot.nbytes)
        device = self._take_device(device_words + plan.nbytes)
        base, host = self._address(device), self.host_address(taken)
        view, records = self.host_view(taken), self._records(slab, way, chunk_nbytes)
        view[space.words : space.words + len(records)] = records
        view[status_at : status_at + 4 * chunks] = 0  # the kernels note what is wrong, and nothing else
        _write(view[words_at:], plan)
        self._copy(base, host, status_at + 4 * chunks)
        if plan.nbytes:
            self._copy(base + device_words, host + words_at, plan.nbytes)
        taken.event = self._event(self._copies)
        return device, base, taken.event

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
        if nbytes > self._device_ring.nbytes:
            self._new_device_ring(max(ring_nbytes(nbytes, self.scratch_bytes), aligned(nbytes)))
        while (taken := self._device_ring.take(nbytes)) is None:
            oldest = self._device_ring.oldest()
            assert oldest is not None, f"{nbytes} bytes of {self._device_ring.nbytes}"
            if oldest.event is not None:
                self._copies.wait_event(oldest.event)
            oldest.free = True
        return taken

    def _address(self, taken: Range) -> int:
        return int(self._device.data.ptr) + taken.offset

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        runtime = self._cupy.cuda.runtime
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


class DirectStaging(DeviceStaging):
    """Staging for GPUDirect Storage: stored bytes land in device memory; what the host decodes, in pinned memory.

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

    @property
    def arena_nbytes(self) -> int:
        """Device memory that is held now."""
        return self._device_ring.nbytes + self._reads.nbytes

    def take_read(self, nbytes: int) -> Range | None:
        """Give out device memory for reads; None until an older range is free."""
        if nbytes > self._reads.nbytes and self._reads.oldest() is None:
            self._memory = None
            self._memory = self._cupy.empty(ring_nbytes(4 * nbytes, max(nbytes, self._read_limit)), np.uint8)
            self._reads = Ring(self._memory.nbytes)
            # cuFile writes device memory outside of every stream: earlier work on this memory must be complete.
            self._event(self._cupy.cuda.get_current_stream()).synchronize()
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
        _write(pinned, plan)
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
        self, taken: Range, slab: Slab, way: DecodeWay, chunk_nbytes: int, plan: TablePlan
    ) -> tuple[Range, int, Any]:
        """Copy up the records and tables of a slab, whose stored bytes are there."""
        assert way.slot is not None
        chunks = len(slab.pieces)
        space = way.slot.lay_out(chunks, slab.end)
        status_at, device_words = _status_offset(space, chunks), self.encoded_nbytes(way, slab)
        head = status_at + 4 * chunks - space.words
        pinned = self._cupyx.empty_pinned((head + plan.nbytes,), dtype=np.uint8)
        records = self._records(slab, way, chunk_nbytes)
        pinned[: len(records)], pinned[status_at - space.words : head] = records, 0
        _write(pinned[head:], plan)
        base, host = self.read_address(taken), int(pinned.ctypes.data)
        self._copy(base + space.words, host, head)
        if plan.nbytes:
            self._copy(base + device_words, host + head, plan.nbytes)
        taken.held = pinned
        return taken, base, self._event(self._copies)

    def _finish_device(self) -> None:
        super()._finish_device()
        while (oldest := self._reads.oldest()) is not None:
            oldest.free = True

    def close(self) -> None:
        """Wait for all that is queued, and give the memory back."""
        super().close()
        self._memory, self._reads = None, Ring(0)


class HostStaging:
    """The same for outputs in host memory: one ring, and NumPy in place of kernels.

    Parameters
    ----------
    host_nbytes : int
        Memory at most.
    """

    on_device = False
    direct = False
    arena_nbytes = 0

    def __init__(self, host_nbytes: int) -> None:
        self.scratch_bytes = self.host_nbytes = host_nbytes // ALIGN * ALIGN
        self._ring, self._host = Ring(0), np.empty(0, np.uint8)

    def order_behind(self, events: list[Any]) -> None:
        """Do nothing: there are no streams."""

    def prepare(self, device_nbytes: int, host_nbytes: int) -> None:
        """Hold so much memory, or as much as the limit allows."""
        if host_nbytes > self._ring.nbytes < self.host_nbytes and self._ring.oldest() is None:
            self._host = np.empty(ring_nbytes(host_nbytes, self.host_nbytes), np.uint8)
            self._ring = Ring(self._host.nbytes)

    def take_host(self, nbytes: int) -> Range | None:
        """Give out memory; None until an older range is free."""
        if nbytes > self._ring.nbytes and self._ring.oldest() is None:
            self._host = np.empty(max(ring_nbytes(nbytes, self.host_nbytes), aligned(nbytes)), np.uint8)
            self._ring = Ring(self._host.nbytes)
        return self._ring.take(nbytes)

    def oldest_host(self) -> Range | None:
        """Return the memory that must be free before more can be given out."""
        return self._ring.oldest()

    def host_address(self, taken: Range) -> int:
        """Address of the memory."""
        return int(self._host.ctypes.data) + taken.offset

    def host_view(self, taken: Range) -> np.ndarray:
        """Return the memory as bytes."""
        return self._host[taken.offset : taken.offset + taken.nbytes]

    def await_copied(self, taken: Range) -> None:
        """Free memory."""
        taken.free = True

    def await_queued(self) -> None:
        """Do nothing: copies are made at once."""

    def plan_tables(self, tables: Tables, *, writes_cache: bool = False) -> TablePlan:
        """Leave tables as they are."""
        return TablePlan(tables, [])

    def place(self, taken: Range, nbytes: int, plan: TablePlan, *, timed: bool) -> Placed:
        """Copy boxes to their outputs; without bytes, fill values."""
        for conversion, table in plan.tables:
            _copy_boxes(self.host_view(taken)[:nbytes], conversion, table)
        taken.free = True
        return Placed(0, None)

    def close(self) -> None:
        """Give the memory back."""
        self._ring, self._host = Ring(0), np.empty(0, np.uint8)


def _copy_boxes(source: np.ndarray, conversion: Conversion, table: ScatterTable) -> None:
    stored = conversion.source.newbyteorder() if conversion.swapped else conversion.source
    fills = [fill[: conversion.target.itemsize].view(conversion.target)[0] for fill in table.fill]
    source_strides = [tuple(row) for row in table.source_strides.tolist()]
    target_strides = [tuple(row) for row in table.target_strides.tolist()]
    rows = zip(table.source.tolist(), table.target.tolist(), table.header.tolist(), table.extent.tolist(), strict=True)
    for begin, address, header, extent in rows:
        into = _at(address, tuple(extent), conversion.target, target_strides[header])
        if begin < 0:
            into[...] = fills[header]
            continue
        values = np.ndarray(tuple(extent), stored, source, begin, source_strides[header])
        with np.errstate(all="ignore"):  # numbers that the new dtype cannot hold are not defined, as in NumPy
            np.copyto(into, values, casting="unsafe")


def _at(address: int, shape: tuple[int, ...], dtype: np.dtype, strides: tuple[int, ...]) -> np.ndarray:
    """View memory that the reader knows by its address alone."""
    nbytes = sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) + dtype.itemsize
    return np.ndarray(shape, dtype, memoryview((ctypes.c_char * nbytes).from_address(address)), 0, strides)


def _write(view: np.ndarray, plan: TablePlan) -> None:
    """Lay out the words of all tables one behind the other."""
    begin = 0
    for launch in plan.launches:
        view[begin : begin + launch.words.nbytes] = launch.words.view(np.uint8)
        begin += launch.nbytes


def _status_offset(space: Workspace, chunks: int) -> int:
    """Find where the status of chunks lies in a workspace: behind the records of chunks."""
    return space.words + words_room(chunks)
