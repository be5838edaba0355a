"""Sample an image on the device between its voxels: at given places, or on the grid of an affine map.

In: an image, or the box of one that is needed, and places or a map. Out: samples, by kernels of ``interpolate.cu`` for
two and three axes, orders 0, 1 and 3 (of spline coefficients), and all modes of SciPy. No kernel is compiled for a
shape. Temporary memory: none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from linumpy.device import array_module
from linumpy.gpu.kernels import CUDA_TYPES, KernelSpec, int32, int64, load

#: As SciPy names them, by the number that the kernels give them.
MODES = ("constant", "grid-constant", "nearest", "reflect", "mirror", "wrap", "grid-wrap")
ORDERS, RANKS = (0, 1, 3), (2, 3)
#: Integers of 32 bits and more do not fit into a float.
_IN_FLOAT = ("u1", "i1", "u2", "i2", "f2", "f4")
_THREADS = 256
_POINTS = {0: 4, 1: 4, 3: 2}  # POINTS and MARCH of interpolate.cu
_TILE_X, _TILE_Y = 32, 8
_TILE = (8, 8, 32)  # of affine_brick
#: Shared memory of a block at most: two of them fit on a multiprocessor.
_BRICK_NBYTES = 96 * 1024
#: A kernel that wants more must ask for it.
_WITHOUT_ASKING = 48 * 1024


@dataclass(frozen=True)
class Sampler:
    """How an image is sampled.

    Attributes
    ----------
    order : int
        Of the spline: 0, 1 or 3.
    mode : str
        One of :data:`MODES`: what lies outside.
    cval : float
        The value there, for the constant modes.
    pad : int
        Voxels that were added at either end of each axis of the image that is sampled, as SciPy does for some splines.
        Places are those of the image without them; `mode` applies beyond them.
    """

    order: int
    mode: str
    cval: float
    pad: int = 0


def can_sample(image: Any, order: int, mode: str) -> bool:
    """Say whether the kernels sample this kind of image."""
    kind = image.dtype.str[1:]
    return image.ndim in RANKS and order in ORDERS and kind in CUDA_TYPES and kind != "b1" and image.size > 0


def sample_points(image: Any, coordinates: Any, how: Sampler, out: Any) -> None:
    """Sample at given places.

    Parameters
    ----------
    image : cupy.ndarray
        Of two or three axes, C-contiguous, not empty.
    coordinates : cupy.ndarray of float32 or float64, (rank, count)
        Places in voxels, C-contiguous. Where one is NaN or infinite the result is the constant value, or NaN in other
        modes.
    how : Sampler
        Order, mode, constant value.
    out : cupy.ndarray, (count,)
        C-contiguous.
    """
    count = coordinates.shape[1]
    if not count:
        return
    given = CUDA_TYPES[coordinates.dtype.str[1:]]
    spec = _spec("map_points", image, out, how, COORDINATE=given, FIELD="0", PAD=str(how.pad))
    blocks = -(-count // (_THREADS * _POINTS[how.order]))
    sizes = int32(*_three(image.shape))
    grid = (np.float64(how.cval), *int32(1, 1), *map(np.float64, (1, 1, 1)))
    load(spec)((blocks,), (_THREADS,), (image, coordinates, out, *int64(count), *int32(1), *sizes, *grid))


@dataclass(frozen=True)
class AffineMap:
    """A map from voxels of an output to places in an image: place = matrix @ voxel + offset.

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
        The image, or a box of it that holds all voxels this block needs; C-contiguous.
    affine : AffineMap
        From voxels of the whole output to places in the whole image.
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
    rank = box.ndim
    place = AffineMap(*_padded(affine, rank, how.pad))
    zeros = (0,) * rank
    starts = [_three(one if one is not None else zeros, 0) for one in (out_start, box_start)]
    integers = (*starts[0], *_three(out.shape), *_three(whole or box.shape), *starts[1], *_three(box.shape))
    numbers = [np.float64(value) for row in place.matrix for value in row] + [np.float64(v) for v in place.offset]
    brick = _brick(affine, how, box, out)
    if brick is not None:
        spec = _spec("affine_brick", box, out, how, BRICK=str(_TILE[0]))
        blocks = math.prod(-(-n // tile) for n, tile in zip(out.shape, _TILE, strict=True))
        args = (box, out, *numbers, *int32(*integers, *brick.shape, brick.pitch), np.float64(how.cval))
        kernel = load(spec)
        if brick.nbytes > _WITHOUT_ASKING and kernel.max_dynamic_shared_size_bytes < brick.nbytes:
            kernel.max_dynamic_shared_size_bytes = brick.nbytes
        kernel((blocks,), (_THREADS,), args, shared_mem=brick.nbytes)
        return
    spec = _spec("affine", box, out, how, WARP_X=str(_warp_x(affine, rank)))
    shape = _three(out.shape)
    rows = _TILE_Y if rank == 3 else _TILE_Y * _POINTS[how.order]
    blocks = -(-shape[2] // _TILE_X) * -(-shape[1] // rows)
    if rank == 3:
        blocks *= -(-shape[0] // _POINTS[how.order])
    load(spec)((blocks,), (_THREADS,), (box, out, *numbers, *int32(*integers, 1), np.float64(how.cval)))


@dataclass(frozen=True)
class _Brick:
    """A part of the image in shared memory: its shape, the length of a row, its bytes."""

    shape: tuple[int, int, int]
    pitch: int
    nbytes: int


def _brick(affine: AffineMap, how: Sampler, box: Any, out: Any) -> _Brick | None:
    """Size the part of the image that a tile of the output needs; None where it does not fit or does not pay."""
    if box.ndim != 3 or how.order < 3:  # with few neighbours the caches do as well
        return None
    reach = np.abs(np.asarray(affine.matrix)) @ (np.array(_TILE) - 1)
    if not (reach < 2**20).all():
        return None
    # One voxel at each side for rounding, and the neighbours of a place.
    shape = np.floor(reach).astype(int) + 3 + (2 if how.order == 1 else 4)
    pitch = -(-int(shape[2]) // 32) * 32
    itemsize = 8 if _is_wide(box, out) else 4
    nbytes = int(shape[0] * shape[1]) * pitch * itemsize
    return _Brick((int(shape[0]), int(shape[1]), int(shape[2])), pitch, nbytes) if nbytes <= _BRICK_NBYTES else None


def _spec(name: str, image: Any, out: Any, how: Sampler, **more: str) -> KernelSpec:
    source, target = image.dtype.str[1:], out.dtype.str[1:]
    wide = _is_wide(image, out)
    defines = {
        "SOURCE": CUDA_TYPES[source],
        "TARGET": CUDA_TYPES[target],
        "COMPUTE": "double" if wide else "float",
        "WIDE": str(int(wide)),
        "RANK": str(image.ndim),
        "ORDER": str(how.order),
        "MODE": str(MODES.index(how.mode)),
        "INDEX": "int64" if max(image.size, out.size) >= 2**31 - 2**20 else "int",
        **more,
    }
    return KernelSpec("interpolate", name, tuple(defines.items()))


def _is_wide(image: Any, out: Any) -> bool:
    return not (image.dtype.str[1:] in _IN_FLOAT and out.dtype.str[1:] in _IN_FLOAT)


def _three(sizes: Sequence[int], first: int = 1) -> tuple[int, ...]:
    """Put an axis of one voxel before two."""
    return (first,) * (3 - len(sizes)) + tuple(int(one) for one in sizes)


def _padded(affine: AffineMap, rank: int, pad: int) -> tuple[tuple[tuple[float, ...], ...], tuple[float, ...]]:
    matrix = np.zeros((3, 3))
    matrix[3 - rank :, 3 - rank :] = affine.matrix
    offset = np.zeros(3)
    offset[3 - rank :] = np.add(affine.offset, pad)
    return tuple(tuple(row) for row in matrix.tolist()), tuple(offset.tolist())


def _warp_x(affine: AffineMap, rank: int) -> int:
    """Choose how many of a warp's threads lie along X: all where X stays X, else a square that touches fewer lines."""
    matrix = np.abs(np.asarray(affine.matrix))
    return 32 if matrix[:-1, -1].max(initial=0) <= 0.1 * matrix[-1, -1] else 8


def contiguous(array: Any) -> Any:
    """Return the array C-contiguous, as the kernels take it."""
    return array_module(array).ascontiguousarray(array)
