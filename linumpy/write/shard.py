"""Order the bytes in the file of a chunk or shard, and make the index of a shard.

In: the sizes and stored bytes of (inner) chunks. Out: groups of buffers. Pure; errors: none of its own.

Format: https://zarr-specs.readthedocs.io/en/latest/v3/codecs/sharding-indexed/
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from linumpy.io.codecs import checksum
from linumpy.plan.codecs import CHECKSUM_NBYTES
from linumpy.plan.layout import ShardLayout
from linumpy.write.chunk_file import Bytes

#: Offset and size, in the index, of an inner chunk that is not stored.
_MISSING = 2**64 - 1


def stored_sizes(offsets: np.ndarray, is_fill: np.ndarray, *, with_checksum: bool) -> np.ndarray:
    """Return the number of stored bytes of each of several consecutive chunks; 0 for a chunk that is not stored.

    - `offsets` (int64): offset of each chunk, and the end of the last chunk.
    - `is_fill` (bool): which chunks hold only the fill value, and are not stored.
    - `with_checksum`: whether a CRC-32C follows each chunk.
    """
    return np.where(is_fill, 0, np.diff(offsets) + CHECKSUM_NBYTES * with_checksum)


def stored_spans(offsets: np.ndarray, is_fill: np.ndarray, *, with_checksum: bool) -> list[tuple[int, int]]:
    """Return begin and end of each span of stored bytes; adjacent chunks form one span unless checksums follow them.

    Parameters are those of :func:`stored_sizes`.
    """
    stored = ~is_fill
    if with_checksum:
        return [(int(offsets[k]), int(offsets[k + 1])) for k in np.flatnonzero(stored).tolist()]
    edges = np.flatnonzero(np.diff(stored, prepend=False, append=False)).tolist()
    return [(int(offsets[a]), int(offsets[b])) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def file_groups(
    groups: Iterable[Sequence[Bytes]], sizes: np.ndarray, shard: ShardLayout | None, slots: np.ndarray | None
) -> Iterator[Sequence[Bytes]]:
    """Yield the bytes of a file in order: of a chunk, or of a shard with its index before or after its inner chunks.

    - `sizes` (int64): stored bytes of each chunk; 0 for inner chunks that are not stored.
    - `shard`: layout of the shard; None for a chunk in a file of its own.
    - `slots` (int64): with shards, the number of each inner chunk in the index.
    """
    if shard is None:
        yield from groups
        return
    assert slots is not None
    index = shard_index(shard, slots, sizes)
    if not shard.index_at_end:
        yield [index]
    yield from groups
    if shard.index_at_end:
        yield [index]


def shard_index(shard: ShardLayout, slots: np.ndarray, sizes: np.ndarray) -> bytes:
    """Return the encoded index of a shard whose inner chunks are stored consecutively; parameters of `file_groups`."""
    ends = np.cumsum(sizes) + (0 if shard.index_at_end else shard.index_nbytes)
    stored = sizes > 0
    index = np.full((shard.count, 2), _MISSING, ">u8" if shard.index_big_endian else "<u8")
    index[slots[stored], 0] = (ends - sizes)[stored]
    index[slots[stored], 1] = sizes[stored]
    data = index.tobytes()
    return data + checksum(data) if shard.index_checksum else data
