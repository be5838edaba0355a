"""Limits of the slabs in which a reader stages and decodes chunks on a device, and where chunks are decoded.

A slab is one staged batch of chunks, with a row for each box that is scattered from it. Each slab has pinned memory,
and a slot of device memory while the device works on it.

In: device memory. Out: :class:`Limits`, and the :class:`~linumpy.plan.decode.placement.DecodePlacement` of chunks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from linumpy.device import usable_cores
from linumpy.plan.codecs import DecodeChain
from linumpy.plan.decode.placement import DecodePlacement, choose_placement, may_be_grouped

#: Slabs: two are filled while the device works on the others.
SLABS = 5
#: Slots of device memory for slabs that are copied, decoded and scattered.
SLOTS = 3
#: Maximum pinned memory of a slab: all slabs together nearly fit the processor's cache.
_MAX_PINNED_NBYTES = 40 * 2**20
#: Minimum and maximum number of a slab's rows (boxes), and bytes of a slot for each row.
_MIN_ROWS, _MAX_ROWS, _ROW_NBYTES = 64, 4096, 1024
#: Words of the scatter tables for each row of a slab, and bytes beside them, as in device.cpp.
_ROW_WORDS, _TABLE_SPARE = 14 + 9, 4096
#: The memory of a slot is a multiple of this.
_PAGE = 4096
#: More device memory than any device has.
_UNLIMITED_NBYTES = 2**50
#: More decoding threads gain nothing.
_MAX_THREADS = 16


@dataclass(frozen=True)
class Limits:
    """Limits of the slabs of a reader.

    `scratch_bytes`: device memory for all slots. `decode_on`: where to decode, ``"device"`` or ``"host"``; None to
    choose the faster one. `slab_nbytes`: maximum bytes of a slab's chunks; None for as many as fit. `may_exceed`:
    whether long zstd chunks that do not fit the scratch memory get memory of their own; otherwise the host decodes
    them. `threads`: threads of the host among which work is divided.
    """

    scratch_bytes: int
    decode_on: str | None = None
    slab_nbytes: int | None = None
    may_exceed: bool = False
    threads: int = field(default_factory=lambda: max(1, min(_MAX_THREADS, usable_cores())))

    @property
    def device_nbytes(self) -> int:
        """Device memory of a slot, including the tables of a slab."""
        nbytes = self.scratch_bytes // SLOTS // _PAGE * _PAGE
        if self.slab_nbytes is None:
            return nbytes
        return min(nbytes, -(-(self.slab_nbytes + _table_nbytes(_rows(self.slab_nbytes))) // _PAGE) * _PAGE)

    @property
    def rows(self) -> int:
        """Maximum boxes of a slab."""
        return _rows(self.device_nbytes)

    @property
    def table_nbytes(self) -> int:
        """Device memory of a slot for the tables of a slab."""
        return _table_nbytes(self.rows)

    @property
    def data_nbytes(self) -> int:
        """Device memory of a slot for stored and decoded chunks."""
        return self.device_nbytes - self.table_nbytes

    @property
    def pinned_nbytes(self) -> int:
        """Pinned memory of a slab."""
        return min(_MAX_PINNED_NBYTES, max(1, self.data_nbytes // 2 // _PAGE) * _PAGE)

    @property
    def held_nbytes(self) -> int:
        """Device memory of all slots."""
        return SLOTS * self.device_nbytes


def placement_of(
    chain: DecodeChain, chunk_nbytes: int, chunks: int, limits: Limits, capacity: int | None = None
) -> DecodePlacement:
    """Choose where chunks are decoded, in `capacity` bytes, by default those of all slots, by the core's alignment."""
    return choose_placement(
        chain,
        chunk_nbytes,
        chunks=chunks,
        capacity=SLOTS * limits.data_nbytes if capacity is None else capacity,
        cores=limits.threads,
        table_nbytes=8,
        margin=256,
        decode_on=limits.decode_on,
    )


def describe_placement(chain: DecodeChain, chunk_nbytes: int, chunks: int, limits: Limits) -> str:
    """Describe where chunks are decoded; for long zstd chunks this may depend on the free device memory."""
    placement = placement_of(chain, chunk_nbytes, chunks, limits)
    if placement.slot is not None or not limits.may_exceed or not may_be_grouped(chain, chunk_nbytes):
        return str(placement)
    if placement_of(chain, chunk_nbytes, 1, replace(limits, decode_on="device")).slot is not None:
        return str(placement)
    unlimited = replace(limits, decode_on="device", scratch_bytes=_UNLIMITED_NBYTES)
    separate = placement_of(chain, chunk_nbytes, 1, unlimited)
    if separate.slot is None:
        return str(placement)
    needed = f"{2 * separate.slot.nbytes / 2**30:.1f} GiB"
    return f"{separate}, where {needed} of device memory are free beside the result; else {placement}"


def _rows(nbytes: int) -> int:
    return min(max(nbytes // _ROW_NBYTES, _MIN_ROWS), _MAX_ROWS)


def _table_nbytes(rows: int) -> int:
    return 8 * rows * _ROW_WORDS + _TABLE_SPARE
