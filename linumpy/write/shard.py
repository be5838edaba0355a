"""The stored bytes of chunks (or shards) from those of (inner) chunks.

In: the stored bytes of chunks, one behind another in host memory, or each by itself. Out: the parts of a file, in
their order. Pure; Errors: none of its own.

Format: https://zarr-specs.readthedocs.io/en/latest/v3/codecs/sharding-indexed/
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from linumpy.io.codecs import checksum
from linumpy.plan.codecs import CHECKSUM_NBYTES
from linumpy.plan.layout import ShardLayout
from linumpy.write.chunk_file import Bytes

#: Offset and size of an inner chunk that is missing.
_MISSING = 2**64 - 1


@dataclass(frozen=True)
class Streams:
    """The stored bytes of chunks.

    Attributes
    ----------
    parts : sequence of bytes or numpy.ndarray
        The bytes of the chunks that are not missing, in order; a part may hold several.
    sizes : numpy.ndarray of int64
        Stored bytes of each chunk; 0 of those that hold nothing but the fill value, which are not stored.
    """

    parts: Sequence[Bytes]
    sizes: np.ndarray


def packed_streams(arena: np.ndarray, offsets: np.ndarray, is_fill: np.ndarray, *, with_checksum: bool) -> Streams:
    """Return the stored bytes of chunks that lie one behind another.

    Parameters
    ----------
    arena : numpy.ndarray of uint8
        From the first chunk on.
    offsets : numpy.ndarray of int64
        One more than chunks; chunk k is ``arena[offsets[k] - offsets[0] : offsets[k + 1] - offsets[0]]``.
    is_fill : numpy.ndarray of bool
        Which chunks are not stored.
    with_checksum : bool
        Whether a CRC-32C follows each chunk, which is made here.
    """
    bounds, stored = offsets - offsets[0], ~is_fill
    sizes = np.where(stored, np.diff(bounds), 0)
    if with_checksum:
        chunks = [arena[bounds[k] : bounds[k + 1]] for k in np.flatnonzero(stored).tolist()]
        parts: list[Bytes] = [part for chunk in chunks for part in (chunk, checksum(chunk))]
        return Streams(parts, sizes + CHECKSUM_NBYTES * stored)
    # Chunks side by side are one part.
    edges = np.flatnonzero(np.diff(stored, prepend=False, append=False)).tolist()
    return Streams([arena[bounds[a] : bounds[b]] for a, b in zip(edges[::2], edges[1::2], strict=True)], sizes)


def own_streams(chunks: Sequence[Bytes | None], *, with_checksum: bool) -> Streams:
    """Return the stored bytes of chunks that each have memory of their own; None of those that are not stored."""
    parts: list[Bytes] = []
    sizes = np.zeros(len(chunks), np.int64)
    for number, chunk in enumerate(chunks):
        if chunk is not None:
            own: list[Bytes] = [chunk, checksum(chunk)] if with_checksum else [chunk]
            sizes[number] = sum(map(len, own))
            parts += own
    return Streams(parts, sizes)


def file_parts(streams: Streams, shard: ShardLayout | None, slots: np.ndarray | None) -> list[Bytes]:
    """Return the parts of the file of a chunk, or of a shard; none where all of it has the fill value.

    Parameters
    ----------
    streams : Streams
        Of one chunk, or of the inner chunks.
    shard : ShardLayout or None
        None without shards.
    slots : numpy.ndarray of int64 or None
        With shards, the number of each inner chunk in the index; inner chunks without bytes are missing there.
    """
    parts = list(streams.parts)
    if shard is None or not parts:
        return parts
    assert slots is not None
    index = shard_index(shard, slots, streams.sizes)
    return [*parts, index] if shard.index_at_end else [index, *parts]


def shard_index(shard: ShardLayout, slots: np.ndarray, sizes: np.ndarray) -> bytes:
    """Return the index of a shard whose inner chunks lie one behind another."""
    ends = np.cumsum(sizes) + (0 if shard.index_at_end else shard.index_nbytes)
    stored = sizes > 0
    index = np.full((shard.count, 2), _MISSING, ">u8" if shard.index_big_endian else "<u8")
    index[slots[stored], 0] = (ends - sizes)[stored]
    index[slots[stored], 1] = sizes[stored]
    data = index.tobytes()
    return data + checksum(data) if shard.index_checksum else data
