"""Buffers that slabs travel through, and how their bytes get into the result.

:class:`StagedSlots` is for kvikio's compat mode, where every byte passes host memory anyway: reads land in pinned
host memory and one asynchronous copy a slab takes them to the device. kvikio's own compat mode copies each read by
itself, which limits it to about 25 µs a read whatever its size. :class:`DirectSlots` is for GPUDirect Storage: reads
land in device memory.

In: slabs and their tables. Out: bytes in the result, ordered on the caller's current stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from linumpy.gpu.read.scatter import Conversion, launch, table_nbytes, table_words
from linumpy.plan.layout import MAX_RANK
from linumpy.plan.read.scatter import ScatterTable
from linumpy.plan.read.slabs import MAX_PIECES, Slab


class Slots(Protocol):
    """Buffers that a reader fills in turn."""

    depth: int

    def wait(self, slot: int) -> None:
        """Wait until the slot's buffer may be overwritten."""

    def buffers(self, slot: int, slab: Slab) -> list[Any]:
        """Return the bytes that each read of a slab fills."""

    def addresses(self, slot: int, slab: Slab) -> np.ndarray:
        """Return the address in host memory that each read of a slab fills."""

    def place(self, slot: int, slab: Slab, table: ScatterTable | None) -> None:
        """Send a slab whose reads are complete on its way into the result."""

    def fill(self, table: ScatterTable) -> None:
        """Write fill values, after all that was placed before."""

    def finish(self) -> None:
        """Order all of it on the caller's stream, and wait until no buffer is in use any more."""

    def scatter_seconds(self) -> float | None:
        """Time of all scatter kernels; None where it was not taken."""


@dataclass(frozen=True)
class Target:
    """The result and what happens to an element on its way there.

    Attributes
    ----------
    out : cupy.ndarray
        C-contiguous.
    conversion : Conversion
        Element types.
    fill : numpy.generic
        Fill value in the dtype of the result.
    """

    out: Any
    conversion: Conversion
    fill: np.generic

    @property
    def address(self) -> int:
        """Device address of the result."""
        return int(self.out.data.ptr)


def slot_nbytes(slab_nbytes: int, pieces: int) -> int:
    """Bytes of one slot: a slab and, behind it, its table."""
    return slab_nbytes + -(-table_nbytes(MAX_RANK, min(pieces, MAX_PIECES)) // 512) * 512


class _Slots:
    """What both kinds share: events, tables, the scatter on the caller's stream."""

    def __init__(self, target: Target, depth: int, slab_nbytes: int, pieces: int, *, timed: bool) -> None:
        import cupy

        self._cupy = cupy
        self.depth = depth
        self._target = target
        self._slab_nbytes = slab_nbytes
        self._slot_nbytes = slot_nbytes(slab_nbytes, pieces)
        self._stream = cupy.cuda.get_current_stream()
        self._copies = cupy.cuda.Stream(non_blocking=True)
        self._free: list[Any] = [None] * depth
        self._timed = timed
        self._spans: list[tuple[Any, Any]] = []
        self._arena = cupy.empty(depth * self._slot_nbytes, np.uint8)
        # CuPy may have handed out memory whose last use is still waiting on the caller's stream.
        self._copies.wait_event(self._stream.record())

    @property
    def scratch_bytes(self) -> int:
        """Device memory beyond the result."""
        return int(self._arena.nbytes)

    def scatter_seconds(self) -> float | None:
        """Time of all scatter kernels; waits for the last one. None where it was not taken."""
        if not self._timed:
            return None
        if self._spans:
            self._spans[-1][1].synchronize()
        return sum(self._cupy.cuda.get_elapsed_time(a, b) for a, b in self._spans) / 1e3

    def fill(self, table: ScatterTable) -> None:
        """Write fill values, after all copies; the table goes up by itself, since no slab carries it."""
        self._stream.wait_event(self._event(self._copies))
        words = self._cupy.asarray(table_words(table, self._target.fill))
        self._launch(table, 0, words.data.ptr)

    def _launch(self, table: ScatterTable, source: int, words: int) -> None:
        begin = self._stream.record(self._cupy.cuda.Event()) if self._timed else None
        launch(table, self._target.conversion, source, self._target.address, words)
        if begin is not None:
            self._spans.append((begin, self._stream.record(self._cupy.cuda.Event())))

    def _base(self, slot: int) -> int:
        return slot * self._slot_nbytes

    def _event(self, stream: Any) -> Any:
        return stream.record(self._cupy.cuda.Event(disable_timing=not self._timed))

    def wait(self, slot: int) -> None:
        """Wait until nothing reads the slot's buffer any more."""
        if self._free[slot] is not None:
            self._free[slot].synchronize()
            self._free[slot] = None


class StagedSlots(_Slots):
    """Pinned host buffers, each with a twin on the device."""

    def __init__(self, target: Target, depth: int, slab_nbytes: int, pieces: int, *, timed: bool) -> None:
        super().__init__(target, depth, slab_nbytes, pieces, timed=timed)
        import cupyx

        # CuPy keeps freed pinned memory for the next read: pinning costs about 0.7 ms/MiB, reading 0.03.
        self._host = cupyx.empty_pinned((depth, self._slot_nbytes), dtype=np.uint8)
        self._views = [memoryview(row) for row in self._host]
        self._scattered: list[Any] = [None] * depth

    def buffers(self, slot: int, slab: Slab) -> list[Any]:
        """Return pieces of the pinned buffer."""
        view = self._views[slot]
        return [view[a:b] for a, b in zip(slab.place.tolist(), (slab.place + slab.nbytes).tolist(), strict=True)]

    def addresses(self, slot: int, slab: Slab) -> np.ndarray:
        """Return places in the pinned buffer."""
        return int(self._host[slot].ctypes.data) + slab.place

    def place(self, slot: int, slab: Slab, table: ScatterTable | None) -> None:
        """Copy up: what is contiguous in the result goes there at once, the rest by way of the arena."""
        host = int(self._host[slot].ctypes.data)
        if self._scattered[slot] is not None:  # the twin on the device may still be read
            self._copies.wait_event(self._scattered[slot])
        for begin, to, nbytes in straight_runs(slab):
            self._copy(self._target.address + to, host + begin, nbytes)
        if table is not None:
            device = int(self._arena.data.ptr) + self._base(slot)
            words = table_words(table, self._target.fill)
            at = self._slab_nbytes
            self._host[slot, at : at + words.nbytes].view(np.int64)[:] = words
            self._copy(device + at, host + at, words.nbytes)
            self._copy(device, host, slab.end)
        self._free[slot] = self._event(self._copies)
        if table is not None:
            self._stream.wait_event(self._free[slot])
            self._launch(table, device, device + at)
            self._scattered[slot] = self._event(self._stream)

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        runtime = self._cupy.cuda.runtime
        runtime.memcpyAsync(target, source, nbytes, runtime.memcpyHostToDevice, self._copies.ptr)

    def finish(self) -> None:
        """Order the copies before the caller's next work; pinned memory goes back only when they are complete."""
        done = self._event(self._copies)
        self._stream.wait_event(done)
        done.synchronize()


class DirectSlots(_Slots):
    """Buffers on the device, for reads that need no host memory."""

    def __init__(self, target: Target, depth: int, slab_nbytes: int, pieces: int, *, timed: bool) -> None:
        super().__init__(target, depth, slab_nbytes, pieces, timed=timed)
        # cuFile writes device memory outside of every stream: earlier work on this memory must be complete.
        self._stream.record().synchronize()
        self._bytes = target.out.reshape(-1).view(np.uint8) if target.out.size else self._arena

    def buffers(self, slot: int, slab: Slab) -> list[Any]:
        """Return for each read its place in the result if it is contiguous there, else a piece of the buffer."""
        places = (slab.place + self._base(slot)).tolist()
        rows = zip(slab.straight.tolist(), places, slab.nbytes.tolist(), strict=True)
        return [
            self._bytes[straight : straight + nbytes] if straight >= 0 else self._arena[place : place + nbytes]
            for straight, place, nbytes in rows
        ]

    def addresses(self, slot: int, slab: Slab) -> np.ndarray:
        """Refuse: this memory is not the host's."""
        raise TypeError("direct slots lie in device memory")

    def place(self, slot: int, slab: Slab, table: ScatterTable | None) -> None:
        """Scatter the slab."""
        if table is None:
            return
        device = int(self._arena.data.ptr) + self._base(slot)
        words = table_words(table, self._target.fill)
        at = self._slab_nbytes
        self._arena[self._base(slot) + at :][: words.nbytes].view(np.int64).set(words)
        self._launch(table, device, device + at)
        self._free[slot] = self._event(self._stream)

    def finish(self) -> None:
        """Nothing left to order: reads are complete, and the scatters run on the caller's stream."""


def straight_runs(slab: Slab) -> list[tuple[int, int, int]]:
    """Join the reads of a slab that go straight into the result, where they follow on each other on both sides.

    Returns
    -------
    list of (int, int, int)
        First byte in the buffer, first byte in the result, number of bytes.
    """
    rows = np.flatnonzero(slab.straight >= 0)
    if not len(rows):
        return []
    place, straight, nbytes = slab.place[rows], slab.straight[rows], slab.nbytes[rows]
    follows = (np.diff(place) == nbytes[:-1]) & (np.diff(straight) == nbytes[:-1])
    heads = np.flatnonzero(np.concatenate(([True], ~follows)))
    total = np.add.reduceat(nbytes, heads)
    return list(zip(place[heads].tolist(), straight[heads].tolist(), total.tolist(), strict=True))
