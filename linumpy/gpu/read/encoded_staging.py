"""Slots whose slabs are decoded on the device before they are scattered.

Stored bytes come up from pinned host memory (or, with GPUDirect Storage, are read into the slot), and the kernels of
:mod:`linumpy.gpu.codecs.decode` and the scatter follow on a stream of the slot's own: slabs are read, copied, decoded
and scattered at the same time. In: slabs and their tables. Out: bytes in the result, ordered on the caller's current
stream, and the chunks that the decoders gave up.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from linumpy.gpu.codecs import decode
from linumpy.gpu.read.scatter import launch, table_words
from linumpy.gpu.read.staging import Target
from linumpy.plan.decode.launches import Launch, plan_launches
from linumpy.plan.decode.placement import DecodeWay
from linumpy.plan.decode.workspace import MARGIN, Workspace, decode_words, decoded_room, words_room
from linumpy.plan.read.scatter import ScatterTable
from linumpy.plan.read.slabs import Slab


class EncodedSlots:
    """Slots of encoded chunks.

    Parameters
    ----------
    target : Target
        The result.
    depth : int
        Slots.
    way : DecodeWay
        How chunks are decoded, and the memory of a slot.
    chunk_nbytes : int
        Decoded bytes of a chunk.
    chunks : int
        Of the whole read.
    direct : bool
        Whether reads go to device memory.
    timed : bool
        Whether to time the kernels.
    """

    def __init__(
        self, target: Target, depth: int, way: DecodeWay, chunk_nbytes: int, chunks: int, *, direct: bool, timed: bool
    ) -> None:
        import cupy
        import cupyx

        assert way.slot is not None
        self._cupy, self.depth, self._target, self._timed = cupy, depth, target, timed
        self._chain, self._slot, self._chunk_nbytes = way.chain, way.slot, chunk_nbytes
        self._limits = decode.limits_of(cupy.cuda.Device())
        self._stream = cupy.cuda.get_current_stream()
        self._copies = cupy.cuda.Stream(non_blocking=True)
        self._streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(depth)]
        self._arena = cupy.empty(depth * self._slot.nbytes, np.uint8)
        self._status = cupy.zeros(chunks, np.int32)
        self._rows: list[np.ndarray] = []
        # CuPy may have handed out memory whose last use is still waiting on the caller's stream.
        ready = self._stream.record()
        for stream in (self._copies, *self._streams):
            stream.wait_event(ready)
        if direct:  # cuFile writes device memory outside of every stream
            ready.synchronize()
        self._direct = direct
        words = self._slot.words_nbytes
        self._host = cupyx.empty_pinned((depth, (0 if direct else self._slot.stored_nbytes) + words), dtype=np.uint8)
        self._stored = [row[words:] for row in self._host]
        self._copied: list[Any] = [None] * depth
        self._decoded: list[Any] = [None] * depth
        self._spans: list[tuple[Any, Any, Any]] = []

    def wait(self, slot: int) -> None:
        """Wait until the slot's buffer may be overwritten: on the host it has been copied, on the device decoded."""
        event = self._decoded[slot] if self._direct else self._copied[slot]
        if event is not None:
            event.synchronize()

    def buffers(self, slot: int, slab: Slab) -> list[Any]:
        """Return the bytes that each read of a slab fills."""
        begin = slot * self._slot.nbytes + MARGIN
        memory = self._arena[begin : begin + self._slot.stored_nbytes] if self._direct else self._stored[slot]
        rows = zip(slab.place.tolist(), (slab.place + slab.nbytes).tolist(), strict=True)
        return [memory[a:b] for a, b in rows] if self._direct else [memoryview(memory)[a:b] for a, b in rows]

    def addresses(self, slot: int, slab: Slab) -> np.ndarray:
        """Return the address in host memory that each read of a slab fills."""
        if self._direct:
            raise TypeError("direct slots lie in device memory")
        return int(self._stored[slot].ctypes.data) + slab.place

    def place(self, slot: int, slab: Slab, table: ScatterTable | None) -> None:
        """Copy up, decode, scatter."""
        if table is None:
            return
        base = int(self._arena.data.ptr) + slot * self._slot.nbytes
        stream, at = self._streams[slot], words_room(len(slab.pieces))
        space = self._slot.lay_out(len(slab.pieces), slab.end)
        self._copy_up(slot, slab, base, space, self._write_words(slot, slab, table, at))
        stream.wait_event(self._copied[slot])
        begin = self._event(stream)
        with stream:
            decode.start(self._launches(base, slab, space))
            middle = self._event(stream)
            words = base + space.words + at
            launch(table, self._target.conversion, base + space.decoded, self._target.address, words)
        self._decoded[slot] = self._event(stream)
        if self._timed:
            self._spans.append((begin, middle, self._decoded[slot]))
        self._rows.append(slab.pieces)

    def _launches(self, base: int, slab: Slab, space: Workspace) -> list[Launch]:
        done = sum(map(len, self._rows))
        status = int(self._status.data.ptr) + 4 * done
        return plan_launches(self._chain, space, base, status, len(slab.pieces), self._chunk_nbytes, self._limits)

    def _write_words(self, slot: int, slab: Slab, table: ScatterTable, at: int) -> int:
        """Write records and table into pinned memory; returns their bytes."""
        place = np.arange(len(slab.pieces)) * decoded_room(self._chain, self._chunk_nbytes)
        records = decode_words(self._chain, slab.piece_place, slab.piece_nbytes, place, self._chunk_nbytes)
        boxes = table_words(table, self._target.fill).view(np.uint8)
        self._host[slot, : len(records)] = records
        self._host[slot, at : at + len(boxes)] = boxes
        return at + len(boxes)

    def _copy_up(self, slot: int, slab: Slab, base: int, space: Workspace, words: int) -> None:
        if self._decoded[slot] is not None:  # the twin on the device may still be read
            self._copies.wait_event(self._decoded[slot])
        self._copy(base + space.words, self._host[slot].ctypes.data, words)
        if not self._direct:
            self._copy(base + space.stored, self._stored[slot].ctypes.data, slab.end)
        self._copied[slot] = self._event(self._copies)

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        runtime = self._cupy.cuda.runtime
        runtime.memcpyAsync(target, source, nbytes, runtime.memcpyHostToDevice, self._copies.ptr)

    def _event(self, stream: Any) -> Any:
        return stream.record(self._cupy.cuda.Event(disable_timing=not self._timed))

    def fill(self, table: ScatterTable) -> None:
        """Write fill values, on the caller's stream, after all that was placed before."""
        self._order()
        words = self._cupy.asarray(table_words(table, self._target.fill))
        launch(table, self._target.conversion, 0, self._target.address, words.data.ptr)

    def finish(self) -> None:
        """Wait for all decoders, whatever became of them, and order their work before the caller's next."""
        self._order()
        for stream in (self._copies, *self._streams):
            stream.synchronize()

    def _order(self) -> None:
        """Let the caller's stream wait for those of the slots."""
        for stream in (self._copies, *self._streams):
            self._stream.wait_event(self._event(stream))

    def failed(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the pieces whose chunks could not be decoded, and what the decoders said; after :meth:`finish`."""
        rows = np.concatenate([np.empty(0, np.int64), *self._rows])
        status = self._status[: len(rows)].get()
        wrong = np.flatnonzero(status)
        return rows[wrong], status[wrong]

    @property
    def arena(self) -> Any:
        """The device memory of all slots; after :meth:`finish` free for other use."""
        return self._arena

    def scatter_seconds(self) -> float | None:
        """Time of all scatter kernels; None where it was not taken. Slabs overlap: so may these times."""
        return self._elapsed(1, 2)

    def decode_seconds(self) -> float | None:
        """Do the same for the decoders."""
        return self._elapsed(0, 1)

    def _elapsed(self, begin: int, end: int) -> float | None:
        if not self._timed:
            return None
        return sum(self._cupy.cuda.get_elapsed_time(span[begin], span[end]) for span in self._spans) / 1e3
