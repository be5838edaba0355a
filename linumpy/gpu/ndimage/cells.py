"""Copy an image of three axes into cells, for scattered points: a point then touches fewer cache lines.

A cell is a small box of voxels that are contiguous in memory.

In: an image on the device. Out: a copy in the memory layout of ``cells.cuh``, made by the kernel of ``cells.cu``.
"""

from __future__ import annotations

import numpy as np

from linumpy.arrays import Array, is_device_array
from linumpy.gpu.kernels import UNSIGNED_TYPES, KernelSpec, index_type, int32, load
from linumpy.gpu.ndimage.sampling_launch import GRID_LIMIT

#: Binary logarithms of a cell's size along each axis, by bytes of a voxel.
_LOG2_SIZES = {1: (2, 2, 2), 2: (2, 1, 2), 4: (2, 1, 2), 8: (1, 1, 1)}
#: Images below this size stay in a GPU's L2 cache.
_CACHED_NBYTES = 32 * 2**20
_THREADS = 256


def cell_defines(itemsize: int) -> dict[str, str]:
    """Return the definitions of ``cells.cuh`` for voxels of `itemsize` bytes."""
    return {f"CELL_{axis}": str(log2) for axis, log2 in zip("ZYX", _LOG2_SIZES[itemsize], strict=True)}


def copy_to_cells(image: Array, order: int, count: int) -> Array | None:
    """Copy an image into cells if this makes sampling of `count` points faster.

    It does for many points in an image of three axes that is larger than the caches, at orders 0 and 1. Otherwise, or
    if there is no memory for the copy, return None.
    """
    if image.ndim != 3 or order > 1 or image.nbytes < _CACHED_NBYTES or 8 * count < image.size:
        return None
    log2_sizes = _LOG2_SIZES[image.itemsize]
    planes, rows, columns = ((n + (1 << log2) - 1) >> log2 for n, log2 in zip(image.shape, log2_sizes, strict=True))
    row = columns << sum(log2_sizes)
    if max(planes, rows) > GRID_LIMIT or index_type(row) != "int":
        return None
    cells = _empty_if_it_fits(image, planes * rows * row)
    if cells is None:
        return None
    kernel = load(kernel_spec(image.itemsize, cells.size))
    kernel((-(-row // _THREADS), rows, planes), (_THREADS,), (image, cells, *int32(*image.shape)))
    return cells


def kernel_spec(itemsize: int, size: int) -> KernelSpec:
    """Return the kernel for voxels of `itemsize` bytes and a copy of `size` elements."""
    defines = {"UNIT": UNSIGNED_TYPES[itemsize], "INDEX": index_type(size), **cell_defines(itemsize)}
    return KernelSpec("cells", "to_cells", tuple(defines.items()), "linumpy.gpu.ndimage.cuda")


def _empty_if_it_fits(image: Array, size: int) -> Array | None:
    """Allocate an array beside the image; None if there is no memory for it."""
    if not is_device_array(image):
        return np.empty(size, image.dtype)
    import cupy

    try:
        cells: Array = cupy.empty(size, image.dtype)
    except cupy.cuda.memory.OutOfMemoryError:
        return None
    return cells
