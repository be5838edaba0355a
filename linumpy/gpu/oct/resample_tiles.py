"""Resample the tiles of a volume, each by itself: CuPy in, CuPy out; NumPy in, NumPy out.

In: a volume of many tiles, and a :class:`~linumpy.plan.grid.tile_axis.TileAxis` for each axis. Out: the volume of the
new tiles, in its dtype or another one. What is smoothed and interpolated is what
:func:`linumpy.gpu.interpolation.resample_volume` does to each tile, order 1, but for rounding; integers are rounded,
halves away from zero. :mod:`~linumpy.gpu.resize.resizing` does it, all tiles at once: its tables of weights alone know
where a tile ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from linumpy.device import array_module
from linumpy.gpu.kernels import CUDA_TYPES
from linumpy.gpu.resize.resizing import apply_tables, computed_in
from linumpy.gpu.resize.tables import AxisPlan, unchanged
from linumpy.plan.grid.tile_axis import TileAxis


def resample_tiles(volume: Any, axes: Sequence[TileAxis], dtype: Any = None) -> Any:
    """Resample each tile of a volume by itself.

    Parameters
    ----------
    volume : numpy.ndarray or cupy.ndarray
        Of any rank; integers and floats.
    axes : sequence of TileAxis
        One for each axis; their sizes are the shape of the volume.
    dtype : dtype, optional
        Of the result; by default that of the volume, in this machine's byte order.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        Where the volume is, C-contiguous.

    Raises
    ------
    ValueError
        Axes that are not those of the volume.
    TypeError
        Voxels that are not integers or floats.
    """
    axes = tuple(axes)
    if tuple(axis.size for axis in axes) != tuple(volume.shape):
        raise ValueError(f"axes of {tuple(axis.size for axis in axes)} voxels: the volume has {tuple(volume.shape)}")
    wanted = np.dtype(volume.dtype if dtype is None else dtype).newbyteorder("=")
    for one in (volume.dtype, wanted):
        if one.str[1:] not in CUDA_TYPES or one.kind not in "iuf":
            raise TypeError(f"tiles of {one} cannot be resampled: integers and floats can")
    if all(axis.tile == axis.new_tile for axis in axes) or not volume.size:
        xp = array_module(volume)
        return xp.ascontiguousarray(volume.astype(wanted, copy=False))
    return apply_tables(volume, [plan_of(axis) for axis in axes], computed_in(volume.dtype, wanted), wanted)


def plan_of(axis: TileAxis) -> AxisPlan:
    """Plan an axis of tiles."""
    if axis.tile == axis.new_tile:
        return unchanged(axis.size)
    return AxisPlan(axis.size, axis.new_size, 1, "nearest", axis.sigma, (axis.tile, axis.new_tile))
