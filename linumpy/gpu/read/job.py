"""One read: how its bytes travel, its pieces, and what has been done.

In: a request. Out: :class:`Transfer`, settled without cutting a piece, and its :class:`Job` records, made without
opening a file, which the reader carries out one after another.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from linumpy.errors import ChunkError
from linumpy.gpu.read.encoded_staging import EncodedSlots
from linumpy.gpu.read.engines import TASK_NBYTES
from linumpy.gpu.read.request import ReadRequest
from linumpy.gpu.read.scatter import Conversion, table_nbytes
from linumpy.gpu.read.staging import DirectSlots, Slots, StagedSlots, Target, slot_nbytes
from linumpy.io.budget import PROCESS, Share
from linumpy.plan.decode.placement import DecodeWay, choose_way
from linumpy.plan.decode.workspace import decoded_room
from linumpy.plan.layout import MAX_RANK
from linumpy.plan.read.pieces import PieceCount, Pieces
from linumpy.plan.read.plan import ReadPlan
from linumpy.plan.read.scatter import Geometry, ScatterTable, TableMaker, geometry, is_contiguous
from linumpy.plan.read.slabs import MAX_PIECES, Slab, SlabLimits

#: Slabs that are read, copied or scattered at the same time.
_DEPTH = 3
#: Staged slabs of this size pass through the processor's cache; larger ones measured slower.
_STAGED_SLAB = 32 * 2**20
#: GDS moves no byte through the processor: larger slabs only mean fewer launches.
_DIRECT_SLAB = 128 * 2**20
_PAGE = 4096
#: More open files a slab than this gain nothing.
_MAX_FILES = 1024
#: Further descriptors that a slab of long reads has a use for: one for each task of a POSIX batch.
_SPREAD = _STAGED_SLAB // TASK_NBYTES
#: Pieces that are planned at a time, up to 600 bytes of host memory each; more where a stored object has more.
_BATCH_PIECES = 2**18
#: Bytes between two encoded chunks of a shard that are read along: about what a read of its own costs.
_GAP = 64 * 1024


#: Inode, bytes and time of the last write: a plain tuple, since one is made for every file.
FileVersion = tuple[int, int, int]


def file_version(found: os.stat_result) -> FileVersion:
    """Tell a file from the one that replaces it, and from itself when it is written again."""
    return found.st_ino, found.st_size, found.st_mtime_ns


@dataclass
class Counts:
    """What the reader has done so far."""

    bytes_read: int = 0
    reads: int = 0
    files_opened: int = 0
    by_host: int = 0
    filled: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    too_long: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))


@dataclass
class Job:
    """One read: the pieces, how they travel, and what has been done.

    Attributes
    ----------
    request : ReadRequest
        What is wanted.
    pieces : Pieces
        All of them; where chunks are decoded on the device, one a chunk.
    shared : Geometry
        What their tables have in common.
    objects : numpy.ndarray of int64, (objects, rank)
        Stored objects in their grid.
    number : numpy.ndarray of int64, (n,)
        Object that each piece lies in.
    limits : SlabLimits
        Of the stored bytes that a slot takes.
    depth : int
        Slots.
    direct : bool
        Whether reads go to device memory.
    way : DecodeWay or None
        How chunks are decoded; None for raw ones.
    stored_offset, stored_nbytes : numpy.ndarray of int64, (n,)
        Where the chunk of each piece lies in its object, as far as it was looked for.
    versions : dict of int to FileVersion
        Objects whose size or index was looked at before their chunks are read, as they were then.
    counts : Counts
        What has been done.
    share : Share or None
        What the read may use of the process's open files, memory and threads, while it is carried out.
    slab_descriptors : int
        Descriptors that the files of one slab may take, duplicates included.
    """

    request: ReadRequest
    pieces: Pieces
    shared: Geometry
    objects: np.ndarray
    number: np.ndarray
    limits: SlabLimits
    depth: int
    direct: bool
    way: DecodeWay | None = None
    stored_offset: np.ndarray = field(init=False)
    stored_nbytes: np.ndarray = field(init=False)
    versions: dict[int, FileVersion] = field(default_factory=dict, init=False)
    counts: Counts = field(default_factory=Counts)
    share: Share | None = field(default=None, init=False)
    slab_descriptors: int = field(default=_MAX_FILES, init=False)

    def __post_init__(self) -> None:
        self.stored_offset = np.zeros(len(self.pieces), np.int64)
        self.stored_nbytes = np.zeros(len(self.pieces), np.int64)

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
    def fill(self) -> np.generic:
        """Fill value in the dtype of the result."""
        return self.plan.layout.fill_value.astype(self.request.dtype)

    @property
    def scratch_bytes(self) -> int:
        """Device memory beyond the result."""
        return scratch_nbytes(self.way, self.limits, self.depth, len(self.pieces))

    @property
    def host_nbytes(self) -> int:
        """Host memory of the buffers that slabs are read into; those of chunks that the host decodes are not here."""
        if not len(self.pieces):
            return 0
        if self.way is not None and self.way.slot is not None:
            return self.depth * (self.way.slot.words_nbytes + (0 if self.direct else self.way.slot.stored_nbytes))
        return 0 if self.direct else self.depth * slot_nbytes(self.limits.nbytes, len(self.pieces))

    @contextmanager
    def reading(self, descriptors_per_file: int) -> Iterator[None]:
        """Hold what the buffers and the open files of slabs take, and bound the files of a slab by it."""
        files = min(_MAX_FILES, len(self.objects)) * descriptors_per_file
        # One more reads the index of a shard.
        least = Share(1 + self.depth * descriptors_per_file, self.host_nbytes)
        most = Share(1 + self.depth * (files + _SPREAD), self.host_nbytes)
        with self.holding(least, most) as share:
            self.slab_descriptors = (share.descriptors - 1) // self.depth
            objects = max(1, min(_MAX_FILES, self.slab_descriptors // descriptors_per_file))
            self.limits = replace(self.limits, objects=objects)
            yield

    @contextmanager
    def holding(self, least: Share, most: Share) -> Iterator[Share]:
        """Hold a share of the process's budget; inside another such block of this job, the share of that one."""
        if self.share is not None:
            yield self.share
            return
        with PROCESS.take(least, most) as self.share:
            try:
                yield self.share
            finally:
                self.share = None

    def slots(self, array: Any, *, timed: bool) -> Slots:
        """Make the buffers, on the current device."""
        target = Target(array, self.conversion, self.fill)
        if self.way is not None and self.way.slot is not None:
            chunk_nbytes = self.plan.layout.chunk_nbytes
            return EncodedSlots(
                target, self.depth, self.way, chunk_nbytes, len(self.pieces), direct=self.direct, timed=timed
            )
        kind = DirectSlots if self.direct else StagedSlots
        return kind(target, self.depth, self.limits.nbytes, len(self.pieces), timed=timed)

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

    def table(self, slab: Slab) -> ScatterTable | None:
        """Make the table that places a slab; decoded chunks lie one after another."""
        if not len(slab.pieces):
            return None
        if self.way is None:
            return self.tables.table(slab.pieces, slab.piece_place)
        step = decoded_room(self.way.chain, self.plan.layout.chunk_nbytes)
        return self.tables.table(slab.pieces, np.arange(len(slab.pieces)) * step + self.pieces.offset[slab.pieces])

    @property
    def mean_read(self) -> float:
        """Bytes of a stored object that are read, on average; of encoded ones, a guess."""
        return int(self.pieces.nbytes.sum()) / max(1, len(self.objects)) / (1 if self.way is None else 2)

    @property
    def file_nbytes(self) -> int | None:
        """Size that every file must have; None for encoded chunks and for shards, which differ."""
        return self.plan.layout.chunk_nbytes if self.plan.layout.shard is None and self.way is None else None

    @property
    def threads(self) -> int:
        """Threads of the host that decode, where it does."""
        return 1 if self.way is None else self.way.threads

    def object_name(self, number: int) -> str:
        """Name a stored object as an error does."""
        kind = "chunk" if self.plan.layout.shard is None else "shard"
        return f"{kind} {tuple(self.objects[number].tolist())} of {self.plan.layout.name}: {self.path(number)}"

    def chunk_name(self, row: int) -> str:
        """Name the chunk of a piece as an error does."""
        chunk = tuple(self.pieces.chunk[row].tolist())
        name = f"chunk {chunk} of {self.plan.layout.name}: {self.path(self.number[row])}"
        if self.plan.layout.shard is None:
            return name
        begin = int(self.stored_offset[row])
        return f"{name}, bytes {begin} to {begin + int(self.stored_nbytes[row])}"

    def check_version(self, number: int, found: os.stat_result) -> None:
        """Compare an object with what was looked at before.

        Raises
        ------
        ChunkError
            It is another file, or has been written again.
        """
        version = self.versions.get(number)
        if version is not None and version != file_version(found):
            raise ChunkError(
                f"{self.object_name(number)} was replaced while it was being read (it had {version[1]} bytes, and "
                f"has {found.st_size} now): read it again when its writer is done"
            )

    def straight(self) -> np.ndarray:
        """Byte of the result where each piece that needs no scatter begins; -1 for the others."""
        if self.way is not None or not self.conversion.is_copy:
            return np.full(len(self.pieces), -1, np.int64)
        contiguous = is_contiguous(self.shared, self.pieces)
        return np.where(contiguous, self.pieces.target * self.shared.itemsize, -1)


@dataclass(frozen=True)
class Transfer:
    """How the bytes of a request travel, settled before a piece is cut.

    Attributes
    ----------
    request : ReadRequest
        What is wanted.
    limits : SlabLimits
        Of the stored bytes that a slot takes.
    depth : int
        Slots.
    direct : bool
        Whether reads go to device memory.
    way : DecodeWay or None
        How chunks are decoded; None for raw ones.
    max_nbytes : int or None
        Longest piece; None for one piece a chunk.
    count : PieceCount
        Pieces of all jobs.
    """

    request: ReadRequest
    limits: SlabLimits
    depth: int
    direct: bool
    way: DecodeWay | None
    max_nbytes: int | None
    count: PieceCount

    @property
    def scratch_bytes(self) -> int:
        """Device memory beyond the result that any of the jobs takes at most."""
        pieces = min(self.count.pieces, _batch_chunks(self.request.plan, self.count.most) * self.count.most)
        return scratch_nbytes(self.way, self.limits, self.depth, pieces)

    def jobs(self) -> Iterator[Job]:
        """Cut the request into jobs whose pieces are bounded in number; nearly every request is one job."""
        plan = self.request.plan
        for box in plan.batches(_batch_chunks(plan, self.count.most)):
            pieces = plan.pieces(self.max_nbytes, box)
            objects, number = plan.objects(pieces)
            shared = geometry(plan.layout, plan.region, pieces)
            yield Job(self.request, pieces, shared, objects, number, self.limits, self.depth, self.direct, self.way)


def plan_transfer(
    request: ReadRequest, *, direct: bool, slab_nbytes: int | None = None, decode_on: str | None = None
) -> Transfer:
    """Plan how a request is carried out, without cutting a piece or opening a file.

    Parameters
    ----------
    request : ReadRequest
        What to read.
    direct : bool
        Whether reads go to device memory.
    slab_nbytes : int, optional
        Size of a slab, at most what the scratch allows; by default what measured fastest. Of encoded chunks, the
        memory of a slot.
    decode_on : {"device", "host"}, optional
        Where to decode; by default where it takes less time.
    """
    way = _choose_way(request, slab_nbytes, decode_on, direct=direct)
    if way is not None and way.slot is not None:
        return Transfer(
            request, _encoded_limits(way, direct=direct), way.depth, direct, way, None, request.plan.count(None)
        )
    limits = _limits(request, slab_nbytes or (_DIRECT_SLAB if direct else _STAGED_SLAB), direct=direct)
    # Pieces well below a slab, so that slabs are filled; neighbours are read in one go all the same.
    longest = max(limits.largest_piece // 4, request.plan.layout.dtype.itemsize)
    return Transfer(request, limits, _DEPTH, direct, way, longest, request.plan.count(longest))


def _batch_chunks(plan: ReadPlan, pieces: int) -> int:
    """Chunks that a job has at most, where one has so many pieces."""
    return max(_BATCH_PIECES // max(1, pieces), math.prod(plan.chunks_per_object))


def scratch_nbytes(way: DecodeWay | None, limits: SlabLimits, depth: int, pieces: int) -> int:
    """Device memory that a job of so many pieces takes beyond the result."""
    if not pieces:
        return 0
    if way is not None and way.slot is not None:
        return depth * way.slot.nbytes + status_nbytes(pieces)
    if way is not None:  # the host decodes into one buffer on the device
        return limits.nbytes
    return depth * slot_nbytes(limits.nbytes, pieces)


def status_nbytes(pieces: int) -> int:
    """Bytes of the status of all chunks of a read."""
    return -(-4 * pieces // 512) * 512


def _choose_way(request: ReadRequest, slot: int | None, decode_on: str | None, *, direct: bool) -> DecodeWay | None:
    plan = request.plan
    if plan.layout.chain is None:
        return None
    chunks = min(plan.chunk_count, _batch_chunks(plan, 1))
    room = request.scratch_bytes - status_nbytes(chunks)
    return choose_way(
        plan.layout.chain,
        plan.layout.chunk_nbytes,
        chunks=chunks,
        room=room if slot is None else min(room, _DEPTH * slot),
        cores=len(os.sched_getaffinity(0)),
        table_nbytes=table_nbytes(MAX_RANK, 2) - table_nbytes(MAX_RANK, 1),
        margin=2 * _PAGE if direct else 256,
        decode_on=decode_on,
    )


def _encoded_limits(way: DecodeWay, *, direct: bool) -> SlabLimits:
    """Bound the stored bytes of a slab by the room for them, and its chunks by the room for what they decode to."""
    slot = way.slot
    assert slot is not None
    return SlabLimits(
        slot.stored_nbytes,
        _MAX_FILES,
        _PAGE if direct else 64,
        congruent=direct,
        pieces=min(slot.chunks, MAX_PIECES),
        capacity=slot.capacity,
        gap=_GAP,
    )


def _limits(request: ReadRequest, wanted: int, *, direct: bool) -> SlabLimits:
    """Size the slabs: within the scratch that all slots share, and no larger than what is read."""
    table = slot_nbytes(0, 2**62)
    room = (request.scratch_bytes // _DEPTH - table) // _PAGE * _PAGE
    # What is touched bounds what can be needed.
    layout, plan = request.plan.layout, request.plan
    touched = plan.chunk_count * (layout.chunk_nbytes + _PAGE) + 2 * _PAGE
    nbytes = max(2 * _PAGE, min(wanted, room, -(-touched // _PAGE) * _PAGE))
    return SlabLimits(nbytes, _MAX_FILES, _PAGE if direct else 64, congruent=direct)
