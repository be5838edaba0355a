"""The threads that pull samples, plan batches and submit their reads ahead, within lookahead and memory."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from linumpy.gpu.kernels import address_of
from linumpy.stream.arrays import Key
from linumpy.stream.config import Config, Dtype, Sample
from linumpy.stream.errors import ShutdownError, StreamError, as_stream_error, of_iterable
from linumpy.stream.feed import Feed, Flush, Pulled
from linumpy.stream.memory import Lease, Memory, OnStream, stage_estimate
from linumpy.stream.needed import with_needed
from linumpy.stream.plan import ArrayInfo, CropRead, PartShape, check_alike, plan_sample, plan_whole, stage_offsets
from linumpy.stream.resample import Staged
from linumpy.stream.sources import Fallback, ReadJob, Request, Sources, submit
from linumpy.stream.stats import Metric

#: After so many seconds of waiting for memory the arrays of a batch are looked at once more.
_PLAN_SECONDS = 0.01
#: How long a consumer waits for a turn of the first thread, which takes about a fifth of that.
_TURN_SECONDS = 0.001
#: How many pops do not wait for one, where it took long to get Python's lock back.
_POPS_WITHOUT_WAIT = 16
#: How long the threads may take to end.
_JOIN_SECONDS = 5.0


@dataclass
class InFlight:
    """A batch whose reads were submitted.

    Attributes
    ----------
    batch_id : int
        Its number.
    end : int
        Position behind its last sample.
    samples : list of Sample
        Of its rows.
    faulty : list of StreamError
        Errors of samples that have no row.
    parts : tuple of PartShape
        What the batch holds.
    lease : Lease or None
        Its memory; None where there is no row.
    arrays : list
        The batch of each part, without the lease: tickets hold views of them, and may outlive the batch.
    tickets : list of (rows, ticket)
        Reads that are waited for together, and the rows whose crops they are, by number.
    direct, staged : list of list
        For each part: crops that are read into the batch, crops that are resampled into it.
    stage : (int, int)
        Begin and size of its staged crops in the memory.
    chosen : list
        Its samples as they were pulled, each with the arrays that it needs.
    raised : BaseException or None
        What the iterable raised that is no error, such as an interrupt: it is raised in place of the batch.
    filled, moved : bool, int
        What :meth:`Pipeline.pop` has done: whether all rows are made, and rows that it moved over faulty ones.
    """

    batch_id: int
    end: int
    samples: list[Sample] = field(default_factory=list)
    faulty: list[StreamError] = field(default_factory=list)
    parts: tuple[PartShape, ...] = ()
    lease: Lease | None = None
    arrays: list[Any] = field(default_factory=list)
    tickets: list[tuple[list[int], Any]] = field(default_factory=list)
    direct: list[list[CropRead]] = field(default_factory=list)
    staged: list[list[Staged]] = field(default_factory=list)
    stage: tuple[int, int] = (0, 0)
    chosen: list[tuple[Pulled, list[Request]]] = field(default_factory=list)
    raised: BaseException | None = None
    filled: bool = False
    moved: int = 0


@dataclass
class _Chosen:
    """The samples of a batch with the arrays that are being opened for them, or an error of what was pushed."""

    samples: list[tuple[Pulled, list[Request]]]
    error: BaseException | None = None


class Producer:
    """Fills :attr:`ready` with batches in flight, in order.

    One thread pulls samples and lets their arrays be opened, plans and submits. A batch whose arrays are still being
    opened, or whose memory is in use, it leaves to another thread, and pulls on: so arrays of the next batches are
    opened meanwhile. Most batches take one turn of one thread: beside a busy thread of Python each turn takes 5 ms.

    Parameters
    ----------
    config : Config
        The configuration.
    reader : linumpy.gpu.Reader
        Reads them.
    memory : Memory
        Of batches and staged crops; divided when the first sample is planned.
    stream : cupy.cuda.Stream or None
        The pipeline's stream; None without a GPU.

    Attributes
    ----------
    ready : deque of InFlight
        Batches whose reads were submitted.
    taken : InFlight or None
        The batch that is being popped.
    """

    def __init__(self, config: Config, reader: Any, memory: Memory, stream: Any) -> None:
        self._config, self._reader, self._memory, self._stream = config, reader, memory, stream
        self.sources, self.feed = Sources(config), Feed(config)
        self._fallback = Fallback(self.sources.pool)
        lock = threading.RLock()
        # Each thread is woken up by itself: to wake up for nothing costs a turn.
        self.changed, self._pulls, self._submits = (threading.Condition(lock) for _ in range(3))
        self.ready: deque[InFlight] = deque()
        self.taken: InFlight | None = None
        self.parts: tuple[PartShape, ...] | None = None
        self.planning, self.waves = Metric("plan"), 0
        self.starved_since: float | None = None
        self.failure: BaseException | None = None
        self.batch_id = 0
        self._partial: list[tuple[Pulled, list[Request]]] = []
        self._chosen: deque[_Chosen] = deque()
        self._coming = 0  # batches that were pulled and are not in `ready` yet
        self._pops_without_wait = 0
        self._pulling = self._submitting = self._closed = self._waits_for_stage = False
        self._in_iterable = False  # the first thread runs code of the caller
        self._stage_free: Any = None
        self._threads = [
            threading.Thread(target=self._run, args=(step,), name=f"linumpy-stream-{name}", daemon=True)
            for name, step in (("pull", self._pull), ("submit", self._submit_next))
        ]
        for thread in self._threads:
            thread.start()

    def push(self, samples: Sample | Iterable[Sample]) -> None:
        """Append samples to what is read."""
        with self.changed:
            self.feed.push(samples)
            self._wake_up()

    def flush(self) -> None:
        """Let a partial batch be made of the last samples that were pushed so far."""
        with self.changed:
            self.feed.flush()
            self._wake_up()

    def pop(self) -> None:
        """Take the first batch that is ready, which makes way for another one; called while holding :attr:`changed`."""
        self.ready.popleft()
        self._wake_up()

    def wait_for_turn(self) -> None:
        """Wait a moment where the first thread has missed a turn; called while holding :attr:`changed`.

        A consumer that finds its batches read need not give Python's lock back, and the thread gets that lock only
        where the interpreter takes it from the consumer: often just when :attr:`changed` is held, so that it waits on.
        Beside several busy threads it takes longer to get the lock back than is gained, and few pops wait.
        """
        behind = self._may_pull and len(self.ready) + self._coming < self._config.lookahead_batches - 1
        if not behind or self._in_iterable or self.is_own_thread:
            return
        if self._pops_without_wait:
            self._pops_without_wait -= 1
            return
        begin = time.perf_counter()
        self.changed.wait(_TURN_SECONDS)
        if time.perf_counter() - begin > _TURN_SECONDS + sys.getswitchinterval():
            self._pops_without_wait = _POPS_WITHOUT_WAIT

    def _wake_up(self) -> None:
        """Let threads go on that have something to do; called while holding :attr:`changed`."""
        if self._may_pull and not self._pulling:
            self._pulls.notify()
        if self._chosen and not self._submitting:
            self._submits.notify()

    @property
    def waiting_samples(self) -> int:
        """Samples of a batch that is not full yet; read while holding :attr:`changed`."""
        return len(self._partial)

    @property
    def in_flight(self) -> int:
        """Batches that are read or are being submitted; read while holding :attr:`changed`."""
        is_taken = self.taken is not None and all(one is not self.taken for one in self.ready)
        return len(self.ready) + self._coming + is_taken

    @property
    def has_samples(self) -> bool | None:
        """Whether samples are not handed out yet; None while it is not known. Read while holding :attr:`changed`."""
        if self.failure is not None or self.in_flight or self._partial:
            return True
        return None if self._pulling or self.feed.has_more else False

    @property
    def is_idle(self) -> bool:
        """Whether no batch is made without another push or flush; read while holding :attr:`changed`."""
        return not (self.ready or self.taken or self._pulling or self._coming or self.feed.has_more)

    @property
    def is_settled(self) -> bool:
        """Whether nothing is submitted before a batch is popped or samples pushed; read holding :attr:`changed`."""
        if self.failure is not None or self.starved_since is not None or self._waits_for_stage:
            return True
        return not self._pulling and not self._coming and not self._may_pull

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller runs in a thread of the producer: it is an iterable that was pushed."""
        return threading.current_thread() in self._threads

    @property
    def _may_pull(self) -> bool:
        return self.feed.has_more and len(self.ready) + self._coming < self._config.lookahead_batches

    def stages_are_free(self, event: Any) -> None:
        """Note an event behind which all staged crops that were given back are no longer read."""
        self._stage_free = event

    def stop(self) -> None:
        """End the threads; allowed any number of times."""
        with self.changed:
            is_first, self._closed = not self._closed, True
            for one in (self.changed, self._pulls, self._submits):
                one.notify_all()
        self._memory.stop()
        for thread in self._threads if is_first else ():
            if thread is not threading.current_thread():
                self._join(thread)
        self.sources.close()

    def _join(self, thread: threading.Thread) -> None:
        """Wait for the end of a thread; not of an iterable, which may block for ever and touches nothing of ours."""
        end = time.monotonic() + _JOIN_SECONDS
        while thread.is_alive() and time.monotonic() < end:
            thread.join(timeout=0.05)
            if thread is self._threads[0] and self._in_iterable:
                return

    def cancel(self) -> None:
        """Cancel what is in flight, and wait until nothing is written any more."""
        items = [*self.ready, *filter(None, [self.taken])]
        self.ready.clear()
        self.taken = None
        for item in items:
            self.abandon(item)

    def abandon(self, item: InFlight) -> None:
        """Cancel a batch, and wait until nothing is written into its memory any more."""
        for _, ticket in item.tickets:
            ticket.cancel()
        for _, ticket in item.tickets:
            ticket.wait()

    def _run(self, step: Callable[[], bool]) -> None:
        try:
            while step():
                pass
        except BaseException as error:  # raised by the next pop
            with self.changed:
                if not self._closed:
                    self.failure = error
                self.changed.notify_all()

    def _pull(self) -> bool:
        """Pull the samples of a batch, when one may be read ahead, and submit what can be at once; False at the end."""
        with self.changed:
            while not self._closed and not self._may_pull:
                self._pulls.wait()
            if self._closed:
                return False
            self._pulling = True
        chosen = self._choose()
        with self.changed:
            self._pulling = False
            if chosen is not None:
                self._chosen.append(chosen)
                self._coming += 1
            else:
                self.changed.notify_all()
        while (first := self._claimed(at_once=True)) is not None:
            self._hand_over(self._submitted(first))
        with self.changed:
            if self._chosen and not self._submitting:
                self._submits.notify()
        return True

    def _choose(self) -> _Chosen | None:
        """Pull until a batch is full or flushed; None where samples are missing for one."""
        while len(self._partial) < self._config.batch_size:
            self._in_iterable = True
            try:
                pulled = self.feed.next()
            except BaseException as error:  # of the iterable that was pushed, whatever it is
                return _Chosen([], error)
            finally:
                self._in_iterable = False
            if pulled is None or self._closed:
                return None
            if isinstance(pulled, Flush):
                if self._partial:
                    break
                return None
            self._partial.append((pulled, self.sources.request(pulled.sample, pulled.folder)))
        chosen, self._partial = self._partial, []
        return _Chosen(chosen)

    def _submit_next(self) -> bool:
        """Plan and submit the next batch that was pulled, and wait for what it needs; False at the end."""
        with self.changed:
            while not self._closed and (self._submitting or not self._chosen):
                self._submits.wait()
            if self._closed:
                return False
        first = self._claimed(at_once=False)
        if first is not None:
            self._hand_over(self._submitted(first))
        return True

    def _claimed(self, *, at_once: bool) -> _Chosen | None:
        """Take the first batch that was pulled, if no other thread submits one, and it can be submitted `at_once`."""
        with self.changed:
            if self._submitting or not self._chosen or self._closed:
                return None
            first = self._chosen[0]
            if at_once and not first.error:
                # The first batch of all decides on the shapes: its arrays are looked at before.
                has_memory = self._memory.has_slot and self.parts is not None
                if not (has_memory and all(self.sources.are_open(requested) for _, requested in first.samples)):
                    return None
            self._submitting = True
            return self._chosen.popleft()

    def _hand_over(self, item: InFlight) -> None:
        with self.changed:
            self._coming -= 1
            self._submitting = False
            self.ready.append(item)
            self.changed.notify_all()
            if self._chosen:
                self._submits.notify()

    def _submitted(self, chosen: _Chosen) -> InFlight:
        end = chosen.samples[-1][0].position + 1 if chosen.samples else 0
        item = InFlight(self.batch_id, end, chosen=chosen.samples)
        self.batch_id += 1
        if isinstance(chosen.error, Exception):
            item.faulty.append(of_iterable(chosen.error))
            return item
        if chosen.error is not None:
            item.raised = chosen.error
            return item
        try:
            self._submit(item)
        except ShutdownError:
            raise
        except Exception as error:
            self._fail(item, error)
        return item

    def submit_again(self, item: InFlight) -> None:
        """Plan and submit a batch once more, one of whose arrays was written anew before it was read."""
        item.samples, item.faulty, item.tickets = [], [], []
        try:
            self._submit(item, _by_nobody)
        except ShutdownError:
            raise
        except Exception as error:
            self._fail(item, error)

    def _fail(self, item: InFlight, error: Exception) -> None:
        self.abandon(item)
        item.tickets, item.lease = [], None
        item.samples.clear()
        item.faulty.append(as_stream_error(error))

    def _is_looked_at(self, info: ArrayInfo) -> bool:
        """Whether the core looks at the metadata files of an array; before the first plan it is done here."""
        return self.parts is not None and info.unsupported is None and self._reader.reads_natively(info.source)

    def _submit(self, item: InFlight, is_looked_at: Callable[[ArrayInfo], bool] | None = None) -> None:
        is_looked_at = is_looked_at or self._is_looked_at
        while True:
            begin, reads = time.perf_counter(), self._plan(item, is_looked_at)
            if not item.samples or (item.faulty and self._config.on_error == "raise"):
                item.samples.clear()
                return
            item.lease = item.lease or self._take_slot()
            waited = time.perf_counter() - begin > _PLAN_SECONDS
            if not waited or all(is_looked_at(read.info) or read.info.holds for read in reads):
                break
            item.samples.clear()  # an array was written anew while memory was waited for
            item.faulty.clear()
        assert self.parts is not None
        item.parts, item.arrays = self.parts, []
        offset = item.lease.offset
        for part in self.parts:
            item.arrays.append(self._memory.view(offset, (len(item.samples), *part.shape), part.element))
            offset += part.nbytes(self._config.batch_size)
        jobs, rows = self._jobs(item, reads)
        if self._closed:
            raise ShutdownError("the pipeline is closed")
        with self.on_stream():
            # The slot is held until nothing is written into it any more, whatever becomes of the batch.
            made = submit(self._reader, jobs, self._fallback, item.lease)
        item.tickets = [([rows[number] for number in numbers], ticket) for numbers, ticket in made]
        self.waves += 1

    def on_stream(self) -> AbstractContextManager[Any]:
        """Make the pipeline's stream CuPy's current one, on its device."""
        return nullcontext() if self._stream is None else OnStream(self._stream, self._memory.device_id)

    def _plan(self, item: InFlight, is_looked_at: Callable[[ArrayInfo], bool]) -> list[CropRead]:
        """Plan the samples of a batch; errors are those of their samples."""
        reads: list[CropRead] = []
        looked: dict[Key, ArrayInfo] = {}
        opened = [self._opened(*one, item, looked, is_looked_at) for one in item.chosen]
        begin = time.perf_counter()
        for (pulled, requested), infos in zip(item.chosen, opened, strict=True):
            if infos is None:
                continue
            try:
                try:
                    shapes, planned = self._plan_sample(pulled, infos, len(item.samples))
                except Exception:
                    if all(info.holds for info in infos):
                        raise
                    infos = self.sources.settled(requested, {}, _by_nobody)
                    shapes, planned = self._plan_sample(pulled, infos, len(item.samples))
            except Exception as error:
                item.faulty.append(as_stream_error(error, pulled.sample, "plan"))
                continue
            if self.parts is None:
                self.parts = shapes
            reads += planned
            item.samples.append(pulled.sample)
        self._divide(reads)
        if self.parts is not None and self._config.augment is not None:
            reads = with_needed(reads, self.parts, self._config.pad or "edge")
        nbytes = sum(read.read_nbytes for read in reads)
        with self.changed:
            self.planning = self.planning.plus(time.perf_counter() - begin, nbytes)
        return reads

    def _plan_sample(
        self, pulled: Pulled, infos: list[ArrayInfo], row: int
    ) -> tuple[tuple[PartShape, ...], tuple[CropRead, ...]]:
        if self.parts is not None and (read := plan_whole(pulled.sample, infos, self._config, self.parts, row)):
            return self.parts, (read,)
        shapes, planned = plan_sample(pulled.sample, infos, self._config, row, pulled.index, pulled.epoch)
        if self.parts is not None and shapes != self.parts:
            check_alike(self.parts, shapes)
        return shapes, planned

    def _opened(
        self,
        pulled: Pulled,
        requested: list[Request],
        item: InFlight,
        looked: dict[Key, ArrayInfo],
        is_looked_at: Callable[[ArrayInfo], bool],
    ) -> list[ArrayInfo] | None:
        try:
            return self.sources.settled(requested, looked, is_looked_at)
        except Exception as error:
            item.faulty.append(as_stream_error(error, pulled.sample, "open"))
            return None

    def _divide(self, reads: list[CropRead]) -> None:
        if self.parts is None or self._memory.slots:
            return
        batch = sum(part.nbytes(self._config.batch_size) for part in self.parts)
        staged = stage_estimate(self.parts, reads, self._config)
        try:
            self._memory.divide(batch, staged, self._config.lookahead_batches)
        except Exception:
            self.parts = None
            raise

    def _take_slot(self) -> Lease:
        collected = False
        while True:
            lease = self._memory.take_slot(timeout=0.05)
            if lease is not None:
                self.starved_since = None
                return lease
            if self.starved_since is None:
                self.starved_since = time.perf_counter()
            elif not collected and time.perf_counter() - self.starved_since > 0.4:
                gc.collect()  # tensors that only cycles of references hold
                collected = True

    def _take_stage(self, nbytes: int, batch_id: int) -> int:
        """Wait until staged crops of earlier batches are resampled."""
        with self.changed:
            while (begin := self._memory.take_stage(nbytes, batch_id)) is None:
                if self._closed:
                    raise ShutdownError("the pipeline is closed")
                self._waits_for_stage = True
                self.changed.notify_all()
                self.changed.wait(0.05)
            self._waits_for_stage = False
        if nbytes and self._stage_free is not None:
            self._stage_free.synchronize()
        return begin

    def _jobs(self, item: InFlight, reads: list[CropRead]) -> tuple[list[ReadJob], list[int]]:
        """List the reads of a batch, and the row of each."""
        count = len(item.parts)
        item.direct, item.staged = [[] for _ in range(count)], [[] for _ in range(count)]
        offsets = stage_offsets(reads)
        if offsets[-1] > item.stage[1]:
            item.stage = self._take_stage(offsets[-1], item.batch_id), offsets[-1]
        places = [(address_of(array), *_strides(part)) for array, part in zip(item.arrays, item.parts, strict=True)]
        jobs: list[ReadJob] = []
        rows: list[int] = []
        for number, read in enumerate(reads):
            part = number % count
            if read.resampling is not None:
                voxels = None
                if read.region is not None:
                    voxels = self._memory.view(item.stage[0] + offsets[number], read.stage_shape, read.info.dtype)
                    where = voxels, (), address_of(voxels), voxels.strides
                    jobs.append(ReadJob(read.info, read.region, *where, needed=read.needed))
                    rows.append(read.row)
                item.staged[part].append(Staged(read, voxels))
                continue
            if not read.is_whole:
                item.direct[part].append(read)
            if read.region is not None:
                first, row_nbytes, strides = places[part]
                address = first + read.row * row_nbytes
                index: tuple[Any, ...] = (read.row,)
                if not read.is_whole:
                    address += sum([start * step for (start, _), step in zip(read.inside, strides, strict=True)])
                    index = (read.row, *(slice(a, b) for a, b in read.inside))
                is_bits = item.parts[part].dtype is Dtype.BF16
                jobs.append(ReadJob(read.info, read.region, item.arrays[part], index, address, strides, is_bits))
                rows.append(read.row)
        return jobs, rows


def _by_nobody(info: ArrayInfo) -> bool:
    """Say that nobody else looks at the metadata files of an array."""
    return False


def _strides(part: PartShape) -> tuple[int, tuple[int, ...]]:
    """Return the bytes of a row of a batch, and those between neighbours along its axes."""
    strides, step = [], part.element.itemsize
    for n in reversed(part.shape):
        strides.append(step)
        step *= n
    return step, tuple(reversed(strides))
