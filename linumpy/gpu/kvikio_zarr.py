"""Read raw chunks of a local Zarr array into device memory with kvikio's ``CuFile.pread``.

In: a :class:`~linumpy.plan.read.ReadPlan` or what names an array. Out: a CuPy array, ordered on the caller's current
stream. Errors: :class:`~linumpy.errors.UnsupportedLayoutError` (a ``NotImplementedError``) for what is not raw, not
local or of no CUDA type; :class:`~linumpy.errors.ChunkError` for stored bytes that cannot be right.
"""

from __future__ import annotations

import os
import resource
import time
from collections import deque
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from linumpy.device import kvikio_mode
from linumpy.errors import ChunkError, GpuUnavailableError, UnsupportedLayoutError
from linumpy.gpu import output
from linumpy.gpu.engines import TASK_NBYTES, Engine, File, Pending, choose_engine
from linumpy.gpu.output import ReadRequest
from linumpy.gpu.report import ReadReport
from linumpy.gpu.scatter import Conversion
from linumpy.gpu.slots import DirectSlots, Slots, StagedSlots, Target, slot_nbytes
from linumpy.io.layout import read_layout
from linumpy.io.source import Source, open_source
from linumpy.plan.pieces import Pieces
from linumpy.plan.read import ReadPlan, plan_read
from linumpy.plan.scatter import Geometry, ScatterTable, TableMaker, geometry, is_contiguous
from linumpy.plan.shards import ShardIndexError, read_index
from linumpy.plan.slabs import MAX_PIECES, Slab, SlabLimits, Spans, pack

#: Slabs that are read, copied or scattered at the same time.
_DEPTH = 3
#: Staged slabs of this size pass through the processor's cache; larger ones measured slower.
_STAGED_SLAB = 32 * 2**20
#: GDS moves no byte through the processor: larger slabs only mean fewer launches.
_DIRECT_SLAB = 128 * 2**20
_PAGE = 4096
#: Open files that a read leaves to the rest of the process.
_SPARE_FILES = 64
#: More open files a slab than this gain nothing.
_MAX_FILES = 1024


def read_zarr_via_kvikio(
    source: Source,
    *,
    region: Any = None,
    level: int = 0,
    dtype: Any = None,
    out: Any = None,
    scratch_bytes: int | None = None,
    return_report: bool = False,
) -> Any:
    """Read raw chunks with kvikio; see :func:`linumpy.gpu.zarr_io.read_zarr_to_gpu` for the parameters.

    Raises
    ------
    UnsupportedLayoutError
        The chunks are compressed, the store is not local, or the like. The message says what it is.
    """
    begin = time.perf_counter()
    plan = plan_read(read_layout(open_source(source, level)), region)
    if plan.layout.unsupported is not None:
        raise UnsupportedLayoutError(f"kvikio cannot read {plan.layout.name}: {plan.layout.unsupported}")
    request = output.make_request(plan, dtype, out, scratch_bytes)
    array, report = read_request(request, begin, timed=return_report)
    return (array, report) if return_report else array


@dataclass
class _Counts:
    """What the reader has done so far."""

    bytes_read: int = 0
    files_opened: int = 0
    filled: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))


def read_request(request: ReadRequest, begin: float, *, timed: bool) -> tuple[Any, ReadReport]:
    """Carry out a request whose layout kvikio can read.

    Parameters
    ----------
    request : ReadRequest
        What to read.
    begin : float
        ``time.perf_counter()`` at the start of the call, for the report.
    timed : bool
        Whether to time the scatter kernels, which waits for the last of them.
    """
    require_kvikio()
    with output.device_of(request):
        direct, gds = gds_mode(request.plan.layout.root or "")
        job = make_job(request, direct=direct)
        engine = choose_engine(direct=direct, read_nbytes=job.mean_read)
        output.check_memory(request, job.scratch_bytes)
        array = output.allocate(request)
        planned = time.perf_counter()
        scatter_seconds: float | None = 0.0
        if array.size:
            slots = job.slots(array, timed=timed)
            run(job, slots, engine)
            scatter_seconds = slots.scatter_seconds() if timed else None
        done = time.perf_counter()
        return array, job.report(gds, engine.name, planned - begin, done - planned, scatter_seconds)


def require_kvikio() -> None:
    """Raise where kvikio cannot be used.

    Raises
    ------
    GpuUnavailableError
        Saying why.
    """
    from linumpy.device import install_line

    mode, reason = kvikio_mode()
    if mode == "none":
        raise GpuUnavailableError(f"{reason}: {install_line()}")


def gds_mode(folder: str) -> tuple[bool, str]:
    """Say whether reads from a folder are native GDS, and how that is known."""
    mode, reason = kvikio_mode()
    if mode != "cufile":
        return False, reason
    from linumpy.gds import gds_verdict

    verdict = gds_verdict(folder)
    answer = "native" if verdict.is_native else "not native"
    return verdict.is_native, f"{answer} ({verdict.path}, says gds_doctor.sh)"


@dataclass
class Job:
    """One read: the pieces, how they travel, and what has been done."""

    request: ReadRequest
    pieces: Pieces
    shared: Geometry
    objects: np.ndarray
    number: np.ndarray
    limits: SlabLimits
    depth: int
    direct: bool
    counts: _Counts

    @property
    def plan(self) -> ReadPlan:
        """What is read."""
        return self.request.plan

    @property
    def conversion(self) -> Conversion:
        """What happens to an element on its way."""
        layout = self.plan.layout
        return Conversion(layout.dtype, self.request.dtype, layout.swapped)

    @property
    def scratch_bytes(self) -> int:
        """Device memory beyond the result."""
        return self.depth * slot_nbytes(self.limits.nbytes, len(self.pieces)) if len(self.pieces) else 0

    def slots(self, array: Any, *, timed: bool) -> StagedSlots | DirectSlots:
        """Make the buffers, on the current device."""
        kind = DirectSlots if self.direct else StagedSlots
        fill = self.plan.layout.fill_value.astype(self.request.dtype)
        return kind(
            Target(array, self.conversion, fill),
            self.depth,
            self.limits.nbytes,
            len(self.pieces),
            timed=timed,
        )

    def path(self, number: int) -> str:
        """Path of a stored object."""
        return self.paths(np.array([number]))[0]

    def paths(self, numbers: np.ndarray) -> list[str]:
        """Paths of many stored objects."""
        keys = self.plan.layout.keys
        assert keys is not None
        start = f"{self.plan.layout.root}/{keys.prefix}"
        return [start + keys.separator.join(map(str, row)) for row in self.objects[numbers].tolist()]

    @cached_property
    def tables(self) -> TableMaker:
        """Makes the tables of this read."""
        return TableMaker(self.shared, self.pieces, widen=self.conversion.is_copy)

    @property
    def mean_read(self) -> float:
        """Bytes of a stored object that are read, on average."""
        return int(self.pieces.nbytes.sum()) / max(1, len(self.objects))

    @property
    def file_nbytes(self) -> int | None:
        """Size that the file of a chunk must have; shards have no size known beforehand."""
        return self.plan.layout.chunk_nbytes if self.plan.layout.shard is None else None

    def chunk_name(self, number: int) -> str:
        """Name a stored object as an error does."""
        kind = "chunk" if self.plan.layout.shard is None else "shard"
        return f"{kind} {tuple(self.objects[number].tolist())} of {self.plan.layout.name}: {self.path(number)}"

    def straight(self) -> np.ndarray:
        """Byte of the result where each piece that needs no scatter begins; -1 for the others."""
        if not self.conversion.is_copy:
            return np.full(len(self.pieces), -1, np.int64)
        contiguous = is_contiguous(self.shared, self.pieces)
        return np.where(contiguous, self.pieces.target * self.shared.itemsize, -1)

    def report(
        self, gds: str, engine: str, plan_seconds: float, read_seconds: float, scatter: float | None
    ) -> ReadReport:
        """Tell what was done."""
        filled = len(np.unique(self.pieces.chunk[self.counts.filled], axis=0))
        return ReadReport(
            source=self.plan.layout.name,
            backend="kvikio",
            gds=gds,
            engine=engine,
            fallback="",
            shape=self.plan.shape,
            dtype=str(self.request.dtype),
            bytes_read=self.counts.bytes_read,
            bytes_decoded=self.plan.region.size * self.request.dtype.itemsize,
            chunks_read=self.plan.chunk_count - filled,
            chunks_filled=filled,
            files_opened=self.counts.files_opened,
            scratch_bytes=self.scratch_bytes,
            plan_seconds=plan_seconds,
            read_seconds=read_seconds,
            scatter_seconds=scatter,
        )


def make_job(request: ReadRequest, *, direct: bool, slab_nbytes: int | None = None) -> Job:
    """Plan how the pieces of a request travel, without opening a file.

    Parameters
    ----------
    request : ReadRequest
        What to read.
    direct : bool
        Whether reads go to device memory.
    slab_nbytes : int, optional
        Size of a slab, at most what the scratch allows; by default what measured fastest.
    """
    plan = request.plan
    limits = _limits(request, slab_nbytes or (_DIRECT_SLAB if direct else _STAGED_SLAB), direct=direct)
    # Pieces well below a slab, so that slabs are filled; neighbours are read in one go all the same.
    pieces = plan.pieces(max(limits.largest_piece // 4, plan.layout.dtype.itemsize))
    objects, number = plan.objects(pieces)
    shared = geometry(plan.layout, plan.region, pieces)
    return Job(request, pieces, shared, objects, number, limits, _DEPTH, direct, _Counts())


def _limits(request: ReadRequest, wanted: int, *, direct: bool) -> SlabLimits:
    """Size the slabs: within the scratch that all slots share, and no larger than what is read."""
    table = slot_nbytes(0, 2**62)
    room = (request.scratch_bytes // _DEPTH - table) // _PAGE * _PAGE
    # What is touched bounds what can be needed.
    layout, plan = request.plan.layout, request.plan
    touched = plan.chunk_count * (layout.chunk_nbytes + _PAGE) + 2 * _PAGE
    nbytes = max(2 * _PAGE, min(wanted, room, -(-touched // _PAGE) * _PAGE))
    return SlabLimits(nbytes, _file_limit(), _PAGE if direct else 64, congruent=direct)


def _file_limit() -> int:
    """Open files a slab may have, so that a read stays within the limit of the process."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    soft = 2**20 if soft == resource.RLIM_INFINITY else soft
    used = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else _SPARE_FILES
    # kvikio opens every file twice; POSIX batches need a descriptor for each task of a long read.
    spread = _STAGED_SLAB // TASK_NBYTES
    return max(1, min(_MAX_FILES, ((soft - used - _SPARE_FILES) // _DEPTH - spread) // 2))


def run(job: Job, slots: Slots, engine: Engine) -> None:
    """Read all pieces of a job and place them; its counts are kept."""
    spans, missing = _locate(job)
    pending: deque[_InFlight] = deque()
    lost: set[int] = set()
    with engine:
        try:
            for order, slab in enumerate(pack(spans, job.limits)):
                if len(pending) == job.depth - 1:
                    lost |= _complete_first(pending, slots)
                pending.append(_InFlight(job, slab, order % job.depth))
                pending[-1].start(slots, engine)
            while pending:
                lost |= _complete_first(pending, slots)
            if lost or len(missing):
                _check_still_there(job)
            _fill(job, slots, missing, lost)
        finally:
            # After an error reads may still be writing into the buffers: wait for them, then let go.
            for in_flight in pending:
                in_flight.abandon()
            slots.finish()


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


def _locate(job: Job) -> tuple[Spans, np.ndarray]:
    """Find the stored bytes of all pieces; with shards, by reading their indexes."""
    plan, straight = job.plan, job.straight()
    if plan.layout.shard is None:
        return plan.spans(job.pieces, job.number, straight), np.empty(0, np.int64)
    indexes = np.full((len(job.objects), plan.layout.shard.count), -1, np.int64)
    for number in range(len(job.objects)):
        index = _shard_index(job, number)
        if index is not None:
            indexes[number] = index
    return plan.shard_spans(job.pieces, job.number, straight, indexes)


def _shard_index(job: Job, number: int) -> np.ndarray | None:
    """Read the index of one shard; None where the shard is not stored."""
    layout = job.plan.layout
    shard = layout.shard
    assert shard is not None
    try:
        descriptor = os.open(job.path(number), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if _is_missing(job.path(number)):
            return None
        raise ChunkError(f"{job.chunk_name(number)} cannot be opened: {error.strerror}") from error
    try:
        job.counts.files_opened += 1
        size = os.fstat(descriptor).st_size
        raw = os.pread(descriptor, shard.index_nbytes, max(0, size - shard.index_nbytes) if shard.index_at_end else 0)
        job.counts.bytes_read += len(raw)
        return read_index(raw, shard, size, layout.chunk_nbytes)
    except ShardIndexError as error:
        raise ChunkError(f"{job.chunk_name(number)}: {error}") from error
    except OSError as error:
        raise ChunkError(f"{job.chunk_name(number)} cannot be read: {error.strerror}") from error
    finally:
        os.close(descriptor)


class _InFlight:
    """A slab whose reads are under way, with the files they read from."""

    def __init__(self, job: Job, slab: Slab, slot: int) -> None:
        self._job, self._slab, self._slot = job, slab, slot
        self._files: list[File] = []
        self._reads: Pending | None = None
        self._lost: set[int] = set()

    def start(self, slots: Slots, engine: Engine) -> None:
        """Open the files and start all reads; a file that is not there is a missing chunk."""
        slab = self._slab
        slots.wait(self._slot)
        # This loop runs once a chunk, and with small chunks it is what the whole read takes: everything that can be
        # made for all chunks at once is made before it.
        size, opened, file, files = self._job.file_nbytes, -1, None, []
        for number, path in zip(slab.object.tolist(), self._job.paths(slab.object), strict=True):
            if number != opened:
                file, opened = self._open(number, path, engine), number
                if file is not None and size is not None and (found := os.fstat(file.fileno()).st_size) != size:
                    raise self._wrong_size(number, found, size)
            files.append(file)
        self._job.counts.files_opened += len(self._files)
        self._reads = engine.start(files, slab, slots, self._slot)

    def _open(self, number: int, path: str, engine: Engine) -> File | None:
        try:
            file = engine.open(path)
        except Exception as error:
            if _is_missing(path):
                self._lost.add(number)
                return None
            raise ChunkError(f"{self._job.chunk_name(number)} cannot be opened: {error}") from error
        self._files.append(file)
        return file

    def _wrong_size(self, number: int, found: int, size: int) -> ChunkError:
        layout = self._job.plan.layout
        return ChunkError(
            f"{self._job.chunk_name(number)} has {found} bytes, but a raw chunk of {layout.dtype} "
            f"{layout.chunk_shape} has {size}"
        )

    def complete(self, slots: Slots) -> set[int]:
        """Wait for the reads, close the files, place the slab; return the objects that were missing."""
        results = self._settle()
        self._close()
        rows = zip(self._slab.object.tolist(), self._slab.nbytes.tolist(), results, strict=True)
        for number, nbytes, result in rows:
            if result != nbytes and number not in self._lost:
                raise self._failure(number, nbytes, result)
            self._job.counts.bytes_read += 0 if number in self._lost else nbytes
        slots.place(self._slot, self._slab, self._table())
        return self._lost

    def _failure(self, number: int, nbytes: int, result: int | BaseException) -> BaseException:
        if isinstance(result, Exception):
            failure = ChunkError(f"{self._job.chunk_name(number)} cannot be read: {result}")
            failure.__cause__ = result
            return failure
        if isinstance(result, BaseException):
            return result
        return ChunkError(f"{self._job.chunk_name(number)}: {result} of {nbytes} bytes could be read")

    def _settle(self) -> list[int | BaseException]:
        results = [] if self._reads is None else self._reads.wait()
        self._reads = None
        return results

    def _table(self) -> ScatterTable | None:
        job, slab = self._job, self._slab
        rows, place = slab.pieces, slab.piece_place
        if self._lost:
            there = ~np.isin(job.number[rows], list(self._lost))
            rows, place = rows[there], place[there]
        if not len(rows):
            return None
        return job.tables.table(rows, place)

    def abandon(self) -> None:
        """Wait for every read, whatever became of it, and close the files."""
        self._settle()
        self._close()

    def _close(self) -> None:
        while self._files:
            self._files.pop().close()


def _is_missing(path: str) -> bool:
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return not os.path.islink(path)  # a link to nothing was something once
    except OSError:
        return False
    return False


def _fill(job: Job, slots: Slots, missing: np.ndarray, lost: set[int]) -> None:
    """Write the fill value where chunks are not stored."""
    rows = np.union1d(missing, np.flatnonzero(np.isin(job.number, list(lost)))).astype(np.int64)
    job.counts.filled = rows
    for begin in range(0, len(rows), MAX_PIECES):
        slots.fill(job.tables.table(rows[begin : begin + MAX_PIECES], None))
