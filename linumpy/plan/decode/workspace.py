"""Memory in which a slab is decoded on the device: where everything lies, and the words that the kernels read.

In: a :class:`~linumpy.plan.codecs.DecodeChain` and the sizes of a slab. Out: :class:`Workspace` and the records of
chunks. Pure: addresses are numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from linumpy.plan.codecs import CHECKSUM_NBYTES, DecodeChain

#: Free bytes before and behind the stored bytes: readers of whole words look that far beyond a stream.
MARGIN = 256
ALIGN = 256
#: As in decode.cuh, zstd.cu and blosc.cu.
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
COUNTERS = 4
_CHECK_NBYTES, _FRAME_NBYTES, _BLOCK_NBYTES = 8, 32, 128
CODES = {"": 1, "lz4": 2, "zstd": 3, "zlib": 4, "gzip": 5, "blosc": 0}
_BYTE_SHUFFLE = 1
#: Decoded bytes of a block of zstd, at most.
MAX_ZSTD_BLOCK = 2**17
_CELL_NBYTES, _LISTED_NBYTES, _GROUP_NBYTES = 4, 4, 8
#: Longest chunk that the kernels decode: they count in 32 bits.
MOST_NBYTES = 2**30


@dataclass(frozen=True)
class Workspace:
    """Memory of one slot, as byte offsets from its beginning.

    Attributes
    ----------
    chunks : int
        Chunks that a slab may have.
    stored_nbytes, decoded_nbytes : int
        Capacity for stored and for decoded bytes.
    stored, words, decoded, unordered, pool, streams, checks, frames, blocks, orders : int
        Where each part begins. `decoded` holds chunks as the scatter reads them; `unordered` what streams decode to,
        the same memory unless bytes are brought into order in between.
    stream_capacity, block_capacity : int
        How many streams and blocks fit.
    pool_nbytes : int
        Capacity for what is between the two steps of zstd.
    words_nbytes : int
        Capacity for the records of chunks and the table of the scatter.
    group_nbytes : int
        Decoded bytes whose blocks of zstd are carried out at the same time; 0 where frames are.
    cells, order, groups : int
        Where the cells of a group, the list of blocks, and the groups in it begin.
    nbytes : int
        Of the whole slot.
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
    orders: int
    stream_capacity: int
    block_capacity: int
    pool_nbytes: int
    words_nbytes: int
    group_nbytes: int
    cells: int
    order: int
    groups: int
    nbytes: int

    @property
    def group_count(self) -> int:
        """Groups of the decoded bytes."""
        return -(-self.decoded_nbytes // self.group_nbytes) if self.group_nbytes else 0


def decoded_room(chain: DecodeChain, chunk_nbytes: int) -> int:
    """Bytes that one chunk takes in the buffers of decoded bytes."""
    return _up(chunk_nbytes + chain.tail)


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
    """Lay out the memory of a slot.

    Parameters
    ----------
    chain : DecodeChain
        What is decoded.
    chunks : int
        Chunks that a slab may have.
    stored_nbytes, decoded_nbytes : int
        Stored and decoded bytes that a slab may have.
    words_nbytes : int
        Bytes of the table of the scatter.
    pool_nbytes : int
        Capacity for what is between the two steps of zstd; rounded down to whole sequences of 8 bytes.
    group_nbytes : int
        Decoded bytes whose blocks of zstd are carried out at the same time, a multiple of 16; 0 for frames.
    """
    pool_nbytes = pool_nbytes // 8 * 8
    blosc, zstd = chain.compressor == "blosc", chain.streams_by == "zstd"
    stream_capacity = decoded_nbytes // 512 + 16 * chunks if blosc else chunks
    block_capacity = decoded_nbytes // 16384 + 4 * chunks + (stream_capacity if blosc else 0) if zstd else 0
    end = 0

    def take(nbytes: int) -> int:
        nonlocal end
        begin, end = end, _up(end + nbytes)
        return begin

    stored = take(MARGIN + stored_nbytes + MARGIN) + MARGIN
    words = take(words_room(chunks) + words_nbytes)
    streams = take(STREAM.itemsize * stream_capacity) if blosc else words + 8 * COUNTERS
    checks = take(_CHECK_NBYTES * stream_capacity)
    frames = take(_FRAME_NBYTES * stream_capacity) if zstd else end
    blocks = take(_BLOCK_NBYTES * block_capacity)
    orders = take(ORDER.itemsize * chunks) if chain.is_reordered else end
    cells = order = groups = end
    if group_nbytes:
        cells = take(
            _CELL_NBYTES * (group_nbytes + MAX_ZSTD_BLOCK)
        )  # a block begins in the group and may end behind it
        order = take(_LISTED_NBYTES * block_capacity)
        groups = take(_GROUP_NBYTES * -(-decoded_nbytes // group_nbytes))
    unordered = take(decoded_nbytes)
    pool = take(pool_nbytes)
    # The pool is of no more use once streams are decoded, and bytes come into order only then.
    decoded = unordered
    if chain.is_reordered:
        decoded = pool
        end = max(end, _up(decoded + decoded_nbytes))
    return Workspace(
        chunks, stored_nbytes, decoded_nbytes, stored, words, decoded, unordered, pool, streams, checks,
        frames, blocks, orders, stream_capacity, block_capacity, pool_nbytes,
        _up(words_room(chunks) + words_nbytes), group_nbytes, cells, order, groups, _up(end),
    )  # fmt: skip


def words_room(chunks: int) -> int:
    """Bytes of :func:`decode_words` for that many chunks."""
    return 8 * COUNTERS + chunks * (STREAM.itemsize + 8 + ORDER.itemsize)


def decode_words(
    chain: DecodeChain, source: np.ndarray, nbytes: np.ndarray, place: np.ndarray, chunk_nbytes: int
) -> np.ndarray:
    """Write down the chunks of a slab as the kernels read them.

    Parameters
    ----------
    chain : DecodeChain
        What is decoded.
    source, nbytes : numpy.ndarray of int64, (n,)
        Stored bytes of each chunk in the slab.
    place : numpy.ndarray of int64, (n,)
        First byte of each in the buffer of decoded chunks.
    chunk_nbytes : int
        Decoded bytes of a chunk.

    Returns
    -------
    numpy.ndarray of uint8
        Counters, records of chunks, offsets of decoded chunks, and orders where only a filter gives them.
    """
    n = len(source)
    counters = np.zeros(COUNTERS, np.int64)
    counters[0] = 0 if chain.compressor == "blosc" else n  # Blosc's streams are counted on the device
    records = np.zeros(n, STREAM)
    records["source"], records["target"] = source, place
    records["source_nbytes"] = nbytes - (CHECKSUM_NBYTES if chain.stored_checksum else 0)
    records["target_nbytes"] = chunk_nbytes + chain.tail
    records["chunk"], records["codec"] = np.arange(n), CODES[chain.compressor]
    orders = np.zeros(n, ORDER)
    if chain.shuffle:
        orders["source"] = orders["target"] = place
        orders["nbytes"] = orders["block_nbytes"] = chunk_nbytes
        orders["typesize"], orders["mode"], orders["chunk"] = chain.shuffle, _BYTE_SHUFFLE, np.arange(n)
    parts = [counters, records, np.asarray(place, np.int64), orders]
    return np.concatenate([np.ascontiguousarray(part).view(np.uint8).reshape(-1) for part in parts])


def _up(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
