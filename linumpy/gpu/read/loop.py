"""The loop of a reader: one thread that reads, decodes and scatters what all jobs want.

In: requests. Out: settled tickets. An error of a chunk ends the jobs that want it and no other. Whatever happens, no
read is left under way and no output is written after its ticket is over.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from linumpy.device import kvikio_mode
from linumpy.errors import ChunkError
from linumpy.gpu.read.cache import ChunkCache
from linumpy.gpu.read.engines import LONG_READ_NBYTES, CuFileEngine
from linumpy.gpu.read.host_decode import DecodePool
from linumpy.gpu.read.jobs import Request
from linumpy.gpu.read.limits import DEPTH, STAGED_SLAB, Limits
from linumpy.gpu.read.locate import IndexCache, is_missing, locate
from linumpy.gpu.read.report import ReadReport
from linumpy.gpu.read.ticket import JobCounts, Together
from linumpy.gpu.read.wave import VERSION_COLUMNS, Part, parts_of
from linumpy.gpu.read.works import Cutter, Work, buffer_nbytes, host_works, kind_of
from linumpy.io.budget import PROCESS, Share
from linumpy.io.file_reads import FileReads, ReadEngine, ReadResults
from linumpy.plan.decode.workspace import MARGIN
from linumpy.plan.read.ring import aligned

_log = logging.getLogger(__name__)

#: Slabs that are read while others are copied; of those that the host decodes more, since each keeps few threads busy.
_READ_AHEAD, _DECODE_AHEAD = 2, 6
#: Host memory that slabs pass through: three of them, which stay in the processor's cache. A ring of 256 MiB, most of
#: which does not, halved the speed of raw chunks.
_STAGED = DEPTH * STAGED_SLAB + 2**22
#: Works of the host that wait while the device's are begun.
_WAITING = 32
#: Boxes that are carried out together, and that may wait.
WAVE_BOXES, QUEUED_BOXES = 2**17, 2**19
#: Seconds for which an idle reader keeps its share of what the process may use.
_PAUSE = 0.05
#: Seconds between two looks at decoders that are at work.
_GLANCE = 50e-6


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
    """

    def __init__(
        self,
        make_staging: Callable[[int], Any],
        limits: Limits,
        context: Callable[[], contextlib.AbstractContextManager[Any]],
        describe: Callable[..., ReadReport],
        cache_nbytes: int = 0,
    ) -> None:
        self._make_staging, self.limits, self._context, self._describe = make_staging, limits, context, describe
        self.indexes = IndexCache()
        self.cache: ChunkCache | None = None
        self._cache_nbytes = cache_nbytes
        self.engine: ReadEngine | None = None
        self.staging: Any = None
        self._direct_engine: Any = None
        self._long_engine: Any = None
        self._read_by = ""
        self._pool = DecodePool(limits.threads)
        self._changed = threading.Condition()
        self._queue: deque[Source] = deque()
        self._queued_boxes = 0
        self._closing = False
        self._works: Iterator[Work] | None = None
        self._wave: list[Part] = []
        self._reading: deque[Work] = deque()
        self._decoding: deque[Work] = deque()
        self._again: deque[Work] = deque()
        self._shares = contextlib.ExitStack()
        self._held, self._files = False, 0
        self.counts: dict[str, float] = dict.fromkeys(
            ("jobs", "bytes_read", "chunks", "boxes", "slabs", "plan", "io", "place"), 0
        )
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="linumpy-reader", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, source: Source, boxes: int) -> None:
        """Queue requests; waits while too many boxes are queued."""
        with self._changed:
            while self._queued_boxes > QUEUED_BOXES and not self._closing:
                self._changed.wait()
            if self._closing:
                why = "is closed" if self._failure is None else f"has ended with an error: {self._failure!r}"
                source.abandon(RuntimeError(f"the reader {why}"))
                return
            self._queue.append(source)
            self._queued_boxes += boxes
            self._changed.notify_all()

    @property
    def is_closing(self) -> bool:
        """Whether no further request is taken."""
        return self._closing

    def close(self) -> None:
        """Cancel what is queued, finish what is under way, and give everything back."""
        with self._changed:
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
                    self._fail_everything(error)
                    raise
                finally:
                    self._shut()
        except BaseException as error:
            self._failure = error
            _log.exception("the reader's thread ended")
            self._fail_everything(error)

    def _open(self) -> None:
        self.staging = self._make_staging(_host_memory())
        if self._cache_nbytes and self.staging.on_device:
            self.cache = ChunkCache(self._cache_nbytes, self.staging.allocate)
        if self.staging.direct:
            self._direct_engine = CuFileEngine(self.staging.read_view, direct=True)
        elif self.staging.on_device and kvikio_mode()[0] != "none":
            self._long_engine = CuFileEngine(self.staging.pinned_view, direct=False)

    @property
    def engine_name(self) -> str:
        """What reads files, for reports."""
        return self._read_by or "no file was read"

    def _shut(self) -> None:
        self._fail_everything(CancelledError("the reader was closed"))
        self._shares.close()
        self._rest_engines()
        self._pool.close()
        if self.engine is not None:
            self.engine.close()
        if self.staging is not None:
            self.staging.close()

    def _fail_everything(self, error: BaseException) -> None:
        with self._changed:
            self._closing = True
            queue, self._queue = list(self._queue), deque()
            self._changed.notify_all()
        if self.staging is not None:  # kernels of jobs whose other requests are queued
            with contextlib.suppress(Exception):
                self.staging.await_queued()
        for source in queue:
            source.abandon(error)
        self._end_wave(error)

    # What there is to do

    def _step(self) -> bool:
        """Do one thing; False where there is nothing to do just now."""
        self._look_at_decoders()
        on_host = sum(work.kind == "host" for work in self._reading)
        if self._again and (self._again[0].kind != "host" or on_host < _DECODE_AHEAD):
            self._begin(self._again.popleft())
            return True
        may_read = len(self._reading) - on_host < _READ_AHEAD and len(self._again) < _WAITING
        if may_read and (work := self._next_work()) is not None:
            if work.kind == "host":  # beside what the device decodes
                self._again.append(work)
            else:
                self._begin(work)
            return True
        if self._reading:
            self._complete(next(filter(_has_ended, self._reading), self._reading[0]))
            return True
        return False

    def _rest(self) -> bool:
        """Wait until there is something to do; False where the loop is to end."""
        with self._changed:
            if self._queue and not self._closing:
                return True
            if self._decoding:
                self._changed.wait(_GLANCE)
                return True
            self._wave = []
            if self._closing:
                return False
            # What the process may use is given back after a while: a share costs as much as a small read.
            if not self._changed.wait(_PAUSE if self._held else None):
                self._shares.close()
                self._rest_engines()
                self._held = False
            return True

    def _rest_engines(self) -> None:
        """Close files that are kept open, and put process-wide settings back that only reads need."""
        for engine in (self._direct_engine, self._long_engine, self.engine):
            if engine is not None:
                engine.rest()

    def _next_work(self) -> Work | None:
        while True:
            if self._works is None and not self._begin_wave():
                return None
            assert self._works is not None
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
            with self._changed:
                if not self._queue:
                    break
                source = self._queue[0]
            try:
                request = source.next_request()
            except Exception as error:
                source.abandon(error)
                request = None
            with self._changed:
                if request is None:
                    if self._queue and self._queue[0] is source:
                        self._queue.popleft()
                    continue
                boxes += request.count
                self._queued_boxes = max(0, self._queued_boxes - request.count)
                self._changed.notify_all()
            requests.append(request)
        if not requests:
            return False
        begin = time.perf_counter()
        if not self._held:
            self._hold()
        parts: list[Part] = []
        try:
            parts = parts_of(requests, whole_chunks=self.cache is not None)
            self._wave = [part for part in self._wave if not part.is_over] + parts
            self.staging.order_behind(list({id(r.ready): r.ready for r in requests if r.ready is not None}.values()))
            cutter = Cutter(parts, self.limits, self._chunks_in_flight, self.cache)
            self.staging.prepare(cutter.device_nbytes, cutter.host_nbytes)
        except Exception as error:
            self._wave = [part for part in self._wave if part not in parts]
            self._refuse(requests, error)
            return True
        for part in parts:
            self._settle(part, part.without_boxes())
        assert self.engine is not None
        engine = self.engine
        versions = {} if self.cache is None else {"versions": True}
        self._works = cutter.cut(lambda part: locate(part, engine, self.indexes, **versions), self._fail_spans)
        self.counts["plan"] += time.perf_counter() - begin
        self.counts["boxes"] += boxes
        return True

    def _refuse(self, requests: list[Request], error: BaseException) -> None:
        """End requests of which nothing has begun; jobs that have further ones are over with the last of them."""
        with contextlib.suppress(Exception):
            self.staging.await_queued()
        for request in requests:
            for ticket in request.tickets:
                ticket.fail(error)
                if ticket.end_request(Together()):
                    self.counts["jobs"] += 1
                    ticket.settle([], None)

    def _hold(self) -> None:
        """Take a share of what the process may use, until nothing is under way."""
        most = Share(1 + 3 * 1024, self.staging.host_nbytes, self.limits.threads)
        share = self._shares.enter_context(PROCESS.take(Share(4, 0, 1), most))
        self._held = True
        files = max(1, share.descriptors - self.limits.threads)
        if self.engine is None or not self._files // 2 <= files <= 2 * self._files:
            if self.engine is not None:
                self.engine.close()
            each = max(1, files // (_READ_AHEAD + 1))
            self.engine, self._files = ReadEngine(descriptors=each, kept_descriptors=each), files

    def _chunks_in_flight(self, kind: object) -> int:
        return sum(
            len(spans)
            for work in (*self._decoding, *self._reading)
            if work.kind == "device"
            for part, spans in work.rows
            if kind_of(part) == kind
        )

    # Works

    def _begin(self, work: Work) -> None:
        begin = time.perf_counter()
        try:
            self._start(work)
        except Exception as error:
            self._abandon(work, error)
        self.counts["io"] += time.perf_counter() - begin

    def _start(self, work: Work) -> None:
        """Start the reads of a slab, or the decoding of chunks."""
        if work.kind == "fill":
            for part, spans in work.rows:
                part.check_still_there(spans)
        if all(part.wanted_by_nobody() for part, _ in work.rows):
            self._finish(work, stored=False)
            return
        if work.kind == "large":
            self._place_large(work)
            return
        self._plan_tables(work)
        assert work.plan is not None
        work.taken = self._take(self._host_nbytes(work) + work.plan.nbytes, direct=self._is_direct(work))
        base = (self.staging.read_address if self._is_direct(work) else self.staging.host_address)(work.taken)
        if work.kind in ("fill", "cached"):
            self._place(work)
            return
        if work.kind == "host":
            ((part, spans, place),) = work.sources()
            assert place is not None
            work.pending = self._pool.start(part, spans, base + place)
        else:
            assert work.slab is not None
            assert self.engine is not None
            base += MARGIN if work.kind == "device" else 0
            engine = self._engine_of(work)
            self._read_by = engine.name
            work.pending = engine.start(_file_reads(work, base))
        self._reading.append(work)

    def _engine_of(self, work: Work) -> Any:
        """Choose what reads a slab."""
        assert work.slab is not None
        if self._is_direct(work):
            return self._direct_engine
        # Of encoded chunks decoding takes longer than reading: what kvikio takes to set up counts for more.
        is_long = work.kind == "raw" and float(work.slab.nbytes.mean()) > LONG_READ_NBYTES
        return self._long_engine if is_long and self._long_engine is not None else self.engine

    def _host_nbytes(self, work: Work) -> int:
        if work.kind in ("fill", "cached"):
            return 0
        if work.kind == "host":
            part, spans = work.rows[0]
            return aligned(len(spans) * buffer_nbytes(part.layout.chunk_nbytes))
        assert work.slab is not None
        if work.kind == "device":
            return int(self.staging.encoded_nbytes(work.way, work.slab))
        return aligned(work.slab.end)

    def _plan_tables(self, work: Work) -> None:
        sources = work.sources()
        tables = [part.table(spans, place) for part, spans, place in sources]
        if self.cache is not None and work.kind in ("raw", "device", "host"):
            self._drop_slots(work)
            for part, spans, place in sources:
                slot = self.cache.reserve(part, spans) if self.cache.keeps(part) else np.full(len(spans), -1)
                if work.broken is not None:
                    self.cache.drop(part, slot[work.broken])
                    slot[work.broken] = -1
                work.slots.append(slot)
                assert place is not None
                if (slot >= 0).any():
                    tables.append(self.cache.table(part, slot, place))
        work.plan = self.staging.plan_tables(tables, writes_cache=len(tables) > len(sources))

    def _drop_slots(self, work: Work) -> None:
        """Give back the places in the cache that a work does not fill after all."""
        if self.cache is not None:
            for (part, _), slot in zip(work.rows, work.slots, strict=False):
                self.cache.drop(part, slot)
            work.slots = []

    def _is_direct(self, work: Work) -> bool:
        return bool(self.staging.direct) and work.kind in ("raw", "device")

    def _take(self, nbytes: int, *, direct: bool = False) -> Any:
        """Take staging memory, as soon as older slabs have been copied out of it."""
        staging = self.staging
        take, find_oldest = (
            (staging.take_read, staging.oldest_read) if direct else (staging.take_host, staging.oldest_host)
        )
        while (taken := take(nbytes)) is None:
            oldest = find_oldest()
            if oldest is None:
                raise MemoryError(f"a slab of {nbytes} bytes does not fit into {self.staging.host_nbytes} of staging")
            owner = next((work for work in self._reading if work.taken is oldest), None)
            if owner is None:
                self.staging.await_copied(oldest)
            else:
                while self._reading and self._reading[0] is not owner:
                    self._complete(self._reading[0])
                self._complete(owner)
        return taken

    def _complete(self, work: Work) -> None:
        """Wait for the oldest work's bytes, check them, and queue its kernels."""
        begin = time.perf_counter()
        try:
            lost = self._lost_chunks(work) if work.kind == "host" else self._lost_reads(work)
            self._reading.remove(work)
            done = time.perf_counter()
            self.counts["io"] += done - begin
            if lost and not any(len(spans) for _, spans in work.rows):  # a kernel of no chunks cannot be started
                self.staging.await_copied(work.taken)
                self._drop_slots(work)
                return
            if lost:
                self._plan_tables(work)
            self._place(work)
            self.counts["place"] += time.perf_counter() - done
        except Exception as error:
            if work in self._reading:
                self._reading.remove(work)
            self._abandon(work, error)

    def _place(self, work: Work) -> None:
        if work.kind == "device":
            assert work.slab is not None
            assert work.way is not None
            chunk_nbytes = work.rows[0][0].layout.chunk_nbytes
            work.placed = self.staging.place_encoded(
                work.taken, work.slab, work.way, chunk_nbytes, work.plan, timed=work.timed
            )
        else:
            nbytes = self._host_nbytes(work)
            if work.kind == "cached":
                work.placed = self.staging.place(work.taken, 0, work.plan, timed=work.timed, in_place=True)
            else:
                place = self.staging.place_read if self._is_direct(work) else self.staging.place
                work.placed = place(work.taken, nbytes, work.plan, timed=work.timed)
        self.counts["slabs"] += 1
        self._note_placed(work)
        if work.kind == "device":
            self._decoding.append(work)
        else:
            self._finish(work, stored=work.kind != "fill")

    @staticmethod
    def _note_placed(work: Work) -> None:
        assert work.placed is not None
        for part, _ in work.rows:
            if work.placed.event is not None:
                part.together.events[work.placed.stream] = work.placed.event
            if work.placed.timing is not None:
                part.together.timings.append((work.kind, work.placed.timing))

    def _place_large(self, work: Work) -> None:
        """Decode a chunk that no slab holds, and scatter it window after window."""
        (part, spans), *_ = work.rows
        buffer = np.empty(part.layout.chunk_nbytes, np.uint8)
        (error,) = self._pool.start(part, spans, np.array([buffer.ctypes.data])).wait()
        if error is not None:
            part.fail(spans, error)
            self._finish(work, stored=False)
            return
        for window in part.box_windows(int(spans[0]), self.limits.slab_nbytes - 16):
            plan = self.staging.plan_tables([part.window_table(int(spans[0]), window)])
            nbytes = aligned(window[1] - window[0])
            taken = self._take(nbytes + plan.nbytes)
            self.staging.host_view(taken)[: window[1] - window[0]] = buffer[window[0] : window[1]]
            work.placed = self.staging.place(taken, nbytes, plan, timed=work.timed)
            self._note_placed(work)
        self._finish(work, stored=True)

    def _look_at_decoders(self) -> None:
        """Take in what the device's decoders said of slabs that are complete."""
        while self._decoding:
            work = self._decoding[0]
            assert work.placed is not None
            if not work.placed.event.done:
                return
            self._decoding.popleft()
            try:
                self._take_in(work)
            except Exception as error:
                self._abandon(work, error)

    def _take_in(self, work: Work) -> None:
        assert work.placed is not None
        status = work.placed.status
        assert status is not None
        count = 0
        for n, (part, spans) in enumerate(work.rows):
            wrong = status[count : count + len(spans)] != 0
            count += len(spans)
            if wrong.any():  # the host decodes it, or says why nobody can
                if work.slots and self.cache is not None:
                    self.cache.drop(part, work.slots[n][wrong])
                    work.slots[n] = work.slots[n][~wrong]
                self._again.extend(host_works(part, spans[wrong], self.limits))
                work.rows[n] = (part, spans[~wrong])
        self._finish(work, stored=True)

    # Checks

    def _lost_reads(self, work: Work) -> bool:
        """Check reads; what is missing is filled, what is broken fails its jobs. Returns whether anything was lost."""
        results: ReadResults = work.pending.wait()
        slab, work.pending = work.slab, None
        assert slab is not None
        assert work.file_of_read is not None
        got = results.nbytes
        wrong = (results.opened < 0) | (results.before[:, :3] != results.after[:, :3]).any(axis=1)
        begin = 0
        for part, numbers in work.files:
            mine = slice(begin, begin + len(numbers))
            begin += len(numbers)
            part.together.files_opened += int((results.opened[mine] >= 0).sum())
            wrong[mine] |= _other_files(part, numbers, results.before[mine], wrong[mine])
        bad_reads = got != slab.nbytes
        if wrong.any():
            bad_reads |= wrong[work.file_of_read]
        self.counts["bytes_read"] += int(slab.nbytes.sum())
        if not bad_reads.any():
            return False
        self._sort_out(work, results, bad_reads)
        return True

    def _sort_out(
        self,
        work: Work,
        results: ReadResults,
        bad_reads: np.ndarray,
    ) -> None:
        """Part what is broken from what is not stored, and both from the rest."""
        slab, file = work.slab, work.file_of_read
        assert slab is not None
        assert file is not None
        files = [(part, int(number)) for part, numbers in work.files for number in numbers]
        read = np.searchsorted(slab.place, slab.piece_place, side="right") - 1
        verdict: dict[int, BaseException | None] = {}
        for row in np.flatnonzero(bad_reads).tolist():
            part, number = files[file[row]]
            verdict[row] = _why(part, number, results, int(file[row]), row, int(slab.nbytes[row]))
        keep = ~bad_reads[read]
        count = 0
        for n, (part, spans) in enumerate(work.rows):
            mine = slice(count, count + len(spans))
            count += len(spans)
            missing = np.array([row in verdict and verdict[row] is None for row in read[mine].tolist()], bool)
            for row in np.unique(read[mine][~keep[mine]]).tolist():
                if (error := verdict[row]) is not None:
                    some = spans[read[mine] == row]
                    part.fail(some, error)
                    self._settle(part, part.finish(some, stored=False))
            if missing.any():
                self._again.append(Work("fill", [(part, spans[missing])]))
            work.rows[n] = (part, spans[keep[mine]])
        work.slab = _kept(slab, keep)

    def _lost_chunks(self, work: Work) -> bool:
        """Check chunks that the host decoded."""
        errors = work.pending.wait()
        if not any(errors):
            return False
        ((part, spans),) = work.rows
        for span, error in zip(spans.tolist(), errors, strict=True):
            if error is not None:
                part.fail(np.array([span]), error)
        # Their buffers hold anything. The jobs that want them have failed; nobody else gets anything of them.
        work.broken = np.array([error is not None for error in errors], bool)
        return True

    # Ends

    def _finish(self, work: Work, *, stored: bool) -> None:
        by_host = work.kind in ("host", "large")
        if work.slots and self.cache is not None:
            for (part, spans), slot in zip(work.rows, work.slots, strict=True):
                self.cache.keep(part, spans, slot)
        for part, spans in work.rows:
            self.counts["chunks"] += len(spans) if stored else 0
            self._settle(part, part.finish(spans, stored=stored, by_host=by_host))

    def _fail_spans(self, part: Part, spans: np.ndarray) -> None:
        """Count spans as done whose jobs know that they are broken."""
        self._settle(part, part.finish(spans, stored=False))

    def _abandon(self, work: Work, error: BaseException) -> None:
        """Fail all jobs of a work that cannot go on."""
        if work.pending is not None:
            work.pending.abandon()
        with contextlib.suppress(Exception):  # what a device that has failed says of this, it has said already
            self.staging.await_queued()  # some of its kernels may have started, and write to outputs
            if work.taken is not None:
                self.staging.await_copied(work.taken)
        self._drop_slots(work)
        for part, spans in work.rows:
            part.fail(spans, error)
            self._settle(part, part.finish(spans, stored=False))

    def _end_wave(self, error: BaseException) -> None:
        """Fail all jobs that are under way, once nothing reads or writes for them any more."""
        self._works = None
        for part in self._wave:
            part.fail_all(error)
        while self._reading:
            work = self._reading.popleft()
            self._abandon(work, error)
        with contextlib.suppress(Exception):  # a device that has failed waits for nothing
            self.staging.await_queued()
        for work in (*self._decoding, *self._again):
            self._drop_slots(work)
        self._decoding.clear()
        self._again.clear()
        for part in self._wave:
            self._settle(part, part.all_jobs())
        self._wave = []

    def _settle(self, part: Part, jobs: list[int]) -> None:
        for job in jobs:
            ticket = part.tickets[job]
            ticket.count(part.counts_of(job))
            if not ticket.end_request(part.together):
                continue
            done, ticket.together = ticket.together, []
            for one in done:
                ticket.count(JobCounts(bytes_read=one.index_nbytes, files_opened=one.files_opened))
            events = [event for one in done for event in one.events.values()]
            if ticket.failed or ticket.cancelled:  # its output must not be written any more
                with contextlib.suppress(Exception):
                    for event in events:
                        event.synchronize()
            self.counts["jobs"] += 1
            # Of a part no more than this: what a ticket refers to must not refer to its output.
            timings = part.together.timings if len(done) == 1 else [row for one in done for row in one.timings]
            layout = part.layout_of(job)
            describe = functools.partial(self._describe, layout, part.conversion, timings, self.engine_name)
            ticket.settle(events, describe)


def _has_ended(work: Work) -> bool:
    """Say whether all bytes of a work are there."""
    return bool(work.pending.done())


def _other_files(part: Part, numbers: np.ndarray, found: np.ndarray, failed: np.ndarray) -> np.ndarray:
    """Say which files are not those that were looked at before, or have a size that a raw chunk cannot have."""
    size = part.file_nbytes
    if size is not None and part.by_chunk:  # read once, and not looked at before
        return found[:, 1] != size
    expected = part.versions[numbers]
    known = expected[:, 1] >= 0
    wrong = known & (found[:, :3] != expected).any(axis=1)
    if size is not None:
        wrong |= found[:, 1] != size
    # Several slabs may read parts of a file: all of them must find the same one.
    new = numbers[~known & ~wrong & ~failed]
    part.versions[new] = found[~known & ~wrong & ~failed, :3]
    return wrong


def _why(part: Part, number: int, results: ReadResults, file: int, row: int, wanted: int) -> BaseException | None:
    """Say why a read failed; None where its chunk is not stored."""
    opened, got, name = int(results.opened[file]), int(results.nbytes[row]), part.object_name(number)
    known = bool(part.versions[number, 1] >= 0)
    if opened < 0:
        if not known and is_missing(part.paths(np.array([number]))[0]):
            return None
        return ChunkError(f"{name} cannot be opened: {os.strerror(-opened)}")
    before, after = results.before[file], results.after[file]
    if (before[3] & 0o170000) != stat.S_IFREG:
        return ChunkError(f"{name} cannot be read: it is no file")
    size, layout = part.file_nbytes, part.layout
    if size is not None and before[1] != size:
        return ChunkError(
            f"{name} has {before[1]} bytes, but a raw chunk of {layout.dtype} {layout.chunk_shape} has {size}"
        )
    if known and (before[:3] != part.versions[number]).any():
        return part.replaced(number, int(before[1]))
    if (before[:3] != after[:3]).any():
        part.versions[number] = before[:3]
        return part.replaced(number, int(after[1]))
    if got < 0:
        return ChunkError(f"{name} cannot be read: {os.strerror(-got)}")
    return ChunkError(f"{name}: {got} of {wanted} bytes could be read")


def _kept(slab: Any, keep: np.ndarray) -> Any:
    """Leave out spans that were not read; the reads stay, since their memory does."""
    return replace(
        slab, pieces=slab.pieces[keep], piece_place=slab.piece_place[keep], piece_nbytes=slab.piece_nbytes[keep]
    )


def _file_reads(work: Work, base: int) -> FileReads:
    slab = work.slab
    assert slab is not None
    assert work.file_of_read is not None
    paths: list[str] = []
    for part, numbers in work.files:
        paths += part.paths(numbers)
    # Shards are read again and again, and stay open; chunks in files of their own are read once.
    versions = [
        part.versions[numbers] if part.layout.shard is not None else np.full((len(numbers), VERSION_COLUMNS), -1)
        for part, numbers in work.files
    ]
    return FileReads(
        paths, work.file_of_read, slab.offset, slab.nbytes, base + slab.place, versions=np.concatenate(versions)
    )


def _host_memory() -> int:
    """Bytes of host memory that one reader stages in at most."""
    return min(_STAGED, PROCESS.total().host_nbytes)
