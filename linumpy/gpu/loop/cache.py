"""Decoded chunks that are kept on the device, for jobs that come back to them.

In: spans of a part, and the versions of their files. Out: addresses of those that are there. A chunk is valid while
inode, size and time of its file are what they were; what was not used for longest makes place. Used by one thread.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from linumpy.gpu.loop.wave import Part
from linumpy.gpu.staging.scatter import Conversion
from linumpy.plan.layout import ArrayLayout
from linumpy.plan.read.scatter import ScatterTable

_log = logging.getLogger(__name__)

#: Device memory is taken in blocks of this size, or of one chunk.
_BLOCK_NBYTES = 64 * 2**20
_ALIGN = 256
#: Chunks of all arrays that are known, of which a table has one number each: 64 MiB.
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
    chunk : numpy.ndarray of int64, (slots,)
        Number of the chunk that it holds, counted over all arrays; -1 for none.
    version : numpy.ndarray of int64, (slots, 3)
        Of the file that it was read from.
    """

    address: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    used: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    chunk: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    version: np.ndarray = field(default_factory=lambda: np.empty((0, 3), np.int64))

    def extend(self, address: np.ndarray) -> None:
        """Add empty slots."""
        n = len(address)
        self.address = np.concatenate([self.address, address])
        self.used = np.concatenate([self.used, np.full(n, -1)])
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
        #: Number of the first chunk of each array, and the slot of each chunk, -1 for those that are not there.
        self._first: dict[object, int] = {}
        self._slot = np.empty(0, np.int32)
        self._known = 0
        self._now = 0
        self.hits = self.misses = 0

    def keeps(self, part: Part) -> bool:
        """Say whether chunks of these arrays are kept at all."""
        if not part.by_chunk or part.layout.chunk_nbytes > self.nbytes:
            return False
        return sum(math.prod(layout.grid_shape) for layout in part.layouts) <= _MOST_CHUNKS

    def find(self, part: Part, spans: np.ndarray) -> np.ndarray:
        """Return the address of each span's chunk, -1 for those that are not there."""
        self._forget_where_full(part)
        slots = self._slots_of(part)
        self._now += 1
        number = self._number(part, spans)  # lengthens the table where it must
        slot = self._slot[number]
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
        slots = self._slots_of(part)
        rows = slot >= 0
        slot, number = slot[rows], self._number(part, spans[rows])
        # A slot that held such a chunk before may have been found for works that have not begun: it is not emptied, and
        # so given to no other chunk before the next search.
        stale = self._slot[number]
        slots.chunk[stale[stale >= 0]] = -1
        self._slot[number] = slot
        slots.used[slot], slots.chunk[slot] = self._now, number
        slots.version[slot] = part.versions[part.wanted.object_index[spans[rows]]]

    def close(self) -> None:
        """Give the memory back."""
        self._blocks, self._slots, self._first = [], {}, {}
        self._slot, self._known = np.empty(0, np.int32), 0
        self.nbytes = self.held = 0

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

    def _number(self, part: Part, spans: np.ndarray) -> np.ndarray:
        """Number the chunks of spans: array after array, and in C order."""
        first = np.array([self._first_of(layout) for layout in part.layouts], np.int64)
        steps = np.array([layout.grid_steps for layout in part.layouts], np.int64).reshape(len(first), -1)
        array = part.wanted.array[spans]
        number = first[array] + (part.wanted.chunk[spans] * steps[array]).sum(axis=1)
        if self._known > len(self._slot):
            more = max(self._known, 2 * len(self._slot)) - len(self._slot)
            self._slot = np.concatenate([self._slot, np.full(more, -1, np.int32)])
        return number

    def _first_of(self, layout: ArrayLayout) -> int:
        first = self._first.setdefault(_key(layout), self._known)
        if first == self._known:
            self._known += math.prod(layout.grid_shape)
        return first

    def _forget_where_full(self, part: Part) -> None:
        """Forget all chunks where those of further arrays would make the table too long."""
        new = [layout for layout in part.layouts if _key(layout) not in self._first]
        if self._known + sum(math.prod(layout.grid_shape) for layout in new) > _MOST_CHUNKS:
            for slots in self._slots.values():
                self._empty(slots, np.flatnonzero(slots.chunk >= 0))
            self._first, self._known = {}, 0

    def _grow(self, part: Part, slots: _Slots, wanted: int) -> None:
        """Take more device memory, while there may be more."""
        each = _room(part)
        while (slots.used < 0).sum() < wanted:
            nbytes = min(self.nbytes - self.held, max(each, min(_BLOCK_NBYTES, wanted * each)))
            if nbytes < each:
                return
            nbytes = nbytes // each * each
            try:
                block, address = self._allocate(nbytes)
            except MemoryError as error:  # jobs do not need the cache
                _log.warning("the chunk cache stays at %d of %d bytes: %s", self.held, self.nbytes, error)
                self.nbytes = self.held
                return
            self._blocks.append(block)
            self.held += nbytes
            slots.extend(address + np.arange(nbytes // each) * each)

    def _empty(self, slots: _Slots, some: np.ndarray) -> None:
        full = some[slots.chunk[some] >= 0]
        chunk = slots.chunk[full]
        self._slot[chunk[self._slot[chunk] == full]] = -1
        slots.chunk[some], slots.used[some] = -1, -1


def _key(layout: ArrayLayout) -> object:
    return layout.root, layout.grid_shape, layout.geometry


def _room(part: Part) -> int:
    return -(-part.layout.chunk_nbytes // _ALIGN) * _ALIGN
