"""The pipeline: samples in, batches on the device out."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from linumpy.device import resolve
from linumpy.errors import StaleLayoutError, not_pickled
from linumpy.stream.arguments import integer
from linumpy.stream.batches.assembler import Assembler
from linumpy.stream.batches.batch import Batch, Batches
from linumpy.stream.batches.in_flight import InFlight
from linumpy.stream.batches.memory import Memory
from linumpy.stream.batches.producer import Producer
from linumpy.stream.batches.state import Progress, checked, state_of
from linumpy.stream.config import Config, Sample
from linumpy.stream.errors import (
    ArgumentTypeError,
    InvalidArgument,
    ShutdownError,
    StreamError,
    TryAgain,
    as_stream_error,
)
from linumpy.stream.on_device import Stream, on_stream, recorded
from linumpy.stream.stats import Metric, Stats

if TYPE_CHECKING:
    from linumpy.gpu import Reader

#: After so many seconds without free memory `pop` raises, because the consumer holds all of it.
_STARVED_SECONDS = 1.0


class Pipeline:
    """Batches of crops, read ahead.

    Parameters
    ----------
    config : Config
        Size and dtype of batches, memory, augmentation.
    reader : linumpy.gpu.Reader, optional
        Reads the chunks; by default one of its own, closed with the pipeline.

    Raises
    ------
    GpuUnavailableError
        A CUDA device is asked for and there is none.
    OutOfMemory
        The memory of the configuration cannot be allocated.

    Notes
    -----
    Any thread of the process that made it may push and pop. A thread of the pipeline pulls samples from iterables. The
    crops of all samples have the shape of the first crop. All memory is allocated here. An interrupt in :meth:`pop`
    loses no batch: the next call returns it.

    Examples
    --------
    >>> cfg = Config(batch_size=8, host_buffer_bytes=1 << 30, device_buffer_bytes=1 << 30)  # doctest: +SKIP
    >>> with Pipeline(cfg) as pipeline:  # doctest: +SKIP
    ...     pipeline.push(Sample("cell.zarr", np.s_[0:64, z : z + 256, 0:256]) for z in range(100))
    ...     for batch in pipeline.batches():
    ...         with batch as tensor:
    ...             train(torch.from_dlpack(tensor))
    """

    def __init__(self, config: Config, *, reader: Reader | None = None) -> None:
        if not isinstance(config, Config):
            raise ArgumentTypeError(f"config must be a Config (got {type(config).__name__})")
        self.config = config
        device = resolve("cpu") if config.device == "cpu" else resolve(None, config.device)
        self.device_id = device.index if device.is_cuda else None
        self._closed = False
        self._process = os.getpid()
        self._stream: Stream | None = None
        try:
            self._memory = Memory(config.device_buffer_bytes, self.device_id)
            self._reader = self._make_reader() if reader is None else reader
        except Exception as error:
            raise as_stream_error(error) from error
        if self.device_id is not None:
            import cupy

            with cupy.cuda.Device(self.device_id):
                self._stream = cupy.cuda.Stream(non_blocking=True)
        threads = config.n_compute_threads or len(os.sched_getaffinity(0))
        self._threads = None if self.device_id is not None else ThreadPoolExecutor(threads, "linumpy-stream-compute")
        self._producer = Producer(config, self._reader, self._memory, self._stream)
        self._assembler = Assembler(config, self._memory, self._stream, self._threads)
        self._popping = threading.RLock()
        self._progress = Progress()
        own = self._reader if reader is None else None
        self._held = (self._producer, own, self._stream, self._threads)
        self._dropped = weakref.finalize(self, _free_later, self._process, *self._held)
        self._dropped.atexit = False
        self._wait_io, self._wait_compute = Metric("pop_wait_io"), Metric("pop_wait_compute")
        self._flush_wait = Metric("flush_wait")
        self._waited = 0.0  # seconds for the batch that is being popped
        self._emitted = self._truncated = self._skipped = 0
        self.stats_reset()

    def __reduce__(self) -> NoReturn:
        raise not_pickled(self, "send its config and the samples, and make a Pipeline there")

    def _make_reader(self) -> Reader:
        from linumpy.gpu import Reader

        config = self.config
        device = "cpu" if self.device_id is None else self.device_id
        return Reader(device, config.host_buffer_bytes, cache_bytes=config.allowed_cache_bytes, timed=True)

    def push(self, samples: Sample | Iterable[Sample]) -> None:
        """Append a sample, or any iterable of samples, which is pulled lazily and may be infinite."""
        self._check_open()
        self._producer.push(samples)

    def pop(self) -> Batch:
        """Return the next batch; blocks until it was read.

        The batch is ready behind its ``info.ready_stream``, on which DLPack makes the consumer's stream wait.

        Raises
        ------
        TryAgain
            No batch is being read: nothing was pushed, or too few samples for a batch without :meth:`flush`; or the
            consumer holds the memory of all batches.
        StreamError
            A sample of the batch is faulty. The next call goes on with the next batch.
        ShutdownError
            The pipeline is closed.
        """
        while True:
            self._check_usable("pop")
            with self._popping:
                batch = self._finished(self._next())
            if batch is not None:
                return batch

    def flush(self) -> None:
        """End a batch behind the samples pushed so far, and wait until all batches that can be read ahead are read."""
        self._check_usable("flush")
        begin = time.perf_counter()
        producer = self._producer
        producer.flush()
        with producer.changed:
            while not producer.is_settled:
                self._check_open()
                producer.changed.wait(0.05)
            items = list(producer.ready)
        for item in items:
            for _, ticket in item.tickets:
                ticket.wait()
        with producer.changed:
            self._flush_wait = self._flush_wait.plus(time.perf_counter() - begin)

    def batches(self, n: int | None = None) -> Iterator[Batch]:
        """Iterate over `n` batches, or over all; ends early where all samples are served, with a partial batch."""
        limit = None if n is None else integer("n", n, 0)
        return Batches(self._producer, partial(self._check_usable, "batches"), self.pop, limit)

    @property
    def pending(self) -> bool:
        """Whether samples were pushed that are not handed out yet: ``while p.pending: p.pop()`` serves all.

        Waits until an iterable has yielded another sample or is exhausted. The last samples, if too few for a batch,
        stay pending until :meth:`flush`; without it :meth:`pop` raises :class:`TryAgain`.
        """
        if self._closed:
            return False
        self._check_open()
        producer = self._producer
        with producer.changed:
            while (has_samples := producer.has_samples) is None and not self._closed and not producer.is_own_thread:
                producer.changed.wait(0.05)
        return has_samples is not False and not self._closed

    @property
    def in_flight(self) -> int:
        """Batches that were submitted and not yet popped."""
        if self._closed:
            return 0
        self._check_open()
        with self._producer.changed:
            return self._producer.in_flight

    @property
    def stats(self) -> Stats:
        """Counters since construction or the last :meth:`stats_reset`; ``print`` shows what bounds the pipeline."""
        self._check_open()
        return self._counters().since(self._at_reset)

    @property
    def gpu_bytes_committed(self) -> int:
        """Device memory of the pipeline and its reader, constant from construction on; 0 without a GPU."""
        if self.device_id is None:
            return 0
        config = self.config
        return config.device_buffer_bytes + config.host_buffer_bytes + config.allowed_cache_bytes

    def stats_reset(self) -> None:
        """Set all counters to zero."""
        self._check_open()
        with self._producer.changed:
            self._wait_io, self._wait_compute = Metric("pop_wait_io"), Metric("pop_wait_compute")
            self._flush_wait, self._producer.submitter.planner.metric = Metric("flush_wait"), Metric("plan")
            self._at_reset = self._counters()

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which a new pipeline resumes behind the last batch that was popped.

        Integers, and ``"epochs"``, a list of them: the first epoch of each sampler that was pushed.
        """
        self._check_open()
        return state_of(self.config, self._progress, self._producer.feed.epochs)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the state of a pipeline of the same configuration; then push the same samples from the start.

        Samplers get the epochs that they had then.

        Raises
        ------
        InvalidArgument
            The state is of another configuration.
        RuntimeError
            Samples were pushed already.
        """
        self._check_open()
        progress, epochs = checked(state, self.config)
        producer = self._producer
        with producer.changed:
            producer.feed.start_at(progress.position, epochs)
            producer.submitter.batch_id = progress.batch_id
        self._progress = progress

    def close(self) -> None:
        """Cancel pending reads and free all resources; allowed any number of times, in any thread."""
        if os.getpid() != self._process:
            return  # after a fork: threads and device belong to the parent
        self._closed = True
        self._producer.stop()
        with self._popping:
            self._dropped.detach()
            _free(*self._held)

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if os.getpid() != self._process:
            raise ShutdownError("this pipeline was made by the parent of this process: make one here")
        if self._closed:
            raise ShutdownError("the pipeline is closed")

    def _check_usable(self, name: str) -> None:
        """Raise for calls from an iterable that would wait for that iterable."""
        self._check_open()
        if self._producer.is_own_thread:
            raise InvalidArgument(f"an iterable that was pushed calls {name}, which waits for that iterable itself")

    def _next(self) -> InFlight:
        """Wait for the next batch in flight; return it again if its pop was interrupted."""
        begin = time.perf_counter()
        producer = self._producer
        with producer.changed:
            while producer.taken is None:
                self._check_open()
                if producer.ready:
                    producer.taken = producer.ready[0]
                elif producer.failure is not None:
                    raise as_stream_error(producer.failure)
                elif producer.is_idle:
                    raise TryAgain(_no_batch(producer.waiting_samples, self.config.batch_size))
                else:
                    self._check_starved(producer, begin)
                    producer.changed.wait(0.05)
            if producer.ready and producer.ready[0] is producer.taken:
                producer.pop()
                producer.wait_for_turn()
        self._waited += time.perf_counter() - begin
        return producer.taken

    def _check_starved(self, producer: Producer, begin: float) -> None:
        """Raise where this call and the producer have both waited for memory for long."""
        since, now = producer.submitter.starved_since, time.perf_counter()
        if since is not None and now - max(since, begin) > _STARVED_SECONDS:
            raise TryAgain(
                f"all {self._memory.slots} batches that device_buffer_bytes holds are held by the consumer: "
                "release one, or pass a larger device_buffer_bytes"
            )

    def _finished(self, item: InFlight) -> Batch | None:
        """Make a batch of crops that were read; None where `on_error` is skip and all of its samples are faulty."""
        if item.raised is not None:
            self._end(item)
            raise item.raised
        begin = time.perf_counter()
        of_reads = self._assembler.errors(item)
        while any(isinstance(error, StaleLayoutError) for error in of_reads.values()):
            self._check_open()
            self._producer.submitter.submit_again(item)
            of_reads = self._assembler.errors(item)
        errors = {row: as_stream_error(error, item.samples[row]) for row, error in of_reads.items()}
        read = time.perf_counter()
        try:
            with on_stream(self._stream, self.device_id):
                batch = self._outcome(item, errors)
        except Exception as error:
            self._end(item)
            if self._closed:
                raise ShutdownError("the pipeline is closed") from error
            failure = as_stream_error(error, what="" if isinstance(error, StreamError) else "assemble")
            raise failure from failure.__cause__
        self._end(item)
        end = time.perf_counter()
        with self._producer.changed:
            self._wait_io = self._wait_io.plus(self._waited + read - begin)
            self._wait_compute = self._wait_compute.plus(end - read)
        self._waited = 0.0
        return batch

    def _outcome(self, item: InFlight, errors: Mapping[int, StreamError]) -> Batch | None:
        """Return the batch, or raise its error; after an interrupt another call completes the batch."""
        if (errors or item.faulty) and self.config.on_error == "raise":
            raise (item.faulty or [errors[min(errors)]])[0]
        for error in item.faulty:
            if error.sample is None:  # of the whole batch, such as memory: never skipped
                raise error
        if len(errors) == len(item.samples):
            self._skipped += len(errors) + len(item.faulty)
            return None
        batch = self._assembler.batch(item, errors)
        self._skipped += len(errors) + len(item.faulty)
        self._truncated += len(batch) < self.config.batch_size
        self._emitted += 1
        return batch

    def _end(self, item: InFlight) -> None:
        """Advance behind a batch; free its staged crops behind the work that is queued, and drop its lease."""
        self._progress = Progress(item.batch_id + 1, max(self._progress.position, item.end))
        self._producer.taken = None
        if item.stage[1]:
            if self._stream is not None:
                with on_stream(self._stream, self.device_id):
                    self._producer.submitter.stages_are_free(recorded(self._stream))
            with self._producer.changed:
                self._memory.give_stages(item.batch_id)
                self._producer.changed.notify_all()
        item.arrays, item.lease, item.tickets = [], None, []

    def _counters(self) -> Stats:
        """Return the counters since construction; those of the reader since the reader's construction."""
        producer, reader = self._producer, self._reader.stats()
        times = reader.times
        return Stats(
            plan=producer.submitter.planner.metric,
            io=Metric.summed("io", reader.slabs, reader.io_seconds, reader.bytes_read, reader.bytes_read),
            h2d=Metric.summed("h2d", times.copies, times.copy_seconds, times.copied_nbytes, times.copied_nbytes),
            decompress=Metric.summed("decompress", times.decoded, times.decode_seconds, 0, times.decoded_nbytes),
            assemble=Metric.summed("assemble", reader.slabs, reader.place_seconds),
            pop_wait_io=self._wait_io,
            pop_wait_compute=self._wait_compute,
            flush_wait=self._flush_wait,
            zarr_meta_hits=producer.sources.hits,
            zarr_meta_misses=producer.sources.misses,
            shard_idx_hits=reader.index_hits,
            shard_idx_misses=reader.index_misses,
            batches_emitted=self._emitted,
            batches_truncated=self._truncated,
            waves_emitted=producer.submitter.waves,
            gpu_bytes_committed=self.gpu_bytes_committed,
            samples_skipped=self._skipped,
            seconds=time.perf_counter(),
        )


def _free(producer: Producer, reader: Reader | None, stream: Stream | None, threads: ThreadPoolExecutor | None) -> None:
    """Free the resources of a pipeline; allowed any number of times."""
    producer.stop()
    producer.cancel()
    if reader is not None:
        reader.close()
    if stream is not None:
        stream.synchronize()
    if threads is not None:
        threads.shutdown()


def _free_later(process: int, *held: Any) -> None:
    """Free a pipeline that was not closed, in a new thread: the garbage collector may run in any thread."""
    if os.getpid() == process:
        threading.Thread(target=_free, args=held, name="linumpy-stream-free", daemon=True).start()


def _no_batch(waiting: int, batch_size: int) -> str:
    if waiting:
        return f"{waiting} samples wait for a batch of {batch_size}: push more, or flush"
    return "no batch is being read: push samples first"
