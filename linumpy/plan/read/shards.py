"""Read the index of a shard: which bytes of it hold which inner chunk.

Format: the ``sharding_indexed`` codec of the Zarr v3 specification. In: the bytes of an index and the size of its
file. Out: a table of byte ranges. Errors: :class:`ShardIndexError`, to which the caller adds file and chunk.
"""

from __future__ import annotations

import google_crc32c
import numpy as np

from linumpy.plan.layout import ShardLayout

#: Offset and length of an inner chunk that is not stored.
_EMPTY = np.uint64(2**64 - 1)


class ShardIndexError(ValueError):
    """The index of a shard is not what it must be."""


def read_index(raw: bytes, shard: ShardLayout, file_nbytes: int, chunk_nbytes: int | None) -> np.ndarray:
    """Turn the stored index of a shard into a table.

    Parameters
    ----------
    raw : bytes
        The index with its checksum, as stored.
    shard : ShardLayout
        How it is stored.
    file_nbytes : int
        Size of the shard's file; every range must lie inside.
    chunk_nbytes : int or None
        Bytes of a raw inner chunk; every range must have this length. None for encoded ones, of any length.

    Returns
    -------
    numpy.ndarray of int64, (chunks, 2)
        First byte and number of bytes of each inner chunk, in C order; -1 and 0 for those that are not stored.

    Raises
    ------
    ShardIndexError
        Too short, a wrong checksum, or a range that cannot be.
    """
    if len(raw) != shard.index_nbytes:
        raise ShardIndexError(f"the shard index has {len(raw)} bytes and must have {shard.index_nbytes}")
    body = raw[: 16 * shard.count]
    if shard.index_checksum:
        stored, computed = int.from_bytes(raw[-4:], "little"), google_crc32c.value(body)
        if stored != computed:
            raise ShardIndexError(f"the checksum of the shard index is {stored:#010x} and must be {computed:#010x}")
    table = np.frombuffer(body, ">u8" if shard.index_big_endian else "<u8").reshape(-1, 2).astype(np.uint64)
    offset, nbytes = table[:, 0], table[:, 1]
    empty = (offset == _EMPTY) & (nbytes == _EMPTY)
    _check_ranges(offset, nbytes, ~empty, shard, file_nbytes, chunk_nbytes)
    return np.stack([np.where(empty, -1, offset.astype(np.int64)), np.where(empty, 0, nbytes.astype(np.int64))], axis=1)


def _check_ranges(
    offset: np.ndarray,
    nbytes: np.ndarray,
    stored: np.ndarray,
    shard: ShardLayout,
    file_nbytes: int,
    chunk_nbytes: int | None,
) -> None:
    wrong = np.flatnonzero(stored & (nbytes != np.uint64(chunk_nbytes or 0)))
    if chunk_nbytes is not None and len(wrong):
        raise ShardIndexError(
            f"inner chunk {_inner(wrong[0], shard)} has {nbytes[wrong[0]]} bytes and must have {chunk_nbytes}"
        )
    # Chunks lie beside the index. Compared this way round, no sum of two uint64 can overflow.
    first = 0 if shard.index_at_end else shard.index_nbytes
    end = np.uint64(max(0, file_nbytes - (shard.index_nbytes if shard.index_at_end else 0)))
    outside = np.flatnonzero(stored & ((offset < first) | (offset > end) | (nbytes > end - np.minimum(offset, end))))
    if len(outside):
        where, length = int(offset[outside[0]]), int(nbytes[outside[0]])
        raise ShardIndexError(
            f"inner chunk {_inner(outside[0], shard)} lies at bytes {where} to {where + length}, "
            f"but the file has {file_nbytes}, {shard.index_nbytes} of them for the index"
        )


def _inner(number: int, shard: ShardLayout) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(int(number), shard.chunks_per_shard))
