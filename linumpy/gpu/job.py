"""One read: its pieces, how they travel, and what has been done.

In: a request. Out: :class:`Job`, made without opening a file, which the reader carries out.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from linumpy.gpu.encoded_slots import EncodedSlots
from linumpy.gpu.engines import TASK_NBYTES
from linumpy.gpu.output import ReadRequest
from linumpy.gpu.scatter import Conversion, table_nbytes
from linumpy.gpu.slots import DirectSlots, Slots, StagedSlots, Target, slot_nbytes
from linumpy.plan.layout import MAX_RANK
from linumpy.plan.pieces import Pieces
from linumpy.plan.read import ReadPlan
from linumpy.plan.scatter import Geometry, ScatterTable, TableMaker, geometry, is_contiguous
from linumpy.plan.slabs import MAX_PIECES, Slab, SlabLimits
from linumpy.plan.way import DecodeWay, choose_way
from linumpy.plan.workspace import decoded_room

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
#: Bytes between two encoded chunks of a shard that are read along: about what a read of its own costs.
_GAP = 64 * 1024


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
    counts : Counts
        What has been done.
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
    counts: Counts = field(default_factory=Counts)

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
        if not len(self.pieces):
            return 0
        if self.way is not None and self.way.slot is not None:
            return self.depth * self.way.slot.nbytes + status_nbytes(len(self.pieces))
        if self.way is not None:  # the host decodes into one buffer on the device
            return self.limits.nbytes
        return self.depth * slot_nbytes(self.limits.nbytes, len(self.pieces))

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

    def file_sizes(self, numbers: np.ndarray) -> list[int] | list[None]:
        """Sizes that the files of objects must have; shards have no size known beforehand."""
        if self.plan.layout.shard is not None:
            return [None] * len(numbers)
        if self.way is None:
            return [self.plan.layout.chunk_nbytes] * len(numbers)
        # One chunk an object and one piece a chunk, in the same order.
        sizes: list[int] = self.stored_nbytes[numbers].tolist()
        return sizes

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

    def straight(self) -> np.ndarray:
        """Byte of the result where each piece that needs no scatter begins; -1 for the others."""
        if self.way is not None or not self.conversion.is_copy:
            return np.full(len(self.pieces), -1, np.int64)
        contiguous = is_contiguous(self.shared, self.pieces)
        return np.where(contiguous, self.pieces.target * self.shared.itemsize, -1)


def make_job(
    request: ReadRequest, *, direct: bool, slab_nbytes: int | None = None, decode_on: str | None = None
) -> Job:
    """Plan how the pieces of a request travel, without opening a file.

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
    plan = request.plan
    way = _choose_way(request, slab_nbytes, decode_on, direct=direct)
    if way is not None and way.slot is not None:
        pieces, limits, depth = plan.pieces(None), _encoded_limits(way, direct=direct), way.depth
    else:
        limits, depth = (
            _limits(request, slab_nbytes or (_DIRECT_SLAB if direct else _STAGED_SLAB), direct=direct),
            _DEPTH,
        )
        # Pieces well below a slab, so that slabs are filled; neighbours are read in one go all the same.
        pieces = plan.pieces(max(limits.largest_piece // 4, plan.layout.dtype.itemsize))
    objects, number = plan.objects(pieces)
    shared = geometry(plan.layout, plan.region, pieces)
    return Job(request, pieces, shared, objects, number, limits, depth, direct, way)


def status_nbytes(pieces: int) -> int:
    """Bytes of the status of all chunks of a read."""
    return -(-4 * pieces // 512) * 512


def _choose_way(request: ReadRequest, slot: int | None, decode_on: str | None, *, direct: bool) -> DecodeWay | None:
    plan = request.plan
    if plan.layout.chain is None:
        return None
    chunks = plan.chunk_count
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
        _file_limit(),
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
    return SlabLimits(nbytes, _file_limit(), _PAGE if direct else 64, congruent=direct)


def _file_limit() -> int:
    """Open files a slab may have, so that a read stays within the limit of the process."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    soft = 2**20 if soft == resource.RLIM_INFINITY else soft
    used = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else _SPARE_FILES
    # kvikio opens every file twice; POSIX batches need a descriptor for each task of a long read.
    spread = _STAGED_SLAB // TASK_NBYTES
    return max(1, min(_MAX_FILES, ((soft - used - _SPARE_FILES) // _DEPTH - spread) // 2))
