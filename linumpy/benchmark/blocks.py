"""Cut an array into pieces of bounded size along its chunk grid.

In: shape, chunk shape, bytes per voxel. Out: tuples of slices that cover the array once. Whoever walks over them
holds one piece at a time, however large the array is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

#: Bytes of one piece, unless a single chunk is larger.
BLOCK_BYTES = 256 * 2**20

Block = tuple[slice, ...]


def block_shape(shape: Sequence[int], grain: Sequence[int], itemsize: int, limit: int = BLOCK_BYTES) -> tuple[int, ...]:
    """Return the shape of the largest piece, in whole grains, that stays within the limit.

    Parameters
    ----------
    shape, grain : sequence of int
        Of the array, and of what cannot be read in part (a chunk).
    itemsize : int
        Bytes per voxel.
    limit : int
        Bytes that a piece may have; a grain that is larger is a piece nevertheless.
    """
    sizes = [min(one, extent) for one, extent in zip(grain, shape, strict=True)]
    for axis in reversed(range(len(sizes))):  # the last axis first: pieces are as contiguous as can be
        room = max(1, limit // max(1, math.prod(sizes) * itemsize))
        sizes[axis] = min(shape[axis], sizes[axis] * room)
    return tuple(sizes)


def blocks(shape: Sequence[int], grain: Sequence[int], itemsize: int, limit: int = BLOCK_BYTES) -> Iterator[Block]:
    """Yield the pieces in C order; of an array without voxels there are none."""
    if math.prod(shape) == 0:
        return
    sizes = block_shape(shape, grain, itemsize, limit)
    starts = [range(0, extent, size) for extent, size in zip(shape, sizes, strict=True)]
    for corner in itertools.product(*starts):
        yield tuple(
            slice(start, min(start + size, extent)) for start, size, extent in zip(corner, sizes, shape, strict=True)
        )
