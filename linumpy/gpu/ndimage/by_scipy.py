"""SciPy's ``ndimage`` for NumPy arrays, and what it lacks there: half precision, saturation of 64-bit integers, NaN.

In: a NumPy array and the call that SciPy is to make of it. Out: its result, in the dtype and the array asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from linumpy.arrays import Array
from linumpy.gpu.ndimage.target import Spline, Target
from linumpy.gpu.rounding import rounded

_CONSTANT = ("constant", "grid-constant")
#: Beyond this no double has a fraction left to interpolate with: FARTHEST of boundary.cuh.
_FARTHEST = 2.0**52
#: A coordinate that is outside of every image, with its pad.
_OUTSIDE = -1000.0


def sample_at(image: Array, coordinates: Array, how: Spline, target: Target) -> Array:
    """Sample at coordinates, (rank, ...); SciPy knows no NaN and no infinity, and reads anywhere for them."""
    from scipy import ndimage

    points, lost = _finite(np.asarray(coordinates), how.mode)
    if points.ndim == 1:
        points = points[:, None]  # SciPy wants an axis of points
    shape = points.shape[1:]

    def call(source: np.ndarray, output: Any) -> np.ndarray:
        return ndimage.map_coordinates(source, points, output, **how.options)

    out = None if target.out is None else target.out.reshape(shape)
    result = transform(image, how, Target(shape, target.dtype, out), call).reshape(target.shape)
    if lost is not None and how.mode not in _CONSTANT:
        nothing = {"c": complex(np.nan, np.nan), "f": np.nan}
        result[lost] = nothing.get(result.dtype.kind, 0)
    return target.take(result)


def displaced(field: Array, sizes: Any, xp: ModuleType) -> Array:
    """Write out the coordinates of displaced voxels, in float64."""
    coordinates = field.astype(np.float64)
    for axis, row in enumerate(coordinates):
        if sizes is not None:
            row /= sizes[axis]
        row += xp.arange(row.shape[axis]).reshape([-1 if other == axis else 1 for other in range(row.ndim)])
    return coordinates


def transform(image: Array, how: Spline, target: Target, call: Callable[[Any, Any], Any]) -> Array:
    """Call SciPy with dtypes that it knows and casts as it should; nothing is sampled where there is nothing to fill.

    Parameters
    ----------
    image : numpy.ndarray
        As the caller gave it.
    how : Spline
        Its constant value decides what a result can be.
    target : Target
        Where the result goes.
    call : callable
        Takes an image and ``output=`` of SciPy, and returns the result.
    """
    if target.shape and not all(target.shape):
        return target.take(np.empty(target.shape, target.dtype))
    if not image.size:
        raise ValueError(f"an image of shape {image.shape} has nothing to sample")
    source = image.astype(np.float32) if image.dtype == np.float16 else image
    kind = np.dtype(np.float32) if target.dtype == np.float16 else target.dtype
    # SciPy casts what 64 bits do not hold, and NaN, by C's rules, which leave it open what comes of that.
    overflows = kind.kind == "u" and kind.itemsize == 8
    if overflows or (kind.kind == "i" and (image.dtype.kind == "f" or not np.isfinite(how.cval))):
        kind = np.dtype(np.float64)
    if kind == target.dtype:
        return target.take(call(source, kind if target.out is None else target.out))
    return target.take(rounded(call(source, kind), target.dtype.newbyteorder("=")))


def _finite(coordinates: np.ndarray, mode: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Replace coordinates that are no numbers, or infinitely far; and say which ones they are. None for none.

    In the constant modes they go outside. With "nearest" only NaN is nowhere.
    """
    if coordinates.dtype.kind != "f":
        return coordinates, None
    if coordinates.dtype == np.float16:
        coordinates = coordinates.astype(np.float32)
    if mode == "nearest":
        coordinates = np.clip(coordinates, -_FARTHEST / 2, _FARTHEST / 2)
    lost = ~(np.abs(coordinates) < _FARTHEST).all(axis=0)
    if not lost.any():
        return coordinates, None
    return np.where(lost, coordinates.dtype.type(_OUTSIDE if mode in _CONSTANT else 0), coordinates), lost
