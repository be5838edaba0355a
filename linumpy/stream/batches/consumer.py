"""The consumer's side of a pipeline: batches in flight → :class:`Batch`, waited for, assembled and counted.

To assemble a batch, borders of direct crops are filled, staged crops are resampled, and rows of faulty samples are
closed up. Also the state from which a pipeline resumes: a dict of integers and a list of integers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import NamedTuple, NoReturn

from linumpy.errors import StaleLayoutError, not_pickled
from linumpy.stream.arguments import integer
from linumpy.stream.batches.batch import Batch, Tensor
from linumpy.stream.batches.memory import Memory, Stream, on_stream, recorded
from linumpy.stream.batches.producer import Producer
from linumpy.stream.batches.submitter import InFlight
from linumpy.stream.config import WORD, Config
from linumpy.stream.errors import (
    ArgumentTypeError,
    InvalidArgument,
    ShutdownError,
    StreamError,
    TryAgain,
    as_stream_error,
)
from linumpy.stream.resampling.resample import fill_borders, resample
from linumpy.stream.stats import Metric

#: After so many seconds without free memory `pop` raises :class:`TryAgain`: the user holds the memory of all batches.
_STARVED_SECONDS = 1.0
_VERSION = 2
#: Entries that must be equal in the state and in the pipeline that loads it.
_EQUAL_ENTRIES = ("version", "seed", "epoch", "rank", "world_size", "batch_size")


class Progress(NamedTuple):
    """How many batches and samples were popped."""

    batch_id: int = 0  # number of the next batch
    position: int = 0  # position, among all samples that were pushed, after the last sample that was popped


def state_of(config: Config, progress: Progress, epochs: Sequence[int]) -> dict[str, object]:
    """Return the state of a pipeline; `epochs` are the first epochs of the samplers that were pushed."""
    return {
        "version": _VERSION, "position": progress.position, "batch_id": progress.batch_id, "seed": config.seed,
        "epoch": config.epoch, "rank": config.rank, "world_size": config.world_size,
        "batch_size": config.batch_size, "epochs": list(epochs),
    }  # fmt: skip


def progress_and_epochs(state: Mapping[str, object], config: Config) -> tuple[Progress, list[int]]:
    """Check a state, and return its progress and its epochs."""
    if not isinstance(state, Mapping):
        raise ArgumentTypeError(f"state must be what state_dict() returned (got {type(state).__name__})")
    expected = state_of(config, Progress(), ())
    for name in _EQUAL_ENTRIES:
        if state.get(name) != expected[name]:
            raise InvalidArgument(f"the state has {name}={state.get(name)}, this pipeline has {expected[name]}")
    missing = expected.keys() - state.keys()
    if missing:
        raise InvalidArgument(f"the state has no {', '.join(sorted(missing))}: pass what state_dict() returned")
    position, batch_id = (integer(name, state[name], 0) for name in ("position", "batch_id"))
    if not isinstance(state["epochs"], (list, tuple)):
        raise ArgumentTypeError(f"epochs must be a list of ints (got {state['epochs']!r})")
    return Progress(batch_id, position), [integer("epochs", epoch, 0, WORD) for epoch in state["epochs"]]


class Consumer:
    """Pops batches, one at a time, and assembles them; `threads` resample NumPy arrays."""

    def __init__(
        self, config: Config, producer: Producer, memory: Memory, stream: Stream | None, threads: Executor | None
    ) -> None:
        self._config, self._producer, self._memory, self._stream = config, producer, memory, stream
        self._threads = threads
        self.popping = threading.RLock()  # held while a batch is popped
        self.progress = Progress()  # after the last batch that was popped
        self.reset_metrics()
        #: Batches that were popped; partial batches among them; faulty samples that were left out.
        self.emitted = self.truncated = self.skipped = 0
        self._waited = 0.0  # seconds for the batch that is being popped

    def reset_metrics(self) -> None:
        """Set the times to zero that :meth:`pop` waits: for reads, and until resampling is queued (on a CPU: done)."""
        self.wait_io, self.wait_compute = Metric("pop_wait_io"), Metric("pop_wait_compute")

    def pop(self) -> Batch:
        """Wait for the next batch, and return it; see :meth:`Pipeline.pop <linumpy.stream.Pipeline.pop>`."""
        while True:
            self._producer.check_usable("pop")
            with self.popping:
                batch = self._wait_and_assemble(self._next())
            if batch is not None:
                return batch

    def _next(self) -> InFlight:
        """Wait for the next batch in flight; return it again if its pop was interrupted."""
        begin = time.perf_counter()
        producer = self._producer
        with producer.changed:
            while producer.taken is None:
                producer.check_open()
                if producer.ready:
                    producer.taken = producer.ready[0]
                elif producer.failure is not None:
                    raise as_stream_error(producer.failure)
                elif producer.is_idle:
                    waiting = producer.waiting_samples
                    raise TryAgain(
                        f"{waiting} samples wait for a batch of {self._config.batch_size}: push more, or flush"
                        if waiting
                        else "no batch is being read: push samples first"
                    )
                else:
                    since, now = producer.submitter.starved_since, time.perf_counter()
                    if since is not None and now - max(since, begin) > _STARVED_SECONDS:  # both have waited long
                        raise TryAgain(
                            f"all {self._memory.slots} batches that device_buffer_bytes holds are held by the "
                            "consumer: release one, or pass a larger device_buffer_bytes"
                        )
                    producer.changed.wait(0.05)
            if producer.ready and producer.ready[0] is producer.taken:
                producer.pop()
                producer.wait_for_turn()
        self._waited += time.perf_counter() - begin
        return producer.taken

    def _wait_and_assemble(self, item: InFlight) -> Batch | None:
        """Wait for the reads of a batch, and assemble it; None where `on_error` is skip and all samples are faulty."""
        if item.raised is not None:
            self._end(item)
            raise item.raised
        begin = time.perf_counter()
        errors = self._read_errors(item)
        read_end = time.perf_counter()
        self._raise_next(item, errors)
        try:
            with on_stream(self._stream, self._memory.device_id):
                batch = None if len(errors) == len(item.samples) else self._assembled(item, errors)
        except Exception as error:
            self._end(item)
            if self._producer.closed:
                raise ShutdownError("the pipeline is closed") from error
            failure = as_stream_error(error, what="" if isinstance(error, StreamError) else "assemble")
            raise failure from failure.__cause__
        self._end(item)
        self.skipped += len(item.all_errors(errors))
        self.emitted += batch is not None
        self.truncated += batch is not None and len(batch) < self._config.batch_size
        end = time.perf_counter()
        with self._producer.changed:
            self.wait_io = self.wait_io.plus(self._waited + read_end - begin)
            self.wait_compute = self.wait_compute.plus(end - read_end)
        self._waited = 0.0
        return batch

    def _read_errors(self, item: InFlight) -> dict[int, StreamError]:
        """Wait for the reads of a batch, and return the error of each faulty row.

        Where an array was rewritten before it was read, the batch is planned and submitted again.
        """
        while item.read_errors is None:
            errors: dict[int, BaseException] = {}
            if not all(ticket.done() for _, ticket in item.tickets):
                self._producer.count_turn(max([ticket.wait() for _, ticket in item.tickets]))
            for rows, ticket in item.tickets:
                for read, error in ticket.errors(self._stream).items():
                    errors.setdefault(rows[read], error)
            if any(isinstance(error, StaleLayoutError) for error in errors.values()):
                self._producer.check_open()
                self._producer.submitter.submit_again(item)
            else:
                item.read_errors = {row: as_stream_error(error, item.samples[row]) for row, error in errors.items()}
        return item.read_errors

    def _raise_next(self, item: InFlight, errors: Mapping[int, StreamError]) -> None:
        """Raise the next error of a batch that was not raised yet; the last one ends a batch without other samples.

        An error of the whole batch, such as missing memory, is also raised where `on_error` is skip.
        """
        skips = self._config.on_error == "skip"
        found = [error for error in item.all_errors(errors) if error.sample is None or not skips]
        if item.raised_errors == len(found):
            return
        item.raised_errors += 1
        if item.raised_errors == len(found) and len(errors) == len(item.samples):
            self.skipped += len(item.all_errors(errors))
            self._end(item)
        error = found[item.raised_errors - 1]
        if self._producer.closed:
            raise ShutdownError("the pipeline is closed") from error
        raise error

    def _assembled(self, item: InFlight, errors: Mapping[int, StreamError]) -> Batch:
        """Assemble a batch of the rows without an error; after an interrupt, another call continues the work."""
        config = self._config
        if not item.is_filled:
            for part, array, direct, staged in zip(item.parts, item.arrays, item.direct, item.staged, strict=True):
                fill_borders(array, part, direct, config.pad_value)
                complete = [crop for crop in staged if crop.read.row not in errors]
                if complete:
                    resample(array, part, complete, config.pad or "edge", config.pad_value, self._threads)
            item.is_filled = True
        rows = [row for row in range(len(item.samples)) if row not in errors]
        moves = [(array, target, row) for array in item.arrays for target, row in enumerate(rows) if target != row]
        for array, target, row in moves[item.moved :]:
            array[target] = array[row]
            item.moved += 1
        ready = None if self._stream is None else recorded(self._stream)
        assert item.lease is not None
        tensors: dict[str, Tensor] = {}
        offset = item.lease.offset
        for part in item.parts:
            shape = (len(rows), *part.kept)
            array = self._memory.array(offset, shape, part.element, lease=item.lease)
            tensors[part.name] = Tensor(array, part.dtype, ready, item.lease)
            offset += part.nbytes(config.batch_size)
        samples = tuple(item.samples[row] for row in rows)
        pointer = 0 if self._stream is None else int(self._stream.ptr)
        return Batch(tensors, samples, item.batch_id, pointer, item.all_errors(errors))

    def _end(self, item: InFlight) -> None:
        """Advance past a batch: free its staged crops after the work that is queued, and give up its lease."""
        self.progress = Progress(item.batch_id + 1, max(self.progress.position, item.end))
        self._producer.taken = None
        if item.stage[1]:
            if self._stream is not None:
                with on_stream(self._stream, self._memory.device_id):
                    self._producer.submitter.stage_free = recorded(self._stream)
            with self._producer.changed:
                self._memory.give_stages(item.batch_id)
                self._producer.changed.notify_all()
        item.arrays, item.lease, item.tickets = [], None, []


class Batches:
    """Iterator over `n` batches, or all; after an error it continues, first with the other samples of the same batch.

    `pop` is ``Pipeline.pop``: this bound method keeps the pipeline alive.
    """

    def __init__(self, producer: Producer, pop: Callable[[], Batch], n: int | None) -> None:
        self._producer, self._pop, self._remaining = producer, pop, n

    def __reduce__(self) -> NoReturn:
        raise not_pickled(self, "send the config and the samples of its pipeline")

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Batch:
        producer = self._producer
        while self._remaining != 0:
            producer.check_usable("batches")
            with producer.changed:
                idle, waiting = producer.is_idle, producer.waiting_samples
            if idle and not waiting:
                break
            if idle:
                producer.flush()
            try:
                batch = self._pop()
            except TryAgain:
                with producer.changed:
                    ended = producer.is_idle
                if ended:  # the iterable ended after the check above: a partial batch may remain
                    continue
                raise
            if self._remaining is not None:
                self._remaining -= 1
            return batch
        raise StopIteration
