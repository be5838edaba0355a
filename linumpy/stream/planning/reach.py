"""Which voxels of their volumes staged crops may use: staged crops of a batch → regions that are read. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np

from linumpy.stream.arguments import Box
from linumpy.stream.planning.records import CropRead, Resampling, Vector, WarpedCrop, zyx

#: Rounding error of coordinates, in voxels: the device may compute them in another order.
_SLACK = 1e-6
#: Start and shape of the empty box.
_EMPTY = (0, 0, 0)
#: Scale and origin of the elastic grid of a crop that has none.
_NO_GRID = (0.0, 0.0, 0.0), (0.0, 0.0, 0.0)


def with_regions(planned: Sequence[CropRead | WarpedCrop], pad: str) -> list[CropRead]:
    """Plan the regions that staged crops read, and the resampling of each staged crop.

    `planned`: the crops of all samples of a batch. `pad`: values outside of volumes: ``Config.pad``. Returns list of
    CropRead: In the order of `planned`; reads of direct crops are unchanged.
    """
    reads = {number: crop for number, crop in enumerate(planned) if isinstance(crop, CropRead)}
    staged = [(number, crop) for number, crop in enumerate(planned) if isinstance(crop, WarpedCrop)]
    for order in {crop.order for _, crop in staged}:
        numbers, crops = zip(*((number, crop) for number, crop in staged if crop.order == order), strict=True)
        reads.update(zip(numbers, _with_regions(crops, order, pad), strict=True))
    return [reads[number] for number in range(len(planned))]


def _with_regions(crops: Sequence[WarpedCrop], order: int, pad: str) -> Iterator[CropRead]:
    """Yield the reads of staged crops of one order of interpolation."""
    aabbs = np.array([warped.crop.zyx for warped in crops], float)
    steps = np.array([warped.crop.zyx_step for warped in crops])
    first, sizes = aabbs[:, :, 0], aabbs[:, :, 1] - aabbs[:, :, 0]
    for number, warped in enumerate(crops):
        if warped.crop.exact_start is not None:
            first[number, -len(warped.crop.aabb) :] = warped.crop.exact_start[-3:]
    middles = (sizes - 1) / 2
    matrices = np.array([warped.warp.matrix for warped in crops]) * (steps[:, None, :] / steps[:, :, None])
    offsets = first + middles + np.array([warped.warp.translation for warped in crops]) / steps
    offsets -= (matrices * middles[:, None, :]).sum(axis=2)
    grids = [
        None if warped.warp.nodes is None else warped.warp.nodes / step[:, None, None, None]
        for warped, step in zip(crops, steps, strict=True)
    ]
    volumes = [zyx(warped.info.shape) for warped in crops]
    bounds = read_bounds(*reach(matrices, offsets, sizes, grids), np.array(volumes), order, pad)
    begin, end = (bound.astype(int).tolist() for bound in bounds)
    for n, warped in enumerate(crops):
        crop, space, warp = warped.crop, warped.info.space, warped.warp
        is_read = all(start < stop for start, stop in zip(begin[n], end[n], strict=True))
        start, stop = (tuple(begin[n]), tuple(end[n])) if is_read else (_EMPTY, _EMPTY)
        scale, origin = _NO_GRID
        if (grid := grids[n]) is not None:
            middle = tuple(middles[n].tolist())
            scale, origin = grid_map(warp.node_spacing, grid.shape[1:], middle, crop.zyx_step, space)
        sigma = blur_sigma(warp.intensity.blur, crop.zyx, steps[n], space)
        shape = tuple([b - a for a, b in zip(start, stop, strict=True)])
        region = (*crop.aabb[:-3], *zip(start, stop, strict=True))[-len(crop.aabb) :] if is_read else None
        resampling = Resampling(
            matrices[n], offsets[n], start, shape, volumes[n], grid, scale, origin, sigma, warp.intensity, order
        )  # fmt: skip
        yield CropRead(warped.row, warped.info, region, (), resampling)


@lru_cache(maxsize=64)
def grid_map(
    node_spacing: float, nodes: tuple[int, ...], middle: tuple[float, ...], steps: tuple[float, ...], space: int
) -> tuple[Vector, Vector]:
    """Return scale and origin of the map from voxels of the crop to the grid; the scale is 0 for axes not of space."""
    scale = np.array(steps) / node_spacing
    scale[: 3 - space] = 0.0
    origin = (np.array(nodes) - 1) / 2 - np.array(middle) * scale
    return _vector(scale), _vector(origin)


def _vector(values: np.ndarray) -> Vector:
    z, y, x = values.tolist()
    return z, y, x


def blur_sigma(blur: float, aabb: Box, steps: np.ndarray, space: int) -> Vector:
    """Return the standard deviation of the blur in voxels; 0 along axes of one voxel and axes that are not of space."""
    if blur == 0:
        return 0.0, 0.0, 0.0
    sizes = (stop - start for start, stop in aabb)
    is_blurred = [axis >= 3 - space and n > 1 for axis, n in enumerate(sizes)]
    return _vector(np.where(is_blurred, blur / steps, 0.0))


def reach(
    matrices: np.ndarray, offsets: np.ndarray, sizes: np.ndarray, grids: Sequence[np.ndarray | None]
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the minimum and the maximum of the coordinates of each crop's voxels in the volume, each (crops, 3).

    A cubic B-spline lies between the minimum and the maximum of its control points. So the bounds also hold where
    displacements inside the crop exceed the displacements at the faces of the crop.
    """
    ends = matrices * (sizes - 1)[:, None, :]
    low = offsets + np.minimum(ends, 0).sum(axis=2)
    high = offsets + np.maximum(ends, 0).sum(axis=2)
    for number, grid in enumerate(grids):
        if grid is not None:
            of_axes = grid.reshape(3, -1)
            low[number] += of_axes.min(axis=1)
            high[number] += of_axes.max(axis=1)
    return low, high


def read_bounds(
    low: np.ndarray, high: np.ndarray, n: np.ndarray, order: int, pad: str
) -> tuple[np.ndarray, np.ndarray]:
    """Compute (start, stop) of the voxels that interpolation at coordinates from `low` to `high` uses, as whole floats.

    Neighbours of weight 0 are included, except beyond the last voxel of an axis of `n` voxels.
    """
    shift = 0.5 if order == 0 else 0.0
    first, last = np.floor(low + (shift - _SLACK)), np.floor(high + (shift + _SLACK)) + order
    top = n - 1
    if pad == "constant":
        return np.maximum(first, 0), np.minimum(last, top) + 1
    if pad == "edge":
        return np.minimum(np.maximum(first, 0), top), np.minimum(np.maximum(last, order), top) + 1
    outside = (first < 0) | (last > top)
    if outside.any():
        top = np.broadcast_to(top, outside.shape)[outside]
        first[outside], last[outside] = _reflected(first[outside], last[outside], top)
    return first, last + 1


def _reflected(first: np.ndarray, last: np.ndarray, top: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute the minimum and maximum of the voxels, in 0 to `top`, to which reflection maps `first` to `last`."""
    period = np.maximum(2 * top, 1)
    begin = np.mod(first, period)
    end = begin + (last - first)
    turned = [np.where(voxel <= top, voxel, period - voxel) for voxel in (begin, np.mod(end, period))]
    has_bottom = (begin == 0) | (end >= period)
    has_top = ((begin <= top) & (end >= top)) | (end >= period + top)
    return np.where(has_bottom, 0, np.minimum(*turned)), np.where(has_top, top, np.maximum(*turned))


def spline_matrix(voxels: np.ndarray, nodes: int, scale: float, origin: float) -> np.ndarray:
    """Compute the weights of the control points along an axis at voxels of the crop, (voxels, nodes).

    `voxels`: indices of voxels along the axis, or coordinates between voxels. `nodes`: number of control points along
    the axis. `scale`, `origin`: map from voxels to control points: :attr:`Resampling.grid_scale` and ``grid_origin``.
    """
    n = len(voxels)
    coordinates = voxels * scale + origin
    base = np.clip(np.floor(coordinates), 1, nodes - 3).astype(int)
    t = coordinates - base
    weights = np.stack([(1 - t) ** 3, 3 * t**3 - 6 * t**2 + 4, -3 * t**3 + 3 * t**2 + 3 * t + 1, t**3]) / 6
    matrix = np.zeros((n, nodes))
    for k in range(4):
        matrix[np.arange(n), base - 1 + k] += weights[k]
    return matrix
