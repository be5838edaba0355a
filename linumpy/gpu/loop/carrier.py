"""Carry works through: start their reads or decoding, check what came, and queue the copies and kernels.

In: :class:`~linumpy.gpu.loop.works.Work` records. Out: finished spans of their parts. An error ends the jobs
that want a work and no other.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from linumpy.gpu.loop.cache import ChunkCache
from linumpy.gpu.loop.checks import lost_chunks, lost_reads
from linumpy.gpu.loop.clock import Clock
from linumpy.gpu.loop.host_decode import DecodePool, PendingDecodes
from linumpy.gpu.loop.limits import DECODE_AHEAD, LARGE_NBYTES, Limits
from linumpy.gpu.loop.wave import VERSION_COLUMNS, Part
from linumpy.gpu.loop.works import Work, buffer_nbytes, host_works, kind_of
from linumpy.gpu.staging.engines import Engines
from linumpy.io.reads.file_reads import FileReads
from linumpy.plan.decode.workspace import MARGIN
from linumpy.plan.read.ring import aligned


class UncountedError(BaseException):
    """What was done could not be counted, so that nobody knows any more which jobs are over: the loop must end.

    No ``Exception``, which would end the jobs of one work alone; made beforehand, since memory may have ended.
    """


_UNCOUNTED = UncountedError("what was read could not be counted")


class Carrier:
    """Works that are under way.

    Parameters
    ----------
    staging : DeviceStaging or HostStaging
        The memory that they pass through.
    limits : Limits
        Of slabs.
    cache_nbytes : int
        Device memory for decoded chunks that are kept.
    settle : callable
        Takes a part and its jobs that have nothing left to do.
    counts : dict
        Adds up what is done.
    timed : bool
        Whether the times of all slabs are wanted, beside those of jobs that ask for them.
    """

    def __init__(
        self,
        staging: Any,
        limits: Limits,
        cache_nbytes: int,
        settle: Callable[[Part, list[int]], None],
        counts: dict[str, float],
        *,
        timed: bool = False,
    ) -> None:
        self.staging, self.limits, self._settle, self._counts = staging, limits, settle, counts
        self.cache = ChunkCache(cache_nbytes, staging.allocate) if cache_nbytes and staging.on_device else None
        self.clock = Clock(staging.elapsed) if timed and staging.on_device else None
        self.engines = Engines(staging)
        self.pool = DecodePool(limits.threads)
        self.reading: deque[Work] = deque()
        self.decoding: deque[Work] = deque()
        self.again: deque[Work] = deque()  # to be begun when there is time for them

    def close(self) -> None:
        """Give everything back; nothing is under way any more."""
        with contextlib.ExitStack() as stack:  # each of them, also where another one raises
            for one in (self.staging, self.engines, self.pool):
                stack.callback(one.close)
        if self.cache is not None:  # no kernel uses it any more
            self.cache.close()

    def chunks_in_flight(self, kind: object) -> int:
        """Count the chunks of a kind that the device decodes, or will."""
        return sum(
            len(spans)
            for work in (*self.decoding, *self.reading)
            if work.kind == "device"
            for part, spans in work.rows
            if kind_of(part) == kind
        )

    def may_begin(self, work: Work) -> bool:
        """Say whether a work that waits may begin beside those that the host decodes."""
        kinds = [one.kind for one in self.reading]
        if work.kind == "large":
            chunk_nbytes = work.rows[0][0].layout.chunk_nbytes
            return kinds.count("large") < max(1, min(self.limits.threads, LARGE_NBYTES // chunk_nbytes))
        return work.kind != "host" or kinds.count("host") < DECODE_AHEAD

    def begin(self, work: Work) -> None:
        """Start the reads of a slab, or the decoding of chunks."""
        begin = time.perf_counter()
        try:
            self._start(work)
        except Exception as error:
            self.abandon(work, error)
        self._counts["io"] += time.perf_counter() - begin

    def _start(self, work: Work) -> None:
        if work.kind == "fill":
            for part, spans in work.rows:
                part.check_still_there(spans)
        if all(part.wanted_by_nobody() for part, _ in work.rows):
            self._finish(work, stored=False)
            return
        if work.kind == "large":
            (part, spans), *_ = work.rows
            work.buffer = np.empty(part.layout.chunk_nbytes, np.uint8)
            work.pending = self.pool.start(part, spans, np.array([work.buffer.ctypes.data]))
            self.reading.append(work)
            return
        self._plan_tables(work)
        assert work.plan is not None
        work.taken = self.take(self._host_nbytes(work) + work.plan.nbytes, direct=self._is_direct(work))
        base = (self.staging.read_address if self._is_direct(work) else self.staging.host_address)(work.taken)
        if work.kind in ("fill", "cached"):
            self._place(work)
            return
        if work.kind == "host":
            ((part, spans, place),) = work.sources()
            assert place is not None
            work.pending = self.pool.start(part, spans, base + place)
        else:
            base += MARGIN if work.kind == "device" else 0
            reads = _file_reads(work, base)
            work.pending = self.engines.start(reads, direct=self._is_direct(work), raw=work.kind == "raw")
        self.reading.append(work)

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

    def _plan_tables(self, work: Work, *, keeps: bool = True) -> None:
        """Plan the tables of a work, and whether its chunks are kept in the cache."""
        sources = work.sources()
        tables = [part.table(spans, place) for part, spans, place in sources]
        if keeps and self.cache is not None and work.kind in ("raw", "device", "host"):
            for part, spans, place in sources:
                slot = self.cache.reserve(part, spans) if self.cache.keeps(part) else np.full(len(spans), -1)
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

    def take(self, nbytes: int, *, direct: bool = False) -> Any:
        """Take staging memory, as soon as older slabs have been copied out of it."""
        staging = self.staging
        take, find_oldest = (
            (staging.take_read, staging.oldest_read) if direct else (staging.take_host, staging.oldest_host)
        )
        while (taken := take(nbytes)) is None:
            oldest = find_oldest()
            if oldest is None:
                raise MemoryError(f"a slab of {nbytes} bytes does not fit into {self.staging.host_nbytes} of staging")
            owner = next((work for work in self.reading if work.taken is oldest), None)
            if owner is None:
                self.staging.await_copied(oldest)
            else:
                while any(work is owner for work in self.reading):  # which completing another one may complete, too
                    self.complete(self.reading[0])
        return taken

    def complete(self, work: Work) -> None:
        """Wait for the oldest work's bytes, check them, and queue its kernels."""
        begin = time.perf_counter()
        try:
            lost = self._check_decodes(work) if work.by_host else self._check_reads(work)
            self.reading.remove(work)
            done = time.perf_counter()
            self._counts["io"] += done - begin
            if lost and not any(len(spans) for _, spans in work.rows):  # a kernel of no chunks cannot be started
                self.staging.await_copied(work.taken)
                self._drop_slots(work)
                return
            if work.kind == "large":
                if lost:
                    self._finish(work, stored=False)
                else:
                    self._place_large(work)
                self._counts["place"] += time.perf_counter() - done
                return
            if lost:  # the memory that was taken may be too small for tables of the cache that were not there before
                self._drop_slots(work)
                self._plan_tables(work, keeps=False)
            self._place(work)
            self._counts["place"] += time.perf_counter() - done
        except Exception as error:
            if work in self.reading:
                self.reading.remove(work)
            self.abandon(work, error)

    def _check_decodes(self, work: Work) -> bool:
        return lost_chunks(work, self._decoded(work, work.pending))

    def _decoded(self, work: Work, pending: PendingDecodes) -> list[Exception | None]:
        """Wait for chunks that the host decodes, and count what it did; return an error for each, or None."""
        errors = pending.wait()
        ((part, spans),) = work.rows
        part.together.host_seconds += pending.seconds
        part.together.files_opened += len(spans)
        self.engines.name = pending.name
        for name, count in (
            ("bytes_read", int(part.stored_nbytes[spans].sum())),
            ("by_host", len(spans)),
            ("host", pending.seconds),
        ):
            self._counts[name] += count
        return errors

    def _check_reads(self, work: Work) -> bool:
        """Check reads; what is missing is filled, what is broken fails its jobs. Returns whether anything was lost."""
        results = work.pending.wait()
        if work.pending.repeated:
            for part, _ in work.rows:
                part.together.note_repeated(work.pending.repeated, work.pending.failure)
        work.pending = None
        assert work.slab is not None
        self._counts["bytes_read"] += int(work.slab.nbytes.sum())
        lost = lost_reads(work, results)
        if lost is None:
            return False
        for part, spans in lost.broken:
            self.fail_spans(part, spans)
        self.again.extend(Work("fill", [row]) for row in lost.missing)
        return True

    def _place(self, work: Work) -> None:
        if not self._may_place(work):
            return
        timed, decoded_nbytes = work.timed or self.clock is not None, 0
        if work.kind == "device":
            assert work.slab is not None
            assert work.way is not None
            chunk_nbytes = work.rows[0][0].layout.chunk_nbytes
            decoded_nbytes = chunk_nbytes * len(work.slab.pieces)
            work.placed = self.staging.place_encoded(
                work.taken, work.slab, work.way, chunk_nbytes, work.plan, timed=timed
            )
        else:
            nbytes = self._host_nbytes(work)
            if work.kind == "cached":
                work.placed = self.staging.place(work.taken, 0, work.plan, timed=timed, in_place=True)
            else:
                place = self.staging.place_read if self._is_direct(work) else self.staging.place
                work.placed = place(work.taken, nbytes, work.plan, timed=timed)
        if self.clock is not None and work.placed is not None:
            self.clock.add(work.placed, decoded_nbytes)
        self._counts["slabs"] += 1
        self._note_placed(work)
        if work.kind == "device":
            self.decoding.append(work)
        else:
            self._finish(work, stored=work.kind != "fill")

    def _may_place(self, work: Work) -> bool:
        """Say whether there is memory for a chunk that does not fit the scratch; if not, the host decodes it."""
        slot = None if work.way is None else work.way.slot
        if slot is None or slot.nbytes <= self.limits.scratch_bytes:
            return True
        try:
            self.staging.hold(slot.nbytes + work.plan.nbytes if work.plan else slot.nbytes)
        except MemoryError:  # others have taken it since
            self.staging.await_copied(work.taken)
            self._drop_slots(work)
            for part, spans in work.rows:
                self.again.extend(host_works(part, spans, self.limits))
            return False
        return True

    @staticmethod
    def _note_placed(work: Work) -> None:
        assert work.placed is not None
        for part, _ in work.rows:
            if work.placed.event is not None:
                part.together.events[work.placed.stream] = work.placed.event
            if work.placed.timing is not None and work.timed:
                part.together.timings.append((work.kind, work.placed.timing))

    def _place_large(self, work: Work) -> None:
        """Scatter a decoded chunk that no slab holds, window after window."""
        (part, spans), buffer = work.rows[0], work.buffer
        assert buffer is not None
        for window in part.box_windows(int(spans[0]), self.limits.slab_nbytes - 16):
            plan = self.staging.plan_tables([part.window_table(int(spans[0]), window)])
            nbytes = aligned(window[1] - window[0])
            taken = self.take(nbytes + plan.nbytes)
            self.staging.host_view(taken)[: window[1] - window[0]] = buffer[window[0] : window[1]]
            work.placed = self.staging.place(taken, nbytes, plan, timed=work.timed)
            self._note_placed(work)
        self._finish(work, stored=True)

    def look_at_decoders(self) -> None:
        """Take in what the device's decoders said of slabs that are complete."""
        while self.decoding:
            work = self.decoding.popleft()
            assert work.placed is not None
            try:
                if not self.staging.is_complete(work.placed.event):
                    self.decoding.appendleft(work)
                    return
                self._take_in(work)
            except Exception as error:
                self.abandon(work, error)

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
                self.again.extend(host_works(part, spans[wrong], self.limits))
                work.rows[n] = (part, spans[~wrong])
        self._finish(work, stored=True)

    # Ends

    def _finish(self, work: Work, *, stored: bool) -> None:
        if work.slots and self.cache is not None:
            for (part, spans), slot in zip(work.rows, work.slots, strict=True):
                self.cache.keep(part, spans, slot)
        for part, spans in work.rows:
            self._counts["chunks"] += len(spans) if stored else 0
            self._count_done(part, spans, stored=stored, by_host=work.by_host)

    def _count_done(self, part: Part, spans: np.ndarray, *, stored: bool, by_host: bool = False) -> None:
        try:
            self._settle(part, part.finish(spans, stored=stored, by_host=by_host))
        except Exception as error:
            raise _UNCOUNTED from error

    def fail_spans(self, part: Part, spans: np.ndarray) -> None:
        """Count spans as done whose jobs know that they are broken."""
        self._count_done(part, spans, stored=False)

    def abandon(self, work: Work, error: BaseException) -> None:
        """Fail all jobs of a work that cannot go on."""
        try:
            self._abandon(work, error)
        except Exception as again:
            raise _UNCOUNTED from again

    def _abandon(self, work: Work, error: BaseException) -> None:
        if work.pending is not None:
            work.pending.abandon()
        with contextlib.suppress(Exception):  # what a device that has failed says of this, it has said already
            self.staging.await_queued()  # some of its kernels may have started, and write to outputs
            if work.taken is not None:
                self.staging.await_copied(work.taken)
        self._drop_slots(work)
        for part, spans in work.rows:
            part.fail(spans, error)
            self._count_done(part, spans, stored=False)

    def abandon_all(self, error: BaseException) -> None:
        """Give up all works, once nothing reads or writes for them any more."""
        while self.reading:
            self.abandon(self.reading.popleft(), error)
        with contextlib.suppress(Exception):  # a device that has failed waits for nothing
            self.staging.await_queued()
        for work in (*self.decoding, *self.again):
            self._drop_slots(work)
        self.decoding.clear()
        self.again.clear()


def _file_reads(work: Work, base: int) -> FileReads:
    slab = work.slab
    assert slab is not None
    assert work.file_of_read is not None
    paths: list[str] = []
    for part, numbers in work.files:
        paths += part.paths(numbers)
    versions = None
    if any(part.layout.shard is not None for part, _ in work.files):
        # Shards are read again and again, and stay open; chunks in files of their own are read once.
        versions = np.concatenate([
            part.versions[numbers] if part.layout.shard is not None else np.full((len(numbers), VERSION_COLUMNS), -1)
            for part, numbers in work.files
        ])  # fmt: skip
    return FileReads(paths, work.file_of_read, slab.offset, slab.nbytes, base + slab.place, versions=versions)
