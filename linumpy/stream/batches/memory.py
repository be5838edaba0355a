"""Memory of a pipeline, allocated once: slots for batches, and a ring for staged crops.

:class:`Memory` is one allocation, which is divided when the first batch is planned. A *slot* holds all parts of one
batch. The *stage* of a batch is the part of the ring that holds the staged crops of the batch. A slot in use has a
:class:`Lease`, which every array of the batch references; the slot is free again when the last reference is gone. So a
tensor that a framework imported through DLPack keeps its storage.
"""

from __future__ import annotations

import math
import queue
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from linumpy.arrays import Array
from linumpy.stream.config import Config
from linumpy.stream.errors import InvalidArgument, ShutdownError
from linumpy.stream.planning.records import ALIGNED, CropRead, PartShape, aligned, stage_offsets

#: A ``cupy.cuda.Stream``, and an event of CuPy or PyTorch; CuPy has no types.
Stream = Any
Event = Any


@contextmanager
def on_stream(stream: Stream | None, device_id: int | None) -> Iterator[None]:
    """Make a stream CuPy's current stream, on its device, in a ``with`` block; do nothing for None."""
    if stream is None:
        yield
        return
    import cupy

    with cupy.cuda.Device(device_id), stream:
        yield


def recorded(stream: Stream) -> Event:
    """Record a new event on a stream."""
    import cupy

    return stream.record(cupy.cuda.Event(disable_timing=True))


#: An event of a consumer, before which a slot must not be reused; None stands for all work of the device.
Released = Event | int | None
#: Spare slots for each batch that is read ahead.
_SPARE_LOOKAHEAD = 7
#: A free slot, and the events before which it must not be reused.
Freed = tuple[int, list[Released]]


class Lease:
    """A slot in use. Arrays of the batch hold the lease; the slot is free when the last of these arrays is gone.

    The memory's queue then gets the slot, with events after the work that streams which read the batch have queued.
    """

    def __init__(self, slot: int, offset: int, memory: Memory) -> None:
        self.slot, self.offset, self.nbytes = slot, offset, memory.slot_nbytes
        self.address = memory.address + offset
        self.streams: set[int] = set()  # streams that read the batch
        self.events: list[Released] = []  # that the consumer passed to ``Batch.release``
        self._owner = memory.base
        arguments = (memory.freed, slot, self.streams, self.events, memory.device_id)
        weakref.finalize(self, _give_back, *arguments).atexit = False

    @property
    def __array_interface__(self) -> dict[str, object]:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}


def _give_back(
    freed: queue.SimpleQueue[Freed | None], slot: int, streams: set[int], events: list[Released], device_id: int | None
) -> None:
    """Free a slot after the work that `streams` have queued so far, and after `events`.

    The garbage collector may run this in any thread; ``SimpleQueue.put`` may be called from a destructor.
    """
    events = list(events)
    try:
        if streams:
            import cupy

            with cupy.cuda.Device(device_id):
                for pointer in streams:
                    events.append(cupy.cuda.ExternalStream(pointer).record(cupy.cuda.Event(disable_timing=True)))
    except Exception:  # a stream was destroyed by its owner: wait for the whole device instead
        events = [None]
    freed.put((slot, events))


def _device_memory(nbytes: int, device_id: int) -> Any:
    """Allocate outside of CuPy's pool: freeing then waits for all streams, which may still read a tensor."""
    import cupy

    with cupy.cuda.Device(device_id):
        free = cupy.cuda.runtime.memGetInfo()[0]
        if nbytes > free:
            cupy.get_default_memory_pool().free_all_blocks()
            free = cupy.cuda.runtime.memGetInfo()[0]
        if nbytes > free:
            raise MemoryError(f"device_buffer_bytes={nbytes}: the device has {free} bytes free")
        return cupy.cuda.Memory(nbytes)


class Memory:
    """One allocation on a CUDA device, or on the host if `device_id` is None; `base` owns it."""

    def __init__(self, nbytes: int, device_id: int | None) -> None:
        self.nbytes, self.device_id = nbytes, device_id
        self.base: object
        if device_id is None:
            array = np.empty(nbytes + ALIGNED, np.uint8)
            self.base, self.address = array, aligned(int(array.ctypes.data))
        else:
            memory = _device_memory(nbytes, device_id)
            self.base, self.address = memory, int(memory.ptr)
        self.slot_nbytes = self.slots = 0  # bytes of a slot, and number of slots; 0 before :meth:`divide`
        self.spare_slots = 0  # slots that are not used before :meth:`use_spare_slots`
        self._stage_begin = 0
        #: Parts of the ring that are taken, in order: begin and end as offsets in the memory, and the batch's number.
        self._stages: deque[tuple[int, int, int]] = deque()
        #: Free slots; None wakes up the thread that waits for a slot, when the pipeline is closed.
        self.freed: queue.SimpleQueue[Freed | None] = queue.SimpleQueue()

    def divide(self, slot_nbytes: int, stage_nbytes: int, lookahead: int) -> None:
        """Divide the memory, once: slots for batches, and a ring for staged crops.

        There are at most `lookahead` + 2 slots, two of them for the consumer, and spare slots for seven times as many
        batches where they fit. `stage_nbytes`: estimated bytes of the staged crops of a full batch.
        """
        minimum = 2 * slot_nbytes + stage_nbytes
        if minimum > self.nbytes:
            raise InvalidArgument(
                f"device_buffer_bytes={self.nbytes} is less than two batches of {slot_nbytes} bytes"
                + (f" and {stage_nbytes} bytes of staged crops" if stage_nbytes else "")
                + f": pass at least {minimum}"
            )
        fitting = (self.nbytes + stage_nbytes) // (slot_nbytes + stage_nbytes)
        self.slot_nbytes, self.slots = slot_nbytes, min(fitting, lookahead + 2)
        self.spare_slots = min(fitting - self.slots, _SPARE_LOOKAHEAD * lookahead)
        self._stage_begin = (self.slots + self.spare_slots) * slot_nbytes
        for slot in range(self.slots):
            self.freed.put((slot, []))

    def use_spare_slots(self) -> None:
        """Add the spare slots to the others."""
        first, self.slots, self.spare_slots = self.slots, self.slots + self.spare_slots, 0
        for slot in range(first, self.slots):
            self.freed.put((slot, []))

    def take_slot(self, timeout: float | None) -> Lease | None:
        """Wait for a free slot, and until consumers no longer use it; None if no slot is free for `timeout` seconds."""
        try:
            freed = self.freed.get(timeout=timeout)
        except queue.Empty:
            return None
        if freed is None:
            raise ShutdownError("the pipeline is closed")
        slot, events = freed
        for event in events:
            self._wait(event)
        return Lease(slot, slot * self.slot_nbytes, self)

    def _wait(self, event: Released) -> None:
        """Wait on the host for the work of a consumer, since the reader's streams do not wait for that work."""
        if self.device_id is None:
            if event is not None and not isinstance(event, int):
                event.synchronize()
            return
        import cupy

        with cupy.cuda.Device(self.device_id) as device:
            if event is None:
                device.synchronize()
            elif isinstance(event, int):
                cupy.cuda.runtime.eventSynchronize(event)
            # Waiting releases the interpreter's lock. PyTorch's events have ``query``, CuPy's ``done``.
            elif not (event.query() if hasattr(event, "query") else getattr(event, "done", False)):
                event.synchronize()

    def stop(self) -> None:
        """Wake up the thread that waits for a slot."""
        self.freed.put(None)

    def take_stage(self, nbytes: int, batch_id: int) -> int | None:
        """Take bytes of the ring for a batch; return their offset in the memory, or None if they do not fit now."""
        if nbytes == 0:
            return self._stage_begin
        if nbytes > (capacity := self.nbytes - self._stage_begin):
            raise InvalidArgument(
                f"staged crops of a batch take {nbytes} bytes, {capacity} are free beside {self.slots} batches: pass "
                f"device_buffer_bytes >= {self._stage_begin + nbytes}"
            )
        begin = self._next_stage(nbytes)
        if begin is not None:
            self._stages.append((begin, begin + nbytes, batch_id))
        return begin

    def _next_stage(self, nbytes: int) -> int | None:
        if not self._stages:
            return self._stage_begin
        used_begin, used_end = self._stages[0][0], self._stages[-1][1]
        if used_end > used_begin:
            if used_end + nbytes <= self.nbytes:
                return used_end
            return self._stage_begin if self._stage_begin + nbytes < used_begin else None
        return used_end if used_end + nbytes < used_begin else None

    def give_stages(self, batch_id: int) -> None:
        """Free the bytes of the ring that a batch and earlier batches took; allowed any number of times."""
        while self._stages and self._stages[0][2] <= batch_id:
            self._stages.popleft()

    def array(self, offset: int, shape: Sequence[int], dtype: np.dtype, *, lease: Lease | None = None) -> Array:
        """Return an array at an offset; no other batch gets the slot of `lease` while the array exists."""
        owner, address = lease or self.base, self.address + offset
        if self.device_id is None:
            base = np.asarray(owner)
            return np.ndarray(tuple(shape), dtype, base, address - int(base.ctypes.data))
        import cupy

        nbytes = math.prod(shape) * dtype.itemsize
        memory = cupy.cuda.UnownedMemory(address, nbytes, owner, self.device_id)
        array: Array = cupy.ndarray(tuple(shape), dtype, cupy.cuda.MemoryPointer(memory, 0))
        return array


def stage_estimate(parts: Sequence[PartShape], reads: Sequence[CropRead], config: Config) -> int:
    """Estimate the bytes of staged crops of a full batch from the reads of the first batch.

    The first batch may hold fewer samples, and its crops may need less staging than crops of later batches: they may
    lie partly outside of their arrays, or be read directly.
    """
    rows = max(1, len(reads) // len(parts))
    staged = -(-stage_offsets(reads)[-1] * config.batch_size // rows)
    if config.augment is not None:
        staged += staged // 4
    sample_nbytes = 0
    for part, read in zip(parts, reads, strict=False):
        if config.augment is not None or config.pad in ("edge", "reflect"):
            sample_nbytes += aligned(math.prod(part.shape) * read.info.dtype.itemsize)
    return max(staged, sample_nbytes * config.batch_size)
