"""What bounds the slabs of a reader, and the waves that it carries out."""

from __future__ import annotations

import os
from dataclasses import dataclass

from linumpy.plan.layout import MAX_RANK
from linumpy.plan.read.scatter import table_nbytes
from linumpy.plan.read.slabs import MAX_PIECES, SlabLimits

#: Slabs whose memory is in use at the same time.
DEPTH = 3
#: Slabs of raw chunks: fewer of them take less Python, and larger ones gain no more.
STAGED_SLAB = 64 * 2**20
#: Host memory that slabs of encoded chunks pass through: it stays in the processor's cache.
STAGED_ENCODED = 96 * 2**20
#: Host memory that slabs of raw chunks pass through: three of them.
STAGED_RAW = DEPTH * STAGED_SLAB + 2**22
#: Slabs that the host decodes at the same time: one of long chunks has few of them, and so keeps few threads busy.
DECODE_AHEAD = 6
#: Host memory for chunks larger than a slab that the host decodes at the same time; one of them may take more.
LARGE_NBYTES = 2**30
#: Open files of a slab; more gain nothing.
MAX_FILES = 1024
#: Bytes of the words of a box, of three axes, with a part of a header.
ROW_NBYTES = 64
#: Every read begins at a multiple of this in its slab.
SLAB_ALIGN = 64


@dataclass(frozen=True)
class Limits:
    """What bounds the slabs of a reader.

    Attributes
    ----------
    scratch_bytes : int
        Device memory for all of them.
    slab_nbytes : int
        Bytes of a slab of raw or decoded chunks.
    pieces : int
        Spans of a slab.
    threads : int
        Threads that decode on the host.
    decode_on : str or None
        Where to decode, ``"device"`` or ``"host"``; None for where it takes less time.
    on_device : bool
        Whether there is a device.
    slot_nbytes : int or None
        Device memory of a slab of encoded chunks at most; None for a third of the scratch.
    may_exceed : bool
        Whether a chunk that does not fit the scratch gets more, one at a time, rather than the host.
    """

    scratch_bytes: int
    slab_nbytes: int
    pieces: int
    threads: int
    decode_on: str | None
    on_device: bool
    slot_nbytes: int | None = None
    may_exceed: bool = False

    @property
    def longest(self) -> int:
        """Longest span of a box, well below a slab so that slabs are filled."""
        return max(16, (self.slab_nbytes - SLAB_ALIGN) // 4)

    @property
    def boxes(self) -> int:
        """Boxes of a wave or request: a table of both fits beside a slab, even if all boxes lie in one chunk."""
        free = self.scratch_bytes // DEPTH - self.slab_nbytes
        return max(64, free // (2 * table_nbytes(MAX_RANK, 1)))

    @property
    def raw(self) -> SlabLimits:
        """Of slabs of raw chunks."""
        return SlabLimits(self.slab_nbytes, MAX_FILES, SLAB_ALIGN, pieces=self.pieces)

    def box_nbytes(self, chunk_nbytes: int, *, raw: bool) -> int | None:
        """Longest box of chunks of so many bytes; None for one box a chunk."""
        return None if not raw and chunk_nbytes <= self.slab_nbytes else self.longest


def limits_for(
    scratch_bytes: int, *, on_device: bool, decode_on: str | None, slab_nbytes: int | None, may_exceed: bool = False
) -> Limits:
    """Size slabs: three at a time fit the scratch, with their tables."""
    room = scratch_bytes // DEPTH
    slab = min(slab_nbytes or STAGED_SLAB, room * 3 // 4 // 4096 * 4096)
    pieces = max(1, min(MAX_PIECES, (room - slab) // ROW_NBYTES))
    threads = max(1, min(16, len(os.sched_getaffinity(0))))
    return Limits(
        scratch_bytes, slab, pieces, threads, decode_on if on_device else "host", on_device, slab_nbytes, may_exceed
    )
