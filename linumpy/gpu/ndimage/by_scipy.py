"""SciPy's ``ndimage`` for NumPy arrays, extended by half precision, saturating integers and NaN coordinates.

In: a NumPy array and a call of SciPy. Out: SciPy's result, in the requested dtype or array.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType

import numpy as np

from linumpy.arrays import Array
from linumpy.gpu.ndimage.arguments import Spline, Target
from linumpy.gpu.rounding import rounded

#: A call of a function of ``scipy.ndimage``: takes an image and ``output`` (an array, or the dtype of a new array), and
#: returns the result.
ScipyCall = Callable[[Array, Array | np.dtype], Array]

_CONSTANT = ("constant", "grid-constant")
#: From here on doubles have no fraction to interpolate with: FARTHEST of boundary.cuh.
_FARTHEST = 2.0**52
#: A coordinate outside any image and its padding.
_OUTSIDE = -1000.0


def sample_at(image: Array, coordinates: Array, spline: Spline, target: Target) -> Array:
    """Sample at coordinates (rank, ...).

    SciPy reads undefined addresses for NaN and infinity. Here the result is `cval` in the constant modes, and NaN (0 in
    integers) in the others; with "nearest" an infinite coordinate means the outermost voxel.
    """
    points, outside = _finite(np.asarray(coordinates), spline.mode)
    if points.ndim == 1:
        points = points[:, None]  # SciPy needs an axis of points
    shape = points.shape[1:]
    call = scipy_call("map_coordinates", points, **spline.options)
    out = None if target.out is None else target.out.reshape(shape)
    result = transform(image, spline, Target(shape, target.dtype, out), call).reshape(target.shape)
    if outside is not None and spline.mode not in _CONSTANT:
        undefined = {"c": complex(np.nan, np.nan), "f": np.nan}
        result[outside] = undefined.get(result.dtype.kind, 0)
    return target.take(result)


def scipy_call(name: str, *arguments: object, **keywords: object) -> ScipyCall:
    """Return a call of a function of ``scipy.ndimage``; `arguments` come before its ``output``."""

    def call(source: Array, output: Array | np.dtype) -> Array:
        from scipy import ndimage

        return getattr(ndimage, name)(source, *arguments, output, **keywords)

    return call


def displaced(field: Array, sizes: Sequence[float] | None, xp: ModuleType) -> Array:
    """Convert displacements to coordinates in float64.

    `sizes` is the size of a voxel along each axis, in the unit of `field`; None if `field` is in voxels.
    """
    coordinates = field.astype(np.float64)
    for axis, row in enumerate(coordinates):
        if sizes is not None:
            row /= sizes[axis]
        row += xp.arange(row.shape[axis]).reshape([-1 if other == axis else 1 for other in range(row.ndim)])
    return coordinates


def transform(image: Array, spline: Spline, target: Target, call: ScipyCall) -> Array:
    """Call SciPy with dtypes that it supports and casts correctly; an empty result needs no call.

    `spline`: interpolation parameters: a `cval` that is not finite must saturate, too. `call`: returned by
    :func:`scipy_call`.

    `ValueError`: An image without voxels.
    """
    if target.shape and not all(target.shape):
        return target.take(np.empty(target.shape, target.dtype))
    if not image.size:
        raise ValueError(f"an image of shape {image.shape} has nothing to sample")
    source = image.astype(np.float32) if image.dtype == np.float16 else image
    call_dtype = np.dtype(np.float32) if target.dtype == np.float16 else target.dtype
    # SciPy casts to signed integers and to uint64 in C, where the result is undefined for NaN and values out of range.
    is_uint64 = call_dtype.kind == "u" and call_dtype.itemsize == 8
    if is_uint64 or (call_dtype.kind == "i" and (image.dtype.kind == "f" or not np.isfinite(spline.cval))):
        call_dtype = np.dtype(np.float64)
    if call_dtype == target.dtype:
        # SciPy reads voxels that it has overwritten if the output shares memory with the image.
        if target.out is None or np.may_share_memory(target.out, source):
            return target.take(call(source, call_dtype))
        return target.take(call(source, target.out))
    return target.take(rounded(call(source, call_dtype), target.dtype.newbyteorder("=")))


def _finite(coordinates: np.ndarray, mode: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Replace the coordinates of points with a NaN or a number of 2**52 or more; also return their mask, or None.

    In the constant modes these points move outside the image, in the others to 0. With "nearest" large and infinite
    coordinates are clipped first, so that only NaN remains.
    """
    if coordinates.dtype.kind != "f":
        return coordinates, None
    if coordinates.dtype == np.float16:
        coordinates = coordinates.astype(np.float32)
    if mode == "nearest":
        coordinates = np.clip(coordinates, -_FARTHEST / 2, _FARTHEST / 2)
    outside = ~(np.abs(coordinates) < _FARTHEST).all(axis=0)
    if not outside.any():
        return coordinates, None
    return np.where(outside, coordinates.dtype.type(_OUTSIDE if mode in _CONSTANT else 0), coordinates), outside
