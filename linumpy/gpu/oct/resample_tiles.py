"""Resample the tiles of a volume, each by itself: CuPy in, CuPy out; NumPy in, NumPy out.

In: a volume of many tiles, and a :class:`~linumpy.plan.grid.tile_grid.TileAxis` for each axis. Out: the volume of the
new tiles, in the dtype of the volume or another dtype. Each tile is smoothed and interpolated as by
:func:`linumpy.gpu.interpolation.resample_volume` at order 1, but integers are rounded, halves away from zero.
:mod:`~linumpy.gpu.resize.resizing` resamples all tiles at once; only its tables of weights depend on where a tile ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from linumpy.arrays import Array, array_module
from linumpy.gpu.kernels import CUDA_TYPES, computed_in
from linumpy.gpu.resize.resizing import apply_tables
from linumpy.gpu.resize.tables import AxisPlan, unchanged
from linumpy.plan.grid.tile_grid import TileAxis


def resample_tiles(volume: Array, axes: Sequence[TileAxis], dtype: DTypeLike | None = None) -> Any:
    """Resample each tile of a volume by itself.

    `volume`: of any rank; integers and floats. `axes`: one for each axis; their sizes are the shape of the volume.
    `dtype`: dtype of the result; by default the volume's, in this machine's byte order.

    Returns: In the memory (host or device) of the volume, C-contiguous.

    `ValueError`: Axes whose sizes are not the volume's shape. `TypeError`: Voxels that are not integers or floats.
    """
    axes = tuple(axes)
    if tuple(axis.size for axis in axes) != tuple(volume.shape):
        raise ValueError(f"axes of {tuple(axis.size for axis in axes)} voxels: the volume has {tuple(volume.shape)}")
    target = np.dtype(volume.dtype if dtype is None else dtype).newbyteorder("=")
    for kind in (volume.dtype, target):
        if kind.str[1:] not in CUDA_TYPES or kind.kind not in "iuf":
            raise TypeError(f"tiles of {kind} cannot be resampled: integers and floats can")
    if all(axis.tile == axis.new_tile for axis in axes) or not volume.size:
        xp = array_module(volume)
        return xp.ascontiguousarray(volume.astype(target, copy=False))
    return apply_tables(volume, [plan_of(axis) for axis in axes], computed_in(volume.dtype, target), target)


def plan_of(axis: TileAxis) -> AxisPlan:
    """Plan an axis of tiles."""
    if axis.tile == axis.new_tile:
        return unchanged(axis.size)
    return AxisPlan(axis.size, axis.new_size, 1, "nearest", axis.sigma, (axis.tile, axis.new_tile))
