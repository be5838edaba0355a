"""The pipeline: samples in, batches on the device out."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from linumpy.device import resolve
from linumpy.stream.batch import Batch, Tensor
from linumpy.stream.config import Config, Sample
from linumpy.stream.errors import (
    ShutdownError,
    StreamError,
    TryAgain,
    as_stream_error,
)
from linumpy.stream.memory import Memory
from linumpy.stream.plan import borders
from linumpy.stream.producer import InFlight, Producer
from linumpy.stream.resample import resample
from linumpy.stream.resample_host import narrow
from linumpy.stream.stats import Metric, Stats

#: After so many seconds without free memory, `pop` says that the consumer holds it all.
_STARVED_SECONDS = 1.0
_STATE_VERSION = 1


def set_log_level(level: int | str) -> None:
    """Set the level of what the package logs, as :mod:`logging` takes it."""
    logging.getLogger("linumpy.stream").setLevel(level)


class Pipeline:
    """Batches of crops, read ahead.

    Parameters
    ----------
    config : Config
        How batches are made.
    reader : linumpy.gpu.Reader, optional
        Reads the chunks; by default one of its own, closed with the pipeline.

    Raises
    ------
    GpuUnavailableError
        A CUDA device is asked for and there is none.
    OutOfMemory
        The memory that the configuration asks for cannot be had.

    Notes
    -----
    Any thread may push and pop. Samples are pulled from iterables by a thread of the pipeline. The crops of all samples
    have the shape of the first one's. Its memory is allocated here; nothing grows afterwards.

    Examples
    --------
    >>> cfg = Config(batch_size=8, host_buffer_bytes=1 << 30, device_buffer_bytes=1 << 30)  # doctest: +SKIP
    >>> with Pipeline(cfg) as pipeline:  # doctest: +SKIP
    ...     pipeline.push(Sample("cell.zarr", np.s_[0:64, z : z + 256, 0:256]) for z in range(100))
    ...     for batch in pipeline.batches():
    ...         with batch as tensor:
    ...             train(torch.from_dlpack(tensor))
    """

    def __init__(self, config: Config, *, reader: Any = None) -> None:
        if not isinstance(config, Config):
            raise TypeError(f"config must be a Config (got {type(config).__name__})")
        self.config = config
        device = resolve("cpu") if config.device == "cpu" else resolve(None, config.device)
        self.device_id = device.index if device.is_cuda else None
        self._closed = False
        self._own_reader = reader is None
        self._stream: Any = None
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
        self._popping = threading.Lock()
        self._popped = self._position = 0
        self._wait_io = self._wait_compute = self._flush_wait = Metric()
        self.stats_reset()

    def _make_reader(self) -> Any:
        from linumpy.gpu import Reader

        config = self.config
        device = "cpu" if self.device_id is None else self.device_id
        return Reader(device, config.host_buffer_bytes, cache_bytes=config.allowed_cache_bytes)

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
            No batch is on its way: nothing was pushed, or too few samples for a batch and no :meth:`flush`; or the
            consumer holds the memory of all batches.
        StreamError
            A sample of the batch is faulty. The next call goes on with the next batch.
        ShutdownError
            The pipeline is closed.
        """
        while True:
            with self._popping:
                item = self._next()
                batch = self._finished(item)
            if batch is not None:
                return batch

    def flush(self) -> None:
        """Let the last samples make a partial batch, and wait until what can be read ahead has been read."""
        self._check_open()
        begin = time.perf_counter()
        producer = self._producer
        producer.flush()
        with producer.changed:
            while not producer.is_settled and producer.starved_since is None and not self._closed:
                producer.changed.wait(0.05)
            items = list(producer.ready)
        for item in items:
            for _, ticket in item.tickets:
                ticket.exception()
        self._flush_wait = self._flush_wait.plus(time.perf_counter() - begin)

    def batches(self, n: int | None = None) -> Iterator[Batch]:
        """Iterate over `n` batches, or over all; ends early where all samples are served, with a partial batch."""
        if n is not None and n < 0:
            raise ValueError(f"n must be >= 0 (got {n})")
        return _Batches(self, n)

    @property
    def pending(self) -> int:
        """Batches that were submitted and not yet popped."""
        with self._producer.changed:
            return len(self._producer.ready)

    @property
    def stats(self) -> Stats:
        """Counters since construction or the last :meth:`stats_reset`; ``print`` shows what bounds the pipeline."""
        now = self._counters()
        then = self._at_reset
        return Stats(
            plan=_less(now["plan"], then["plan"]),
            io=_less(now["io"], then["io"]),
            h2d=_less(now["h2d"], then["h2d"]),
            decompress=_less(now["decompress"], then["decompress"]),
            assemble=_less(now["assemble"], then["assemble"]),
            pop_wait_io=self._wait_io,
            pop_wait_compute=self._wait_compute,
            flush_wait=self._flush_wait,
            zarr_meta_hits=now["meta_hits"] - then["meta_hits"],
            zarr_meta_misses=now["meta_misses"] - then["meta_misses"],
            shard_idx_hits=now["shard_hits"] - then["shard_hits"],
            shard_idx_misses=now["shard_misses"] - then["shard_misses"],
            batches_emitted=self._emitted,
            batches_truncated=self._truncated,
            waves_emitted=now["waves"] - then["waves"],
            gpu_bytes_committed=self.gpu_bytes_committed,
            samples_skipped=self._skipped,
            seconds=time.perf_counter() - self._began,
        )

    @property
    def gpu_bytes_committed(self) -> int:
        """Device memory of the pipeline and its reader, constant from construction on; 0 without a GPU."""
        if self.device_id is None:
            return 0
        config = self.config
        return config.device_buffer_bytes + config.host_buffer_bytes + config.allowed_cache_bytes

    def stats_reset(self) -> None:
        """Set all counters to zero."""
        self._wait_io = self._wait_compute = self._flush_wait = Metric()
        self._emitted = self._truncated = self._skipped = 0
        self._began = time.perf_counter()
        self._at_reset = self._counters()

    def state_dict(self) -> dict[str, int]:
        """Return what a new pipeline needs to go on behind the last batch that was popped."""
        config = self.config
        return {
            "version": _STATE_VERSION, "position": self._position, "batch_id": self._popped, "seed": config.seed,
            "epoch": config.epoch, "rank": config.rank, "world_size": config.world_size,
            "batch_size": config.batch_size,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where another pipeline of the same configuration was; the same samples are pushed again from the start.

        Raises
        ------
        ValueError
            The state is of another configuration.
        """
        here = self.state_dict()
        for name in ("version", "seed", "epoch", "rank", "world_size", "batch_size"):
            if state.get(name) != here[name]:
                raise ValueError(f"the state has {name}={state.get(name)}, this pipeline has {here[name]}")
        producer = self._producer
        with producer.changed:
            producer.feed.start_at(int(state["position"]))
            producer.batch_id = self._popped = int(state["batch_id"])
        self._position = int(state["position"])

    def close(self) -> None:
        """Cancel what is under way and free all; allowed any number of times."""
        if self._closed:
            return
        self._closed = True
        self._producer.close()
        if self._own_reader:
            self._reader.close()
        if self._stream is not None:
            self._stream.synchronize()
        if self._threads is not None:
            self._threads.shutdown()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ShutdownError("the pipeline is closed")

    def _next(self) -> InFlight:
        """Wait for the next batch in flight."""
        begin = time.perf_counter()
        producer = self._producer
        with producer.changed:
            while not producer.ready:
                self._check_open()
                if producer.failure is not None:
                    raise as_stream_error(producer.failure)
                if producer.is_idle:
                    raise TryAgain(_nothing_comes(producer.waiting_samples, self.config.batch_size))
                self._check_starved(producer, begin)
                producer.changed.wait(0.05)
            self._check_open()
            item = producer.ready.popleft()
            producer.changed.notify_all()
        self._wait_io = self._wait_io.plus(time.perf_counter() - begin, count=0)
        self._popped = item.batch_id + 1
        self._position = max(self._position, item.end)
        return item

    def _check_starved(self, producer: Producer, begin: float) -> None:
        """Raise where this call and the producer have both waited for memory for long."""
        since, now = producer.starved_since, time.perf_counter()
        if since is not None and now - max(since, begin) > _STARVED_SECONDS:
            raise TryAgain(
                f"all {self._memory.slots} batches that device_buffer_bytes holds are held by the consumer: "
                "release one, or pass a larger device_buffer_bytes"
            )

    def _finished(self, item: InFlight) -> Batch | None:
        """Make a batch of what was read; None where `on_error` is skip and nothing is left of it."""
        begin = time.perf_counter()
        errors: dict[int, StreamError] = {}
        try:
            for row, ticket in item.tickets:
                try:
                    ticket.result(self._stream)
                except Exception as error:
                    errors.setdefault(row, as_stream_error(error, item.samples[row]))
        except BaseException:  # an interrupt: nothing may be written any more when the memory is free
            self._producer.abandon(item)
            self._give_stage(item)
            raise
        read = time.perf_counter()
        self._wait_io = self._wait_io.plus(read - begin)
        try:
            if (errors or item.faulty) and self.config.on_error == "raise":
                raise (item.faulty or [errors[min(errors)]])[0]
            self._skipped += len(errors) + sum(one.sample is not None for one in item.faulty)
            for one in item.faulty:
                if one.sample is None:  # not of a sample but of the batch, such as memory: never skipped
                    raise one
            if len(errors) == len(item.samples):
                return None
            with self._producer.on_stream():
                return self._assembled(item, errors)
        finally:
            self._give_stage(item)
            self._wait_compute = self._wait_compute.plus(time.perf_counter() - read)

    def _assembled(self, item: InFlight, errors: Mapping[int, StreamError]) -> Batch:
        config = self.config
        rows = [row for row in range(len(item.samples)) if row not in errors]
        tensors: dict[str, Tensor] = {}
        for part, array, direct, staged in zip(item.parts, item.arrays, item.direct, item.staged, strict=True):
            for read in direct:
                for slab in borders(part.shape, read.inside):
                    array[(read.row, *slab)] = narrow(np.array(config.pad_value), array.dtype)[()]
            good = [one for one in staged if one.read.row not in errors]
            if good:
                resample(array, part, good, config.pad or "edge", config.pad_value, self._threads)
            for to, row in enumerate(rows):
                if to != row:
                    array[to] = array[row]
        ready = None if self._stream is None else self._recorded()
        assert item.lease is not None
        offset = 0
        for part in item.parts:
            array = self._memory.leased(item.lease, offset, (len(rows), *part.shape), part.element)
            tensors[part.name] = Tensor(array, part.dtype, ready, item.lease)
            offset += part.nbytes(config.batch_size)
        samples = tuple(item.samples[row] for row in rows)
        self._emitted += 1
        self._truncated += len(samples) < config.batch_size
        pointer = 0 if self._stream is None else int(self._stream.ptr)
        return Batch(tensors, samples, item.batch_id, pointer)

    def _recorded(self) -> Any:
        import cupy

        return self._stream.record(cupy.cuda.Event(disable_timing=True))

    def _give_stage(self, item: InFlight) -> None:
        """Free the staged crops of a batch behind what has been queued, and forget its memory."""
        if item.stage[1]:
            if self._stream is not None:
                with self._producer.on_stream():
                    self._producer.stages_are_free(self._recorded())
            with self._producer.changed:
                self._memory.give_stage(*item.stage)
                self._producer.changed.notify_all()
        item.arrays, item.lease, item.tickets = [], None, []

    def _counters(self) -> dict[str, Any]:
        producer, stats = self._producer, self._reader.stats()

        return {
            "plan": Metric(producer.planned, producer.plan_seconds, producer.planned_nbytes),
            "io": Metric(stats.slabs, stats.io_seconds, stats.bytes_read),
            "h2d": Metric(),
            "decompress": Metric(),
            "assemble": Metric(stats.slabs, stats.place_seconds),
            "meta_hits": producer.sources.hits,
            "meta_misses": producer.sources.misses,
            "shard_hits": stats.index_hits,
            "shard_misses": stats.index_misses,
            "waves": producer.waves,
        }


class _Batches:
    """Iterator over batches, which goes on behind an error of one of them."""

    def __init__(self, pipeline: Pipeline, n: int | None) -> None:
        self._pipeline, self._left = pipeline, n

    def __iter__(self) -> _Batches:
        return self

    def __next__(self) -> Batch:
        producer = self._pipeline._producer
        while self._left != 0:
            with producer.changed:
                idle, waiting = producer.is_idle, producer.waiting_samples
            if idle and not waiting:
                break
            if idle:
                producer.flush()
            try:
                batch = self._pipeline.pop()
            except TryAgain:
                with producer.changed:
                    ended = producer.is_idle
                if ended:  # meanwhile: look again for what waits for a partial batch
                    continue
                raise
            except StreamError:
                self._count()
                raise
            self._count()
            return batch
        raise StopIteration

    def _count(self) -> None:
        if self._left is not None:
            self._left -= 1


def _nothing_comes(waiting: int, batch_size: int) -> str:
    if waiting:
        return f"{waiting} samples wait for a batch of {batch_size}: push more, or flush"
    return "no batch is on its way: push samples first"


def _less(now: Metric, then: Metric) -> Metric:
    return Metric(now.count - then.count, now.seconds - then.seconds, now.nbytes - then.nbytes)
