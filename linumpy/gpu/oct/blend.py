"""Blend overlapping tiles into a box of a stitched volume: CuPy in, CuPy out; NumPy in, NumPy out.

In: boxes of tiles, with positions to fractions of a voxel, and with weights. Out: the blended box. Each of its voxels
is the weighted mean of all tiles that cover it, interpolated linearly. On the device one kernel computes each voxel
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from linumpy.arrays import Array, is_device_array
from linumpy.gpu.kernels import CUDA_TYPES, KernelSpec, address_of, computed_in, int32, int64, load
from linumpy.gpu.rounding import saturated

_THREADS, _MARCH = 128, 8  # as in blend.cu
#: The structure Tile of blend.cu.
RECORD = np.dtype(
    [
        ("voxels", "u8"), ("weights", "u8"), ("stride", "i8", 3), ("corner", "i4", 2), ("begin", "i4", 2),
        ("fraction", "f4", 2),
    ]
)  # fmt: skip
assert RECORD.itemsize == 64, "as in blend.cu"


@dataclass(frozen=True)
class PlacedTile:
    """A tile that covers voxels of a box.

    `voxels`: a box of the tile with all voxels that the result needs, as deep as the result. `begin` (int, int):
    lateral offset of that box in the tile, in voxels. `corner` (int, int): lateral position of the result's first voxel
    in the tile, in whole voxels; negative if the tile begins inside the result. `fraction` (float, float): fractions of
    a voxel, from 0 to below 1, to add to `corner`. `weights` (float32, (height, width)): weight of each lateral voxel
    of the whole tile, above 0.
    """

    voxels: Array
    begin: tuple[int, int]
    corner: tuple[int, int]
    fraction: tuple[float, float]
    weights: Array


def blend_tiles(
    tiles: Sequence[PlacedTile], shape: Sequence[int], depth_axis: int, dtype: np.dtype, xp: ModuleType
) -> Array:
    """Blend tiles into a box.

    `tiles`: all tiles of the box, in the same memory, of one shape and of `dtype`. Their boxes hold every voxel that
    the result needs. `shape` (int, int, int): shape of the result. `depth_axis`: axis of depth, of tiles and result.
    `dtype`: integers or floats, in this machine's byte order. Integers are rounded half to even.

    Returns: Of `shape` and `dtype`; 0 where no tile has a finite voxel.

    `TypeError`: A dtype that cannot be blended.
    """
    if dtype.kind not in "iuf" or dtype.itemsize > 8:
        raise TypeError(f"tiles of {dtype} cannot be blended: integers and floats can")
    if not tiles:
        return xp.zeros(tuple(shape), dtype)
    compute = _by_kernel if is_device_array(tiles[0].voxels) else _by_numpy
    return compute(tiles, tuple(shape), depth_axis, dtype, xp)


def kernel_spec(dtype: np.dtype) -> KernelSpec:
    """Choose a kernel of blend.cu."""
    defines = {"SOURCE": CUDA_TYPES[dtype.str[1:]], "ACC": CUDA_TYPES[computed_in(dtype).str[1:]]}
    return KernelSpec("blend", "blend_tiles", tuple(defines.items()), "linumpy.gpu.oct.cuda")


def _lateral(depth_axis: int) -> list[int]:
    return [axis for axis in range(3) if axis != depth_axis]


def _by_kernel(
    tiles: Sequence[PlacedTile], shape: tuple[int, ...], depth_axis: int, dtype: np.dtype, xp: ModuleType
) -> Array:
    order = (depth_axis, *_lateral(depth_axis))
    table = np.zeros(len(tiles), RECORD)
    weights = [xp.ascontiguousarray(tile.weights) for tile in tiles]
    for row, tile, weight in zip(table, tiles, weights, strict=True):
        row["voxels"], row["weights"] = address_of(tile.voxels), address_of(weight)
        row["stride"] = [tile.voxels.strides[axis] // dtype.itemsize for axis in order]
        row["corner"], row["begin"], row["fraction"] = tile.corner, tile.begin, tile.fraction
    out = xp.empty(shape, dtype)
    depth, rows, columns = (shape[axis] for axis in order)
    load(kernel_spec(dtype))(
        (-(-rows * columns // _THREADS), -(-depth // _MARCH)),
        (_THREADS,),
        (
            *(xp.asarray(table.view(np.uint8)), out, *int32(len(tiles), depth, rows, columns, *weights[0].shape)),
            *int64(*(out.strides[axis] // dtype.itemsize for axis in order)),
        ),
    )
    return out  # type: ignore[no-any-return]


def _by_numpy(
    tiles: Sequence[PlacedTile], shape: tuple[int, ...], depth_axis: int, dtype: np.dtype, xp: ModuleType
) -> Array:
    compute_dtype = computed_in(dtype)
    mean = np.zeros([shape[depth_axis], *(shape[axis] for axis in _lateral(depth_axis))], compute_dtype)
    total = np.zeros(mean.shape, compute_dtype)
    for tile in tiles:
        covered, in_tile = _overlap(tile, mean.shape[1:])
        if any(extent.start >= extent.stop for extent in covered):
            continue
        in_box = [extent.start - begin for extent, begin in zip(in_tile, tile.begin, strict=True)]
        size = [extent.stop - extent.start for extent in covered]
        sample = _between(
            np.moveaxis(np.asarray(tile.voxels), depth_axis, 0), in_box, size, tile.fraction, compute_dtype
        )
        start = [extent.start for extent in in_tile]
        weight = _between(np.asarray(tile.weights)[None], start, size, tile.fraction, compute_dtype)
        window = (slice(None), *covered)
        with np.errstate(invalid="ignore", over="ignore"):
            is_finite = np.isfinite(sample)
            total[window] += np.where(is_finite, weight, 0)
            share = weight / np.where(is_finite, total[window], 1)
            mean[window] += np.where(is_finite, share * (np.where(is_finite, sample, 0) - mean[window]), 0)
    result = saturated(np.rint(mean), dtype) if dtype.kind in "iu" else mean.astype(dtype)
    return np.ascontiguousarray(np.moveaxis(result, 0, depth_axis))


def _overlap(tile: PlacedTile, size: Sequence[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Return the lateral range of the result that a tile covers, and the range of the tile's voxels at or before it."""
    covered, in_tile = [], []
    for corner, fraction, length, n in zip(tile.corner, tile.fraction, tile.weights.shape, size, strict=True):
        start, stop = max(0, -corner), min(n, length - (fraction > 0) - corner)
        covered.append(slice(start, stop))
        in_tile.append(slice(start + corner, stop + corner))
    return tuple(covered), tuple(in_tile)


def _between(
    voxels: np.ndarray, start: Sequence[int], size: Sequence[int], fraction: Sequence[float], compute_dtype: np.dtype
) -> np.ndarray:
    """Interpolate a box (Z, Y, X) that begins a `fraction` of a voxel after `start`, as the kernel does."""
    fy, fx = (compute_dtype.type(np.float32(part)) for part in fraction)
    rows = slice(start[0], start[0] + size[0] + (fy > 0))
    with np.errstate(invalid="ignore", over="ignore"):
        values: np.ndarray = voxels[:, rows, start[1] : start[1] + size[1]].astype(compute_dtype)
        if fx > 0:
            values += fx * (voxels[:, rows, start[1] + 1 : start[1] + 1 + size[1]].astype(compute_dtype) - values)
        return values[:, :-1] + fy * (values[:, 1:] - values[:, :-1]) if fy > 0 else values
