"""Small regions that are submitted by themselves: one slab, read, decoded on the host and scattered in one go.

What a region of a few chunks takes is Python, not reading. So nothing is planned here that was planned for a region
that lies alike, and nothing is said of what went wrong: the loop then carries the job out as it does any other, which
finds the error again, or the chunks that are not stored.

In: a :class:`~linumpy.gpu.loop.jobs.SmallJob`. Out: its settled ticket; or False, and nothing was done.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np

from linumpy.gpu.loop.carrier import Carrier
from linumpy.gpu.loop.jobs import SmallJob
from linumpy.gpu.loop.limits import SLAB_ALIGN
from linumpy.gpu.loop.locate import IndexCache, kind_of_index
from linumpy.gpu.loop.ticket import JobCounts, Ticket, Together
from linumpy.gpu.loop.works import way_of
from linumpy.gpu.staging.tables import Placed, TablePlan
from linumpy.io.decode import decode_chunk
from linumpy.io.reads.file_reads import COLD_BATCHES, SLOW, SMALL_FILES, SMALL_NBYTES, NotCachedError, read_cached
from linumpy.io.reads.plain_reads import OPEN_FLAGS, Version, refusal, version
from linumpy.plan.codecs import DecodeChain
from linumpy.plan.layout import ArrayLayout
from linumpy.plan.read.alone import AlonePlan, ChunkSpan, first_object, plan_alone, within_object
from linumpy.plan.read.boxes import is_cut_whole
from linumpy.plan.read.ring import aligned
from linumpy.plan.read.scatter import ScatterTable

#: Chunks of a small region.
FEW_CHUNKS = 16
#: Decoded bytes of a chunk: the loop's thread does nothing else meanwhile.
_DECODED_NBYTES = 2**20
#: Plans that are kept.
_PLANS = 256
#: Outputs whose addresses leave the same remainder are written in units of the same width.
_UNIT = 16


class _Known(NamedTuple):
    """What regions that lie alike have in common: their plan, and tables whose output begins at a remainder."""

    plan: AlonePlan
    tables: TablePlan


class _UnusualError(Exception):
    """Something that the loop finds out again, and deals with."""


class SmallJobs:
    """Carries out small regions in the loop's thread, while nothing else is under way.

    Parameters
    ----------
    carrier : Carrier
        Whose staging memory and decoding threads are used.
    indexes : IndexCache
        Indexes of shards that were read before.
    describe : callable
        Makes the report of a job; see :class:`~linumpy.gpu.loop.loop.Loop`.
    counts : dict
        Adds up what is done.
    """

    def __init__(
        self, carrier: Carrier, indexes: IndexCache, describe: Callable[..., Any], counts: dict[str, float]
    ) -> None:
        self._carrier, self._indexes, self._describe, self._counts = carrier, indexes, describe, counts
        self._known: OrderedDict[tuple[Any, ...], _Known | None] = OrderedDict()
        self._read_seconds, self._cold = 0.0, 0  # of one job; jobs that are left to the threads that read
        self._decode_seconds = 0.0  # of one job

    def carry_out(self, job: SmallJob) -> bool:
        """Carry a job out, if that goes as it mostly does; False where nothing was done."""
        carrier, ticket = self._carrier, job.ticket
        if carrier.cache is not None or carrier.staging.direct or ticket.given_up:
            return False
        if self._cold:
            self._cold -= 1
            return False
        begin = time.perf_counter()
        first = first_object(job.layout, job.start)
        known = self._known_of(job, first)
        if known is None:
            return False
        staging, plan = carrier.staging, known.plan
        staging.order_behind([] if job.ready is None else [job.ready])
        nbytes = aligned(plan.nbytes)
        staging.prepare(nbytes + known.tables.nbytes, nbytes + known.tables.nbytes)
        planned = time.perf_counter()
        taken = carrier.take(nbytes + known.tables.nbytes)
        try:
            bytes_read = self._fill(job.layout, plan, first, staging.host_address(taken), staging.host_view(taken))
        except Exception as error:  # the loop meets it again, and names chunk and file
            taken.free = True
            self._cold = COLD_BATCHES if isinstance(error, NotCachedError) else 0
            return False
        self._cold = COLD_BATCHES if self._read_seconds > SLOW else 0  # a network: threads read side by side
        read = time.perf_counter()
        try:
            tables = known.tables.moved(job.address // _UNIT * _UNIT)
            placed = staging.place(taken, nbytes, tables, timed=ticket.timed or carrier.clock is not None)
        except Exception as error:
            with contextlib.suppress(Exception):  # its kernel may have started, and write to the output
                staging.await_queued()
                staging.await_copied(taken)
            self._fail(ticket, error)
            return True
        self._settle(job, plan, placed, bytes_read)
        self._indexes.hits += 0 if job.layout.shard is None else len(plan.objects)
        counts, end = self._counts, time.perf_counter()
        for name, number in (("jobs", 1), ("slabs", 1), ("chunks", len(plan)), ("boxes", len(plan))):
            counts[name] += number
        counts["bytes_read"] += bytes_read
        counts["host"] += self._decode_seconds
        counts["by_host"] += len(plan) if job.layout.chain is not None else 0
        counts["plan"] += planned - begin
        counts["io"] += read - planned
        counts["place"] += end - read
        return True

    def _known_of(self, job: SmallJob, first: tuple[int, ...]) -> _Known | None:
        layout = job.layout
        start, stop = (within_object(layout, first, bounds) for bounds in (job.start, job.stop))
        key = (layout.geometry, start, stop, job.strides, job.conversion.target_name, job.address % _UNIT)
        try:
            found = self._known[key]
        except KeyError:
            found = self._known[key] = self._plan(job, start, stop)
            if len(self._known) > _PLANS:
                self._known.popitem(last=False)
        return found

    def _plan(self, job: SmallJob, start: tuple[int, ...], stop: tuple[int, ...]) -> _Known | None:
        """Plan a region; None for one that is not carried out here."""
        layout, limits = job.layout, self._carrier.limits
        if not is_cut_whole(layout, limits.box_nbytes(layout.chunk_nbytes, raw=layout.chain is None)):
            return None
        if layout.chain is not None:
            way = way_of((layout.chain, layout.chunk_nbytes), job.boxes, limits)
            if way.slot is not None or layout.chunk_nbytes > _DECODED_NBYTES:
                return None
        plan = plan_alone(layout, start, stop, job.strides, SLAB_ALIGN)
        is_large = plan.nbytes > SMALL_NBYTES if layout.chain is None else plan.nbytes > limits.slab_nbytes
        if is_large or len(plan.objects) > SMALL_FILES:
            return None
        tables = self._carrier.staging.plan_tables([(job.conversion, _table(job, plan))])
        return _Known(plan, tables)

    def _fill(self, layout: ArrayLayout, plan: AlonePlan, first: tuple[int, ...], address: int, out: np.ndarray) -> int:
        """Read all chunks to `out`, which lies at an address, and decode them; return the stored bytes."""
        pending: list[Future[float]] = []
        seconds: list[float] = []
        self._read_seconds = 0.0

        def take(descriptor: int, span: ChunkSpan, offset: int, nbytes: int) -> None:
            if layout.chain is None:
                self._read(descriptor, address + span.place, nbytes, offset)
                return
            encoded = np.empty(nbytes, np.uint8)
            self._read(descriptor, int(encoded.ctypes.data), nbytes, offset)
            into = out[span.place : span.place + layout.chunk_nbytes]
            if len(plan) == 1:
                seconds.append(_timed_decode(layout.chain, encoded.data, into))
            else:
                pending.append(self._carrier.pool.submit(_timed_decode, layout.chain, encoded.data, into))

        prefix, separator = layout.chunk_path
        try:
            total = 0
            for coordinates, spans in plan.objects:
                path = prefix + separator.join([str(a + b) for a, b in zip(first, coordinates, strict=True)])
                total += self._read_object(layout, path, spans, take)
        finally:
            errors = [one.exception() for one in pending]  # waits for each: they write to staging memory
        for error in errors:
            if error is not None:
                raise error
        self._decode_seconds = sum(seconds) + sum(one.result() for one in pending)
        return total

    def _read_object(
        self,
        layout: ArrayLayout,
        path: str,
        spans: tuple[ChunkSpan, ...],
        take: Callable[[int, ChunkSpan, int, int], None],
    ) -> int:
        """Read what is wanted of one file, which nobody may change meanwhile; return the bytes."""
        descriptor, total = os.open(path, OPEN_FLAGS), 0
        try:
            before = version(os.fstat(descriptor))
            if refusal(before[3]):
                raise _UnusualError
            for span, offset, nbytes in self._stored(layout, path, before, spans):
                take(descriptor, span, offset, nbytes)
                total += nbytes
            if version(os.fstat(descriptor)) != before:
                raise _UnusualError
        finally:
            os.close(descriptor)
        return total

    def _stored(
        self, layout: ArrayLayout, path: str, found: Version, spans: tuple[ChunkSpan, ...]
    ) -> list[tuple[ChunkSpan, int, int]]:
        """Say where the bytes of chunks lie in an open file of this version: offset and number."""
        size = found[1]
        if layout.shard is None:
            (span,) = spans
            if layout.chain is not None:
                return [(span, 0, size)]
            if size != layout.chunk_nbytes:
                raise _UnusualError
            return [(span, span.offset, span.nbytes)]
        index = self._indexes.get(path, found[:3], kind_of_index(layout), counted=False)
        if index is None:
            raise _UnusualError
        rows = index[[span.inner for span in spans]].tolist()
        if any(offset < 0 for offset, _ in rows):
            raise _UnusualError
        if layout.chain is not None:
            return [(span, offset, nbytes) for span, (offset, nbytes) in zip(spans, rows, strict=True)]
        return [(span, offset + span.offset, span.nbytes) for span, (offset, _) in zip(spans, rows, strict=True)]

    def _read(self, descriptor: int, address: int, nbytes: int, offset: int) -> None:
        begin = time.perf_counter()
        if read_cached(descriptor, address, nbytes, offset) != nbytes:
            raise _UnusualError
        self._read_seconds += time.perf_counter() - begin

    def _settle(self, job: SmallJob, plan: AlonePlan, placed: Placed, bytes_read: int) -> None:
        ticket, layout = job.ticket, job.layout
        encoded = layout.chain is not None
        timings = []
        if placed.timing is not None and ticket.timed:
            timings.append(("host" if encoded else "raw", placed.timing))
        if self._carrier.clock is not None:
            self._carrier.clock.add(placed, 0)
        by_host, files = len(plan) if encoded else 0, len(plan.objects)
        ticket.count(JobCounts(len(plan), 0, by_host, bytes_read, files, host_seconds=self._decode_seconds))
        event = placed.event
        if ticket.decide() and event is not None:  # its output must not be written any more
            event.synchronize()
        engine = self._carrier.engines.batches
        name = "" if engine is None else engine.name
        describe = functools.partial(self._describe, layout, job.conversion, timings, name)
        ticket.portions -= 1
        ticket.settle([] if event is None else [event], describe)

    def _fail(self, ticket: Ticket, error: BaseException) -> None:
        ticket.fail(error)
        ticket.end_request(Together())
        self._counts["jobs"] += 1
        ticket.settle([], None)


def _timed_decode(chain: DecodeChain, encoded: memoryview, into: np.ndarray) -> float:
    """Decode a chunk, and return the seconds that it took."""
    begin = time.perf_counter()
    decode_chunk(chain, encoded, into)
    return time.perf_counter() - begin


def _table(job: SmallJob, plan: AlonePlan) -> ScatterTable:
    """Make the table of a region whose output begins at the remainder of its address."""
    conversion, shape = job.conversion, plan.geometry
    return ScatterTable(
        source_itemsize=conversion.source.itemsize,
        target_itemsize=conversion.target.itemsize,
        source_strides=shape.source_strides[None],
        target_strides=shape.target_strides,
        fill=conversion.fill_bytes(job.layout.fill_value)[None].copy(),
        source=plan.source,
        target=plan.boxes.target_offset + job.address % _UNIT,
        header=np.zeros(len(plan), np.int64),
        extent=shape.extent,
        widen=conversion.is_copy,
    )
