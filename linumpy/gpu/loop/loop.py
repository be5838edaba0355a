"""The loop of a reader: one thread that reads, decodes and scatters what all jobs want.

In: requests. Out: settled tickets. An error of a chunk ends the jobs that want it and no other. Whatever happens, no
read is left under way and no output is written after its ticket is over.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from typing import Any, Protocol

from linumpy.gpu.loop.alone import SmallJobs
from linumpy.gpu.loop.carrier import Carrier, UncountedError
from linumpy.gpu.loop.jobs import Request, SmallJob
from linumpy.gpu.loop.limits import DECODE_AHEAD, STAGED_SLAB, Limits
from linumpy.gpu.loop.locate import IndexCache, locate
from linumpy.gpu.loop.report import ReadReport
from linumpy.gpu.loop.ticket import LoopLife, Together
from linumpy.gpu.loop.wave import Part, parts_of
from linumpy.gpu.loop.works import Cutter, Work
from linumpy.io.budget import PROCESS, Share
from linumpy.io.reads.call_thread import check_thread_memory

_log = logging.getLogger(__name__)

#: Slabs that are read while others are copied.
_READ_AHEAD = 2
#: Host memory that slabs pass through: those that the host decodes take the most.
_STAGED = (DECODE_AHEAD + 1) * STAGED_SLAB
#: Works of the host that wait while the device's are begun.
_WAITING = 32
#: Boxes that are carried out together, and that may wait.
WAVE_BOXES, QUEUED_BOXES = 2**17, 2**19
#: Seconds for which an idle reader keeps its share of what the process may use.
_PAUSE = 0.05
#: Seconds between two looks at decoders that are at work.
_GLANCE = 50e-6
#: Seconds between two looks of who waits to submit: the thread may have ended without a word.
_LOOK_AGAIN = 0.1


class Source(Protocol):
    """What is queued: gives requests, one after another."""

    def next_request(self) -> Request | None:
        """Return the next request; None where there is no further one."""

    def abandon(self, error: BaseException) -> None:
        """End the jobs whose requests were not made yet."""


class Loop:
    """Carries out requests.

    Parameters
    ----------
    make_staging : callable
        Makes the staging memory, in the loop's thread, from the bytes of host memory that it may take.
    limits : Limits
        Of slabs.
    context : callable
        Makes the context in which the thread runs: a device.
    describe : callable
        Makes the report of a job that is over: layout, conversion, events around kernels, what read, ticket.
    cache_nbytes : int
        Device memory for decoded chunks that are kept.
    timed : bool
        Whether the times of all slabs on the device are wanted.
    """

    def __init__(
        self,
        make_staging: Callable[[int], Any],
        limits: Limits,
        context: Callable[[], contextlib.AbstractContextManager[Any]],
        describe: Callable[..., ReadReport],
        cache_nbytes: int = 0,
        *,
        timed: bool = False,
    ) -> None:
        self._make_staging, self.limits, self._context, self._describe = make_staging, limits, context, describe
        self.indexes = IndexCache()
        self._cache_nbytes, self._timed = cache_nbytes, timed
        self.carrier: Carrier | None = None  # made by the thread
        self._small: SmallJobs | None = None
        # A with block of a lock gives it back whenever an interrupt comes to a caller; one of a condition may not.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._queue: deque[Source] = deque()
        self._queued_boxes = 0
        self._closing = False
        self._works: Iterator[Work] | None = None
        self._wave: list[Part] = []
        self._shares = contextlib.ExitStack()
        self._held = False
        self.counts: dict[str, float] = dict.fromkeys(
            ("jobs", "bytes_read", "chunks", "boxes", "slabs", "plan", "io", "place", "by_host", "host"), 0
        )
        self.life = LoopLife()
        self._thread = threading.Thread(target=self._run, name="linumpy-reader", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        check_thread_memory()
        self.life.lock.acquire()
        try:
            self._thread.start()
        except BaseException:
            self.life.lock.release()
            raise

    def submit(self, source: Source, boxes: int) -> None:
        """Queue requests; waits while too many boxes are queued."""
        with self._lock:
            while self._queued_boxes > QUEUED_BOXES and not self.is_closing:
                self._changed.wait(_LOOK_AGAIN)
            if self.is_closing:
                failure = self.life.failure
                why = "is closed" if failure is None else f"has ended with an error: {failure!r}"
                source.abandon(RuntimeError(f"the reader {why}"))
                return
            self._queue.append(source)
            self._queued_boxes += boxes
            self._changed.notify_all()

    @property
    def is_closing(self) -> bool:
        """Whether no further request is taken."""
        return self._closing or self.life.has_ended()

    def close(self) -> None:
        """Cancel what is queued, finish what is under way, and give everything back."""
        with self._lock:
            self._closing = True
            self._changed.notify_all()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        try:
            with self._context():
                self._open()
                try:
                    while self._step() or self._rest():
                        pass
                except BaseException as error:  # nobody waits for this thread: its jobs must learn of it
                    self._fail_everything(self._note_failure(error))
                    raise
                finally:
                    self._shut()
        except BaseException as error:
            failure = self._note_failure(error)
            # There may be no memory for any of this: then who waits learns it of `life`.
            with contextlib.suppress(BaseException):
                _log.error("the reader's thread ended", exc_info=failure)
            with contextlib.suppress(BaseException):
                self._fail_everything(failure)
        finally:
            self.life.lock.release()

    def _note_failure(self, error: BaseException) -> BaseException:
        """Note why the loop ends, for those whom nobody can tell any more; return it."""
        self._closing = True
        if self.life.failure is None:
            self.life.failure = (error.__cause__ or error) if isinstance(error, UncountedError) else error
        return self.life.failure

    def _open(self) -> None:
        staging = self._make_staging(_host_memory())
        self.carrier = Carrier(staging, self.limits, self._cache_nbytes, self._settle, self.counts, timed=self._timed)
        self._small = SmallJobs(self.carrier, self.indexes, self._describe, self.counts)

    def _shut(self) -> None:
        try:
            self._fail_everything(CancelledError("the reader was closed"))
        finally:  # nothing may read or write for a job any more when the thread ends, whatever was raised
            try:
                self._shares.close()
            finally:
                if self.carrier is not None:
                    self.carrier.close()

    @property
    def _under_way(self) -> Carrier:
        assert self.carrier is not None
        return self.carrier

    def _fail_everything(self, error: BaseException) -> None:
        with self._lock:
            self._closing = True
            queue, self._queue = list(self._queue), deque()
            self._changed.notify_all()
        if self.carrier is not None:  # kernels of jobs whose other requests are queued
            with contextlib.suppress(Exception):
                self.carrier.staging.await_queued()
        for source in queue:
            source.abandon(error)
        self._end_wave(error)

    # What there is to do

    def _step(self) -> bool:
        """Do one thing; False where there is nothing to do just now."""
        carrier = self._under_way
        carrier.look_at_decoders()
        if self._works is None and not (carrier.reading or carrier.again) and self._did_small_job():
            return True
        on_host = sum(work.by_host for work in carrier.reading)
        if carrier.again and carrier.may_begin(carrier.again[0]):
            carrier.begin(carrier.again.popleft())
            return True
        may_read = len(carrier.reading) - on_host < _READ_AHEAD and len(carrier.again) < _WAITING
        if may_read and (work := self._next_work()) is not None:
            if work.by_host:  # beside what the device decodes
                carrier.again.append(work)
            else:
                carrier.begin(work)
            return True
        if carrier.reading:
            carrier.complete(next(filter(_has_ended, carrier.reading), carrier.reading[0]))
            return True
        return False

    def _did_small_job(self) -> bool:
        """Carry out a small job that nothing else is queued beside."""
        with self._lock:
            if self._closing or len(self._queue) != 1 or not isinstance(job := self._queue[0], SmallJob):
                return False  # of several at a time chunks are shared, and read together
        assert self._small is not None
        done = False
        try:
            if not self._held:
                self._hold()
            done = self._small.carry_out(job)
        except Exception as error:
            _log.debug("a small job is carried out as others are: %r", error)
        finally:
            with self._lock:
                if done:
                    self._queue.popleft()
                    self._queued_boxes = max(0, self._queued_boxes - job.boxes)
                    self._changed.notify_all()
                else:
                    self._queue[0] = job.jobs
        return done

    def _rest(self) -> bool:
        """Wait until there is something to do; False where the loop is to end."""
        with self._lock:
            if self._queue and not self._closing:
                return True
            if self._under_way.decoding:
                self._changed.wait(_GLANCE)
                return True
            self._wave = []
            if self._closing:
                return False
            # What the process may use is given back after a while: a share costs as much as a small read.
            if not self._changed.wait(_PAUSE if self._held else None):
                self._shares.close()
                self._under_way.engines.rest()
                self._under_way.staging.rest()
                self._held = False
            return True

    def _next_work(self) -> Work | None:
        while True:
            if self._works is None and not self._begin_wave():
                return None
            if self._works is None:  # the requests could not be carried out; others may be queued
                continue
            try:
                work = next(self._works, None)
            except Exception as error:
                self._end_wave(error)
                continue
            if work is not None:
                return work
            self._works = None

    def _begin_wave(self) -> bool:
        """Bring together what is queued."""
        requests: list[Request] = []
        boxes = 0
        while boxes < min(WAVE_BOXES, self.limits.boxes) and not self._closing:
            with self._lock:
                if not self._queue:
                    break
                source = self._queue[0]
            try:
                request = source.next_request()
            except Exception as error:
                source.abandon(error)
                request = None
            with self._lock:
                if request is None:
                    if self._queue and self._queue[0] is source:
                        self._queue.popleft()
                    if not self._queue:  # also of sources that were abandoned
                        self._queued_boxes = 0
                        self._changed.notify_all()
                    continue
                boxes += request.count
                self._queued_boxes = max(0, self._queued_boxes - request.count)
                self._changed.notify_all()
            requests.append(request)
        if not requests:
            return False
        begin = time.perf_counter()
        carrier, parts = self._under_way, list[Part]()
        try:
            if not self._held:
                self._hold()
            parts = parts_of(requests, whole_chunks=carrier.cache is not None)
            self._wave = [part for part in self._wave if not part.is_over] + parts
            ready = {id(request.ready): request.ready for request in requests if request.ready is not None}
            carrier.staging.order_behind(list(ready.values()))
            spare = carrier.staging.spare_nbytes
            cutter = Cutter(parts, self.limits, carrier.chunks_in_flight, carrier.cache, spare)
            carrier.staging.prepare(cutter.device_nbytes, cutter.host_nbytes)
        except Exception as error:
            self._wave = [part for part in self._wave if part not in parts]
            self._refuse(requests, error)
            return True
        for part in parts:
            self._settle(part, part.without_boxes())
        engine = carrier.engines.batches
        assert engine is not None
        versions = {} if carrier.cache is None else {"versions": True}
        self._works = cutter.cut(lambda part: locate(part, engine, self.indexes, **versions), carrier.fail_spans)
        self.counts["plan"] += time.perf_counter() - begin
        self.counts["boxes"] += boxes
        return True

    def _refuse(self, requests: list[Request], error: BaseException) -> None:
        """End requests of which nothing has begun; jobs that have further ones are over with the last of them."""
        with contextlib.suppress(Exception):
            self._under_way.staging.await_queued()
        for request in requests:
            for ticket in request.tickets:
                ticket.fail(error)
                if ticket.end_request(Together()):
                    self.counts["jobs"] += 1
                    ticket.settle([], None)

    def _hold(self) -> None:
        """Take a share of what the process may use, until nothing is under way."""
        carrier = self._under_way
        most = Share(1 + 3 * 1024, carrier.staging.host_nbytes, self.limits.threads)
        with contextlib.ExitStack() as shares:  # given back where the engine cannot be made
            share = shares.enter_context(PROCESS.take(Share(4, 0, 1), most))
            carrier.engines.use(max(1, share.descriptors - self.limits.threads), _READ_AHEAD)
            self._shares = shares.pop_all()
        self._held = True

    # Ends

    def _end_wave(self, error: BaseException) -> None:
        """Fail all jobs that are under way, once nothing reads or writes for them any more."""
        self._works = None
        for part in self._wave:
            part.fail_all(error)
        if self.carrier is not None:
            self.carrier.abandon_all(error)
        for part in self._wave:
            self._settle(part, part.all_jobs())
        self._wave = []

    def _settle(self, part: Part, jobs: list[int]) -> None:
        """End jobs of a part that have nothing left to do."""
        engine_name = self._under_way.engines.name
        for mine in part.by_ticket(jobs):
            ticket, job = part.tickets[mine[0]], mine[0]
            ticket.count(part.counts_of(mine))
            ticket.portions -= len(mine) - 1
            if not ticket.end_request(part.together):
                continue
            done, ticket.together = ticket.together, []
            for one in done:
                ticket.count(one.counts)
            if failure := next((one.failure for one in done if one.failure), ""):
                engine_name = f"{engine_name}, failed reads by way of host memory: {failure}"
            events = [event for one in done for event in one.events.values()]
            if ticket.decide():  # its output must not be written any more
                with contextlib.suppress(Exception):
                    for event in events:
                        event.synchronize()
            self.counts["jobs"] += 1
            # Of a part no more than this: what a ticket refers to must not refer to its output.
            timings = part.together.timings if len(done) == 1 else [row for one in done for row in one.timings]
            layout = part.layout_of(job)
            describe = functools.partial(self._describe, layout, part.conversion, timings, engine_name)
            ticket.settle(events, describe)


def _has_ended(work: Work) -> bool:
    """Say whether all bytes of a work are there."""
    return bool(work.pending.done())


def _host_memory() -> int:
    """Bytes of host memory that one reader stages in at most."""
    return min(_STAGED, PROCESS.total().host_nbytes)
