"""Plan the device memory in which slabs are decoded: a slot, the layout of a slab in it, and the share of each chunk.

The size of zstd's intermediate data (literals and sequences) is known only after the device has read the frame. The
size correlates with the stored size, so slabs are filled by an estimate, the weight of each chunk: the bytes that the
chunk takes in addition to its stored bytes. The pool, for the intermediate data, is the memory of a slot that no other
part takes. Pure: addresses are numbers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from linumpy.plan.codecs import DecodeChain

#: Padding in bytes before and after the stored bytes: kernels read whole words, beyond the ends of a stream.
MARGIN = 256
#: Alignment of every part of the workspace, in bytes.
ALIGN = 256
#: The records `Stream` of gpu/codecs/cuda/decode.cuh and `Order` (the shuffle of a chunk) of blosc.cu.
STREAM = np.dtype(
    [
        ("source", "i8"),
        ("source_nbytes", "i8"),
        ("target", "i8"),
        ("target_nbytes", "i8"),
        ("chunk", "i4"),
        ("codec", "i4"),
    ]
)
ORDER = np.dtype(
    [
        ("source", "i8"),
        ("target", "i8"),
        ("nbytes", "i8"),
        ("block_nbytes", "u4"),
        ("typesize", "u4"),
        ("mode", "i4"),
        ("chunk", "i4"),
    ]
)
#: Number of counters (64 bits each) before the records.
COUNTERS = 4
#: Sizes of the records `Check` of decode.cuh, and `Frame` and `Block` of zstd_records.cuh.
_CHECK_NBYTES, _FRAME_NBYTES, _BLOCK_NBYTES = 8, 32, 128
#: Numbers of codecs in a `Stream`, as in gpu/codecs/cuda/decode.cuh.
CODES = {"": 1, "lz4": 2, "zstd": 3, "zlib": 4, "gzip": 5, "blosc": 0}
#: Maximum decoded size of a zstd block.
MAX_ZSTD_BLOCK = 2**17
#: Sizes of a cell of zstd_cells.cu, of an entry of the list of blocks, and of the record `Group` of zstd_records.cuh.
_CELL_NBYTES, _LISTED_NBYTES, _GROUP_NBYTES = 4, 4, 8
#: Kernels that decode frame by frame require shorter chunks: they count in 32 bits.
MAX_CHUNK_NBYTES = 2**30


@dataclass(frozen=True)
class Workspace:
    """Layout of one slot: offsets of its parts in bytes, and capacities.

    - `words`: the counters, the records of chunks and the table of the scatter.
    - `decoded`: chunks as the scatter reads them; `unordered`: the output of the streams, in the same memory unless a
      shuffle is undone in between.
    - `pool`: the intermediate data of zstd.
    - `group_nbytes`: decoded bytes of the zstd blocks that are executed at the same time; 0 to execute frame by frame.
    - `cells`, `block_list`, `groups`: cells of a group, list of blocks in the order of their bytes, and records that
      say which part of the list each group is.
    """

    chunks: int
    stored_nbytes: int
    decoded_nbytes: int
    stored: int
    words: int
    decoded: int
    unordered: int
    pool: int
    streams: int
    checks: int
    frames: int
    blocks: int
    shuffle_orders: int
    stream_capacity: int
    block_capacity: int
    pool_nbytes: int
    words_nbytes: int
    group_nbytes: int
    cells: int
    block_list: int
    groups: int
    nbytes: int

    @property
    def group_count(self) -> int:
        """Number of groups that the decoded bytes are cut into."""
        return -(-self.decoded_nbytes // self.group_nbytes) if self.group_nbytes else 0


def padded_nbytes(chain: DecodeChain, chunk_nbytes: int) -> int:
    """Return the distance in bytes between chunks in the buffers of decoded bytes."""
    return _aligned(chunk_nbytes + chain.tail_nbytes)


def plan_workspace(
    chain: DecodeChain,
    *,
    chunks: int,
    stored_nbytes: int,
    decoded_nbytes: int,
    words_nbytes: int,
    pool_nbytes: int,
    group_nbytes: int = 0,
) -> Workspace:
    """Lay out the memory of a slot, for at most `chunks` chunks in a slab; parameters are as in :class:`Workspace`."""
    pool_nbytes = pool_nbytes // 8 * 8
    blosc, zstd = chain.compressor == "blosc", chain.streams_by == "zstd"
    stream_capacity = decoded_nbytes // 512 + 16 * chunks if blosc else chunks
    block_capacity = decoded_nbytes // 16384 + 4 * chunks + (stream_capacity if blosc else 0) if zstd else 0
    end = 0

    def allocate(nbytes: int) -> int:
        nonlocal end
        begin, end = end, _aligned(end + nbytes)
        return begin

    stored = allocate(MARGIN + stored_nbytes + MARGIN) + MARGIN
    words = allocate(records_nbytes(chunks) + words_nbytes)
    streams = allocate(STREAM.itemsize * stream_capacity) if blosc else words + 8 * COUNTERS
    checks = allocate(_CHECK_NBYTES * stream_capacity)
    frames = allocate(_FRAME_NBYTES * stream_capacity) if zstd else end
    blocks = allocate(_BLOCK_NBYTES * block_capacity)
    shuffle_orders = allocate(ORDER.itemsize * chunks) if chain.is_reordered else end
    cells = block_list = groups = end
    if group_nbytes:
        cells = allocate(_CELL_NBYTES * (group_nbytes + MAX_ZSTD_BLOCK))  # the last block may end after the group
        block_list = allocate(_LISTED_NBYTES * block_capacity)
        groups = allocate(_GROUP_NBYTES * -(-decoded_nbytes // group_nbytes))
    unordered = allocate(decoded_nbytes)
    pool = allocate(pool_nbytes)
    # A shuffle is undone after all streams are decoded, so its output may overwrite the pool.
    decoded = unordered
    if chain.is_reordered:
        decoded = pool
        end = max(end, _aligned(decoded + decoded_nbytes))
    return Workspace(
        chunks=chunks, stored_nbytes=stored_nbytes, decoded_nbytes=decoded_nbytes, stored=stored, words=words,
        decoded=decoded, unordered=unordered, pool=pool, streams=streams, checks=checks, frames=frames, blocks=blocks,
        shuffle_orders=shuffle_orders, stream_capacity=stream_capacity, block_capacity=block_capacity,
        pool_nbytes=pool_nbytes, words_nbytes=_aligned(records_nbytes(chunks) + words_nbytes),
        group_nbytes=group_nbytes, cells=cells, block_list=block_list, groups=groups, nbytes=_aligned(end),
    )  # fmt: skip


def records_nbytes(chunks: int) -> int:
    """Return the bytes of the counters, and of the `Stream`, the decoded offset and the `Order` of each chunk."""
    return 8 * COUNTERS + chunks * (STREAM.itemsize + 8 + ORDER.itemsize)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


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
    """Device memory in which slabs of at most `chunks` chunks are decoded, one after another.

    - `chunk_nbytes`: decoded bytes of a chunk.
    - `stored_nbytes`: capacity for the stored bytes of a slab, also on the host.
    - `table_nbytes`: bytes of the scatter's table for each chunk.
    - `group_nbytes`: as in :class:`Workspace`.
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

    - `table_nbytes`, `group_nbytes`: see :class:`Slot`.
    - `margin`: maximum number of bytes that alignment adds to the stored bytes of a chunk.

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
