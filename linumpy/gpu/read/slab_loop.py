"""Carry out a job: read slab after slab, place it, fill what is not stored.

In: a job, slots, an engine. Out: bytes in the result. Errors: :class:`~linumpy.errors.ChunkError`; whatever happens, no
read is left under way and no file open. What is on the device and what is not is the slots' business: this loop runs
on the CPU too.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np

from linumpy.errors import ChunkError
from linumpy.gpu.read import host_decode
from linumpy.gpu.read.engines import Engine, File, Pending
from linumpy.gpu.read.host_decode import HostSlots
from linumpy.gpu.read.job import Job, file_version
from linumpy.gpu.read.locate import is_missing, locate
from linumpy.gpu.read.staging import Slots
from linumpy.plan.read.scatter import ScatterTable
from linumpy.plan.read.slabs import MAX_PIECES, Slab, pack


def run(job: Job, slots: Slots, engine: Engine) -> None:
    """Read all pieces of a job and place them; its counts are kept."""
    pending: deque[_InFlight] = deque()
    missing: list[np.ndarray] = []
    lost: set[int] = set()
    with job.reading(engine.descriptors_per_file), engine:
        engine.descriptors_per_slab = job.slab_descriptors
        try:
            for order, slab in enumerate(slabs(job, missing)):
                if len(pending) == max(1, job.depth - 1):
                    lost |= _complete_first(pending, slots)
                pending.append(_InFlight(job, slab, order % job.depth))
                pending[-1].start(slots, engine)
            while pending:
                lost |= _complete_first(pending, slots)
            missing.append(np.flatnonzero(np.isin(job.number, list(lost))))
            _fill(job, slots.fill, missing)
        finally:
            # After an error reads may still be writing into the buffers: wait for them, then let go.
            for in_flight in pending:
                in_flight.abandon()
            slots.finish()


def run_all_on_host(job: Job, slots: HostSlots) -> None:
    """Do the same for a job whose chunks the host decodes."""
    missing: list[np.ndarray] = []

    def stored() -> Iterator[np.ndarray]:
        for spans, absent in locate(job):
            missing.append(absent)
            yield spans.piece

    run_on_host(job, slots, stored())
    _fill(job, slots.fill, missing)


def run_on_host(job: Job, slots: HostSlots, rows: Iterable[np.ndarray]) -> None:
    """Decode the chunks of pieces on the host, and place them."""
    try:
        host_decode.run(job, slots, rows)
    finally:
        slots.finish()


def slabs(job: Job, missing: list[np.ndarray]) -> Iterator[Slab]:
    """Pack what is stored; the rest is noted. An encoded chunk that no slab holds is left to the host."""
    if job.way is None or job.way.slot is None:
        for spans, absent in locate(job):
            missing.append(absent)
            yield from pack(spans, job.limits)
        return
    rest = None
    for spans, absent in locate(job):
        missing.append(absent)
        spans = replace(spans, weight=job.way.slot.weights(spans.nbytes))
        long = spans.nbytes > job.limits.largest_piece
        long |= spans.nbytes + spans.weight > job.limits.capacity
        job.counts.too_long = np.concatenate([job.counts.too_long, spans.piece[long]])
        spans = spans.take(~long) if rest is None else rest.joined(spans.take(~long))
        packed = list(pack(spans, job.limits))
        yield from packed[:-1]
        # The last slab is filled up from what is found next.
        rest = spans.take(slice(len(spans) - len(packed[-1].pieces), None)) if packed else None
    if rest is not None:
        yield from pack(rest, job.limits)


def _complete_first(pending: deque[_InFlight], slots: Slots) -> set[int]:
    """Complete the oldest slab. It leaves the queue last, so that an interrupt finds it there to be waited for."""
    lost = pending[0].complete(slots)
    pending.popleft()
    return lost


def _check_still_there(job: Job) -> None:
    """Tell chunks that were never written from an array that has gone: a disk unmounted, a folder moved."""
    root = job.plan.layout.root
    name = "zarr.json" if job.plan.layout.zarr_format == 3 else ".zarray"
    if not os.path.exists(f"{root}/{name}"):
        raise ChunkError(f"chunks of {job.plan.layout.name} are missing, and so is {root}/{name}: is the folder gone?")


class _InFlight:
    """A slab whose reads are under way, with the files they read from."""

    def __init__(self, job: Job, slab: Slab, slot: int) -> None:
        self._job, self._slab, self._slot = job, slab, slot
        self._size = job.file_nbytes
        # A raw chunk in several pieces may be opened for several slabs, all of which must find the same file.
        self._noted = self._size is not None and len(job.pieces) > len(job.objects)
        self._files: list[File] = []
        self._opened: list[int] = []
        self._reads: Pending | None = None
        self._lost: set[int] = set()

    def start(self, slots: Slots, engine: Engine) -> None:
        """Open the files and start all reads; a file that is not there is a missing chunk."""
        slab = self._slab
        slots.wait(self._slot)
        # This loop runs once a chunk, and with small chunks it is what the whole read takes: everything that can be
        # made for all chunks at once is made before it.
        opened, file, files = -1, None, []
        for number, path in zip(slab.object.tolist(), self._job.paths(slab.object), strict=True):
            if number != opened:
                file, opened = self._open(number, path, engine), number
            files.append(file)
        self._job.counts.files_opened += len(self._files)
        self._reads = engine.start(files, slab, slots, self._slot)

    def _open(self, number: int, path: str, engine: Engine) -> File | None:
        try:
            file = engine.open(path)
        except Exception as error:
            if is_missing(path) and number not in self._job.versions:
                self._lost.add(number)
                return None
            raise ChunkError(f"{self._job.object_name(number)} cannot be opened: {error}") from error
        self._files.append(file)
        self._opened.append(number)
        found = os.fstat(file.fileno())
        if self._size is not None and found.st_size != self._size:
            layout = self._job.plan.layout
            raise ChunkError(
                f"{self._job.object_name(number)} has {found.st_size} bytes, but a raw chunk of {layout.dtype} "
                f"{layout.chunk_shape} has {self._size}"
            )
        if self._noted:
            self._job.versions.setdefault(number, file_version(found))
        self._job.check_version(number, found)
        return file

    def _check_versions(self) -> None:
        """Notice a file that was written after it had been opened."""
        if self._job.versions:
            for number, file in zip(self._opened, self._files, strict=True):
                self._job.check_version(number, os.fstat(file.fileno()))

    def complete(self, slots: Slots) -> set[int]:
        """Wait for the reads, close the files, place the slab; return the objects that were missing."""
        results = self._settle()
        self._job.counts.reads += len(results)
        rows = zip(self._slab.object.tolist(), self._slab.nbytes.tolist(), results, strict=True)
        for number, nbytes, result in rows:
            if result != nbytes and number not in self._lost:
                raise self._failure(number, nbytes, result)
            self._job.counts.bytes_read += 0 if number in self._lost else nbytes
        self._check_versions()
        self._close()
        self._place(slots)
        return self._lost

    def _place(self, slots: Slots) -> None:
        slab = self._slab
        if self._lost:
            lost = list(self._lost)
            slab = slab.keep(~np.isin(slab.object, lost), ~np.isin(self._job.number[slab.pieces], lost))
        slots.place(self._slot, slab, self._job.table(slab))

    def _failure(self, number: int, nbytes: int, result: int | BaseException) -> BaseException:
        if isinstance(result, Exception):
            failure = ChunkError(f"{self._job.object_name(number)} cannot be read: {result}")
            failure.__cause__ = result
            return failure
        if isinstance(result, BaseException):
            return result
        return ChunkError(f"{self._job.object_name(number)}: {result} of {nbytes} bytes could be read")

    def _settle(self) -> list[int | BaseException]:
        results = [] if self._reads is None else self._reads.wait()
        self._reads = None
        return results

    def abandon(self) -> None:
        """Wait for every read, whatever became of it, and close the files."""
        self._settle()
        self._close()

    def _close(self) -> None:
        while self._files:
            self._files.pop().close()


def _fill(job: Job, fill: Callable[[ScatterTable], None], missing: list[np.ndarray]) -> None:
    """Write the fill value where chunks are not stored."""
    rows = np.unique(np.concatenate([np.empty(0, np.int64), *missing])).astype(np.int64)
    if len(rows):
        _check_still_there(job)
    job.counts.filled = rows
    for begin in range(0, len(rows), MAX_PIECES):
        fill(job.tables.table(rows[begin : begin + MAX_PIECES], None))
