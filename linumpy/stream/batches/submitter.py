"""Plans and submits batches: pulled samples → :class:`InFlight`, with memory and submitted reads."""

from __future__ import annotations

import gc
import threading
import time
from typing import TYPE_CHECKING, cast

from linumpy.gpu.kernels import address_of
from linumpy.stream.batches.in_flight import InFlight, PulledBatch
from linumpy.stream.batches.memory import Lease, Memory
from linumpy.stream.batches.planner import Planner, never_checked_later
from linumpy.stream.config import Config, Dtype
from linumpy.stream.errors import ShutdownError, as_stream_error, iterable_error
from linumpy.stream.on_device import Event, Stream, on_stream
from linumpy.stream.planning.records import ArrayInfo, CropRead, PartShape, stage_offsets
from linumpy.stream.reading.reads import Fallback, ReadJob, submit
from linumpy.stream.reading.sources import IsCheckedLater, Sources
from linumpy.stream.resampling.on_host import Staged

if TYPE_CHECKING:
    from linumpy.gpu import Reader
    from linumpy.plan.layout import ArrayLayout

#: If planning a batch and waiting for its memory take longer, the metadata files of its arrays are checked again.
_PLAN_SECONDS = 0.01
#: After so many seconds without free memory the garbage collector is run once.
_COLLECT_SECONDS = 0.4


class Submitter:
    """Plans and submits one batch at a time; waits while no memory is free.

    `reader`: reads the crops. `sources`: opens arrays. `memory`: slots of batches and the ring of staged crops.
    `stream`: the pipeline's stream; None without a GPU. `changed`: notified when a submission starts to wait for the
    ring of staged crops, and when the consumer frees part of it. `planner`: plans the batches. `batch_id`: number of
    the next batch. `waves`: number of batches whose reads were submitted; a batch that is submitted again counts again.
    `starved_since`: time, by ``time.perf_counter``, since which a batch waits for a free slot; None if no batch waits.
    `waits_for_stage`: whether a submission waits for the ring of staged crops.
    """

    def __init__(
        self,
        config: Config,
        reader: Reader,
        sources: Sources,
        memory: Memory,
        stream: Stream | None,
        changed: threading.Condition,
    ) -> None:
        self._config, self._reader, self._memory, self._stream = config, reader, memory, stream
        self._sources, self._changed = sources, changed
        self._fallback = Fallback(sources.pool)
        self.planner = Planner(config, sources, memory, changed)
        self.batch_id = self.waves = 0
        self.starved_since: float | None = None
        self.waits_for_stage = self._closed = False
        self._stage_free: Event | None = None

    def close(self) -> None:
        """Make a waiting submission raise; called while holding `changed`."""
        self._closed = True

    def set_stage_event(self, event: Event) -> None:
        """Set the event after which no kernel reads the staged crops that were freed last."""
        self._stage_free = event

    def can_submit_at_once(self, batch: PulledBatch) -> bool:
        """Whether a batch can be submitted without a wait for memory or for arrays that are being opened.

        False for the first batch: its arrays determine the shapes of all batches, so their metadata files are checked
        before they are read.
        """
        if batch.error is not None:
            return True
        if not self._memory.has_slot or self.planner.parts is None:
            return False
        return all(self._sources.are_open(requests) for _, requests in batch.samples)

    def submit(self, batch: PulledBatch) -> InFlight:
        """Plan and submit a batch; an exception is stored in the batch."""
        end = batch.samples[-1][0].position + 1 if batch.samples else 0
        item = InFlight(self.batch_id, end, batch.samples)
        self.batch_id += 1
        if isinstance(batch.error, Exception):
            item.faulty.append(iterable_error(batch.error))
        elif batch.error is not None:
            item.raised = batch.error
        else:
            self._try_submit(item, self._is_checked_later)
        return item

    def submit_again(self, item: InFlight) -> None:
        """Plan and submit a batch again, because one of its arrays was rewritten before it was read."""
        item.samples, item.faulty, item.tickets = [], [], []
        self._try_submit(item, never_checked_later)

    def _try_submit(self, item: InFlight, is_checked_later: IsCheckedLater) -> None:
        try:
            self._submit(item, is_checked_later)
        except ShutdownError:
            raise
        except Exception as error:
            item.abandon()
            item.tickets, item.lease = [], None
            item.samples.clear()
            item.faulty.append(as_stream_error(error))

    def _is_checked_later(self, info: ArrayInfo) -> bool:
        """Whether the core checks the metadata files of an array when it reads the array; False for the first batch."""
        if self.planner.parts is None or info.unsupported is not None:
            return False
        return self._reader.reads_natively(cast("ArrayLayout", info.source))

    def _submit(self, item: InFlight, is_checked_later: IsCheckedLater) -> None:
        while True:
            begin, reads = time.perf_counter(), self.planner.plan(item, is_checked_later)
            if not item.samples:
                return
            item.lease = item.lease or self._take_slot()
            waited = time.perf_counter() - begin > _PLAN_SECONDS
            if not waited or all(is_checked_later(read.info) or read.info.holds for read in reads):
                break
            item.samples.clear()  # an array was rewritten during the wait for memory
            item.faulty.clear()
        assert self.planner.parts is not None
        item.parts, item.arrays = self.planner.parts, []
        offset = item.lease.offset
        for part in item.parts:
            item.arrays.append(self._memory.view(offset, (len(item.samples), *part.shape), part.element))
            offset += part.nbytes(self._config.batch_size)
        jobs, rows = self._jobs(item, reads)
        if self._closed:
            raise ShutdownError("the pipeline is closed")
        with on_stream(self._stream, self._memory.device_id):
            # The reader holds the lease, so that the slot is not reused while the reader writes there.
            submitted = submit(self._reader, jobs, self._fallback, item.lease)
        item.tickets = [([rows[number] for number in numbers], ticket) for numbers, ticket in submitted]
        self.waves += 1

    def _take_slot(self) -> Lease:
        """Wait for a free slot; run the garbage collector once if that takes long."""
        collected = False
        while True:
            lease = self._memory.take_slot(timeout=0.05)
            if lease is not None:
                self.starved_since = None
                return lease
            if self.starved_since is None:
                self.starved_since = time.perf_counter()
            elif not collected and time.perf_counter() - self.starved_since > _COLLECT_SECONDS:
                gc.collect()  # frees tensors that only reference cycles hold
                collected = True

    def _take_stage(self, nbytes: int, batch_id: int) -> int:
        """Wait until the ring has free bytes; return their offset in the memory."""
        with self._changed:
            while (offset := self._memory.take_stage(nbytes, batch_id)) is None:
                if self._closed:
                    raise ShutdownError("the pipeline is closed")
                self.waits_for_stage = True
                self._changed.notify_all()
                self._changed.wait(0.05)
            self.waits_for_stage = False
        if nbytes and self._stage_free is not None:
            self._stage_free.synchronize()
        return offset

    def _jobs(self, item: InFlight, reads: list[CropRead]) -> tuple[list[ReadJob], list[int]]:
        """Return the jobs of a batch for the reader, and the row of each job; set the crops and stage of the batch."""
        count = len(item.parts)
        item.direct, item.staged = [[] for _ in range(count)], [[] for _ in range(count)]
        offsets = stage_offsets(reads)
        if offsets[-1] > item.stage[1]:
            item.stage = self._take_stage(offsets[-1], item.batch_id), offsets[-1]
        layouts = [(address_of(array), *_strides(part)) for array, part in zip(item.arrays, item.parts, strict=True)]
        jobs: list[ReadJob] = []
        rows: list[int] = []
        for number, read in enumerate(reads):
            part = number % count
            if read.resampling is not None:
                voxels = None
                if read.region is not None:
                    voxels = self._memory.view(item.stage[0] + offsets[number], read.stage_shape, read.info.dtype)
                    output = voxels, (), address_of(voxels), voxels.strides
                    jobs.append(ReadJob(read.info, read.region, *output, needed=read.needed))
                    rows.append(read.row)
                item.staged[part].append(Staged(read, voxels))
                continue
            if not read.is_whole:
                item.direct[part].append(read)
            if read.region is not None:
                first, row_nbytes, strides = layouts[part]
                address = first + read.row * row_nbytes
                index: tuple[int | slice, ...] = (read.row,)
                if not read.is_whole:
                    address += sum([start * step for (start, _), step in zip(read.inside, strides, strict=True)])
                    index = (read.row, *(slice(a, b) for a, b in read.inside))
                is_bf16 = item.parts[part].dtype is Dtype.BF16
                jobs.append(ReadJob(read.info, read.region, item.arrays[part], index, address, strides, is_bf16))
                rows.append(read.row)
        return jobs, rows


def _strides(part: PartShape) -> tuple[int, tuple[int, ...]]:
    """Return the bytes of a row of a batch, and the strides of its axes in bytes."""
    strides, step = [], part.element.itemsize
    for n in reversed(part.shape):
        strides.append(step)
        step *= n
    return step, tuple(reversed(strides))
