"""The thread that pulls samples, plans batches and submits their reads ahead, within lookahead and memory."""

from __future__ import annotations

import gc
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from linumpy.stream.config import Config, Sample
from linumpy.stream.errors import ShutdownError, StreamError, as_stream_error
from linumpy.stream.feed import Feed, Pulled
from linumpy.stream.memory import Lease, Memory
from linumpy.stream.plan import CropRead, PartShape, check_alike, plan_sample, stage_offsets
from linumpy.stream.resample import Staged
from linumpy.stream.sources import Fallback, ReadJob, Sources, submit


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


class Producer:
    """Fills :attr:`ready` with batches in flight, in order.

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
    """

    def __init__(self, config: Config, reader: Any, memory: Memory, stream: Any) -> None:
        self._config, self._reader, self._memory, self._stream = config, reader, memory, stream
        self.sources, self.feed = Sources(config), Feed(config)
        self._fallback = Fallback(self.sources.pool)
        self.changed = threading.Condition()
        self.ready: deque[InFlight] = deque()
        self.parts: tuple[PartShape, ...] | None = None
        self.plan_seconds, self.planned, self.planned_nbytes, self.waves = 0.0, 0, 0, 0
        self.starved_since: float | None = None
        self.failure: BaseException | None = None
        self.batch_id = 0
        self._partial: list[tuple[Pulled, list[Any]]] = []
        self._busy = self._flushing = self._closed = False
        self._stage_free: Any = None
        self._thread = threading.Thread(target=self._run, name="linumpy-stream", daemon=True)
        self._thread.start()

    def push(self, samples: Sample | Iterable[Sample]) -> None:
        """Append samples to what is read."""
        with self.changed:
            self.feed.push(samples)
            self._flushing = False
            self.changed.notify_all()

    def flush(self) -> None:
        """Let a partial batch be made of what is left when all iterables are exhausted."""
        with self.changed:
            self._flushing = True
            self.changed.notify_all()

    @property
    def waiting_samples(self) -> int:
        """Samples that wait for others to fill a batch; ask while holding :attr:`changed`."""
        return len(self._partial)

    @property
    def is_idle(self) -> bool:
        """Whether no batch comes without another push or flush; ask while holding :attr:`changed`."""
        return not self.ready and not self._busy and not self._has_work()

    @property
    def is_settled(self) -> bool:
        """Whether nothing is submitted before a batch is popped or samples pushed; ask holding :attr:`changed`."""
        return not self._busy and (not self._has_work() or len(self.ready) >= self._config.lookahead_batches)

    def _has_work(self) -> bool:
        return self.feed.has_more or (self._flushing and bool(self._partial))

    def stages_are_free(self, event: Any) -> None:
        """Note an event behind which all staged crops that were given back are no longer read."""
        self._stage_free = event

    def close(self) -> None:
        """End the thread; what is in flight is cancelled."""
        with self.changed:
            self._closed = True
            self.changed.notify_all()
        self._memory.stop()
        self._thread.join(timeout=5)  # an iterable may block for ever; the thread is a daemon
        self.sources.close()
        for item in self.ready:
            self.abandon(item)
        self.ready.clear()

    def abandon(self, item: InFlight) -> None:
        """Cancel a batch, and wait until nothing is written into its memory any more."""
        for _, ticket in item.tickets:
            ticket.cancel()
        for _, ticket in item.tickets:
            ticket.exception()

    def _run(self) -> None:
        try:
            while self._may_go_on():
                try:
                    self._step()
                finally:
                    with self.changed:
                        self._busy = False
                        self.changed.notify_all()
        except ShutdownError:
            pass
        except BaseException as error:  # nobody else would notice that the thread has ended
            with self.changed:
                self.failure = error
                self.changed.notify_all()

    def _may_go_on(self) -> bool:
        with self.changed:
            while not self._closed and not (self._has_work() and len(self.ready) < self._config.lookahead_batches):
                self.changed.wait()
            self._busy = not self._closed
            return not self._closed

    def _step(self) -> None:
        """Pull samples until a batch is full, and submit it."""
        failed: BaseException | None = None
        while len(self._partial) < self._config.batch_size and not self._closed:
            try:
                pulled = self.feed.next()
            except Exception as error:  # of the iterable that was pushed
                self.feed.drop_current()
                failed = error
                break
            if pulled is None or self._closed:
                break
            self._partial.append((pulled, self.sources.request(pulled.sample)))
        full = len(self._partial) >= self._config.batch_size or (self._flushing and not self.feed.has_more)
        if self._closed or (failed is None and not full):
            return
        chosen, self._partial = self._partial, []
        if not chosen and failed is None:
            return
        item = self._submitted(chosen, failed)
        with self.changed:
            self.ready.append(item)
            self.changed.notify_all()

    def _submitted(self, chosen: list[tuple[Pulled, list[Any]]], failed: BaseException | None) -> InFlight:
        item = InFlight(self.batch_id, chosen[-1][0].position + 1 if chosen else 0)
        self.batch_id += 1
        if failed is not None:
            item.faulty.append(as_stream_error(failed))
        try:
            self._submit(item, chosen)
        except ShutdownError:
            raise
        except Exception as error:
            self.abandon(item)
            item.tickets.clear()
            item.samples.clear()
            item.faulty.append(as_stream_error(error))
        return item

    def _submit(self, item: InFlight, chosen: list[tuple[Pulled, list[Any]]]) -> None:
        reads = self._plan(item, chosen)
        if not item.samples or (item.faulty and self._config.on_error == "raise"):
            item.samples.clear()
            return
        assert self.parts is not None
        item.parts = self.parts
        item.lease = self._take_slot()
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
        return nullcontext() if self._stream is None else _OnStream(self._stream, self._memory.device_id)

    def _plan(self, item: InFlight, chosen: list[tuple[Pulled, list[Any]]]) -> list[CropRead]:
        """Plan the samples of a batch; errors are those of their samples."""
        reads: list[CropRead] = []
        opened = [self._opened(pulled, futures, item) for pulled, futures in chosen]
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
                item.faulty.append(as_stream_error(error, pulled.sample))
                continue
            if self.parts is None:
                self.parts = shapes
            reads += planned
            item.samples.append(pulled.sample)
        self._divide(reads)
        self.plan_seconds += time.perf_counter() - begin
        self.planned += 1
        self.planned_nbytes += sum(read.read_nbytes for read in reads)
        return reads

    def _opened(self, pulled: Pulled, futures: list[Any], item: InFlight) -> list[Any] | None:
        try:
            return [future.result() for future in futures]
        except Exception as error:
            item.faulty.append(as_stream_error(error, pulled.sample))
            return None

    def _divide(self, reads: list[CropRead]) -> None:
        if self.parts is None or self._memory.slots:
            return
        batch = sum(part.nbytes(self._config.batch_size) for part in self.parts)
        staged = stage_offsets(reads)[-1]
        if self._config.pad in ("edge", "reflect"):  # a batch of crops that all reach out may come later
            rows = max(1, len(reads) // len(self.parts))
            staged = max(staged, *(read.read_nbytes * rows for read in reads), 0)
        if self._config.augment is not None:
            staged += staged // 4
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

    def _take_stage(self, nbytes: int) -> int:
        """Wait until staged crops of earlier batches are resampled."""
        with self.changed:
            while (begin := self._memory.take_stage(nbytes)) is None:
                if self._closed:
                    raise ShutdownError("the pipeline is closed")
                self.changed.wait(0.05)
        if nbytes and self._stage_free is not None:
            self._stage_free.synchronize()
        return begin

    def _jobs(self, item: InFlight, reads: list[CropRead]) -> tuple[list[ReadJob], list[int]]:
        count = len(item.parts)
        item.direct, item.staged = [[] for _ in range(count)], [[] for _ in range(count)]
        offsets = stage_offsets(reads)
        item.stage = (self._take_stage(offsets[-1]), offsets[-1])
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
                    out = item.arrays[part][read.row][tuple(slice(a, b) for a, b in read.inside)]
            if read.region is not None and out is not None:
                jobs.append(ReadJob(read.info, read.region, out))
                rows.append(read.row)
        return jobs, rows


class _OnStream:
    """A context in which a stream is CuPy's current one, on a device."""

    def __init__(self, stream: Any, device_id: int | None) -> None:
        import cupy

        self._device, self._stream = cupy.cuda.Device(device_id), stream

    def __enter__(self) -> None:
        self._device.__enter__()
        self._stream.__enter__()

    def __exit__(self, *error: object) -> None:
        self._stream.__exit__(*error)
        self._device.__exit__(*error)
