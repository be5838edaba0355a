"""The base class of volumes of voxels on the host and on a device: the range of values, normalisation.

In: voxels (C, Z, Y, X), NumPy or CuPy. Out: :class:`VoxelField`; subclasses evaluate the spline.
"""

from __future__ import annotations

import abc
from typing import Any

import numpy as np

from linumpy.arrays import Array
from linumpy.device import array_module
from linumpy.sampling.coordinates.boxes import plan_boxes
from linumpy.sampling.field import Field


def normalisation(low: float, high: float) -> tuple[float, float]:
    """Return a and b of ``(v - a) * b``, which maps low to 0 and high to 1; b is 0 if low equals high."""
    return low, 1 / (high - low) if high > low else 0.0


def normalised(values: Array, low_high: tuple[float, float] | None) -> Any:
    """Return voxels, NumPy or CuPy, as float32; with `low_high`, clip them and map them to 0 to 1. NaN stays NaN."""
    if low_high is None:
        return values.astype(np.float32)
    low, scale = normalisation(*low_high)
    # Clip first: infinity times the factor 0 of an empty range would be NaN.
    result = values.astype(np.float64)
    result.clip(*low_high, out=result)
    result -= low
    result *= scale
    return result.astype(np.float32)


def range_of(voxels: Array) -> tuple[float, float]:
    """Return the smallest and the largest voxel, NumPy or CuPy, ignoring NaN; two NaN if all voxels are NaN."""
    low, high = float(voxels.min()), float(voxels.max())
    if low == low:
        return low, high
    if isinstance(voxels, np.ndarray):
        return float(np.fmin.reduce(voxels, axis=None)), float(np.fmax.reduce(voxels, axis=None))
    xp = array_module(voxels)
    return float(xp.nanmin(voxels)), float(xp.nanmax(voxels))


def finite_range(*arrays: np.ndarray) -> tuple[float, float]:
    """Return the smallest and the largest finite value of arrays; (0, 0) if no value is finite."""
    finite = [values for values in (array[np.isfinite(array)] for array in arrays) if values.size]
    if not finite:
        return 0.0, 0.0
    return float(min(values.min() for values in finite)), float(max(values.max() for values in finite))


class VoxelField(Field):
    """A volume that a nearest, linear or cubic spline interpolates.

    `voxels` has shape (C, Z, Y, X). With `low_high` they become (v - low) / (high - low), clipped to 0 to 1.
    `value_range`, of decoded values, is then 0 to 1 by default, else the range of the voxels. `box_voxels` is the
    largest number of voxels that interpolation in a box of :attr:`boxes` may need.
    """

    def __init__(
        self,
        voxels: Array,
        spline_order: int,
        low_high: tuple[float, float] | None,
        value_range: tuple[float, float] | None,
        labels: bool,
        box_voxels: int,
    ) -> None:
        self._order, self._labels, self._low_high = spline_order, labels, low_high
        self.n_channels, z, y, x = (int(n) for n in voxels.shape)
        self.dims = (z, y, x)
        if value_range is None:
            value_range = (0.0, 1.0) if low_high else range_of(voxels)
        self.value_range = value_range
        self.values_dtype = np.dtype(np.int32 if labels else np.float32)
        self.boxes = plan_boxes(self.dims, box_voxels)

    def decode(self, coords: Array, out: Array) -> None:
        """Evaluate at points; see :class:`linumpy.sampling.field.Field`."""
        self._evaluate(coords, out, None)

    def decode_with_gradient(self, coords: Array, out: Array, gradient: Array) -> None:
        """Evaluate at points, with derivatives; ``ValueError`` for the nearest voxel, which has none."""
        if self._order == 0:
            super().decode_with_gradient(coords, out, gradient)
        self._evaluate(coords, out, gradient)

    @abc.abstractmethod
    def _evaluate(self, coords: Array, out: Array, gradient: Array | None) -> None:
        """Evaluate at points; if `gradient` is an array, write the derivatives to it, too."""
