"""Plans and submits batches: pulled samples → memory and submitted reads.

:class:`InFlight` is the record of a batch from its first pulled sample until it is popped. For each crop there is one
record between the sample's `aabb` and the reader's regions: :class:`~linumpy.stream.planning.records.CropRead`.
"""

from __future__ import annotations

import gc
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, cast

import numpy as np

from linumpy.gpu.kernels import address_of
from linumpy.gpu.read.outputs import Regions
from linumpy.stream.arguments import Box
from linumpy.stream.batches.feed import Checked, Pulled
from linumpy.stream.batches.memory import Event, Lease, Memory, Stream, on_stream, stage_estimate
from linumpy.stream.config import Config, Dtype
from linumpy.stream.errors import ShutdownError, as_stream_error, iterable_error
from linumpy.stream.planning.reach import with_needed, with_regions
from linumpy.stream.planning.records import ArrayInfo, CropRead, PartShape, WarpedCrop, stage_offsets
from linumpy.stream.planning.samples import check_alike, checked_crops, is_whole, plan_sample
from linumpy.stream.reading.arrays import Key, Sources
from linumpy.stream.resampling.on_host import Staged
from linumpy.stream.stats import Metric

if TYPE_CHECKING:
    from linumpy.arrays import Array
    from linumpy.gpu import Reader
    from linumpy.gpu.read.ticket import Together
    from linumpy.stream.config import Sample
    from linumpy.stream.errors import StreamError

#: If planning a batch and waiting for its memory take longer, the metadata files of its arrays are checked again.
_PLAN_SECONDS = 0.01
#: After so many seconds without free memory the garbage collector is run once.
_COLLECT_SECONDS = 0.4
#: Whether an array need not be opened again: because its metadata files are unchanged, or the core checks them.
IsCurrent = Callable[[ArrayInfo], bool]
_holds = attrgetter("holds")
#: A read, and the address and the strides in bytes of its output, along all axes of the array.
Placed = tuple[CropRead, int, Sequence[int]]


@dataclass
class InFlight:
    """A batch that was pulled, whose arrays are being opened, or whose reads were submitted."""

    batch_id: int
    pulled: list[Pulled]
    #: The exception of the iterable, in place of samples. One that is no ``Exception``, such as an interrupt, is raised
    #: by ``pop`` as it is.
    raised: BaseException | None = None
    samples: list[Sample] = field(default_factory=list)  # the sample of each row
    faulty: list[StreamError] = field(default_factory=list)  # errors of samples that have no row
    parts: tuple[PartShape, ...] = ()
    lease: Lease | None = None  # slot of memory of the batch; None for a batch without rows
    #: The batch of each part. The arrays do not hold the lease, since tickets hold views of them and may outlive the
    #: batch.
    arrays: list[Array] = field(default_factory=list)
    #: Reads that share a ticket, and the row of each read.
    tickets: list[tuple[list[int], Together]] = field(default_factory=list)
    #: For each part: direct crops that reach out of their array, whose borders must be filled; staged crops.
    direct: list[list[CropRead]] = field(default_factory=list)
    staged: list[list[Staged]] = field(default_factory=list)
    stage: tuple[int, int] = (0, 0)  # offset in the memory and size of the staged crops of the batch
    #: Whether borders are filled and staged crops resampled. An interrupted ``pop``, called again, does not repeat it.
    is_filled: bool = False
    #: Number of copies of rows, over all parts, by which ``pop`` has closed up the rows of faulty samples.
    moved: int = 0
    read_errors: dict[int, StreamError] | None = None  # by row; None before the reads are over
    raised_errors: int = 0  # number of errors of samples that ``pop`` has raised

    @property
    def end(self) -> int:
        """Position after the last sample of the batch; 0 for a batch without samples."""
        return self.pulled[-1].position + 1 if self.pulled else 0

    def all_errors(self, errors: Mapping[int, StreamError]) -> tuple[StreamError, ...]:
        """Return the errors of samples without a row, then `errors`, those of rows that cannot be read."""
        return (*self.faulty, *(errors[row] for row in sorted(errors)))

    def abandon(self) -> None:
        """Cancel the reads, and wait until they no longer write to the batch's memory."""
        for _, ticket in self.tickets:
            ticket.cancel()
        for _, ticket in self.tickets:
            ticket.wait()


class Submitter:
    """Plans and submits one batch at a time; waits while no memory is free.

    All samples must have the shapes of the first sample, for which the memory is divided. The lock of `changed` guards
    `metric`; it is notified when a submission starts to wait for the ring of staged crops, and when the consumer frees
    part of it.
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
        self.parts: tuple[PartShape, ...] | None = None  # None before the first sample
        self._first_parts: tuple[PartShape, ...] | None = None  # of the first sample, if it was checked before
        #: Time that planning takes, without the wait for arrays; its output bytes are the bytes to read.
        self.metric = Metric("plan")
        self.waves = 0  # batches whose reads were submitted; a batch that is submitted again counts again
        self.starved_since: float | None = None  # by ``time.perf_counter``; None if no batch waits for a free slot
        self.waits_for_stage = False
        self.closed = False  # set by :meth:`Producer.stop`, so that a waiting submission raises
        self.stage_free: Event | None = None  # after it no kernel reads the staged crops that were freed last

    def check(self, samples: Sequence[Checked], *, is_first: bool) -> None:
        """Raise the error of the first sample that cannot be planned, with the sample and the stage; any thread may.

        `is_first`: nothing was pushed before, so that the first of these samples determines the shapes of all batches.
        """
        known: dict[Key, ArrayInfo] = {}
        parts = self.parts or self._first_parts
        for entry in samples:
            sample, stage = entry.sample, "open"
            try:
                infos = self._sources.wait_for(entry.requests, known, _holds)
                stage = "plan"
                if parts is not None and is_whole(sample, infos, self._config, parts):
                    continue
                _, shapes = checked_crops(sample, infos, self._config)  # without an augmentation
                if parts is not None and shapes != parts:
                    check_alike(parts, shapes)
                parts = parts or shapes
            except Exception as error:
                raise as_stream_error(error, sample, stage) from error
        if is_first:
            self._first_parts = parts

    def can_submit_at_once(self, item: InFlight) -> bool:
        """Whether a batch can be submitted without a wait for memory or for arrays that are being opened.

        False for the first batch: its arrays determine the shapes of all batches, so their metadata files are checked
        before they are read.
        """
        if item.raised is not None:
            return True
        if self._memory.freed.empty() or self.parts is None:
            return False
        return all(request.is_open for pulled in item.pulled for request in pulled.requests)

    def submit(self, item: InFlight) -> None:
        """Plan and submit a batch; an exception other than :class:`ShutdownError` is stored in the batch."""
        if isinstance(item.raised, Exception):
            item.faulty.append(iterable_error(item.raised))
            item.raised = None
        elif item.raised is None:
            self._try_submit(item, self._is_current)

    def submit_again(self, item: InFlight) -> None:
        """Plan and submit a batch again, because one of its arrays was rewritten before it was read."""
        item.samples, item.faulty, item.tickets = [], [], []
        self._try_submit(item, _holds)

    def _is_current(self, info: ArrayInfo) -> bool:
        # The core checks the metadata files of the arrays that it reads.
        return (self.parts is not None and self._reader.reads_natively(info.source)) or info.holds

    def _try_submit(self, item: InFlight, is_current: IsCurrent) -> None:
        try:
            self._submit(item, is_current)
        except ShutdownError:
            raise
        except Exception as error:
            item.abandon()
            item.tickets, item.lease = [], None
            item.samples.clear()
            item.faulty.append(as_stream_error(error))

    def _submit(self, item: InFlight, is_current: IsCurrent) -> None:
        while True:
            begin = time.perf_counter()
            whole, reads = self._plan(item, is_current)
            if not item.samples:
                return
            item.lease = item.lease or self._take_slot()
            waited = time.perf_counter() - begin > _PLAN_SECONDS
            if not waited or all(map(is_current, [*whole.values(), *(read.info for read in reads)])):
                break
            item.samples.clear()  # an array was rewritten during the wait for memory
            item.faulty.clear()
        assert self.parts is not None
        item.parts, item.arrays = self.parts, []
        offset = item.lease.offset
        for part in item.parts:
            item.arrays.append(self._memory.array(offset, (len(item.samples), *part.shape), part.element))
            offset += part.nbytes(self._config.batch_size)
        groups = [(dtype, *_regions_of(placed)) for (_, dtype), placed in self._placed(item, reads).items()]
        if whole:
            groups.append((_target(self.parts[0]), list(whole), *_whole_regions(item, whole)))
        if self.closed:
            raise ShutdownError("the pipeline is closed")
        with on_stream(self._stream, self._memory.device_id):
            for dtype, rows, infos, regions in groups:
                looks = [info.look if self._reader.reads_natively(info.source) else None for info in infos]
                layouts = [info.source for info in infos]
                # The reader holds the lease, so that the slot is not reused while the reader writes there.
                ticket = self._reader.submit_regions(layouts, regions, dtype, item.lease, looks)
                item.tickets.append((rows, ticket))
        self.waves += 1

    def _plan(self, item: InFlight, is_current: IsCurrent) -> tuple[dict[int, ArrayInfo], list[CropRead]]:
        """Plan the samples of a batch: the arrays of whole samples by row, and for each other, a read for each part.

        Planned samples are appended to `samples`, the errors of others to `faulty`.
        """
        whole: dict[int, ArrayInfo] = {}
        crops: list[CropRead | WarpedCrop] = []
        checked: dict[Key, ArrayInfo] = {}
        opened: list[tuple[Pulled, list[ArrayInfo]]] = []
        for pulled in item.pulled:
            try:
                opened.append((pulled, self._sources.wait_for(pulled.requests, checked, is_current)))
            except Exception as error:
                item.faulty.append(as_stream_error(error, pulled.sample, "open"))
        begin = time.perf_counter()
        for pulled, infos in opened:
            if self.parts is not None and is_whole(pulled.sample, infos, self._config, self.parts):
                whole[len(item.samples)] = infos[0]
                item.samples.append(pulled.sample)
                continue
            where = len(item.samples), pulled.index, pulled.epoch
            try:
                try:
                    self.parts, planned = self._planned(pulled.sample, infos, self.parts, *where)
                except Exception:
                    if all(info.holds for info in infos):
                        raise
                    infos = self._sources.wait_for(pulled.requests, {}, _holds)
                    self.parts, planned = self._planned(pulled.sample, infos, self.parts, *where)
            except Exception as error:
                item.faulty.append(as_stream_error(error, pulled.sample, "plan"))
                continue
            crops += planned
            item.samples.append(pulled.sample)
        pad = self._config.pad or "edge"
        reads = with_regions(crops, pad)
        self._divide(reads)
        if self.parts is not None and self._config.augment is not None:
            reads = with_needed(reads, self.parts, pad)
        nbytes = sum([read.read_nbytes for read in reads])
        if whole and self.parts is not None:
            nbytes += math.prod(self.parts[0].shape) * sum([info.dtype.itemsize for info in whole.values()])
        with self._changed:
            self.metric = self.metric.plus(time.perf_counter() - begin, nbytes)
        return whole, reads

    def _planned(
        self,
        sample: Sample,
        infos: list[ArrayInfo],
        parts: tuple[PartShape, ...] | None,
        row: int,
        index: int,
        epoch: int,
    ) -> tuple[tuple[PartShape, ...], tuple[CropRead | WarpedCrop, ...]]:
        """Plan a sample, which must be as the `parts` of the first sample; None if it is the first."""
        shapes, planned = plan_sample(sample, infos, self._config, row, index, epoch)
        if parts is not None and shapes != parts:
            check_alike(parts, shapes)
        return shapes, planned

    def _divide(self, reads: list[CropRead]) -> None:
        """Divide the memory when the first batch with a valid sample is planned."""
        if self.parts is None or self._memory.slots:
            return
        slot_nbytes = sum(part.nbytes(self._config.batch_size) for part in self.parts)
        stage_nbytes = stage_estimate(self.parts, reads, self._config)
        try:
            self._memory.divide(slot_nbytes, stage_nbytes, self._config.lookahead_batches)
        except Exception:
            self.parts = None
            raise

    def _take_slot(self) -> Lease:
        """Wait for a free slot; run the garbage collector once if that takes long."""
        collected = False
        while True:
            if (lease := self._memory.take_slot(timeout=0.05)) is not None:
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
                if self.closed:
                    raise ShutdownError("the pipeline is closed")
                self.waits_for_stage = True
                self._changed.notify_all()
                self._changed.wait(0.05)
            self.waits_for_stage = False
        if nbytes and self.stage_free is not None:
            self.stage_free.synchronize()
        return offset

    def _placed(self, item: InFlight, reads: list[CropRead]) -> dict[tuple[int, np.dtype | str], list[Placed]]:
        """Return the outputs of reads by rank of the arrays and dtype of the outputs; set the crops of the batch."""
        count = len(item.parts)
        item.direct, item.staged = [[] for _ in range(count)], [[] for _ in range(count)]
        offsets = stage_offsets(reads)
        if offsets[-1] > item.stage[1]:
            item.stage = self._take_stage(offsets[-1], item.batch_id), offsets[-1]
        layouts = [(address_of(array), array.strides) for array in item.arrays]
        groups: dict[tuple[int, np.dtype | str], list[Placed]] = {}
        for number, read in enumerate(reads):
            part, (first, (row_nbytes, *rest)) = item.parts[number % count], layouts[number % count]
            dtype = _target(part)
            address, strides = first + read.row * row_nbytes, tuple(rest)
            if read.resampling is not None:
                voxels, dtype = None, read.info.dtype
                if read.region is not None:
                    voxels = self._memory.array(item.stage[0] + offsets[number], read.stage_shape, dtype)
                    address, strides = address_of(voxels), voxels.strides
                item.staged[number % count].append(Staged(read, voxels))
            elif not read.is_whole:
                item.direct[number % count].append(read)
                address += sum([start * step for (start, _), step in zip(read.inside, strides, strict=True)])
            if read.region is not None:
                groups.setdefault((len(read.region), dtype), []).append((read, address, strides))
        return groups


def _target(part: PartShape) -> np.dtype | str:
    """Return the dtype to which the reader converts a part."""
    return "bfloat16" if part.dtype is Dtype.BF16 else part.element


def _regions(
    infos: Iterable[ArrayInfo], boxes: Sequence[Box], strides: Sequence[Sequence[int]], addresses: Sequence[int]
) -> tuple[list[ArrayInfo], Regions]:
    """Return the different arrays, and the regions: for each the array, the box, and the output."""
    numbers: dict[int, tuple[int, ArrayInfo]] = {}
    array = [numbers.setdefault(id(info), (len(numbers), info))[0] for info in infos]
    extents = np.array(boxes, np.int64)
    regions = Regions(
        array=np.array(array, np.int64),
        start=extents[:, :, 0],
        stop=extents[:, :, 1],
        strides=np.array(strides, np.int64),
        addresses=np.array(addresses, np.int64),
    )
    return [info for _, info in numbers.values()], regions


def _whole_regions(item: InFlight, whole: Mapping[int, ArrayInfo]) -> tuple[list[ArrayInfo], Regions]:
    """Return the arrays and regions of samples that are only copied, by row of the batch."""
    first, (row_nbytes, *strides) = address_of(item.arrays[0]), item.arrays[0].strides
    boxes, addresses = [item.samples[row].aabb for row in whole], [first + row * row_nbytes for row in whole]
    return _regions(whole.values(), boxes, [strides] * len(whole), addresses)


def _regions_of(placed: Sequence[Placed]) -> tuple[list[int], list[ArrayInfo], Regions]:
    """Return the row of the batch of each region (or needed box) that is read, the arrays, and the regions."""
    reads, addresses, strides = zip(*placed, strict=True)
    boxes = [cast("Box", read.region) for read in reads]
    infos, regions = _regions([read.info for read in reads], boxes, strides, addresses)
    if all(read.needed is None for read in reads):
        return [read.row for read in reads], infos, regions
    # Divide regions into the needed boxes of their reads.
    counts = [1 if read.needed is None else len(read.needed) for read in reads]
    repeated, first = regions.take(np.repeat(np.arange(len(reads)), counts)), 0
    start, stop = repeated.start.copy(), repeated.stop.copy()
    for read, count in zip(reads, counts, strict=True):
        if read.needed is not None:
            of_region, axes = slice(first, first + count), read.needed.shape[1]
            start[of_region, -axes:], stop[of_region, -axes:] = read.needed[:, :, 0], read.needed[:, :, 1]
        first += count
    addresses = repeated.addresses + ((start - repeated.start) * repeated.strides).sum(axis=1)
    rows = np.repeat([read.row for read in reads], counts).tolist()
    return rows, infos, replace(repeated, start=start, stop=stop, addresses=addresses)
