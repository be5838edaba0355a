"""The two threads that pull samples and submit batches ahead, within lookahead and memory."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from linumpy.stream.batches.feed import Checked, Feed, Flush, Pulled, working_folder
from linumpy.stream.batches.memory import Memory, Stream
from linumpy.stream.batches.submitter import InFlight, Submitter
from linumpy.stream.config import Config, Sample
from linumpy.stream.errors import ArgumentTypeError, InvalidArgument, ShutdownError
from linumpy.stream.reading.arrays import Sources

if TYPE_CHECKING:
    from linumpy.gpu import Reader

#: How long a consumer waits for a turn of the first thread; a turn takes about a fifth of this time.
_TURN_SECONDS = 0.001
#: If so many more turns are late than half of the others, more batches are read ahead.
_LATE_TURNS = 4
#: How long `stop` waits for the threads to end.
_JOIN_SECONDS = 5.0


class Producer:
    """Fills :attr:`ready` with batches in flight, in order.

    The first thread pulls samples, requests their arrays, plans and submits. The second thread submits a batch whose
    arrays are still being opened, or for which no memory is free; meanwhile the first thread pulls the next samples, so
    that their arrays are opened ahead.

    A *turn* is the time from a wake-up of a thread, which must get the interpreter's lock, until the thread sleeps
    again. Most batches take one turn of one thread. Beside a busy Python thread each turn waits 5 ms for the lock. So
    after several late turns more batches are read ahead, as memory allows, and one turn submits many.

    `changed` guards the attributes that the consumer reads, and is notified when they change.
    """

    def __init__(self, config: Config, reader: Reader, memory: Memory, stream: Stream | None) -> None:
        self._config, self._memory, self._process = config, memory, os.getpid()
        self.sources = Sources(config)
        self.feed = Feed(config, self.sources.request)
        lock = threading.RLock()
        # A condition for each thread: an unnecessary wake-up costs a turn.
        self.changed, self._pulls, self._submits = (threading.Condition(lock) for _ in range(3))
        self.submitter = Submitter(config, reader, self.sources, memory, stream, self.changed)
        self.ready: deque[InFlight] = deque()  # batches whose reads were submitted
        self.taken: InFlight | None = None  # the batch that is being popped
        self.failure: BaseException | None = None  # the exception that ended a thread
        self.batch_id = 0  # number of the next batch that is pulled
        self._partial: list[Pulled] = []
        self._pulled: deque[InFlight] = deque()
        self._coming = 0  # number of batches that were pulled and are not in `ready` yet
        self._late_turns = 0.0  # late turns less half of the others, between 0 and twice `_LATE_TURNS`
        self._wake_up_time: float | None = None  # when the first thread was woken up for the turn that it has not begun
        self._pulling = self._submitting = self.closed = False
        self._threads = [
            threading.Thread(target=self._run, args=(step,), name=f"linumpy-stream-{name}", daemon=True)
            for name, step in (("pull", self._pull), ("submit", self._submit_next))
        ]
        for thread in self._threads:
            thread.start()

    def check_open(self) -> None:
        """Raise :class:`ShutdownError` if the pipeline is closed, or if another process made it."""
        if os.getpid() != self._process:
            raise ShutdownError("this pipeline was made by the parent of this process: make one here")
        if self.closed:
            raise ShutdownError("the pipeline is closed")

    def check_usable(self, name: str) -> None:
        """Raise as :meth:`check_open` does, and where a pushed iterable calls the method `name`, which waits for it."""
        self.check_open()
        if self.is_own_thread:
            raise InvalidArgument(f"an iterable that was pushed calls {name}, which waits for that iterable itself")

    def push(self, samples: Sample | Iterable[Sample]) -> None:
        """Append samples. A sample, a list or a tuple is checked here, other iterables when they are read.

        With ``on_error="skip"`` nothing is checked, since faulty samples are left out of their batches.
        """
        pushed: Iterable[Sample | Checked] = [samples] if isinstance(samples, Sample) else samples
        if self._config.on_error == "raise" and isinstance(pushed, (list, tuple)):
            pushed = self._checked(pushed)
        with self.changed:
            self.feed.push(pushed)
            self._wake_up()

    def _checked(self, samples: list[Sample] | tuple[Sample, ...]) -> list[Checked]:
        """Open the arrays of samples, and raise the error of the first sample that cannot be planned."""
        for sample in samples:
            if not isinstance(sample, Sample):
                raise ArgumentTypeError(
                    f"push takes Samples (got {type(sample).__name__} in a {type(samples).__name__})"
                )
        folder = working_folder()
        checked = [Checked(sample, self.sources.request(sample, folder)) for sample in samples]
        try:
            self.submitter.check(checked, is_first=not self.feed.was_pushed)
        except Exception:
            self.check_open()  # else the arrays could not be opened because the pipeline was closed
            raise
        return checked

    def flush(self) -> None:
        """End a batch after the samples that were pushed so far, even if it is not full."""
        with self.changed:
            self.feed.flush()
            self._wake_up()

    def pop(self) -> None:
        """Remove the first batch from :attr:`ready`, so that another is read; call it while holding :attr:`changed`."""
        self.ready.popleft()
        self._wake_up()

    def wait_for_turn(self) -> None:
        """Wait a moment if the first thread has missed a turn; call it while holding :attr:`changed`.

        A consumer whose batches were read ahead never blocks. The first thread then gets the interpreter's lock only
        when the interpreter switches threads. That is often while the consumer holds :attr:`changed`, so that the
        thread waits again. Where turns are late, the consumer too would get the lock back late: then it does not wait.
        """
        has_missed = self._may_pull and len(self.ready) + self._coming < self._config.lookahead_batches - 1
        if has_missed and not (self._late_turns or self.feed.is_in_iterable or self.is_own_thread):
            self.changed.wait(_TURN_SECONDS)

    def count_turn(self, seconds: float) -> None:
        """Count a turn, of a thread or of the consumer, that began `seconds` late.

        It is late if the interpreter's lock was had only when the interpreter switched threads.
        """
        change = 1 if seconds > 0.8 * sys.getswitchinterval() else -0.5
        with self.changed:
            self._late_turns = max(0, min(self._late_turns + change, 2 * _LATE_TURNS))
            if self._late_turns >= _LATE_TURNS and self.feed.is_sequence:
                self._memory.use_spare_slots()

    def _wake_up(self) -> None:
        """Wake up the threads that have work; call it while holding :attr:`changed`."""
        if self._may_pull and not self._pulling:
            self._wake_up_time = self._wake_up_time or time.perf_counter()
            self._pulls.notify()
        if self._pulled and not self._submitting:
            self._submits.notify()

    @property
    def waiting_samples(self) -> int:
        """Number of samples of a batch that is not full yet; read while holding :attr:`changed`."""
        return len(self._partial)

    @property
    def in_flight(self) -> int:
        """Number of batches that were pulled and not popped, with :attr:`taken`; read while holding :attr:`changed`."""
        is_taken = self.taken is not None and all(item is not self.taken for item in self.ready)
        return len(self.ready) + self._coming + is_taken

    @property
    def has_samples(self) -> bool | None:
        """Whether any sample, or the failure of a thread, is still to be popped; None while that is unknown.

        Read while holding :attr:`changed`.
        """
        if self.failure is not None or self.in_flight or self._partial:
            return True
        return None if self._pulling or self.feed.has_more else False

    @property
    def is_idle(self) -> bool:
        """Whether no batch will follow without another push or flush; read while holding :attr:`changed`."""
        return not (self.ready or self.taken or self._pulling or self._coming or self.feed.has_more)

    @property
    def is_settled(self) -> bool:
        """Whether no further batch will be submitted before another pop or push; read while holding :attr:`changed`."""
        submitter = self.submitter
        if self.failure is not None or submitter.starved_since is not None or submitter.waits_for_stage:
            return True
        return not self._pulling and not self._coming and not self._may_pull

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller is an iterable that was pushed, since iterables run in a thread of the producer."""
        return threading.current_thread() in self._threads

    @property
    def _may_pull(self) -> bool:
        reads_further = self._late_turns >= _LATE_TURNS and self.feed.is_sequence
        slots = self._memory.slots - 2 if reads_further else 0  # two are the consumer's
        return self.feed.has_more and len(self.ready) + self._coming < max(self._config.lookahead_batches, slots)

    def stop(self) -> None:
        """End the threads, and close :attr:`sources`; allowed any number of times."""
        with self.changed:
            is_first, self.closed = not self.closed, True
            self.submitter.closed = True
            for condition in (self.changed, self._pulls, self._submits):
                condition.notify_all()
        self._memory.stop()
        for thread in self._threads if is_first else ():
            if thread is not threading.current_thread():
                self._join(thread)
        self.sources.close()

    def _join(self, thread: threading.Thread) -> None:
        """Wait up to 5 s for the end of a thread; do not wait while the thread runs an iterable, which may block."""
        end = time.monotonic() + _JOIN_SECONDS
        while thread.is_alive() and time.monotonic() < end:
            thread.join(timeout=0.05)
            if thread is self._threads[0] and self.feed.is_in_iterable:
                return

    def cancel(self) -> None:
        """Cancel all batches in flight, and wait until no read writes to their memory."""
        items = [*self.ready, *filter(None, [self.taken])]
        self.ready.clear()
        self.taken = None
        for item in items:
            item.abandon()

    def _run(self, step: Callable[[], bool]) -> None:
        try:
            while step():
                pass
        except BaseException as error:  # raised by the next pop
            with self.changed:
                if not self.closed:
                    self.failure = error
                self.changed.notify_all()

    def _pull(self) -> bool:
        """Pull a batch when lookahead allows, and submit batches that need no wait; False after :meth:`stop`."""
        with self.changed:
            while not self.closed and not self._may_pull:
                self._pulls.wait()
            if self.closed:
                return False
            if self._wake_up_time is not None:
                self.count_turn(time.perf_counter() - self._wake_up_time)
                self._wake_up_time = None
            self._pulling = True
        batch = self._pull_batch()
        with self.changed:
            self._pulling = False
            if batch is not None:
                self._pulled.append(batch)
                self._coming += 1
            else:
                self.changed.notify_all()
        while self._submit_first(at_once=True):
            pass
        with self.changed:
            if self._pulled and not self._submitting:
                self._submits.notify()
        return True

    def _pull_batch(self) -> InFlight | None:
        """Pull until a batch is full or flushed, or the iterable raises; None where samples are missing.

        Samples of a batch that is not full yet stay in `_partial`.
        """
        while len(self._partial) < self._config.batch_size:
            try:
                pulled = self.feed.next()
            except BaseException as error:  # any exception of the iterable
                self.batch_id += 1
                return InFlight(self.batch_id - 1, [], error)
            if pulled is None or self.closed:
                return None
            if isinstance(pulled, Flush):
                if self._partial:
                    break
                return None
            self._partial.append(pulled)
        samples, self._partial = self._partial, []
        self.batch_id += 1
        return InFlight(self.batch_id - 1, samples)

    def _submit_next(self) -> bool:
        """Wait for a pulled batch, and submit it, waiting for arrays and memory; False after :meth:`stop`."""
        with self.changed:
            while not self.closed and (self._submitting or not self._pulled):
                self._submits.wait()
            if self.closed:
                return False
        self._submit_first(at_once=False)
        return True

    def _submit_first(self, *, at_once: bool) -> bool:
        """Submit the first pulled batch; False if another thread submits, or if `at_once` and the batch must wait."""
        with self.changed:
            if self._submitting or not self._pulled or self.closed:
                return False
            if at_once and not self.submitter.can_submit_at_once(self._pulled[0]):
                return False
            self._submitting = True
            item = self._pulled.popleft()
        self.submitter.submit(item)
        with self.changed:
            self._coming -= 1
            self._submitting = False
            self.ready.append(item)
            self.changed.notify_all()
            if self._pulled:
                self._submits.notify()
        return True
