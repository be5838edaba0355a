"""The threads that pull samples, plan batches and submit their reads ahead, within lookahead and memory."""

from __future__ import annotations

import gc
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from linumpy.stream.config import Config, Dtype, Sample
from linumpy.stream.errors import ShutdownError, StreamError, as_stream_error, of_iterable
from linumpy.stream.feed import Feed, Flush, Pulled
from linumpy.stream.memory import Lease, Memory, OnStream, stage_estimate
from linumpy.stream.plan import ArrayInfo, CropRead, PartShape, check_alike, plan_sample, stage_offsets
from linumpy.stream.resample import Staged
from linumpy.stream.sources import Fallback, ReadJob, Request, Sources, submit
from linumpy.stream.stats import Metric

#: After so many seconds of waiting for memory the arrays of a batch are looked at once more.
_PLAN_SECONDS = 0.01
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
    tickets : list of (int, ticket)
        Row and read.
    direct, staged : list of list
        For each part: crops that are read into the batch, crops that are resampled into it.
    stage : (int, int)
        Begin and size of its staged crops in the memory.
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
    tickets: list[tuple[int, Any]] = field(default_factory=list)
    direct: list[list[CropRead]] = field(default_factory=list)
    staged: list[list[Staged]] = field(default_factory=list)
    stage: tuple[int, int] = (0, 0)
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

    One thread pulls samples and lets their arrays be opened; another one waits for those, plans and submits. So arrays
    of the next batches are opened while the metadata of this one is waited for.

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
        self.changed = threading.Condition()
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
        self._pulling = self._closed = self._waits_for_stage = False
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
            self.changed.notify_all()

    def flush(self) -> None:
        """Let a partial batch be made of the last samples that were pushed so far."""
        with self.changed:
            self.feed.flush()
            self.changed.notify_all()

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
            self.changed.notify_all()
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
            ticket.exception()

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
        """Pull the samples of a batch, when one may be read ahead; False at the end."""
        with self.changed:
            while not self._closed and not self._may_pull:
                self.changed.wait()
            if self._closed:
                return False
            self._pulling = True
        chosen = self._choose()
        with self.changed:
            self._pulling = False
            if chosen is not None:
                self._chosen.append(chosen)
                self._coming += 1
            self.changed.notify_all()
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
        """Plan and submit the next batch that was pulled; False at the end."""
        with self.changed:
            while not self._closed and not self._chosen:
                self.changed.wait()
            if self._closed:
                return False
            chosen = self._chosen.popleft()
        item = self._submitted(chosen)
        with self.changed:
            self._coming -= 1
            self.ready.append(item)
            self.changed.notify_all()
        return True

    def _submitted(self, chosen: _Chosen) -> InFlight:
        item = InFlight(self.batch_id, chosen.samples[-1][0].position + 1 if chosen.samples else 0)
        self.batch_id += 1
        if isinstance(chosen.error, Exception):
            item.faulty.append(of_iterable(chosen.error))
            return item
        if chosen.error is not None:
            item.raised = chosen.error
            return item
        try:
            self._submit(item, chosen.samples)
        except ShutdownError:
            raise
        except Exception as error:
            self.abandon(item)
            item.tickets.clear()
            item.samples.clear()
            item.faulty.append(as_stream_error(error))
        return item

    def _submit(self, item: InFlight, chosen: list[tuple[Pulled, list[Request]]]) -> None:
        lease = None
        while True:
            begin, reads = time.perf_counter(), self._plan(item, chosen)
            if not item.samples or (item.faulty and self._config.on_error == "raise"):
                item.samples.clear()
                return
            lease = lease or self._take_slot()
            if time.perf_counter() - begin < _PLAN_SECONDS or all(read.info.holds for read in reads):
                break
            item.samples.clear()  # an array was written anew while memory was waited for
            item.faulty.clear()
        assert self.parts is not None
        item.parts, item.lease = self.parts, lease
        offset = item.lease.offset
        for part in self.parts:
            item.arrays.append(self._memory.view(offset, (len(item.samples), *part.shape), part.element))
            offset += part.nbytes(self._config.batch_size)
        jobs, rows = self._jobs(item, reads)
        if self._closed:
            raise ShutdownError("the pipeline is closed")
        with self.on_stream():
            tickets = submit(self._reader, jobs, self._fallback)
        item.tickets = list(zip(rows, tickets, strict=True))
        self.waves += 1

    def on_stream(self) -> AbstractContextManager[Any]:
        """Make the pipeline's stream CuPy's current one, on its device."""
        return nullcontext() if self._stream is None else OnStream(self._stream, self._memory.device_id)

    def _plan(self, item: InFlight, chosen: list[tuple[Pulled, list[Request]]]) -> list[CropRead]:
        """Plan the samples of a batch; errors are those of their samples."""
        reads: list[CropRead] = []
        looked: dict[Any, ArrayInfo] = {}
        opened = [self._opened(pulled, requested, item, looked) for pulled, requested in chosen]
        begin = time.perf_counter()
        for (pulled, _), infos in zip(chosen, opened, strict=True):
            if infos is None:
                continue
            try:
                shapes, planned = plan_sample(
                    pulled.sample, infos, self._config, len(item.samples), pulled.index, pulled.epoch
                )
                if self.parts is not None and shapes != self.parts:
                    check_alike(self.parts, shapes)
            except Exception as error:
                item.faulty.append(as_stream_error(error, pulled.sample, "plan"))
                continue
            if self.parts is None:
                self.parts = shapes
            reads += planned
            item.samples.append(pulled.sample)
        self._divide(reads)
        nbytes = sum(read.read_nbytes for read in reads)
        with self.changed:
            self.planning = self.planning.plus(time.perf_counter() - begin, nbytes)
        return reads

    def _opened(
        self, pulled: Pulled, requested: list[Request], item: InFlight, looked: dict[Any, ArrayInfo]
    ) -> list[ArrayInfo] | None:
        try:
            return self.sources.settled(requested, looked)
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
        count = len(item.parts)
        item.direct, item.staged = [[] for _ in range(count)], [[] for _ in range(count)]
        offsets = stage_offsets(reads)
        item.stage = self._take_stage(offsets[-1], item.batch_id), offsets[-1]
        jobs: list[ReadJob] = []
        rows: list[int] = []
        for number, read in enumerate(reads):
            part = number % count
            out = None
            if read.resampling is not None:
                if read.region is not None:
                    out = self._memory.view(item.stage[0] + offsets[number], read.stage_shape, read.info.dtype)
                item.staged[part].append(Staged(read, out))
            else:
                item.direct[part].append(read)
                if read.region is not None:
                    out = item.arrays[part][read.row]
                    if not read.is_whole:
                        out = out[tuple(slice(a, b) for a, b in read.inside)]
            if read.region is not None and out is not None:
                is_bits = read.resampling is None and item.parts[part].dtype is Dtype.BF16
                jobs.append(ReadJob(read.info, read.region, out, is_bits))
                rows.append(read.row)
        return jobs, rows
