"""Cut a volume into boxes that fit into memory, and read them.

In: shapes and arrays. Out: boxes of whole chunks or shards, and their voxels on the device or the host. Here a tile is
such a box, the unit of work, unless a tile of the microscope is meant (:func:`whole_tiles`). A column is a tile of the
whole depth.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import zarr

from linumpy.arrays import Array, DeviceName
from linumpy.io.volume import Volume, as_volume

#: Approximate bytes of a column on a GPU, unless one column of chunks is larger.
TILE_BYTES = 256 * 2**20
#: The same on the CPU, where SciPy's filters hold several float copies, and small columns cost no kernel launches.
HOST_TILE_BYTES = 32 * 2**20

Box = tuple[slice, ...]


def boxes(shape: tuple[int, ...], size: tuple[int, ...]) -> Iterator[Box]:
    """Yield the boxes of `size` voxels that cover `shape`; the last boxes along an axis may be smaller."""
    for corner in itertools.product(*(range(0, n, s) for n, s in zip(shape, size, strict=True))):
        yield tuple(slice(a, min(a + s, n)) for a, s, n in zip(corner, size, shape, strict=True))


def box_shape(box: Box) -> tuple[int, ...]:
    """Return the voxels of a box along each axis."""
    return tuple(extent.stop - extent.start for extent in box)


def tile_nbytes(tile_bytes: int | None, device: DeviceName) -> int:
    """Return the bytes of a tile: `tile_bytes`, or if it is None the default for the device or the host."""
    return tile_bytes if tile_bytes is not None else TILE_BYTES if device == "cuda" else HOST_TILE_BYTES


def column_shape(array: zarr.Array | Volume, depth_axis: int, tile_bytes: int) -> tuple[int, ...]:
    """Choose the shape of columns: of the whole depth, laterally about square and of whole chunks (or shards).

    A column has at most `tile_bytes` bytes, or is one chunk (or shard) wide.
    """
    step = [n if k == depth_axis else s for k, (s, n) in enumerate(zip(stored(array), array.shape, strict=True))]
    return tile_shape(array.shape, step, array.dtype.itemsize, tile_bytes)


def stored(array: zarr.Array | Volume) -> tuple[int, ...]:
    """Return the shape of a shard, or without shards the shape of a chunk."""
    return array.shards or array.chunks


def tile_shape(shape: tuple[int, ...], step: Sequence[int], itemsize: int, tile_bytes: int) -> tuple[int, ...]:
    """Choose the shape of tiles: whole multiples of `step`, about equally long along each axis.

    A tile has at most `tile_bytes` bytes, or is one step.
    """
    size = tuple(min(s, n) for s, n in zip(step, shape, strict=True))
    while growing := [k for k, n in enumerate(shape) if size[k] < n]:
        axis = min(growing, key=lambda k: (size[k], -k))
        longer = (*size[:axis], min(size[axis] + step[axis], shape[axis]), *size[axis + 1 :])
        if math.prod(longer) * itemsize > tile_bytes:
            break
        size = longer
    return size


def whole_tiles(shape: Sequence[int], tile_shape: Sequence[int]) -> tuple[int, int]:
    """Return the number of complete tiles of the microscope along each lateral axis."""
    return shape[0] // tile_shape[0], shape[1] // tile_shape[1]


def box_nbytes(array: zarr.Array | Volume, box: Box) -> int:
    """Return the bytes of the voxels of a box, decoded."""
    return math.prod(box_shape(box)) * array.dtype.itemsize


def read_box(array: zarr.Array | Volume, box: Box, device: DeviceName) -> Array:
    """Read a box of an array or a volume to the device, ``"cuda"`` or ``"cpu"``."""
    volume = as_volume(array)
    region = volume.region(box)
    from linumpy.gpu.zarr_io import read_zarr

    return read_zarr(volume.array, region=region, device=device)
