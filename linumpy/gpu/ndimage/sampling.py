"""Sample an image on the device between its voxels: at given coordinates, or on the grid of an affine map.

In: an image, the box of one that is needed, or a stack of images, and coordinates or a map. Out: samples, by kernels of
``points.cu`` and ``affine.cu`` for two and three axes, orders 0 to 5 (above 1 of spline coefficients), and all modes of
SciPy. A stack has one axis more than the coordinates; its images are sampled in one launch. No kernel is compiled for a
shape. Temporary memory: none, but for scattered points (see :func:`sample_points`).
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from linumpy.device import array_module, is_device_array
from linumpy.gpu.kernels import CUDA_TYPES, KernelSpec, address_of, index_type, int32, load
from linumpy.gpu.ndimage.sampling_launch import (
    AFFINE,
    BRICKS,
    GRID_LIMIT,
    GRIDS,
    LISTS,
    SMALL_GRIDS,
    SMALL_STACKED_GRIDS,
    STACKED_GRIDS,
    Shape,
    blocks_of,
    is_wide,
    kinds_of,
    spec_of,
    three,
)
from linumpy.plan.grid.affine import plan_brick

RANKS = (2, 3)
#: Shared memory of a block at most: two of them fit on a multiprocessor.
_BRICK_NBYTES = 110 * 1024
#: Shared memory that a kernel declares besides.
_DECLARED = 64
#: A kernel that wants more must ask for it.
_WITHOUT_ASKING = 48 * 1024 - _DECLARED
#: Columns and rows below which a grid of points is taken as a list.
_FEW_COLUMNS, _FEW_ROWS = 16, 8
#: Binary logarithms of a cell's voxels along each axis, by bytes of a voxel (see cells.cuh).
_CELLS = {1: (2, 2, 2), 2: (2, 1, 2), 4: (2, 1, 2), 8: (1, 1, 1)}
_UNITS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "unsigned long long"}
#: Images below this stay in a GPU's second cache.
_CACHED_NBYTES = 32 * 2**20

_IMAGE = [("whole", "i4", 3), ("start", "i4", 3), ("box", "i4", 3)]
#: The structures of points.cu and affine.cu.
_POINTS: list[Any] = [
    *[("count", "i8"), ("outside", "f8"), ("sizes", "f8", 3), ("inverse", "f8", 3)],
    *[("whole", "i4", 3), ("grid", "i4", 3), ("tiles", "i4", 2)],
]
_AFFINE: list[Any] = [
    *[("matrix", "f8", (3, 3)), ("shift", "f8", 3), ("outside", "f8"), ("begin", "i4", 3), ("shape", "i4", 3)],
    *_IMAGE,
    *[("inverse", "f4", (3, 3)), ("per", "f4", 3), ("slack", "f4", 3)],
    *[("brick", "i4", 3), ("tiles", "i4", 2), ("aligned", "i4")],
]
_POINTS_DTYPE, _AFFINE_DTYPE = np.dtype(_POINTS, align=True), np.dtype(_AFFINE, align=True)
_POINTS_FIELDS = struct.Struct("q7d8i")
_AFFINE_FIELDS = struct.Struct("13d15i15f6i")
#: What follows for a stack of images, Batch of sampling.cuh.
_BATCH_FIELDS = [("image", "i8"), ("target", "i8"), ("blocks", "i4"), ("images", "i4"), ("together", "i4")]
_BATCH = ("batch", np.dtype(_BATCH_FIELDS, align=True))
_POINTS_BATCH_DTYPE = np.dtype([*_POINTS, _BATCH], align=True)
_AFFINE_BATCH_DTYPE = np.dtype([*_AFFINE, _BATCH], align=True)
_MOST_BLOCKS = 2**31 - 1
#: Images of a stack that a block samples at the same places: as many as leave a GPU so many blocks, within bounds.
_ENOUGH_BLOCKS, _MOST_TOGETHER = 2048, 8


@dataclass(frozen=True)
class Sampler:
    """How an image is sampled.

    Attributes
    ----------
    order : int
        Of the spline, 0 to 5.
    mode : str
        One of :data:`MODES`: what lies outside.
    cval : float
        The value there, for the constant modes.
    pad : int
        Voxels that were added at either end of each axis of the image that is sampled, as SciPy does for some splines.
        Coordinates are those of the image without them; `mode` applies beyond them.
    """

    order: int
    mode: str
    cval: float
    pad: int = 0


def can_sample(image: Any) -> bool:
    """Say whether the kernels sample this kind of image."""
    kind = image.dtype.str[1:]
    return image.ndim in RANKS and kind in CUDA_TYPES and kind != "b1" and image.size > 0


def sample_points(image: Any, coordinates: Any, how: Sampler, out: Any) -> None:
    """Sample at given coordinates.

    Many points in a large image, given as a list, are taken for scattered ones: the image is copied into an order where
    neighbours along all axes lie together, if there is memory for that.

    Parameters
    ----------
    image : cupy.ndarray
        Of two or three axes, or a stack of such images; C-contiguous, not empty.
    coordinates : cupy.ndarray of float32 or float64, (rank, ...)
        Coordinates in voxels, C-contiguous. Where one is NaN or infinite the result is the constant value, or NaN in
        other modes. They are best given in the shape of a grid, if they are near to one: what one point has brought
        into the caches then serves its neighbours along all axes.
    how : Sampler
        Order, mode, constant value.
    out : cupy.ndarray
        C-contiguous, of the shape of a row of `coordinates`; of a stack, with its axis before that.
    """
    _launch_points(image, coordinates, how, out, "0", None)


def sample_displaced(image: Any, field: Any, sizes: Sequence[float] | None, how: Sampler, out: Any) -> None:
    """Sample at voxels that are displaced: as :func:`sample_points`, without an array of coordinates.

    Parameters
    ----------
    image, how, out
        As for :func:`sample_points`.
    field : cupy.ndarray of float32 or float64, (rank, ...)
        Displacements of the voxels of a grid of as many axes as the image has; C-contiguous.
    sizes : sequence of float, (rank,), or None
        Of a voxel in the unit of `field`, for each axis; None where that is a voxel.
    """
    _launch_points(image, field, how, out, "1" if sizes is None else "2", sizes)


def _launch_points(
    image: Any, coordinates: Any, how: Sampler, out: Any, field: str, sizes: Sequence[float] | None
) -> None:
    if not out.size:
        return
    is_stack = image.ndim > len(coordinates)
    shapes = (tuple(coordinates.shape), image.itemsize, how.order, is_stack)
    call = _points_call(*shapes, field, None if sizes is None else tuple(sizes))
    cells = None if call.is_grid or is_stack else _in_cells(image, how, out.size)
    one, made = (image[0], out[0]) if is_stack else (image, out)
    spec = spec_of(
        "points",
        "map_points",
        kinds_of(one, made, how.order, how.mode, coordinates, *([] if cells is None else [cells])),
        call.cut,
        COORDINATE=CUDA_TYPES[coordinates.dtype.str[1:]],
        FIELD=field,
        GRID=str(int(call.is_grid)),
        PAD=str(how.pad),
        **({"BATCH": "1"} if is_stack else {}),
        **({"CELLS": "0"} if cells is None else {"CELLS": "1", **_cell_defines(image)}),
    )
    kernel, threads = load(spec), (call.cut.threads,)
    packed = _POINTS_FIELDS.pack(call.count, how.cval, *call.sizes, *three(one.shape), *call.grid, *call.tiles)
    if not is_stack:
        args = np.frombuffer(packed, _POINTS_DTYPE)
        kernel(call.blocks, threads, (image, coordinates, out, image if cells is None else cells, args))
        return
    args = np.frombuffer(bytearray(packed.ljust(_POINTS_BATCH_DTYPE.itemsize, b"\0")), _POINTS_BATCH_DTYPE)
    for images, samples, number in _parts(image, out, call.blocks, args, _MOST_TOGETHER):
        kernel((number,), threads, (images, coordinates, samples, images, args))


@dataclass(frozen=True)
class _PointsCall:
    """What a call of `map_points` depends on but the image: what its structure holds, by the names there."""

    cut: Shape
    is_grid: bool
    blocks: tuple[int, ...]
    count: int
    sizes: tuple[float, ...]
    grid: tuple[int, int, int]
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
    """Cut the places, of coordinates or displacements of a shape, into blocks."""
    rank, *shape = coordinates
    count = math.prod(shape)
    if field == "0" and not (len(shape) >= rank and shape[-1] >= _FEW_COLUMNS and shape[-2] >= _FEW_ROWS):
        cut = LISTS[order]
        return _PointsCall(cut, False, (-(-count // (cut.threads * cut.march)),), count, (0.0,) * 6, (0, 0, 0), (0, 0))
    of_stacks = SMALL_STACKED_GRIDS if itemsize < 4 else STACKED_GRIDS
    cut = (of_stacks if is_stack else SMALL_GRIDS if itemsize < 4 else GRIDS)[order]
    # Of more axes than the image has, the first ones lie one after another.
    first = len(shape) - rank + 1
    grid = _grid_of((math.prod(shape[:first]), *shape[first:]))
    blocks, tiles = blocks_of(grid, cut.tile, rank)
    units = (0.0,) * 6 if sizes is None else (*three(sizes, 1), *three([1 / size for size in sizes], 1))
    return _PointsCall(cut, True, blocks, count, units, grid, tiles)


def _grid_of(shape: Sequence[int]) -> tuple[int, int, int]:
    """Put an axis of one point before two."""
    z, y, x = (1,) * (3 - len(shape)) + tuple(shape)
    return z, y, x


def _parts(
    image: Any, out: Any, blocks: tuple[int, ...], args: np.ndarray, most: int = 1
) -> Iterator[tuple[Any, Any, int]]:
    """Cut a stack into parts whose blocks are numbered along one axis of a launch; and tell the kernel of it.

    A block samples up to `most` images, if enough blocks are left.
    """
    each = math.prod(blocks)
    if len(blocks) == 3:
        args["tiles"] = blocks[1], blocks[0]
    together = max(1, min(most, each * len(image) // _ENOUGH_BLOCKS))
    step = max(1, _MOST_BLOCKS // each) * together
    for start in range(0, len(image), step):
        part = slice(start, start + step) if start or step < len(image) else slice(None)
        images, samples = image[part], out[part]
        number = len(images)
        args["batch"] = (image.size // len(image), out.size // len(out), each, number, together)
        yield images, samples, each * -(-number // together)


def _cell_defines(image: Any) -> dict[str, str]:
    logs = _CELLS[image.itemsize]
    return {f"CELL_{axis}": str(log) for axis, log in zip("ZYX", logs, strict=True)}


def _in_cells(image: Any, how: Sampler, count: int) -> Any:
    """Copy the image into cells where that pays: many points all over an image that the caches do not hold."""
    if image.ndim != 3 or how.order > 1 or image.nbytes < _CACHED_NBYTES or 8 * count < image.size:
        return None
    logs = _CELLS[image.itemsize]
    planes, rows, columns = ((n + (1 << log) - 1) >> log for n, log in zip(image.shape, logs, strict=True))
    row = columns << sum(logs)
    if max(planes, rows) > GRID_LIMIT or index_type(row) != "int":
        return None
    cells = _empty_if_it_fits(image, planes * rows * row)
    if cells is None:
        return None
    defines = {"UNIT": _UNITS[image.itemsize], "INDEX": index_type(cells.size), **_cell_defines(image)}
    kernel = load(KernelSpec("cells", "to_cells", tuple(defines.items()), "linumpy.gpu.ndimage.cuda"))
    kernel((-(-row // 256), rows, planes), (256,), (image, cells, *int32(*image.shape)))
    return cells


def _empty_if_it_fits(image: Any, size: int) -> Any:
    """Make an array of the image's kind; None where there is no memory for it, which is no error."""
    if not is_device_array(image):
        return np.empty(size, image.dtype)
    import cupy

    try:
        return cupy.empty(size, image.dtype)
    except cupy.cuda.memory.OutOfMemoryError:
        return None


@dataclass(frozen=True)
class AffineMap:
    """A map from voxels of an output to coordinates in an image: coordinates = matrix @ voxel + offset.

    Attributes
    ----------
    matrix : tuple of tuple of float, (rank, rank)
        Row by row.
    offset : tuple of float, (rank,)
        In voxels of the image.
    """

    matrix: tuple[tuple[float, ...], ...]
    offset: tuple[float, ...]


def sample_affine(
    box: Any,
    affine: AffineMap,
    how: Sampler,
    out: Any,
    *,
    whole: Sequence[int] | None = None,
    box_start: Sequence[int] | None = None,
    out_start: Sequence[int] | None = None,
) -> None:
    """Sample on the grid of an affine map, all of it or a block.

    A voxel's value depends on its number in the whole output and on the whole image's shape, not on how the work is
    cut: blocks are the whole, bit for bit.

    Parameters
    ----------
    box : cupy.ndarray
        The image, or a box of it that holds all voxels this block needs; or a stack of such, C-contiguous.
    affine : AffineMap
        From voxels of the whole output to coordinates in the whole image.
    how : Sampler
        Order, mode, constant value.
    out : cupy.ndarray
        The output, or a block of it; C-contiguous.
    whole : sequence of int, optional
        Shape of the whole image; by default that of `box`.
    box_start, out_start : sequence of int, optional
        Where box and block begin in the whole; by default at 0.
    """
    if not out.size:
        return
    rank, order = len(affine.matrix), how.order
    is_stack = box.ndim > rank
    image, made = (box[0], out[0]) if is_stack else (box, out)
    shape: Any = three(made.shape)
    brick = None
    if rank == 3 and order in BRICKS:
        itemsize = 8 if is_wide(box, out) else 4
        brick = plan_brick(affine.matrix, order, BRICKS[order].tile, itemsize, _shared_limit(box))
    if brick is not None:
        cut, name, more = BRICKS[order], "affine_brick", {"PITCH": str(brick.pitch)}
    else:
        cut, name, more = AFFINE[order], "affine", {"WARP_X": str(_warp_x(affine))}
    blocks, tiles = blocks_of(shape, cut.tile, rank)
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
        more["BATCH"] = "1"
    kernel = load(spec_of("affine", name, kinds_of(image, made, order, how.mode), cut, **more))
    shared = 0 if brick is None else brick.nbytes
    if shared > _WITHOUT_ASKING and kernel.max_dynamic_shared_size_bytes < shared:
        kernel.max_dynamic_shared_size_bytes = shared
    packed = bytearray(_AFFINE_FIELDS.pack(*numbers))
    if not is_stack:
        args = np.frombuffer(packed, _AFFINE_DTYPE)
        kernel(blocks, (cut.threads,), (box, out, args), shared_mem=shared)
        return
    args = np.frombuffer(packed.ljust(_AFFINE_BATCH_DTYPE.itemsize, b"\0"), _AFFINE_BATCH_DTYPE)
    for images, samples, number in _parts(box, out, blocks, args):
        kernel((number,), (cut.threads,), (images, samples, args), shared_mem=shared)


def _shared_limit(box: Any) -> int:
    """Bytes of shared memory that a brick may take: some GPUs have less than is wanted."""
    return min(_BRICK_NBYTES, _shared_nbytes(box.device.id) - _DECLARED) if is_device_array(box) else _BRICK_NBYTES


@functools.cache
def _shared_nbytes(device_id: int) -> int:
    from cupy.cuda import runtime

    return int(runtime.deviceGetAttribute(runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin, device_id))


def _matrix_and_shift(affine: AffineMap, rank: int, pad: int) -> tuple[float, ...]:
    """Return the map's twelve numbers, for three axes, into an image with a pad."""
    (row, *rows), shift = affine.matrix, [one + pad for one in affine.offset]
    if rank == 3:
        return (*row, *rows[0], *rows[1], *shift)
    return (0, 0, 0, 0, *row, 0, *rows[0], 0, *shift)


def _has_aligned_rows(box: Any) -> bool:
    """Say whether four voxels that begin at a multiple of four can be read at once."""
    return box.shape[2] % 4 == 0 and address_of(box) % min(16, 4 * box.itemsize) == 0


def _warp_x(affine: AffineMap) -> int:
    """Choose how many of a warp's threads lie along X: all where X stays X, else a square that touches fewer lines."""
    column = [abs(row[-1]) for row in affine.matrix]
    return 32 if max(column[:-1]) <= 0.1 * column[-1] else 8


def contiguous(array: Any) -> Any:
    """Return the array C-contiguous, as the kernels take it."""
    return array if array.flags.c_contiguous else array_module(array).ascontiguousarray(array)
