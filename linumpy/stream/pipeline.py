"""The pipeline: samples in, batches on the device out."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NoReturn

from linumpy.arrays import ReadDevice
from linumpy.device import resolve, usable_cores
from linumpy.errors import not_pickled
from linumpy.stream.arguments import integer
from linumpy.stream.batches.batch import Batch
from linumpy.stream.batches.consumer import Batches, Consumer, progress_and_epochs, state_of
from linumpy.stream.batches.memory import Memory, Stream
from linumpy.stream.batches.producer import Producer
from linumpy.stream.config import Config, Sample
from linumpy.stream.errors import ArgumentTypeError, as_stream_error
from linumpy.stream.stats import Metric, Stats

if TYPE_CHECKING:
    from linumpy.gpu import Reader


class Pipeline:
    """Batches of crops, read ahead.

    Parameters
    ----------
    config : Config
        Size and dtype of batches, memory, augmentation.
    reader : linumpy.gpu.Reader, optional
        Reads the chunks; by default the pipeline makes a reader, and closes it with the pipeline.

    Raises
    ------
    InvalidArgument
        `config` is no :class:`Config`.
    GpuUnavailableError
        The configuration names a CUDA device, and there is none.
    OutOfMemory
        The memory of the configuration cannot be allocated.

    Notes
    -----
    Any thread of the process that made the pipeline may push and pop. A thread of the pipeline pulls samples from
    iterables. The crops of all samples must have the shape of the first crop. The memory of batches is allocated when
    the pipeline is made; the reader allocates its memory for the first batch. An interrupt in :meth:`pop` loses no
    batch: the next call returns it.

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
        from linumpy.gpu import Reader

        if not isinstance(config, Config):
            raise ArgumentTypeError(f"config must be a Config (got {type(config).__name__})")
        self.config = config
        device = resolve("cpu") if config.device == "cpu" else resolve(None, config.device)
        self.device_id = device.index if device.is_cuda else None
        self._process = os.getpid()
        self._stream: Stream | None = None
        try:
            self._memory = Memory(config.device_buffer_bytes, self.device_id)
            device_name: ReadDevice = "cpu" if self.device_id is None else self.device_id
            cache_bytes = config.allowed_cache_bytes
            self._reader = reader or Reader(device_name, config.host_buffer_bytes, cache_bytes=cache_bytes, timed=True)
        except Exception as error:
            raise as_stream_error(error) from error
        if self.device_id is not None:
            import cupy

            with cupy.cuda.Device(self.device_id):
                self._stream = cupy.cuda.Stream(non_blocking=True)
        count = config.n_compute_threads or usable_cores()
        threads = None if self.device_id is not None else ThreadPoolExecutor(count, "linumpy-stream-compute")
        self._producer = Producer(config, self._reader, self._memory, self._stream)
        self._consumer = Consumer(config, self._producer, self._memory, self._stream, threads)
        own_reader = self._reader if reader is None else None
        self._resources = (self._producer, own_reader, self._stream, threads)
        self._finalizer = weakref.finalize(self, _free_later, self._process, *self._resources)
        self._finalizer.atexit = False
        self._flush_wait = Metric("flush_wait")
        self.stats_reset()

    def __reduce__(self) -> NoReturn:
        raise not_pickled(self, "send its config and the samples, and make a Pipeline there")

    def push(self, samples: Sample | Iterable[Sample]) -> None:
        """Append a sample, or any iterable of samples, which is pulled lazily and may be infinite.

        The arrays of a sample, and of the samples of a list or tuple, are opened here, and the samples checked: if one
        is faulty, none of them is appended. Other iterables, and all with ``on_error="skip"``, are not checked here.

        Raises
        ------
        StreamError
            The array of a sample cannot be opened, or the crop does not fit the array or the first sample; its `sample`
            is the faulty one.
        ArgumentTypeError
            `samples` is neither a sample nor an iterable, or a list or tuple that holds another object.
        ShutdownError
            The pipeline is closed.
        """
        self._producer.check_open()
        self._producer.push(samples)

    def pop(self) -> Batch:
        """Wait for the next batch, and return it.

        The elements of the batch are ready after the work that is queued on the stream ``batch.info.ready_stream``.
        DLPack makes the user's stream wait for that work.

        Raises
        ------
        TryAgain
            No batch is being read: nothing was pushed, or too few samples for a batch, without :meth:`flush`. Or the
            user has held the memory of all batches for a second.
        StreamError
            A sample of the batch is faulty, or a pushed iterable raised. After the errors of all faulty samples of a
            batch, one for each call, the next call returns the batch of the other samples.
        InvalidArgument
            An iterable that was pushed calls this method, which waits for that iterable.
        ShutdownError
            The pipeline is closed.
        """
        return self._consumer.pop()

    def flush(self) -> None:
        """End a batch after the samples pushed so far, and wait until all batches that can be read ahead are read.

        Raises
        ------
        InvalidArgument
            An iterable that was pushed calls this method, which waits for that iterable.
        """
        self._producer.check_usable("flush")
        begin = time.perf_counter()
        producer = self._producer
        producer.flush()
        with producer.changed:
            while not producer.is_settled:
                producer.check_open()
                producer.changed.wait(0.05)
            items = list(producer.ready)
        for item in items:
            for _, ticket in item.tickets:
                ticket.wait()
        with producer.changed:
            self._flush_wait = self._flush_wait.plus(time.perf_counter() - begin)

    def batches(self, n: int | None = None) -> Iterator[Batch]:
        """Iterate over `n` batches, or by default over all batches, of which the last may be partial.

        The iteration ends when all samples that were pushed are popped. An error does not count towards `n`; after it
        the iterator continues, first with the other samples of the same batch.
        """
        return Batches(self._producer, self.pop, None if n is None else integer("n", n, 0))

    @property
    def pending(self) -> bool:
        """Whether samples were pushed that were not popped yet; after :meth:`flush`, a loop while it is True pops all.

        Where no sample is pulled or read ahead, this waits until an iterable has yielded a sample or is exhausted. The
        last samples, if too few for a batch, stay pending until :meth:`flush`; without it :meth:`pop` raises
        :class:`TryAgain`. False after :meth:`close`.
        """
        producer = self._producer
        if producer.closed:
            return False
        producer.check_open()
        with producer.changed:
            while (has_samples := producer.has_samples) is None and not producer.closed and not producer.is_own_thread:
                producer.changed.wait(0.05)
        return has_samples is not False and not producer.closed

    @property
    def in_flight(self) -> int:
        """Number of batches whose samples were pulled and that were not popped yet; 0 after :meth:`close`."""
        producer = self._producer
        if producer.closed:
            return 0
        producer.check_open()
        with producer.changed:
            return producer.in_flight

    @property
    def stats(self) -> Stats:
        """Counters since construction or the last :meth:`stats_reset`; ``print`` shows the bottleneck."""
        self._producer.check_open()
        return self._counters().since(self._at_reset)

    @property
    def gpu_bytes_committed(self) -> int:
        """Limit of the device memory of the pipeline and its reader, from the configuration; 0 without a GPU."""
        if self.device_id is None:
            return 0
        config = self.config
        return config.device_buffer_bytes + config.host_buffer_bytes + config.allowed_cache_bytes

    def stats_reset(self) -> None:
        """Set all counters to zero."""
        self._producer.check_open()
        with self._producer.changed:
            self._consumer.reset_metrics()
            self._flush_wait, self._producer.submitter.metric = Metric("flush_wait"), Metric("plan")
            self._at_reset = self._counters()

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which a new pipeline resumes after the last batch that was popped.

        The state holds integers, and the list ``"epochs"``: the first epoch of each sampler that was pushed.
        """
        self._producer.check_open()
        return state_of(self.config, self._consumer.progress, self._producer.feed.epochs)

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Resume from the state of a pipeline of the same configuration; then push the same samples from the start.

        A sampler that is pushed gets the epoch that is saved in the state.

        Raises
        ------
        InvalidArgument
            The state is of another configuration, or is none that :meth:`state_dict` returned.
        RuntimeError
            Samples were pushed already.
        """
        self._producer.check_open()
        progress, epochs = progress_and_epochs(state, self.config)
        producer = self._producer
        with producer.changed:
            producer.feed.start_at(progress.position, epochs)
            producer.batch_id = progress.batch_id
        self._consumer.progress = progress

    def close(self) -> None:
        """Cancel pending reads and free all resources; allowed any number of times, in any thread.

        Memory that tensors of the user hold is freed with them. In a forked process this does nothing.
        """
        if os.getpid() != self._process:
            return  # after a fork: threads and device belong to the parent
        self._producer.stop()
        with self._consumer.popping:
            self._finalizer.detach()
            _free(*self._resources)

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _counters(self) -> Stats:
        """Return the counters of the pipeline and of the reader since they were made."""
        producer, consumer, reader = self._producer, self._consumer, self._reader.stats()
        times = reader.times
        return Stats(
            plan=producer.submitter.metric,
            io=Metric.summed("io", reader.slabs, reader.io_seconds, reader.bytes_read, reader.bytes_read),
            h2d=Metric.summed("h2d", times.copies, times.copy_seconds, times.copied_nbytes, times.copied_nbytes),
            decompress=Metric.summed("decompress", times.decoded, times.decode_seconds, 0, times.decoded_nbytes),
            assemble=Metric.summed("assemble", reader.slabs, reader.place_seconds),
            pop_wait_io=consumer.wait_io,
            pop_wait_compute=consumer.wait_compute,
            flush_wait=self._flush_wait,
            zarr_meta_hits=producer.sources.hits,
            zarr_meta_misses=producer.sources.misses,
            shard_idx_hits=reader.index_hits,
            shard_idx_misses=reader.index_misses,
            chunks_fetched=reader.chunks,
            chunks_cached=reader.cache_hits,
            batches_emitted=consumer.emitted,
            batches_truncated=consumer.truncated,
            waves_emitted=producer.submitter.waves,
            gpu_bytes_committed=self.gpu_bytes_committed,
            samples_skipped=consumer.skipped,
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


def _free_later(process: int, *held: object) -> None:
    """Free a pipeline that was not closed, in a new thread: the garbage collector may run in any thread."""
    if os.getpid() == process:
        threading.Thread(target=_free, args=held, name="linumpy-stream-free", daemon=True).start()
