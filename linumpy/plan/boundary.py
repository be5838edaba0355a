"""Boundary modes, named as in SciPy: how a coordinate beyond the ends of an image maps to a voxel."""

from __future__ import annotations

import numpy as np

from linumpy.arrays import Array

#: Every mode; kernels number them in this order.
MODES = ("constant", "grid-constant", "nearest", "reflect", "mirror", "wrap", "grid-wrap")
#: Upper bound of the rounding error of a coordinate, in voxels.
ROUNDING = 1e-6


def snap_to_edges(coordinates: Array, size: int) -> None:
    """Move coordinates that are outside of an axis of `size` voxels by a rounding error to its edge, in place."""
    coordinates[(coordinates < 0) & (coordinates >= -ROUNDING)] = 0
    coordinates[(coordinates > size - 1) & (coordinates <= size - 1 + ROUNDING)] = size - 1


def period(size: np.ndarray | int, mode: str) -> np.ndarray:
    """Return the period, in voxels, of an image that its boundary mode repeats; at least 1.

    - `size` (int, or int): voxels along the axis.
    - `mode` (``"reflect"``, ``"mirror"``, ``"wrap"`` or ``"grid-wrap"``): boundary mode.
    """
    size = np.asarray(size)
    periods = {"reflect": 2 * size, "mirror": 2 * size - 2, "wrap": size - 1, "grid-wrap": size}
    return np.maximum(1, periods[mode])


def fold(index: np.ndarray, size: np.ndarray | int, mode: str) -> np.ndarray:
    """Map indices beyond the ends of an axis to voxels of the image.

    - `index` (int): voxels, inside or outside of the image.
    - `size` (int, or int): voxels along the axis, in a shape that broadcasts with the shape of `index`.
    - `mode`: one of :data:`MODES`.

    Returns (int): from 0 to ``size - 1``, or -1 for an index outside the image with ``"constant"`` and
    ``"grid-constant"``. With ``"wrap"`` the last voxel, ``size - 1``, coincides with the first voxel of the next period
    and maps to 0.
    """
    if mode == "nearest":
        return np.clip(index, 0, np.asarray(size) - 1)
    if mode in ("constant", "grid-constant"):
        return np.where((index >= 0) & (index < size), index, -1)
    length = period(size, mode)
    inside = index % length
    if mode == "reflect":
        return np.minimum(inside, length - 1 - inside)
    return np.minimum(inside, length - inside) if mode == "mirror" else inside
