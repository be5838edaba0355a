"""Memory of one slot, and how much of it each chunk takes.

What a chunk needs between the two steps of zstd is known only when its frame has been looked at, on the device. It
goes with the stored size, which is known before: so slabs are packed by an estimate, and all memory that is left over
is theirs. In: codec chain, sizes, memory. Out: :class:`Slot`. Pure.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from linumpy.plan.codecs import DecodeChain
from linumpy.plan.decode.workspace import ALIGN, Workspace, decoded_room, plan_workspace

#: Literals and sequences of zstd take at most about this many bytes, as parts of the stored and of the decoded bytes.
#: OCT-like voxels took 0.76, 1.14, 1.40 and 1.48 of the decoded bytes at ratios of 5, 3, 2 and 1.5 and level 19, and
#: less at lower levels; speckle that does not repeat took 1.0. A chunk that needs more than is left over goes to the
#: host.
_POOL = ((4.0, 0.0), (2.75, 0.22), (0.0, 1.5))
#: Part of a slot that stored bytes may take, and that is pinned on the host.
_STORED_PART = 0.25
#: What parts lose by their alignment.
_SLACK = 32 * ALIGN


@dataclass(frozen=True)
class Slot:
    """Memory in which slabs are decoded, one after another.

    Attributes
    ----------
    chain : DecodeChain
        What is decoded.
    chunk_nbytes : int
        Decoded bytes of a chunk.
    nbytes : int
        Device memory.
    stored_nbytes : int
        Stored bytes that a slab may have, on the host too.
    chunks : int
        Chunks that a slab may have at most.
    table_nbytes : int
        Bytes of the scatter's table for each chunk.
    group_nbytes : int
        Decoded bytes whose blocks of zstd are carried out at the same time; 0 where frames are.
    """

    chain: DecodeChain
    chunk_nbytes: int
    nbytes: int
    stored_nbytes: int
    chunks: int
    table_nbytes: int
    group_nbytes: int = 0

    @property
    def words_nbytes(self) -> int:
        """Bytes of the records of chunks and of their table."""
        return self._plain(self.chunks).words_nbytes

    @property
    def capacity(self) -> int:
        """Bytes that the stored bytes and the weights of a slab may take."""
        return self.nbytes - self._plain(0).nbytes - _SLACK

    def weights(self, stored: np.ndarray) -> np.ndarray:
        """Estimate the bytes that chunks take beyond their stored ones, from the number of those."""
        pool = np.zeros(len(stored), np.int64)
        if self.chain.streams_by == "zstd":
            needs = [a * stored + b * self.chunk_nbytes for a, b in _POOL]
            pool = np.minimum.reduce(needs).astype(np.int64) + ALIGN
        if self.chain.is_reordered:  # decoded chunks overwrite the pool
            pool = np.maximum(0, pool - decoded_room(self.chain, self.chunk_nbytes))
        return self.weight_of_any + pool

    @property
    def weight_of_any(self) -> int:
        """Bytes that each chunk takes beyond its stored ones and what is kept between the two steps of zstd."""
        return -(-(self._plain(64).nbytes - self._plain(0).nbytes) // 64) + 8

    def lay_out(self, chunks: int, stored_nbytes: int) -> Workspace:
        """Lay out a slab; what is left over is for the data between the two steps of zstd."""
        return _lay_out(self, chunks, stored_nbytes)

    def _plain(self, chunks: int, stored_nbytes: int = 0, pool_nbytes: int = 0) -> Workspace:
        return plan_workspace(
            self.chain,
            chunks=chunks,
            stored_nbytes=stored_nbytes,
            decoded_nbytes=chunks * decoded_room(self.chain, self.chunk_nbytes),
            words_nbytes=ALIGN + chunks * self.table_nbytes,
            pool_nbytes=pool_nbytes,
            group_nbytes=self.group_nbytes,
        )


@functools.lru_cache(maxsize=256)
def _lay_out(slot: Slot, chunks: int, stored_nbytes: int) -> Workspace:
    pool = slot._plain(chunks, stored_nbytes).pool
    return slot._plain(chunks, stored_nbytes, (slot.nbytes - pool) // ALIGN * ALIGN)


def longest_stored(chunk_nbytes: int) -> int:
    """Bytes of a chunk that no codec could make smaller, headers counted in."""
    return chunk_nbytes + chunk_nbytes // 64 + 4096


def fit_slot(
    chain: DecodeChain,
    chunk_nbytes: int,
    *,
    chunks: int,
    most_nbytes: int,
    table_nbytes: int,
    margin: int,
    group_nbytes: int = 0,
) -> Slot | None:
    """Make a slot.

    Parameters
    ----------
    chain : DecodeChain
        What is decoded.
    chunk_nbytes : int
        Decoded bytes of a chunk.
    chunks : int
        More in a slab are of no use.
    most_nbytes : int
        Device memory at most.
    table_nbytes : int
        Bytes of the scatter's table for each chunk.
    margin : int
        Bytes by which alignment may lengthen what is stored of a chunk.
    group_nbytes : int
        As of :class:`Slot`.

    Returns
    -------
    Slot or None
        None where not even one chunk fits that could not be made smaller.
    """
    longest = longest_stored(chunk_nbytes) + margin

    def slot(nbytes: int) -> Slot:
        stored = min(max(longest, int(_STORED_PART * nbytes)), chunks * longest)
        return Slot(chain, chunk_nbytes, nbytes, -(-stored // ALIGN) * ALIGN, chunks, table_nbytes, group_nbytes)

    widest = slot(most_nbytes // ALIGN * ALIGN)
    worst = longest + int(widest.weights(np.array([longest]))[0])
    if worst > widest.capacity:
        return None
    # No more than all chunks need.
    needed = widest.nbytes - widest.capacity + chunks * worst
    return slot(min(widest.nbytes, -(-needed // ALIGN) * ALIGN))
