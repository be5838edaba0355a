"""Resample volumes where they are: CuPy in, CuPy out; NumPy in, NumPy out.

In: a volume and its voxel spacing. Out: the volume on another grid, and the spacing really reached. Spacings are in µm,
or in any one unit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from linumpy.device import array_module, is_device_array


def resample_volume(
    volume: Any,
    current_spacing: Sequence[float],
    target_spacing: Sequence[float] | float,
    *,
    order: int = 1,
    anti_aliasing: bool = True,
) -> tuple[Any, tuple[float, ...]]:
    """Resample a volume to another voxel spacing.

    The extent of the volume, voxels times spacing, stays as it is; it is cut into the nearest whole number of voxels.
    A voxel of the result takes its value at the place of its centre.

    Parameters
    ----------
    volume : numpy.ndarray or cupy.ndarray
        Of any rank; integers and floats.
    current_spacing : sequence of float
        Voxel spacing of the volume, one number for each axis.
    target_spacing : sequence of float or float
        Wanted voxel spacing; one number for all axes alike.
    order : int
        Of the spline: 0 nearest, 1 linear, up to 5.
    anti_aliasing : bool
        Whether to smooth along axes that get coarser, by a Gaussian of (factor - 1) / 2 voxels as scikit-image's
        ``resize`` does.

    Returns
    -------
    volume : numpy.ndarray or cupy.ndarray
        float64 for float64, else float32, where the input is.
    spacing : tuple of float
        Voxel spacing of the result.

    Raises
    ------
    ValueError
        Spacings that are not positive numbers, one for each axis; another `order`; an empty volume.
    TypeError
        Complex or boolean voxels.
    """
    current = _spacing("current_spacing", current_spacing, volume.ndim)
    target = _spacing("target_spacing", target_spacing, volume.ndim)
    if order not in range(6):
        raise ValueError(f"order={order!r}: a spline order is an integer from 0 to 5")
    if volume.dtype.kind not in "iuf":
        raise TypeError(f"a volume of {volume.dtype} cannot be resampled: integers and floats can")
    if not all(volume.shape):
        raise ValueError(f"a volume of shape {volume.shape} has nothing to resample")
    shape = tuple(max(1, round(n * c / t)) for n, c, t in zip(volume.shape, current, target, strict=True))
    factors = tuple(n / m for n, m in zip(volume.shape, shape, strict=True))
    reached = tuple(c * f for c, f in zip(current, factors, strict=True))
    xp, ndimage = array_module(volume), _ndimage(volume)
    result = volume.astype(np.float64 if volume.dtype == np.float64 else np.float32)
    if shape == volume.shape:
        return result, reached
    sigmas = [max(0.0, (factor - 1) / 2) for factor in factors]
    if anti_aliasing and any(sigmas):
        result = ndimage.gaussian_filter(result, sigmas, mode="nearest")
    # The centre of voxel i of the result lies at voxel (i + 1/2) factor - 1/2 of the volume.
    offset = [(factor - 1) / 2 for factor in factors]
    result = ndimage.affine_transform(result, xp.asarray(factors), offset, shape, order=order, mode="nearest")
    return result, reached


def _spacing(name: str, value: Sequence[float] | float, rank: int) -> tuple[float, ...]:
    values = (float(value),) * rank if isinstance(value, (int, float)) else tuple(float(one) for one in value)
    if len(values) != rank or not all(math.isfinite(one) and one > 0 for one in values):
        raise ValueError(f"{name}={value!r}: a volume of {rank} axes needs a positive number for each")
    return values


def _ndimage(volume: Any) -> ModuleType:
    if is_device_array(volume):
        import cupyx.scipy.ndimage as ndimage
    else:
        import scipy.ndimage as ndimage
    return ndimage
