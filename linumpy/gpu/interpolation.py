"""Resample images where they are: CuPy in, CuPy out; NumPy in, NumPy out.

In: an image, and places, a map, or voxel spacings. Out: samples. NumPy arrays are answered by SciPy. CuPy arrays of two
and three axes are sampled by this package's kernels for orders 0, 1 and 3; all else goes to ``cupyx.scipy.ndimage``.
`resize` and `resample_volume` smooth and sample an image of any rank axis by axis, orders 0 and 1 by kernels of their
own (:mod:`~linumpy.gpu.resizing`). Spacings are in µm, or in any one unit.

float32 results are within 1e-5 of SciPy's, relative to the range of the image; at order 0, and where integers are
rounded, places that lie next to a tie may be decided the other way. Integers are rounded, halves away from zero, and
saturate; float16 beyond 65504 is infinity. The dtype of a result is that of the image unless `output` says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from linumpy.device import array_module, is_device_array
from linumpy.gpu import resizing, sampling, spline
from linumpy.gpu.interpolation_args import (
    Resizing,
    check_image,
    check_spline,
    read_affine,
    read_output,
    read_resizing,
    read_shape,
)

#: SciPy adds so many voxels at either end before it filters for a spline in the modes that have no filter of their own.
_SPLINE_PAD = 12
_PADDED = ("nearest", "grid-constant")


def map_coordinates(
    image: Any,
    coordinates: Any,
    *,
    order: int = 1,
    mode: str = "constant",
    cval: float = 0.0,
    prefilter: bool = True,
    output: Any = None,
) -> Any:
    """Sample an image at given places.

    Parameters
    ----------
    image : numpy.ndarray or cupy.ndarray
        Of any rank.
    coordinates : numpy.ndarray or cupy.ndarray, (rank, ...)
        Places in voxels, one row for each axis of the image; where the image is. Where one is NaN or infinite the
        result is `cval` in the constant modes.
    order : int
        Of the spline: 0 nearest, 1 linear, up to 5.
    mode : str
        What lies outside, by SciPy's names: ``"constant"``, ``"grid-constant"``, ``"nearest"``, ``"reflect"``,
        ``"mirror"``, ``"wrap"``, ``"grid-wrap"``.
    cval : float
        The value outside, for the constant modes.
    prefilter : bool
        Whether to find the spline's coefficients first, for orders above 1. False where the image holds them already.
    output : dtype or array, optional
        Dtype of the result, or where to put it.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        Of the shape of one row of `coordinates`.

    Raises
    ------
    ValueError
        An `order`, `mode` or shape that does not fit.
    TypeError
        An image that is not made of numbers; an image and coordinates that are not on the same side.
    """
    check_image(image)
    check_spline(order, mode)
    if is_device_array(coordinates) != is_device_array(image):
        raise TypeError("image and coordinates must both be on the GPU, or both on the host")
    if coordinates.shape[:1] != (image.ndim,):
        raise ValueError(f"coordinates of shape {coordinates.shape}: an image of {image.ndim} axes needs as many rows")
    shape = tuple(coordinates.shape[1:])
    dtype, out = read_output(output, image.dtype, shape)
    if not _is_ours(image, dtype, order, mode):
        return _ndimage(image).map_coordinates(
            image, coordinates, output if output is not None else dtype, order, mode, cval, prefilter
        )
    places = sampling.contiguous(coordinates)
    if places.dtype.str[1:] not in ("f4", "f8"):
        places = places.astype(np.float64)
    source, pad = _coefficients(image, order, mode, cval, prefilter)
    result = _result(image, shape, dtype, out)
    sampling.sample_points(source, places, sampling.Sampler(order, mode, float(cval), pad), result)
    return _into(result, out)


def affine_transform(
    image: Any,
    matrix: Any,
    offset: Any = 0.0,
    *,
    output_shape: Sequence[int] | None = None,
    order: int = 1,
    mode: str = "constant",
    cval: float = 0.0,
    prefilter: bool = True,
    output: Any = None,
) -> Any:
    """Sample an image on the grid of an affine map.

    Voxel ``o`` of the result is the image at ``matrix @ o + offset``.

    Parameters
    ----------
    image : numpy.ndarray or cupy.ndarray
        Of any rank.
    matrix : array_like
        ``(rank,)`` for a diagonal, ``(rank, rank)``, ``(rank, rank + 1)`` with the offset in its last column, or
        ``(rank + 1, rank + 1)``, homogeneous.
    offset : float or array_like, (rank,)
        In voxels of the image.
    output_shape : sequence of int, optional
        Shape of the result; by default that of the image.
    order, mode, cval, prefilter, output
        As for :func:`map_coordinates`.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        Of `output_shape`.

    Raises
    ------
    ValueError
        A matrix, offset or shape that does not fit, or holds numbers that are not finite.
    TypeError
        An image that is not made of numbers.
    """
    check_image(image)
    check_spline(order, mode)
    linear, shift = read_affine(matrix, offset, image.ndim)
    shape = read_shape("output_shape", output_shape, image.shape)
    dtype, out = read_output(output, image.dtype, shape)
    if not _is_ours(image, dtype, order, mode):
        into = output if output is not None else dtype
        xp = array_module(image)
        return _ndimage(image).affine_transform(
            image, xp.asarray(linear), shift.tolist(), shape, into, order, mode, cval, prefilter
        )
    source, pad = _coefficients(image, order, mode, cval, prefilter)
    result = _result(image, shape, dtype, out)
    affine = sampling.AffineMap(tuple(map(tuple, linear.tolist())), tuple(shift.tolist()))
    sampling.sample_affine(source, affine, sampling.Sampler(order, mode, float(cval), pad), result)
    return _into(result, out)


def spline_filter(image: Any, order: int = 3, output: Any = np.float64, mode: str = "mirror") -> Any:
    """Find the coefficients of the spline that goes through an image's voxels.

    What the functions above do first for orders above 1, unless ``prefilter=False``: an image that is sampled many
    times need be filtered once.

    Parameters
    ----------
    image : numpy.ndarray or cupy.ndarray
        Of any rank. Axes of one voxel are left as they are.
    order : int
        Of the spline, 2 to 5.
    output : dtype or array
        Dtype of the coefficients, or where to put them.
    mode : str
        How the image goes on beyond its ends, by SciPy's names: ``"mirror"``, ``"reflect"`` and ``"grid-wrap"`` have
        filters of their own; ``"nearest"`` takes that of ``"reflect"``, the others that of ``"mirror"``.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        Of the image's shape.

    Raises
    ------
    ValueError
        An `order`, `mode` or `output` that does not fit.
    TypeError
        An image that is not made of numbers.

    Notes
    -----
    On a device, this package's kernels filter for order 3, where the result is float32 or float64;
    ``cupyx.scipy.ndimage`` does all else. NaN and infinities spoil what is near them on their lines and behind; with
    SciPy's filter, all of the lines. To sample with ``"nearest"`` or ``"grid-constant"`` and ``prefilter=True`` is not
    to sample these coefficients: SciPy, and so this package, adds 12 voxels at either end first.
    """
    check_image(image)
    check_spline(order, mode)
    if order < 2:
        raise ValueError(f"order={order!r}: splines of order 2 to 5 are filtered, those below are the image itself")
    dtype, out = read_output(output, image.dtype, tuple(image.shape))
    ours = is_device_array(image) and order == 3 and dtype.str[1:] in ("f4", "f8") and spline.can_filter(image)
    if not ours:
        return _ndimage(image).spline_filter(image, order, dtype if output is None else output, mode)
    result = _result(image, tuple(image.shape), dtype, out)
    return _into(spline.filtered(image, spline.Ends(mode), dtype, result), out)


def _is_ours(image: Any, dtype: np.dtype, order: int, mode: str) -> bool:
    return is_device_array(image) and dtype.kind in "iuf" and sampling.can_sample(image, order, mode)


def _coefficients(image: Any, order: int, mode: str, cval: float, prefilter: bool) -> tuple[Any, int]:
    """Return the image as the kernels take it, contiguous, and filtered for order 3; and by how many voxels it grew."""
    if order <= 1 or not prefilter:
        return sampling.contiguous(image), 0
    kind = np.float64 if image.dtype.itemsize > 4 or image.dtype.str[1:] in ("i4", "u4") else np.float32
    if mode not in _PADDED:
        return spline.filtered(image, spline.Ends(mode), kind), 0
    # SciPy adds what of `cval` the image's dtype can hold; beyond, it is exact again.
    value = np.pad(np.zeros(1, image.dtype), 1, constant_values=cval)[0] if mode == "grid-constant" else None
    ends = spline.Ends(mode, _SPLINE_PAD, value if value is None else float(value))
    return spline.filtered(image, ends, kind), _SPLINE_PAD


def _result(image: Any, shape: tuple[int, ...], dtype: np.dtype, out: Any) -> Any:
    """The array that is written to: `out`, unless it is not contiguous or is the image itself."""
    if out is not None and out.flags.c_contiguous and not array_module(image).shares_memory(out, image):
        return out
    return array_module(image).empty(shape, dtype)


def _into(result: Any, out: Any) -> Any:
    if out is not None and result is not out:
        out[...] = result
    return result if out is None else out


def resize(
    image: Any,
    output_shape: Sequence[int],
    *,
    order: int = 1,
    mode: str = "reflect",
    anti_aliasing: bool | None = None,
    anti_aliasing_sigma: float | Sequence[float] | None = None,
    preserve_range: bool = True,
    clip: bool = True,
) -> Any:
    """Resize an image, as scikit-image's ``resize`` does.

    The corners of the image stay where they are: voxel i of the result has its centre at (i + 1/2) n / m - 1/2, for an
    axis of n voxels that gets m. scikit-image computes integers in float64, this function in float32; integers that
    are smoothed although the order is 0 are rounded once, not after every axis.

    Parameters
    ----------
    image : numpy.ndarray or cupy.ndarray
        Of any rank; integers and floats, and booleans at order 0 without smoothing.
    output_shape : sequence of int
        One size for each axis. Without the last, that axis (of channels) keeps its size; further sizes are those of
        axes that the image does not have yet.
    order : int
        Of the spline: 0 nearest, 1 linear, up to 5.
    mode : str
        What lies outside, by the names of ``numpy.pad``: ``"reflect"``, ``"symmetric"``, ``"edge"`` (or
        ``"nearest"``), ``"wrap"``, ``"constant"`` (zero).
    anti_aliasing : bool, optional
        Whether to smooth by a Gaussian first; by default where an axis shrinks, but not integers at order 0.
    anti_aliasing_sigma : float or sequence of float, optional
        Of that Gaussian, in voxels of the image; by default (factor - 1) / 2 along axes that shrink.
    preserve_range : bool
        False scales integers by their dtype's range first, into [0, 1] or [-1, 1], for orders above 0.
    clip : bool
        Whether the result stays within the range of the image, where splines overshoot or zeros lie outside.

    Returns
    -------
    numpy.ndarray or cupy.ndarray
        Of `output_shape`, where the image is: float64 for float64, else float32; at order 0 integers and booleans stay
        what they are.

    Raises
    ------
    ValueError
        An order, mode, shape or sigma that does not fit; an empty image; booleans that would be smoothed or
        interpolated.
    TypeError
        An image that is complex or not made of numbers.
    """
    asked = read_resizing(image, output_shape, order, mode, anti_aliasing, anti_aliasing_sigma)
    image = image.reshape(asked.image_shape)
    if not preserve_range and order > 0 and image.dtype.kind in "iu":
        image = _unit_range(image)
    dtype = image.dtype.newbyteorder("=") if order == 0 and image.dtype.kind in "biu" else None
    if order <= 1:
        result = resizing.resample_axes(
            image, asked.shape, order=order, mode=asked.mode, sigmas=asked.sigmas, dtype=dtype
        )
    else:
        result = _resize_by_splines(image, asked, order)
    # Weighted means stay within the range by themselves, unless zeros from outside are among what they weight.
    if clip and (order > 1 or (mode == "constant" and (order or any(asked.sigmas)))):
        _clip(array_module(image), image, result, mode == "constant")
    return result


def _resize_by_splines(image: Any, asked: Resizing, order: int) -> Any:
    result = image.astype(np.float64 if image.dtype == np.float64 else np.float32)
    if any(asked.sigmas):
        result = _ndimage(image).gaussian_filter(result, asked.sigmas, mode=asked.mode.removeprefix("grid-"))
    factors = [n / m for n, m in zip(image.shape, asked.shape, strict=True)]
    offset = [(factor - 1) / 2 for factor in factors]
    return affine_transform(result, factors, offset, output_shape=asked.shape, order=order, mode=asked.mode)


def _clip(xp: ModuleType, image: Any, result: Any, zeros_outside: bool) -> None:
    """Limit a result to the range of the image, and to zero where it reaches it; as scikit-image, without a wait."""
    low, high = _range(xp, image)
    if zeros_outside:
        lowest, highest = _range(xp, result)
        reached = (lowest <= 0) & (highest >= 0)
        low = xp.where(reached, xp.minimum(low, 0), low)
        high = xp.where(reached, xp.maximum(high, 0), high)
    xp.maximum(result, low.astype(result.dtype), out=result)
    xp.minimum(result, high.astype(result.dtype), out=result)


def _range(xp: ModuleType, image: Any) -> tuple[Any, Any]:
    """Find the least and the largest number, as arrays; what is NaN does not count."""
    if image.dtype.kind != "f":
        return xp.asarray(image.min()), xp.asarray(image.max())
    unknown = xp.isnan(image)
    low = xp.where(unknown, image.dtype.type(np.inf), image).min()
    high = xp.where(unknown, image.dtype.type(-np.inf), image).max()
    return xp.asarray(low), xp.asarray(high)


def _unit_range(image: Any) -> Any:
    """Scale integers into [0, 1], or [-1, 1] where they have a sign, as scikit-image does."""
    scaled = image.astype(np.float32) * np.float32(1 / np.iinfo(image.dtype).max)
    return scaled if image.dtype.kind == "u" else array_module(image).maximum(scaled, np.float32(-1))


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
    sigmas = [max(0.0, (factor - 1) / 2) if anti_aliasing else 0.0 for factor in factors]
    dtype = np.dtype(np.float64 if volume.dtype == np.float64 else np.float32)
    if order <= 1:
        return resizing.resample_axes(volume, shape, order=order, mode="nearest", sigmas=sigmas, dtype=dtype), reached
    result = volume.astype(dtype)
    if shape == volume.shape:
        return result, reached
    if any(sigmas):
        result = _ndimage(volume).gaussian_filter(result, sigmas, mode="nearest")
    # The centre of voxel i of the result lies at voxel (i + 1/2) factor - 1/2 of the volume.
    offset = [(factor - 1) / 2 for factor in factors]
    return affine_transform(result, factors, offset, output_shape=shape, order=order, mode="nearest"), reached


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
