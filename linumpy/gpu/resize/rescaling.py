"""Resize images and resample volumes to another voxel spacing: CuPy in, CuPy out; NumPy in, NumPy out.

In: an image of any rank, and a new shape or two voxel spacings in the same unit. Out: the image on its new grid,
smoothed along axes that get coarser. :mod:`~linumpy.gpu.resize.resizing` smooths, and interpolates at orders 0 and 1;
:mod:`~linumpy.gpu.ndimage.dispatch` interpolates by splines at higher orders. Users import both functions from
:mod:`linumpy.gpu.interpolation`.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import numpy as np

from linumpy.arrays import Array, array_module
from linumpy.gpu.ndimage.arguments import (
    Spline,
    Target,
    check_image,
    check_spline,
    read_per_axis,
    read_resizing,
)
from linumpy.gpu.ndimage.dispatch import GridMap, sample_grid
from linumpy.gpu.resize import resizing
from linumpy.plan.boundary import anti_aliasing_sigmas, centred


def resize(
    image: Array,
    output_shape: Sequence[int],
    *,
    order: int = 1,
    mode: str = "reflect",
    anti_aliasing: bool | None = None,
    anti_aliasing_sigma: float | Sequence[float] | None = None,
    preserve_range: bool = True,
    clip: bool = True,
) -> Array:
    """Resize an image, as scikit-image's ``resize`` does with ``preserve_range=True``.

    The extent of the image is kept: if an axis of n voxels gets m, voxel i of the result has its centre at
    (i + 1/2) n / m - 1/2 in voxels of the image. scikit-image computes integers in float64, this function in float32.
    Integers that are smoothed at order 0 (``anti_aliasing=True``) are rounded once, not after every axis.

    Parameters
    ----------
    image : numpy.ndarray or cupy.ndarray
        Of any rank; integers and floats, and booleans at order 0 without smoothing.
    output_shape : sequence of int
        One size for each axis. If the last size is missing, the last axis (of channels) keeps its size; further sizes
        add axes to the image.
    order : int
        Spline order: 0 nearest, 1 linear, up to 5.
    mode : str
        Boundary mode, by the names of ``numpy.pad``: ``"reflect"``, ``"symmetric"``, ``"edge"`` (or
        ``"nearest"``), ``"wrap"``, ``"constant"`` (zero).
    anti_aliasing : bool, optional
        Whether to smooth by a Gaussian first. By default true if an axis shrinks, but false for booleans and, at
        order 0, for integers.
    anti_aliasing_sigma : float or sequence of float, optional
        Standard deviation of that Gaussian, in voxels of the image; by default (factor - 1) / 2 along axes that shrink.
    preserve_range : bool
        Whether to keep the values of integers. With False and orders above 0, unsigned integers are divided by the
        maximum of their dtype, into [0, 1], and signed ones into [-1, 1].
    clip : bool
        Whether to limit the result to the range of the image, which splines exceed. With mode ``"constant"``, this
        range is extended to 0 if 0 lies within the range of the result.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        Of `output_shape`, in the memory of the image: float64 for float64, else float32; at order 0 integers and
        booleans keep their dtype.

    Raises
    ------
    ValueError
        An order, mode, shape or sigma that does not fit; an empty image; booleans that would be smoothed or
        interpolated.
    TypeError
        An image that is no NumPy or CuPy array, is complex, or is not made of numbers.
    """
    resizing_args = read_resizing(image, output_shape, order, mode, anti_aliasing, anti_aliasing_sigma)
    image = image.reshape(resizing_args.image_shape)
    if not preserve_range and order > 0 and image.dtype.kind in "iu":
        image = _unit_range(image)
    dtype = image.dtype.newbyteorder("=") if order == 0 and image.dtype.kind in "biu" else None
    if order <= 1:
        result = resizing.resample_axes(
            image,
            resizing_args.shape,
            order=order,
            mode=resizing_args.mode,
            sigmas=resizing_args.sigmas,
            dtype=dtype,
            clamp=clip and mode != "constant",
        )
    else:
        result = image.astype(np.float64 if image.dtype == np.float64 else np.float32)
        result = _smoothed(result, resizing_args.mode, resizing_args.sigmas)
        result = _sampled_at_centres(result, resizing_args.shape, order, resizing_args.mode)
    # resample_axes clamps its weighted means itself, except in mode "constant", whose zeros extend the range.
    if clip and (order > 1 or (mode == "constant" and (order or any(resizing_args.sigmas)))):
        _clip(array_module(image), image, result, mode == "constant")
    return result


def _smoothed(image: Array, mode: str, sigmas: Sequence[float]) -> Array:
    """Smooth by a Gaussian, as SciPy's ``gaussian_filter`` does."""
    if not any(sigmas):
        return image
    return resizing.resample_axes(image, image.shape, order=0, mode=mode, sigmas=sigmas)


def _sampled_at_centres(image: Array, shape: tuple[int, ...], order: int, mode: str) -> Array:
    """Sample at the centres of new voxels: the centre of voxel i is at (i + 1/2) factor - 1/2 in the image."""
    factors, offset = np.transpose([centred(n, m) for n, m in zip(image.shape, shape, strict=True)])
    return sample_grid(image, GridMap(np.diag(factors), offset), Spline(order, mode), Target(shape, image.dtype))


def _clip(xp: ModuleType, image: Array, result: Array, zeros_outside: bool) -> None:
    """Limit a result to the range of the image, without waiting for the device.

    With `zeros_outside` the range is extended to 0 if 0 lies within the range of the result, as in scikit-image.
    """
    low, high = _range(xp, image)
    if zeros_outside:
        lowest, highest = _range(xp, result)
        has_zero = (lowest <= 0) & (highest >= 0)
        low = xp.where(has_zero, xp.minimum(low, 0), low)
        high = xp.where(has_zero, xp.maximum(high, 0), high)
    xp.maximum(result, low.astype(result.dtype), out=result)
    xp.minimum(result, high.astype(result.dtype), out=result)


def _range(xp: ModuleType, image: Array) -> tuple[Array, Array]:
    """Return minimum and maximum as arrays, ignoring NaN."""
    if image.dtype.kind != "f":
        return xp.asarray(image.min()), xp.asarray(image.max())
    is_nan = xp.isnan(image)
    low = xp.where(is_nan, image.dtype.type(np.inf), image).min()
    high = xp.where(is_nan, image.dtype.type(-np.inf), image).max()
    return xp.asarray(low), xp.asarray(high)


def _unit_range(image: Array) -> Array:
    """Scale unsigned integers into [0, 1] and signed ones into [-1, 1], as scikit-image does."""
    scaled: Array = image.astype(np.float32) * np.float32(1 / np.iinfo(image.dtype).max)
    return scaled if image.dtype.kind == "u" else array_module(image).maximum(scaled, np.float32(-1))


def resample_volume(
    volume: Array,
    current_spacing: Sequence[float],
    target_spacing: Sequence[float] | float,
    *,
    order: int = 1,
    anti_aliasing: bool = True,
) -> tuple[Array, tuple[float, ...]]:
    """Resample a volume to another voxel spacing.

    The extent of the volume (voxels times spacing) is kept, and divided into the nearest whole number of voxels. Each
    voxel of the result is sampled at its centre.

    Parameters
    ----------
    volume : numpy.ndarray or cupy.ndarray
        Of any rank; integers and floats.
    current_spacing : sequence of float
        Voxel spacing of the volume, one number for each axis.
    target_spacing : sequence of float or float
        Wanted voxel spacing; one number for all axes alike.
    order : int
        Spline order: 0 nearest, 1 linear, up to 5.
    anti_aliasing : bool
        Whether to smooth along axes that get coarser, by a Gaussian of (factor - 1) / 2 voxels as scikit-image's
        ``resize`` does. Order 0, whose voxels may be labels, is never smoothed.

    Returns
    -------
    volume : numpy.ndarray or cupy.ndarray
        float64 for float64, else float32, in the memory of the input.
    spacing : tuple of float
        Voxel spacing of the result.

    Raises
    ------
    ValueError
        Spacings that are not positive numbers, one for each axis, or so small that voxels cannot be counted; an `order`
        that is no integer from 0 to 5; an empty volume.
    TypeError
        A volume that is no NumPy or CuPy array of integers or floats.
    """
    check_image(volume)
    current = _spacing("current_spacing", current_spacing, volume.ndim)
    target = _spacing("target_spacing", target_spacing, volume.ndim)
    check_spline(order, "nearest")
    if volume.dtype.kind not in "iuf":
        raise TypeError(f"a volume of {volume.dtype} cannot be resampled: integers and floats can")
    if not all(volume.shape):
        raise ValueError(f"a volume of shape {volume.shape} has nothing to resample")
    sizes = [n * c / t for n, c, t in zip(volume.shape, current, target, strict=True)]
    if not max(sizes) < 2**63:
        raise ValueError(f"target_spacing={target_spacing!r}: voxels so small are too many to count")
    shape = tuple(max(1, round(size)) for size in sizes)
    factors = tuple(n / m for n, m in zip(volume.shape, shape, strict=True))
    spacing = tuple(c * f for c, f in zip(current, factors, strict=True))
    sigmas = anti_aliasing_sigmas(np.diag(factors).tolist()) if anti_aliasing and order > 0 else (0.0,) * volume.ndim
    dtype = np.dtype(np.float64 if volume.dtype == np.float64 else np.float32)
    if order <= 1:
        return resizing.resample_axes(volume, shape, order=order, mode="nearest", sigmas=sigmas, dtype=dtype), spacing
    result = volume.astype(dtype)
    if shape == volume.shape:
        return result, spacing
    return _sampled_at_centres(_smoothed(result, "nearest", sigmas), shape, order, "nearest"), spacing


def _spacing(name: str, value: Sequence[float] | float, rank: int) -> tuple[float, ...]:
    values = read_per_axis(name, value, rank)
    if min(values, default=1.0) <= 0:
        raise ValueError(f"{name}={value!r}: a volume of {rank} axes needs a positive number for each")
    return values
