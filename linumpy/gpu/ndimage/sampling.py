"""Sample an image on the device between its voxels: at given coordinates, or on the grid of an affine map.

In: an image, a box of an image, or a stack of images, and coordinates or a map. Above order 1 images hold spline
coefficients. Out: samples, by the kernels of ``points.cu`` and ``affine.cu``, for two and three axes, orders 0 to 5,
and all modes of SciPy. A stack has one axis more than the coordinates; its images are sampled in one launch. A brick is
the box of the image that a block of ``affine.cu`` copies to shared memory. No kernel is compiled for a shape. Temporary
memory: none, except for scattered points (see :func:`sample_points`).
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from linumpy.arrays import Array, array_module, is_device_array
from linumpy.gpu.kernels import CUDA_TYPES, address_of, load, needs_float64
from linumpy.gpu.ndimage.cells import cell_defines, copy_to_cells
from linumpy.gpu.ndimage.sampling_launch import (
    AFFINE,
    BRICKS,
    GRIDS,
    LISTS,
    SMALL_GRIDS,
    SMALL_STACKED_GRIDS,
    STACKED_GRIDS,
    LaunchConfig,
    blocks_of,
    kinds_of,
    spec_of,
    three,
)
from linumpy.plan.boundary import ROUNDING
from linumpy.plan.grid.affine import plan_brick

RANKS = (2, 3)
#: Maximum shared memory of a brick: two blocks fit on a multiprocessor.
_BRICK_NBYTES = 110 * 1024
#: Shared memory that a kernel declares beside the brick.
_DECLARED_NBYTES = 64
#: Dynamic shared memory beyond this has to be requested.
_DEFAULT_SHARED_NBYTES = 48 * 1024 - _DECLARED_NBYTES
#: A grid of points with fewer columns or rows is sampled as a list.
_FEW_COLUMNS, _FEW_ROWS = 16, 8

_IMAGE = [("whole", "i4", 3), ("start", "i4", 3), ("box", "i4", 3)]
#: The structures of points.cu and affine.cu.
_POINTS: list[tuple[object, ...]] = [
    *[("count", "i8"), ("outside", "f8"), ("sizes", "f8", 3), ("inverse", "f8", 3)],
    *[("whole", "i4", 3), ("grid", "i4", 3), ("tiles", "i4", 2)],
]
_AFFINE: list[tuple[object, ...]] = [
    *[("matrix", "f8", (3, 3)), ("shift", "f8", 3), ("outside", "f8"), ("begin", "i4", 3), ("shape", "i4", 3)],
    *_IMAGE,
    *[("inverse", "f4", (3, 3)), ("per", "f4", 3), ("slack", "f4", 3)],
    *[("brick", "i4", 3), ("tiles", "i4", 2), ("aligned", "i4")],
]
_POINTS_DTYPE, _AFFINE_DTYPE = np.dtype(_POINTS, align=True), np.dtype(_AFFINE, align=True)
_POINTS_FIELDS = struct.Struct("q7d8i")
_AFFINE_FIELDS = struct.Struct("13d15i15f6i")
#: The structure Batch of sampling.cuh, which follows for a stack of images.
_BATCH_FIELDS = [("image", "i8"), ("target", "i8"), ("blocks", "i4"), ("images", "i4"), ("together", "i4")]
_BATCH = ("batch", np.dtype(_BATCH_FIELDS, align=True))
_POINTS_BATCH_DTYPE = np.dtype([*_POINTS, _BATCH], align=True)
_AFFINE_BATCH_DTYPE = np.dtype([*_AFFINE, _BATCH], align=True)
_MAX_BLOCKS = 2**31 - 1
#: A block samples up to _MAX_TOGETHER images of a stack at the same points, as long as _ENOUGH_BLOCKS blocks remain.
_ENOUGH_BLOCKS, _MAX_TOGETHER = 2048, 8


@dataclass(frozen=True)
class SplineSampling:
    """Parameters to sample an image, or above order 1 its coefficients.

    `order`: spline order, 0 to 5. `mode`: boundary mode, one of :data:`linumpy.plan.boundary.MODES`. `cval`: the value
    outside, for the constant modes. `pad`: voxels added at either end of each axis of the image, as SciPy does for some
    splines. Coordinates count from the first voxel that is not padding; `mode` applies beyond the padding. `snaps`:
    whether mode "constant" moves coordinates outside of the image by a rounding error to its edge.
    """

    order: int
    mode: str
    cval: float
    pad: int = 0
    snaps: bool = False

    @property
    def defines(self) -> dict[str, str]:
        """Definitions of boundary.cuh that are not the order and the mode."""
        return {"PAD": str(self.pad)} | ({"ROUNDING": str(ROUNDING)} if self.snaps else {})


def can_sample(image: Array) -> bool:
    """Say whether the kernels support this image: of two or three axes, of real numbers but no booleans, not empty."""
    name = image.dtype.str[1:]
    return image.ndim in RANKS and name in CUDA_TYPES and name != "b1" and image.size > 0


def sample_points(image: Array, coordinates: Array, how: SplineSampling, out: Array) -> None:
    """Sample at given coordinates.

    Many points in a large image, given as a list, are assumed to be scattered: if there is memory, the image is copied
    into cells, where neighbours along all axes are close in memory.

    `image`: of two or three axes, or a stack of such images; C-contiguous, not empty. `coordinates` (float32 or
    float64, (rank, ...)): coordinates in voxels, C-contiguous. Where one is NaN or infinite, the result is the constant
    value in the constant modes, and NaN in the others. Coordinates near a grid are sampled faster in the shape of that
    grid: neighbours along all axes then share the cache. `out`: C-contiguous, of the shape of a row of `coordinates`;
    for a stack, with the stack's axis in front.
    """
    _launch_points(image, coordinates, how, out, "0", None)


def sample_displaced(
    image: Array, field: Array, sizes: Sequence[float] | None, how: SplineSampling, out: Array
) -> None:
    """Sample at displaced voxels: as :func:`sample_points`, without an array of coordinates.

    `image`, `how`, `out`: as for :func:`sample_points`. `field` (float32 or float64, (rank, ...)): displacements of the
    voxels of a grid of as many axes as the image has; C-contiguous. `sizes` ((rank,), or None): size of a voxel in the
    unit of `field`, for each axis; None if `field` is in voxels.
    """
    _launch_points(image, field, how, out, "1" if sizes is None else "2", sizes)


def _launch_points(
    image: Array, coordinates: Array, how: SplineSampling, out: Array, field: str, sizes: Sequence[float] | None
) -> None:
    """Sample at points; `field` is FIELD of points.cu: "0" for coordinates, "1" or "2" for displacements."""
    if not out.size:
        return
    is_stack = image.ndim > len(coordinates)
    shapes = (tuple(coordinates.shape), image.itemsize, how.order, is_stack)
    call = _points_call(*shapes, field, None if sizes is None else tuple(sizes))
    cells = None if call.is_grid or is_stack else copy_to_cells(image, how.order, out.size)
    first, first_out = (image[0], out[0]) if is_stack else (image, out)
    spec = spec_of(
        "points",
        "map_points",
        kinds_of(first, first_out, how.order, how.mode, coordinates, *([] if cells is None else [cells])),
        call.config,
        COORDINATE=CUDA_TYPES[coordinates.dtype.str[1:]],
        FIELD=field,
        GRID=str(int(call.is_grid)),
        **how.defines,
        **({"BATCH": "1"} if is_stack else {}),
        **({"CELLS": "0"} if cells is None else {"CELLS": "1", **cell_defines(image.itemsize)}),
    )
    kernel, threads = load(spec), (call.config.threads,)
    packed = _POINTS_FIELDS.pack(call.count, how.cval, *call.sizes, *three(first.shape), *call.grid, *call.tiles)
    if not is_stack:
        args = np.frombuffer(packed, _POINTS_DTYPE)
        kernel(call.blocks, threads, (image, coordinates, out, image if cells is None else cells, args))
        return
    args = np.frombuffer(bytearray(packed.ljust(_POINTS_BATCH_DTYPE.itemsize, b"\0")), _POINTS_BATCH_DTYPE)
    for images, samples, blocks in _parts_of_stack(image, out, call.blocks, args, _MAX_TOGETHER):
        kernel((blocks,), threads, (images, coordinates, samples, images, args))


@dataclass(frozen=True)
class _PointsCall:
    """A launch of `map_points`, for any image; `count` and the fields after it are those of the structure Points."""

    config: LaunchConfig
    is_grid: bool
    blocks: tuple[int, ...]
    count: int
    sizes: tuple[float, ...]
    grid: tuple[int, ...]
    tiles: tuple[int, int]


@functools.lru_cache(maxsize=256)
def _points_call(
    coordinates: tuple[int, ...],
    itemsize: int,
    order: int,
    is_stack: bool,
    field: str,
    sizes: tuple[float, ...] | None,
) -> _PointsCall:
    """Cut points into blocks, by the shape of their coordinates or displacements."""
    rank, *shape = coordinates
    count = math.prod(shape)
    if field == "0" and not (len(shape) >= rank and shape[-1] >= _FEW_COLUMNS and shape[-2] >= _FEW_ROWS):
        config = LISTS[order]
        blocks: tuple[int, ...] = (-(-count // (config.threads * config.march)),)
        return _PointsCall(config, False, blocks, count, (0.0,) * 6, (0, 0, 0), (0, 0))
    small, other = (SMALL_STACKED_GRIDS, STACKED_GRIDS) if is_stack else (SMALL_GRIDS, GRIDS)
    config = (small if itemsize < 4 else other)[order]
    # A grid of more axes than the image: its first axes are joined.
    joined = len(shape) - rank + 1
    grid = three((math.prod(shape[:joined]), *shape[joined:]))
    blocks, tiles = blocks_of(grid, config.tile, rank)
    units = (0.0,) * 6 if sizes is None else (*three(sizes, 1), *three([1 / size for size in sizes], 1))
    return _PointsCall(config, True, blocks, count, units, grid, tiles)


def _parts_of_stack(
    image: Array, out: Array, blocks: tuple[int, ...], args: np.ndarray, max_together: int = 1
) -> Iterator[tuple[Array, Array, int]]:
    """Cut a stack into parts whose blocks fit one axis of a launch; yield images, outputs and blocks of each.

    Writes the stack's fields of `args`. A block samples up to `max_together` images, if enough blocks remain.
    """
    image_blocks = math.prod(blocks)
    if len(blocks) == 3:
        args["tiles"] = blocks[1], blocks[0]
    together = max(1, min(max_together, image_blocks * len(image) // _ENOUGH_BLOCKS))
    step = max(1, _MAX_BLOCKS // image_blocks) * together
    for start in range(0, len(image), step):
        part = slice(start, start + step) if start or step < len(image) else slice(None)
        images, samples = image[part], out[part]
        args["batch"] = (image.size // len(image), out.size // len(out), image_blocks, len(images), together)
        yield images, samples, image_blocks * -(-len(images) // together)


@dataclass(frozen=True)
class AffineMap:
    """A map from voxels of an output to coordinates in an image: coordinates = matrix @ voxel + offset.

    `matrix` (rank, axes of the output): rows of the matrix; square for :func:`sample_affine`. `offset` (rank,): in
    voxels of the image.
    """

    matrix: tuple[tuple[float, ...], ...]
    offset: tuple[float, ...]


def sample_affine(
    box: Array,
    affine: AffineMap,
    how: SplineSampling,
    out: Array,
    *,
    whole: Sequence[int] | None = None,
    box_start: Sequence[int] | None = None,
    out_start: Sequence[int] | None = None,
) -> None:
    """Sample on the grid of an affine map, all of it or a block.

    The coordinates of a voxel depend only on its index in the whole output, and boundaries only on the shape of the
    whole image. So a block equals that part of the whole output, bit for bit at orders 0 and 1.

    `box`: the image, or a box of it that holds all voxels that the block needs; or a stack of images. C-contiguous.
    `affine`: maps voxels of the whole output to coordinates in the whole image. `out`: the output, or a block of it;
    C-contiguous. `whole`: shape of the whole image; by default the shape of `box`. `box_start`, `out_start`: offset of
    the box in the whole image, and of the block in the whole output; by default 0.
    """
    if not out.size:
        return
    rank, order = len(affine.matrix), how.order
    is_stack = box.ndim > rank
    image, first_out = (box[0], out[0]) if is_stack else (box, out)
    shape = three(first_out.shape)
    brick = None
    if rank == 3 and order in BRICKS:
        itemsize = 8 if needs_float64(box.dtype, out.dtype) else 4
        brick = plan_brick(affine.matrix, order, BRICKS[order].tile, itemsize, _shared_limit(box))
    if brick is not None:
        config, name, extra = BRICKS[order], "affine_brick", {"PITCH": str(brick.pitch)}
    else:
        config, name, extra = AFFINE[order], "affine", {"WARP_X": str(_warp_x(affine))}
    blocks, tiles = blocks_of(shape, config.tile, rank)
    numbers = (
        *_matrix_and_shift(affine, rank, how.pad),
        how.cval,
        *three(out_start or (0,) * rank, 0),
        *shape,
        *three(whole or image.shape),
        *three(box_start or (0,) * rank, 0),
        *three(image.shape),
        *(brick.numbers if brick is not None else (0,) * 15),
        *(brick.shape if brick is not None else (0,) * 3),
        *tiles,
        brick is not None and _has_aligned_rows(image),
    )
    if is_stack:
        extra["BATCH"] = "1"
    if how.snaps:
        extra["ROUNDING"] = str(ROUNDING)
    kernel = load(spec_of("affine", name, kinds_of(image, first_out, order, how.mode), config, **extra))
    shared = 0 if brick is None else brick.nbytes
    if shared > _DEFAULT_SHARED_NBYTES and kernel.max_dynamic_shared_size_bytes < shared:
        kernel.max_dynamic_shared_size_bytes = shared
    packed = bytearray(_AFFINE_FIELDS.pack(*numbers))
    if not is_stack:
        args = np.frombuffer(packed, _AFFINE_DTYPE)
        kernel(blocks, (config.threads,), (box, out, args), shared_mem=shared)
        return
    args = np.frombuffer(packed.ljust(_AFFINE_BATCH_DTYPE.itemsize, b"\0"), _AFFINE_BATCH_DTYPE)
    for images, samples, count in _parts_of_stack(box, out, blocks, args):
        kernel((count,), (config.threads,), (images, samples, args), shared_mem=shared)


def _shared_limit(box: Array) -> int:
    """Return the maximum shared memory of a brick; some GPUs have less than _BRICK_NBYTES."""
    return (
        min(_BRICK_NBYTES, _shared_nbytes(box.device.id) - _DECLARED_NBYTES) if is_device_array(box) else _BRICK_NBYTES
    )


@functools.cache
def _shared_nbytes(device_id: int) -> int:
    from cupy.cuda import runtime

    return int(runtime.deviceGetAttribute(runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin, device_id))


def _matrix_and_shift(affine: AffineMap, rank: int, pad: int) -> tuple[float, ...]:
    """Return the twelve numbers of the map, padded to three axes, with `pad` added to the offset."""
    (row, *rows), shift = affine.matrix, [offset + pad for offset in affine.offset]
    if rank == 3:
        return (*row, *rows[0], *rows[1], *shift)
    return (0, 0, 0, 0, *row, 0, *rows[0], 0, *shift)


def _has_aligned_rows(box: Array) -> bool:
    """Say whether four voxels of a row, from a multiple of four on, can be read at once."""
    return box.shape[2] % 4 == 0 and address_of(box) % min(16, 4 * box.itemsize) == 0


def _warp_x(affine: AffineMap) -> int:
    """Choose the threads of a warp along X: all if X stays X, else a square, which touches fewer cache lines."""
    column = [abs(row[-1]) for row in affine.matrix]
    return 32 if max(column[:-1]) <= 0.1 * column[-1] else 8


def contiguous(array: Array) -> Array:
    """Return the array in C order, as the kernels need it."""
    return array if array.flags.c_contiguous else array_module(array).ascontiguousarray(array)
