"""Plan the device memory of one slot, and estimate the share of each chunk.

The size of zstd's intermediate data (literals and sequences) is known only after the device has read the frame. The
size correlates with the stored size, so slabs are filled by an estimate, the weight of each chunk: the bytes that
the chunk takes in addition to its stored bytes. The pool, for the intermediate data, is the memory of a slot that no
other part takes. In: codec chain, sizes, memory. Out: :class:`Slot`. Pure.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from linumpy.plan.codecs import DecodeChain
from linumpy.plan.decode.workspace import ALIGN, Workspace, padded_nbytes, plan_workspace

#: Upper bounds of zstd's intermediate data of a chunk, each a multiple of the stored bytes plus a multiple of the
#: decoded bytes. The lowest bound applies. Measured at level 19: 0.76, 1.14, 1.40 and 1.48 times the decoded bytes for
#: OCT-like voxels at compression ratios of 5, 3, 2 and 1.5, less at lower levels; 1.0 times for speckle that does not
#: repeat. The host decodes a chunk for which the pool is too small. `weight_of` in device.hpp has the same numbers.
_POOL_BOUNDS = ((4.0, 0.0), (2.75, 0.22), (0.0, 1.5))
#: Fraction of a slot for stored bytes; the host has the same amount of pinned memory for them.
_STORED_FRACTION = 0.25
#: Bytes lost to the alignment of the parts of a slot.
_ALIGNMENT_NBYTES = 32 * ALIGN


@dataclass(frozen=True)
class Slot:
    """Device memory in which slabs are decoded, one after another.

    - `chunk_nbytes`: decoded bytes of a chunk.
    - `nbytes`: device memory of the slot.
    - `stored_nbytes`: capacity for the stored bytes of a slab, also on the host.
    - `chunks`: maximum number of chunks in a slab.
    - `table_nbytes`: bytes of the scatter's table for each chunk.
    - `group_nbytes`: decoded bytes of the zstd blocks that are executed at the same time; 0 to execute frame by frame.
    """

    chain: DecodeChain
    chunk_nbytes: int
    nbytes: int
    stored_nbytes: int
    chunks: int
    table_nbytes: int
    group_nbytes: int = 0

    @property
    def capacity(self) -> int:
        """Capacity for the stored bytes and the weights of a slab, in bytes."""
        return self.nbytes - self._workspace(0).nbytes - _ALIGNMENT_NBYTES

    def weights(self, stored: np.ndarray) -> np.ndarray:
        """Estimate from the stored sizes the bytes that chunks take in addition to their stored bytes."""
        pool_nbytes = np.zeros(len(stored), np.int64)
        if self.chain.streams_by == "zstd":
            bounds = [of_stored * stored + of_decoded * self.chunk_nbytes for of_stored, of_decoded in _POOL_BOUNDS]
            pool_nbytes = np.minimum.reduce(bounds).astype(np.int64) + ALIGN
        if self.chain.is_reordered:  # the final order of decoded chunks is written over the pool
            pool_nbytes = np.maximum(0, pool_nbytes - padded_nbytes(self.chain, self.chunk_nbytes))
        return self.fixed_weight + pool_nbytes

    @property
    def fixed_weight(self) -> int:
        """Bytes that each chunk takes in addition to its stored bytes and zstd's intermediate data."""
        return -(-(self._workspace(64).nbytes - self._workspace(0).nbytes) // 64) + 8

    def lay_out(self, chunks: int, stored_nbytes: int) -> Workspace:
        """Lay out a slab of `chunks` chunks with `stored_nbytes` bytes; the pool is all the remaining memory."""
        return _lay_out(self, chunks, stored_nbytes)

    def _workspace(self, chunks: int, stored_nbytes: int = 0, pool_nbytes: int = 0) -> Workspace:
        return plan_workspace(
            self.chain,
            chunks=chunks,
            stored_nbytes=stored_nbytes,
            decoded_nbytes=chunks * padded_nbytes(self.chain, self.chunk_nbytes),
            words_nbytes=ALIGN + chunks * self.table_nbytes,
            pool_nbytes=pool_nbytes,
            group_nbytes=self.group_nbytes,
        )


@functools.lru_cache(maxsize=256)
def _lay_out(slot: Slot, chunks: int, stored_nbytes: int) -> Workspace:
    pool_offset = slot._workspace(chunks, stored_nbytes).pool
    return slot._workspace(chunks, stored_nbytes, (slot.nbytes - pool_offset) // ALIGN * ALIGN)


def longest_stored(chunk_nbytes: int) -> int:
    """Return an upper bound of the stored bytes of an incompressible chunk, including headers."""
    return chunk_nbytes + chunk_nbytes // 64 + 4096


def fit_slot(
    chain: DecodeChain,
    chunk_nbytes: int,
    *,
    chunks: int,
    max_nbytes: int,
    table_nbytes: int,
    margin: int,
    group_nbytes: int = 0,
) -> Slot | None:
    """Plan a slot: the smallest that holds a slab of `chunks` incompressible chunks, or `max_nbytes` if that is less.

    - `chunk_nbytes`: decoded bytes of a chunk.
    - `chunks`: maximum number of chunks in a slab.
    - `max_nbytes`: maximum device memory of the slot, in bytes.
    - `table_nbytes`: bytes of the scatter's table for each chunk.
    - `margin`: maximum number of bytes that alignment adds to the stored bytes of a chunk.
    - `group_nbytes`: see :class:`Slot`.

    Returns None if not even one incompressible chunk fits.
    """
    longest = longest_stored(chunk_nbytes) + margin

    def slot_of(nbytes: int) -> Slot:
        stored = min(max(longest, int(_STORED_FRACTION * nbytes)), chunks * longest)
        return Slot(chain, chunk_nbytes, nbytes, -(-stored // ALIGN) * ALIGN, chunks, table_nbytes, group_nbytes)

    largest = slot_of(max_nbytes // ALIGN * ALIGN)
    max_weight = longest + int(largest.weights(np.array([longest]))[0])
    if max_weight > largest.capacity:
        return None
    needed = largest.nbytes - largest.capacity + chunks * max_weight
    return slot_of(min(largest.nbytes, -(-needed // ALIGN) * ALIGN))
