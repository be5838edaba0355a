"""Cut a volume into columns of whole depth that fit into memory, and read them where they are worked on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import zarr

#: Voxels of a column take about so many bytes, unless one column of chunks takes more.
TILE_BYTES = 256 * 2**20

Box = tuple[slice, ...]


def column_shape(array: zarr.Array, depth_axis: int, tile_bytes: int = TILE_BYTES) -> tuple[int, ...]:
    """Choose columns: whole along depth, laterally whole chunks (or shards), about square, of at most `tile_bytes`."""
    step = [n if k == depth_axis else s for k, (s, n) in enumerate(zip(stored(array), array.shape, strict=True))]
    return tile_shape(array.shape, step, array.dtype.itemsize, tile_bytes)


def stored(array: zarr.Array) -> tuple[int, ...]:
    """What is whole in storage: shards where an array has them, else chunks."""
    return array.shards or array.chunks


def tile_shape(shape: tuple[int, ...], step: Sequence[int], itemsize: int, tile_bytes: int) -> tuple[int, ...]:
    """Choose tiles of whole steps, about as long along each axis, of at most `tile_bytes`, but of one step at least."""
    size = tuple(min(s, n) for s, n in zip(step, shape, strict=True))
    while growing := [k for k, n in enumerate(shape) if size[k] < n]:
        axis = min(growing, key=lambda k: (size[k], -k))
        longer = (*size[:axis], min(size[axis] + step[axis], shape[axis]), *size[axis + 1 :])
        if math.prod(longer) * itemsize > tile_bytes:
            break
        size = longer
    return size


def box_nbytes(array: zarr.Array, box: Box) -> int:
    """Bytes of the voxels of a box, decoded."""
    return math.prod(one.stop - one.start for one in box) * array.dtype.itemsize


def boxes(shape: tuple[int, ...], size: tuple[int, ...]) -> Iterator[Box]:
    """Walk a shape in boxes of a size, the last ones ragged."""
    for corner in itertools.product(*(range(0, n, s) for n, s in zip(shape, size, strict=True))):
        yield tuple(slice(a, min(a + s, n)) for a, s, n in zip(corner, size, shape, strict=True))


def read_box(array: zarr.Array, box: Box, use_gpu: bool) -> Any:
    """Read a box to the device or the host."""
    if not use_gpu:
        return np.asarray(array[box])
    from linumpy.gpu.zarr_io import read_zarr_to_gpu

    return read_zarr_to_gpu(array, region=box)
