"""The two threads that pull samples and submit batches ahead, within lookahead and memory."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from linumpy.stream.batches.feed import Feed, Flush
from linumpy.stream.batches.in_flight import InFlight, PulledBatch, Requested
from linumpy.stream.batches.memory import Memory
from linumpy.stream.batches.submitter import Submitter
from linumpy.stream.config import Config, Sample
from linumpy.stream.on_device import Stream
from linumpy.stream.reading.sources import Sources

if TYPE_CHECKING:
    from linumpy.gpu import Reader

#: How long a consumer waits for a turn of the first thread, which takes about a fifth of that.
_TURN_SECONDS = 0.001
#: How many pops do not wait for a turn, after one that took long to get Python's lock back.
_POPS_WITHOUT_WAIT = 16
#: How long the threads may take to end.
_JOIN_SECONDS = 5.0


class Producer:
    """Fills :attr:`ready` with batches in flight, in order.

    One thread pulls samples, requests their arrays, plans and submits. A batch whose arrays are still being opened, or
    for which no memory is free, is submitted by a second thread, while the first one pulls on: so arrays of the next
    batches are opened meanwhile. Most batches take one turn of one thread: beside a busy thread of Python each turn
    takes 5 ms.

    Parameters
    ----------
    config : Config
        The configuration.
    reader : linumpy.gpu.Reader
        Reads the crops.
    memory : Memory
        Memory of batches and staged crops; divided when the first sample is planned.
    stream : cupy.cuda.Stream or None
        The pipeline's stream; None without a GPU.

    Attributes
    ----------
    sources : Sources
        Opens arrays.
    feed : Feed
        Samples that were pushed.
    submitter : Submitter
        Plans and submits; one thread at a time calls it.
    changed : threading.Condition
        Guards and announces what consumers see.
    ready : deque of InFlight
        Batches whose reads were submitted.
    taken : InFlight or None
        The batch that is being popped.
    failure : BaseException or None
        What ended a thread.
    """

    def __init__(self, config: Config, reader: Reader, memory: Memory, stream: Stream | None) -> None:
        self._config, self._memory = config, memory
        self.sources, self.feed = Sources(config), Feed(config)
        lock = threading.RLock()
        # A condition for each thread: a needless wake-up costs a turn.
        self.changed, self._pulls, self._submits = (threading.Condition(lock) for _ in range(3))
        self.submitter = Submitter(config, reader, self.sources, memory, stream, self.changed)
        self.ready: deque[InFlight] = deque()
        self.taken: InFlight | None = None
        self.failure: BaseException | None = None
        self._partial: list[Requested] = []
        self._pulled: deque[PulledBatch] = deque()
        self._coming = 0  # batches that were pulled and are not in `ready` yet
        self._pops_without_wait = 0
        self._pulling = self._submitting = self._closed = False
        self._in_iterable = False  # the first thread runs code of the caller
        self._threads = [
            threading.Thread(target=self._run, args=(step,), name=f"linumpy-stream-{name}", daemon=True)
            for name, step in (("pull", self._pull), ("submit", self._submit_next))
        ]
        for thread in self._threads:
            thread.start()

    def push(self, samples: Sample | Iterable[Sample]) -> None:
        """Append samples to those that are read."""
        with self.changed:
            self.feed.push(samples)
            self._wake_up()

    def flush(self) -> None:
        """Let a partial batch be made of the last samples that were pushed so far."""
        with self.changed:
            self.feed.flush()
            self._wake_up()

    def pop(self) -> None:
        """Take the first batch that is ready, so that another one is read; called while holding :attr:`changed`."""
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
        """Wake the threads that have something to do; called while holding :attr:`changed`."""
        if self._may_pull and not self._pulling:
            self._pulls.notify()
        if self._pulled and not self._submitting:
            self._submits.notify()

    @property
    def waiting_samples(self) -> int:
        """Samples of a batch that is not full yet; read while holding :attr:`changed`."""
        return len(self._partial)

    @property
    def in_flight(self) -> int:
        """Batches that are read or are being submitted; read while holding :attr:`changed`."""
        is_taken = self.taken is not None and all(item is not self.taken for item in self.ready)
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
        submitter = self.submitter
        if self.failure is not None or submitter.starved_since is not None or submitter.waits_for_stage:
            return True
        return not self._pulling and not self._coming and not self._may_pull

    @property
    def is_own_thread(self) -> bool:
        """Whether the caller runs in a thread of the producer: it is an iterable that was pushed."""
        return threading.current_thread() in self._threads

    @property
    def _may_pull(self) -> bool:
        return self.feed.has_more and len(self.ready) + self._coming < self._config.lookahead_batches

    def stop(self) -> None:
        """End the threads; allowed any number of times."""
        with self.changed:
            is_first, self._closed = not self._closed, True
            self.submitter.close()
            for condition in (self.changed, self._pulls, self._submits):
                condition.notify_all()
        self._memory.stop()
        for thread in self._threads if is_first else ():
            if thread is not threading.current_thread():
                self._join(thread)
        self.sources.close()

    def _join(self, thread: threading.Thread) -> None:
        """Wait for the end of a thread; not while it runs an iterable, which may block for ever."""
        end = time.monotonic() + _JOIN_SECONDS
        while thread.is_alive() and time.monotonic() < end:
            thread.join(timeout=0.05)
            if thread is self._threads[0] and self._in_iterable:
                return

    def cancel(self) -> None:
        """Cancel all batches in flight, and wait until nothing is written any more."""
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
        batch = self._pulled_batch()
        with self.changed:
            self._pulling = False
            if batch is not None:
                self._pulled.append(batch)
                self._coming += 1
            else:
                self.changed.notify_all()
        while (first := self._claimed(at_once=True)) is not None:
            self._hand_over(self.submitter.submit(first))
        with self.changed:
            if self._pulled and not self._submitting:
                self._submits.notify()
        return True

    def _pulled_batch(self) -> PulledBatch | None:
        """Pull until a batch is full or flushed; None where samples are missing for one."""
        while len(self._partial) < self._config.batch_size:
            self._in_iterable = True
            try:
                pulled = self.feed.next()
            except BaseException as error:  # of the iterable that was pushed, whatever it is
                return PulledBatch([], error)
            finally:
                self._in_iterable = False
            if pulled is None or self._closed:
                return None
            if isinstance(pulled, Flush):
                if self._partial:
                    break
                return None
            self._partial.append((pulled, self.sources.request(pulled.sample, pulled.folder)))
        samples, self._partial = self._partial, []
        return PulledBatch(samples)

    def _submit_next(self) -> bool:
        """Plan and submit the next batch that was pulled, and wait for what it needs; False at the end."""
        with self.changed:
            while not self._closed and (self._submitting or not self._pulled):
                self._submits.wait()
            if self._closed:
                return False
        first = self._claimed(at_once=False)
        if first is not None:
            self._hand_over(self.submitter.submit(first))
        return True

    def _claimed(self, *, at_once: bool) -> PulledBatch | None:
        """Take the first batch that was pulled, if no other thread submits one, and it can be submitted `at_once`."""
        with self.changed:
            if self._submitting or not self._pulled or self._closed:
                return None
            if at_once and not self.submitter.can_submit_at_once(self._pulled[0]):
                return None
            self._submitting = True
            return self._pulled.popleft()

    def _hand_over(self, item: InFlight) -> None:
        with self.changed:
            self._coming -= 1
            self._submitting = False
            self.ready.append(item)
            self.changed.notify_all()
            if self._pulled:
                self._submits.notify()
