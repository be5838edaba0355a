"""Which voxels of a volume a resampled crop needs: maps of coordinates → bounds and boxes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from linumpy.stream.planning.records import Vector

#: Rounding error of coordinates, in voxels: the device may compute them in another order.
_SLACK = 1e-6


@lru_cache(maxsize=64)
def grid_map(
    node_spacing: float, nodes: tuple[int, ...], middle: Vector, steps: Vector, space: int
) -> tuple[Vector, Vector]:
    """Return scale and origin of the map from voxels of the crop to the grid; 0 for axes that are not of space."""
    scale = np.array(steps) / node_spacing
    scale[: 3 - space] = 0.0
    origin = (np.array(nodes) - 1) / 2 - np.array(middle) * scale
    return _vector(scale), _vector(origin)


def _vector(values: np.ndarray) -> Vector:
    z, y, x = values.tolist()
    return z, y, x


def blur_sigma(blur: float, box: Sequence[tuple[int, int]], steps: np.ndarray, space: int) -> Vector:
    """Return the blur in voxels, 0 along axes of one voxel and axes that are not of space."""
    if blur == 0:
        return 0.0, 0.0, 0.0
    sizes = (stop - start for start, stop in box)
    wide = [axis >= 3 - space and n > 1 for axis, n in enumerate(sizes)]
    return _vector(np.where(wide, blur / steps, 0.0))


def reach(
    matrices: np.ndarray, offsets: np.ndarray, sizes: np.ndarray, grids: Sequence[np.ndarray | None]
) -> tuple[np.ndarray, np.ndarray]:
    """Return bounds of the coordinates that the voxels of crops have in their volumes, each (crops, 3).

    A cubic B-spline lies between the least and the greatest of its control points: the bounds hold inside of the crop,
    also where displacements exceed those at its faces.
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
    """Return (start, stop) of the voxels that interpolation at coordinates from `low` to `high` uses, as whole floats.

    Neighbours of weight 0 are included, except behind the last voxel of an axis, of `n` voxels.
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
    """Return the least and the greatest of the voxels 0 to `top` that `first` to `last` stand for."""
    period = np.maximum(2 * top, 1)
    begin = np.mod(first, period)
    end = begin + (last - first)
    turned = [np.where(voxel <= top, voxel, period - voxel) for voxel in (begin, np.mod(end, period))]
    has_bottom = (begin == 0) | (end >= period)
    has_top = ((begin <= top) & (end >= top)) | (end >= period + top)
    return np.where(has_bottom, 0, np.minimum(*turned)), np.where(has_top, top, np.maximum(*turned))


def fold(voxels: np.ndarray, n: int, pad: str) -> np.ndarray:
    """Map indices of voxels into an axis of `n` voxels, as ``numpy.pad`` extends it in mode edge or reflect."""
    if pad == "edge" or n == 1:
        return np.clip(voxels, 0, n - 1)
    period = 2 * n - 2
    turned = np.mod(voxels, period)
    return np.where(turned < n, turned, period - turned)


def spline_matrix(voxels: np.ndarray, nodes: int, scale: float, origin: float) -> np.ndarray:
    """Return the weights of the control points along an axis at voxels of the crop, (voxels, nodes).

    Parameters
    ----------
    voxels : numpy.ndarray
        Coordinates along the axis.
    nodes : int
        Number of control points along it.
    scale, origin : float
        Map from voxels to control points: :attr:`Resampling.grid_scale` and ``grid_origin``.
    """
    n = len(voxels)
    at = voxels * scale + origin
    base = np.clip(np.floor(at), 1, nodes - 3).astype(int)
    t = at - base
    weights = np.stack([(1 - t) ** 3, 3 * t**3 - 6 * t**2 + 4, -3 * t**3 + 3 * t**2 + 3 * t + 1, t**3]) / 6
    matrix = np.zeros((n, nodes))
    for k in range(4):
        matrix[np.arange(n), base - 1 + k] += weights[k]
    return matrix
