"""Decoded chunks that are kept on the device, for jobs that come back to them.

In: spans of a part, and the versions of their files. Out: addresses of those that are there. A chunk is valid while
inode, size and time of its file are what they were; what was not used for longest makes place. Used by one thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from linumpy.gpu.read.scatter import Conversion
from linumpy.gpu.read.wave import Part
from linumpy.plan.read.scatter import ScatterTable

#: Device memory is taken in blocks of this size, or of one chunk.
_BLOCK_NBYTES = 64 * 2**20
_ALIGN = 256
#: Arrays of more chunks than this are not kept: their table of chunks would take more than 64 MiB.
_MOST_CHUNKS = 2**24
_BYTES = Conversion(np.dtype("u1"), np.dtype("u1"), False)


@dataclass(eq=False)
class _Slots:
    """Places for chunks of one size.

    Attributes
    ----------
    address : numpy.ndarray of int64, (slots,)
        Where each begins.
    used : numpy.ndarray of int64, (slots,)
        When it was used last; -1 for one that is empty, a large number for one that is being filled.
    array, chunk : numpy.ndarray of int64, (slots,)
        What it holds.
    version : numpy.ndarray of int64, (slots, 3)
        Of the file that it was read from.
    """

    address: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    used: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    array: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    chunk: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    version: np.ndarray = field(default_factory=lambda: np.empty((0, 3), np.int64))

    def extend(self, address: np.ndarray) -> None:
        """Add empty slots."""
        n = len(address)
        self.address = np.concatenate([self.address, address])
        self.used = np.concatenate([self.used, np.full(n, -1)])
        self.array = np.concatenate([self.array, np.full(n, -1)])
        self.chunk = np.concatenate([self.chunk, np.full(n, -1)])
        self.version = np.concatenate([self.version, np.zeros((n, 3), np.int64)])


_FILLING = 2**62


class ChunkCache:
    """Chunks on the device.

    Parameters
    ----------
    nbytes : int
        Device memory at most.
    allocate : callable
        Makes so many bytes of device memory: an array, and its address.
    """

    def __init__(self, nbytes: int, allocate: Callable[[int], tuple[Any, int]]) -> None:
        self.nbytes, self.held = nbytes, 0
        self._allocate = allocate
        self._blocks: list[Any] = []
        self._slots: dict[int, _Slots] = {}
        self._arrays: dict[tuple[str, int], int] = {}
        self._tables: list[np.ndarray] = []
        self._now = 0
        self.hits = self.misses = 0

    def keeps(self, part: Part) -> bool:
        """Say whether chunks of an array are kept at all."""
        few = math.prod(_grid(part)) <= _MOST_CHUNKS
        return part.by_chunk and few and part.layout.chunk_nbytes <= self.nbytes

    def find(self, part: Part, spans: np.ndarray) -> np.ndarray:
        """Return the address of each span's chunk, -1 for those that are not there."""
        slots, table = self._slots_of(part), self._table(part)
        self._now += 1
        slot = table[_number(part, spans)]
        there = slot >= 0
        versions = part.versions[part.wanted.object_index[spans]]
        there[there] = (slots.version[slot[there]] == versions[there]).all(axis=1)
        slots.used[slot[there]] = self._now
        self.hits += int(there.sum())
        self.misses += int(len(there) - there.sum())
        address = np.full(len(spans), -1, np.int64)
        address[there] = slots.address[slot[there]]
        return address

    def reserve(self, part: Part, spans: np.ndarray) -> np.ndarray:
        """Find places for chunks that are on their way; returns slots, -1 for chunks that there is no place for."""
        slots = self._slots_of(part)
        self._grow(part, slots, len(spans))
        count = min(len(spans), int((slots.used < min(self._now, _FILLING)).sum()))
        found = np.full(len(spans), -1, np.int64)
        if count:
            oldest = np.argpartition(slots.used, count - 1)[:count]
            self._empty(slots, oldest)
            slots.used[oldest] = _FILLING
            found[:count] = oldest
        return found

    def addresses(self, part: Part, slot: np.ndarray) -> np.ndarray:
        """Return where slots begin."""
        return self._slots_of(part).address[slot]

    def keep(self, part: Part, spans: np.ndarray, slot: np.ndarray) -> None:
        """Note that chunks are in their slots."""
        slots, table = self._slots_of(part), self._table(part)
        rows = slot >= 0
        slot, number = slot[rows], _number(part, spans[rows])
        stale = table[number]
        self._empty(slots, stale[stale >= 0])
        table[number] = slot
        slots.used[slot], slots.chunk[slot] = self._now, number
        slots.array[slot] = self._arrays[_key(part)]
        slots.version[slot] = part.versions[part.wanted.object_index[spans[rows]]]

    def drop(self, part: Part, slot: np.ndarray) -> None:
        """Give slots back that were reserved in vain."""
        slots = self._slots_of(part)
        slots.used[slot[slot >= 0]] = -1

    def table(self, part: Part, slot: np.ndarray, source: np.ndarray) -> tuple[Conversion, ScatterTable]:
        """Make the table that copies decoded chunks from a slab into their slots."""
        rows = slot >= 0
        count, nbytes = int(rows.sum()), part.layout.chunk_nbytes
        ones = np.ones((1, 1), np.int64)
        return _BYTES, ScatterTable(
            1, 1, ones, ones, np.zeros((1, 16), np.uint8), source[rows], self.addresses(part, slot[rows]),
            np.zeros(count, np.int64), np.full((count, 1), nbytes, np.int64), True,
        )  # fmt: skip

    def _slots_of(self, part: Part) -> _Slots:
        return self._slots.setdefault(_room(part), _Slots())

    def _table(self, part: Part) -> np.ndarray:
        """Slot of each chunk of an array, -1 for those that are not there."""
        key = _key(part)
        if key not in self._arrays:
            self._arrays[key] = len(self._tables)
            self._tables.append(np.full(math.prod(_grid(part)), -1, np.int64))
        return self._tables[self._arrays[key]]

    def _grow(self, part: Part, slots: _Slots, wanted: int) -> None:
        """Take more device memory, while there may be more."""
        each = _room(part)
        while (slots.used < 0).sum() < wanted:
            nbytes = min(self.nbytes - self.held, max(each, min(_BLOCK_NBYTES, wanted * each)))
            if nbytes < each:
                return
            nbytes = nbytes // each * each
            block, address = self._allocate(nbytes)
            self._blocks.append(block)
            self.held += nbytes
            slots.extend(address + np.arange(nbytes // each) * each)

    def _empty(self, slots: _Slots, some: np.ndarray) -> None:
        full = some[slots.array[some] >= 0]
        for array in np.unique(slots.array[full]).tolist():
            mine = full[slots.array[full] == array]
            table = self._tables[array]
            chunk = slots.chunk[mine]
            table[chunk[table[chunk] == mine]] = -1
        slots.array[some], slots.used[some] = -1, -1


def _key(part: Part) -> tuple[str, int]:
    return str(part.layout.root), part.layout.chunk_nbytes


def _room(part: Part) -> int:
    return -(-part.layout.chunk_nbytes // _ALIGN) * _ALIGN


def _grid(part: Part) -> list[int]:
    layout = part.layout
    return [-(-n // size) for n, size in zip(layout.shape, layout.chunk_shape, strict=True)]


def _number(part: Part, spans: np.ndarray) -> np.ndarray:
    """Number the chunks of spans in C order."""
    number = np.zeros(len(spans), np.int64)
    for axis, size in enumerate(_grid(part)):
        number = number * size + part.wanted.chunk[spans, axis]
    return number
